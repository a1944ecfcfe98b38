# SPDX-License-Identifier: Apache-2.0
"""Takes tokens to their experts' ranks and back by kernels that store into the ranks' symmetric memory.

`exchange_counts` gives all ranks' numbers of pairs and choices to the device; with a fixed number of rows the host
never reads them, so a CUDA graph can hold the calls. Each later call of the route, backward ones too, is one launch of
`push_rows`, and what it leaves in this rank's staging buffer is copied out, or summed, before the next call. The first
one sends the pairs' experts, so that each rank's rows are known before the tokens are sent.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from stretto import tiles
from stretto.collectives.joint.routed import RoutedSchedule
from stretto.memory.gpus import NCCL_BLOCKS, count_processors, limit_waiting
from stretto.ops.choices import find_agreed
from stretto.ops.joint.launch import find_node_group, find_put_channel
from stretto.ops.joint.routed import GivenRows, LandedRows, RoutedTables, find_routed, launch_moves, make_tables
from stretto.ops.moe.exchange_kernel import SummedRows, exchange_counts, push_rows
from stretto.ops.moe.fixed_rows import find_record
from stretto.ops.moe.grouped.config import TABLE
from stretto.ops.moe.grouped.tile_order import Arrivals
from stretto.ops.moe.pairs import ExpertParts, Pairs, find_pairs, unpack_words
from stretto.ops.moe.permutation import choose_block, spread_tokens, sum_copies
from stretto.ops.moe.routes import CollectiveWrapper, PlaceIndex, Route, call, require_experts
from stretto.ops.moe.sorting import sort_copies
from stretto.ops.operator import (
    CHANNELS,
    abandon,
    count_bytes,
    find_group,
    find_kept,
    find_known,
    find_name,
    find_workspace,
)

_TILE_BYTES = 65536  # that a program of `push_rows` loads at once: a loop over smaller tiles is bound by latency
_TILE_ROWS = 64
_SUMMED_BYTES = 16384  # of the sums of a program: so many for each of the slots are loaded at once
_SUMMED_PARTS = 4  # times as many parts
_Sorted = tuple[Tensor, ...]  # what `sort_copies` returns, and weights if there are any
_FORGOTTEN = 1024  # calls, after which a third of the most places is left
_PARTS = 128  # of all ranks' rows, at least: more than programs, and half of two ranks' parts are this rank's own


@dataclass(frozen=True)
class KernelRoute(Route):
    """The route of a call by kernels.

    table: int32 [source, destination, 2], pairs and choices between all ranks, and after all sources their sums, on the
    device. places, pairs_back, choices_back: rows that a rank's staging buffer holds of what is sent, and of pairs and
    choices that return, the same on all ranks. ahead: tokens that are on their way already, until `start` takes them.
    """

    group: dist.ProcessGroup
    pairs: Pairs
    table: Tensor
    index: PlaceIndex
    places: int
    pairs_back: int
    choices_back: int
    needed: Tensor | None
    weights: Tensor | None
    schedule: str = ""
    limits: tuple[int, int] = (0, 0)
    ahead: list[tuple[Tensor, Arrivals]] = field(default_factory=list)

    def send(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper, *, lends: bool = False) -> Tensor:
        """Send a row of each pair: see `Route`. What is not lent leaves the staging buffer at once."""

        def push() -> Tensor:
            received = self._push_pairs(make()).rows[: len(self.index.positions)]
            # A wrapper may keep what it is given.
            return received if lends and wrap_collective is call else self._copy_out(received)

        return wrap_collective("all_to_all", push)

    def start(self, tokens: Tensor) -> Arrivals:
        """Begin to send a row of each pair, for products that use places while others arrive."""
        if self.ahead and self.ahead[0][0] is tokens:
            return self.ahead.pop()[1]
        return self._push_pairs(tokens, waits=False)

    def start_back(
        self, places: Tensor, wrap_collective: CollectiveWrapper, programs: int | None = None
    ) -> Callable[[], Tensor]:
        """Begin `give_back`; returns the function that ends it. Nothing else is called on the group before.

        programs: of the kernel that pushes, at most.
        """
        return self._begin(lambda: self._push_back(places, waits=False, programs=programs), wrap_collective)

    def start_sum_back(
        self, rows: Tensor, wrap_collective: CollectiveWrapper, programs: int | None = None
    ) -> Callable[[], Tensor]:
        """Begin `sum_back` without weights, in the manner of `start_back`.

        programs: of a kernel that runs beside what follows; None for all multiprocessors, before it.
        """
        if self.schedule:
            sums = sum_copies(rows, self.index.positions, is_valid=self.index.is_here)
            return self.start_back(sums, wrap_collective, programs)
        return self._begin(lambda: self._push_sums(rows, None, waits=False, programs=programs), wrap_collective)

    def _begin(self, push: Callable[[], Arrivals], wrap_collective: CollectiveWrapper) -> Callable[[], Tensor]:
        found: list[Arrivals] = []

        def run() -> Tensor:
            found.append(push())
            return found[0].rows

        staged: Tensor = wrap_collective("all_to_all", run)
        return lambda: self._finish(found[0], staged)

    def sum_back(
        self, make: Callable[[], Tensor], weights: Tensor | None, wrap_collective: CollectiveWrapper
    ) -> Tensor:
        """Sum rows by place, and give the sums back: see `Route`; a kernel stores them where they are for."""
        if self.schedule:
            return super().sum_back(make, weights, wrap_collective)
        return wrap_collective("all_to_all", lambda: self._finish(None, self._push_sums(make(), weights).rows))

    def _push_sums(
        self, rows: Tensor, weights: Tensor | None, *, waits: bool = True, programs: int | None = None
    ) -> Arrivals:
        weights = None if weights is None else weights.contiguous()
        sums = self.index.positions, weights, self.index.is_here.view(torch.uint8)
        return _push(
            self.group, rows, None, self.table, self.pairs_back, back_by=0, sums=sums, waits=waits, programs=programs,
            beside=programs is not None,
        )  # fmt: skip

    def _finish(self, arrivals: Arrivals | None, staged: Tensor) -> Tensor:
        """The sums of what has returned for each token, in the order of ranks."""
        if arrivals is not None:
            arrivals.wait()
        return sum_copies(staged, self.pairs.numbers, is_valid=self.pairs.is_pair)

    def give_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        """Return a row of each place, and sum each token's in the order of ranks."""
        return wrap_collective("all_to_all", lambda: self._finish(None, self._push_back(make()).rows))

    def _push_back(self, places: Tensor, *, waits: bool = True, programs: int | None = None) -> Arrivals:
        pairs = self.table, self.pairs_back
        return _push(self.group, places, None, *pairs, back_by=0, waits=waits, programs=programs, way=self._way(0))

    def give_choices_back(self, make: Callable[[], Tensor], wrap_collective: CollectiveWrapper) -> Tensor:
        def push() -> Tensor:
            order = self.index.order_rows()  # rows behind the last copy go nowhere
            staged = _push(self.group, make(), order, self.table, self.choices_back, back_by=1, way=self._way(1)).rows
            parts = self.pairs.parts
            if parts is not None:
                return sum_copies(staged, self.pairs.order_parts(parts))
            return spread_tokens(staged[: self.pairs.ids.numel()])

        return wrap_collective("all_to_all", push)

    @property
    def choices(self) -> Tensor:
        """The choices' order by rank; where parts were added, their own."""
        ids = self.pairs.ids
        if self.pairs.parts is None:
            return self.pairs.order_choices()
        return torch.arange(ids.numel(), device=ids.device).view(ids.shape)

    def _copy_out(self, received: Tensor) -> Tensor:
        """The places' rows in memory of their own; after too many rows with NaN, so that all products with them are."""
        rows = spread_tokens(received)
        if self.needed is not None:
            rows[:, :1].masked_fill_(self.needed > len(self.index.slots), torch.nan)
        return rows

    def _push_pairs(self, tokens: Tensor, *, waits: bool = True) -> Arrivals:
        way = self._way(0)
        return _push(self.group, tokens, self.pairs.tokens, self.table, self.places, waits=waits, way=way)

    def _way(self, which: int) -> tuple[str, int]:
        """The schedule, and the most rows of two ranks: of pairs, or of choices."""
        return self.schedule, self.limits[which]


