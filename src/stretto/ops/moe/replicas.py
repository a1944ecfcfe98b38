# SPDX-License-Identifier: Apache-2.0
"""Replicas of hot experts for a step: other ranks hold their weights too, and take a part of their tokens.

Where replicas are follows from loads that were measured before, in the step before as a rule, so that no rank waits for
a router. Experts and replicas are numbered as *slots*: rank r has slots r * (local + spare) on, first its own experts,
then its replicas. `dispatch` takes slots as experts, of which `replicate` makes the weights. Nothing changes in what is
computed: each choice of a token is multiplied by the same weights once, and their gradients are summed at home.
"""

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.ops.moe.permutation import sum_dtype
from stretto.ops.operands import takes_tensors
from stretto.ops.operator import find_name, is_traced
from stretto.quantities import require_whole

SHARES = 64
"""An expert's tokens are divided among its slots in so many parts, by their number modulo SHARES."""

_LEAST = 0.01  # of the mean load of a rank, for which no weights are sent


@dataclass(frozen=True)
class ReplicaPlacement:
    """Experts and replicas on ranks: what `place_replicas` returns, the same on all of them.

    replicas: by rank, the others' experts that it holds, too, `spare` at most. slots: by expert, the slot of each of
    SHARES parts of its tokens.
    """

    ranks: int
    local: int
    spare: int
    replicas: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]
    _tables: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_slots(self) -> int:
        """The number of experts that `dispatch` is given."""
        return self.ranks * (self.local + self.spare)

    def spread(self, topk_ids: Tensor) -> Tensor:
        """The slot of each choice: topk_ids [t, k] -> [t, k] of their dtype, on their device."""
        if topk_ids.device.type == "cpu" and topk_ids.numel() and not is_traced(topk_ids):
            low, high = (int(bound) for bound in torch.aminmax(topk_ids))
            if topk_ids.is_floating_point() or low < 0 or high >= len(self.slots):
                raise ValueError(f"spread takes ids from 0 to {len(self.slots) - 1}, not {low} to {high}")
        key = topk_ids.dtype, topk_ids.device
        if key not in self._tables:
            self._tables[key] = torch.tensor(self.slots, dtype=topk_ids.dtype, device=topk_ids.device)
        parts = torch.arange(len(topk_ids), device=topk_ids.device) % SHARES
        return self._tables[key][topk_ids.long(), parts[:, None]]

    def loads(self, loads: Sequence[float]) -> list[float]:
        """The choices of each rank, if each expert's are divided evenly among its parts."""
        found = [0.0] * self.ranks
        for load, slots in zip(loads, self.slots, strict=True):
            for slot in slots:
                found[slot // (self.local + self.spare)] += load / SHARES
        return found


def place_replicas(loads: Sequence[float], ranks: int, spare: int) -> ReplicaPlacement:
    """Place replicas for these loads, the choices of each expert: ranks hold experts evenly, and `spare` replicas each.

    (Of all other ranks' experts at most.) Greedy: from the busiest rank to the idlest with a free place, the part of an
    expert that brings one of both nearest to the mean, until that helps no more. All ranks give the same loads, and so
    get the same placement. ValueError for numbers of experts that the ranks do not divide, negative loads, and fewer
    than 0 replicas.
    """
    experts = len(loads)
    require_whole("place_replicas: ranks", ranks)
    require_whole("place_replicas: spare", spare, 0)
    if experts % ranks or not experts:
        raise ValueError(f"place_replicas: {ranks} ranks do not divide {experts} experts")
    if not all(0 <= load < math.inf for load in loads):
        raise ValueError(f"place_replicas takes finite loads of 0 or more, not {reprlib.repr(list(loads))}")
    local = experts // ranks
    spare = min(spare, experts - local)  # there are no more experts of others
    width = local + spare
    home = [expert // local for expert in range(experts)]
    slots = [[home[expert] * width + expert % local] * SHARES for expert in range(experts)]
    replicas: list[list[int]] = [[] for _ in range(ranks)]
    totals = [float(sum(loads[rank * local : (rank + 1) * local])) for rank in range(ranks)]
    mean = sum(totals) / ranks
    while True:
        busiest = max(range(ranks), key=lambda rank: (totals[rank], -rank))
        free = [rank for rank in range(ranks) if len(replicas[rank]) < spare and rank != busiest]
        if not free:
            break
        idlest = min(free, key=lambda rank: (totals[rank], rank))
        excess = min(totals[busiest] - mean, mean - totals[idlest])
        best, moved = 0, 0
        for expert in range(busiest * local, (busiest + 1) * local):
            if loads[expert] <= 0 or expert in replicas[idlest]:
                continue
            at_home = sum(slot // width == busiest for slot in slots[expert])
            parts = min(int(excess * SHARES / loads[expert]), at_home)
            if parts * loads[expert] > moved * loads[best]:
                best, moved = expert, parts
        if moved * loads[best] <= _LEAST * mean * SHARES:
            break
        slot = idlest * width + local + len(replicas[idlest])
        replicas[idlest].append(best)
        parts_at_home = [part for part, one in enumerate(slots[best]) if one // width == busiest]
        for part in parts_at_home[len(parts_at_home) - moved :]:
            slots[best][part] = slot
        totals[busiest] -= moved * loads[best] / SHARES
        totals[idlest] += moved * loads[best] / SHARES
    return ReplicaPlacement(ranks, local, spare, tuple(map(tuple, replicas)), tuple(map(tuple, slots)))


@torch.compiler.disable  # a graph break, as in `dispatch`: placements differ from step to step
@takes_tensors
def replicate(weight: Tensor, placement: ReplicaPlacement, group: dist.ProcessGroup | None = None) -> Tensor:
    """The weights of this rank's slots: those of its experts, weight [local, ...], and replicas of other ranks'.

    [local + spare, ...]; places without a replica are zeros. One all-to-all sends what other ranks replicate. Its
    gradient is sent home by another, and added in the order of ranks after the home's own, in fp32 for 16-bit dtypes,
    and rounded once. ValueError for another number of experts or ranks than the placement's.
    """
    return _Replicate.apply(weight, placement, group)


def hold_replicas(
    weight: Tensor, placement: ReplicaPlacement, group: dist.ProcessGroup | None = None, sent: Tensor | None = None
) -> Tensor:
    """Compute `replicate` without gradients, for layers that have a backward pass of their own.

    sent: what `send_replicas` has returned for these arguments.
    """
    arrived = _wait(send_replicas(weight, placement, group) if sent is None else sent)
    local = placement.local
    held = weight.new_zeros(local + placement.spare, *weight.shape[1:])
    held[:local] = weight
    for place, found in zip(_order(placement, dist.get_rank(group)), arrived, strict=True):
        held[local + place] = found
    return held


def send_replicas(weight: Tensor, placement: ReplicaPlacement, group: dist.ProcessGroup | None = None) -> Tensor:
    """Begin to send what other ranks replicate; `hold_replicas` waits for what it returns. Errors: of `replicate`."""
    name, ranks, rank = find_name(group), dist.get_world_size(group), dist.get_rank(group)
    local = placement.local
    if weight.shape[:1] != (local,) or ranks != placement.ranks:
        raise ValueError(
            f"replicate: the placement is of {local} experts on each of {placement.ranks} ranks, and weight is "
            f"{list(weight.shape)} on {ranks}"
        )
    plan = _Sends.of(placement, rank)
    return _exchange(_take(weight, plan.experts), plan.sends, plan.receives, name)


def return_gradients(grad: Tensor, placement: ReplicaPlacement, group: dist.ProcessGroup | None = None) -> Tensor:
    """The gradient of `hold_replicas`' weight, for one of its result: [local + spare, ...] -> [local, ...], a part of
    the memory of `grad`, which is overwritten."""
    rank = dist.get_rank(group)
    plan = _Sends.of(placement, rank)
    places = [placement.local + place for place in _order(placement, rank)]
    arrived = _wait(_exchange(_take(grad, places), plan.receives, plan.sends, find_name(group)))
    sums: dict[int, Tensor] = {}
    for expert, found in zip(plan.experts, arrived, strict=True):
        sums[expert] = sums.get(expert, grad[expert].to(sum_dtype(grad.dtype))) + found
    for expert, total in sums.items():
        grad[expert] = total
    return grad[: placement.local]


@dataclass(frozen=True)
class _Sends:
    """The weights that travel between this rank and others: own experts that others replicate, and numbers of both."""

    experts: list[int]
    sends: list[int]
    receives: list[int]

    @classmethod
    def of(cls, placement: ReplicaPlacement, rank: int) -> "_Sends":
        local = placement.local
        theirs = [[one - rank * local for one in held if one // local == rank] for held in placement.replicas]
        own = placement.replicas[rank]
        receives = [sum(one // local == home for one in own) for home in range(placement.ranks)]
        return cls([one for held in theirs for one in held], [len(held) for held in theirs], receives)


class _Replicate(torch.autograd.Function):
    """Weights of own experts and replicas; backward, the replicas' gradients are added to those of their homes."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, placement: ReplicaPlacement, group: dist.ProcessGroup | None) -> Tensor:
        ctx.placement, ctx.group = placement, group
        return hold_replicas(weight, placement, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return return_gradients(grad.clone(), ctx.placement, ctx.group), None, None


def _order(placement: ReplicaPlacement, rank: int) -> list[int]:
    """The numbers of this rank's replicas in the order in which they come: by home, then by number."""
    own = placement.replicas[rank]
    return sorted(range(len(own)), key=lambda place: own[place] // placement.local)


def _take(rows: Tensor, numbers: list[int]) -> Tensor:
    """rows[numbers], for which the host would wait on a GPU."""
    return torch.stack([rows[number] for number in numbers]) if numbers else rows[:0]


def _exchange(rows: Tensor, sends: list[int], receives: list[int], group: str) -> Tensor:
    """Begin an all-to-all of whole experts: so many to each rank, and from each."""
    return torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), receives, sends, group)


def _wait(sent: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(sent)
