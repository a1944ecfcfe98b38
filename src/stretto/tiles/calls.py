# SPDX-License-Identifier: Apache-2.0
"""Begin and end of a call on the device: a launch of `begin_call`, or `end_call` within the call's kernel.

A call that `BlockChannel.begin` begins runs `begin_call` (one program) before the kernels that signal and wait. It
advances the call number and the targets and, with_barrier, waits until all ranks have begun the call. A call that
`BlockChannel.enter` begins launches nothing: its kernel derives number and targets from the previous call's state, and
the last program to run `end_call` (or `end_unsignalled_call`) writes the new state.
"""

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
    restore_limit,
)
from stretto.tiles.signals import set_slot
from stretto.tiles.waits import OF_BEGIN, await_slot

# A slot that was last used more calls ago than this counts as used this many calls ago: after 2^31 calls, the number
# of its last use would look like one that is yet to come.
_LONG_AGO = tl.constexpr(1 << 20)


@triton.jit
def begin_call(channel, producer, counts, slot, WITH_BARRIER: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Begin a call on this rank: advance its number and targets; WITH_BARRIER: wait until all ranks have begun it.

    One program runs this, in a launch before those that signal and wait.
    Signals: the call's number, into this rank's last peer slot at every other rank (release at system scope).
    Waits: for the same slot of every other rank. Once all ranks have begun a call, none still reads what the previous
    call stored into its memory. slot: 0 or 1 for a call that writes to one of two slots: then it is enough that all
    ranks have begun the call after the one that last used this slot. None: there is one slot, used by the last call.
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
    # After a failed wait, polls end immediately, as if one had timed out on tile 0.
    tl.store(channel.state + LATE, tl.minimum(tl.load(channel.failed), 1))
    if WITH_BARRIER:
        publishes = may_publish(channel)
        for distance in tl.static_range(1, channel.world):
            set_slot(channel, (channel.rank + distance) % channel.world, channel.peer_tiles, epoch, publishes)
        for distance in tl.static_range(1, channel.world):
            peer = (channel.rank + distance) % channel.world
            await_slot(channel, peer, channel.peer_tiles, awaited, OF_BEGIN, False)


@triton.jit
def await_beginning(channel):  # type: ignore[no-untyped-def]
    """Wait until all ranks have begun this call: one program, after `begin_call` without its barrier.

    Signals: none. Copies of 4 bytes have written this rank's call number into its last peer slot at the other ranks.
    Waits: for the same slot of every other rank. Every rank has then ended the previous call, whichever slot it used.
    """
    epoch = tl.load(channel.state + EPOCH)
    for distance in tl.static_range(1, channel.world):
        await_slot(channel, (channel.rank + distance) % channel.world, channel.peer_tiles, epoch, OF_BEGIN, False)


@triton.jit
def end_call(channel, producer):  # type: ignore[no-untyped-def]
    """End a call that began by `enter`: each program calls this last, and the last program writes the call's state.

    producer: the mapping whose tiles were notified.
    """
    require_static(producer)
    if _is_last_to_end(channel):
        advance_targets(channel, producer, None, triton.next_power_of_2(channel.capacity))
        _end(channel)


@triton.jit
def end_unsignalled_call(channel, limit=None):  # type: ignore[no-untyped-def]
    """End a call as `end_call` does, where no tile was notified: for calls that communicate by packets.

    limit: what `load_groups_limit` gave earlier, so that nothing waits for it.
    """
    tl.debug_barrier()
    is_last = tl.num_programs(0) == 1  # which needs no atomic
    if tl.num_programs(0) > 1:
        is_last = _is_last_to_end(channel)
    if is_last:
        _end(channel, limit)


@triton.jit
def _is_last_to_end(channel):  # type: ignore[no-untyped-def]
    """Count this program as done and return whether all others were done before it.

    Order: each program has already used whatever it loaded of the call's state, in an address, a branch or a store, so
    the relaxed addition alone says that it is done.
    """
    tl.static_assert(
        channel.begun_in_kernel, "a call that began by begin ends by itself: end_call is for calls by enter"
    )
    tl.debug_barrier()
    return tl.atomic_add(channel.state + ENDED, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1


@triton.jit
def _end(channel, limit=None):  # type: ignore[no-untyped-def]
    """Reset the counts of programs and the limit of waits, and store the call's number as the last one."""
    for word in tl.static_range(ENDED, PRODUCED + 1):
        tl.store(channel.state + word, 0)
    tl.store(channel.state + EPOCH, call_number(channel))
    restore_limit(channel, limit)
