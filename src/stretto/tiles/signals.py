"""Signals between tiles, on the device: TileLink's notify and wait (sections 3.2.1 and 4.2).

Every rank has counters that only count up and are never reset. A producer's counter (writer, channel) of a reader is
met when it has come as far as `begin` has counted for the call, (int32)(seen - target) >= 0. A peer's slot (tile,
writer) holds the number of the writer's last call that has notified it.

Notify: the block's TMA stores are awaited (if after_tma), then the block's barrier puts the stores of all its threads
before the signal, an atomic operation with release at system scope. Wait: reads with acquire at system scope until the
target is met, and gives 0, made of what was seen: add it to the offset of whatever is loaded after the wait, so that no
compiler, the software pipeliner included, can load it earlier.

A wait that lasts longer than the channel's time limit fails: the kernel sets the process's failure flag, writes the
channel's failure record (`stretto.memory.failures`), gives up its other waits and runs to its end without them.
Interpreted kernels raise at once. While the failure flag is set, no kernel of this process signals: what it stores may
be wrong, and no peer may trust it (`may_publish`). The peers' waits then reach their own time limits.
"""

import triton
import triton.language as tl

from stretto.memory import failures
from stretto.tiles.intrinsics import (
    INTERPRETED,
    count_up_by_thread,
    finish_tma_stores,
    give_up,
    now,
    opaque_zero,
    poll_before_tma,
)
from stretto.tiles.mapping import tile_channels, tile_rank

# Triton 3.6 takes no plain string as a default.
P2P = tl.constexpr("p2p")

# Words of `Channel.state`; targets and sends follow from HEADER on. Words of `Channel.clock`.
EPOCH = tl.constexpr(0)
ENDED = tl.constexpr(1)  # programs that have ended the call
CLAIMED = tl.constexpr(2)  # units of work that programs have claimed in the call
MOVED = tl.constexpr(3)  # pieces of data that programs have claimed to move in the call
PRODUCED = tl.constexpr(4)  # programs that have finished all that peers wait for
LATE = tl.constexpr(5)  # the tile that a poll has given up in the call, plus 1; 0: none
RECORDED = tl.constexpr(6)  # whether a wait of this channel has ended without its signal, which its record says
USED = tl.constexpr(7)  # for each of two slots, the number of the last call that used it
HEADER = tl.constexpr(9)
LATEST = tl.constexpr(0)
LIMIT = tl.constexpr(1)

SUMMARY_ADDRESS = tl.constexpr(failures.SUMMARY_ADDRESS)
FOLLOWED = tl.constexpr(failures.FOLLOWED)
_RECORD_BYTES = tl.constexpr(4 * failures.RECORD_WORDS)

# Which wait a report is about.
OF_CONSUMER = tl.constexpr(1)
OF_PEER = tl.constexpr(2)
OF_BEGIN = tl.constexpr(3)
OF_HOST = tl.constexpr(4)
OF_PACKETS = tl.constexpr(5)

# A wait's zero times this: Triton then knows it for a multiple of 16, and loads through it by 16 bytes, as without it.
_ALIGNED = tl.constexpr(16)

# Who uses a slot that was last used longer ago waits for this call before its own: after 2^31 calls the number of the
# last use would be one that is to come.
_LONG_AGO = tl.constexpr(1 << 20)

# A peer's slot that shows a call so far ahead shows an old one, of before the numbers came around.
_FAR_AHEAD = tl.constexpr(1 << 20)

# Looking at a clock costs more than looking at a signal; an interpreted look pauses anyhow.
LOOKS_A_TIME = tl.constexpr(1 if INTERPRETED.value else 256)


@triton.jit
def call_number(channel):  # type: ignore[no-untyped-def]
    """int32: the number of the call that the kernel belongs to; it wraps around."""
    epoch = tl.load(channel.state + EPOCH)
    if channel.inside:
        epoch += 1
    return epoch


