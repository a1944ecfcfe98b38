# SPDX-License-Identifier: Apache-2.0
"""Kernels of the look-up with puts: stores to ranks with peer access, NVSHMEM's puts to all others.

A call is two launches: `begin_putting` (one program) announces the call, `pool_and_put` pools, sends and waits.
This module is imported at the first call, since NVSHMEM's bindings are not installed everywhere.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch.distributed._symmetric_memory import _nvshmem_triton as nvshmem

from stretto import tiles
from stretto.ops.embedding.forward_kernel import place_task
from stretto.ops.embedding.index_errors import OTHER_TABLES, record_index_error
from stretto.ops.embedding.pooling_kernel import find_table, pool_bags, read_bags, store_bags
from stretto.tiles.call_state import EPOCH
from stretto.tiles.waits import OF_BEGIN, OF_CONSUMER, READS_PER_CLOCK, watch_clock

# From NVSHMEM's headers, device_host_transport/nvshmem_common_transport.h and nvshmem_constants.h. The values in the
# documentation of torch's bindings (5 to add, 3 for "greater or equal") are wrong.
SIGNAL_SET = tl.constexpr(9)
SIGNAL_ADD = tl.constexpr(10)
GREATER_OR_EQUAL = tl.constexpr(5)

CALL = tl.constexpr(32)
"""Bits of the placement's fingerprint in a word of `begun`; the call's number stands above them."""


class PutExchange(NamedTuple):
    """Kernel argument: the signals and buffers of a `PutSlots`.

    peer_access: int64 [world], whether this rank stores into each rank's memory; else it puts.
    In symmetric memory: signals, int64 [world, capacity], how many vectors each source has sent here through each
    channel since the memory was allocated; begun, int64 [2, world], the last call that each rank has begun, by the
    call's parity; staging, of the tables' dtype, [programs, bags, block].
    In this rank's memory: targets, int64 [world, capacity], of signals; tickets, int32 [1], how many tasks are taken.
    """

    peer_access: Any
    signals: Any
    begun: Any
    staging: Any
    targets: Any
    tickets: Any


@triton.jit
def begin_putting(channel, exchange, counts, fingerprint, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin a call: advance its number and targets, and signal all other ranks. One program of one warp.

    counts: int64 [world, capacity], the vectors that each source sends here in the call.
    Signals: `begun` of the call's parity, at all other ranks. All threads of the warp issue NVSHMEM's signal, which
    sets a word and so may be repeated.
    Waits: none here; `pool_and_put` waits at its end.
    Reuse: a rank sets its word of call e + 2 once it has ended e + 1, so it has seen its readers' words of e + 1, which
    they set once they had ended e, in which they read the word of e. The sets of call e are complete when this kernel
    ends, so none of them arrives after the one of e + 2.
    """
    epoch = tl.load(channel.state + EPOCH) + 1
    word = tl.arange(0, BLOCK)
    mask = word < channel.world * channel.capacity
    arriving = tl.load(counts + word, mask=mask, other=0)
    tl.store(exchange.targets + word, tl.load(exchange.targets + word, mask=mask, other=0) + arriving, mask=mask)
    tl.debug_barrier()
    tl.store(channel.state + EPOCH, epoch)
    tl.store(exchange.tickets, 0)
    announced = (epoch.to(tl.int64) << CALL) | fingerprint
    # After a failed wait, announce 0, which is never a call's number. An atomic returns the same flag to all threads.
    announced = tl.where(tl.atomic_add(channel.failed, 0, sem="relaxed", scope="gpu") == 0, announced, 0)
    own = exchange.begun + (epoch & 1) * channel.world + channel.rank
    for distance in tl.static_range(1, channel.world):
        peer = (channel.rank + distance) % channel.world
        if tl.load(exchange.peer_access + peer) != 0:
            tl.atomic_xchg(tiles.peer_pointer(channel, own, peer), announced, sem="release", scope="sys")
        else:
            nvshmem.signal_op(own.to(tl.int64), announced, SIGNAL_SET, peer)
    nvshmem.quiet()


