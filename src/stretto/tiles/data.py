# SPDX-License-Identifier: Apache-2.0
"""Loads from and stores to other ranks' memory, on the device: TileLink's push and pull (section 3.2.2).

They mirror `tl.store` and `tl.load`, with a rank. Neither implies an order: notify after a push, and wait
before a pull.
"""

import triton
import triton.language as tl

from stretto.tiles.intrinsics import require_own
from stretto.tiles.signals import P2P


@triton.jit
def peer_pointer(channel, pointer, rank):  # type: ignore[no-untyped-def]
    """Translate `pointer`, a scalar into this rank's memory (`BlockChannel.tensor`), to the same place at `rank`.

    Distances between ranks' memories are multiples of 16 bytes, so the result keeps the alignment that Triton knows of
    the pointer. Interpreted kernels refuse pointers into any other memory, which has no counterpart at a peer.
    """
    tl.device_assert((rank >= 0) & (rank < channel.world), "there is no such rank to push to or to pull from")
    require_own(channel.report, pointer)
    distance = tl.multiple_of(tl.load(channel.addresses + channel.world + rank), 16)
    return (pointer.to(tl.pointer_type(tl.int8)) + distance).to(pointer.dtype)


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
