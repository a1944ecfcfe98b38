# SPDX-License-Identifier: Apache-2.0
"""Tile signals on the device: TileLink's notify and wait primitives (sections 3.2.1 and 4.2).

    notify                   wait                                    between
    producer_tile_notify     consumer_tile_wait, consumer_tile_poll  a tile's producer and its consumers
    peer_tile_notify         peer_tile_wait                          ranks, about a tile of both
    producer_tile_count      rank_await_count (host)                 a kernel and this GPU's streams
    rank_notify (host)       wait_for_channel, wait_for_all          copy engines and a stream

Every rank has counters that only count up and are never reset. A producer's counter (writer, channel) at a reader is
met when it has reached the call's target (`call_state`), (int32)(seen - target) >= 0. A peer's slot (tile, writer)
holds the number of the writer's last call that has notified it.

Notify: await the block's TMA stores (if after_tma), then the block's barrier, which orders the stores of all its
threads before the signal, then an atomic with release at system scope. It is masked out once a wait of this process has
failed (`may_publish`). Wait: see `waits`; every wait returns a zero to add to the offset of what is loaded after it.
"""

import triton
import triton.language as tl

from stretto.tiles.call_state import HEADER, LATE, call_number, count_static, load_limit, may_publish, require_static
from stretto.tiles.intrinsics import INTERPRETED, count_up_by_thread, finish_tma_stores, poll_before_tma
from stretto.tiles.mapping import tile_channels, tile_rank
from stretto.tiles.waits import OF_CONSUMER, OF_HOST, OF_PEER, await_slot, report_timeout, wait_until

# Triton 3.6 takes no plain string as a default.
P2P = tl.constexpr("p2p")

# Multiplying a wait's zero by this lets Triton infer that it is a multiple of 16: loads through it stay 16 bytes wide.
_ALIGNED = tl.constexpr(16)


@triton.jit
def producer_tile_notify(  # type: ignore[no-untyped-def]
    channel, mapping, tile, mode: tl.constexpr, after_tma: tl.constexpr = False, count=1, rank=None
):
    """Signal that a tile is stored: add `count` to the tile's channel at its consumers' ranks.

    mapping: the producer's. mode: "local" (this rank's consumers), "p2p" (those of the rank that the mapping gives the
    tile) or "broadcast" (those of all ranks, from the next one on); the mode that `begin` was given. after_tma: the
    tile was stored through a descriptor. rank: for a broadcast, signal this rank alone; the other ranks get calls of
    their own. count: other than 1 if the `counts` given to `begin` require it: a tile may be signalled in several
    parts.

    Order: this block's stores, to whichever rank, before the signal (barrier, then release at system scope).
    """
    tl.static_assert(mode == "local" or mode == "p2p" or mode == "broadcast", 'mode: "local", "p2p" or "broadcast"')
    tl.static_assert(mode == channel.mode, "begin has counted for another mode of notifying")
    first, _ = tile_channels(mapping, tile)
    _check_channels(channel, mapping, first, first + 1)
    counter = channel.rank * channel.capacity + first
    publishes = may_publish(channel)  # first, so that this load overlaps with the stores that are awaited
    _order_stores(after_tma)
    if mode == "local":
        _count_up(channel, channel.rank, counter, count, publishes)
    elif mode == "p2p":
        _count_up(channel, tile_rank(mapping, tile), counter, count, publishes)
    elif rank is not None:
        _count_up(channel, rank, counter, count, publishes)
    else:
        for distance in tl.static_range(1, channel.world + 1):
            _count_up(channel, (channel.rank + distance) % channel.world, counter, count, publishes)


