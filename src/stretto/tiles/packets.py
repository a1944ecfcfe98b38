"""Data that is its own signal: small messages that travel in the time of one store.

A packet is 32 bits of data, which are never 0, in memory that holds 0 where no packet is. It is stored whole, so who
finds something has all of it: no barrier, no fence, no second message, and nothing travels beside the data. (NCCL's LL
protocol sends as many bits of flags as of data.) Data of 0 travels as the bits of a negative zero, in its last number.

Who takes a packet puts 0 back, so memory is left as it was found: it holds packets and nothing else, each is taken by
one program, and calls of two numbers in a row use two slots (`call_slot`).

Each packet is loaded by one thread alone. A block of fewer elements than the program has threads is held several times,
and each copy is loaded by itself: one may see a packet that another does not see yet, the check may look at one and
what is stored afterwards may be the other. Triton may even load such a block again, in another layout, after the check.
So blocks of packets have at least as many elements as the program has threads (`_require_one_load`).
"""

import triton
import triton.language as tl

from stretto.tiles.call_state import call_number, may_publish
from stretto.tiles.data import peer_pointer
from stretto.tiles.intrinsics import INTERPRETED, count_threads, require_own
from stretto.tiles.waits import LOOKS_A_TIME, OF_PACKETS, watch_clock

_ZERO = tl.constexpr(-(1 << 31))  # what 0 travels as


@triton.jit
def push_packets(  # type: ignore[no-untyped-def]
    channel, pointer, offsets, data, mask, rank=None, ranks=None, in_fours: tl.constexpr = False, publishes=None
):
    """Put 32-bit `data`, as `pack` makes it, as packets at `pointer` + `offsets` in the memory of `rank`.

    pointer: a scalar into this rank's memory, of int32. ranks: instead of a rank, one for each packet. in_fours: every
    four packets along the last dim are neighbours that go together, by one store: the first one's place is a multiple
    of 16 bytes, and they have one rank and one mask. publishes: what `may_publish` gave, if the caller has asked
    already: data that was made after a wait has failed is not sent.
    """
    tl.static_assert(
        pointer.dtype.element_ty == tl.int32 and data.dtype == tl.int32, "packets are int32: pack makes them of numbers"
    )
    if publishes is None:
        publishes = may_publish(channel)
    mask = mask & publishes
    packets = tl.where(data == 0, _ZERO, data)
    if ranks is None:
        places = peer_pointer(channel, pointer, rank) + offsets
    else:
        # Chosen, not loaded one by one: a load for each packet would take longer than the stores.
        known = (ranks >= 0) & (ranks < channel.world)
        tl.device_assert(known | (mask == 0), "there is no such rank to push to")
        require_own(channel.report, pointer)
        distances = tl.zeros(ranks.shape, tl.int64)
        for peer in tl.static_range(channel.world):
            distances = tl.where(ranks == peer, tl.load(channel.addresses + channel.world + peer), distances)
        places = ((pointer + offsets).to(tl.int64) + distances).to(tl.pointer_type(tl.int32))
    # By tl.store, which stores each element once: inline assembly would have every thread store that has a copy of it,
    # and who comes second puts a packet where another was taken already.
    if in_fours:
        place, _ = _split_pairs(places.to(tl.int64))
        inside, _ = _split_pairs(mask.to(tl.int32))
        low, high = _split_pairs(packets)
        pairs = low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)
        # Two pairs are 16 bytes, at a multiple of 16: one store.
        place = tl.max_contiguous(tl.multiple_of(tl.ravel(place).to(tl.pointer_type(tl.int64)), 16), 2)
        tl.store(place, tl.ravel(pairs), mask=tl.max_constancy(tl.ravel(inside) != 0, 2))
    else:
        tl.store(places, packets, mask=mask)


@triton.jit
def _split_pairs(x):  # type: ignore[no-untyped-def]
    """The elements at even and those at odd places of the last dim."""
    if len(x.shape) == 1:
        first, second = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    else:
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return first, second


