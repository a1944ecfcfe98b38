"""The fused kernel: pooled vectors go straight into their ranks' outputs (Punniyamurthy et al., section 3)."""

import triton
import triton.language as tl

from stretto import tiles
from stretto.ops.embedding.index_errors import OTHER_TABLES, record_index_error
from stretto.ops.embedding.pooling_kernel import find_table, pool_bags, read_bags, store_bags
from stretto.tiles.call_state import EPOCH
from stretto.tiles.intrinsics import now

ORDERS = ("by_table", "mixed", "remote_first", "oblivious")
"""by_table: table after table, and of each the next rank's samples first, own ones last. mixed: the same, slice by
slice of all tables in turn. remote_first: all slices for other ranks before all own ones (section 3.2). oblivious: rank
0's samples first on every rank."""

UNIT = tl.constexpr(16)
"""Bytes that ranks tell each other places in their rings in."""

TRACE_WORDS = 4
"""Of a task in a trace: its program, destination, begin, end; of a program: its begin, begin of its wait, end, 0."""


@triton.jit
def begin_pooling(channel, unused, counts, destinations, tickets, offset, fingerprint, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin a call, tell all ranks where in this rank's ring its output lies, and hear it of them. One program.

    unused: a mapping; counts say all. offset: UNITs from the ring's beginning on.
    Signals: `peer_tiles` slot 0 of all other ranks, after the word in their `destinations`: this rank has begun the
    call, so it has ended the one before, and its output may be stored to.
    Waits: for that signal of all other ranks, so that no program of `pool_and_send` does: those may fill the GPU, and
    another group's kernel that a peer waits for would find no place.
    Reuse: the words are of the call's parity. This rank writes those of call e when it has ended call e - 1, which took
    what the readers, who own tables, sent it in e - 1, and so after they had ended call e - 2.
    """
    tiles.begin_call(channel, unused, counts, None, False, BLOCK)
    tl.debug_barrier()
    epoch = tl.load(channel.state + EPOCH)
    word = ((epoch & 1) * channel.world + channel.rank) * 2
    publishes = tiles.may_publish(channel)
    for distance in tl.static_range(channel.world):
        peer = (channel.rank + distance) % channel.world
        words = tiles.peer_pointer(channel, destinations, peer) + word
        tl.store(words, tl.cast(offset, tl.int64), mask=publishes)
        tl.store(words + 1, tl.cast(fingerprint, tl.int64), mask=publishes)
    tl.store(tickets, 0)
    tiles.peer_tile_notify(channel, 0, mode="broadcast")
    tiles.peer_tile_wait(channel, 0, mode="broadcast")


@triton.jit
def pool_and_send(  # type: ignore[no-untyped-def]
    channel, mapping, lookup, pooling, indices, offsets, weights, slots, destinations, tickets,
    fingerprint, report, trace, waiters, ORDER: tl.constexpr,
):  # fmt: skip
    """Pool all bags of this rank's tables, each vector stored where it belongs in the output of its sample's rank.

    A task is a slice: some samples of one rank, one table. Programs take tasks by tickets, in the order of `ORDERS`.
    Signals: after a slice's stores (the block's barrier, then release at system scope), its channel at its rank, by the
    number of its samples; a channel is of some of a rank's tables. So whom it is for need not know how it was sliced.
    Waits: at the end, the last `waiters` programs for their shares of (source, channel), so that when the kernel has
    ended the output is complete. The others end before, which leaves room for other groups' kernels, however many
    programs the GPU holds at once.
    No cycle, and no need for all programs to be resident: a program waits for slices only when all of its rank's tasks
    are taken by programs that run, and tasks wait for nothing: `begin_pooling` has heard of all ranks.
    Reuse: slots are stored to only after their rank has said so in this call; which is free, its host knows.
    """
    began = tl.zeros((), tl.int64)
    if trace is not None:
        began = now()
    per_rank = tl.cdiv(lookup.batch, pooling.slice)  # slices of a rank and table
    tasks = channel.world * lookup.tables * per_rank
    parity = (tl.load(channel.state + EPOCH) & 1) * channel.world
    units: tl.constexpr = UNIT * 8 // slots.dtype.element_ty.primitive_bitwidth
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < tasks:
        started = tl.zeros((), tl.int64)
        if trace is not None:
            started = now()
        destination, table, group = place_task(
            ticket, channel.world, channel.rank, lookup.tables, per_rank, ORDER=ORDER
        )
        address, rows, dim, column = find_table(lookup, table)
        first = group * pooling.slice
        words = destinations + (parity + destination) * 2
        slot = tl.load(words) * units
        is_other = tl.load(words + 1) != fingerprint
        # An atomic, so that all threads see the same: a wait that has failed says why by itself.
        if is_other & (tl.atomic_add(channel.failed, 0, sem="relaxed", scope="gpu") == 0):
            record_index_error(report, OTHER_TABLES, tl.cast(destination, tl.int64), slot, slot, slot)
        # After a wait that has failed, the place may be one that its rank has given to another tensor.
        publishes = tiles.may_publish(channel)
        for part in range(0, pooling.slice, pooling.bags):
            sample = first + part + tl.arange(0, pooling.bags)
            inside = sample < lookup.batch
            start, end = read_bags(
                lookup, pooling, offsets, table, channel.world, destination * lookup.batch + sample, inside, report
            )
            total = pool_bags(
                lookup, pooling, address, rows, dim, indices, weights, start, end, slots.dtype, table, report
            )
            inside = inside & publishes
            out = tl.multiple_of(tiles.peer_pointer(channel, slots, destination) + slot, 16)
            store_bags(lookup, out, sample, inside, dim, column, total)
        if destination != channel.rank:
            stored = tl.minimum(lookup.batch - first, pooling.slice)
            tile = destination * mapping.channels + table % mapping.channels
            tiles.producer_tile_notify(channel, mapping, tile, "p2p", count=stored)
        if trace is not None:
            words = trace + ticket.to(tl.int64) * 4
            tl.store(words, tl.program_id(0).to(tl.int64))
            tl.store(words + 1, tl.cast(destination, tl.int64))
            tl.store(words + 2, started)
            tl.store(words + 3, now())
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    waits = tl.zeros((), tl.int64)
    if trace is not None:
        waits = now()
    waiter = tiles.arrive_produced(channel) - (tl.num_programs(0) - waiters)
    if waiter >= 0:
        for index in range(waiter, (channel.world - 1) * mapping.channels, waiters):
            source = (channel.rank + 1 + index // mapping.channels) % channel.world
            tile = channel.rank * mapping.channels + index % mapping.channels
            tiles.consumer_tile_wait(channel, mapping, tile, source=source)
    if trace is not None:
        words = trace + (tasks + tl.program_id(0)).to(tl.int64) * 4
        tl.store(words, began)
        tl.store(words + 1, waits)
        tl.store(words + 2, now())


@triton.jit
def pool_alone(lookup, pooling, indices, offsets, weights, out, tickets, report, world, ORDER: tl.constexpr):  # type: ignore[no-untyped-def]
    """`pool_and_send` without any communication: into out [world, samples of a rank, width], for a library's exchange.

    tickets: int32 [1], 0.
    """
    per_rank = tl.cdiv(lookup.batch, pooling.slice)
    tasks = world * lookup.tables * per_rank
    ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while ticket < tasks:
        destination, table, group = place_task(ticket, world, 0, lookup.tables, per_rank, ORDER=ORDER)
        address, rows, dim, column = find_table(lookup, table)
        for part in range(0, pooling.slice, pooling.bags):
            sample = group * pooling.slice + part + tl.arange(0, pooling.bags)
            inside = sample < lookup.batch
            row = destination * lookup.batch + sample
            start, end = read_bags(lookup, pooling, offsets, table, world, row, inside, report)
            total = pool_bags(
                lookup, pooling, address, rows, dim, indices, weights, start, end, out.dtype, table, report
            )
            store_bags(lookup, out, row, inside, dim, column, total)
        ticket = tl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")


@triton.jit
def place_task(index, world, rank, tables, per_rank, ORDER: tl.constexpr):  # type: ignore[no-untyped-def]
    """(destination, table, group of samples) of the index-th task."""
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