def find_kernel_route(
    topk_ids: Tensor,
    num_experts: int,
    max_rows: int | None,
    group: dist.ProcessGroup,
    wrap_collective: CollectiveWrapper,
    topk_weights: Tensor | None = None,
    parts: ExpertParts | None = None,
    of_group: dist.ProcessGroup | None = None,
    schedule: str = "",
    tokens: Tensor | None = None,
) -> KernelRoute:
    """The route of this call; topk_weights are sent with the pairs' experts. schedule: of `find_schedule`, if any.

    max_rows: None to have the host read the counts, once. parts: of experts that several ranks of the group share, in a
    call of of_group, with which too many rows are recorded. tokens: what `start` will be given next, and may be sent
    before the host has read the counts. ValueError for ids that are no experts, where it reads.
    """
    (t, k), world, rank = topk_ids.shape, group.size(), group.rank()
    owners, copies = (world, 1) if parts is None else parts.holders.shape
    local = num_experts // owners
    pairs = find_pairs(topk_ids, topk_weights, num_experts, owners)
    if parts is not None:
        pairs = pairs.repeat(parts)

    def receive(table: Tensor, capacity: int, number: int, limit: int) -> tuple[Tensor, Tensor | None]:
        words = _push(group, pairs.words, None, table, capacity, way=(schedule, limit)).rows[:number]
        return unpack_words(words, topk_weights)

    def sort(experts: Tensor, weights: Tensor | None, rows: int, known: Tensor | None) -> _Sorted:
        """The index of this rank's rows, and weights: nothing of the staging buffer."""
        return *sort_copies(experts, local, rows, known), *(() if weights is None else (weights,))

    # While the host waits for the counts, the device sorts and sends tokens for as many places as the last calls needed
    # at most (layers differ), and an eighth more. If more are needed, `push` joins what has begun, and sends all.
    last = find_known(find_name(group), topk_ids.device, ("moe places", k, num_experts), lambda: [0])
    room = 0 if schedule or max_rows is not None else last[0] + last[0] // 8
    early: list[_Sorted] = []
    ahead: list[tuple[Tensor, Arrivals]] = []

    def exchange() -> tuple[Tensor, ...]:
        table = _exchange_counts(group, pairs.counts, max_rows, group if of_group is None else of_group)
        if max_rows is not None:
            return (table,)
        if not room:
            return table, table.cpu()
        on_host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=table.is_cuda)
        event = torch.cuda.Event() if table.is_cuda else None
        on_host.copy_(table, non_blocking=True)
        if event is not None:
            event.record()
        experts, weights = receive(table, room, room, 0)
        if tokens is not None:
            experts = experts.clone()  # of the staging buffer
            ahead.append((tokens, _push(group, tokens, pairs.tokens, table, room, waits=False)))
        early.append(sort(experts, weights, room * k, table[world, rank, 0]))
        if ahead:
            ahead[0][1].find_order(early[0][1], early[0][4], TABLE["product"].blocks.m)
        if event is not None:
            event.synchronize()
        return table, on_host

    table, *on_host = wrap_collective("all_to_all", exchange)
    if max_rows is None:
        *sent, arriving = on_host[0].tolist()
        (number, rows), places = arriving[rank], max(number for number, _ in arriving)
        last[0] = max(places, last[0] - last[0] // _FORGOTTEN)
        require_experts(topk_ids, sum(choices for _, choices in sent[rank]) // copies, num_experts)
        back, choices_back = (max(sum(one[which] for one in of_rank) for of_rank in sent) for which in (0, 1))
        limit, choice_limit = (max(one[which] for of_rank in sent for one in of_rank) for which in (0, 1))
    else:
        rows, places, back = max_rows, min(max_rows, max(t * world, 1)), t * min(k, owners) * copies
        number, choices_back = places, t * k * copies
        limit, choice_limit = t, t * k

    filled, needed = (None, None) if max_rows is None else table[world, rank].unbind()

    def push() -> _Sorted:
        if not early or places > room:
            while ahead:
                ahead.pop()[1].drop()
            return sort(*receive(table, places, number, limit), rows, filled)
        slots, tokens, positions, is_here, offsets, *weights = early[0]
        of_places = (one[:number] for one in (positions, is_here))
        return slots[:rows], tokens[:rows], *of_places, offsets, *(one[:number] for one in weights)

    found = wrap_collective("all_to_all", push)
    index, given = PlaceIndex(*found[:5]), None if topk_weights is None else found[5]
    rows_back, limits = (places, back, choices_back), (limit, choice_limit)
    return KernelRoute(group, pairs, table, index, *rows_back, needed, given, schedule, limits, ahead)


def find_messages(schedule: str, ranks: int, near: int | None = None) -> RoutedSchedule:
    """The verified messages of a schedule of experts' tokens. ValueError for one that is refused.

    near: ranks of this node; None for all.
    """
    return find_routed("dispatch_grouped_matmul", schedule, ranks, CHANNELS * (ranks if near is None else near))


def _exchange_counts(
    group: dist.ProcessGroup, counts: Tensor, max_rows: int | None, of_group: dist.ProcessGroup
) -> Tensor:
    """All ranks' counts [ranks, 2], and then their sums: int32 [source, destination, 2]; records more than max_rows."""
    world, name, device = group.size(), find_name(group), counts.device
    if find_agreed(name, device).nodes:
        table = counts.new_empty(world + 1, *counts.shape)
        puts = find_put_channel(name, device, _count_movers(device))
        puts.all_gather(counts.contiguous(), table[:world])
        torch.sum(table[:world], 0, dtype=torch.int32, out=table[world])
        if max_rows is not None:
            find_record(of_group, device, group).update(table[world, :, 1].to(torch.int64), max_rows)
        return table

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
    record = None if max_rows is None else find_record(of_group, device, group)
    state = None if record is None else record.state
    table = torch.empty(world + 1, world, 2, dtype=torch.int32, device=device)
    block_channel.check()
    try:
        channel = block_channel.begin(
            "moe.dispatch's counts", unused, unused, "p2p", with_barrier=False, launches=False
        )
        received = block_channel.tensor((2, world, world, 2), torch.int32)
        sizes = 2 * world, triton.next_power_of_2(2 * world), triton.next_power_of_2(world)
        arguments = channel, unused, counts, received, table, state, max_rows, *sizes
        key = tuple(map(tiles.kind_of, (counts, table, state, max_rows)))
        block_channel.launch(exchange_counts, key, 1, arguments, num_warps=1)
    except BaseException:
        abandon(name, block_channel)
        raise
    if record is not None:
        record.publish()
    return table


def _push(
    group: dist.ProcessGroup,
    rows: Tensor,
    positions: Tensor | None,
    table: Tensor,
    capacity: int,
    *,
    back_by: int | None = None,
    sums: tuple[Tensor, Tensor | None, Tensor] | None = None,
    waits: bool = True,
    beside: bool = True,
    programs: int | None = None,
    way: tuple[str, int] = ("", 0),
) -> Arrivals:
    """Launch `push_rows`; returns this rank's staging buffer [capacity, .], which the group's next call overwrites.

    back_by: which number of the table says how many rows return to each rank; None for the pairs' rows that are sent.
    sums: positions, weights and is_here of `SummedRows`, of which sums are pushed. waits: for all rows that this rank
    receives; without, the kernel runs on a side stream if beside, of so many programs at most, or on the current one,
    of one a multiprocessor. way: a schedule, by whose messages `move_rows` sends them, and the most rows that a rank
    has for another.
    """
    rows, columns, name, world = rows.contiguous(), rows.shape[1], find_name(group), group.size()
    nodes = find_agreed(name, rows.device).nodes
    here = find_node_group(name, rows.device, nodes) if nodes else name
    near = find_group(here).size()
    routed = find_messages(way[0], world, near) if way[0] else None
    forwarded = 0 if routed is None else routed.forwarded_pairs * way[1]
    shape = max(capacity + forwarded, 1), max(columns, 1)  # a tensor without numbers has no address
    size = count_bytes(*shape, dtype=rows.dtype)
    workspace = find_workspace(here, rows.device, size, "barrier" if routed is None else "copy_engine")
    block_channel, power = workspace.channel, triton.next_power_of_2(world)
    parts, channels = (max(CHANNELS, _PARTS // power), CHANNELS) if rows.is_cuda else (4, 2)
    if sums is not None:  # all multiprocessors sum, not only as many as the links need
        parts *= _SUMMED_PARTS
    tables: RoutedTables | None = None
    if routed is None:
        mapping = tiles.shard_tiles(parts, world, 1, channels=channels, fixed=True)
    else:
        sizes, movers = (block_channel.channels, parts, channels), _count_movers(rows.device) if nodes else 0
        puts = find_put_channel(name, rows.device, movers) if nodes else None
        tables = find_known(
            name, rows.device, ("experts' messages", way[0], *sizes),
            lambda: make_tables(routed, group.rank(), *sizes, rows.device, nodes=nodes, movers=movers),
        )  # fmt: skip
        mapping = tables.as_shards(world)
    block_channel.check()
    try:
        offset, slot = workspace.take_slot()
        producer, consumer = (mapping, mapping) if tables is None else (tables.destinations, tables.arrivals)
        channel = block_channel.begin(
            "moe exchange",
            producer,
            consumer,
            "p2p",
            counts=None if tables is None else tables.counts,
            slot=slot,
        )
        staging = block_channel.tensor(shape, rows.dtype, offset=offset)
        block = min(choose_block(columns)[0], triton.next_power_of_2(shape[1]))
        tile_bytes = _TILE_BYTES if sums is None else _SUMMED_BYTES
        tile_rows = min(max(tile_bytes // (block * rows.itemsize), 1), _TILE_ROWS) if rows.is_cuda else 4
        pushed = GivenRows(rows, positions, columns)
        # Beside a kernel that consumes the rows, as many as NCCL would take from it.
        beside = beside and not waits
        most = NCCL_BLOCKS if beside else world * parts
        if not rows.is_cuda:
            most = 2
        elif waits or beside:
            most = limit_waiting(most, rows.device)
        else:
            most = min(most, count_processors(rows.device.index))
        programs = most if programs is None else min(programs, most)
        with tiles.copy_engine(block_channel) if beside else contextlib.nullcontext():
            if tables is None:
                given: GivenRows | SummedRows = pushed
                known, k = pushed.known, 0
                if sums is not None:
                    (known, k), given = sums[0].shape, SummedRows(rows, sums[0], columns, *sums[1:])
                constants = 0 if back_by is None else back_by + 1, waits, k, tile_rows, block
                arguments = channel, mapping, given, staging, table, known, capacity, *constants
                key = *map(tiles.kind_of, (*given, staging, table)), *constants
                # Of sums a multiprocessor has all the warps that it can, and they are rounded as torch rounds them.
                warps, is_fused = (16, True) if sums is None else (32, False)
                block_channel.launch(push_rows, key, programs, arguments, num_warps=warps, enable_fp_fusion=is_fused)
            else:
                landed = LandedRows(staging, capacity, forwarded)
                by, tile = (back_by or 0, back_by is not None), (tile_rows, block)
                launch_moves(
                    block_channel, channel, tables, pushed, landed, table, programs, tile, by=by, waits=waits, puts=puts
                )  # fmt: skip
        if not (waits or beside):
            tiles.open_side_stream(block_channel, 0)  # where rows are awaited
        block_channel.is_open = not waits
    except BaseException:
        abandon(here, block_channel)
        raise
    received = staging if shape == (capacity, columns) else staging[:capacity, :columns]
    counters = None if tables is None else tables.counters
    sent = (rows, positions, sums) if beside else None  # else what frees them follows the kernel on its stream
    return Arrivals(received, block_channel, channel, mapping, tile_rows, table, sent, counters, group.rank())


def _count_movers(device: torch.device) -> int:
    """The programs that put rows between nodes; as many receive."""
    return max(limit_waiting(NCCL_BLOCKS, device) // 2, 1) if device.type == "cuda" else 1
