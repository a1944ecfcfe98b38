# SPDX-License-Identifier: Apache-2.0
"""Packets: data that is its own signal, for small messages with the latency of one store.

A packet is 32 bits of data, never 0, in memory that holds 0 where there is no packet. It is stored whole, so a reader
that sees a nonzero word has all of it: there is no barrier, no fence, no second message and no separate flag.
(NCCL's LL protocol sends as many bits of flags as of data.) Data of 0 is sent as the bits of a negative zero, in its
last number.

Reuse: the reader of a packet writes 0 back, so the memory is left as it was. It holds only packets, one
program takes each packet, and consecutive calls alternate between two slots (`call_slot`).

Exactly one thread loads each packet. Triton holds a block that has fewer elements than the program has threads several
times, and loads each copy separately: one copy may see a packet that another does not see yet, so that the check looks
at one copy and the result is stored from the other. Triton may even load such a block again after the check, in another
layout. So blocks of packets have at least as many elements as the program has threads (`_require_one_load`).

What several programs read, such as a table of counts, is sent as numbered words: 64 bits, of which the upper half is
the call's number, so that nobody empties them. A word has its place to itself, in each of the two slots.
"""

import triton
import triton.language as tl

from stretto.tiles.call_state import call_number, may_publish
from stretto.tiles.data import peer_pointer
from stretto.tiles.intrinsics import INTERPRETED, count_threads, require_own
from stretto.tiles.waits import OF_PACKETS, READS_PER_CLOCK, watch_clock

_ZERO = tl.constexpr(-(1 << 31))  # data of 0 is sent as this