@triton.jit
def take_packets(channel, pointers, mask, part, peer):  # type: ignore[no-untyped-def]
    """int32: the data of packets in this rank's memory, once all are there; their places are empty then.

    part, peer: for the report of a wait that fails: which packets, and which rank sends them.
    """
    _require_one_load(pointers)
    packets = tl.load(pointers, mask=mask, other=_ZERO, volatile=True)
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = _misses(packets)
    while waits:
        packets = tl.load(pointers, mask=mask, other=_ZERO, volatile=True)
        waits = _misses(packets)
        looks += 1
        if waits & (looks % LOOKS_A_TIME == 0):
            began, waits = watch_clock(channel, began, looks, OF_PACKETS, part, 0, peer, 0, call_number(channel))
    tl.store(pointers, tl.zeros(pointers.shape, tl.int32), mask=mask)
    return tl.where(packets == _ZERO, 0, packets)


@triton.jit
def _require_one_load(block):  # type: ignore[no-untyped-def]
    """Refuse a block of packets that several threads would load for themselves."""
    if not INTERPRETED:
        tl.static_assert(
            block.numel >= count_threads(),
            "a block of packets has at least as many elements as the program has threads",
        )


@triton.jit
def _misses(packets):  # type: ignore[no-untyped-def]
    """Whether one of them is not there yet; all threads know, and have looked."""
    return _greatest((packets == 0).to(tl.int32)) > 0


@triton.jit
def _greatest(x):  # type: ignore[no-untyped-def]
    """Of all elements, in however many dims."""
    return tl.max(x, axis=0) if len(x.shape) == 1 else tl.max(x)


@triton.jit
def sum_packets(channel, pointer, stride, offsets, mask, part, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """(low, high, are_there): fp32 sums over all ranks, in their order, of the numbers in packets that are taken here;
    and whether all packets came before the time limit. If not, the sums are wrong, and must not be sent on.

    Rank r's are at pointer + r * stride + offsets. dtype: of the numbers; those of 16 bits come in twos, and of one of
    32 bits both results are the same. All ranks' packets are looked at in one go, until all are there.
    """
    _require_one_load(offsets)
    stride = tl.cast(stride, tl.int64)  # of all ranks' packets there may be 2^31 and more
    low, high, late = _look_at_all(channel, pointer, stride, offsets, mask, dtype)
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = late >= 0
    while waits:
        low, high, late = _look_at_all(channel, pointer, stride, offsets, mask, dtype)
        waits = late >= 0
        looks += 1
        if waits & (looks % LOOKS_A_TIME == 0):
            began, waits = watch_clock(channel, began, looks, OF_PACKETS, part, 0, late, 0, call_number(channel))
    for rank in tl.static_range(channel.world):
        tl.store(pointer + rank * stride + offsets, tl.zeros(offsets.shape, tl.int32), mask=mask)
    return low, high, late < 0


@triton.jit
def _look_at_all(channel, pointer, stride, offsets, mask, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """(low, high, late): the sums, and the last rank that a packet is missing of, or -1."""
    low = tl.zeros(offsets.shape, tl.float32)
    high = tl.zeros(offsets.shape, tl.float32)
    late = tl.full(offsets.shape, -1, tl.int32)
    for rank in tl.static_range(channel.world):
        packets = tl.load(pointer + rank * stride + offsets, mask=mask, other=_ZERO, volatile=True)
        first, second = unpack(packets, dtype)
        low += first
        high += second
        late = tl.where(packets == 0, rank, late)
    return low, high, _greatest(late)


@triton.jit
def pack(low, high, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32: two numbers of 16 bits, or `low` alone, of 32. Zeros that a packet cannot tell apart are one: +0."""
    if dtype.primitive_bitwidth == 32:
        data = low.to(dtype).to(tl.int32, bitcast=True)
    else:
        first = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        second = high.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        data = first | (second << 16)
    return tl.where(data == _ZERO, 0, data)


@triton.jit
def unpack(data, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 (low, high): what `pack` has packed."""
    if dtype.primitive_bitwidth == 32:
        low = data.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (data & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        high = ((data >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return low, high
