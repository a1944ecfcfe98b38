# SPDX-License-Identifier: Apache-2.0
"""Finds ranks that are slower than the others: by the time of a step in which a rank does not wait.

All ranks need the same time for a step, since they wait for each other; the slow one waits least. Each rank adds up the
time that it waits in collectives and for messages (`counters.begin_wait`), and stores it for each window of steps.

On GPUs the host does not see when a kernel waits for other ranks: there the rank is busy while no kernel of NCCL runs
(`device_waits`), or while its host does not wait, whichever is longer. Where NCCL's times are not to be had (CUDA
graphs, gloo between ranks that share a GPU, Stretto's own kernels), the host's view is taken, which shows slow hosts
and slow data, and no slow GPUs.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.counters import WINDOW, Window

# A rank that is slower by half costs a third of the machine; less is found in noise, by evaluations, for example.
SLOW = 1.5
SLOW_RANK_FILE = "slow-rank.json"  # in the folder of counters: the slow rank that was found last
CHANGE = 1.25  # the factor by which the ratio must change to be reported again
MIN_OWN = 0.1  # of a step: a rank's own time on GPUs; smaller shares would be differences of two noisy numbers


@dataclass(frozen=True)
class SlowRank:
    """The slowest rank of WINDOW steps. ratio: its busy time over the median of all ranks."""

    rank: int
    ratio: float
    last_step: int

    @property
    def text(self) -> str:
        return f"slowest rank {self.rank}: {self.ratio:.1f}x the median for {WINDOW} steps, until step {self.last_step}"


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
        rank: each.busy if each.view == "cpu" else max(a_step - (most - each.busy), MIN_OWN * a_step)
        for rank, each in windows.items()
    }
