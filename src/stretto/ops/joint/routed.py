# SPDX-License-Identifier: Apache-2.0
"""The kernel of a routed schedule: it moves rows, of which the device knows how many, by any verified all-to-all.

`stretto.collectives.joint.routed` derives the messages, and says where their chunks lie.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.collectives.joint.routed import ARRIVED, FORWARDED, GIVEN, Hop, RoutedSchedule, route
from stretto.collectives.joint.routed_verifier import verify_routed
from stretto.collectives.joint.schedule import NOBODY
from stretto.ops.joint.registry import find_schedule

_HOP = tl.constexpr(8)  # words of a hop
_GIVEN = tl.constexpr(GIVEN)
_ARRIVED = tl.constexpr(ARRIVED)


class GivenRows(NamedTuple):
    """Kernel argument: the rows that a rank sends, sorted by target.

    Row i is rows[positions[i]]. rows: [., columns]. positions: int64 [known], or None for rows in their order.
    """

    rows: Any
    positions: Any
    columns: Any

    @property
    def known(self) -> int:
        """How many rows there are, on the host: a kernel gets it as a number of its own."""
        return len(self.rows if self.positions is None else self.positions)


class LandedRows(NamedTuple):
    """Rows [capacity + forwarded, columns] in symmetric memory: what arrives, then what is passed on.

    Rows beyond the capacity do not arrive.
    """

    rows: Tensor
    capacity: int
    forwarded: int


class HopTables(NamedTuple):
    """A rank's hops as a kernel reads them, int32.

    hops: of each, its chunk, area, receiver's area, and in `lists` the first chunk of both areas and the chunk of both
    places. parts: hop * PARTS + part, in their order. count: of these.
    """

    hops: Any
    parts: Any
    lists: Any
    count: Any


class MoveSizes(NamedTuple):
    """Kernel argument, compiled in: how a launch of `move_rows` reads its table, and cuts rows.

    which: the number of the table that says how many rows there are; is_transposed: of [target, source]. pieces: of a
    pair's rows; parts, channels: of a piece; longest: chunks of a list, a power of two. A program loads rows x block
    numbers before it stores them.
    """

    which: Any
    is_transposed: Any
    pieces: Any
    parts: Any
    channels: Any
    longest: Any
    rows: Any
    block: Any


class RoutedTables(NamedTuple):
    """A rank's routed schedule on its device.

    sources, destinations, arrivals: the signals that each hop waits for and gives, and of the chunks that arrive, a
    tile for each of the `channels` of a chunk. counters: the places of the latter among all counters of this rank.
    counts: of `BlockChannel.begin`. given: the signal of the rows for each rank, None if they are there at the
    beginning. longest: chunks of a list, a power of two. pieces: of a pair of ranks; parts: of a piece.
    """

    hops: HopTables
    sources: tiles.DynamicMapping
    destinations: tiles.DynamicMapping
    arrivals: tiles.DynamicMapping
    counters: Tensor
    counts: Tensor
    given: tiles.DynamicMapping | None
    longest: int
    pieces: int
    parts: int
    channels: int

    def as_shards(self, world: int) -> tiles.StaticMapping:
        """The parts and the channels of each rank's rows."""
        parts, channels = self.pieces * self.parts, self.pieces * self.channels
        return tiles.shard_tiles(parts, world, 1, channels=channels, fixed=True)