@triton.jit
def call_slot(channel):  # type: ignore[no-untyped-def]
    """0 or 1, in turn: which of two slots a call that began by `enter` writes to, here and at peers.

    A slot may be written over without asking anyone if in every call each rank waits for something that each other
    rank sends (or sums up, of all ranks): who begins call e + 2 has ended e + 1, has so seen that all ranks had begun
    e + 1, and so that all had ended e, which used this slot.
    """
    return call_number(channel) & 1


@triton.jit
def claim(channel):  # type: ignore[no-untyped-def]
    """int32: 0, 1, 2 and so on, each to one program of the call: which work it does next.

    Only programs that run hold work, so nothing waits for one that has no place on the GPU yet.
    """
    return tl.atomic_add(channel.state + CLAIMED, 1, sem="relaxed", scope="gpu")


@triton.jit
def claim_move(channel):  # type: ignore[no-untyped-def]
    """As `claim`, of a count of its own: for data that programs move before they compute."""
    return tl.atomic_add(channel.state + MOVED, 1, sem="relaxed", scope="gpu")


@triton.jit
def arrive_produced(channel):  # type: ignore[no-untyped-def]
    """int32: how many programs of the call had finished all that peers wait for, before this one did.

    Programs that come early can end instead of waiting, which gives their place on the GPU to other groups' kernels.
    """
    return tl.atomic_add(channel.state + PRODUCED, 1, sem="relaxed", scope="gpu")


@triton.jit
def may_publish(channel):  # type: ignore[no-untyped-def]
    """Whether peers may trust what this program has stored: no wait of this process has failed yet.

    Use it as the mask of a signal or a store, never in a branch: each thread loads it for itself, and a flag that is
    set meanwhile would make threads of a block part ways.
    """
    # Interpreted, a wait that fails ends the launch, and a volatile load would count as waiting.
    flag = tl.load(channel.failed, volatile=not INTERPRETED)
    return flag == 0


@triton.jit
def end_call(channel, producer):  # type: ignore[no-untyped-def]
    """The last thing that each program of a call does that began by `enter`; the last of them ends the call.

    producer: the mapping whose tiles were notified.
    """
    _require_static(producer)
    if _is_last_to_end(channel):
        advance_targets(channel, producer, None, triton.next_power_of_2(channel.capacity))
        _end(channel)


@triton.jit
def end_unsignalled_call(channel):  # type: ignore[no-untyped-def]
    """As `end_call`, where no tile was notified: of a call by packets."""
    if _is_last_to_end(channel):
        _end(channel)


