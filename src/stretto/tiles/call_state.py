"""The state of a channel's calls on the device: its words, the call's number, claims and counters' targets."""

import triton
import triton.language as tl

from stretto.tiles.intrinsics import INTERPRETED

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
            coming, going = count_static(channel, producer, index, other)
        _add_to(targets + word, coming, inside)
        _add_to(sends + word, going, inside & publishes)


@triton.jit
def count_static(channel, producer, index, other):  # type: ignore[no-untyped-def]
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
def require_static(producer):  # type: ignore[no-untyped-def]
    """Refuse what cannot be counted in the kernel."""
    tl.static_assert(
        producer is not None, "a call that began by enter gives its waits and its end the producer's mapping: producer="
    )
    tl.static_assert(producer.is_static, "a call that began by enter has a static mapping: begin takes counts")


@triton.jit
def _add_to(words, counts, inside):  # type: ignore[no-untyped-def]
    """words += counts, around 2^32 as atomic additions are."""
    sums = tl.load(words, mask=inside, other=0).to(tl.int64) + counts.to(tl.int64)
    tl.store(words, sums.to(tl.int32), mask=inside)
