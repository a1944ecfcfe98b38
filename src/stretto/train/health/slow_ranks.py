# SPDX-License-Identifier: Apache-2.0
"""Finds ranks that are slower than the others: by the time of a step in which a rank does not wait.

All ranks need the same time for a step, since they wait for each other; the slow one waits least. A thread looks at the
main thread every 20 ms: whether its innermost Python frame is in a call that waits for other ranks. The share of such
looks, over WINDOW steps, gives the seconds of a step in which the rank was busy. It costs less than 0.2% of a CPU.

On GPUs the host does not see when a kernel waits for other ranks: there the rank is busy while no kernel of NCCL runs
(`device_waits`), or while its host does not wait, whichever is longer. Where NCCL's times are not to be had (CUDA
graphs, gloo between ranks that share a GPU, Stretto's own kernels), the host's view is taken, which shows slow hosts
and slow data, and no slow GPUs.
"""

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Literal

from stretto.memory.symmetric import current_wait
from stretto.train.health import device_waits, progress
from stretto.train.health.beat import WAITING_CALL, Window, line_of

WINDOW = 50  # steps: long enough that a single slow read or a collection of garbage does not count
PERIOD = 0.02  # seconds between two looks
KEPT = 4  # windows: heartbeats of different ranks are not of the same moment
# A rank that is slower by half costs a third of the machine; less is found in noise, by evaluations, for example.
SLOW = 1.5
SLOW_RANK = "slow rank"  # the job's store's key of the slow rank that was found last
CHANGE = 1.25  # the factor by which the ratio must change to be reported again

LEAST_OWN = 0.1  # of a step: a rank's own time on GPUs; smaller shares would be differences of two noisy numbers
# The main thread's function while the autograd engine runs the backward pass of GPU tensors in its own threads.
ENGINE = "_engine_run_backward"


@dataclass(frozen=True)
class SlowRank:
    """The slowest rank of WINDOW steps. ratio: its busy time over the median of all ranks."""

    rank: int
    ratio: float
    last_step: int

    @property
    def text(self) -> str:
        return f"slowest rank {self.rank}: {self.ratio:.1f}x the median for {WINDOW} steps, until step {self.last_step}"


class BusySampler:
    """Measures how long this process is busy in a step. Call `start` once.

    has_gpu: whether a GPU computes. reads_nccl: whether NCCL's times may be in torch's flight recorder.
    """

    def __init__(self, *, has_gpu: bool = False, reads_nccl: bool = False) -> None:
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._waits: dict[tuple[CodeType, int], bool] = {}
        self._windows: deque[Window] = deque(maxlen=KEPT)
        self._has_gpu, self._reads_nccl = has_gpu, reads_nccl
        self._begun = 0  # windows
        self._has_nccl = False
        self._starts: deque[device_waits.StepStart] = deque(maxlen=WINDOW)
        self._thread = threading.Thread(target=self._run, name="stretto-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def windows(self) -> tuple[Window, ...]:
        """The last windows that are complete."""
        return tuple(self._windows)

    def _run(self) -> None:
        window, first, began = -1, 0, 0.0
        looks = waits = 0
        while not self._stopped.wait(PERIOD):
            noted = progress.current()
            if noted.step is None or noted.phase not in ("data", "step"):
                continue
            if noted.step // WINDOW != window:
                if looks and noted.step - first >= WINDOW // 2:
                    a_step = (time.monotonic() - began) / (noted.step - first)
                    self._add(window, a_step, a_step * (1 - waits / looks))
                window, first, began = noted.step // WINDOW, noted.step, time.monotonic()
                looks = waits = 0
            if not self._starts or noted.step != self._starts[-1][0]:
                self._starts.append((noted.step, time.time_ns()))
            looks += 1
            waits += self._is_waiting()

    def _add(self, number: int, a_step: float, busy: float) -> None:
        """Add a window, of which the host has seen a step's seconds, and those of them without waiting."""
        view: Literal["cpu", "host", "nccl"] = "host" if self._has_gpu else "cpu"
        if self._reads_nccl:
            if not device_waits.is_due(number, self._begun, WINDOW * a_step):
                return
            self._begun += 1
            read = device_waits.read_seconds(self._starts)
            if read is not None:
                share, (a_step, in_nccl) = busy / a_step, read
                # Kernels of a rank that launches them first wait in every step, though all hosts be equally slow: a
                # rank whose host never waits is not delayed by others.
                busy, view, self._has_nccl = max(a_step - in_nccl, share * a_step), "nccl", True
            elif self._has_nccl:  # the other ranks have it, probably
                return
            elif self._begun == device_waits.FIRST_WINDOWS:
                self._reads_nccl = False
        self._windows.append(Window(number, busy, a_step, view))

    def _is_waiting(self) -> bool:
        if current_wait(self._main) is not None:
            return True
        frames = sys._current_frames()
        frame = frames.get(self._main) if self._main is not None else None
        if frame is None:
            return False
        if frame.f_code.co_name == ENGINE:
            # Threads of the engine are unknown to Python's module, or dummies there.
            known = {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread)}
            engine = [other for ident, other in frames.items() if ident not in known]
            return any(self._is_in_wait(other) for other in engine)
        return self._is_in_wait(frame)

    def _is_in_wait(self, frame: FrameType) -> bool:
        key = (frame.f_code, frame.f_lineno or 0)
        if key not in self._waits:
            self._waits[key] = _waits_for_others(frame)
        return self._waits[key]


class SlowRanks:
    """Compares the windows of all ranks, and says when the slowest one is another or slower than it was."""

    def __init__(self) -> None:
        self._reported: SlowRank | None = None
        self._window = -1

    def find(self, windows: Mapping[int, Sequence[Window]]) -> SlowRank | None:
        """The slowest rank, if it is slow and was not reported before. windows: of all ranks that train."""
        found_by = {rank: {(each.number, each.view): each for each in own} for rank, own in windows.items()}
        both = set.intersection(*(set(each) for each in found_by.values())) if len(found_by) > 1 else set()
        common = dict(both)
        if not common or max(common) <= self._window:
            return None
        self._window = max(common)
        last = self._window, common[self._window]
        busy = _own_seconds({rank: each[last] for rank, each in found_by.items()})
        slowest = max(busy, key=lambda rank: busy[rank])
        others = statistics.median(seconds for rank, seconds in busy.items() if rank != slowest or len(busy) > 2)
        ratio = busy[slowest] / max(others, 1e-6)
        if ratio < SLOW:
            self._reported = None
            return None
        found = SlowRank(slowest, ratio, (self._window + 1) * WINDOW - 1)
        before = self._reported
        if before is not None and before.rank == slowest and 1 / CHANGE < ratio / before.ratio < CHANGE:
            return None
        self._reported = found
        return found


def _own_seconds(windows: Mapping[int, Window]) -> dict[int, float]:
    """Each rank's own seconds of a step.

    On CPUs all time without waiting. On GPUs the step's time without the excess of a rank's waits over those of the one
    that waits least: NCCL's kernels also transfer data, possibly concurrently with products, and the GPU may hide host
    work.
    """
    most = max(each.busy for each in windows.values())
    a_step = statistics.median(each.step for each in windows.values())
    return {
        rank: each.busy if each.view == "cpu" else max(a_step - (most - each.busy), LEAST_OWN * a_step)
        for rank, each in windows.items()
    }


def _waits_for_others(frame: FrameType) -> bool:
    return WAITING_CALL.search(line_of(frame)) is not None
