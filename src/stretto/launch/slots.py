# SPDX-License-Identifier: Apache-2.0
"""The slots of this machine, each with room for a rank: its GPU, or on CPUs a number. Broken ones are set aside.

A slot is set aside when its rank fails twice without a checkpoint in between, or when its GPU does not answer a probe.
After `retry_after` seconds it may be tried again; it is then set aside at its first failure, for twice as long.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stretto.cluster.detection import count_gpus

logger = logging.getLogger(__name__)

FAILURES = 2  # without a checkpoint in between, after which a slot is set aside
PROBE_TIMEOUT = 60.0  # seconds, with the import of torch
PROBE = f"""
import signal
signal.alarm({PROBE_TIMEOUT:.0f} + 10)  # ends this process, should the one that asks have been killed
import torch
ones = torch.ones(512, 512, device="cuda")
raise SystemExit((ones @ ones).sum().item() != 512.0**3)  # no assert, which PYTHONOPTIMIZE would remove
"""


@dataclass
class Slot:
    """Room for a rank. gpu: what CUDA_VISIBLE_DEVICES calls it, None on CPUs and where ranks share GPUs."""

    number: int
    gpu: str | None = None
    failures: int = 0  # since the last checkpoint
    times_set_aside: int = 0
    set_aside_at: float | None = None  # time.monotonic()
    is_broken: bool = False  # its GPU did not answer

    def __str__(self) -> str:
        return f"slot {self.number}" if self.gpu is None else f"GPU {self.gpu}"


class Slots:
    """All slots of a run on this machine. probe: returns those of some GPUs that answer, by their names."""

    def __init__(
        self,
        slots: Sequence[Slot],
        retry_after: float,
        probe: Callable[[list[str]], set[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.all = list(slots)
        self._retry_after, self._clock = retry_after, clock
        self._probe = probe or probe_gpus

    @classmethod
    def of_run(cls, ranks: int, retry_after: float, *, on_gpus: bool) -> "Slots":
        """A slot for each rank on CPUs; on GPUs one for each that is visible, which may be more than the ranks."""
        gpus = _visible_gpus() if on_gpus else []
        if len(gpus) < ranks:  # CPUs, or ranks that share GPUs
            return cls([Slot(number) for number in range(ranks)], retry_after)
        return cls([Slot(number, gpu) for number, gpu in enumerate(gpus)], retry_after)

    def usable(self) -> list[Slot]:
        """The slots that are not set aside."""
        return [slot for slot in self.all if slot.set_aside_at is None]

    def take(self, ranks: int) -> list[Slot]:
        """Choose the slots for so many ranks, in the order of the ranks: those that have failed least."""
        best = sorted(self.usable(), key=lambda slot: (slot.failures, slot.number))[:ranks]
        return sorted(best, key=lambda slot: slot.number)

    def blame(self, slot: Slot) -> bool:
        """Count a failure of a slot's rank. Returns whether the slot was set aside for it."""
        slot.failures += 1
        if slot.failures >= FAILURES:
            self._set_aside(slot)
        return slot.failures >= FAILURES

    def forget_failures(self) -> None:
        """Count failures from 0 again, after a checkpoint."""
        for slot in self.usable():
            slot.failures = 0

    def probe(self, slots: Iterable[Slot]) -> list[Slot]:
        """Set aside those of the slots whose GPU does not answer. Returns them."""
        silent = self.find_silent(slots)
        for slot in silent:
            slot.is_broken = True
            self._set_aside(slot)
        return silent

    def readmit_all(self) -> None:
        """Take back every slot whose GPU answers, when there is no grid for those that are left."""
        for slot in self.all:
            if not slot.is_broken:
                slot.set_aside_at = None

    def due(self) -> list[Slot]:
        """List the slots that were set aside for long enough to be tried again."""
        now = self._clock()
        return [
            slot
            for slot in self.all
            if slot.set_aside_at is not None
            and now - slot.set_aside_at >= self._retry_after * 2 ** min(slot.times_set_aside - 1, 20)
        ]

    def readmit(self, slots: Iterable[Slot]) -> None:
        """Take slots back: one more failure without a checkpoint sets each aside again."""
        for slot in slots:
            slot.set_aside_at, slot.is_broken, slot.failures = None, False, FAILURES - 1

    def postpone(self, slots: Iterable[Slot]) -> None:
        """Let slots wait again, twice as long, whose GPU does not answer yet."""
        for slot in slots:
            self._set_aside(slot)

    def find_silent(self, slots: Iterable[Slot]) -> list[Slot]:
        """Find the slots whose GPU does not answer now. Changes nothing: any thread may call it."""
        with_gpus = [slot for slot in slots if slot.gpu is not None]
        answering = self._probe([str(slot.gpu) for slot in with_gpus]) if with_gpus else set()
        return [slot for slot in with_gpus if slot.gpu not in answering]

    def _set_aside(self, slot: Slot) -> None:
        slot.set_aside_at = self._clock()
        slot.times_set_aside += 1


def environment_of(slots: Sequence[Slot]) -> dict[str, str]:
    """The environment of the ranks on these slots: their numbers, and the GPUs that they may see."""
    gpus = [slot.gpu for slot in slots if slot.gpu is not None]
    return {"STRETTO_SLOTS": ",".join(str(slot.number) for slot in slots)} | (
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    )


def probe_gpus(gpus: list[str]) -> set[str]:
    """Find the GPUs that compute a small matrix product correctly, each in a separate process, concurrently.

    A process that does not end in time is killed and left: one that waits in the driver cannot be waited for. A GPU for
    which no process can be started (this machine has no memory left) counts as one that answers.
    """
    asked = {}
    for gpu in gpus:
        try:
            asked[gpu] = subprocess.Popen(
                [sys.executable, "-P", "-c", PROBE],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            logger.warning("GPU %s is not probed: no process can be started: %s", gpu, error.strerror or error)
    deadline = time.monotonic() + PROBE_TIMEOUT
    while any(process.poll() is None for process in asked.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in asked.values():
        if process.poll() is None:
            process.kill()
    return {gpu for gpu in gpus if gpu not in asked or asked[gpu].returncode == 0}


def _visible_gpus() -> list[str]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them, without starting CUDA in it."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = count_gpus()
    if named is None:
        return [str(number) for number in range(count)]
    return [name.strip() for name in named.split(",") if name.strip()][:count]