@triton.jit
def pool_and_put(  # type: ignore[no-untyped-def]
    channel, exchange, tables, pooling, bags, out, fingerprint, report, ORDER: tl.constexpr
):
    """Pool as `pool_and_send` does, and store or put each vector into its place in the output of its sample's rank.

    out: this rank's slot of the call, at the same place in symmetric memory on all ranks.
    Signals: a slice's number of vectors, added at its rank: for a rank with peer access after the block's barrier
    (release at system scope), for others with the put of the slice's last vector, after a fence (`put_bags`).
    Waits: at the end, each program for its share of what others send, and of their words that they have begun the call.
    No cycle: a program waits only once running programs, which wait for nothing, hold all of its rank's tasks.
    Reuse: calls alternate between two slots, with no wait before the first store. A rank that stores for call e + 2 has
    ended e + 1, so it has seen that the slot's rank had begun e + 1, which that rank did, in stream order, after
    copying its output of e out of the slot. Ranks without tables announce their calls, too. Everything that a rank has
    put in a call is complete when its kernel has ended (`quiet`), so a count of one call never stands for a vector of
    another.
    """
    per_rank = tl.cdiv(tables.batch, pooling.slice)  # slices of a rank and table
    tasks = channel.world * tables.count * per_rank
    puts = 0
    ticket = tl.atomic_add(exchange.tickets, 1, sem="relaxed", scope="gpu")
    while ticket < tasks:
        destination, table, group = place_task(ticket, channel.world, channel.rank, tables.count, per_rank, ORDER=ORDER)
        address, rows, dim, column = find_table(tables, table)
        first = group * pooling.slice
        end_sample = tl.minimum(first + pooling.slice, tables.batch)
        has_access = tl.load(exchange.peer_access + destination) != 0
        counter = exchange.signals + channel.rank * channel.capacity + table % channel.capacity
        for part in range(0, pooling.slice, pooling.bags):
            sample = first + part + tl.arange(0, pooling.bags)
            mask = sample < tables.batch
            start, end = read_bags(
                tables, pooling, bags, table, channel.world, destination * tables.batch + sample, mask, report
            )
            total = pool_bags(tables, pooling, bags, address, rows, dim, out.dtype, table, start, end, report)
            if has_access:
                there = tl.multiple_of(tiles.peer_pointer(channel, out, destination), 16)
                store_bags(tables, there, sample, mask, dim, column, total)
            else:
                samples = (first, first + part, end_sample)
                put_bags(channel, exchange, tables, pooling, out, counter, samples, destination, dim, column, total)
                puts += 1
        if has_access & (destination != channel.rank):
            tl.debug_barrier()
            stored = (end_sample - first).to(tl.int64)
            there = tiles.peer_pointer(channel, counter, destination)
            tl.atomic_add(there, stored, mask=tiles.may_publish(channel), sem="release", scope="sys")
        ticket = tl.atomic_add(exchange.tickets, 1, sem="relaxed", scope="gpu")
    if puts > 0:
        nvshmem.quiet()
    epoch = tl.load(channel.state + EPOCH)
    for index in range(tl.program_id(0), channel.world - 1, tl.num_programs(0)):
        source = (channel.rank + 1 + index) % channel.world
        word = exchange.begun + (epoch & 1) * channel.world + source
        announced = await_word(channel, word, epoch.to(tl.int64), CALL, OF_BEGIN, index, source)
        is_other = announced.to(tl.int32) != fingerprint
        # Report it unless a wait has failed, which is reported already. An atomic shows all threads the same flag.
        if is_other & (tl.atomic_add(channel.failed, 0, sem="relaxed", scope="gpu") == 0):
            record_index_error(report, OTHER_TABLES, source, source, source, source)
    for index in range(tl.program_id(0), (channel.world - 1) * channel.capacity, tl.num_programs(0)):
        source = (channel.rank + 1 + index // channel.capacity) % channel.world
        word = source * channel.capacity + index % channel.capacity
        target = tl.load(exchange.targets + word)
        seen = await_word(channel, exchange.signals + word, target, 0, OF_CONSUMER, index % channel.capacity, source)
        if seen >= target:
            # The signal has arrived, so this returns immediately. With some network cards, only NVSHMEM's own wait
            # makes sure that the data before the signal is visible.
            nvshmem.signal_wait_until(exchange.signals + word, GREATER_OR_EQUAL, target)


@triton.jit
def put_bags(channel, exchange, tables, pooling, out, counter, samples, destination, dim, column, total):  # type: ignore[no-untyped-def]
    """Round a tile, stage it in symmetric memory, and put its vectors one by one to the destination rank.

    samples: the first of the slice, the first of this tile, and the end of the slice.
    Order: the block's stores to the staging place, its barrier, then the puts, by all of its threads. The put of the
    slice's last vector carries a signal that adds the number of all its vectors; a fence precedes it, since a put
    with a signal is ordered after its own data alone. Such a put signals once, while `signal_op` would signal once for
    each thread.
    Reuse: a program has one staging place. Puts of this kind return when the source may be written to again, and the
    barrier at the end informs all threads.
    """
    slice_first, first, end = samples
    place = exchange.staging + tl.program_id(0).to(tl.int64) * (pooling.bags * tables.block)
    bags = tl.arange(0, pooling.bags)
    columns = tl.arange(0, tables.block)
    tl.store(place + (bags[:, None] * tables.block + columns[None, :]), total.to(out.dtype.element_ty))
    tl.debug_barrier()
    length = tl.cast(dim, tl.int64)
    for sample in range(first, tl.minimum(first + pooling.bags, end)):
        source = place + (sample - first) * tables.block
        there = out + (sample.to(tl.int64) * tables.width + column)
        if sample + 1 < end:
            nvshmem.put(there, source, length, destination)
        else:
            nvshmem.fence()
            size = length * (out.dtype.element_ty.primitive_bitwidth // 8)
            failed = tl.atomic_add(channel.failed, 0, sem="relaxed", scope="gpu")
            count = tl.where(failed == 0, end - slice_first, 0)
            nvshmem.putmem_signal_block(there, source, size, counter, count, SIGNAL_ADD, destination)
    tl.debug_barrier()


@triton.jit
def await_word(channel, word, target, SHIFT: tl.constexpr, kind: tl.constexpr, index, source):  # type: ignore[no-untyped-def]
    """Wait until an int64 word here, shifted right by SHIFT, has reached its target or the time limit; returns it.

    Order: all loads and calls of the block that follow come after what preceded the word's signal (acquire at system
    scope). NVSHMEM's own waits have no time limit.
    """
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = ((seen >> SHIFT) - target).to(tl.int32) < 0
    while waits:
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        waits = ((seen >> SHIFT) - target).to(tl.int32) < 0
        looks += 1
        if waits & (looks % READS_PER_CLOCK == 0):
            began, waits = watch_clock(
                channel, began, looks, kind, index, index, source, (seen >> SHIFT).to(tl.int32), target.to(tl.int32)
            )
    return seen
