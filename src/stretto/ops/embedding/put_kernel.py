"""The fused kernel that also sends to ranks whose memory this GPU cannot map: stores in reach, NVSHMEM's puts beyond.

It is imported at the first call, since NVSHMEM's bindings are not everywhere.
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
from stretto.tiles.waits import LOOKS_A_TIME, OF_BEGIN, OF_CONSUMER, watch_clock

# Of NVSHMEM's headers, device_host_transport/nvshmem_common_transport.h and nvshmem_constants.h. What the bindings' own
# documentation says of them (5 to add, 3 for "greater or equal") is not so.
SIGNAL_SET = tl.constexpr(9)
SIGNAL_ADD = tl.constexpr(10)
GREATER_OR_EQUAL = tl.constexpr(5)

CALL = tl.constexpr(32)
"""A word of `begun` is the call's number above this many bits, and the fingerprint of its tables below."""


class Exchange(NamedTuple):
    """What kernels are given of a `PutSlots`; one argument.

    reach: int64 [world], whether this rank stores into that rank's memory, or puts. In symmetric memory: signals, int64
    [world, capacity], how many vectors each source has sent here through each channel since it was made; begun, int64
    [2, world], which call each rank has begun, by its parity; staging, of the tables' dtype, [programs, bags, block].
    In this rank's: targets, int64 [world, capacity], of signals; tickets, int32 [1], how many tasks are taken.
    """

    reach: Any
    signals: Any
    begun: Any
    staging: Any
    targets: Any
    tickets: Any


