# SPDX-License-Identifier: Apache-2.0
"""Takes tokens to their experts' ranks and back by kernels that store into the ranks' symmetric memory.

`exchange_counts` gives all ranks' numbers of pairs and choices to the device; with a fixed number of rows the host
never reads them, so a CUDA graph can hold the calls. Every later call of the route, backward ones too, is one launch
of `push_rows`, and what it leaves in this rank's staging buffer is copied out, or summed, before the next call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from stretto import tiles
from stretto.memory.gpus import limit_waiting
from stretto.ops.moe.exchange_kernel import CHUNKS, PushedRows, StagedRows, exchange_counts, push_rows
from stretto.ops.moe.pairs import Pairs, find_pairs, unpack_words
from stretto.ops.moe.permutation import CopyOrder, choose_block, invert, sort_by_expert, sum_copies
from stretto.ops.moe.routes import CollectiveWrapper, PlaceIndex, Route, require_experts
from stretto.ops.operator import abandon, count_bytes, find_group, find_kept, find_name, find_workspace

_ALIGNMENT = 128
_TILE = 4096  # elements of a tile of `push_rows`


@dataclass(frozen=True)
class KernelRoute(Route):
    """The route of a call by kernels.

    table: int32 [source, destination, 2], pairs and choices between all ranks, on the device. index: of this rank's
    rows. places, pairs_back, choices_back: rows that a rank's staging buffer holds of what is sent, and of pairs and
    choices that return, the same on all ranks. is_row, fill: of a fixed number of rows, as `FixedRoute` has them; else
    None.
    """

    group: dist.ProcessGroup
    pairs: Pairs
    table: Tensor
    index: PlaceIndex
    places: int
    pairs_back: int
    choices_back: int
    is_row: Tensor | None
    fill: Tensor | None
    weights: Tensor | None

    def send(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Send a row of each pair: see `Route`."""

        def push() -> Tensor:
            tokens = make()
            staged, _ = _push(self.group, tokens, self.pairs.tokens[:, None], None, None, None, self.table, self.places)
            return staged[: len(self.index.positions)].clone()

        sent: Tensor = wrap_collective("all_to_all", push)
        return sent

    def give_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Return a row of each place, and sum each token's in the order of ranks."""

        def push() -> Tensor:
            places = make()
            numbers = torch.arange(len(places), device=places.device)
            return self._sum_pairs(places, numbers[:, None], None, None)

        summed: Tensor = wrap_collective("all_to_all", push)
        return summed

    def sum_back(
        self, make: Callable[[], Tensor], weights: Tensor | None, wrap_collective: CollectiveWrapper
    ) -> Tensor:
        """Return the sum of each place's rows, which the kernel forms: see `Route`."""
        index = self.index
        summed: Tensor = wrap_collective(
            "all_to_all", lambda: self._sum_pairs(make(), index.positions, weights, index.is_here)
        )
        return summed

    def give_choices_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Return a row of each choice: see `Route`."""

        def push() -> Tensor:
            numbers = self.index.is_here.reshape(-1).cumsum(0).index_select(0, self.index.slots) - 1
            positions, number = invert(numbers)[:, None], self.pairs.ids.numel()
            staged, _ = _push(self.group, make(), positions, None, None, None, self.table, self.choices_back, back_by=1)
            return staged[:number].clone()

        returned: Tensor = wrap_collective("all_to_all", push)
        return returned

    @property
    def choices(self) -> Tensor:
        """The choices' order by rank."""
        return self.pairs.order_choices()

    def fill_padding(self, rows: Tensor) -> Tensor:
        """The rows, where padding has `fill`."""
        if self.is_row is None or self.fill is None:
            return rows
        return torch.where(self.is_row[:, None], rows, self.fill.to(rows.dtype))

    def _sum_pairs(self, rows: Tensor, positions: Tensor, weights: Tensor | None, is_valid: Tensor | None) -> Tensor:
        staged, _ = _push(self.group, rows, positions, weights, is_valid, None, self.table, self.pairs_back, back_by=0)
        return sum_copies(staged, self.pairs.numbers, is_valid=self.pairs.is_pair)


def find_kernel_route(
    x: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    max_rows: int | None,
    group: dist.ProcessGroup,
    wrap_collective: CollectiveWrapper,
    topk_weights: Tensor | None = None,
) -> tuple[KernelRoute, Tensor, Tensor]:
    """(the route of this call, x at the places of its tokens, rows that each rank needs [ranks]).

    x and topk_weights are sent in one launch with the pairs' experts. max_rows: None to have the host read the counts,
    once. ValueError for ids that are no experts, where it reads.
    """
    (t, k), world, rank = topk_ids.shape, group.size(), group.rank()
    local = num_experts // world
    pairs = find_pairs(topk_ids, topk_weights, num_experts, world)

    def exchange() -> tuple[Tensor, ...]:
        table = _exchange_counts(group, pairs.counts)
        return (table, table.cpu()) if max_rows is None else (table,)

    table, *on_host = wrap_collective("all_to_all", exchange)
    needed = table[:, :, 1].sum(0, dtype=torch.int64)
    if max_rows is None:
        (known,) = on_host
        require_experts(topk_ids, int(known[rank, :, 1].sum()), num_experts)
        arriving = known[:, :, 0].sum(0)
        places, number, rows = int(arriving.max()), int(arriving[rank]), int(known[:, rank, 1].sum())
        back, choices_back = (int(one) for one in known.sum(1).amax(0))
    else:
        places = number = rows = max_rows
        back, choices_back = t * min(k, world), t * k

    def push() -> tuple[Tensor, Tensor]:
        tokens, words = _push(group, x, pairs.tokens[:, None], None, None, pairs.words, table, places)
        tokens = tokens[:number].clone()
        if max_rows is not None:  # so that every product with them is NaN
            tokens[:, :1].masked_fill_(needed[rank] > max_rows, torch.nan)
        return tokens, words[:number].clone()

    tokens, words = wrap_collective("all_to_all", push)
    experts, weights = unpack_words(words, topk_weights)
    is_row = fill = None
    if max_rows is not None:
        numbers, own = torch.arange(max_rows, device=x.device), needed[rank]
        experts = experts.masked_fill((numbers >= table[:, rank, 0].sum())[:, None], local)
        is_over = own > max_rows
        is_row, fill = (numbers < own) & ~is_over, torch.where(is_over, torch.nan, 0.0)
    order = sort_by_expert(experts, local)
    index = _index(order, experts < local, rows)
    return KernelRoute(group, pairs, table, index, places, back, choices_back, is_row, fill, weights), tokens, needed


