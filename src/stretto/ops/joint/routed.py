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
from stretto.collectives.joint.routed import ARRIVED, FORWARDED, GIVEN, Hop, RoutedMessage, RoutedSchedule, route
from stretto.collectives.joint.routed_verifier import verify_routed
from stretto.collectives.joint.schedule import NOBODY
from stretto.ops.gemm import divide_up
from stretto.ops.joint.kernel import MOVED_AT_ONCE
from stretto.ops.joint.registry import find_schedule

_HOP = tl.constexpr(8)  # words of a hop
_NEAR = tl.constexpr(-1)
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
        """The number of rows, on the host: a kernel gets it as a number of its own."""
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

    hops: of each, its chunk, area, receiver's area, in `lists` the first chunk of both areas and the chunk of both
    places, and NEAR, or the rank of another node to which it is put, or from which it comes. parts: hop * PARTS + part,
    in their order. count: of these; 0 between nodes, where the p-th program has those from number begins[p] on: first
    the movers, then as many that receive. table: int32 [source, target, 2], how many rows each rank has for each other
    one, as `MoveSizes` reads it. permit: None, or int32 [1], 0 in a call that ranks do not make together, of which
    nothing is sent or awaited.
    """

    hops: Any
    parts: Any
    lists: Any
    begins: Any
    count: Any
    table: Any = None
    permit: Any = None


class MoveSizes(NamedTuple):
    """Kernel argument, compiled in: how a launch of `move_rows` reads its table, and cuts rows.

    which: the number of the table that says how many rows there are; is_transposed: of [target, source]. pieces: of a
    pair's rows; parts, channels: of a piece; longest: chunks of a list, a power of two. A program loads rows x block
    numbers before it stores them. arriving: signals of what arrives here that are awaited; 0 for no wait.
    """

    which: Any
    is_transposed: Any
    pieces: Any
    parts: Any
    channels: Any
    longest: Any
    rows: Any
    block: Any
    arriving: Any


class MadeRows(NamedTuple):
    """Rows that a kernel makes while others are sent: for each rank as many numbers, one span of them after another.

    spans: the numbers of each. signals: how often that kernel signals a span, for each rank. columns: numbers of a row;
    rows: of which a part has a multiple (`MoveSizes`).
    """

    spans: tuple[int, ...]
    signals: int
    columns: int
    rows: int

    def find_channels(self, parts: int, each: int) -> list[tuple[int, int]]:
        """Return (first channel, the one after the last) that have rows of each span.

        parts: of a rank's rows, of which each channel has `each`.
        """
        rows = sum(self.spans) // self.columns
        numbers = each * divide_up(divide_up(rows, parts), self.rows) * self.rows * self.columns
        ends = accumulate(self.spans)
        return [((end - span) // numbers, (end - 1) // numbers + 1) for end, span in zip(ends, self.spans, strict=True)]


class MadeChannels(NamedTuple):
    """Kernel argument: `count` channels of the rows for each rank.

    spans: int32 [spans, 2], the first of these that has rows of a span, and the one after the last.
    """

    spans: Any
    count: Any


class MadeSignals(NamedTuple):
    """Two kernel arguments, the signals by which a kernel says that `MadeRows` are there.

    mapping: a tile for each channel of each rank. It is no part of the other: Triton 3.6 loses a 1 in a tuple within a
    tuple, in loops.
    """

    mapping: Any
    channels: MadeChannels


class RoutedTables(NamedTuple):
    """A rank's routed schedule on its device.

    sources, destinations, arrivals: the signals that each hop waits for and gives, and of the chunks that arrive, a
    tile for each of the `channels` of a chunk. counters: the places of the latter among all counters of this rank.
    counts: of `BlockChannel.begin`. made: the signals of the rows for each rank, None if they are there at the
    beginning. longest: chunks of a list, a power of two. pieces: of a pair of ranks; parts: of a piece. movers: that
    put; 0 in one node.
    """

    hops: HopTables
    sources: tiles.DynamicMapping
    destinations: tiles.DynamicMapping
    arrivals: tiles.DynamicMapping
    counters: Tensor
    counts: Tensor
    made: MadeSignals | None
    longest: int
    pieces: int
    parts: int
    channels: int
    movers: int

    def as_shards(self, world: int) -> tiles.StaticMapping:
        """The parts and the channels of each rank's rows."""
        parts, channels = self.pieces * self.parts, self.pieces * self.channels
        return tiles.shard_tiles(parts, world, 1, channels=channels, fixed=True)


