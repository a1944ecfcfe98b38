# SPDX-License-Identifier: Apache-2.0
"""The best candidates of a search so far, of each grid those of its best way to divide experts."""

from collections.abc import Sequence

from stretto.axes import NAMES, GridSizes
from stretto.planner.grid_plan import Candidate


class BestTimes:
    """The times of the best plans that were found, of each grid that of its best way to divide experts."""

    def __init__(self, listed: int, found: Sequence[Candidate] = ()) -> None:
        self._listed = listed
        self._by_grid: dict[tuple[int, ...], float] = {}
        for candidate in found:
            self.note(candidate)

    def note(self, candidate: Candidate) -> None:
        if candidate.fits:
            time, of_grid = candidate.cost.step_time, _without_experts(candidate.config.grid)
            self._by_grid[of_grid] = min(time, self._by_grid.get(of_grid, time))

    @property
    def most(self) -> float:
        """Seconds of the last of those that are listed at least; infinite where there are fewer."""
        times = sorted(self._by_grid.values())
        return times[self._listed - 1] if len(times) >= self._listed else float("inf")


def _without_experts(grid: GridSizes) -> tuple[int, ...]:
    return tuple(grid[axis] for axis in NAMES)


def best_of_each_grid(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of each grid, the best way to divide experts."""
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        of_grid = _without_experts(candidate.config.grid)
        best[of_grid] = min(candidate, best.get(of_grid, candidate), key=lambda each: each.rank_on_its_grid)
    return list(best.values())
