"""Rows on their way to other ranks: by copy engines, or by programs of a GEMM's kernel before they multiply."""

import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops.gemm import divide_up

_MOVED_AT_ONCE = tl.constexpr(256 if tiles.INTERPRETED.value else 16384)  # elements that a program loads and stores


def push_by_copies(block_channel: tiles.BlockChannel, producer: tiles.StaticMapping, x: Tensor, offset: int) -> None:
    """Push x to the rank before this one, then to the one before that, and so on: each gets its next one's rows first.

    At any time every rank pushes to another one, and rows come in the order that tiles are multiplied in.
    """
    rank, world, (rows, k) = block_channel.rank, block_channel.world_size, x.shape
    for distance in range(1, world):
        peer = (rank - distance) % world
        there = block_channel.tensor((world * rows, k), x.dtype, offset=offset, rank=peer)
        for piece, start in enumerate(range(0, rows, producer.channel_rows)):
            part = slice(start, min(start + producer.channel_rows, rows))
            tiles.rank_copy_data(there, x, rows=part, to=rank * rows + start)
            tiles.rank_notify(block_channel, rank * producer.channels.value + piece, peer)


def copy_gathered(
    block_channel: tiles.BlockChannel, producer: tiles.StaticMapping, x: Tensor, gathered: Tensor, returned: Tensor
) -> None:
    """Copy the gathered rows out of the workspace, which the next call writes over, beside the GEMM.

    A rank's pieces come in stream order, so the signal of its last one stands for all.
    """
    rank, world, rows = block_channel.rank, block_channel.world_size, x.shape[0]
    tiles.rank_copy_data(returned, x, rows=slice(0, rows), to=rank * rows)
    last = divide_up(rows, producer.channel_rows) - 1
    for distance in range(1, world):
        peer = (rank + distance) % world
        tiles.rank_wait(block_channel, peer * producer.channels.value + last, peer)
        tiles.rank_copy_data(returned, gathered, rows=slice(peer * rows, (peer + 1) * rows), to=peer * rows)


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