@triton.jit(do_not_specialize=["known", "capacity", "forwarded"])  # they may change with each call
def move_rows(  # type: ignore[no-untyped-def]
    channel, puts, sources, destinations, arrivals, tables, given, landed, sizes, known, capacity, forwarded
):  # fmt: skip
    """Send `GivenRows` to their ranks' `LandedRows`, by the hops of a routed schedule.

    landed, capacity, forwarded: this rank's. known: given rows; those from it on are NaN, or zeros of integers.

    A chunk has `parts` parts, signalled by `channels` channels.
    Order: that of `HopTables.parts`: message after message, of each all hops' first parts first.
    Signals: each part of a hop once, also an empty one, at the receiver, after its stores ("p2p").
    Waits: a part that is passed on waits for the signal of that part of the message that brought it, and one of given
    rows, where another kernel makes them, for its signal, which waits for nothing; at the end, each
    program waits for its share of the `arriving` signals of what arrives here, so landed rows are complete when the
    kernel has ended. Programs claim parts in their order, and all ranks' parts have one order
    in which each needs only what comes before it (`verify_routed`), so one running program a rank is enough.
    Between nodes (puts is not None; the channel is then of this rank's node): a part's number chooses the mover that
    puts it in slices, each of which fills a slot of the mover's own in several steps, after its credit; on the other
    rank the same number chooses the program that receives it, stores it in its place, releases the slices, and gives
    this rank the part's signal. Each mover makes its parts in the order of all ranks' messages, and each receiver waits
    for slices alone, in that order.
    So of all parts that are not done, the first one's source is there, and its slices find slots, however few there
    are. All programs are resident (`limit_waiting`).
    Reuse: of two slots or one, as `begin` was told. Within a call each place is written once. A slot is written once
    all ranks have begun this call, or the one after the slot's last, and so have read, and passed on, what it held.
    """
    rows = known, capacity, forwarded
    may_move = True
    if tables.permit is not None:
        may_move = tl.load(tables.permit) != 0
    if puts is None:
        count = tl.where(may_move, tables.count, 0)
        task = tiles.claim(channel)
        while task < count:
            following = tiles.claim(channel)
            entry = tl.load(tables.parts + task)
            _move_part(channel, None, sources, destinations, tables, given, landed, sizes, rows, entry)
            task = following
    else:
        program = tl.program_id(0)
        first, last = tl.load(tables.begins + program), tl.load(tables.begins + program + 1)
        for task in range(first, tl.where(may_move, last, first)):
            entry = tl.load(tables.parts + task)
            if program < tl.num_programs(0) // 2:
                _move_part(channel, puts, sources, destinations, tables, given, landed, sizes, rows, entry)
            else:
                _receive_part(channel, puts, destinations, tables, given, landed, sizes, rows, entry)
    for index in range(tl.program_id(0), tl.where(may_move, sizes.arriving, 0), tl.num_programs(0)):
        tiles.consumer_tile_wait(channel, arrivals, index)