def _index(order: CopyOrder, is_here: Tensor, rows: int) -> PlaceIndex:
    """The index of the first `rows` copies, which may be fewer than there are, or more."""
    slots = order.slots[:rows]
    return PlaceIndex(slots, order.positions.clamp(max=max(rows - 1, 0)), is_here, order.offsets.clamp(max=rows))


def _exchange_counts(group: dist.ProcessGroup, counts: Tensor) -> Tensor:
    """All ranks' counts [ranks, 2]: int32 [source, destination, 2]."""
    world, name, device = group.size(), find_name(group), counts.device

    def make() -> tiles.BlockChannel:
        return tiles.BlockChannel.allocate(
            find_group(name),
            channels=world,
            peer_tiles=1,
            data_bytes=count_bytes(2, world, world, 2, dtype=torch.int32),
            backend="cuda" if device.type == "cuda" else "host",
        )

    block_channel = find_kept(name, device, ("moe counts",), make)
    unused = tiles.shard_tiles(0, world, 1, channels=1, fixed=True)
    table = torch.empty(world, world, 2, dtype=torch.int32, device=device)
    block_channel.check()
    try:
        channel = block_channel.begin(
            "moe.dispatch's counts", unused, unused, "p2p", with_barrier=False, launches=False
        )
        received = block_channel.tensor((2, world, world, 2), torch.int32)
        sizes = 2 * world, triton.next_power_of_2(2 * world), triton.next_power_of_2(world)
        key = tiles.kind_of(counts), tiles.kind_of(table)
        block_channel.launch(exchange_counts, key, 1, (channel, unused, counts, received, table, *sizes), num_warps=1)
    except BaseException:
        abandon(name, block_channel)
        raise
    return table


def _push(
    group: dist.ProcessGroup,
    rows: Tensor,
    positions: Tensor,
    weights: Tensor | None,
    is_valid: Tensor | None,
    words: Tensor | None,
    table: Tensor,
    capacity: int,
    *,
    back_by: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch `push_rows`; returns the staging buffers [capacity, .] of what this rank has received.

    back_by: which number of the table says how many rows return to each rank; None for the pairs' rows that are sent.
    The buffers are this call's until the group's next call.
    """
    rows, columns, name = rows.contiguous(), rows.shape[1], find_name(group)
    width = 0 if words is None else words.shape[1]
    row_bytes = count_bytes(capacity, columns, dtype=rows.dtype)
    first = triton.cdiv(row_bytes, _ALIGNMENT) * _ALIGNMENT
    size = first + count_bytes(capacity, width, dtype=torch.int32)
    if not columns or not capacity:
        return rows.new_empty(capacity, columns), torch.empty(capacity, width, dtype=torch.int32, device=rows.device)
    workspace = find_workspace(name, rows.device, size, "barrier")
    block_channel, world = workspace.channel, group.size()
    chunks = CHUNKS if rows.is_cuda else 2
    mapping = tiles.shard_tiles(chunks, world, 1, channels=chunks, fixed=True)
    block_channel.check()
    try:
        slot = next(workspace.slot_cycle)
        channel = block_channel.begin(
            "moe exchange", mapping, mapping, "p2p", slot=slot if workspace.slots == 2 else None
        )
        offset = slot * workspace.slot_bytes
        staging = block_channel.tensor((capacity, columns), rows.dtype, offset=offset)
        staged_words = block_channel.tensor((capacity, width), torch.int32, offset=offset + first)
        block = min(choose_block(columns)[0], triton.next_power_of_2(columns))
        tile_rows = max(_TILE // block, 1) if rows.is_cuda else 4
        positions, flags = positions.contiguous(), None if is_valid is None else is_valid.contiguous().view(torch.uint8)
        weights = None if weights is None else weights.contiguous()
        k, power = positions.shape[1], triton.next_power_of_2(world)
        constants = back_by or 0, back_by is not None, k, width, tile_rows, block, power
        pushed = PushedRows(rows, positions, weights, flags, words, columns, len(positions))
        staged = StagedRows(staging, staged_words, capacity)
        arguments = channel, mapping, pushed, staged, table, *constants
        programs = limit_waiting(world * chunks, rows.device) if rows.is_cuda else 2
        key = *map(tiles.kind_of, (*pushed, *staged, table)), *constants
        block_channel.launch(push_rows, key, programs, arguments, num_warps=8, enable_fp_fusion=False)
    except BaseException:
        abandon(name, block_channel)
        raise
    return staging, staged_words
