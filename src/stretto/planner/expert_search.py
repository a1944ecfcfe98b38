# SPDX-License-Identifier: Apache-2.0
"""Chooses in which ways a grid's ranks may divide experts, before any of them is predicted as a whole."""

from stretto.axes import NAMES, GridSizes
from stretto.cluster import Cluster
from stretto.planner.expert_cost import expert_seconds, expert_volume, expert_weights
from stretto.planner.grids import why_impossible, why_no_experts
from stretto.planner.search_space import SearchSpace
from stretto.planner.workload import StepWorkload

# Of each grid, so many ways to divide experts are predicted as a whole: those that send for the shortest time, and the
# one that holds fewest of the experts' weights at once.
MOST_WAYS = 3


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
            return [(GridSizes(**{axis: grid[axis] for axis in NAMES}), impossible)]
    if len(grids) == 1:
        return [(grids[0], None)]
    possible = [each for each in grids if why_no_experts(model, each) is None]
    if len(possible) > MOST_WAYS:
        layer = model.kinds[-1].model
        frugal = min(possible, key=lambda each: expert_weights(layer, each))
        times = {each: sending_seconds(workload, each, cluster) for each in possible}
        possible = sorted(possible, key=lambda each: times[each])[:MOST_WAYS]
        possible += [frugal] * (frugal not in possible)
    return [(each, None) for each in possible]


def sending_seconds(workload: StepWorkload, grid: GridSizes, cluster: Cluster) -> float:
    """Seconds in which experts send in a step, but for start-ups and what is sent again.

    What goes over z is sent under computation, which it slows down: a fifth of it counts, as of what is hidden.
    """
    volume = expert_volume(workload.model, grid, workload.tokens / grid.batch_parts, workload.element)
    sent = expert_seconds(volume, grid, cluster)
    of_weights = sent.all_gather_z + sent.reduce_scatter_z + sent.all_reduce_data
    return sent.total - 0.8 * of_weights
