# SPDX-License-Identifier: Apache-2.0
"""Tile mappings: from a tile to its rows, its rank and its channels (TileLink, section 4.1).

A tensor's rows are sharded over the ranks. A tile is a block of rows, in one of perhaps several columns of tiles. A
channel is a group of rows that share a signal. A mapping gives a tile's rows (f_S), rank (f_R) and channels (f_C).

`StaticMapping` computes them (equation 1); `DynamicMapping` reads them from tables that are filled at run time
(equation 2). Both are named tuples that kernels take as arguments; the device functions below serve both, and their
kind is known at compile time.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from stretto.quantities import require_whole


class StaticMapping(NamedTuple):
    """Equal shards of rows, cut into tiles by arithmetic; made by `shard_tiles` or `whole_tiles`.

    is_static (True), tile_rows, channels (of a rank) and aligned (no tile has rows of two ranks) are compiled in; rows
    (of a rank), columns (of tiles) and channel_rows too, if made with fixed=True.
    """

    is_static: Any
    world: Any
    tile_rows: Any
    channels: Any
    aligned: Any
    rows: Any
    columns: Any
    channel_rows: Any


class DynamicMapping(NamedTuple):
    """Tables, int32 [tiles] each, which a kernel such as a router may fill before use; made by `look_up_tiles`.

    Tile t has rows row_low[t] to row_high[t] - 1. Its rank is rank[t]; a consumer's tile waits for that rank, or for
    all ranks if rank[t] is the number of ranks. It waits for channels channel_low[t] to channel_high[t] - 1; a
    producer's tile signals channel_low[t].
    """

    is_static: Any
    columns: Any
    row_low: Any
    row_high: Any
    rank: Any
    channel_low: Any
    channel_high: Any


Mapping: TypeAlias = StaticMapping | DynamicMapping


def shard_tiles(
    rows: int,
    world: int,
    tile_rows: int,
    *,
    columns: int = 1,
    channels: int = 1,
    channel_rows: int | None = None,
    fixed: bool = False,
) -> StaticMapping:
    """Cut each rank's `rows` rows into tiles of `tile_rows` rows; the last tile of a rank may be smaller.

    Tile t is in row of tiles t // columns, and tiles of rank r come before those of r + 1. channels: of each rank;
    rank r's are r * channels to (r + 1) * channels - 1. channel_rows: rows of a channel; by default `channels` of them
    cover all rows and none ends within a tile; a consumer passes its producer's. fixed: compile the sizes in.
    """
    return _static(rows, world, tile_rows, columns, channels, channel_rows, fixed, aligned=True)


def whole_tiles(
    rows: int,
    world: int,
    tile_rows: int,
    *,
    columns: int = 1,
    channels: int = 1,
    channel_rows: int,
    fixed: bool = False,
) -> StaticMapping:
    """Cut all world * rows rows into tiles as one tensor, for consumers: a tile may have rows of several ranks.

    The arguments are those of `shard_tiles`; channels and channel_rows are the producer's.
    """
    return _static(rows, world, tile_rows, columns, channels, channel_rows, fixed, aligned=False)


def look_up_tiles(
    row_low: Tensor, row_high: Tensor, rank: Tensor, channel_low: Tensor, channel_high: Tensor, *, columns: int = 1
) -> DynamicMapping:
    """Make a `DynamicMapping` of tables. ValueError for tables of other dtypes, sizes or devices."""
    tables = {
        "row_low": row_low,
        "row_high": row_high,
        "rank": rank,
        "channel_low": channel_low,
        "channel_high": channel_high,
    }
    for name, table in tables.items():
        if str(table.dtype) != "torch.int32" or table.dim() != 1 or not table.is_contiguous():
            raise ValueError(
                f"a table is a contiguous int32 tensor of one dim: {name} is {table.dtype} {list(table.shape)}"
            )
        if table.shape != row_low.shape or table.device != row_low.device:
            raise ValueError(
                f"all tables have one entry a tile on one device: row_low is {list(row_low.shape)} on "
                f"{row_low.device}, {name} {list(table.shape)} on {table.device}"
            )
    _require_number("columns", columns, 1)
    return DynamicMapping(tl.constexpr(False), columns, *tables.values())


@functools.lru_cache(maxsize=1024)
def _static(
    rows: int,
    world: int,
    tile_rows: int,
    columns: int,
    channels: int,
    channel_rows: int | None,
    fixed: bool,
    *,
    aligned: bool,
) -> StaticMapping:
    for name, value in (("world", world), ("tile_rows", tile_rows), ("columns", columns), ("channels", channels)):
        _require_number(name, value, 1)
    _require_number("rows", rows, 0)
    if channel_rows is None:
        channel_rows = max(triton.cdiv(triton.cdiv(rows, channels), tile_rows), 1) * tile_rows
    if channel_rows < 1 or channel_rows * channels < rows:
        raise ValueError(
            f"{channels} channels of {channel_rows} rows do not hold the {rows} rows of a rank: "
            f"{triton.cdiv(rows, channels)} rows or more will do"
        )
    sizes = (rows, columns, channel_rows)
    constants = (tl.constexpr(value) for value in (True, world, tile_rows, channels, aligned))
    return StaticMapping(*constants, *(tl.constexpr(size) if fixed else size for size in sizes))


def _require_number(name: str, value: int, least: int) -> None:
    require_whole(f"a mapping's {name}", value, least)


def count_tiles(mapping: Mapping) -> int:
    """Return the number of tiles over all ranks."""
    columns = _value(mapping.columns)
    if isinstance(mapping, DynamicMapping):
        return mapping.row_low.numel() * columns
    rows, tile_rows, world = _value(mapping.rows), _value(mapping.tile_rows), _value(mapping.world)
    if _value(mapping.aligned):
        return world * -(-rows // tile_rows) * columns
    return -(-world * rows // tile_rows) * columns


def _value(number: Any) -> int:
    return number.value if isinstance(number, tl.constexpr) else number


@triton.jit
def tile_rows(mapping, tile):  # type: ignore[no-untyped-def]
    """f_S: return the tile's first row, and the one after its last, in the whole tensor."""
    row_tile = tile // mapping.columns
    if not mapping.is_static:
        low = tl.load(mapping.row_low + row_tile)
        high = tl.load(mapping.row_high + row_tile)
    elif mapping.aligned:
        tiles = (mapping.rows + mapping.tile_rows - 1) // mapping.tile_rows
        rank = row_tile // tiles
        within = (row_tile - rank * tiles) * mapping.tile_rows
        low = rank * mapping.rows + within
        high = rank * mapping.rows + min(within + mapping.tile_rows, mapping.rows)
    else:
        low = row_tile * mapping.tile_rows
        high = min(low + mapping.tile_rows, mapping.world * mapping.rows)
    return low, high


