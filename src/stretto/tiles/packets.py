"""Data that carries its own signal (NCCL's LL protocol): small messages that travel in the time of one store.

A packet is 64 bits: 32 of data, and the number of the call. It is stored whole, so who finds the call's number in it
has the data too: no barrier, no fence and no second message. Half of the traffic is numbers, which pays for as long as
latency is what counts.

Nobody resets packets: a place holds what an earlier call, of another number, has put there. So memory that packets are
put into holds nothing else, and calls of two numbers in a row use two slots (`call_slot`).
"""

import triton
import triton.language as tl

from stretto.tiles.data import peer_pointer
from stretto.tiles.intrinsics import store_relaxed, store_relaxed_pairs
from stretto.tiles.signals import LOOKS_A_TIME, OF_PACKETS, watch_clock


@triton.jit
def push_packets(  # type: ignore[no-untyped-def]
    channel, pointer, offsets, data, epoch, mask, rank=None, ranks=None, in_pairs: tl.constexpr = False
):
    """Put 32-bit `data` as packets of call `epoch` at `pointer` + `offsets` in the memory of `rank`.

    pointer: a scalar into this rank's memory, of int64. ranks: instead of a rank, one for each packet. in_pairs: every
    two packets along the last dim are neighbours that go together, by one store: the first one's offset is even (and
    pointer a multiple of 16 bytes), the second's is one more, and they have one rank and one mask. Threads that store
    every other packet would have each sector of 32 bytes travel twice.
    """
    packets = data.to(tl.uint32, bitcast=True).to(tl.int64) | (epoch.to(tl.int64) << 32)
    if ranks is None:
        places = peer_pointer(channel, pointer, rank) + offsets
    else:
        # Chosen, not loaded one by one: a load for each packet would take longer than the stores.
        distances = tl.zeros(ranks.shape, tl.int64)
        for peer in tl.static_range(channel.world):
            distances = tl.where(ranks == peer, tl.load(channel.addresses + channel.world + peer), distances)
        places = ((pointer + offsets).to(tl.int64) + distances).to(tl.pointer_type(tl.int64))
    if in_pairs:
        place, _ = _split_pairs(places.to(tl.int64))
        first, second = _split_pairs(packets)
        inside, _ = _split_pairs(mask.to(tl.int32))
        store_relaxed_pairs(place.to(tl.pointer_type(tl.int64)), first, second, inside != 0)
    else:
        store_relaxed(places, packets, mask)


@triton.jit
def _split_pairs(x):  # type: ignore[no-untyped-def]
    """The elements at even and those at odd places of the last dim."""
    if len(x.shape) == 1:
        first, second = tl.split(tl.reshape(x, (x.shape[0] // 2, 2)))
    else:
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return first, second


@triton.jit
def look_at_packets(pointers, epoch, mask):  # type: ignore[no-untyped-def]
    """(data, missing): each packet's 32 bits, and whether they are not of this call yet (never where mask is 0)."""
    packets = tl.load(pointers, mask=mask, other=0, volatile=True)
    missing = ((packets >> 32).to(tl.int32) != epoch) & mask
    return packets.to(tl.int32), missing


@triton.jit
def wait_for_packets(channel, pointers, epoch, mask, part, peer):  # type: ignore[no-untyped-def]
    """int32: the data of packets in this rank's memory, once all are there.

    part, peer: for the report of a wait that fails: which packets, and which rank sends them.
    """
    data, missing = look_at_packets(pointers, epoch, mask)
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = tl.max(missing.to(tl.int32), axis=0) > 0
    while waits:
        data, missing = look_at_packets(pointers, epoch, mask)
        waits = tl.max(missing.to(tl.int32), axis=0) > 0
        looks += 1
        if waits & (looks % LOOKS_A_TIME == 0):
            began, waits = watch_clock(channel, began, looks, OF_PACKETS, part, 0, peer, 0, epoch)
    return data


@triton.jit
def sum_packets(channel, pointer, stride, offsets, epoch, mask, part, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 (low, high): the sums over all ranks, in their order, of the numbers in packets of this rank's memory.

    Rank r's are at pointer + r * stride + offsets. dtype: of the numbers; those of 16 bits come in twos, and of one of
    32 bits both results are the same. All ranks' packets are looked at in one go, until all are there.
    """
    low, high, late = _look_at_all(channel, pointer, stride, offsets, epoch, mask, dtype)
    began = tl.cast(0, tl.int64)
    looks = 0
    waits = late >= 0
    while waits:
        low, high, late = _look_at_all(channel, pointer, stride, offsets, epoch, mask, dtype)
        waits = late >= 0
        looks += 1
        if waits & (looks % LOOKS_A_TIME == 0):
            began, waits = watch_clock(channel, began, looks, OF_PACKETS, part, 0, late, 0, epoch)
    return low, high


@triton.jit
def _look_at_all(channel, pointer, stride, offsets, epoch, mask, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """(low, high, late): the sums, and the last rank that a packet is missing of, or -1."""
    low = tl.zeros(offsets.shape, tl.float32)
    high = tl.zeros(offsets.shape, tl.float32)
    late = tl.full(offsets.shape, -1, tl.int32)
    for rank in tl.static_range(channel.world):
        data, missing = look_at_packets(pointer + rank * stride + offsets, epoch, mask)
        first, second = unpack(data, dtype)
        low += first
        high += second
        late = tl.where(missing, rank, late)
    return low, high, tl.max(late, axis=0)


@triton.jit
def pack(low, high, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32: two numbers of 16 bits, or `low` alone, of 32."""
    if dtype.primitive_bitwidth == 32:
        data = low.to(dtype).to(tl.int32, bitcast=True)
    else:
        first = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        second = high.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        data = first | (second << 16)
    return data


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