@triton.jit
def push_packets(  # type: ignore[no-untyped-def]
    channel, pointer, offsets, data, mask, rank=None, ranks=None, in_fours: tl.constexpr = False, publishes=None
):
    """Store 32-bit `data`, as `pack` makes it, as packets at `pointer` + `offsets` in the memory of `rank`.

    pointer: a scalar into this rank's memory, of int32. ranks: a rank for each packet, instead of `rank`. in_fours:
    store every four neighbours along the last dim together; their first place is a multiple of 16 bytes, and they share
    one rank and one mask. publishes: the result of `may_publish`, if the caller has it already: data that was made
    after a failed wait is not sent.
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
        # Select distances, since a load for each packet would take longer than the stores.
        known = (ranks >= 0) & (ranks < channel.world)
        tl.device_assert(known | (mask == 0), "there is no such rank to push to")
        require_own(channel.report, pointer)
        distances = tl.zeros(ranks.shape, tl.int64)
        for peer in tl.static_range(channel.world):
            distances = tl.where(ranks == peer, tl.load(channel.addresses + channel.world + peer), distances)
        places = ((pointer + offsets).to(tl.int64) + distances).to(tl.pointer_type(tl.int32))
    # tl.store stores each element once. With inline assembly every thread that holds a copy would store, and a late one
    # would put a packet where the reader has already taken it.
    if in_fours:
        place, _ = _split_pairs(places.to(tl.int64))
        pair_mask, _ = _split_pairs(mask.to(tl.int32))
        low, high = _split_pairs(packets)
        pairs = low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)
        # Two pairs are 16 bytes, at a multiple of 16: one store.
        place = tl.max_contiguous(tl.multiple_of(tl.ravel(place).to(tl.pointer_type(tl.int64)), 16), 2)
        tl.store(place, tl.ravel(pairs), mask=tl.max_constancy(tl.ravel(pair_mask) != 0, 2))
    else:
        tl.store(places, packets, mask=mask)


@triton.jit
def _split_pairs(x):  # type: ignore[no-untyped-def]
    """Split a block into the elements at even and at odd places of the last dim."""
    if len(x.shape) == 1:
        first, second = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    else:
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return first, second


@triton.jit
def take_packets(channel, pointers, mask, part, peer, seen=None):  # type: ignore[no-untyped-def]
    """Wait for packets in this rank's memory, return their data (int32), and empty their places.

    part, peer: for the failure record: which packets, and the rank that sends them. seen: what `look_for_packets` has
    found there, for a program that did not know the mask yet.
    """
    _require_one_load(pointers)
    packets = tl.load(pointers, mask=mask, other=_ZERO, volatile=True) if seen is None else tl.where(mask, seen, _ZERO)
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = _misses(packets)
    while waits:
        packets = tl.load(pointers, mask=mask, other=_ZERO, volatile=True)
        waits = _misses(packets)
        looks += 1
        if waits & (looks % READS_PER_CLOCK == 0):
            began, waits = watch_clock(channel, began, looks, OF_PACKETS, part, 0, peer, 0, call_number(channel))
    tl.store(pointers, tl.zeros(pointers.shape, tl.int32), mask=mask)
    return tl.where(packets == _ZERO, 0, packets)


@triton.jit
def look_for_packets(pointers, mask):  # type: ignore[no-untyped-def]
    """Return the packets that are there already, for `take_packets`, with 0 where none is; mask: where one may come."""
    _require_one_load(pointers)
    return tl.load(pointers, mask=mask, other=0, volatile=True)


@triton.jit
def _require_one_load(block):  # type: ignore[no-untyped-def]
    """Refuse, at compile time, a block of packets that several threads would load for themselves."""
    if not INTERPRETED:
        tl.static_assert(
            block.numel >= count_threads(),
            "a block of packets has at least as many elements as the program has threads",
        )


@triton.jit
def _misses(packets):  # type: ignore[no-untyped-def]
    """Return whether a packet is missing; all threads of the block get the same answer."""
    return _greatest((packets == 0).to(tl.int32)) > 0


@triton.jit
def _greatest(x):  # type: ignore[no-untyped-def]
    """Return the maximum of all elements, for any number of dims."""
    return tl.max(x, axis=0) if len(x.shape) == 1 else tl.max(x)


@triton.jit
def sum_packets(  # type: ignore[no-untyped-def]
    channel, pointer, stride, offsets, mask, part, dtype: tl.constexpr, senders=None, by_tree: tl.constexpr = False,
    own=None,
):  # fmt: skip
    """Wait for all ranks' packets, empty their places, and sum their numbers in fp32, in rank order.

    Returns (low, high, have_arrived): the sums, and whether all packets arrived before the time limit. If not, the sums
    are wrong and must not be sent on. Rank r's packets are at pointer + r * stride + offsets. dtype: of the numbers; a
    packet holds two of 16 bits, or one of 32 bits, and then low and high are the same. Each read covers all ranks'
    packets. senders: None, or int32 of a shape that broadcasts to that of offsets: bit r is set where rank r sends a
    packet. by_tree: sum neighbouring ranks first, then these sums, and so on; the number of ranks is a power of two.
    own: None, or this rank's packets, which are in no memory then (not by_tree).
    """
    _require_one_load(offsets)
    stride = tl.cast(stride, tl.int64)  # all ranks' packets may be 2^31 or more
    low, high, late = _poll_all(channel, pointer, stride, offsets, mask, dtype, senders, by_tree, own)
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = late >= 0
    while waits:
        low, high, late = _poll_all(channel, pointer, stride, offsets, mask, dtype, senders, by_tree, own)
        waits = late >= 0
        looks += 1
        if waits & (looks % READS_PER_CLOCK == 0):
            began, waits = watch_clock(channel, began, looks, OF_PACKETS, part, 0, late, 0, call_number(channel))
    for rank in tl.static_range(channel.world):
        is_sent = _select_sender(mask, senders, rank)
        if own is not None:
            is_sent = is_sent & (channel.rank != rank)
        tl.store(pointer + rank * stride + offsets, tl.zeros(offsets.shape, tl.int32), mask=is_sent)
    return low, high, late < 0


@triton.jit
def _poll_all(  # type: ignore[no-untyped-def]
    channel, pointer, stride, offsets, mask, dtype: tl.constexpr, senders, by_tree: tl.constexpr, own
):
    """Return (low, high, late): the sums, and the last rank with a missing packet, or -1."""
    if by_tree:
        low, high, late = _poll_tree(pointer, stride, offsets, mask, dtype, 0, channel.world)
        return low, high, _greatest(late)
    low = tl.zeros(offsets.shape, tl.float32)
    high = tl.zeros(offsets.shape, tl.float32)
    late = tl.full(offsets.shape, -1, tl.int32)
    for rank in tl.static_range(channel.world):
        is_sent = _select_sender(mask, senders, rank)
        is_stored = is_sent if own is None else is_sent & (channel.rank != rank)
        packets = tl.load(pointer + rank * stride + offsets, mask=is_stored, other=_ZERO, volatile=True)
        if own is not None:
            packets = tl.where(is_sent & (channel.rank == rank) & (own != 0), own, packets)
        first, second = unpack(packets, dtype)
        low += first
        high += second
        late = tl.where(packets == 0, rank, late)
    return low, high, _greatest(late)


@triton.jit
def _poll_tree(  # type: ignore[no-untyped-def]
    pointer, stride, offsets, mask, dtype: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr
):
    """Return (low, high, late) of the ranks from FIRST on, each half's sums added up; late: for each packet."""
    if COUNT == 1:
        packets = tl.load(pointer + FIRST * stride + offsets, mask=mask, other=_ZERO, volatile=True)
        low, high = unpack(packets, dtype)
        late = tl.where(packets == 0, FIRST, -1)
    else:
        low, high, late = _poll_tree(pointer, stride, offsets, mask, dtype, FIRST, COUNT // 2)
        more_low, more_high, more_late = _poll_tree(
            pointer, stride, offsets, mask, dtype, FIRST + COUNT // 2, COUNT // 2
        )
        low += more_low
        high += more_high
        late = tl.maximum(late, more_late)
    return low, high, late


@triton.jit
def _select_sender(mask, senders, rank: tl.constexpr):  # type: ignore[no-untyped-def]
    return mask if senders is None else mask & ((senders >> rank) & 1 != 0)


@triton.jit
def push_numbered(channel, pointer, offsets, data, mask, rank):  # type: ignore[no-untyped-def]
    """Store 32-bit `data` as numbered words at `pointer` + `offsets` in the memory of `rank`.

    pointer: a scalar into this rank's memory, of int64. mask: with the result of `may_publish`.
    """
    words = (call_number(channel).to(tl.int64) << 32) | data.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(peer_pointer(channel, pointer, rank) + offsets, words, mask=mask)


@triton.jit
def await_numbered(channel, pointers, mask, part, peers):  # type: ignore[no-untyped-def]
    """Wait for this call's numbered words in this rank's memory, and return their data, int32; 0 where mask is False.

    part, peers: for the failure record, which words, and the ranks that send them. After a failed wait words that have
    not arrived are 0.
    """
    _require_one_load(pointers)
    words, missing = _poll_numbered(channel, pointers, mask, peers)
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = missing >= 0
    while waits:
        words, missing = _poll_numbered(channel, pointers, mask, peers)
        waits = missing >= 0
        looks += 1
        if waits & (looks % READS_PER_CLOCK == 0):
            began, waits = watch_clock(channel, began, looks, OF_PACKETS, part, 0, missing, 0, call_number(channel))
    return tl.where(mask & _is_current(channel, words), words.to(tl.int32), 0)


@triton.jit
def _poll_numbered(channel, pointers, mask, peers):  # type: ignore[no-untyped-def]
    """Return (words, a rank with a missing word, or -1)."""
    words = tl.load(pointers, mask=mask, other=0, volatile=True)
    return words, _greatest(tl.where(mask & (_is_current(channel, words) == 0), peers, -1))


@triton.jit
def _is_current(channel, words):  # type: ignore[no-untyped-def]
    return (words >> 32) == call_number(channel).to(tl.int64)


@triton.jit
def pack(low, high, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pack two numbers of 16 bits, or `low` alone of 32 bits, into int32. The zeros that share a packet become +0."""
    if dtype.primitive_bitwidth == 32:
        data = low.to(dtype).to(tl.int32, bitcast=True)
    else:
        first = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        second = high.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        data = first | (second << 16)
    return tl.where(data == _ZERO, 0, data)


@triton.jit
def unpack(data, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Unpack what `pack` has packed: returns fp32 (low, high)."""
    if dtype.primitive_bitwidth == 32:
        low = data.to(tl.float32, bitcast=True)
        high = low
    else:
        low = (data & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        high = ((data >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return low, high
