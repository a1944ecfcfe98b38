# SPDX-License-Identifier: Apache-2.0
"""The rows of an all-gather + GEMM: how they are sent, the order of their tiles, and one tile's product.

Copy engines move rows, or programs of the GEMM's kernel before they multiply.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto import tiles
from stretto.ops.gemm.config import KernelConfig, divide_up
from stretto.ops.gemm.stream_k import multiply_unit
from stretto.ops.gemm.tile import load_bias, multiply_columns, order_tiles, scale_tile, store_tile, tile_width
from stretto.ops.workspace import PEER_TILES, count_bytes

_MAX_PIECES = 8
_MOVED_BYTES = 256 << 10  # that a program moves at a time, at most
_ALIGNMENT = 128  # bytes: tensors in a workspace begin at multiples of it
_SCALES_AT_ONCE = tl.constexpr(256)
_MOVED_AT_ONCE = tl.constexpr(256 if tiles.INTERPRETED.value else 16384)  # elements that a program loads and stores


class GatherShard(NamedTuple):
    """This rank's rows, as a gather's kernel sees them.

    rows: of each rank. scales: factors [rows] of fp8 rows, or None. Compiled in: is_direct (tiles of own rows are
    loaded from x itself, which takes tiles without other ranks' rows), and is_shifted (the order of tiles begins with
    own rows).
    """

    rows: Any
    scales: Any
    is_direct: Any
    is_shifted: Any


class RowMoves(NamedTuple):
    """How programs move rows: the first `movers` of a launch push x to the other ranks, or pull theirs (not is_push).

    landing: both slots of the gathered rows, slot_rows rows apart; slots of scales are slot_words apart. is_push is
    compiled in.
    """

    x: Any
    landing: Any
    slot_rows: Any
    slot_words: Any
    movers: Any
    is_push: Any


@lru_cache(maxsize=4096)
def map_rows(
    rows: int, world: int, config: KernelConfig, row_bytes: int
) -> tuple[tiles.StaticMapping, tiles.StaticMapping]:
    """(the mapping of rows to signals as they are sent, the mapping of the GEMM's tiles to the signals they wait for).

    Rows are sent in pieces of about `piece_bytes`, one a channel. Programs move many small tiles a piece, so that all
    of them have some to move.
    """
    assert config.blocks is not None
    # Powers of two, since a kernel is compiled for each of these numbers.
    pieces = max(1, min(rows * row_bytes // config.piece_bytes, divide_up(rows, config.blocks.m), _MAX_PIECES))
    pieces = 1 << (pieces.bit_length() - 1)
    moved = config.blocks.m
    if config.transfer == "programs":
        moved = max(1, min(rows * world // config.movers, _MOVED_BYTES // row_bytes))
        moved = max(1 << (moved.bit_length() - 1), triton.next_power_of_2(divide_up(rows, PEER_TILES)))
    producer = tiles.shard_tiles(rows, world, moved, channels=pieces)
    channel_rows = producer.channel_rows
    return producer, tiles.whole_tiles(rows, world, config.blocks.m, channels=pieces, channel_rows=channel_rows)


def count_gathered_bytes(rows: int, k: int, dtype: torch.dtype, *, by_programs: bool, has_scales: bool) -> int:
    """The bytes of a slot for all ranks' rows, and, of fp8, their scales behind them.

    Slots for programs have one row more: they begin at multiples of a row, so that one descriptor covers both.
    """
    if has_scales:
        return _find_scales_start(rows, k) + count_bytes(rows, dtype=torch.float32)
    return count_bytes(rows + by_programs, k, dtype=dtype)


def _find_scales_start(rows: int, k: int) -> int:
    """The offset of the scales in a slot, in bytes: behind one row more than there are."""
    return divide_up((rows + 1) * k, _ALIGNMENT) * _ALIGNMENT


def find_gathered_scales(
    block_channel: tiles.BlockChannel, rows: int, k: int, offset: int, rank: int | None = None
) -> Tensor:
    """The scales of all ranks' fp8 rows, fp32 [world * rows], in a rank's slot at `offset`."""
    count = rows * block_channel.world_size
    return block_channel.tensor((count,), torch.float32, offset=offset + _find_scales_start(count, k), rank=rank)


def push_rows_by_copies(
    block_channel: tiles.BlockChannel, producer: tiles.StaticMapping, x: Tensor, scales: Tensor | None, offset: int
) -> None:
    """Push x by copy engines to the rank before this one, then to the one before that, and so on.

    So every rank gets its next rank's rows first, which is the order that tiles are multiplied in, and at any time
    every rank pushes to another one. scales: [rows] of fp8, which go before the first piece.
    """
    rank, world, (rows, k) = block_channel.rank, block_channel.world_size, x.shape
    for distance in range(1, world):
        peer = (rank - distance) % world
        there = block_channel.tensor((world * rows, k), x.dtype, offset=offset, rank=peer)
        if scales is not None:
            scales_there = find_gathered_scales(block_channel, rows, k, offset, peer)
            tiles.rank_copy_data(scales_there, scales, rows=slice(0, rows), to=rank * rows)
        for piece, start in enumerate(range(0, rows, producer.channel_rows)):
            part = slice(start, min(start + producer.channel_rows, rows))
            tiles.rank_copy_data(there, x, rows=part, to=rank * rows + start)
            tiles.rank_notify(block_channel, rank * producer.channels.value + piece, peer)


def signal_own_rows(block_channel: tiles.BlockChannel, producer: tiles.StaticMapping) -> None:
    """After a failed launch, signal this rank's own rows from the host, so that the next call does not hang."""
    first = block_channel.rank * producer.channels.value
    for index in range(first, first + producer.channels.value):
        tiles.rank_notify(block_channel, index, block_channel.rank)


def copy_out_gathered(
    block_channel: tiles.BlockChannel, producer: tiles.StaticMapping, x: Tensor, gathered: Tensor, returned: Tensor
) -> None:
    """Copy the gathered rows out of the workspace, which the next call overwrites, concurrently with the GEMM.

    A rank's pieces arrive in stream order, so the signal of its last piece stands for all.
    """
    rank, world, rows = block_channel.rank, block_channel.world_size, x.shape[0]
    tiles.rank_copy_data(returned, x, rows=slice(0, rows), to=rank * rows)
    last = divide_up(rows, producer.channel_rows) - 1
    for distance in range(1, world):
        peer = (rank + distance) % world
        tiles.rank_wait(block_channel, peer * producer.channels.value + last, peer)
        tiles.rank_copy_data(returned, gathered, rows=slice(peer * rows, (peer + 1) * rows), to=peer * rows)


@triton.jit
def push_rows(channel, producer, gemm, shard, x, landing, scales_landing):  # type: ignore[no-untyped-def]
    """Push pieces of x to all ranks: to the rank before this one first, to this rank last, if tiles need a copy.

    Pieces are claimed: running programs push all of them, whichever of a launch's programs are scheduled.
    """
    pieces = tiles.rank_tiles(producer)
    job = tiles.claim_move(channel)
    while job < pieces * channel.world:
        following = tiles.claim_move(channel)  # before the copy, which takes longer
        peer = (channel.rank + channel.world - 1 - job // pieces) % channel.world
        tile = channel.rank * pieces + job % pieces
        if peer != channel.rank or not shard.is_direct:
            there = tiles.peer_pointer(channel, landing, peer)
            _copy_rows(producer, gemm.k, tile, x, channel.rank * producer.rows, there, 0, _MOVED_AT_ONCE)
            if shard.scales is not None:
                there = tiles.peer_pointer(channel, scales_landing, peer)
                _copy_rows(producer, 1, tile, shard.scales, channel.rank * producer.rows, there, 0, _SCALES_AT_ONCE)
        tiles.producer_tile_notify(channel, producer, tile, "broadcast", rank=peer)
        job = following


@triton.jit
def pull_rows(channel, producer, gemm, shard, x, landing, scales_landing):  # type: ignore[no-untyped-def]
    """Offer pieces of x to the other ranks, from their place in this rank's memory; then pull theirs.

    Pieces are claimed, as in `push_rows`: no program waits for an offer before all of this rank's are claimed.
    """
    pieces = tiles.rank_tiles(producer)
    job = tiles.claim_move(channel)
    while job < pieces:
        following = tiles.claim_move(channel)
        tile = channel.rank * pieces + job
        _copy_rows(producer, gemm.k, tile, x, channel.rank * producer.rows, landing, 0, _MOVED_AT_ONCE)
        if shard.scales is not None:
            first = channel.rank * producer.rows
            _copy_rows(producer, 1, tile, shard.scales, first, scales_landing, 0, _SCALES_AT_ONCE)
        tiles.producer_tile_notify(channel, producer, tile, "local")
        tiles.peer_tile_notify(channel, job, mode="broadcast")
        job = following
    job -= pieces
    while job < pieces * (channel.world - 1):
        following = tiles.claim_move(channel) - pieces
        peer = (channel.rank + 1 + job // pieces) % channel.world
        tile = peer * pieces + job % pieces
        ready = tiles.peer_tile_wait(channel, job % pieces, rank=peer)
        there = tiles.peer_pointer(channel, landing, peer)
        _copy_rows(producer, gemm.k, tile, there, 0, landing, ready, _MOVED_AT_ONCE)
        if shard.scales is not None:
            there = tiles.peer_pointer(channel, scales_landing, peer)
            _copy_rows(producer, 1, tile, there, 0, scales_landing, ready, _SCALES_AT_ONCE)
        tiles.producer_tile_notify(channel, producer, tile, "local")
        job = following


@triton.jit
def _copy_rows(  # type: ignore[no-untyped-def]
    producer, k, tile, source, first, destination, ready, AT_ONCE: tl.constexpr
):
    """Copy a tile's rows of k elements; `source` begins with row `first`, `destination` with row 0."""
    low, high = tiles.tile_rows(producer, tile)
    source += tl.cast(low - first, tl.int64) * k + ready
    destination += tl.cast(low, tl.int64) * k
    size = (high - low) * k
    for start in range(0, size, AT_ONCE):
        offsets = start + tl.arange(0, AT_ONCE)
        value = tl.load(source + offsets, mask=offsets < size)
        tl.store(destination + offsets, value, mask=offsets < size)


@triton.jit
def count_tiles(channel, gemm, shard):  # type: ignore[no-untyped-def]
    """(rows of tiles, columns of tiles) of out."""
    return tl.cdiv(shard.rows * channel.world, gemm.block_m), tl.cdiv(gemm.n, tile_width(gemm))


@triton.jit
def order_rows(channel, gemm, shard):  # type: ignore[no-untyped-def]
    """(the row of tiles that comes after the direct ones; how many rows of tiles are direct, loaded from x itself)."""
    direct_tiles = shard.rows // gemm.block_m if shard.is_direct else 0
    # A tile of two ranks' rows is the earlier rank's.
    first = tl.cdiv(channel.rank * shard.rows, gemm.block_m) if shard.is_shifted else 0
    return first + direct_tiles, direct_tiles


@triton.jit
def locate_direct(gemm, row_tiles, tile):  # type: ignore[no-untyped-def]
    """(row, column) where a tile begins, of so many rows of tiles."""
    row_tile, column_tile = order_tiles(tile, row_tiles, tl.cdiv(gemm.n, tile_width(gemm)), gemm.group_rows)
    return row_tile * gemm.block_m, column_tile * tile_width(gemm)


@triton.jit
def locate_gathered(gemm, tile, row_tiles, first, direct_tiles):  # type: ignore[no-untyped-def]
    """(row of tiles, row, column) of the tile-th tile, direct ones counted; first: the row of tiles after those."""
    column_tiles = tl.cdiv(gemm.n, tile_width(gemm))
    tile -= direct_tiles * column_tiles
    row_tile, column_tile = order_tiles(tile, row_tiles - direct_tiles, column_tiles, gemm.group_rows)
    row_tile = (row_tile + first) % row_tiles
    return row_tile, row_tile * gemm.block_m, column_tile * tile_width(gemm)


@triton.jit
def multiply_gathered(  # type: ignore[no-untyped-def]
    channel, gemm, stream_k, shard, gathered, scales, weight, bias, out, place, unit
):
    """Multiply the work unit's steps of one tile of gathered rows; returns where the unit's next tile begins.

    place: (row, column, row of `gathered` that this call's rows begin at, what the wait for the rows returned). unit:
    (begin, end), in steps.
    """
    row, column, base, ready = place
    begin, end = unit
    row_there = base + row + ready
    count = shard.rows * channel.world
    if gemm.parts == 1:
        total, is_complete, begin = multiply_unit(gemm, stream_k, gathered, weight, row_there, column, 0, begin, end)
        if is_complete:
            total = scale_tile(gemm, scales, total, row + ready, column, count)
            finish_tile(channel, gemm, shard, bias, out, total, row, column)
    else:
        totals = multiply_columns(gemm, gathered, weight, row_there, column)
        begin = end  # such tiles are whole units
        for part in tl.static_range(gemm.parts):
            at = column + part * gemm.block_n
            total = scale_tile(gemm, scales, totals[part], row + ready, at, count)
            finish_tile(channel, gemm, shard, bias, out, total, row, at)
    return begin


@triton.jit
def finish_tile(channel, gemm, shard, bias, out, total, row, column):  # type: ignore[no-untyped-def]
    """Add the bias, and store."""
    if bias is not None:
        total += load_bias(bias, column, gemm.n, gemm.block_n)
    store_tile(gemm, out, total, row, column, shard.rows * channel.world)