@triton.jit
def begin_putting(channel, exchange, counts, fingerprint, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin a call: its number and targets, and a word to all other ranks that it has begun. One program of one warp.

    counts: int64 [world, capacity], what each source sends here in the call.
    Signals: `begun` of the call's parity, at all other ranks. All threads of the warp give NVSHMEM's, which sets a word
    and so may be given often.
    Waits: none; `pool_and_put` does, at its end.
    Reuse: a rank sets its word of call e + 2 when it has ended e + 1, and so has seen its readers' word of e + 1, which
    those set when they had ended e, in which they read the word of e. The sets of e are complete when this kernel ends,
    so none of them comes after that of e + 2.
    """
    epoch = tl.load(channel.state + EPOCH) + 1
    word = tl.arange(0, BLOCK)
    inside = word < channel.world * channel.capacity
    coming = tl.load(counts + word, mask=inside, other=0)
    tl.store(exchange.targets + word, tl.load(exchange.targets + word, mask=inside, other=0) + coming, mask=inside)
    tl.debug_barrier()
    tl.store(channel.state + EPOCH, epoch)
    tl.store(exchange.tickets, 0)
    said = (epoch.to(tl.int64) << CALL) | fingerprint
    # Once a wait has failed, a word that stands for no call. An atomic, so that all threads see the same.
    said = tl.where(tl.atomic_add(channel.failed, 0, sem="relaxed", scope="gpu") == 0, said, 0)
    own = exchange.begun + (epoch & 1) * channel.world + channel.rank
    for distance in tl.static_range(1, channel.world):
        peer = (channel.rank + distance) % channel.world
        if tl.load(exchange.reach + peer) != 0:
            tl.atomic_xchg(tiles.peer_pointer(channel, own, peer), said, sem="release", scope="sys")
        else:
            nvshmem.signal_op(own.to(tl.int64), said, SIGNAL_SET, peer)
    nvshmem.quiet()


@triton.jit
def pool_and_put(  # type: ignore[no-untyped-def]
    channel, exchange, lookup, pooling, indices, offsets, weights, out, fingerprint, report, ORDER: tl.constexpr
):
    """`pool_and_send`, each vector stored or put where it belongs in the output of its sample's rank.

    out: this rank's slot of the call, at the same place in symmetric memory on all ranks.
    Signals: a slice's vectors, counted up at its rank: to a rank in reach after the block's barrier (release at system
    scope), to others with the put of the slice's last vector, after a fence (`put_bags`).
    Waits: at the end, each program for its share of what others send and of their words that they have begun the call.
    No cycle: a program waits when all of its rank's tasks are taken by programs that run and wait for nothing.
    Reuse: calls take two slots in turn, with no wait before the first store. Who stores for call e + 2 has ended e + 1,
    and so has seen that the slot's rank had begun e + 1, which it did, in stream order, after the copy out of its slot
    of e. Ranks without tables say that they begin, too. What a rank has put in a call is complete when its kernel has
    ended (`quiet`), so that a count of one call never stands for a vector of another.
    """
    per_rank = tl.cdiv(lookup.batch, pooling.slice)  # slices of a rank and table
    tasks = channel.world * lookup.tables * per_rank
    puts = 0
    ticket = tl.atomic_add(exchange.tickets, 1, sem="relaxed", scope="gpu")
    while ticket < tasks:
        destination, table, group = place_task(
            ticket, channel.world, channel.rank, lookup.tables, per_rank, ORDER=ORDER
        )
        address, rows, dim, column = find_table(lookup, table)
        first = group * pooling.slice
        end_sample = tl.minimum(first + pooling.slice, lookup.batch)
        in_reach = tl.load(exchange.reach + destination) != 0
        counter = exchange.signals + channel.rank * channel.capacity + table % channel.capacity
        for part in range(0, pooling.slice, pooling.bags):
            sample = first + part + tl.arange(0, pooling.bags)
            inside = sample < lookup.batch
            start, end = read_bags(
                lookup, pooling, offsets, table, channel.world, destination * lookup.batch + sample, inside, report
            )
            total = pool_bags(
                lookup, pooling, address, rows, dim, indices, weights, start, end, out.dtype, table, report
            )
            if in_reach:
                there = tl.multiple_of(tiles.peer_pointer(channel, out, destination), 16)
                store_bags(lookup, there, sample, inside, dim, column, total)
            else:
                put_bags(
                    channel, exchange, lookup, pooling, out, counter, first, first + part, end_sample, destination, dim,
                    column, total,
                )  # fmt: skip
                puts += 1
        if in_reach & (destination != channel.rank):
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
        said = await_word(channel, word, epoch.to(tl.int64), CALL, OF_BEGIN, index, source)
        is_other = said.to(tl.int32) != fingerprint
        # An atomic, so that all threads see the same: a wait that has failed says why by itself.
        if is_other & (tl.atomic_add(channel.failed, 0, sem="relaxed", scope="gpu") == 0):
            record_index_error(report, OTHER_TABLES, source, source, source, source)
    for index in range(tl.program_id(0), (channel.world - 1) * channel.capacity, tl.num_programs(0)):
        source = (channel.rank + 1 + index // channel.capacity) % channel.world
        word = source * channel.capacity + index % channel.capacity
        target = tl.load(exchange.targets + word)
        seen = await_word(channel, exchange.signals + word, target, 0, OF_CONSUMER, index % channel.capacity, source)
        if seen >= target:
            # It is there, so this returns at once: behind some network cards the data before a signal is only certain
            # to be seen after it.
            nvshmem.signal_wait_until(exchange.signals + word, GREATER_OR_EQUAL, target)


@triton.jit
def put_bags(  # type: ignore[no-untyped-def]
    channel, exchange, lookup, pooling, out, counter, slice_first, first, end, destination, dim, column, total
):
    """Round a tile, stage it in symmetric memory, and put samples `first` to `end` - 1 of it, vector by vector.

    Order: the block's stores to the staging place, its barrier, then the puts, by all of its threads. The last vector
    of the slice comes with a signal that counts up all of them; a fence stands before it, since a put with a signal is
    ordered after its own data alone. The signal of such a put is given once, while `signal_op` would be given by each
    thread.
    Reuse: a program has one staging place. Puts of this kind return when the source may be written to again, and the
    barrier at the end says so to all threads.
    """
    place = exchange.staging + tl.program_id(0).to(tl.int64) * (pooling.bags * lookup.block)
    bags = tl.arange(0, pooling.bags)
    columns = tl.arange(0, lookup.block)
    tl.store(place + (bags[:, None] * lookup.block + columns[None, :]), total.to(out.dtype.element_ty))
    tl.debug_barrier()
    length = tl.cast(dim, tl.int64)
    for sample in range(first, tl.minimum(first + pooling.bags, end)):
        source = place + (sample - first) * lookup.block
        there = out + (sample.to(tl.int64) * lookup.width + column)
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
    """Wait until an int64 word here, shifted, has reached its target, or the time limit; returns what it last was.

    Order: all of the block's loads and calls after it, after what came before the word's signal (acquire at system
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
        if waits & (looks % LOOKS_A_TIME == 0):
            began, waits = watch_clock(
                channel, began, looks, kind, index, index, source, (seen >> SHIFT).to(tl.int32), target.to(tl.int32)
            )
    return seen
