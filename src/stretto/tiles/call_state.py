# SPDX-License-Identifier: Apache-2.0
"""Device-side state of a channel's calls: the call number, work claims, and how many signals each counter must reach.

`Channel.state` is int32 words in this rank's device memory, which only this rank's kernels write:

    word                        meaning
    EPOCH                       number of the current call; it wraps around
    ENDED .. PRODUCED           counts of this call's programs, set back to 0 when the call begins or ends
    LATE, RECORDED              failures: the tile that a poll gave up on; whether the failure record is written
    USED, USED + 1              for each of two buffer slots, the number of the last call that used it
    CLOCK ... CLOCK + 5         three int64, in ns: the latest time that a program has seen, the limit of a wait, and
                                the group's limit, to which the end of a call by `enter` sets it back
    HEADER ...                  targets [world, capacity]: the value that each counter on this rank will have when all
                                signals of the current call have arrived
    ... after the targets       sends [world, capacity]: the value that this rank's counters at each other rank will
                                have when it has sent all signals of the current call

Counters, targets and sends only count up and wrap around; nothing resets them. A call that `begin_call` began advances
targets and sends at its beginning; a call that its kernel begins (`BlockChannel.enter`) does so at its end,
and until then its waits add the call's share (`count_static`) to the old target.
"""

import torch
import triton
import triton.language as tl

from stretto.memory.compilation import CallLimit, is_capturing
from stretto.tiles.intrinsics import INTERPRETED

# Words of `Channel.state`.
EPOCH = tl.constexpr(0)
ENDED = tl.constexpr(1)  # programs that have ended the call
CLAIMED = tl.constexpr(2)  # units of work that programs have claimed in the call
MOVED = tl.constexpr(3)  # pieces of data that programs have claimed to move in the call
PRODUCED = tl.constexpr(4)  # programs that have finished all that peers wait for
LATE = tl.constexpr(5)  # the tile that a poll has given up on in the call, plus 1; 0: none
RECORDED = tl.constexpr(6)  # whether the channel's failure record describes a wait that ended without its signal
USED = tl.constexpr(7)  # for each of two slots, the number of the last call that used it
CLOCK = tl.constexpr(32)  # in a separate cache line, since all waiting programs update it
HEADER = tl.constexpr(64)  # words before the targets

# int64 words of CLOCK.
_LATEST = tl.constexpr(0)
_LIMIT = tl.constexpr(1)
_GROUPS_LIMIT = tl.constexpr(2)


def make_state(counters: int, device: torch.device) -> torch.Tensor:
    """The state of a channel without calls. counters: [world, capacity]."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
        return torch.zeros(HEADER.value + 2 * counters, dtype=torch.int32, device=device)


class WaitLimit(CallLimit):
    """The limit of a channel's waits in `Channel.state`: set on the current stream, before the kernels of a call.

    A call that follows the loading of a kernel, or loads one, has the limit of `stretto.memory.compilation`.
    """

    def __init__(self, state: torch.Tensor, seconds: float) -> None:
        super().__init__(seconds)
        self._words = state[CLOCK.value : HEADER.value].view(torch.int64)[_LIMIT.value : _GROUPS_LIMIT.value + 1]
        self._is_restored = False
        self._set = self._groups = 0.0  # what the words will hold when the next call begins
        self._write(seconds)

    def begin_call(self, *, is_restored: bool = False) -> None:
        """Set the limit of the call that begins now. is_restored: the call's end sets it back to the group's."""
        self._is_restored = is_restored
        limit = self.of_call()
        if limit != self._set:
            self._write(limit)

    def allow_loading(self) -> None:
        """Lengthen the limit for the rest of this call, which is about to launch a kernel that was loaded just now."""
        if not is_capturing():
            self.of_call()  # the kernel counts for this call, and not for the next one
            self._write(self.while_loading())

    def _write(self, seconds: float) -> None:
        is_groups = seconds == self.seconds
        self._words[: 2 if is_groups else 1].fill_(int(seconds * 1e9))
        if not is_capturing():  # a graph writes it when it is replayed
            self._groups = seconds if is_groups else self._groups
            self._set = self._groups if self._is_restored else seconds


@triton.jit
def latest_time(channel):  # type: ignore[no-untyped-def]
    """Return the address of the latest time that a program of the GPU has seen in a wait: int64, in ns."""
    return (channel.state + CLOCK).to(tl.pointer_type(tl.int64)) + _LATEST


@triton.jit
def load_limit(channel):  # type: ignore[no-untyped-def]
    """Return the limit of a wait: int64, in ns."""
    return tl.load((channel.state + CLOCK).to(tl.pointer_type(tl.int64)) + _LIMIT)


@triton.jit
def load_groups_limit(channel):  # type: ignore[no-untyped-def]
    """Return the limit of a wait to which the end of a call sets it back: int64, in ns."""
    return tl.load((channel.state + CLOCK).to(tl.pointer_type(tl.int64)) + _GROUPS_LIMIT)


@triton.jit
def restore_limit(channel, limit):  # type: ignore[no-untyped-def]
    """Set the limit of a wait back to the group's (None: not loaded yet), so that the host launches nothing for it."""
    if limit is None:
        limit = load_groups_limit(channel)
    tl.store((channel.state + CLOCK).to(tl.pointer_type(tl.int64)) + _LIMIT, limit)


