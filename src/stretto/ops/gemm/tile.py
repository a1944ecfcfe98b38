# SPDX-License-Identifier: Apache-2.0
"""One tile of the GEMM that all fused operators share: its operands, product, order among tiles, and store.

C = A @ B.T with A [m, k] in rows of k elements, and B [n, k] (a linear's weight), or the transpose of a [k, n] that
lies in rows (`transposed`: the input's gradient multiplies by the weight itself). Sums are fp32. Operands are loaded by
TMA where their layout allows, else by pointers. fp8 operands have factors for rows and columns (`scale_tile`). Nothing
here waits or signals: operators do, around these functions.
"""

import math
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.ops.gemm.config import Blocks, count_column_parts, find_capability, has_power_of_two_columns
from stretto.tiles import kind_of

_TMA_BYTES = 16  # TMA takes bases and strides that are multiples of this
_CONVERTED_BYTES = tl.constexpr(64 << 10)  # of shared memory, that a store by pointers takes to convert a tile's layout
_SHARED_BYTES = 224 << 10  # of a multiprocessor of sm_90, less what barriers take


class Scales(NamedTuple):
    """fp32 factors of an fp8 product: of A's rows [m], and of the weight's [n], which are C's columns.

    Of any stride, so one factor of all rows is an expanded tensor.
    """

    rows: Tensor
    columns: Tensor


class Gemm(NamedTuple):
    """A product as kernels see it: one argument, made by `describe_gemm`.

    Sizes and group_rows are run-time values; the rest is compiled in.

    parts: a tile has `parts` times block_n columns. by_tma: operands are descriptors. transposed: see the module.
    stores_by_tma: so is the output, which a tile's store writes in `out_parts` blocks of columns. grain: a power of two
    that divides the length of rows; addresses are known to be multiples of it. row_scales, column_scales: factors of
    fp8 operands, row_step and column_step elements apart (0: one for all), or None.
    """

    m: Any
    n: Any
    k: Any
    block_m: Any
    block_n: Any
    block_k: Any
    parts: Any
    group_rows: Any
    by_tma: Any
    transposed: Any
    stores_by_tma: Any
    out_parts: Any
    precision: Any
    grain: Any
    row_scales: Any
    row_step: Any
    column_scales: Any
    column_step: Any


class GemmOperands(NamedTuple):
    """A product and its operands as kernels take them: descriptors or tensors."""

    gemm: Gemm
    a: Any
    b: Any
    out: Any


