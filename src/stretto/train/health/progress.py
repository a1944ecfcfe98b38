# SPDX-License-Identifier: Apache-2.0
"""Keeps what this process works on: the phase and the step of the last call of `note`. Needs no torch.

The training loop, checkpoints and data call `note`, `phase` and `advance`; the heartbeat's thread reads `current`.
A process has one main thread that trains, so there is one value for the process. It is also kept in a file without a
name that is mapped into memory, which other processes of the machine read when this one is stopped (`read_place`).
"""

import mmap
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PHASES = ("start", "build", "load", "data", "step", "evaluate", "save", "exit")
STARTING = ("start", "build")  # phases that import and compile for unknown times
WRITES_FILE = "stretto-save-file"  # how the names of threads begin that write a checkpoint's files
WITH_THREADS = ("load", "save", "exit")  # phases in which the main thread may wait for threads that read and write

_LAYOUT = struct.Struct("<qqq")  # the phase's number, the step (-1: none), how many notes there have been


@dataclass(frozen=True)
class Progress:
    """phase: one of PHASES. count: how many notes of a phase there have been."""

    phase: str
    step: int | None
    count: int


@dataclass(frozen=True)
class Writing:
    """A checkpoint that a background thread writes. step: of the checkpoint.

    progress: returns a value that changes while this rank writes. group: the name of the group in whose collectives
    only this thread is while it writes.
    """

    step: int
    thread: int
    progress: Callable[[], object]
    group: str


class _SharedPlace:
    """The mapped file in which other processes find this one's phase and step."""

    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="stretto-place-")  # noqa: SIM115  (as long as the process)
        self.file.truncate(_LAYOUT.size)
        self.memory = mmap.mmap(self.file.fileno(), _LAYOUT.size)


_progress = Progress("start", None, 0)
_advances = [0, 0]  # of the main thread, of other threads
_shared: _SharedPlace | None = None
_writing: Writing | None = None
writers: set[int] = set()  # the threads that have written checkpoints


def current() -> Progress:
    """The phase and step of the last call of `note`."""
    return _progress


def count() -> tuple[int, ...]:
    """A value that changes whenever this process makes progress, by its own account."""
    return (_progress.count, *_advances[: 2 if _progress.phase in WITH_THREADS else 1])


def note(phase: str, step: int | None = None) -> None:
    """Note that this rank has entered a phase (of `step`; None: of the step that was noted last), which is progress.

    For the main thread. Takes a microsecond; works whether or not a heartbeat runs. ValueError for an unknown phase.
    """
    global _progress
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}, but must be one of {', '.join(PHASES)}")
    now = _progress = Progress(phase, _progress.step if step is None else step, _progress.count + 1)
    if _shared is not None:
        _LAYOUT.pack_into(_shared.memory, 0, PHASES.index(phase), -1 if now.step is None else now.step, now.count)


def advance() -> None:
    """Note progress within a phase that may take long, for example after each piece of a checkpoint, in any thread."""
    _advances[threading.current_thread() is not threading.main_thread()] += 1


@contextmanager
def writing(step: int, progress: Callable[[], object], group: str) -> Iterator[None]:
    """Record that this background thread writes a checkpoint in the block. See `Writing`."""
    global _writing
    _writing = Writing(step, threading.get_ident(), progress, group)
    writers.add(_writing.thread)
    try:
        yield
    finally:
        _writing = None


def current_writing() -> Writing | None:
    """The checkpoint that a background thread is writing, if any."""
    return _writing


def count_of_threads() -> int:
    """How often threads other than the main one have called `advance`."""
    return _advances[1]


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Note a phase for the block, and the phase before it again after the block, if it does not raise."""
    before = _progress
    note(name, step)
    yield
    note(before.phase, before.step)


def share() -> None:
    """Let other processes of this machine and user read the phase and the step from now on."""
    global _shared
    if _shared is None:
        _shared = _SharedPlace()
        note(_progress.phase)


def place_file() -> int | None:
    """The descriptor of the file that `read_place` reads, if `share` was called."""
    return None if _shared is None else _shared.file.fileno()


def read_place(pid: int, descriptor: int | None) -> Progress | None:
    """The phase and step of another process, whatever its state; None where they cannot be read."""
    if descriptor is None:
        return None
    try:
        with open(Path(f"/proc/{pid}/fd/{descriptor}"), "rb") as file:
            number, step, notes = _LAYOUT.unpack(file.read(_LAYOUT.size))
        return Progress(PHASES[number], None if step < 0 else step, notes)
    except (OSError, struct.error, IndexError):
        return None