@triton.jit
def call_number(channel):  # type: ignore[no-untyped-def]
    """Return the number of the call that the kernel belongs to: int32, which wraps around."""
    epoch = tl.load(channel.state + EPOCH)
    if channel.begun_in_kernel:
        epoch += 1
    return epoch


@triton.jit
def call_slot(channel):  # type: ignore[no-untyped-def]
    """Return 0 or 1, alternating by call: the buffer slot that a call begun by `enter` writes to, here and at peers.

    Double buffering replaces a barrier. A rank may overwrite a slot without asking anyone if, in every call, each rank
    waits for something that each other rank sends (or for a sum over all ranks). A rank that begins call e + 2 has
    ended e + 1, so it has seen that all ranks had begun e + 1, hence that all had ended e, the slot's last user.
    """
    return call_number(channel) & 1


@triton.jit
def claim(channel):  # type: ignore[no-untyped-def]
    """Claim the call's next unit of work: returns int32 0, 1, 2 and so on, each number to one program.

    Only running programs hold work, so no wait depends on a program that is not resident on the GPU yet.
    """
    return tl.atomic_add(channel.state + CLAIMED, 1, sem="relaxed", scope="gpu")


@triton.jit
def claim_move(channel):  # type: ignore[no-untyped-def]
    """Claim the next piece of data to move, with a separate counter: for programs that move data, then compute."""
    return tl.atomic_add(channel.state + MOVED, 1, sem="relaxed", scope="gpu")


@triton.jit
def arrive_produced(channel):  # type: ignore[no-untyped-def]
    """Report that this program has finished everything that peers wait for.

    Returns int32: how many programs of the call had reported before. Early programs can exit instead of waiting, which
    frees their place on the GPU for other groups' kernels.
    """
    return tl.atomic_add(channel.state + PRODUCED, 1, sem="relaxed", scope="gpu")


@triton.jit
def may_publish(channel):  # type: ignore[no-untyped-def]
    """Return whether this program may signal its stores to peers: no wait of this process has failed yet.

    Use the result as the mask of a signal or a store, never in a branch: each thread loads the flag for itself, and if
    the flag were set between two loads, threads of one block would diverge.
    """
    # In interpreted kernels a failed wait ends the launch, and a volatile load would count as waiting.
    flag = tl.load(channel.failed, volatile=not INTERPRETED)
    return flag == 0


@triton.jit
def advance_targets(channel, producer, counts, BLOCK: tl.constexpr, TIMES: tl.constexpr = 1):  # type: ignore[no-untyped-def]
    """Add this call's signals to `targets` (those that arrive here) and `sends` (this rank's); one program runs it.

    TIMES: -1 reverts them, for a call that all ranks abandon.

    counts: None if the producer's mapping is static; else int32 [2, world, capacity]: how often each source will
    notify each channel here, and how often this rank will notify each channel of each destination.

    Once a wait of this process has failed, `sends` are not changed: a copy engine then signals an old value, which
    meets no target.
    """
    publishes = may_publish(channel)
    index = tl.arange(0, BLOCK)
    targets = channel.state + HEADER
    sends = targets + channel.world * channel.capacity
    for other in tl.static_range(channel.world):
        mask = index < channel.capacity
        word = other * channel.capacity + index
        if counts is not None:
            coming = tl.load(counts + word, mask=mask, other=0)
            going = tl.load(counts + channel.world * channel.capacity + word, mask=mask, other=0)
        else:
            coming, going = count_static(channel, producer, index, other)
        _add_to(targets + word, coming * TIMES, mask)
        _add_to(sends + word, going * TIMES, mask & publishes)


@triton.jit
def count_static(channel, producer, index, other):  # type: ignore[no-untyped-def]
    """Return (signals that rank `other` sends to each channel here in this call, those that this rank sends there)."""
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
    """Raise an error, at compile time, for a producer whose signals the kernel cannot count."""
    tl.static_assert(
        producer is not None, "a call that began by enter gives its waits and its end the producer's mapping: producer="
    )
    tl.static_assert(producer.is_static, "a call that began by enter has a static mapping: begin takes counts")


@triton.jit
def _add_to(words, counts, mask):  # type: ignore[no-untyped-def]
    """Add counts to words in place, wrapping around 2^32 as atomic additions do."""
    sums = tl.load(words, mask=mask, other=0).to(tl.int64) + counts.to(tl.int64)
    tl.store(words, sums.to(tl.int32), mask=mask)
