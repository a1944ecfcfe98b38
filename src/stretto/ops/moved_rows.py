"""Rows that programs of a GEMM's kernel push to other ranks, or pull from them, before they multiply."""

import triton
import triton.language as tl

from stretto import tiles

_MOVED_AT_ONCE = tl.constexpr(256 if tiles.INTERPRETED.value else 16384)  # elements that a program loads and stores


@triton.jit
def push_rows(channel, producer, gemm, x, landing, movers, DIRECT: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's pieces of x to all ranks: to the one before this first, to this one last, if tiles need it."""
    pieces = tiles.rank_tiles(producer)
    for job in range(tl.program_id(0), pieces * channel.world, movers):
        peer = (channel.rank + channel.world - 1 - job // pieces) % channel.world
        tile = channel.rank * pieces + job % pieces
        if peer != channel.rank or not DIRECT:
            there = tiles.peer_pointer(channel, landing, peer)
            _copy_rows(producer, gemm, tile, x, channel.rank * producer.rows, there, 0)
        tiles.producer_tile_notify(channel, producer, tile, "broadcast", rank=peer)


@triton.jit
def pull_rows(channel, producer, gemm, x, landing, movers):  # type: ignore[no-untyped-def]
    """Offer this program's pieces of x to the others, from their place in this rank's memory; then pull theirs."""
    pieces = tiles.rank_tiles(producer)
    for piece in range(tl.program_id(0), pieces, movers):
        tile = channel.rank * pieces + piece
        _copy_rows(producer, gemm, tile, x, channel.rank * producer.rows, landing, 0)
        tiles.producer_tile_notify(channel, producer, tile, "local")
        tiles.peer_tile_notify(channel, piece, mode="broadcast")
    for job in range(tl.program_id(0), pieces * (channel.world - 1), movers):
        peer = (channel.rank + 1 + job // pieces) % channel.world
        tile = peer * pieces + job % pieces
        ready = tiles.peer_tile_wait(channel, job % pieces, rank=peer)
        _copy_rows(producer, gemm, tile, tiles.peer_pointer(channel, landing, peer), 0, landing, ready)
        tiles.producer_tile_notify(channel, producer, tile, "local")


@triton.jit
def _copy_rows(producer, gemm, tile, source, first, destination, ready):  # type: ignore[no-untyped-def]
    """Copy a tile's rows of k elements; `source` begins with row `first`, `destination` with row 0."""
    low, high = tiles.tile_rows(producer, tile)
    source += tl.cast(low - first, tl.int64) * gemm.k + ready
    destination += tl.cast(low, tl.int64) * gemm.k
    size = (high - low) * gemm.k
    for start in range(0, size, _MOVED_AT_ONCE):
        offsets = start + tl.arange(0, _MOVED_AT_ONCE)
        value = tl.load(source + offsets, mask=offsets < size)
        tl.store(destination + offsets, value, mask=offsets < size)