@triton.jit
def _move_part(channel, puts, sources, destinations, tables, given, landed, sizes, numbers, entry):  # type: ignore[no-untyped-def]
    """Wait for a part of a hop, store or put it, and signal what is stored. numbers: known, capacity, forwarded."""
    known, capacity, forwarded = numbers
    unknown: tl.constexpr = float("nan") if given.rows.dtype.element_ty.is_floating() else 0
    rows: tl.constexpr = sizes.rows
    block: tl.constexpr = sizes.block
    hop, part = entry // sizes.parts, entry % sizes.parts
    tile = hop * sizes.channels + part // (sizes.parts // sizes.channels)
    word = tables.hops + hop * _HOP
    chunk, area, to_area = tl.load(word), tl.load(word + 1), tl.load(word + 2)
    world = _count_ranks(channel, puts)
    first, base = _sum_sizes(world, tables, sizes, word + 3), _sum_sizes(world, tables, sizes, word + 5)
    size, part_rows = _find_size(world, tables, sizes, chunk)
    is_given, arrives = area == _GIVEN, to_area == _ARRIVED
    # What is passed on lies behind what arrives.
    first += tl.where(is_given | (area == _ARRIVED), 0, capacity)
    base += tl.where(arrives, 0, capacity)
    last = capacity + tl.where(arrives, 0, forwarded)
    start = part * part_rows
    end = tl.minimum(start + part_rows, size)
    ready = tiles.consumer_tile_wait(channel, sources, tile)
    far = tl.load(word + 7)
    if puts is not None:  # noqa: SIM102  (a constant, and a number of the device)
        if far >= 0:
            count = tl.maximum(end - start, 0) * given.columns
            room: tl.constexpr = puts.slot_bytes // (given.rows.dtype.element_ty.primitive_bitwidth // 8)
            step: tl.constexpr = MOVED_AT_ONCE if room > MOVED_AT_ONCE else room
            for begin in range(0, count, room):
                slot, filled = _find_slot(puts, part, begin // room), tl.minimum(count - begin, room)
                zero = tiles.await_credit(puts, slot, far)
                outgoing = tiles.outgoing_slice(puts, slot, far).to(tl.pointer_type(given.rows.dtype.element_ty))
                outgoing = tl.multiple_of(outgoing + zero, 16)
                for at in range(0, filled, step):
                    place = at + tl.arange(0, step)
                    value = _load_elements(
                        given, landed, first + start, begin + place, place < filled, is_given, numbers, ready
                    )
                    tl.store(outgoing + place, value, mask=place < filled)
                num_bytes = filled * (given.rows.dtype.element_ty.primitive_bitwidth // 8)
                tiles.put_slice(puts, slot, num_bytes, far, slot)
    if far < 0:
        there = tiles.peer_pointer(channel, landed, tiles.tile_rank(destinations, tile))
        publishes = tiles.may_publish(channel)  # memory may hold another call's rows after a failed wait
        if given.positions is None:  # rows lie one after another, and so do their places: however short the parts are
            to = (base + start).to(tl.int64) * given.columns
            count = _clip((tl.minimum(end, last - base) - start).to(tl.int64) * given.columns)
            for begin in range(0, count, MOVED_AT_ONCE):
                place = begin + tl.arange(0, MOVED_AT_ONCE)
                value = _load_elements(given, landed, first + start, place, place < count, is_given, numbers, ready)
                tl.store(there + to + place, value, mask=(place < count) & publishes)
        else:
            for begin in range(start, end, rows):
                at = begin + tl.arange(0, rows)
                row, target = (first + at).to(tl.int64), (base + at).to(tl.int64)
                is_known = (at < size) & ((row < known) | (is_given == 0))
                is_stored = (at < size) & (target < last) & publishes
                row = tl.load(given.positions + row, mask=is_known & is_given, other=0) + tl.where(is_given, 0, row)
                for column in range(0, given.columns, block):
                    place = column + tl.arange(0, block)
                    is_column = (place < given.columns)[None, :]
                    offsets = row[:, None] * given.columns + place[None, :]
                    mask = is_known[:, None] & is_column
                    if is_given:
                        value = tl.load(given.rows + ready + offsets, mask=mask, other=unknown)
                    else:
                        mask &= (row < capacity + forwarded)[:, None]
                        value = tl.load(landed + ready + offsets, mask=mask, other=0)
                    tl.store(
                        there + target[:, None] * given.columns + place[None, :],
                        value,
                        mask=is_stored[:, None] & is_column,
                    )
        tiles.producer_tile_notify(channel, destinations, tile, "p2p")


@triton.jit
def _load_elements(given, landed, first, place, inside, is_given, numbers, ready):  # type: ignore[no-untyped-def]
    """Load elements `place` of given or landed rows, counted from row `first` on, once their part is `ready`."""
    known, capacity, forwarded = numbers
    unknown: tl.constexpr = float("nan") if given.rows.dtype.element_ty.is_floating() else 0
    end = tl.where(is_given, known, capacity + forwarded)
    if given.positions is None:
        begin = first.to(tl.int64) * given.columns + ready
        inside &= place < _clip((end - first).to(tl.int64) * given.columns)
        from_given, from_landed = given.rows + begin + place, landed + begin + place
    else:
        row = (first + place // given.columns).to(tl.int64)
        inside &= row < end
        own = tl.load(given.positions + row, mask=inside & is_given, other=0)
        offset = (own + tl.where(is_given, 0, row)) * given.columns + place % given.columns + ready
        from_given, from_landed = given.rows + offset, landed + offset
    if is_given:  # noqa: SIM108  (a number of the device)
        value = tl.load(from_given, mask=inside, other=unknown)
    else:
        value = tl.load(from_landed, mask=inside, other=0)
    return value


@triton.jit
def _clip(count):  # type: ignore[no-untyped-def]
    """Clip a number of elements to 0 to 2^30, and make it int32, as the places in a block are."""
    return tl.minimum(tl.maximum(count, 0), 1 << 30).to(tl.int32)


@triton.jit
def _receive_part(channel, puts, destinations, tables, given, landed, sizes, numbers, entry):  # type: ignore[no-untyped-def]
    """Store what another node's rank has put of a part of a hop in its place, and signal this rank."""
    _, capacity, forwarded = numbers
    hop, part = entry // sizes.parts, entry % sizes.parts
    tile = hop * sizes.channels + part // (sizes.parts // sizes.channels)
    word = tables.hops + hop * _HOP
    arrives, peer = tl.load(word + 2) == _ARRIVED, tl.load(word + 7)
    base = _sum_sizes(puts.world, tables, sizes, word + 5) + tl.where(arrives, 0, capacity)
    end = capacity + tl.where(arrives, 0, forwarded)
    size, part_rows = _find_size(puts.world, tables, sizes, tl.load(word))
    start = part * part_rows
    count = tl.maximum(tl.minimum(size - start, part_rows), 0) * given.columns
    room: tl.constexpr = puts.slot_bytes // (landed.dtype.element_ty.primitive_bitwidth // 8)
    step: tl.constexpr = MOVED_AT_ONCE if room > MOVED_AT_ONCE else room
    for begin in range(0, count, room):
        slot, filled = _find_slot(puts, part, begin // room), tl.minimum(count - begin, room)
        zero = tiles.wait_slice(puts, peer, slot)
        arrived = tiles.arrived_slice(puts, slot, peer).to(tl.pointer_type(landed.dtype.element_ty))
        arrived = tl.multiple_of(arrived + zero, 16)
        target = (base + start).to(tl.int64) * given.columns + begin
        last = end.to(tl.int64) * given.columns
        for at in range(0, filled, step):
            place = at + tl.arange(0, step)
            value = tl.load(arrived + place, mask=place < filled)
            is_stored = (place < filled) & (target + place < last)
            tl.store(landed + target + place, value, mask=is_stored & tiles.may_publish(channel))
        tiles.release_slice(puts, slot, peer, slot)
    tiles.producer_tile_notify(channel, destinations, tile, "p2p")


@triton.jit
def _find_slot(puts, part, number):  # type: ignore[no-untyped-def]
    """The slot, and the signal, of a part's slice: those of its mover, in turn."""
    movers = tl.num_programs(0) // 2
    own = puts.slots // movers
    return part % movers * own + number % own


@triton.jit
def _count_ranks(channel, puts):  # type: ignore[no-untyped-def]
    """The ranks that exchange rows: between nodes, the channel has those of this one."""
    world = channel.world
    if puts is not None:
        world = puts.world
    return world


@triton.jit
def _find_size(world, tables, sizes, chunk):  # type: ignore[no-untyped-def]
    """(rows of a chunk, rows of each of its parts): a pair's rows are cut into all its pieces' parts, of whole rows."""
    pair = chunk // sizes.pieces
    if sizes.is_transposed:
        pair = pair % world * world + pair // world
    count = tl.load(tables.table + pair * 2 + sizes.which)
    part_rows = tl.cdiv(tl.cdiv(count, sizes.pieces * sizes.parts), sizes.rows) * sizes.rows
    begin = chunk % sizes.pieces * sizes.parts * part_rows
    return tl.minimum(tl.maximum(count - begin, 0), sizes.parts * part_rows), part_rows


@triton.jit
def _sum_sizes(world, tables, sizes, word):  # type: ignore[no-untyped-def]
    """The rows of the chunks of `tables.lists` from number word[0] to number word[1] - 1."""
    longest: tl.constexpr = sizes.longest
    at = tl.load(word) + tl.arange(0, longest)
    is_before = at < tl.load(word + 1)
    found, _ = _find_size(world, tables, sizes, tl.load(tables.lists + at, mask=is_before, other=0))
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
    made: MadeRows | None = None,
    *,
    nodes: tuple[int, ...] = (),
    movers: int = 0,
) -> RoutedTables:
    """Write a rank's routed schedule into tables on its device.

    capacity: channels of a receiver, of one sender. parts, channels: of a pair's rows, at most if its pieces are as
    many. made: rows that are not there at the beginning. Those that a rank keeps are made where they arrive. nodes: of
    each rank, where there are several: signals are then of this rank's node alone, and `movers` programs put.
    """
    near = [peer for peer in range(len(routed.ranks)) if not nodes or nodes[peer] == nodes[rank]]
    world, pieces = len(routed.ranks), routed.pieces
    of_made = 0 if made is None else world * pieces
    of_message = min(max(channels // pieces, 1), capacity // max(routed.channels + of_made, 1))
    is_whole = of_message == 0  # too few signals for parts of what is made: one for each rank's
    if is_whole:
        of_message = (capacity - world) // routed.channels
    each = max(parts // pieces // of_message, 1)  # parts of a channel
    plan, of_piece = routed.ranks[rank], each * of_message
    begin = routed.channels * of_message  # of the channels of made rows
    of_rank = 1 if is_whole else pieces * of_message

    def moves(chunk: int) -> bool:
        source, target = divmod(chunk // pieces, world)
        return made is None or source != target

    def list_messages(sender: int) -> list[RoutedMessage]:
        found = [
            message._replace(hops=tuple(hop for hop in message.hops if moves(hop.chunk)))
            for message in routed.ranks[sender].messages
        ]
        return [message for message in found if message.hops]

    def table(numbers: Iterable[int]) -> Tensor:
        return torch.tensor(list(numbers) or [0], dtype=torch.int32, device="cpu").to(device)

    def span(sender: int, number: int) -> list[tuple[int, int, int]]:
        """(rank, first channel, the one after it) of each signal of a message; NOBODY's has none."""
        if number == NOBODY:
            return [(0, 0, 0)] * of_message
        return [(near.index(sender), at, at + 1) for at in range(number * of_message, (number + 1) * of_message)]

    def signal(receiver: int, number: int) -> list[tuple[int, int, int]]:
        """List as `span`, at the receiver; at a rank of another node none."""
        return span(receiver, number) if receiver in near else [(0, 0, 0)] * of_message

    def give(sender: int) -> int:
        """The rank that gives this one the signals of what the sender sends."""
        return sender if sender in near or sender == NOBODY else rank

    def await_hop(hop: Hop) -> list[tuple[int, int, int]]:
        if hop.area != GIVEN or made is None:
            return span(give(hop.sender), hop.channel)
        first = begin + hop.chunk // pieces % world * of_rank
        places = range(hop.chunk % pieces * of_message, (hop.chunk % pieces + 1) * of_message)
        return [(near.index(rank), at, at + 1) for at in (first + min(place, of_rank - 1) for place in places)]

    def look_up(signals: Iterable[list[tuple[int, int, int]]]) -> tiles.DynamicMapping:
        found = list(chain.from_iterable(signals)) or [(0, 0, 0)]
        ranks, starts, ends = map(table, zip(*found, strict=True))
        unused = torch.zeros_like(ranks)
        return tiles.look_up_tiles(unused, unused, ranks, starts, ends)

    lists = [routed.list_places(of, area) for of in range(world) for area in (GIVEN, FORWARDED, ARRIVED)]
    starts = list(accumulate(map(len, lists), initial=0))
    messages = list_messages(rank)
    hops = [(message, hop) for message in messages for hop in message.hops]
    far = [  # in the order of all ranks' messages, by which channels are numbered
        (message.channel, sender, message)
        for sender in range(world)
        for message in list_messages(sender)
        if message.receiver == rank and sender not in near
    ]
    received = [(sender, message) for _, sender, message in sorted(far)]
    words = []
    for message, hop in hops:
        first, there = starts[3 * rank + hop.area], starts[3 * message.receiver + message.area]
        peer = _NEAR.value if message.receiver in near else message.receiver
        words += [hop.chunk, hop.area, message.area, first, first + hop.number, there, there + hop.to, peer]
    for sender, message in received:
        there = starts[3 * rank + message.area]
        for hop in message.hops:
            words += [hop.chunk, 0, message.area, 0, 0, there, there + hop.to, sender]
    arrived = zip(plan.arrivals, routed.list_places(rank, ARRIVED), strict=True)
    arrivals = [found for found, chunk in arrived if moves(chunk)]
    number = 0

    def order_parts(messages: Iterable[RoutedMessage]) -> list[int]:
        """The parts of the next hops, message after message, of each all hops' first parts first."""
        nonlocal number
        found = []
        for message in messages:
            of_hops = range(number, number := number + len(message.hops))
            found += [hop * of_piece + part for part in range(of_piece) for hop in of_hops]
        return found

    order, taken, begins = order_parts(messages), order_parts(message for _, message in received), [0]
    if movers:
        shares = [
            [entry for entry in entries if entry % of_piece % movers == mover]
            for entries in (order, taken)
            for mover in range(movers)
        ]
        order, begins = list(chain.from_iterable(shares)), list(accumulate(map(len, shares), initial=0))

    counts = torch.zeros(2, len(near), capacity, dtype=torch.int32, device="cpu")
    for sender in range(world):
        for message in list_messages(sender):
            channels_of = slice(message.channel * of_message, (message.channel + 1) * of_message)
            is_near = nodes == () or nodes[sender] == nodes[message.receiver]
            giver = sender if is_near else message.receiver
            if message.receiver == rank:
                counts[0, near.index(giver), channels_of] += each * len(message.hops)
            if giver == rank:
                counts[1, near.index(message.receiver), channels_of] += each * len(message.hops)
    made_signals: MadeSignals | None = None
    if made is not None:
        spans = made.find_channels(pieces * of_piece, pieces * of_piece if is_whole else each)
        for target in (each for each in range(world) if each != rank):
            at = begin + target * of_rank
            for first, last in spans:
                counts[:, near.index(rank), at + first : at + last] += made.signals
        places = range(begin, begin + world * of_rank)
        signals = look_up([(near.index(rank), at, at + 1)] for at in places)
        made_signals = MadeSignals(signals, MadeChannels(table(chain.from_iterable(spans)), of_rank))
    return RoutedTables(
        HopTables(
            table(words), table(order), table(chain.from_iterable(lists)), table(begins), 0 if movers else len(order)
        ),
        look_up(await_hop(hop) for _, hop in hops),
        look_up(
            [
                *(signal(message.receiver, message.channel) for message, _ in hops),
                *(span(rank, message.channel) for _, message in received for _ in message.hops),
            ]
        ),
        look_up(span(give(sender), at) for sender, at in arrivals),
        table(giver * capacity + at for sender, of in arrivals for giver, at, _ in span(give(sender), of)),
        counts.to(device),
        made_signals,
        triton.next_power_of_2(max(map(len, lists))),
        routed.pieces,
        of_piece,
        of_message,
        movers,
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
    puts: tiles.PutChannel | None = None,
) -> None:
    """Launch `move_rows` in a call that has begun. puts: between nodes, where as many programs put, and receive.

    tile: rows and block of `MoveSizes`; by: which, and is_transposed. waits: for all that arrives here.
    """
    arriving = tables.arrivals.rank.numel() if waits else 0
    sizes = *by, tables.pieces, tables.parts, tables.channels, tables.longest, *tile, arriving
    programs, begun = 2 * tables.movers or programs, None if puts is None else puts.begin("rows by a schedule")
    hops = tables.hops._replace(table=table, permit=permit)
    arguments = (
        channel, begun, tables.sources, tables.destinations, tables.arrivals, hops, given, landed.rows,
        fix_sizes(*sizes), given.known, landed.capacity, landed.forwarded,
    )  # fmt: skip
    key = *map(tiles.kind_of, (*hops, *given, landed.rows)), *sizes, None if puts is None else puts.kind
    block_channel.launch(move_rows, key, programs, arguments, num_warps=16)


@lru_cache(maxsize=256)
def fix_sizes(*sizes: int) -> MoveSizes:
    """The sizes as constants."""
    return MoveSizes(*map(tl.constexpr, sizes))
