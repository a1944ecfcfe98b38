"""Waits for a signal on the device: their time limit, and the failure record of one that reaches it."""

import triton
import triton.language as tl

from stretto.memory import failures
from stretto.tiles.call_state import LATEST, LIMIT, RECORDED, call_number
from stretto.tiles.intrinsics import INTERPRETED, give_up, now, opaque_zero

SUMMARY_ADDRESS = tl.constexpr(failures.SUMMARY_ADDRESS)
FOLLOWED = tl.constexpr(failures.FOLLOWED)
_RECORD_BYTES = tl.constexpr(4 * failures.RECORD_WORDS)

# Which wait a report is about.
OF_CONSUMER = tl.constexpr(1)
OF_PEER = tl.constexpr(2)
OF_BEGIN = tl.constexpr(3)
OF_HOST = tl.constexpr(4)
OF_PACKETS = tl.constexpr(5)

# A peer's slot that shows a call so far ahead shows an old one, of before the numbers came around.
_FAR_AHEAD = tl.constexpr(1 << 20)

# Looking at a clock costs more than looking at a signal; an interpreted look pauses anyhow.
LOOKS_A_TIME = tl.constexpr(1 if INTERPRETED.value else 256)


@triton.jit
def wait_until(channel, word, target, kind: tl.constexpr, tile, index, peer, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
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
def await_slot(channel, peer, tile, epoch, kind: tl.constexpr, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until `peer`'s slot for a tile here has come to a call's number, or the time limit; returns the opaque 0."""
    tl.device_assert((peer >= 0) & (peer < channel.world), "there is no such rank to wait for")
    slot = channel.world * channel.capacity + tile * channel.world + peer
    return wait_until(channel, slot, epoch, kind, tile, tile, peer, before_tma)


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
        report_timeout(channel, kind, tile, index, peer, seen, target)
    return goes_on


@triton.jit
def report_timeout(channel, kind: tl.constexpr, tile, index, peer, seen, target):  # type: ignore[no-untyped-def]
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
