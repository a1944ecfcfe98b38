# SPDX-License-Identifier: Apache-2.0
"""What this process works on: the phase and the step that `note` was told last. Needs no torch.

The training loop, checkpoints and data call `note`, `phase` and `advance`; the heartbeat's thread reads `current`.
A process has one main thread that trains, so there is one value for the process.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

PHASES = ("start", "build", "load", "data", "step", "evaluate", "save", "exit")
# Phases whose work other ranks need not have reached either, and that import or compile for unknown times.
STARTING = ("start", "build")


@dataclass(frozen=True)
class Progress:
    """phase: one of PHASES. count: how often progress was noted. at: when last, by the monotonic clock."""

    phase: str = "start"
    step: int | None = None
    count: int = 0
    at: float = field(default_factory=time.monotonic)


_progress = Progress()


def current() -> Progress:
    """What was noted last."""
    return _progress


def note(phase: str, step: int | None = None) -> None:
    """Note that this rank has entered a phase (of `step`; None: of the step that was noted last), which is progress.

    Takes under a microsecond, and works whether or not a heartbeat runs. ValueError for an unknown phase.
    """
    global _progress
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}, but must be one of {', '.join(PHASES)}")
    before = _progress
    _progress = Progress(phase, before.step if step is None else step, before.count + 1, time.monotonic())


def advance() -> None:
    """Note progress within a phase that may take long, for example after each piece of a checkpoint."""
    global _progress
    _progress = replace(_progress, count=_progress.count + 1, at=time.monotonic())


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Note a phase for the block, and the phase before it again after the block, if it does not raise."""
    before = _progress
    note(name, step)
    yield
    note(before.phase, before.step)
