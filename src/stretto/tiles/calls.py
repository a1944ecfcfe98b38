"""The beginning and the end of a call, on the device."""

import triton
import triton.language as tl

from stretto.tiles.call_state import (
    CLAIMED,
    ENDED,
    EPOCH,
    LATE,
    PRODUCED,
    USED,
    advance_targets,
    call_number,
    may_publish,
    require_static,
)
from stretto.tiles.signals import set_slot
from stretto.tiles.waits import OF_BEGIN, await_slot

# Who uses a slot that was last used longer ago waits for this call before its own: after 2^31 calls the number of the
# last use would be one that is to come.
_LONG_AGO = tl.constexpr(1 << 20)


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
def end_call(channel, producer):  # type: ignore[no-untyped-def]
    """The last thing that each program of a call does that began by `enter`; the last of them ends the call.

    producer: the mapping whose tiles were notified.
    """
    require_static(producer)
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
def _end(channel):  # type: ignore[no-untyped-def]
    for word in tl.static_range(ENDED, PRODUCED + 1):
        tl.store(channel.state + word, 0)
    tl.store(channel.state + EPOCH, call_number(channel))
