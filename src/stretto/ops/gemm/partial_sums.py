"""Tiles of partial sums of a reduce-scatter: whose they are, and the rows of what they add up to."""

import triton
import triton.language as tl

from stretto.ops.gemm.tile import load_bias, order_tiles


@triton.jit
def locate_owned(rank, world, gemm, rows, index, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(owner, tile, row, column) of the index-th tile: whose it is, which of its tiles, and where in its rows."""
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, gemm.block_n)
    owner = index // (row_tiles * column_tiles)
    if SHIFTED:
        owner = (rank + 1 + owner) % world
    tile = index % (row_tiles * column_tiles)
    row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
    return owner, tile, row_tile * gemm.block_m, column_tile * gemm.block_n


@triton.jit
def find_rows(gemm, staging, slot, within):  # type: ignore[no-untyped-def]
    """Where the rows of a slot [block_m, block_n] begin, from row `within` on."""
    return staging + (tl.cast(slot, tl.int64) * gemm.block_m + within) * gemm.block_n


@triton.jit
def load_rows(gemm, staging, slot, within, offsets):  # type: ignore[no-untyped-def]
    """fp32: some rows of a slot, from row `within` on."""
    return tl.load(find_rows(gemm, staging, slot, within) + offsets).to(tl.float32)


@triton.jit
def store_rows(gemm, out, bias, total, row, column, rows):  # type: ignore[no-untyped-def]
    """Add the bias to sums of a tile's rows, and store what of them is inside of out [rows, n]."""
    if bias is not None:
        total += load_bias(bias, column, gemm.n, gemm.block_n)
    rows_at = (row + tl.arange(0, total.shape[0]))[:, None]
    columns = (column + tl.arange(0, gemm.block_n))[None, :]
    inside = (rows_at < rows) & (columns < gemm.n)
    tl.store(out + rows_at.to(tl.int64) * gemm.n + columns, total.to(out.dtype.element_ty), mask=inside)