@triton.jit(do_not_specialize=["known", "capacity", "forwarded"])  # they may change with each call
def move_rows(  # type: ignore[no-untyped-def]
    channel, sources, destinations, arrivals, tables, given, landed, table, sizes, permit, arriving,
    known, capacity, forwarded,
):  # fmt: skip
    """Send `GivenRows` to their ranks' `LandedRows`, by the hops of a routed schedule.

    landed, capacity, forwarded: this rank's. known: given rows; those from it on are NaN, or zeros of integers.

    table: int32 [source, target, 2], how many rows each rank has for each other one, as `MoveSizes` reads it. A chunk
    has `parts` parts, signalled by `channels` channels. permit: None, or int32 [1], 0 in a call that ranks do not make
    together, of which nothing is sent or awaited.
    Order: that of `HopTables.parts`: message after message, of each all hops' first parts first.
    Signals: each part of a hop once, also an empty one, at the receiver, after its stores ("p2p").
    Waits: a part that is passed on waits for the signal of that part of the message that brought it, and one of given
    rows, where another kernel makes them, for its signal, which waits for nothing; at the end, each
    program waits for its share of the `arriving` signals of what arrives here, so landed rows are complete when the
    kernel has ended (arriving: 0 for no wait). Programs claim parts in their order, and all ranks' parts have one order
    in which each needs only what comes before it (`verify_routed`), so one running program a rank is enough.
    Reuse: of two slots or one, as `begin` was told. Within a call each place is written once. A slot is written once
    all ranks have begun this call, or the one after the slot's last, and so have read, and passed on, what it held.
    """
    unknown: tl.constexpr = float("nan") if given.rows.dtype.element_ty.is_floating() else 0
    rows: tl.constexpr = sizes.rows
    block: tl.constexpr = sizes.block
    count = tables.count + tl.program_id(0) * 0
    if permit is not None:
        count = tl.where(tl.load(permit) != 0, count, 0)
    task = tiles.claim(channel)
    while task < count:
        following = tiles.claim(channel)
        entry = tl.load(tables.parts + task)
        hop, part = entry // sizes.parts, entry % sizes.parts
        tile = hop * sizes.channels + part // (sizes.parts // sizes.channels)
        word = tables.hops + hop * _HOP
        chunk, area, to_area = tl.load(word), tl.load(word + 1), tl.load(word + 2)
        first, base = (
            _sum_sizes(channel, table, tables, sizes, word + 3),
            _sum_sizes(channel, table, tables, sizes, word + 5),
        )
        size, part_rows = _find_size(channel, table, sizes, chunk)
        is_given, arrives = area == _GIVEN, to_area == _ARRIVED
        # What is passed on lies behind what arrives.
        first += tl.where(is_given | (area == _ARRIVED), 0, capacity)
        base += tl.where(arrives, 0, capacity)
        end = capacity + tl.where(arrives, 0, forwarded)
        ready = tiles.consumer_tile_wait(channel, sources, tile)
        there = tiles.peer_pointer(channel, landed, tiles.tile_rank(destinations, tile))
        publishes = tiles.may_publish(channel)  # memory may hold another call's rows after a failed wait
        for start in range(part * part_rows, tl.minimum((part + 1) * part_rows, size), rows):
            at = start + tl.arange(0, rows)
            row, target = (first + at).to(tl.int64), (base + at).to(tl.int64)
            is_known = (at < size) & ((row < known) | (is_given == 0))
            is_landed = row < capacity + forwarded
            is_stored = (at < size) & (target < end) & publishes
            if given.positions is not None:
                row = tl.load(given.positions + row, mask=is_known & is_given, other=0) + tl.where(is_given, 0, row)
            for column in range(0, given.columns, block):
                place = column + tl.arange(0, block)
                is_column = (place < given.columns)[None, :]
                offsets = row[:, None] * given.columns + place[None, :]
                mask = is_known[:, None] & is_column
                if is_given:
                    value = tl.load(given.rows + ready + offsets, mask=mask, other=unknown)
                else:
                    value = tl.load(landed + ready + offsets, mask=mask & is_landed[:, None], other=0)
                tl.store(
                    there + target[:, None] * given.columns + place[None, :],
                    value,
                    mask=is_stored[:, None] & is_column,
                )
        tiles.producer_tile_notify(channel, destinations, tile, "p2p")
        task = following
    for index in range(tl.program_id(0), tl.where(count > 0, arriving, 0), tl.num_programs(0)):
        tiles.consumer_tile_wait(channel, arrivals, index)


@triton.jit
def _find_size(channel, table, sizes, chunk):  # type: ignore[no-untyped-def]
    """(rows of a chunk, rows of each of its parts): a pair's rows are cut into all its pieces' parts, of whole rows."""
    pair = chunk // sizes.pieces
    if sizes.is_transposed:
        pair = pair % channel.world * channel.world + pair // channel.world
    count = tl.load(table + pair * 2 + sizes.which)
    part_rows = tl.cdiv(tl.cdiv(count, sizes.pieces * sizes.parts), sizes.rows) * sizes.rows
    begin = chunk % sizes.pieces * sizes.parts * part_rows
    return tl.minimum(tl.maximum(count - begin, 0), sizes.parts * part_rows), part_rows


@triton.jit
def _sum_sizes(channel, table, tables, sizes, word):  # type: ignore[no-untyped-def]
    """The rows of the chunks of `tables.lists` from number word[0] to number word[1] - 1."""
    longest: tl.constexpr = sizes.longest
    at = tl.load(word) + tl.arange(0, longest)
    is_before = at < tl.load(word + 1)
    found, _ = _find_size(channel, table, sizes, tl.load(tables.lists + at, mask=is_before, other=0))
    return tl.sum(tl.where(is_before, found, 0), 0)


@lru_cache(maxsize=64)
def find_routed(operator: str, schedule: str, ranks: int, signals: int) -> RoutedSchedule:
    """The verified messages of a schedule that an operator was given. ValueError for one that is refused.

    signals: that a rank has for those which another rank sends it.
    """
    routed = route(find_schedule(operator, schedule, ranks))
    if errors := verify_routed(routed):
        raise ValueError(f"{operator}: {routed.name} is refused: {errors[0]}")
    if routed.channels > signals:
        raise ValueError(
            f"{operator}: {routed.name} has {routed.channels} messages to a rank, and there are {signals} signals: "
            "compile it with fewer instances, or chunks"
        )
    return routed