@triton.jit
def _is_last_to_end(channel):  # type: ignore[no-untyped-def]
    """Whether all other programs have ended.

    Order: whatever a program has loaded of the call's state it has used by now, in an address, a branch or a store, so
    that its addition alone says that it is done.
    """
    tl.static_assert(channel.inside, "a call that began by begin ends by itself: end_call is for calls by enter")
    tl.debug_barrier()
    return tl.atomic_add(channel.state + ENDED, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1


@triton.jit
def _require_static(producer):  # type: ignore[no-untyped-def]
    """Refuse what cannot be counted in the kernel."""
    tl.static_assert(
        producer is not None, "a call that began by enter gives its waits and its end the producer's mapping: producer="
    )
    tl.static_assert(producer.is_static, "a call that began by enter has a static mapping: begin takes counts")


@triton.jit
def _end(channel):  # type: ignore[no-untyped-def]
    for word in tl.static_range(ENDED, PRODUCED + 1):
        tl.store(channel.state + word, 0)
    tl.store(channel.state + EPOCH, call_number(channel))


@triton.jit
def producer_tile_notify(  # type: ignore[no-untyped-def]
    channel, mapping, tile, mode: tl.constexpr, after_tma: tl.constexpr = False, count=1, rank=None
):
    """Tell the tile's consumers that it is stored: count up the tile's channel by `count`.

    mapping: the producer's. mode: "local" (this rank's consumers), "p2p" (those of the rank that the mapping gives the
    tile) or "broadcast" (those of all ranks, from the next one on); the one that `begin` was told. after_tma: the tile
    was stored by a descriptor. rank: of a broadcast, tell this rank alone, and all the others in calls of their own.

    count: other than 1 where `counts` given to `begin` say so: a tile may be signalled in parts of several sizes.

    Order: this block's stores, to whichever rank, before the signal (barrier, then release at system scope).
    """
    tl.static_assert(mode == "local" or mode == "p2p" or mode == "broadcast", 'mode: "local", "p2p" or "broadcast"')
    tl.static_assert(mode == channel.mode, "begin has counted for another mode of notifying")
    first, _ = tile_channels(mapping, tile)
    _check_channels(channel, mapping, first, first + 1)
    counter = channel.rank * channel.capacity + first
    publishes = may_publish(channel)  # first, so that the load goes on beside the stores that are awaited
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
    """Tell this GPU's streams (`rank_await_count`) that a tile is stored, without a barrier, so that a loop over tiles
    that has it can be flattened: each of the program's `threads` adds `times` to a counter, after its own stores.

    counter: a pointer into int32 zeros, of whatever is awaited as one. times: 0 for not at all.
    """
    count_up_by_thread(counter, times, threads, after_tma)


@triton.jit
def consumer_tile_wait(channel, mapping, tile, source=None, before_tma: tl.constexpr = False, producer=None):  # type: ignore[no-untyped-def]
    """Wait until all rows of the tile are there; returns an int32 0 to add to the offset of what is loaded after.

    mapping: the consumer's. source: wait for what this rank has stored and signalled, where several do ("p2p"), for
    example to add in rank order as it comes; default: all who do. before_tma: a descriptor loads the tile. producer:
    the producer's mapping, for a call that began by `enter`.

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
    """As `consumer_tile_wait` before TMA, without a barrier: a loop over tiles that has it can be flattened, and then
    waits for the next tile while it multiplies this one.

    For calls that `begin` has begun, tiles that have rows of one rank, and a rank's channels signalled in their order:
    it looks at the tile's last channel only. Each thread looks by itself. After the time limit it gives up, and so do
    all polls of the call: `finish_polls` reports it.
    """
    if INTERPRETED:
        ready = consumer_tile_wait(channel, mapping, tile, before_tma=True)
    else:
        pointer, target, _ = _last_of_tile(channel, mapping, tile)
        limit = tl.load(channel.clock + LIMIT)
        ready = poll_before_tma(pointer, target, channel.state + LATE, tile + 1, limit)
    return ready * _ALIGNED


@triton.jit
def finish_polls(channel, mapping):  # type: ignore[no-untyped-def]
    """After the last `consumer_tile_poll`: report one that has given up, even if its signal has come since."""
    late = tl.atomic_add(channel.state + LATE, 0, sem="relaxed", scope="gpu")
    if late != 0:
        pointer, target, index = _last_of_tile(channel, mapping, late - 1)
        seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        _report(channel, OF_CONSUMER, late - 1, index, index // mapping.channels, seen, target)


@triton.jit
def _last_of_tile(channel, mapping, tile):  # type: ignore[no-untyped-def]
    """(counter, its target, channel) of the last channel that has rows of a tile, whose rows are of one rank."""
    tl.static_assert(mapping.is_static, "polls are for static mappings")
    tl.static_assert(not channel.inside, "polls are for calls that began by begin")
    _, last = tile_channels(mapping, tile)
    counter = (last - 1) // mapping.channels * channel.capacity + last - 1
    return channel.signals + counter, tl.load(channel.state + HEADER + counter), last - 1


@triton.jit
def peer_tile_notify(channel, tile, rank=None, mode: tl.constexpr = P2P, after_tma: tl.constexpr = False):  # type: ignore[no-untyped-def]
    """Tell `rank` ("p2p") or all other ranks ("broadcast") that this rank is done with the tile in this call.

    tile: 0 to the channel's peer_tiles - 1, once a call each. after_tma, and the order: as `producer_tile_notify`.
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
    """Wait until `rank` ("p2p") or all other ranks ("broadcast") have notified the tile in this call.

    Returns an int32 0, and orders, as `consumer_tile_wait`.
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
    """Where kernels are interpreted, or compiled with TRITON_DEBUG=1, refuse a tile that the mapping does not have."""
    beyond = channel.world * mapping.channels if mapping.is_static else channel.capacity
    tl.device_assert((first >= 0) & (last <= beyond), "the tile, or a channel of it, is none of the mapping's")


@triton.jit
def _order_stores(after_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Put all stores of this block before the signal that one of its threads will give."""
    if after_tma:
        finish_tma_stores()
    tl.debug_barrier()


@triton.jit
def _count_up(channel, rank, counter, count, publishes):  # type: ignore[no-untyped-def]
    tl.atomic_add(_signals_of(channel, rank) + counter, count, mask=publishes, sem="release", scope="sys")


@triton.jit
def set_slot(channel, rank, tile, epoch, publishes):  # type: ignore[no-untyped-def]
    """Write a call's number into this rank's slot for a tile at `rank`, if `publishes` (see `may_publish`).

    The block's stores come before it only if a barrier stands between (`peer_tile_notify` has one).
    """
    slot = channel.world * channel.capacity + tile * channel.world + channel.rank
    tl.atomic_xchg(_signals_of(channel, rank) + slot, epoch, mask=publishes, sem="release", scope="sys")


@triton.jit
def _signals_of(channel, rank):  # type: ignore[no-untyped-def]
    """A pointer to the counters that lie in that rank's memory."""
    tl.device_assert((rank >= 0) & (rank < channel.world), "there is no such rank to notify")
    return tl.load(channel.addresses + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def _await_producer(channel, producer, source, index, tile, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.device_assert((source >= 0) & (source < channel.world), "there is no such rank to wait for")
    counter = source * channel.capacity + index
    target = tl.load(channel.state + HEADER + counter)
    if channel.inside:
        _require_static(producer)
        coming, _ = _count_static(channel, producer, index, source)
        target += coming  # the call's end adds it to the state
    return _await(channel, counter, target, OF_CONSUMER, tile, index, source, before_tma)


@triton.jit
def await_slot(channel, peer, tile, epoch, kind: tl.constexpr, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until `peer`'s slot for a tile here has come to a call's number, or the time limit; returns the opaque 0."""
    tl.device_assert((peer >= 0) & (peer < channel.world), "there is no such rank to wait for")
    slot = channel.world * channel.capacity + tile * channel.world + peer
    return _await(channel, slot, epoch, kind, tile, tile, peer, before_tma)


@triton.jit
def _is_before(seen, target, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a counter has not come to its target, also around 2^32.

    A tile between peers may not have been notified for 2^31 calls, while all others are counted in each.
    """
    ahead = (seen.to(tl.int64) - target.to(tl.int64)).to(tl.int32)
    is_before = ahead < 0
    if kind == OF_PEER:
        is_before = is_before | (ahead > _FAR_AHEAD)
    return is_before


@triton.jit
def _await(channel, word, target, kind: tl.constexpr, tile, index, peer, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until a word of this rank's counters has reached its target, or the time limit; returns the opaque 0."""
    pointer = channel.signals + word
    seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = _is_before(seen, target, kind)
    while waits:
        seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        waits = _is_before(seen, target, kind)
        looks += 1
        if waits & (looks % LOOKS_A_TIME == 0):
            began, waits = watch_clock(channel, began, looks, kind, tile, index, peer, seen, target)
    return opaque_zero(seen, before_tma)


@triton.jit
def watch_clock(channel, began, looks, kind: tl.constexpr, tile, index, peer, seen, target):  # type: ignore[no-untyped-def]
    """(when the wait's clock began, whether it may go on), every LOOKS_A_TIME looks.

    The clock begins at the first of these: most waits end before, and reading it takes longer than they do.
    """
    goes_on = True
    if looks == LOOKS_A_TIME:
        began = _read_clock(channel)
    else:
        goes_on = _has_time(channel, began, kind, tile, index, peer, seen, target)
    return began, goes_on


@triton.jit
def _read_clock(channel):  # type: ignore[no-untyped-def]
    """Nanoseconds, the same to all threads.

    A clock that is read by each thread differs between them, and a block may not part ways: time is what all programs
    of this GPU have last written into one word, which an atomic gives to all threads alike.
    """
    tl.atomic_max(channel.clock + LATEST, now(), sem="relaxed", scope="gpu")
    return tl.atomic_max(channel.clock + LATEST, 0, sem="relaxed", scope="gpu")


@triton.jit
def _has_time(channel, began, kind: tl.constexpr, tile, index, peer, seen, target):  # type: ignore[no-untyped-def]
    """Whether a wait may go on; if its time is over, it is reported, and this process's other waits give up too."""
    latest = tl.atomic_max(channel.clock + LATEST, now(), sem="relaxed", scope="gpu")
    failed = tl.atomic_add(channel.failed, 0, sem="acquire", scope="gpu")
    goes_on = (failed == 0) & (latest - began <= tl.load(channel.clock + LIMIT))
    if goes_on == 0:
        _report(channel, kind, tile, index, peer, seen, target)
    return goes_on


@triton.jit
def _report(channel, kind: tl.constexpr, tile, index, peer, seen, target):  # type: ignore[no-untyped-def]
    """Set the failure flag and write the failure record, unless the channel has one already.

    A wait that ends since another workspace's has failed is recorded as well, as FOLLOWED: what it waited for may come
    later, into memory that a call to come would take for its own, so the channel is of no more use either.

    Order: the channel is marked before others can see the flag and follow; the flag before the record, so that this
    program's signals stop; the record's first word after its others; and the word that the host looks at last.

    The flag is set to a number of the channel's own, and keeps the first that it gets: programs of one channel that
    give up at the same time do not take each other for another workspace.
    """
    is_recorded = tl.atomic_xchg(channel.state + RECORDED, 1, sem="relaxed", scope="gpu") != 0
    own = ((channel.report.to(tl.int64) // _RECORD_BYTES) & 0x3FFFFFFF).to(tl.int32) + 1
    before = tl.atomic_cas(channel.failed, 0, own, sem="acq_rel", scope="gpu")
    has_followed = (before != 0) & (before != own)
    if is_recorded == 0:
        tl.store(channel.report + 1, channel.operator)
        tl.store(channel.report + 2, call_number(channel))
        tl.store(channel.report + 3, tile)
        tl.store(channel.report + 4, index)
        tl.store(channel.report + 5, peer)
        tl.store(channel.report + 6, seen)
        tl.store(channel.report + 7, target)
        tl.debug_barrier()
        tl.atomic_xchg(channel.report, tl.where(has_followed, FOLLOWED, kind), sem="release", scope="sys")
        summary = tl.load((channel.report + SUMMARY_ADDRESS).to(tl.pointer_type(tl.int64)))
        tl.atomic_xchg(summary.to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")
    give_up(channel.report)


@triton.jit
def advance_targets(channel, producer, counts, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count what this call adds to all counters, here (targets) and by this rank (sends). For one program alone.

    counts: None where the producer's mapping is static; else int32 [2, world, capacity]: how often each source will
    notify each channel here, and how often this rank will notify each channel of each destination.

    Once a wait of this process has failed, `sends` stay: a copy engine then signals by an old number, which meets no
    target.
    """
    publishes = may_publish(channel)
    index = tl.arange(0, BLOCK)
    targets = channel.state + HEADER
    sends = targets + channel.world * channel.capacity
    for other in tl.static_range(channel.world):
        inside = index < channel.capacity
        word = other * channel.capacity + index
        if counts is not None:
            coming = tl.load(counts + word, mask=inside, other=0)
            going = tl.load(counts + channel.world * channel.capacity + word, mask=inside, other=0)
        else:
            coming, going = _count_static(channel, producer, index, other)
        _add_to(targets + word, coming, inside)
        _add_to(sends + word, going, inside & publishes)


@triton.jit
def _count_static(channel, producer, index, other):  # type: ignore[no-untyped-def]
    """What comes from rank `other` to each channel in this call, and what goes there from here."""
    used = index < channel.world * producer.channels
    within = (index % producer.channels) * producer.channel_rows
    rows = tl.maximum(tl.minimum(producer.rows - within, producer.channel_rows), 0)
    tiles = (rows + producer.tile_rows - 1) // producer.tile_rows * producer.columns
    tiles = tl.where(used, tiles, 0)
    owner = index // producer.channels
    if channel.mode == "local":
        coming = tl.where(channel.rank == other, tiles, 0)
        going = coming
    elif channel.mode == "p2p":
        coming = tl.where(owner == channel.rank, tiles, 0)
        going = tl.where(owner == other, tiles, 0)
    else:
        coming = tl.where(owner == other, tiles, 0)
        going = tl.where(owner == channel.rank, tiles, 0)
    return coming, going


@triton.jit
def _add_to(words, counts, inside):  # type: ignore[no-untyped-def]
    """words += counts, around 2^32 as atomic additions are."""
    sums = tl.load(words, mask=inside, other=0).to(tl.int64) + counts.to(tl.int64)
    tl.store(words, sums.to(tl.int32), mask=inside)


@triton.jit
def begin_call(channel, producer, counts, slot, MEETS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin a call on this rank: its number, its targets, and, if it MEETS, a wait for all ranks to have begun it.

    One program runs this, in a launch before those that signal and wait. Where all ranks have begun a call, none still
    reads what the call before had put into its memory. slot: 0 or 1 for a call that writes to one of two slots: then it
    is enough that all have begun the call after the one that used this slot last. None: one slot, the last call's.
    """
    epoch = (tl.load(channel.state + EPOCH).to(tl.int64) + 1).to(tl.int32)
    awaited = epoch
    if slot is not None:
        since = (epoch.to(tl.int64) - tl.load(channel.state + USED + slot) - 1) & 0xFFFFFFFF
        awaited = (epoch.to(tl.int64) - tl.minimum(since, _LONG_AGO)).to(tl.int32)
    advance_targets(channel, producer, counts, BLOCK)
    tl.debug_barrier()
    tl.store(channel.state + EPOCH, epoch)
    if slot is not None:
        tl.store(channel.state + USED + slot, epoch)
    for claimed in tl.static_range(CLAIMED, PRODUCED + 1):
        tl.store(channel.state + claimed, 0)
    tl.store(channel.state + LATE, tl.load(channel.failed))  # once a wait has failed, polls give up at once
    if MEETS:
        publishes = may_publish(channel)
        for distance in tl.static_range(1, channel.world):
            set_slot(channel, (channel.rank + distance) % channel.world, channel.peer_tiles, epoch, publishes)
        for distance in tl.static_range(1, channel.world):
            peer = (channel.rank + distance) % channel.world
            await_slot(channel, peer, channel.peer_tiles, awaited, OF_BEGIN, False)


@triton.jit
def wait_for_channel(channel, source, index):  # type: ignore[no-untyped-def]
    """`rank_wait` as a kernel of one program: what comes after it on its stream is after the signals."""
    counter = source * channel.capacity + index
    target = tl.load(channel.state + HEADER + counter)
    _await(channel, counter, target, OF_HOST, 0, index, source, False)


@triton.jit
def wait_for_all(channel, index, stride):  # type: ignore[no-untyped-def]
    """`rank_wait_all` as a kernel of one program: `wait_for_channel` for channel r * stride + index of all others r."""
    for distance in tl.static_range(1, channel.world):
        source = (channel.rank + distance) % channel.world
        counter = source * channel.capacity + source * stride + index
        target = tl.load(channel.state + HEADER + counter)
        _await(channel, counter, target, OF_HOST, 0, source * stride + index, source, False)