@triton.jit
def producer_tile_count(counter, times, threads, after_tma: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Signal this GPU's streams (`rank_await_count`) that a tile is stored, without a barrier.

    Without a barrier, a loop over tiles that contains this can be flattened. Each of the program's `threads` adds
    `times` to a counter, after its own stores (release at this GPU's scope). counter: a pointer into int32 zeros, one
    for each thing that a stream awaits. times: 0 for no signal.
    """
    count_up_by_thread(counter, times, threads, after_tma)


@triton.jit
def consumer_tile_wait(channel, mapping, tile, source=None, before_tma: tl.constexpr = False, producer=None):  # type: ignore[no-untyped-def]
    """Wait until all rows of the tile have arrived; returns an int32 0 to add to the offset of what is loaded after.

    mapping: the consumer's. source: wait for this rank's signals alone, where several ranks signal ("p2p"), for example
    to add partial sums in rank order as they arrive; default: all that signal. before_tma: a descriptor loads the tile.
    producer: the producer's mapping, for a call that began by `enter`.

    Order: what is loaded through the result, after the stores before all those signals (acquire at system scope).
    """
    first, last = tile_channels(mapping, tile)
    _check_channels(channel, mapping, first, last)
    ready = first * 0
    index = first
    while index < last:
        if source is not None:
            ready += _await_producer(channel, producer, source, index, tile, before_tma)
        elif not mapping.is_static:
            rank = tile_rank(mapping, tile)
            begin = tl.where(rank < channel.world, rank, 0)
            end = tl.where(rank < channel.world, rank + 1, channel.world)
            while begin < end:
                ready += _await_producer(channel, producer, begin, index, tile, before_tma)
                begin += 1
        elif channel.mode == "local":
            ready += _await_producer(channel, producer, channel.rank, index, tile, before_tma)
        elif channel.mode == "broadcast":
            ready += _await_producer(channel, producer, index // mapping.channels, index, tile, before_tma)
        else:
            for rank in tl.static_range(channel.world):
                ready += _await_producer(channel, producer, rank, index, tile, before_tma)
        index += 1
    return ready * _ALIGNED


@triton.jit
def consumer_tile_poll(channel, mapping, tile):  # type: ignore[no-untyped-def]
    """Wait for a tile as `consumer_tile_wait` with before_tma does, but without a barrier of the block.

    Without a barrier, a loop over tiles that contains this can be flattened, and then waits for the next tile while it
    multiplies this one. It is for calls that `begin` began, tiles whose rows are one rank's, and channels that each
    rank signals in order: it reads a static mapping's last channel of the tile, and a dynamic one's first. Each thread
    polls for itself (acquire at system scope, then the fence for TMA). After the time limit it gives up, and so do all
    polls of the call: `finish_polls` reports.
    """
    if INTERPRETED:
        ready = consumer_tile_wait(channel, mapping, tile, before_tma=True)
    else:
        pointer, target, _, _ = _last_of_tile(channel, mapping, tile)
        limit = load_limit(channel)
        ready = poll_before_tma(pointer, target, channel.state + LATE, tile + 1, limit)
    return ready * _ALIGNED


@triton.jit
def finish_polls(channel, mapping):  # type: ignore[no-untyped-def]
    """After the last `consumer_tile_poll`: report one that has given up, even if its signal has arrived since."""
    late = tl.atomic_add(channel.state + LATE, 0, sem="relaxed", scope="gpu")
    if late != 0:
        pointer, target, index, peer = _last_of_tile(channel, mapping, late - 1)
        seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        report_timeout(channel, OF_CONSUMER, late - 1, index, peer, seen, target)


@triton.jit
def _last_of_tile(channel, mapping, tile):  # type: ignore[no-untyped-def]
    """Return (counter's pointer, its target, channel, rank that signals) of the last channel of a tile of one rank."""
    tl.static_assert(not channel.begun_in_kernel, "polls are for calls that began by begin")
    first, last = tile_channels(mapping, tile)
    if mapping.is_static:
        index = last - 1
        peer = index // mapping.channels
    else:
        index = first
        peer = tile_rank(mapping, tile)
    counter = peer * channel.capacity + index
    return channel.signals + counter, tl.load(channel.state + HEADER + counter), index, peer


@triton.jit
def peer_tile_notify(channel, tile, rank=None, mode: tl.constexpr = P2P, after_tma: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Signal `rank` ("p2p") or all other ranks ("broadcast") that this rank is done with a peer tile in this call.

    tile: 0 to the channel's peer_tiles - 1, each at most once a call. after_tma, and order: as `producer_tile_notify`,
    the signal being an exchange of the call's number.
    """
    tl.static_assert(mode == "p2p" or mode == "broadcast", 'mode is "p2p" or "broadcast"')
    tl.static_assert((rank is None) == (mode == "broadcast"), 'mode "p2p" takes a rank, "broadcast" none')
    tl.device_assert((tile >= 0) & (tile < channel.peer_tiles), "the channel has fewer peer_tiles")
    publishes = may_publish(channel)
    _order_stores(after_tma)
    epoch = call_number(channel)
    if mode == "p2p":
        set_slot(channel, rank, tile, epoch, publishes)
    else:
        for distance in tl.static_range(1, channel.world):
            set_slot(channel, (channel.rank + distance) % channel.world, tile, epoch, publishes)


@triton.jit
def peer_tile_wait(channel, tile, rank=None, mode: tl.constexpr = P2P, before_tma: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Wait until `rank` ("p2p") or all other ranks ("broadcast") have notified a peer tile in this call.

    Returns an int32 0 and orders loads as `consumer_tile_wait` does.
    """
    tl.static_assert(mode == "p2p" or mode == "broadcast", 'mode is "p2p" or "broadcast"')
    tl.static_assert((rank is None) == (mode == "broadcast"), 'mode "p2p" takes a rank, "broadcast" none')
    tl.device_assert((tile >= 0) & (tile < channel.peer_tiles), "the channel has fewer peer_tiles")
    epoch = call_number(channel)
    if mode == "p2p":
        ready = await_slot(channel, rank, tile, epoch, OF_PEER, before_tma)
    else:
        ready = epoch * 0
        for distance in tl.static_range(1, channel.world):
            peer = (channel.rank + distance) % channel.world
            ready += await_slot(channel, peer, tile, epoch, OF_PEER, before_tma)
    return ready * _ALIGNED


@triton.jit
def _check_channels(channel, mapping, first, last):  # type: ignore[no-untyped-def]
    """Refuse a tile that the mapping does not have, in interpreted kernels and with TRITON_DEBUG=1."""
    beyond = channel.world * mapping.channels if mapping.is_static else channel.capacity
    tl.device_assert((first >= 0) & (last <= beyond), "the tile, or a channel of it, is none of the mapping's")


@triton.jit
def _order_stores(after_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Order all stores of this block, by whichever thread, before the signal that one of its threads gives next."""
    if after_tma:
        finish_tma_stores()
    tl.debug_barrier()


@triton.jit
def _count_up(channel, rank, counter, count, publishes):  # type: ignore[no-untyped-def]
    """Add `count` to a counter at `rank`: the signal, with release at system scope."""
    tl.atomic_add(_signals_of(channel, rank) + counter, count, mask=publishes, sem="release", scope="sys")


@triton.jit
def set_slot(channel, rank, tile, epoch, publishes):  # type: ignore[no-untyped-def]
    """Write a call's number into this rank's slot for a peer tile at `rank` (release at system scope).

    publishes: the mask that `may_publish` returned. The block's stores are ordered before it only if a barrier stands
    between; `peer_tile_notify` has one.
    """
    slot = channel.world * channel.capacity + tile * channel.world + channel.rank
    tl.atomic_xchg(_signals_of(channel, rank) + slot, epoch, mask=publishes, sem="release", scope="sys")


@triton.jit
def _signals_of(channel, rank):  # type: ignore[no-untyped-def]
    """Return a pointer to the counters in that rank's memory."""
    tl.device_assert((rank >= 0) & (rank < channel.world), "there is no such rank to notify")
    return tl.load(channel.addresses + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def _await_producer(channel, producer, source, index, tile, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until `source` has sent all signals of channel `index` in this call; returns the opaque zero."""
    tl.device_assert((source >= 0) & (source < channel.world), "there is no such rank to wait for")
    counter = source * channel.capacity + index
    target = tl.load(channel.state + HEADER + counter)
    if channel.begun_in_kernel:
        require_static(producer)
        coming, _ = count_static(channel, producer, index, source)
        target += coming  # the call's end adds it to the state
    return wait_until(channel, counter, target, OF_CONSUMER, tile, index, source, before_tma)


@triton.jit
def wait_for_channel(channel, source, index):  # type: ignore[no-untyped-def]
    """Kernel of `rank_wait`, one program: what follows it on its stream comes after the signals."""
    counter = source * channel.capacity + index
    target = tl.load(channel.state + HEADER + counter)
    wait_until(channel, counter, target, OF_HOST, 0, index, source, False)


@triton.jit
def wait_for_all(channel, index, stride):  # type: ignore[no-untyped-def]
    """Kernel of `rank_wait_all`, one program: waits for channel r * stride + index of every other rank r."""
    for distance in tl.static_range(1, channel.world):
        source = (channel.rank + distance) % channel.world
        counter = source * channel.capacity + source * stride + index
        target = tl.load(channel.state + HEADER + counter)
        wait_until(channel, counter, target, OF_HOST, 0, source * stride + index, source, False)