@triton.jit
def tile_column(mapping, tile):  # type: ignore[no-untyped-def]
    """Return the tile's column of tiles."""
    return tile % mapping.columns


@triton.jit
def tile_rank(mapping, tile):  # type: ignore[no-untyped-def]
    """f_R: return the rank that the tile's first row belongs to."""
    row_tile = tile // mapping.columns
    if not mapping.is_static:
        rank = tl.load(mapping.rank + row_tile)
    elif mapping.aligned:
        rank = row_tile // ((mapping.rows + mapping.tile_rows - 1) // mapping.tile_rows)
    else:
        rank = row_tile * mapping.tile_rows // mapping.rows
    return rank


@triton.jit
def rank_tiles(mapping):  # type: ignore[no-untyped-def]
    """Return each rank's number of tiles in a mapping made by `shard_tiles`; rank r's begin at r times this."""
    return (mapping.rows + mapping.tile_rows - 1) // mapping.tile_rows * mapping.columns


@triton.jit
def tile_channels(mapping, tile):  # type: ignore[no-untyped-def]
    """f_C: return the first channel that holds rows of the tile, and the one after the last."""
    if not mapping.is_static:
        row_tile = tile // mapping.columns
        first = tl.load(mapping.channel_low + row_tile)
        last = tl.load(mapping.channel_high + row_tile)
    else:
        low, high = tile_rows(mapping, tile)
        first = _channel_of_row(mapping, low)
        last = _channel_of_row(mapping, high - 1) + 1
    return first, last


@triton.jit
def _channel_of_row(mapping, row):  # type: ignore[no-untyped-def]
    rank = row // mapping.rows
    return rank * mapping.channels + (row - rank * mapping.rows) // mapping.channel_rows
