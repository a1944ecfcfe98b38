"""Tiles to and from other ranks, on the device: TileLink's push and pull (section 3.2.2).

They mirror `tl.store` and `tl.load`, with a rank. A push is followed by a notify, a pull by nothing and preceded by a
wait. Neither orders anything by itself.
"""

import triton
import triton.language as tl

from stretto.tiles.intrinsics import require_own
from stretto.tiles.signals import P2P


@triton.jit
def peer_pointer(channel, pointer, rank):  # type: ignore[no-untyped-def]
    """The place in `rank`'s memory that `pointer`, a scalar into this rank's (`BlockChannel.tensor`), is in here.

    Distances between ranks' memories are multiples of 16 bytes, so what Triton knows of the pointer's alignment holds
    for the result too. An interpreted kernel refuses pointers into other memory, whose place at a peer nobody knows.
    """
    tl.device_assert((rank >= 0) & (rank < channel.world), "there is no such rank to push to or to pull from")
    require_own(channel.report, pointer)
    distance = tl.multiple_of(tl.load(channel.addresses + channel.world + rank), 16)
    return (pointer.to(tl.pointer_type(tl.int8)) + distance).to(pointer.dtype)


@triton.jit
def peer_rows(channel, pointer, width, rank):  # type: ignore[no-untyped-def]
    """int32: how many rows of `width` numbers of the pointer's type `rank`'s memory is from this rank's.

    For a descriptor that holds all ranks' memory, where a tile is at another row for each.
    """
    row_bytes = width * (pointer.dtype.element_ty.primitive_bitwidth // 8)
    return (tl.load(channel.addresses + channel.world + rank) // row_bytes).to(tl.int32)


@triton.jit
def tile_push_data(  # type: ignore[no-untyped-def]
    channel, pointer, offsets, value, rank=None, mask=None, mode: tl.constexpr = P2P
):
    """Store `value` at `pointer` + `offsets` in the memory of `rank` ("p2p") or of all ranks ("broadcast").

    pointer: a scalar into this rank's memory. A broadcast begins with the next rank, so that no two ranks write to one
    at once, and ends with this one.
    """
    tl.static_assert(mode == "p2p" or mode == "broadcast", 'mode is "p2p" or "broadcast"')
    tl.static_assert((rank is None) == (mode == "broadcast"), 'mode "p2p" takes a rank, "broadcast" none')
    if mode == "p2p":
        tl.store(peer_pointer(channel, pointer, rank) + offsets, value, mask=mask)
    else:
        for distance in tl.static_range(1, channel.world + 1):
            peer = (channel.rank + distance) % channel.world
            tl.store(peer_pointer(channel, pointer, peer) + offsets, value, mask=mask)


@triton.jit
def tile_pull_data(channel, pointer, offsets, rank, mask=None, other=None):  # type: ignore[no-untyped-def]
    """Load from `pointer` + `offsets` in the memory of `rank`.

    pointer: a scalar into this rank's memory. Add the result of the wait that allows it to the offsets.
    """
    return tl.load(peer_pointer(channel, pointer, rank) + offsets, mask=mask, other=other)
