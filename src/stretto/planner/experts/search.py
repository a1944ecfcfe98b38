# SPDX-License-Identifier: Apache-2.0
"""Chooses in which ways a grid's ranks may divide experts, and keeps of each grid the best way that was found."""

from collections.abc import Sequence

from stretto.axes import NAMES, GridSizes
from stretto.cluster import Cluster
from stretto.planner.experts.cost import expert_seconds, expert_volume, expert_weights
from stretto.planner.grid_plan import Candidate
from stretto.planner.grids import why_impossible, why_no_experts
from stretto.planner.search_space import SearchSpace
from stretto.planner.workload import StepWorkload

# Of each grid, so many ways to divide experts are predicted as a whole: those that send for the shortest time, and the
# one that holds fewest of the experts' weights at once.
MAX_WAYS = 3


def choose_expert_grids(
    workload: StepWorkload, cluster: Cluster, space: SearchSpace, grid: GridSizes
) -> list[tuple[GridSizes, str | None]]:
    """A grid with the ways to divide experts that are worth to be predicted, each with why it is impossible.

    One that is impossible is given where all are.
    """
    model = workload.model
    grids = space.list_grids(model, grid)
    if impossible := why_impossible(model, grids[0], workload.batch):
        found = next((each for each in grids[1:] if why_impossible(model, each, workload.batch) is None), None)
        if found is None:
            return [(GridSizes(**grid.sizes() | {"expert": 1, "expert_tensor": "cut"}), impossible)]
    if len(grids) == 1:
        return [(grids[0], None)]
    possible = [each for each in grids if why_no_experts(model, each) is None]
    if len(possible) > MAX_WAYS:
        layer = model.kinds[-1].model
        frugal = min(possible, key=lambda each: expert_weights(layer, each))
        times = {each: sending_seconds(workload, each, cluster) for each in possible}
        possible = sorted(possible, key=lambda each: times[each])[:MAX_WAYS]
        possible += [frugal] * (frugal not in possible)
    return [(each, None) for each in possible]


def sending_seconds(workload: StepWorkload, grid: GridSizes, cluster: Cluster) -> float:
    """Seconds of experts' communication in a step, without start-ups and recomputation.

    What goes over z is sent under computation, which it slows down: a fifth of it counts, as of what is hidden.
    """
    tokens = workload.tokens / grid.token_parts
    volume = expert_volume(workload.model, grid, tokens, workload.element, gathers=workload.gathered_share)
    sent = expert_seconds(volume, grid, cluster)
    of_weights = sent.all_gather_z + sent.reduce_scatter_z + sent.all_reduce_data
    return sent.total - 0.8 * of_weights


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
    """Choose for each grid the best way to divide experts."""
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        of_grid = _without_experts(candidate.config.grid)
        best[of_grid] = min(candidate, best.get(of_grid, candidate), key=lambda each: each.rank_on_its_grid)
    return list(best.values())