def make_tables(
    routed: RoutedSchedule,
    rank: int,
    capacity: int,
    parts: int,
    channels: int,
    device: torch.device,
    given_signals: tuple[int, ...] | None = None,
) -> RoutedTables:
    """Write a rank's routed schedule into tables on its device.

    capacity: channels of a receiver, of one sender. parts, channels: of a pair's rows, at most if its pieces are as
    many. given_signals: how often the rows for each rank are signalled here; None if all are there at the beginning.
    """
    world, given = len(routed.ranks), 0 if given_signals is None else len(routed.ranks)
    of_message = min(max(channels // routed.pieces, 1), (capacity - given) // max(routed.channels, 1))
    each = max(parts // routed.pieces // of_message, 1)  # parts of a channel
    plan, of_piece = routed.ranks[rank], each * of_message
    begin = routed.channels * of_message  # of the channels of rows that are given

    def table(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers) or [0], dtype=torch.int32).to(device)

    def span(sender: int, number: int) -> list[tuple[int, int, int]]:
        """(rank, first channel, the one after it) of each signal of a message; NOBODY's has none."""
        if number == NOBODY:
            return [(0, 0, 0)] * of_message
        return [(sender, at, at + 1) for at in range(number * of_message, (number + 1) * of_message)]

    def await_hop(hop: Hop) -> list[tuple[int, int, int]]:
        if hop.area != GIVEN or given_signals is None:
            return span(hop.sender, hop.channel)
        at = begin + hop.chunk // routed.pieces % world
        return [(rank, at, at + 1)] * of_message

    def look_up(signals: Iterable[list[tuple[int, int, int]]]) -> tiles.DynamicMapping:
        ranks, starts, ends = map(table, zip(*chain.from_iterable(signals), strict=True))
        unused = torch.zeros_like(ranks)
        return tiles.look_up_tiles(unused, unused, ranks, starts, ends)

    lists = [routed.list_places(of, area) for of in range(world) for area in (GIVEN, FORWARDED, ARRIVED)]
    starts = list(accumulate(map(len, lists), initial=0))
    hops = [(message, hop) for message in plan.messages for hop in message.hops]
    words = []
    for message, hop in hops:
        first, there = starts[3 * rank + hop.area], starts[3 * message.receiver + message.area]
        words += [hop.chunk, hop.area, message.area, first, first + hop.number, there, there + hop.to, 0]
    order, number = [], 0
    for message in plan.messages:
        of_hops = range(number, number + len(message.hops))
        order += [hop * of_piece + part for part in range(of_piece) for hop in of_hops]
        number += len(message.hops)

    counts = torch.zeros(2, world, capacity, dtype=torch.int32)
    for sender, routes in enumerate(routed.ranks):
        for message in routes.messages:
            channels_of = slice(message.channel * of_message, (message.channel + 1) * of_message)
            if message.receiver == rank:
                counts[0, sender, channels_of] += each * len(message.hops)
            if sender == rank:
                counts[1, message.receiver, channels_of] += each * len(message.hops)
    for target, signals in enumerate(given_signals or ()):
        counts[:, rank, begin + target] += signals
    return RoutedTables(
        HopTables(table(words), table(order), table(chain.from_iterable(lists)), len(order)),
        look_up(await_hop(hop) for _, hop in hops),
        look_up(span(message.receiver, message.channel) for message, _ in hops),
        look_up(span(*arrival) for arrival in plan.arrivals),
        table(sender * capacity + at for arrival in plan.arrivals for sender, at, _ in span(*arrival)),
        counts.to(device),
        None if given_signals is None else look_up([(rank, begin + to, begin + to + 1)] for to in range(world)),
        triton.next_power_of_2(max(map(len, lists))),
        routed.pieces,
        of_piece,
        of_message,
    )


def launch_moves(
    block_channel: tiles.BlockChannel,
    channel: tiles.Channel,
    tables: RoutedTables,
    given: GivenRows,
    landed: LandedRows,
    table: Tensor,
    programs: int,
    tile: tuple[int, int],
    *,
    by: tuple[int, bool] = (0, False),
    waits: bool = True,
    permit: Tensor | None = None,
) -> None:
    """Launch `move_rows` in a call that has begun.

    tile: rows and block of `MoveSizes`; by: which, and is_transposed. waits: for all that arrives here.
    """
    arriving = tables.arrivals.rank.numel() if waits else 0
    sizes = *by, tables.pieces, tables.parts, tables.channels, tables.longest, *tile
    arguments = (
        channel, tables.sources, tables.destinations, tables.arrivals, tables.hops, given, landed.rows, table,
        fix_sizes(*sizes), permit, arriving, given.known, landed.capacity, landed.forwarded,
    )  # fmt: skip
    key = *map(tiles.kind_of, (*tables.hops, *given, landed.rows, table, permit, arriving)), *sizes
    block_channel.launch(move_rows, key, programs, arguments, num_warps=16)


@lru_cache(maxsize=256)
def fix_sizes(*sizes: int) -> MoveSizes:
    """The sizes as constants."""
    return MoveSizes(*map(tl.constexpr, sizes))
