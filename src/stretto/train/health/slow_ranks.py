# SPDX-License-Identifier: Apache-2.0
"""Finds ranks that are slower than the others, on CPUs: by the time of a step in which a rank waits for nobody.

All ranks need the same time for a step, since they wait for each other; the slow one waits least. A thread looks at the
main thread every 20 ms: whether its innermost Python frame is in a call that waits for other ranks. The share of such
looks, over WINDOW steps, gives the seconds of a step in which the rank was busy. It costs less than 0.2% of a CPU.

On GPUs the host does not know when a kernel waits for other ranks, so nothing is measured there.
"""

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType

from stretto.memory.symmetric import current_wait
from stretto.train.health import progress
from stretto.train.health.beat import WAITING_CALL, line_of

WINDOW = 50  # steps: long enough that a single slow read or a collection of garbage does not count
PERIOD = 0.02  # seconds between two looks
KEPT = 4  # windows: heartbeats of different ranks are not of the same moment
# A rank that is slower by half costs a third of the machine; less is found in noise, by evaluations, for example.
SLOW = 1.5
SLOW_RANK = "slow rank"  # the job's store's key of the slow rank that was found last
CHANGE = 1.25  # the factor by which the ratio must change to be told again

Windows = tuple[tuple[int, float], ...]
"""Numbers of windows of WINDOW steps, and the seconds of a step in which the rank was busy."""


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
    """Measures how long this process's main thread is busy in a step. Call `start` once."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._waits: dict[tuple[CodeType, int], bool] = {}
        self._windows: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._thread = threading.Thread(target=self._run, name="stretto-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def windows(self) -> Windows:
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
                    self._windows.append((window, a_step * (1 - waits / looks)))
                window, first, began = noted.step // WINDOW, noted.step, time.monotonic()
                looks = waits = 0
            looks += 1
            waits += self._is_waiting()

    def _is_waiting(self) -> bool:
        if current_wait(self._main) is not None:
            return True
        frame = sys._current_frames().get(self._main) if self._main is not None else None
        if frame is None:
            return False
        key = (frame.f_code, frame.f_lineno or 0)
        if key not in self._waits:
            self._waits[key] = _waits_for_others(frame)
        return self._waits[key]


class SlowRanks:
    """Compares the windows of all ranks, and says when the slowest one is another or slower than it was."""

    def __init__(self) -> None:
        self._told: SlowRank | None = None
        self._window = -1

    def find(self, windows: Mapping[int, Windows]) -> SlowRank | None:
        """The slowest rank, if it is slow and was not told before. windows: of all ranks that train."""
        common = set.intersection(*(set(dict(each)) for each in windows.values())) if len(windows) > 1 else set()
        if not common or max(common) <= self._window:
            return None
        self._window = max(common)
        busy = {rank: dict(each)[self._window] for rank, each in windows.items()}
        slowest = max(busy, key=lambda rank: busy[rank])
        others = statistics.median(seconds for rank, seconds in busy.items() if rank != slowest or len(busy) > 2)
        ratio = busy[slowest] / max(others, 1e-6)
        if ratio < SLOW:
            self._told = None
            return None
        found = SlowRank(slowest, ratio, (self._window + 1) * WINDOW - 1)
        before = self._told
        if before is not None and before.rank == slowest and 1 / CHANGE < ratio / before.ratio < CHANGE:
            return None
        self._told = found
        return found


def _waits_for_others(frame: FrameType) -> bool:
    return WAITING_CALL.search(line_of(frame)) is not None
