# SPDX-License-Identifier: Apache-2.0
"""Two-level collectives of a grid's groups: between the nodes that a group's ranks are on, and inside these.

`ExecutionOptions.two_level` asks for them, for weights that z gathers, for gradients that are scattered over z, and for
sums of gradients over data. Groups on one node, of experts, and on nodes of unequal size (with "auto") have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist

from stretto.axes import BATCH, LOSS, REPLICAS, SHARDS, check_sizes
from stretto.cluster.two_level import ALGORITHMS, LEVELED, Collective
from stretto.collectives.two_level import Levels, Nodes, TwoLevelGroup, Work, exchange_hosts, name_nodes
from stretto.execution import TwoLevel

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.parallel.grid import Grid

_AXES = ("z", SHARDS, "data", BATCH, REPLICAS, LOSS)


class TwoLevels:
    """The two-level groups of a grid, by the names of the process groups whose collectives they run.

    Its methods begin a collective of a process group in two levels; None where the library's own is to run it: the
    group has no two levels, or the model of both (`stretto.cluster.two_level`) predicts that to be faster.
    """

    def __init__(self, groups: Mapping[str, TwoLevelGroup]) -> None:
        self.groups = groups

    @classmethod
    def of(cls, grid: Grid, mode: TwoLevel) -> TwoLevels | None:
        """The groups of a grid, made at its first call for this mode; None for False. Collective.

        ValueError on all ranks if `mode` is True and the ranks of an axis are on nodes of unequal size.
        """
        if mode is False:
            return None
        if mode not in grid.two_levels:
            grid.two_levels[mode] = cls(_make_groups(grid, mode))
        return grid.two_levels[mode]

    def _find(self, kind: Collective, payload: Tensor, group: dist.ProcessGroup) -> TwoLevelGroup | None:
        two = self.groups.get(group.group_name)
        return None if two is None or two.choose(kind, payload) == "flat" else two

    def all_gather(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Work | None:
        """Begin to gather each rank's `input` into `output`, in rank order."""
        two = self._find("all_gather", input, group)
        return None if two is None else two.all_gather(output, input, async_op=True)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType
    ) -> Work | None:
        """Begin to reduce all ranks' `input`, and to leave this rank's part in `output`."""
        two = self._find("reduce_scatter", output, group)
        return None if two is None else two.reduce_scatter(output, input, op, async_op=True)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> Work | None:
        """Begin to reduce all ranks' `tensor` in place."""
        two = self._find("all_reduce", tensor, group)
        return None if two is None else two.all_reduce(tensor, op, async_op=True)

    def close(self) -> None:
        """Wait for all that was started; the library runs whatever comes then."""
        for two in self.groups.values():
            two.close()
        self.groups = {}


def _make_groups(grid: Grid, mode: TwoLevel) -> dict[str, TwoLevelGroup]:
    world, made = dist.group.WORLD, dict[str, TwoLevelGroup]()
    axes = [axis for axis in _AXES if grid.size(axis) > 1]
    if world is None or not axes:
        return made
    names = name_nodes([host for _, host in exchange_hosts(world, grid.timeout.total_seconds())])
    seen = set[str]()
    for axis in axes:
        group = grid.group(axis)
        if group.group_name in seen:  # another axis has the same group, on all ranks
            continue
        seen.add(group.group_name)
        by_ranks: dict[int, Nodes] = {}  # of the group that begins with a rank
        rows = grid.partition(check_sizes(grid.sizes).axes_of(axis))
        for row in rows:
            try:
                by_ranks[row[0]] = Nodes.of_hosts([names[rank] for rank in row])
            except ValueError as error:
                if mode is True:
                    raise ValueError(f"two_level is True, and of {axis} {error}; two_level='auto' would do") from None
        leveled = [(row, by_ranks[row[0]]) for row in rows if row[0] in by_ranks and by_ranks[row[0]].count > 1]
        inside = [[row[place] for place in node] for row, nodes in leveled for node in nodes.ranks]
        columns = [(row, column) for row, nodes in leveled for column in zip(*nodes.ranks, strict=True)]
        between = [[row[place] for place in column] for row, column in columns]
        has_inside = any(len(ranks) > 1 for ranks in inside)
        groups = [
            grid.shared_group(partition, f"{axis} {level} nodes") if partition and has_some else None
            for level, partition, has_some in (("inside", inside, has_inside), ("between", between, True))
        ]
        mine = next((nodes for row, nodes in leveled if dist.get_rank() in row), None)
        if mine is not None:
            levels = Levels(mine, groups[0] if mine.size > 1 else None, groups[1])
            algorithms = LEVELED if mode is True else ALGORITHMS
            limit = grid.timeout.total_seconds()
            made[group.group_name] = TwoLevelGroup(group, levels=levels, algorithms=algorithms, timeout=limit)
    return made
