# SPDX-License-Identifier: Apache-2.0
"""The GEMM that all overlapped operators share: operands, one tile's product and store, and stream-K.

C = A @ B.T with A [m, k] in rows of k elements, and B [n, k] (a linear's weight), or the transpose of a [k, n] that
lies in rows (`transposed`: the input's gradient multiplies by the weight itself). Sums are fp32. Operands are loaded by
TMA where their layout allows, else by pointers. fp8 operands have factors for rows and columns (`scale_tile`).

Stream-K: a last wave of tiles that would leave most programs idle is split by steps over k into work units, and their
partial sums are added up by a fix-up. A work unit is a whole tile, or some of a tile's steps (`split_last_wave`).

Nothing here waits or signals: operators do, around these functions.
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

from stretto.memory.gpus import find_capability
from stretto.tiles import kind_of

TMA_BYTES = 16  # TMA takes bases and strides that are multiples of this
SHARED_BYTES = 224 << 10  # of a multiprocessor of sm_90, less what barriers take
_FIX_UP_STEPS = 20  # over k that a program could multiply in the time of a fix-up
_MAX_SPLITS = 4  # work units of one tile
_MIN_SAVED = 0.05  # of all waves: idle programs leave their power to the others, which then are faster


class Blocks(NamedTuple):
    """Tile sizes, and how a kernel with such tiles is launched.

    group_rows: rows of tiles that are processed together (Triton's GROUP_SIZE_M), so that the operands they share stay
    in the L2 cache. programs: programs of the persistent kernel.
    """

    m: int
    n: int
    k: int
    group_rows: int
    num_warps: int
    num_stages: int
    programs: int


def has_power_of_two_columns(blocks: Blocks) -> bool:
    """True if a tile's columns are a power of two, as Triton's own tiles are."""
    return not blocks.n & (blocks.n - 1)


def count_column_parts(blocks: Blocks) -> int:
    """Count the parts in which a tile's columns are multiplied: each of a power of two, up to 64 or 128."""
    return blocks.n // min(blocks.n & -blocks.n, 64 if blocks.m <= 64 else 128)


def divide_up(number: int, by: int) -> int:
    """number / by, rounded up. `triton.cdiv` is made for kernels, and takes the host microseconds."""
    return -(-number // by)


class Scales(NamedTuple):
    """fp32 factors of an fp8 product: of A's rows [m], and of the weight's [n], which are C's columns.

    Of any stride, so one factor of all rows is an expanded tensor.
    """

    rows: Tensor
    columns: Tensor


class GroupProduct(NamedTuple):
    """The product that a launch computes, and its place: out = x @ weight.T, times scales, + bias, of a group's ranks.

    x: own rows of it for a gather, else all of them. out: this rank's part of the result. scales: of fp8 operands.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    out: Tensor
    group: str
    scales: Scales | None = None


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
    row_scales: Any = None
    row_step: Any = 0
    column_scales: Any = None
    column_step: Any = 0


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
    b = weight.t() if transposed else weight  # as it is stored, row by row
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
        grain=tl.constexpr(1 if by_tma else math.gcd(k, n if transposed else k, TMA_BYTES // element_size)),
    )


def describe_matrix(
    matrix: Tensor, block: tuple[int, ...], shape: tuple[int, ...] | None = None, strides: tuple[int, ...] | None = None
) -> Any:
    """A TMA descriptor of a tensor in blocks of that shape, without Triton's checks: of a matrix that `takes_tma`.

    shape, strides: other ones than the tensor's, in elements.
    """
    described: Any = object.__new__(TensorDescriptor)
    described.base = matrix
    described.shape, described.strides = shape or matrix.shape, strides or matrix.stride()
    described.block_shape, described.padding, described.round_f32_to_tf32 = _known_block(block), "zero", False
    return described


@lru_cache
def _known_block(block: tuple[int, ...]) -> list[int]:
    """The block as Triton's descriptors have it. AssertionError or ValueError for a block that Triton refuses."""
    sizes = list(block)
    strides = [16 * block[-1]] * (len(block) - 1) + [1]
    return TensorDescriptor(torch.empty(0, dtype=torch.float64, device="cpu"), sizes, strides, sizes).block_shape


def takes_tma(matrix: Tensor) -> bool:
    """True if TMA can load this contiguous matrix on its device; interpreted descriptors have the same rules."""
    if matrix.is_cuda and find_capability(matrix.device.index) < (9, 0):
        return False
    row, column = matrix.stride()
    if column != 1 or matrix.numel() == 0:  # another stride is of a dim of size 1
        return False
    return not (matrix.data_ptr() % TMA_BYTES or row * matrix.element_size() % TMA_BYTES)


def align(operand: Tensor) -> Tensor:
    """The operand, in memory that TMA and loads of packets take: a copy of a view that begins elsewhere."""
    return operand.clone() if operand.data_ptr() % TMA_BYTES else operand


def count_store_parts(blocks: Blocks, loaded_size: int, stored_size: int) -> int:
    """The number of parts in which TMA stores a tile's columns, so that one fits besides the loads; 0: none.

    A part waits until TMA has read the part before it, so one part is the fastest. Sizes are an element's, in bytes.
    Blocks of up to four warps are made for two programs on a multiprocessor.
    """
    held = SHARED_BYTES if blocks.num_warps > 4 else SHARED_BYTES // 2
    loads = blocks.num_stages * (blocks.m + blocks.n) * blocks.k * loaded_size
    for parts in (1, 2, 4):  # four: of fp32 sums beside 16-bit operands
        fits = loads + blocks.m * blocks.n * stored_size // parts <= held
        if fits and blocks.n // parts * stored_size >= TMA_BYTES:
            return parts
    return 0


class StreamK(NamedTuple):
    """Split of tiles into work units: the first `whole_tiles` are a unit each, the others `unit_steps` steps each.

    Steps over k are counted through all tiles, `tile_steps` a tile, the last ones of which may be none. partials,
    arrivals: buffers of the fix-up (see `fix_up`); partials is None where no fix-up is needed, and so is unit_steps
    where all tiles are whole (`DATA_PARALLEL`).
    """

    whole_tiles: Any
    tile_steps: Any
    unit_steps: Any
    partials: Any
    arrivals: Any


DATA_PARALLEL = StreamK(0, 0, None, None, None)
"""Every tile is one work unit."""


def count_splits(count: int, k: int, blocks: Blocks) -> int:
    """The best number of work units for each tile of the last wave of `count` tiles; 1: tiles are not split."""
    splits = min(range(1, _MAX_SPLITS + 1), key=lambda splits: _count_last(count, k, blocks, splits))
    saved = _count_last(count, k, blocks, 1) - _count_last(count, k, blocks, splits)
    return splits if saved > _MIN_SAVED * divide_up(count, blocks.programs) else 1


@lru_cache(maxsize=4096)
def count_waves(count: int, k: int, blocks: Blocks) -> float:
    """Return how long `count` tiles take, in waves of whole tiles."""
    return count // blocks.programs + _count_last(count, k, blocks, count_splits(count, k, blocks))


def _count_last(count: int, k: int, blocks: Blocks, splits: int) -> float:
    steps, waves = divide_up(k, blocks.k), divide_up(count % blocks.programs * splits, blocks.programs)
    return waves * divide_up(steps, splits) / steps + (_FIX_UP_STEPS / steps if splits > 1 else 0)


@lru_cache(maxsize=4096)
def split_last_wave(count: int, k: int, blocks: Blocks, kept: int = 0) -> tuple[StreamK, int]:
    """(how `count` tiles are split, the number of work units); the first `kept` tiles stay whole.

    All units of a wave begin at one of few steps, so that the operands that tiles share are loaded at one time. Units
    that follow each other without gaps, as in the paper, were slower than whole tiles, since each loaded its columns of
    B by itself.
    """
    splits, rest = count_splits(count, k, blocks), count % blocks.programs
    if splits == 1 or not has_power_of_two_columns(blocks) or count - rest < kept:
        return DATA_PARALLEL, count
    unit_steps = divide_up(divide_up(k, blocks.k), splits)
    return StreamK(count - rest, splits * unit_steps, unit_steps, None, None), count - rest + rest * splits


def make_stream_k(count: int, k: int, blocks: Blocks, arrivals: Tensor, kept: int = 0) -> tuple[StreamK, int]:
    """`split_last_wave`, with the buffers of its fix-up; arrivals: int32 zeros on the operands' device."""
    stream_k, units = split_last_wave(count, k, blocks, kept)
    if stream_k is DATA_PARALLEL or units - stream_k.whole_tiles > arrivals.numel():
        return DATA_PARALLEL, count
    places = units - stream_k.whole_tiles + count - stream_k.whole_tiles
    partials = torch.empty(places * blocks.m * blocks.n, dtype=torch.float32, device=arrivals.device)
    return stream_k._replace(partials=partials, arrivals=arrivals), units


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
def finish_tile(gemm, row_scales, bias, out, total, row, low, high, column):  # type: ignore[no-untyped-def]
    """Scale a tile by factors of rows from `row` on, add the bias, and store its rows before `high`, from `low` on."""
    total = scale_tile(gemm, row_scales, total, row, column, row + high - low)
    if bias is not None:
        total += load_bias(bias, column, gemm.n, gemm.block_n)
    store_tile(gemm, out, total, low, column, high)


@triton.jit
def count_steps(gemm, stream_k):  # type: ignore[no-untyped-def]
    """Steps over k that a tile is counted as."""
    return tl.cdiv(gemm.k, gemm.block_k) if stream_k.unit_steps is None else stream_k.tile_steps


@triton.jit
def count_units(stream_k, count):  # type: ignore[no-untyped-def]
    if stream_k.unit_steps is None:
        units = count
    else:
        splits = stream_k.tile_steps // stream_k.unit_steps
        units = stream_k.whole_tiles + (count - stream_k.whole_tiles) * splits
    return units


@triton.jit
def find_unit(gemm, stream_k, index, count):  # type: ignore[no-untyped-def]
    """(begin, end) of the index-th work unit, in steps over k of `count` tiles; empty behind the last one."""
    steps = count_steps(gemm, stream_k)
    begin = index * steps
    end = begin + steps
    if stream_k.unit_steps is not None:
        behind = index - stream_k.whole_tiles
        begin = tl.where(behind < 0, begin, stream_k.whole_tiles * steps + behind * stream_k.unit_steps)
        end = begin + tl.where(behind < 0, steps, stream_k.unit_steps)
    return begin, tl.minimum(end, count * steps)


@triton.jit
def multiply_unit(gemm, stream_k, a, b, row, column, ready, begin, end):  # type: ignore[no-untyped-def]
    """Multiply the steps from `begin` to `end` that belong to begin's tile; no program waits for another.

    Returns (the tile, as `multiply_tile` has it; whether this program finishes the tile; where its next tile begins).
    Of the programs that share a tile, the one that arrives last adds up the partial sums and finishes it.
    """
    steps = count_steps(gemm, stream_k)
    if stream_k.partials is None:
        total = multiply_tile(gemm, a, b, row, column, ready)
        is_mine = True
        begin += steps
    else:
        tile = begin // steps
        first = begin - tile * steps
        last = tl.minimum(first + end - begin, steps)
        total = multiply_tile(gemm, a, b, row, column, ready, first, last)
        is_mine = last - first == steps
        if not is_mine:
            rest = tile - stream_k.whole_tiles
            low = rest * steps // stream_k.unit_steps
            high = ((rest + 1) * steps - 1) // stream_k.unit_steps
            own = (begin - stream_k.whole_tiles * steps) // stream_k.unit_steps
            # A unit and the next one have at most one tile in common: the two numbers add up to a unique place.
            total, is_mine = fix_up(
                gemm, stream_k.partials, stream_k.arrivals + low, total, rest + low, rest + own, rest + high
            )
        begin += last - first
    return total, is_mine, begin


@triton.jit
def fix_up(gemm, partials, arrivals, total, first, own, last):  # type: ignore[no-untyped-def]
    """Add up the partial sums of a tile: (the sum, True) for the program that arrives last, (any, False) for others.

    partials: fp32 [places, block_m, block_n]. This program's partial sum goes to place `own`, and those from `first` to
    `last` are added in that order, so that the result does not depend on which program arrives last. arrivals: a
    counter, 0 before and after.
    """
    _store_sum(gemm, partials, total, own)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == last - first
    if is_last:
        total = _add_sums(gemm, partials, first, last)
        tl.store(arrivals, 0)
    return total, is_last


@triton.jit
def _store_sum(gemm, partials, total, place):  # type: ignore[no-untyped-def]
    # In quarters, as in `_add_sums`: a whole wide tile would take its size again of registers.
    if gemm.block_n >= 128:
        left, right = halve(total)
        quarters = halve(left) + halve(right)
        for quarter in tl.static_range(4):
            tl.store(partials + _find_slice(gemm, place, quarter, 4), quarters[quarter])
    else:
        tl.store(partials + _find_slice(gemm, place, 0, 1), total)


@triton.jit
def _add_sums(gemm, partials, first, last):  # type: ignore[no-untyped-def]
    if gemm.block_n >= 128:
        left = unite(_add_slice(gemm, partials, first, last, 0, 4), _add_slice(gemm, partials, first, last, 1, 4))
        right = unite(_add_slice(gemm, partials, first, last, 2, 4), _add_slice(gemm, partials, first, last, 3, 4))
        total = unite(left, right)
    else:
        total = _add_slice(gemm, partials, first, last, 0, 1)
    return total


@triton.jit
def _add_slice(gemm, partials, first, last, index: tl.constexpr, slices: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((gemm.block_m, gemm.block_n // slices), tl.float32)
    for place in range(first, last + 1):
        total += tl.load(partials + _find_slice(gemm, place, index, slices))
    return total


@triton.jit
def _find_slice(gemm, place, index: tl.constexpr, slices: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of the index-th of `slices` groups of columns of a place: one slice after another."""
    columns: tl.constexpr = gemm.block_n // slices
    start = (tl.cast(place, tl.int64) * slices + index) * (gemm.block_m * columns)
    return start + tl.arange(0, gemm.block_m)[:, None] * columns + tl.arange(0, columns)[None, :]
