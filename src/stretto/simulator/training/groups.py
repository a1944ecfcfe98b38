# SPDX-License-Identifier: Apache-2.0
"""Which ranks of a stage communicate with each other: the groups of a grid's axes, and of experts' axes."""

from collections.abc import Iterator
from itertools import product

from stretto.axes import EXPERT, EXPERT_DATA, EXPERT_Z, GridSizes, axes_of


def group_dims(grid: GridSizes, group: str) -> tuple[tuple[int, int], ...]:
    """How the ranks of a group differ: (how far apart, how many) for each axis, the innermost first.

    group: an axis, a group over several, or one of experts' axes (`stretto.axes`).
    """
    taken = grid.expert_taken
    match group:
        case _ if group == EXPERT:
            dims = [(grid.preceding(axis), taken[axis]) for axis in ("x", "z", "data")]
        case _ if group == EXPERT_Z:
            dims = [(grid.preceding("z") * taken["z"], grid.expert_z)]
        case _ if group == EXPERT_DATA:
            dims = [(grid.preceding("data") * taken["data"], grid.expert_data)]
        case _:
            dims = [(grid.preceding(axis), grid[axis]) for axis in reversed(axes_of(group))]
    return tuple((stride, size) for stride, size in dims if size > 1)


def list_groups(grid: GridSizes, group: str) -> Iterator[tuple[int, ...]]:
    """All groups of a kind among the ranks of the first stage, each in the order of its ranks; none of one rank."""
    dims = group_dims(grid, group)
    if not dims:
        return
    offsets = [sum(parts) for parts in product(*(range(0, stride * size, stride) for stride, size in dims[::-1]))]
    for rank in range(grid.stage_ranks):
        if all(rank // stride % size == 0 for stride, size in dims):
            yield tuple(rank + offset for offset in offsets)
