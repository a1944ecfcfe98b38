# SPDX-License-Identifier: Apache-2.0
"""Kernels of the fused look-up: pool bags, store each vector into its rank's output (Punniyamurthy et al., section 3).

A call on each rank is two launches:

    begin_pooling    1 program: publish this rank's output address, wait for all other ranks' addresses, and check
                     whether all of them make the same call; if not, it ends here on all ranks, with an error
    pool_and_send    programs take slices by tickets: pool, store into the destination rank's output slot, signal;
                     the last programs to finish wait for the slices of all other ranks

`output_ring` describes the slots, and why a slot may be written again. `pool_alone` is the look-up without the
exchange, for benches, and for the exchange by a schedule (`scheduled`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from stretto import tiles
from stretto.ops.embedding.index_errors import OTHER_GRADIENTS, OTHER_TABLES, REFUSED, record_index_error
from stretto.ops.embedding.placement import AGREED, GRADIENTS, Announced
from stretto.ops.embedding.pooling_kernel import find_table, pool_bags, read_bags, store_bags
from stretto.tiles.call_state import EPOCH, advance_targets
from stretto.tiles.intrinsics import now

ORDERS = ("by_table", "mixed", "remote_first", "oblivious")
"""Orders of slices. by_table: table after table; within each, the next rank's samples first and own ones last. mixed:
the same for one slice of every table at a time. remote_first: all slices for other ranks before all own ones (section
3.2). oblivious: rank 0's samples first on every rank."""

UNIT = tl.constexpr(16)
"""Bytes: the unit of the offsets that ranks send each other, of outputs in their rings."""

HAS_TABLES = tl.constexpr(Announced.HAS_TABLES.value)
NEEDS_GRAD = tl.constexpr(Announced.NEEDS_GRAD.value)
REFUSES = tl.constexpr(Announced.REFUSES.value)
_PERMITS = tl.constexpr(AGREED)
_PERMITS_GRADIENTS = tl.constexpr(AGREED | GRADIENTS)


class RingPointers(NamedTuple):
    """Kernel argument: the addresses of all ranks' outputs; see `output_ring.OutputRing`.

    slots: this rank's, of the tables' dtype, at the same place in symmetric memory on all ranks. destinations: int64
    [2, world, 2]: by the call's parity and the rank, where its output begins (in UNITs from `slots` on) and what it has
    announced (`EmbeddingPlacement.announce`). tickets: int32 [1], how many tasks are taken. permit: int32 [1], 0 in a
    call that ranks do not make together.
    """

    slots: Any
    destinations: Any
    tickets: Any
    permit: Any


class PooledVectors(NamedTuple):
    """Kernel argument: where `pool_alone` stores vectors for other ranks, or for all, and its own, if apart."""

    others: Any
    own: Any = None


