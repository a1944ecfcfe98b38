# SPDX-License-Identifier: Apache-2.0
"""Takes tokens to a fixed number of rows on their experts' ranks, and back, so that nothing waits for the host.

The library has no all-to-all whose sizes only the device knows. So all tokens are gathered, each rank selects its rows,
and sums by token return by a reduce-scatter, or one row a choice by several. A rank that needs more rows than there are
records it on the device, and an error is raised when the host next looks (`check_rows`).

Synchronization: each call updates the record on the call's stream, and copies it to pinned memory. The host reads that
memory without waiting, and so sees the records of calls that the device has finished.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.moe.permutation import sort_by_expert
from stretto.ops.moe.routes import CollectiveWrapper, PlaceIndex, Route, gather_rows, scatter_sum
from stretto.ops.moe.sorting import sort_copies
from stretto.ops.operator import find_group, find_known, find_name, list_kept, require_no_capture

_KEY = "moe rows"


@dataclass(frozen=True)
class FixedRoute(Route):
    """The selection of this rank's rows among all ranks' tokens, in the order of gather_group's, then group's ranks.

    groups: over which tokens are gathered, in this order; a place is one of all their tokens. index: of max_rows rows.
    needed: rows that this rank needs; fill: a scalar, what padding has: 0, or NaN after too many rows. Both are None
    where a rank has all experts, and max_rows is the number of all rows.
    """

    groups: tuple[dist.ProcessGroup, ...]
    index: PlaceIndex
    needed: Tensor | None
    fill: Tensor | None
    weights: None = None

    def send(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper, *, lends: bool = False) -> Tensor:
        """All tokens' values, [t, .] -> [all tokens, .]."""
        tokens = make()
        for group in self.groups:
            tokens = _gather(tokens, group, wrap_collective)
        return tokens

    def give_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """The ranks' sums for this rank's tokens, [all tokens, .] -> [t, .]."""
        sums = make()
        for group in reversed(self.groups):
            sums = _scatter(sums, group, wrap_collective)
        return sums

    def give_choices_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Return a row of each choice, to which the other ranks add zeros: see `Route`. One slot after another, so that
        no more rows than tokens are scattered at once."""
        rows, index = make(), self.index

        def take(slot: int) -> Tensor:
            copies = rows.index_select(0, index.positions[:, slot])
            return copies.masked_fill(~index.is_here[:, slot, None], 0)  # no product: it may be NaN

        slots = range(index.positions.shape[1])
        return torch.stack([self.give_back(partial(take, slot), wrap_collective) for slot in slots], 1).flatten(0, 1)

    @property
    def choices(self) -> Tensor:
        """Choices in their own order."""
        places, k = self.index.positions.shape
        t = places // prod(group.size() for group in self.groups)
        return torch.arange(t * k, device=self.index.positions.device).view(t, k)

    def mark_excess(self, tokens: Tensor) -> Tensor:
        """The tokens, all of NaN after too many rows."""
        return tokens if self.fill is None else tokens + self.fill.to(tokens.dtype)


def find_fixed_route(
    topk_ids: Tensor,
    num_experts: int,
    max_rows: int,
    groups: tuple[dist.ProcessGroup, ...],
    shards: int,
    shard: int,
    wrap_collective: CollectiveWrapper,
) -> FixedRoute:
    """The route of this call, which records the rows that each rank needs, unless all are known to fit.

    shards: the number of ranks that share the experts, of which this is number `shard`.
    """
    for group in groups:
        topk_ids = _gather(topk_ids, group, wrap_collective)
    if shards == 1 and max_rows == topk_ids.numel():
        return FixedRoute(groups, PlaceIndex(*sort_copies(topk_ids, num_experts)), None, None)
    order = sort_by_expert(topk_ids, num_experts)
    local = num_experts // shards
    ends = order.offsets[::local]
    needed = (ends[1:] - ends[:-1]).to(torch.int64)
    begin = ends[shard]
    offsets = (order.offsets[shard * local : (shard + 1) * local + 1] - begin).clamp(max=max_rows)
    numbers = torch.arange(max_rows, device=topk_ids.device)
    copies = topk_ids.numel()
    slots = order.slots.index_select(0, (numbers + begin).clamp(max=copies - 1)) if copies else numbers * 0
    positions = order.positions - begin
    is_here = (positions >= 0) & (positions < needed[shard])  # also copies beyond max_rows, which so become NaN
    fill = torch.where(needed[shard] > max_rows, torch.nan, 0.0)
    places = (slots // order.positions.shape[1]).to(torch.int32)
    index = PlaceIndex(slots, places, positions.clamp(0, max_rows - 1), is_here, offsets)
    find_record(groups[0], needed.device).update(needed, max_rows)
    return FixedRoute(groups, index, needed[shard], fill)


def _gather(tokens: Tensor, group: dist.ProcessGroup, wrap_collective: CollectiveWrapper) -> Tensor:
    return wrap_collective("all_gather", lambda: gather_rows(tokens, group))


def _scatter(sums: Tensor, group: dist.ProcessGroup, wrap_collective: CollectiveWrapper) -> Tensor:
    return wrap_collective("reduce_scatter", lambda: scatter_sum(sums, group))


class _Record:
    """Records for each rank of a group the most rows that it needed in a call whose limit was lower, and that limit.

    state: int64 [2, ranks], on the device. A kernel may update it, before `publish`.
    """

    def __init__(self, group: str, device: torch.device) -> None:
        self._group, ranks = group, find_group(group).size()
        self.state = torch.zeros(2, ranks, dtype=torch.int64, device=device)
        self._seen = torch.zeros(2, ranks, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")

    def update(self, needed: Tensor, max_rows: int) -> None:
        """Record a call's needs, [ranks]."""
        most, limits = self.state
        exceeds = needed > most.clamp(min=max_rows)
        torch.maximum(most, torch.where(exceeds, needed, 0), out=most)
        limits.masked_fill_(exceeds, max_rows)
        self.publish()

    def publish(self) -> None:
        """Let the host see the state when the device has come here."""
        self._seen.copy_(self.state, non_blocking=True)

    def check(self) -> None:
        """ValueError for the first rank whose record the host can see, once."""
        needed, limits = self._seen.numpy()
        ranks = needed.nonzero()[0]
        if not len(ranks):
            return
        if self.state.is_cuda:
            torch.cuda.synchronize(self.state.device)  # no copy of an earlier call may come after the reset
        rank, most, group = int(ranks[0]), int(needed.max()), find_group(self._group)
        message = (
            f"dispatch: rank {rank} of the group (rank {dist.get_global_rank(group, rank)} of all) needs {needed[rank]}"
            f" rows, more than max_rows={limits[rank]}: give max_rows={most} or more, or None. The output of that call "
            "is NaN"
        )
        self.state.zero_()
        self._seen.zero_()
        raise ValueError(message)


def check_rows(group: dist.ProcessGroup) -> None:
    """Raise for calls of `dispatch` with max_rows on this group that needed more rows; the host waits for the device.

    ValueError that names the rank and the number of rows that it needs; once. All ranks of the group raise it. Call it
    before results leave the training step for good: before an optimizer's step, say, or before a checkpoint.
    """
    devices = [torch.device("cpu")]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    for device in devices:
        look_for_errors(group, device)


def look_for_errors(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise the error of a call that the device has finished, if there is one. Nothing is waited for."""
    for record in list_kept(find_name(group)):
        if isinstance(record, _Record) and record.state.device == device:
            record.check()


def find_record(group: dist.ProcessGroup, device: torch.device, ranks: dist.ProcessGroup | None = None) -> _Record:
    """A record of the group's calls, made at the first. ranks: the ranks that it is of, by default the group's.

    ValueError for a first call while a CUDA graph is captured.
    """
    of_ranks = find_name(group if ranks is None else ranks)

    def make() -> _Record:
        require_no_capture(device)
        return _Record(of_ranks, device)

    return find_known(find_name(group), device, (_KEY, of_ranks), make)
