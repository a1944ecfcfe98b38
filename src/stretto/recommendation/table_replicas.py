# SPDX-License-Identifier: Apache-2.0
"""2D sharding: groups of ranks that each have all tables, and average them every few steps.

Tables are exchanged within a group, of which there are `count`, so an exchange has `count` times fewer ranks, such as
those of a node. Each group updates its tables by its own samples, with the gradient of its own mean loss; every `every`
steps the ranks that have the same part average it, with the optimizer's states. With SGD and every=1 that is one group
of all ranks, up to rounding; else an approximation of it.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import group_timeout
from stretto.memory.shared_groups import SharedGroups
from stretto.parallel.comm.collectives import all_reduce

_NUMBERS = 1 << 26  # of a table that are averaged at once


class TableReplicas:
    """The groups, and how far apart they were. Made by all ranks of `group`.

    partition: the ranks of each group. group: this rank's. drift: fp32 [], on the device, the largest difference of a
    number from its average at the last one.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, every: int, device: torch.device) -> None:
        self.count, self.every = count, every
        ranks, limit = dist.get_process_group_ranks(group), timedelta(seconds=group_timeout(group))
        size = len(ranks) // count
        self.partition = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        shared, across = SharedGroups(), [ranks[place::size] for place in range(size)]
        own, same = (
            shared.get(parts, purpose, timeout=limit)
            for parts, purpose in ((self.partition, "table groups"), (across, "table replicas"))
        )
        assert own is not None
        assert same is not None
        self.group, self._same = own, same
        self.drift = torch.zeros((), device=device)
        self._steps = 0  # since the last average

    @torch.no_grad()
    def step(self, tensors: Sequence[Tensor]) -> None:
        """Average tables and states if it is time, after a step. Collective."""
        self._steps += 1
        if self._steps >= self.every:
            self.average(tensors)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tables and states now: then all groups have the same bits. Collective."""
        self._steps, drift = 0, torch.zeros_like(self.drift)
        for tensor in tensors:
            for part in tensor.detach().view(-1).split(_NUMBERS):
                wide = part.to(torch.promote_types(part.dtype, torch.float32))
                mean = all_reduce(wide.clone(), self._same) / self.count
                drift = torch.maximum(drift, (wide - mean).abs().max().float())
                part.copy_(mean)
        self.drift = all_reduce(drift, self._same, dist.ReduceOp.MAX)


def require_replicas(count: int, every: int, ranks: int) -> None:
    """ValueError unless so many ranks can be divided into so many groups."""
    if count < 1 or every < 1 or ranks % count:
        near = max(number for number in range(1, ranks + 1) if ranks % number == 0 and number <= max(count, 1))
        raise ValueError(
            f"replicas is {count} and sync_every {every}, but groups are equal parts of {ranks} ranks, and averaged "
            f"every 1 or more steps: replicas={near} and sync_every={max(every, 1)} would do"
        )