@triton.jit
def begin_pooling(  # type: ignore[no-untyped-def]
    channel, mapping, counts, ring, call_permit, report, offset, announced, everyones, RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Begin a call: send all ranks this rank's output position in its ring, and wait for theirs.

    One program. counts: of the signals that `mapping` maps to. offset: UNITs from the ring's beginning on.
    announced: this rank's announcement of the call. everyones: int64 [RANKS], those of all ranks, where ranks of other
    nodes have put them; None in one node. ring.permit, call_permit: int32 [1] each, or None, which get what the call
    permits its backward pass: of this placement's last call, and of this one.
    Signals: peer tile 0 at all other ranks, after the words in their `destinations`: this rank has begun the call, so
    it has ended the previous one, and peers may store into its output.
    Waits: for that signal from all other ranks, so that no program of `pool_and_send` has to: those may fill the GPU,
    and then a kernel of another group, on which a peer depends, would find no place.
    Reuse: `destinations` has words for each parity of the call number. This rank writes the words of call e once it has
    ended call e - 1, in which it received that all ranks had begun e - 1; so they had ended call e - 2, the last to
    read these words. Agreement: each rank compares what all have announced. Unless all are alike, each sees a
    difference, so all of them end the call here: they record an error, and take back the counters' targets, since no
    slice is sent or awaited.
    """
    tiles.begin_call(channel, mapping, counts, None, False, BLOCK)
    tl.debug_barrier()
    epoch = tl.load(channel.state + EPOCH)
    word = ((epoch & 1) * channel.world + channel.rank) * 2
    publishes = tiles.may_publish(channel)
    for distance in tl.static_range(channel.world):
        peer = (channel.rank + distance) % channel.world
        words = tiles.peer_pointer(channel, ring.destinations, peer) + word
        tl.store(words, tl.cast(offset, tl.int64), mask=publishes)
        tl.store(words + 1, tl.cast(announced, tl.int64), mask=publishes)
    tl.store(ring.tickets, 0)
    tiles.peer_tile_notify(channel, 0, mode="broadcast")
    ready = tiles.peer_tile_wait(channel, 0, mode="broadcast")
    own = tl.cast(announced, tl.int64)
    other, refusing, needing, reluctant = -1, -1, -1, -1
    for peer in tl.static_range(RANKS):
        if everyones is None:
            announcement = tl.load(ring.destinations + ((epoch & 1) * channel.world + peer) * 2 + 1 + ready)
        else:
            announcement = tl.load(everyones + peer)
        needs_grad = ((announcement >> NEEDS_GRAD) & 1) == 1
        other = tl.where(((announcement ^ own) & 0x7FFFFFFF) != 0, peer, other)
        refusing = tl.where(((announcement >> REFUSES) & 1) == 1, peer, refusing)
        needing = tl.where(needs_grad & (((announcement >> HAS_TABLES) & 1) == 1), peer, needing)
        reluctant = tl.where(needs_grad, reluctant, peer)
    permits = tl.where(needing >= 0, _PERMITS_GRADIENTS, _PERMITS)
    if (other >= 0) | (refusing >= 0) | ((needing >= 0) & (reluctant >= 0)):
        permits = 0
        advance_targets(channel, mapping, counts, BLOCK, -1)
        # A failed wait is reported already, and a refusing rank's host raises the error for which it refuses. An atomic
        # shows all threads the same flag.
        reports = tl.atomic_add(channel.failed, 0, sem="relaxed", scope="gpu") == 0
        if reports & (((own >> REFUSES) & 1) == 0):
            if refusing >= 0:
                record_index_error(report, REFUSED, refusing, refusing, refusing, refusing)
            elif other >= 0:
                record_index_error(report, OTHER_TABLES, other, other, other, other)
            else:
                record_index_error(report, OTHER_GRADIENTS, needing, reluctant, needing, needing)
    tl.store(ring.permit, permits)
    if call_permit is not None:
        tl.store(call_permit, permits)


@triton.jit
def pool_and_send(  # type: ignore[no-untyped-def]
    channel, mapping, tables, pooling, bags, ring, report, trace, waiters, ORDER: tl.constexpr
):
    """Pool all bags of this rank's tables, and store each vector into its place in the output of its sample's rank.

    A task is a slice: some samples of one rank, in one table. Programs take tasks by tickets, in one of `ORDERS`.
    trace: int64 [tasks + programs, 4], for benches, or None: each task's program, destination, begin and end, then each
    program's begin, the begin of its wait, 0 and its end, in nanoseconds (`now`).
    Signals: after a slice's stores (the block's barrier, then release at system scope), the slice's channel at its
    rank, by the number of its samples. A channel stands for some of a rank's tables, so the receiver need not know the
    slices.
    Waits: at the end, the last `waiters` programs each wait for their share of (source, channel) pairs, so the output
    is complete when the kernel has ended. The other programs end earlier, which leaves room for other groups' kernels,
    however many programs the GPU holds at once.
    No cycle, and programs need not all be resident: a program waits for slices only once running programs hold all of
    its rank's tasks, and tasks never wait, since `begin_pooling` has received all ranks' signals.
    Reuse: programs store into a slot only after its rank has offered it for this call; that rank's host knows it is
    free.
    """
    if trace is not None:
        began = now()
    per_rank = tl.cdiv(tables.batch, pooling.slice)  # slices of a rank and table
    agrees = tl.load(ring.permit) != 0
    tasks = tl.where(agrees, channel.world * tables.count * per_rank, 0)
    parity = (tl.load(channel.state + EPOCH) & 1) * channel.world
    units: tl.constexpr = UNIT * 8 // ring.slots.dtype.element_ty.primitive_bitwidth
    ticket = tl.atomic_add(ring.tickets, 1, sem="relaxed", scope="gpu")
    while ticket < tasks:
        if trace is not None:
            started = now()
        destination, table, group = place_task(ticket, channel.world, channel.rank, tables.count, per_rank, ORDER=ORDER)
        address, rows, dim, column = find_table(tables, table)
        first = group * pooling.slice
        slot = tl.load(ring.destinations + (parity + destination) * 2) * units
        # After a failed wait, the slot may be one that its rank has given to another tensor by now.
        publishes = tiles.may_publish(channel)
        for part in range(0, pooling.slice, pooling.bags):
            sample = first + part + tl.arange(0, pooling.bags)
            mask = sample < tables.batch
            start, end = read_bags(
                tables, pooling, bags, table, channel.world, destination * tables.batch + sample, mask, report
            )
            total = pool_bags(tables, pooling, bags, address, rows, dim, ring.slots.dtype, table, start, end, report)
            mask = mask & publishes
            out = tl.multiple_of(tiles.peer_pointer(channel, ring.slots, destination) + slot, 16)
            store_bags(tables, out, sample, mask, dim, tables.width, column, total)
        if destination != channel.rank:
            stored = tl.minimum(tables.batch - first, pooling.slice)
            tile = destination * mapping.channels + table % mapping.channels
            tiles.producer_tile_notify(channel, mapping, tile, "p2p", count=stored)
        if trace is not None:
            _note(trace, ticket, tl.program_id(0), destination, started)
        ticket = tl.atomic_add(ring.tickets, 1, sem="relaxed", scope="gpu")
    if trace is not None:
        waits = now()
    waiter = tiles.arrive_produced(channel) - (tl.num_programs(0) - waiters)
    if waiter >= 0:
        for index in range(waiter, tl.where(agrees, (channel.world - 1) * mapping.channels, 0), waiters):
            source = (channel.rank + 1 + index // mapping.channels) % channel.world
            tile = channel.rank * mapping.channels + index % mapping.channels
            tiles.consumer_tile_wait(channel, mapping, tile, source=source)
    if trace is not None:
        _note(trace, tasks + tl.program_id(0), began, waits, 0)


@triton.jit
def _note(trace, row, first, second, third):  # type: ignore[no-untyped-def]
    """Write three numbers, and the time, into a row of a trace."""
    words = trace + tl.cast(row, tl.int64) * 4
    tl.store(words, tl.cast(first, tl.int64))
    tl.store(words + 1, tl.cast(second, tl.int64))
    tl.store(words + 2, tl.cast(third, tl.int64))
    tl.store(words + 3, now())


@triton.jit
def pool_alone(  # type: ignore[no-untyped-def]
    channel, mapping, channels, tables, pooling, bags, out, ring, report, world, rank, ORDER: tl.constexpr
):
    """Pool as `pool_and_send` does, without communication, into out.others [world, batch, width].

    ring: with tickets, 0, and a permit or None. channel, out.own and `MadeSignals` (mapping, channels): None for all;
    or, for a schedule's moves, which send the rows of each other rank as they are pooled (`move_rows`): out.others is
    then [world, sum of all tables' batch * dim], so that what is pooled first comes first, and out.own, of as many
    numbers, gets what is for this rank (of all ranks: the channel's are those of this node).
    Signals: after a slice's stores, all channels of its rank, if that is another one, that have rows of its table,
    here, by the number of its samples.
    """
    per_rank = tl.cdiv(tables.batch, pooling.slice)
    tasks = world * tables.count * per_rank
    if ring.permit is not None:
        tasks = tl.where(tl.load(ring.permit) != 0, tasks, 0)
    ticket = tl.atomic_add(ring.tickets, 1, sem="relaxed", scope="gpu")
    while ticket < tasks:
        destination, table, group = place_task(ticket, world, rank, tables.count, per_rank, ORDER=ORDER)
        address, rows, dim, column = find_table(tables, table)
        of_rank = destination.to(tl.int64) * tables.batch
        for part in range(0, pooling.slice, pooling.bags):
            sample = group * pooling.slice + part + tl.arange(0, pooling.bags)
            mask = sample < tables.batch
            row = destination * tables.batch + sample
            start, end = read_bags(tables, pooling, bags, table, world, row, mask, report)
            total = pool_bags(tables, pooling, bags, address, rows, dim, out.others.dtype, table, start, end, report)
            if ring.permit is None:
                store_bags(tables, out.others, row, mask, dim, tables.width, column, total)
            else:
                place = tl.multiple_of(column * tables.batch, tables.out_multiple)
                if destination == rank:
                    store_bags(tables, out.own + place, sample, mask, dim, dim, 0, total)
                else:
                    there = tl.multiple_of(of_rank * tables.width + place, tables.out_multiple)
                    store_bags(tables, out.others + there, sample, mask, dim, dim, 0, total)
        if ring.permit is not None:
            stored = tl.minimum(tables.batch - group * pooling.slice, pooling.slice)
            first_channel, end_channel = tl.load(channels.spans + 2 * table), tl.load(channels.spans + 2 * table + 1)
            for of_rows in range(first_channel, tl.where(destination == rank, first_channel, end_channel)):
                tile = destination * channels.count + of_rows
                tiles.producer_tile_notify(channel, mapping, tile, "p2p", count=stored)
        ticket = tl.atomic_add(ring.tickets, 1, sem="relaxed", scope="gpu")


@triton.jit
def place_task(index, world, rank, tables, per_rank, ORDER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (destination rank, table, number of the slice among that rank's and table's) of the index-th task."""
    if ORDER == "by_table":
        within = index % (world * per_rank)
        destination = (rank + 1 + within // per_rank) % world
        table, group = index // (world * per_rank), within % per_rank
    elif ORDER == "mixed":
        within = index % (world * tables)
        destination = (rank + 1 + within % world) % world
        table, group = within // world, index // (world * tables)
    else:
        destination = index // (tables * per_rank)
        if ORDER == "remote_first":
            destination = (rank + 1 + destination) % world
        within = index % (tables * per_rank)
        table, group = within // per_rank, within % per_rank
    return destination, table, group