def describe_gemm(
    a: Tensor,
    weight: Tensor,
    out: Tensor | None,
    blocks: Blocks,
    *,
    scales: Scales | None = None,
    in_parts: bool = False,
) -> GemmOperands:
    """A kernel's arguments for a [m, k] @ weight [n, k].T; out: [m, n] if the kernel stores its tiles there.

    a and out are contiguous, and so is weight or its transpose. scales: of fp8 operands. in_parts: whether a tile's
    columns are multiplied in parts (`multiply_columns`), and may be other than a power of two.
    """
    (m, k), n = a.shape, weight.shape[0]
    parts = count_column_parts(blocks) if in_parts else 1
    assert in_parts or has_power_of_two_columns(blocks)
    if parts > 1:
        blocks = blocks._replace(n=blocks.n // parts)
    transposed = not weight.is_contiguous()
    b = _stored(weight)
    by_tma = takes_tma(a) and takes_tma(b)
    stores_by_tma = out is not None and by_tma and takes_tma(out)
    exact = torch.get_float32_matmul_precision() == "highest"
    sizes = a.element_size(), 0 if out is None else out.element_size()
    gemm = _describe(m, n, k, blocks, parts, by_tma, transposed, stores_by_tma, exact, *sizes)
    if scales is not None:
        gemm = gemm._replace(
            row_scales=scales.rows,
            row_step=scales.rows.stride(0),
            column_scales=scales.columns,
            column_step=scales.columns.stride(0),
        )
    if by_tma:
        a = describe_matrix(a, (blocks.m, blocks.k))
        b = describe_matrix(b, (blocks.k, blocks.n) if transposed else (blocks.n, blocks.k))
    if out is not None and stores_by_tma:
        out = describe_matrix(out, (blocks.m, blocks.n // gemm.out_parts.value))
    return GemmOperands(gemm, a, b, out)


def specialization_key(
    config: Any, x: Tensor, weight: Tensor, gemm: Gemm, *tensors: Tensor | None
) -> tuple[Hashable, ...]:
    """The key of a compiled kernel: everything that Triton specializes it for (see `stretto.tiles.Launches`).

    tensors: others that the kernel takes as pointers; x and weight are pointers too, where TMA does not take them.
    """
    flags = gemm.by_tma.value, gemm.transposed.value, gemm.stores_by_tma.value, gemm.precision.value
    scales = None
    if gemm.row_scales is not None:
        scales = (*map(kind_of, (gemm.row_scales, gemm.row_step, gemm.column_scales, gemm.column_step)),)
    return config, x.shape, weight.shape, flags, scales, kind_of(x), kind_of(weight), *map(kind_of, tensors)


@lru_cache(maxsize=4096, typed=True)
def fixed(value: bool | int | str) -> tl.constexpr:
    """A compiled-in field of a kernel's argument; cached, since making one takes the host time at each call."""
    return tl.constexpr(value)


@lru_cache(maxsize=4096)
def _describe(
    m: int,
    n: int,
    k: int,
    blocks: Blocks,
    parts: int,
    by_tma: bool,
    transposed: bool,
    stores_by_tma: bool,
    exact: bool,
    element_size: int,
    out_size: int,
) -> Gemm:
    # In parts: the store of a whole wide tile would take shared memory from the loads' stages. Loads of fp8 take as
    # much as those of 16 bits, and a tile of fp32 beside them twice as much as one of 16 bits.
    out_parts = 4 if out_size > 2 * element_size else 2
    return Gemm(
        m,
        n,
        k,
        block_m=tl.constexpr(blocks.m),
        block_n=tl.constexpr(blocks.n),
        block_k=tl.constexpr(blocks.k),
        parts=tl.constexpr(parts),
        group_rows=blocks.group_rows,
        by_tma=tl.constexpr(by_tma),
        transposed=tl.constexpr(transposed),
        stores_by_tma=tl.constexpr(stores_by_tma),
        out_parts=tl.constexpr(out_parts if blocks.n >= 128 else 1),
        precision=tl.constexpr("ieee" if exact else "tf32"),
        grain=tl.constexpr(1 if by_tma else math.gcd(k, n if transposed else k, _TMA_BYTES // element_size)),
        row_scales=None,
        row_step=0,
        column_scales=None,
        column_step=0,
    )


def count_store_parts(blocks: Blocks, loaded_size: int, stored_size: int) -> int:
    """The number of parts in which TMA stores a tile's columns, so that one fits besides the loads; 0: none.

    A part waits until TMA has read the part before it, so one part is the fastest. Sizes are an element's, in bytes.
    Blocks of up to four warps are made for two programs on a multiprocessor.
    """
    held = _SHARED_BYTES if blocks.num_warps > 4 else _SHARED_BYTES // 2
    loads = blocks.num_stages * (blocks.m + blocks.n) * blocks.k * loaded_size
    for parts in (1, 2, 4):  # four: of fp32 sums beside 16-bit operands
        fits = loads + blocks.m * blocks.n * stored_size // parts <= held
        if fits and blocks.n // parts * stored_size >= _TMA_BYTES:
            return parts
    return 0


def fit_stages(blocks: Blocks, loaded_size: int, stored_size: int) -> int:
    """The stages of TMA loads that fit besides a store by pointers, which converts a tile, or half of a large one.

    At most the stages of `blocks`, and at least one. Sizes are an element's, in bytes.
    """
    converted = blocks.m * blocks.n * stored_size
    if converted > _CONVERTED_BYTES.value:  # as `goes_in_halves`
        converted //= 2
    most = (_SHARED_BYTES - converted) // ((blocks.m + blocks.n) * blocks.k * loaded_size)
    return max(1, min(blocks.num_stages, most))


def describe_rows(matrix: Tensor, gemm: Gemm) -> Any:
    """Another A, of the same k, as the kernel takes it; None where it cannot be loaded as the first A is."""
    if not gemm.by_tma.value:
        return matrix
    return describe_matrix(matrix, (gemm.block_m.value, gemm.block_k.value)) if takes_tma(matrix) else None


def describe_matrix(matrix: Tensor, block: tuple[int, int]) -> Any:
    """A TMA descriptor of a matrix that `takes_tma`, in blocks of that shape, without Triton's checks."""
    described: Any = object.__new__(TensorDescriptor)
    described.base, described.shape, described.strides = matrix, matrix.shape, matrix.stride()
    described.block_shape, described.padding, described.round_f32_to_tf32 = _known_block(block), "zero", False
    return described


@lru_cache
def _known_block(block: tuple[int, int]) -> list[int]:
    """The block as Triton's descriptors have it. AssertionError or ValueError for a block that Triton refuses."""
    sizes = list(block)
    return TensorDescriptor(torch.empty(0, dtype=torch.float64), sizes, [16 * block[1], 1], sizes).block_shape


def _stored(weight: Tensor) -> Tensor:
    """The weight as it is stored, row by row: itself, or its transpose."""
    return weight if weight.is_contiguous() else weight.t()


def takes_tma(matrix: Tensor) -> bool:
    """Whether TMA can load this contiguous matrix on its device; interpreted descriptors have the same rules."""
    if matrix.is_cuda and find_capability(matrix.device.index) < (9, 0):
        return False
    row, column = matrix.stride()
    if column != 1 or matrix.numel() == 0:  # another stride is of a dim of size 1
        return False
    return not (matrix.data_ptr() % _TMA_BYTES or row * matrix.element_size() % _TMA_BYTES)


@triton.jit
def order_tiles(index, row_tiles, column_tiles, group_rows):  # type: ignore[no-untyped-def]
    """(row, column) of the index-th tile: down `group_rows` rows of tiles, then the next column, and so on."""
    width = group_rows * column_tiles
    first = index // width * group_rows
    rows = min(row_tiles - first, group_rows)
    within = index % width
    return first + within % rows, within // rows


@triton.jit
def multiply_tile(gemm, a, b, row, column, ready, first=0, last=None):  # type: ignore[no-untyped-def]
    """fp32 [block_m, block_n]: rows from `row` of A times columns from `column` of C; zeros outside.

    ready: the zero that a wait for the rows of A returned, so that every load of A depends on the wait. first, last:
    steps over k, of block_k each, from first to last - 1; last=None: to the end.
    """
    total = tl.zeros((gemm.block_m, gemm.block_n), tl.float32)
    begin = first * gemm.block_k
    end = gemm.k if last is None else min(last * gemm.block_k, gemm.k)
    if gemm.by_tma:
        for start in range(begin, end, gemm.block_k):
            x = a.load([row + ready, start])
            if gemm.transposed:
                total = tl.dot(x, b.load([start, column]), total, input_precision=gemm.precision)
            else:
                total = tl.dot(x, b.load([column, start]).T, total, input_precision=gemm.precision)
    else:
        # 64 bits for where a tile begins, 32 bits for offsets in it: half of the registers for addresses.
        rows = tl.arange(0, gemm.block_m)[:, None]
        columns = tl.arange(0, gemm.block_n)[None, :]
        steps = tl.arange(0, gemm.block_k)
        # Shows Triton that these are multiples of the grain: loads of 4 bytes and more become asynchronous copies.
        k = gemm.k // gemm.grain * gemm.grain
        n = gemm.n // gemm.grain * gemm.grain if gemm.transposed else gemm.n
        left = a + ready + tl.cast(row, tl.int64) * k
        right = b + tl.cast(column, tl.int64) * (1 if gemm.transposed else k)
        for start in range(begin, end, gemm.block_k):
            mask = (rows < gemm.m - row) & (steps[None, :] < k - start)
            x = _load(left + start + (rows * k + steps[None, :]), mask)
            mask = (columns < n - column) & (steps[:, None] < k - start)
            if gemm.transposed:
                at = tl.cast(start, tl.int64) * n
                y = _load(right + at + (steps[:, None] * n + columns), mask)
            else:
                y = _load(right + start + (columns * k + steps[:, None]), mask)
            total = tl.dot(x, y, total, input_precision=gemm.precision)
    return total


@triton.jit
def _load(at, mask):  # type: ignore[no-untyped-def]
    """Load what is inside, and zeros elsewhere; fp8, which has no zero in Triton, by way of int8."""
    dtype: tl.constexpr = at.dtype.element_ty
    if dtype.is_fp8():
        value = tl.load(at.to(tl.pointer_type(tl.int8), bitcast=True), mask=mask, other=0).to(dtype, bitcast=True)
    else:
        value = tl.load(at, mask=mask, other=0)
    return value


@triton.jit
def tile_width(gemm):  # type: ignore[no-untyped-def]
    """A tile's number of columns."""
    return gemm.block_n * gemm.parts


@triton.jit
def multiply_columns(gemm, a, b, row, column):  # type: ignore[no-untyped-def]
    """Multiply a wide tile: a tuple of its parts, as `multiply_tile` returns them. By TMA A is loaded once for all.

    For tiles whose number of columns is not a power of two, which Triton requires of a single tile. By pointers A is
    loaded for each part.
    """
    totals = ()
    if gemm.by_tma:
        for _ in tl.static_range(gemm.parts):
            totals = _append(totals, tl.zeros((gemm.block_m, gemm.block_n), tl.float32))
        for start in range(0, gemm.k, gemm.block_k):
            x = a.load([row, start])
            sums = ()
            for part in tl.static_range(gemm.parts):
                at = column + part * gemm.block_n
                y = b.load([start, at]) if gemm.transposed else b.load([at, start]).T
                sums = _append(sums, tl.dot(x, y, totals[part], input_precision=gemm.precision))
            totals = sums
    else:
        for part in tl.static_range(gemm.parts):
            totals = _append(totals, multiply_tile(gemm, a, b, row, column + part * gemm.block_n, 0))
    return totals


@triton.jit
def _append(parts, part):  # type: ignore[no-untyped-def]
    return parts + (part,)  # noqa: RUF005 - Triton takes no starred ones


@triton.jit
def goes_in_halves(gemm, dtype):  # type: ignore[no-untyped-def]
    """Whether a store by pointers is split into halves, so that its buffer fits besides the loads' stages."""
    return gemm.block_m * gemm.block_n * dtype.primitive_bitwidth > 8 * _CONVERTED_BYTES


@triton.jit
def halve(tile):  # type: ignore[no-untyped-def]
    """Split a tile into its left and right columns."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def unite(left, right):  # type: ignore[no-untyped-def]
    """Join two tiles side by side: the inverse of `halve`."""
    rows: tl.constexpr = left.shape[0]
    columns: tl.constexpr = left.shape[1]
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (rows, 2 * columns))


@triton.jit
def load_bias(bias, column, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the bias of the columns from `column` on: fp32 [1, BLOCK]."""
    columns = column + tl.arange(0, BLOCK)
    return tl.load(bias + columns, mask=columns < n, other=0).to(tl.float32)[None, :]


@triton.jit
def scale_tile(gemm, row_scales, total, row, column, m):  # type: ignore[no-untyped-def]
    """Multiply a tile of an fp8 product by the factors of its rows (of m) and columns; else return it."""
    if row_scales is not None:
        rows = row + tl.arange(0, gemm.block_m)
        columns = column + tl.arange(0, gemm.block_n)
        total *= tl.load(row_scales + rows * gemm.row_step, mask=rows < m, other=0)[:, None]
        total *= tl.load(gemm.column_scales + columns * gemm.column_step, mask=columns < gemm.n, other=0)[None, :]
    return total


@triton.jit
def store_tile(gemm, out, total, row, column, m):  # type: ignore[no-untyped-def]
    """Round a tile and store the part of it that is inside of out [m, n]."""
    if gemm.stores_by_tma:
        if gemm.out_parts == 4:
            left, right = halve(total)
            quarters = halve(left) + halve(right)
            for quarter in tl.static_range(4):
                out.store([row, column + quarter * (gemm.block_n // 4)], quarters[quarter].to(out.dtype))
        elif gemm.out_parts == 2:
            left, right = halve(total)
            out.store([row, column], left.to(out.dtype))
            out.store([row, column + gemm.block_n // 2], right.to(out.dtype))
        else:
            out.store([row, column], total.to(out.dtype))
    else:
        rows = (row + tl.arange(0, gemm.block_m))[:, None]
        columns = (column + tl.arange(0, gemm.block_n))[None, :]
        mask = (rows < m) & (columns < gemm.n)
        tl.store(out + rows.to(tl.int64) * gemm.n + columns, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def locate_owned(rank, world, gemm, rows, index, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(owner, tile, row, column) of the index-th tile of partial sums: tile and place count among the owner's."""
    row_tiles, column_tiles = tl.cdiv(rows, gemm.block_m), tl.cdiv(gemm.n, gemm.block_n)
    owner = index // (row_tiles * column_tiles)
    if SHIFTED:
        owner = (rank + 1 + owner) % world
    tile = index % (row_tiles * column_tiles)
    row_tile, column_tile = order_tiles(tile, row_tiles, column_tiles, gemm.group_rows)
    return owner, tile, row_tile * gemm.block_m, column_tile * gemm.block_n


@triton.jit
def find_rows(gemm, staging, slot, within):  # type: ignore[no-untyped-def]
    """The address of row `within` of a staged tile, slot [block_m, block_n]."""
    return staging + (tl.cast(slot, tl.int64) * gemm.block_m + within) * gemm.block_n


@triton.jit
def load_rows(gemm, staging, slot, within, offsets):  # type: ignore[no-untyped-def]
    """Load rows of a staged tile from row `within` on, as fp32."""
    return tl.load(find_rows(gemm, staging, slot, within) + offsets).to(tl.float32)


@triton.jit
def store_rows(gemm, out, bias, total, row, column, rows):  # type: ignore[no-untyped-def]
    """Add the bias to sums of a tile's rows, and store those inside of out [rows, n]."""
    if bias is not None:
        total += load_bias(bias, column, gemm.n, gemm.block_n)
    rows_at = (row + tl.arange(0, total.shape[0]))[:, None]
    columns = (column + tl.arange(0, gemm.block_n))[None, :]
    mask = (rows_at < rows) & (columns < gemm.n)
    tl.store(out + rows_at.to(tl.int64) * gemm.n + columns, total.to(out.dtype.element_ty), mask=mask)
