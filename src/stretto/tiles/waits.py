# SPDX-License-Identifier: Apache-2.0
"""Device-side waits: spin on a counter until it reaches its target or the time limit, then report the failure.

Synchronization. A wait reads with acquire at system scope until `(int32)(seen - target) >= 0`, and returns the opaque
zero: an int32 0 computed from the value that it saw. Add the zero to the offset of whatever is loaded after the wait,
so that no compiler, the software pipeliner included, can move the load above the wait.

Time limit. Every READS_PER_CLOCK reads, the wait reads a clock that all programs of the GPU share, and at the process's
failure flag. A wait that exceeds the channel's limit sets the flag, writes the channel's failure record
(`stretto.memory.failures`), and the kernel runs to its end without its other waits. Interpreted kernels raise
immediately. While the flag is set, no kernel of this process signals (`may_publish`): its stores may be wrong, and no
peer may trust it. The peers' waits then reach their own time limits.
"""

import triton
import triton.language as tl

from stretto.memory import failures
from stretto.tiles.call_state import RECORDED, call_number, latest_time, load_limit
from stretto.tiles.intrinsics import INTERPRETED, give_up, now, opaque_zero

SUMMARY_ADDRESS = tl.constexpr(failures.SUMMARY_ADDRESS)
FOLLOWED = tl.constexpr(failures.FOLLOWED)
LIMIT = tl.constexpr(failures.LIMIT)
_RECORD_BYTES = tl.constexpr(4 * failures.RECORD_WORDS)

# The kind of wait that a failure record describes.
OF_CONSUMER = tl.constexpr(1)
OF_PEER = tl.constexpr(2)
OF_BEGIN = tl.constexpr(3)
OF_HOST = tl.constexpr(4)
OF_PACKETS = tl.constexpr(5)
OF_SLICE = tl.constexpr(6)
OF_CREDIT = tl.constexpr(7)
OF_FIFO = tl.constexpr(8)

# A peer's slot whose call number is further ahead than this holds an old number, from before the numbers wrapped.
_FAR_AHEAD = tl.constexpr(1 << 20)

# Reads of a signal per read of the clock, which costs more. An interpreted read yields to other programs anyway.
READS_PER_CLOCK = tl.constexpr(1 if INTERPRETED.value else 256)


@triton.jit
def wait_until(channel, word, target, kind: tl.constexpr, tile, index, peer, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Spin until a word of this rank's counters has reached its target, or the time limit; returns the opaque zero.

    Order: loads through the zero come after the stores that precede the signal (acquire at system scope). before_tma:
    also loads by TMA, for which a proxy fence follows the acquire. kind, tile, index, peer: for the failure record.
    """
    pointer = channel.signals + word
    seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = _is_before(seen, target, kind)
    while waits:
        seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        waits = _is_before(seen, target, kind)
        looks += 1
        if waits & (looks % READS_PER_CLOCK == 0):
            began, waits = watch_clock(channel, began, looks, kind, tile, index, peer, seen, target)
    return opaque_zero(seen, before_tma)


@triton.jit
def await_slot(channel, peer, tile, epoch, kind: tl.constexpr, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until `peer` has notified a peer tile in call `epoch`, or the time limit; returns the opaque zero.

    Each (tile, writer) has one slot here, which holds the number of the writer's last call that notified it.
    """
    tl.device_assert((peer >= 0) & (peer < channel.world), "there is no such rank to wait for")
    slot = channel.world * channel.capacity + tile * channel.world + peer
    return wait_until(channel, slot, epoch, kind, tile, tile, peer, before_tma)


@triton.jit
def _is_before(seen, target, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether a counter is still below its target, modulo 2^32.

    A peer tile may go without a notify for 2^31 calls, so its slot also counts as below when it is far ahead; every
    other counter advances in each call.
    """
    ahead = (seen.to(tl.int64) - target.to(tl.int64)).to(tl.int32)
    is_before = ahead < 0
    if kind == OF_PEER:
        is_before = is_before | (ahead > _FAR_AHEAD)
    return is_before


@triton.jit
def watch_clock(channel, began, looks, kind: tl.constexpr, tile, index, peer, seen, target):  # type: ignore[no-untyped-def]
    """Check a wait's time limit, after every READS_PER_CLOCK reads. Returns (start time, whether to keep waiting).

    The first call starts the clock: most waits end before it, and reading the clock takes longer than they do.
    """
    goes_on = True
    if looks == READS_PER_CLOCK:
        began = _read_clock(channel)
    else:
        goes_on = _has_time(channel, began, kind, tile, index, peer, seen, target)
    return began, goes_on


@triton.jit
def _read_clock(channel):  # type: ignore[no-untyped-def]
    """Return nanoseconds that are the same for all threads of the block.

    Threads that each read a clock see different values, on which a block must not branch. So the time is the latest
    that any program of this GPU has written into one word, and an atomic gives all threads the same value of it.
    """
    tl.atomic_max(latest_time(channel), now(), sem="relaxed", scope="gpu")
    return tl.atomic_max(latest_time(channel), 0, sem="relaxed", scope="gpu")


@triton.jit
def _has_time(channel, began, kind: tl.constexpr, tile, index, peer, seen, target):  # type: ignore[no-untyped-def]
    """Return whether a wait may continue; past its limit it is reported, and this process's other waits end, too."""
    latest = tl.atomic_max(latest_time(channel), now(), sem="relaxed", scope="gpu")
    failed = tl.atomic_add(channel.failed, 0, sem="acquire", scope="gpu")
    goes_on = (failed == 0) & (latest - began <= load_limit(channel))
    if goes_on == 0:
        report_timeout(channel, kind, tile, index, peer, seen, target)
    return goes_on


@triton.jit
def report_timeout(channel, kind: tl.constexpr, tile, index, peer, seen, target):  # type: ignore[no-untyped-def]
    """Set the process's failure flag and write the channel's failure record, unless the channel already has one.

    A wait that ends because another workspace's wait failed is recorded too, as FOLLOWED: its signal may still arrive,
    into memory that a later call would take for its own, so this channel is unusable as well.

    The order of its writes is that of `stretto.memory.failures`; RECORDED is the channel's mark.

    The flag gets a number of the channel's own, and the first writer wins: programs of one channel that give up at the
    same time do not take each other for another workspace.
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
        limit = load_limit(channel)
        tl.store(channel.report + LIMIT, limit.to(tl.int32))
        tl.store(channel.report + LIMIT + 1, (limit >> 32).to(tl.int32))
        tl.debug_barrier()
        tl.atomic_xchg(channel.report, tl.where(has_followed, FOLLOWED, kind), sem="release", scope="sys")
        summary = tl.load((channel.report + SUMMARY_ADDRESS).to(tl.pointer_type(tl.int64)))
        tl.atomic_xchg(summary.to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")
    give_up(channel.report)
