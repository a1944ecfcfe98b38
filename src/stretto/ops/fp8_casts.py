# SPDX-License-Identifier: Apache-2.0
"""Casts to fp8 for training, with dynamic scales: the largest magnitudes of a matrix, and its numbers as fp8.

Tensor cores take fp8 operands that are contiguous along the dim over which a product sums. A matrix that enters two
products by different dims (a weight, forward and backward) is therefore written by rows and, transposed, by columns;
on a GPU one kernel writes both. Micikevicius et al., FP8 Formats for Deep Learning (2022): e4m3 for activations and
weights, e5m2, which has a wider range, for gradients.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from stretto.ops.gemm import Scales
from stretto.ops.operator import define_operator
from stretto.ops.scaled import multiply_scaled
from stretto.tiles.launches import launch_cached

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRAIN = 16  # numbers: torch's fp8 products take multiples of it
_MANTISSA = (1 << 23) - 1
_GRAIN, _TINY = tl.constexpr(GRAIN), tl.constexpr(torch.finfo(torch.float32).tiny)
_BLOCK_M, _BLOCK_N = 64, 128
_BLOCK_SCALES = 1024


class ScaledMatrix(NamedTuple):
    """fp8 numbers [m, k], contiguous, of which each row is to be multiplied by its factor: fp32 [m, 1], or [1, 1]."""

    data: Tensor
    scale: Tensor


def find_scale(largest: Tensor, dtype: torch.dtype, *, is_power_of_two: bool) -> Tensor:
    """The fp32 factors by which fp8 numbers of `dtype` reach these largest magnitudes.

    is_power_of_two: rounded up to one. A number that is scaled anew by another power of two then keeps its bits, but
    where it falls below fp8's smallest (torchao's rowwise recipe rounds alike).
    """
    if _suits_kernel(largest):  # in place of seven launches for each operand, which the host takes 50 us for
        largest = largest.float().contiguous()
        found, count = torch.empty_like(largest), largest.numel()
        sizes = {"REST": 1 / torch.finfo(dtype).max, "BLOCK": _BLOCK_SCALES}
        with torch.cuda.device_of(largest):
            programs = triton.cdiv(count, _BLOCK_SCALES)
            launch_cached(find_scales, programs, largest, found, count, IS_POWER=is_power_of_two, **sizes)
        return found
    # Not divided: a GPU multiplies by a number's reciprocal, and all devices shall give the same bits.
    scale = (largest.float() * (1 / torch.finfo(dtype).max)).clamp(min=torch.finfo(torch.float32).tiny)
    if not is_power_of_two:
        return scale
    up = ((scale.view(torch.int32) + _MANTISSA) & ~_MANTISSA).view(torch.float32)
    return torch.where(scale.isfinite(), up, scale)


def find_largest(x: Tensor, dims: tuple[int, ...], scale: Tensor | None = None) -> Tensor:
    """The largest magnitudes over `dims` of x [..., m, n] (times scale, if x is fp8), fp32, dims of size 1 kept.

    dims: any of the last two. A NaN is the largest.
    """
    dims = tuple(dim % x.dim() for dim in dims)
    if not _suits_kernel(x):
        x = x if scale is None else x.float() * scale
        return torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True).float()
    bits = torch.zeros(
        [1 if dim in dims else size for dim, size in enumerate(x.shape)], dtype=torch.int32, device=x.device
    )
    _measure(x, scale, bits, None)
    return bits.view(torch.float32)


def _measure(x: Tensor, scale: Tensor | None, largest: Tensor, by_columns: Tensor | None) -> None:
    x, scale = x.contiguous(), None if scale is None else scale.contiguous()
    with torch.cuda.device_of(x):
        programs, sizes = _programs(x)
        launch_cached(
            measure_tiles, programs, x, scale, largest, by_columns, *sizes, SCALE=_kind(scale), KIND=_kind(largest),
            BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N,
        )  # fmt: skip


def cast_scaled(
    x: Tensor,
    by_rows: Tensor | None,
    by_columns: Tensor | None,
    dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """x [..., m, n], divided by factors and saturated, as fp8 [..., m, n], and transposed [..., n, m]; None for each
    without factors.

    by_rows, by_columns: fp32, of as many dims as x, each of x's size or 1. m of the transposed is padded with zeros to
    a multiple of 16, since products sum over it. scale: x's own factors, if x is fp8. out: where to write the first.
    """
    if not _suits_kernel(x):
        wide = x.float() if scale is None else x.float() * scale
        data = None if by_rows is None else _saturate(wide * by_rows.reciprocal(), dtype)
        if data is not None and out is not None:
            data = out.copy_(data)
        if by_columns is None:
            return data, None
        turned = _saturate(wide * by_columns.reciprocal(), dtype).transpose(-1, -2)
        return data, F.pad(turned.view(torch.uint8), (0, -x.shape[-2] % GRAIN)).contiguous().view(dtype)
    scale, by_rows, by_columns = (None if each is None else each.contiguous() for each in (scale, by_rows, by_columns))
    return _cast(x.contiguous(), scale, by_rows, by_columns, dtype, out)


def _cast(
    x: Tensor,
    scale: Tensor | None,
    by_rows: Tensor | None,
    by_columns: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None,
    found: Sequence[Tensor] = (),
) -> tuple[Tensor | None, Tensor | None]:
    """`cast_scaled` by a kernel. found: where it writes the factors (of all, or of rows and of columns), if these are
    magnitudes."""
    first: Tensor | None = out
    second: Tensor | None = None
    if by_rows is not None and out is None:
        first = torch.empty(x.shape, dtype=dtype, device=x.device)
    if by_columns is not None:
        padded = -(-x.shape[-2] // GRAIN) * GRAIN
        second = torch.empty(*x.shape[:-2], x.shape[-1], padded, dtype=dtype, device=x.device)
    factors = (by_columns if by_rows is None else by_rows, by_rows if by_columns is None else by_columns)
    scales = (found[0], found[-1]) if found else factors
    with torch.cuda.device_of(x):
        programs, sizes = _programs(x)
        launch_cached(
            cast_tiles, programs, x, scale, first, second, factors, scales, *sizes,
            KINDS=_kind(scale) + 4 * _kind(by_rows) + 16 * _kind(by_columns) + 64 * len(found),
            LARGEST=torch.finfo(dtype).max, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N,
        )  # fmt: skip
    return first, second


def cast_both(x: Tensor, dtype: torch.dtype, *, has_one_scale: bool) -> tuple[ScaledMatrix, ScaledMatrix]:
    """x [m, n] as fp8 rows [m, n] and columns [n, m], m padded as in `cast_scaled`: by one scale, or by powers of two
    for each row of each. Kernels read x twice: to measure it for both, and to write both."""
    dims = ((-2, -1),) if has_one_scale else ((-1,), (-2,))
    if not _suits_kernel(x):
        found = [find_scale(find_largest(x, each), dtype, is_power_of_two=not has_one_scale) for each in dims]
        rows, columns = cast_scaled(x, found[0], found[-1], dtype)
    else:
        x, (m, n) = x.contiguous(), x.shape
        bits = torch.zeros(1 if has_one_scale else m + n, dtype=torch.int32, device=x.device)
        largest = [bits.view(1, 1)] if has_one_scale else [bits[:m, None], bits[None, m:]]
        _measure(x, None, largest[0], None if has_one_scale else largest[1])
        found = [torch.empty(each.shape, dtype=torch.float32, device=x.device) for each in largest]
        rows, columns = _cast(x, None, largest[0], largest[-1], dtype, None, found)
    return ScaledMatrix(cast(Tensor, rows), found[0]), ScaledMatrix(cast(Tensor, columns), found[-1].view(-1, 1))


def place_groups(offsets: Tensor) -> Tensor:
    """The begins of groups of rows that are made columns, each from a multiple of 64 on, and at least 64: [groups + 1].

    offsets: int32 [groups + 1], of the rows. Sums over columns of fp8 are of multiples of 16, and so not empty either.
    """
    blocks = (offsets.diff() + (_BLOCK_M - 1)) // _BLOCK_M
    return F.pad(blocks.clamp(min=1).cumsum(0) * _BLOCK_M, (1, 0)).int()


def cast_groups(x: Tensor, offsets: Tensor, places: Tensor) -> ScaledMatrix:
    """Rows x [m, n] transposed, in e4m3 [n, ...] from `places` on, by kernels; and a power of two for each group's own
    n columns, [groups * n]. Zeros follow a group's rows, and anything those of the last."""
    x, (m, n), groups = x.contiguous(), x.shape, offsets.shape[0] - 1
    blocks = m // _BLOCK_M + groups  # at most
    data = torch.empty(n, blocks * _BLOCK_M, dtype=E4M3, device=x.device)
    bits = torch.zeros(groups * n, dtype=torch.int32, device=x.device)
    sizes = {"GROUPS": triton.next_power_of_2(groups), "BLOCK_M": _BLOCK_M, "BLOCK_N": _BLOCK_N}
    programs = blocks * triton.cdiv(n, _BLOCK_N)
    with torch.cuda.device_of(x):
        launch_cached(measure_groups, programs, x, offsets, places, bits, n, groups, **sizes)
        scale = find_scale(bits.view(torch.float32), E4M3, is_power_of_two=True)
        launch_cached(
            cast_group_tiles, programs, x, offsets, places, scale, data, n, groups, data.shape[1],
            LARGEST=torch.finfo(E4M3).max, **sizes,
        )  # fmt: skip
    return ScaledMatrix(data, scale)


def multiply(
    a: ScaledMatrix, b: ScaledMatrix, dtype: torch.dtype, *, bias: Tensor | None = None, is_fast: bool = True
) -> Tensor:
    """a [m, k] @ b [n, k].T in `dtype`, by `torch.nn.functional.scaled_mm` on GPUs that have fp8, else in fp32.

    is_fast: sum with the tensor cores' 14 bits or so alone, as torchao does in the forward pass.
    """
    return _multiply(a.data, b.data, a.scale, b.scale, bias, dtype, is_fast)


def _run(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, dtype: torch.dtype, is_fast: bool
) -> Tensor:
    scales = Scales(a_scale.reshape(-1).expand(a.shape[0]), b_scale.reshape(-1).expand(b.shape[0]))
    return multiply_scaled(a, b, scales, dtype, bias, is_fast=is_fast)


_multiply = define_operator(
    "multiply_fp8",
    _run,
    fake=lambda a, b, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype),
    count_flops=lambda a, b: 2 * a[0] * prod(b),
)


def _suits_kernel(x: Tensor) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling() and x.numel() > 0


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def _programs(x: Tensor) -> tuple[int, tuple[int, int]]:
    """The number of programs, of which each has a tile of x [..., m, n], and (m, n)."""
    m, n = x.shape[-2:]
    return x.numel() // (m * n) * triton.cdiv(m, _BLOCK_M) * triton.cdiv(n, _BLOCK_N), (m, n)


def _kind(factors: Tensor | None) -> int:
    """The way in which kernels find a tile's factors, which are contiguous (`_load_factors`)."""
    if factors is None or factors.numel() == 1:
        return 0
    return 2 if factors.shape[-2] > 1 else 3 if factors.shape[-1] > 1 else 1


@triton.jit
def _load_tile(x, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's tile, in fp32, with its matrix's number, its rows and its columns."""
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    batch, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row = (tile // tl.cdiv(n, BLOCK_N)).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tile % tl.cdiv(n, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    there = (row < m) & (column < n)
    at = (batch * m + row) * n + column
    if x.dtype.element_ty.is_fp8():  # which has no zero in Triton
        bits = tl.load(x.to(tl.pointer_type(tl.int8), bitcast=True) + at, mask=there, other=0)
        value = bits.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    return value, batch, row, column


@triton.jit
def _load_factors(factors, batch, row, column, m, n, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's factors: one of all matrices (KIND 0) or of its own (1), [rows, 1] (2) or [1, columns] (3)."""
    if KIND == 0:
        found = tl.load(factors)
    elif KIND == 1:
        found = tl.load(factors + batch)
    elif KIND == 2:
        found = tl.load(factors + batch * m + row, mask=row < m, other=1)
    else:
        found = tl.load(factors + batch * n + column, mask=column < n, other=1)
    return found


@triton.jit
def _store_factors(factors, value, row, column, m, n, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The reverse of `_load_factors` for one matrix."""
    if KIND == 0:
        tl.store(factors, value)
    elif KIND == 2:
        tl.store(factors + row, value, mask=row < m)
    else:
        tl.store(factors + column, value, mask=column < n)


@triton.jit
def measure_tiles(  # type: ignore[no-untyped-def]
    x, scale, largest, by_columns, m, n,
    SCALE: tl.constexpr, KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """largest = max(largest, |x * scale|), for factors of a KIND (`_load_factors`); SCALE: that of `scale`.

    by_columns: None, or the same of KIND 3. Bytes: x is read once. Magnitudes are compared as integers, in whose order
    NaN is above infinity.
    Synchronization: programs update magnitudes, zeros before, by atomic maxima, of which the order does not matter.
    """
    value, batch, row, column = _load_tile(x, m, n, BLOCK_M, BLOCK_N)
    if scale is not None:
        value *= _load_factors(scale, batch, row, column, m, n, SCALE)
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    if KIND == 2:
        tl.atomic_max(largest + batch * m + row, tl.max(bits, 1)[:, None], mask=row < m, sem="relaxed")
    elif KIND == 3:
        tl.atomic_max(largest + batch * n + column, tl.max(bits, 0)[None, :], mask=column < n, sem="relaxed")
    else:
        tl.atomic_max(largest + batch * KIND, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    if by_columns is not None:
        tl.atomic_max(by_columns + batch * n + column, tl.max(bits, 0)[None, :], mask=column < n, sem="relaxed")


@triton.jit
def find_scales(  # type: ignore[no-untyped-def]
    largest, scale, count, IS_POWER: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr
):
    """scale [count] of these largest magnitudes, as `find_scale` has it. Synchronization: none: numbers are a program's
    own."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(largest + at, mask=at < count, other=1.0)
    tl.store(scale + at, _to_scale(value, IS_POWER, REST), mask=at < count)


@triton.jit
def _to_scale(largest, IS_POWER: tl.constexpr, REST: tl.constexpr):  # type: ignore[no-untyped-def]
    value = largest * REST
    value = tl.where(value < _TINY, _TINY, value)  # NaN stays NaN
    if IS_POWER:
        bits = value.to(tl.int32, bitcast=True)
        up = (bits + 0x7FFFFF) & -0x800000
        value = tl.where((bits & 0x7F800000) == 0x7F800000, bits, up).to(tl.float32, bitcast=True)
    return value


@triton.jit
def cast_tiles(  # type: ignore[no-untyped-def]
    x, scale, by_rows, by_columns, factors, scales, m, n,
    KINDS: tl.constexpr, LARGEST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """by_rows [batch, m, n] = x * scale / factors[0], by_columns [batch, n, m] = (x * scale / factors[1]).T.

    m of by_columns is padded to a multiple of 16, with zeros. KINDS: of scale, + 4 x the first factors', + 16 x the
    second's, + 64 if factors are magnitudes, as integers, of which the one factor goes to `scales`, + 128 if powers of
    two do. Bytes: x is read once.
    Synchronization: none: programs own their tiles; those that have a factor in common write the same number.
    """
    value, batch, row, column = _load_tile(x, m, n, BLOCK_M, BLOCK_N)
    if scale is not None:
        value *= _load_factors(scale, batch, row, column, m, n, KINDS % 4)
    if by_rows is not None:
        factor = _load_factors(factors[0], batch, row, column, m, n, KINDS // 4 % 4)
        if KINDS >= 64:
            factor = _to_scale(factor.to(tl.float32, bitcast=True), KINDS // 128, 1.0 / LARGEST)
            _store_factors(scales[0], factor, row, column, m, n, KINDS // 4 % 4)
        found = _saturate_tile(value * tl.div_rn(1.0, factor), LARGEST).to(by_rows.dtype.element_ty)
        tl.store(by_rows + (batch * m + row) * n + column, found, mask=(row < m) & (column < n))
    if by_columns is not None:
        padded = tl.cdiv(m, _GRAIN) * _GRAIN
        factor = _load_factors(factors[1], batch, row, column, m, n, KINDS // 16 % 4)
        if KINDS >= 64:
            factor = _to_scale(factor.to(tl.float32, bitcast=True), KINDS // 128, 1.0 / LARGEST)
            _store_factors(scales[1], factor, row, column, m, n, KINDS // 16 % 4)
        found = _saturate_tile(value * tl.div_rn(1.0, factor), LARGEST).to(by_columns.dtype.element_ty)
        at = (batch * n + tl.trans(column)) * padded + tl.trans(row)
        tl.store(by_columns + at, tl.trans(found), mask=(tl.trans(row) < padded) & (tl.trans(column) < n))


@triton.jit
def _load_group_tile(  # type: ignore[no-untyped-def]
    x, offsets, places, n, groups, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """This program's tile of x [m, n], in fp32: of one group's rows alone, or of none from the last place on; its
    group, its first row's place, and its columns."""
    tiles = tl.cdiv(n, BLOCK_N)
    first = tl.program_id(0) // tiles * BLOCK_M
    column = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    index = tl.arange(0, GROUPS)
    ends = tl.load(places + 1 + index, mask=index < groups, other=2147483647)
    group = tl.sum((ends <= first).to(tl.int32), 0)
    is_there = group < groups
    begin = tl.load(offsets + group, mask=is_there, other=0)
    end = tl.load(offsets + group + 1, mask=is_there, other=0)
    row = begin + first - tl.load(places + group, mask=is_there, other=0) + tl.arange(0, BLOCK_M)[:, None]
    value = tl.load(x + row.to(tl.int64) * n + column, mask=(row < end) & (column < n), other=0.0).to(tl.float32)
    return value, group, first, column


@triton.jit
def measure_groups(  # type: ignore[no-untyped-def]
    x, offsets, places, largest, n, groups, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """largest [groups, n] = the largest magnitudes of each group's columns of x, as integers (`measure_tiles`).

    Synchronization: programs update `largest`, zeros before, by atomic maxima, of which the order does not matter.
    """
    value, group, _, column = _load_group_tile(x, offsets, places, n, groups, GROUPS, BLOCK_M, BLOCK_N)
    bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 0)[None, :]
    at = group.to(tl.int64) * n + column
    tl.atomic_max(largest + at, bits, mask=(column < n) & (group < groups), sem="relaxed")


@triton.jit
def cast_group_tiles(  # type: ignore[no-untyped-def]
    x, offsets, places, factors, out, n, groups, room,
    LARGEST: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [n, room] = (x / factors [groups, n]).T, each group's rows from its place on. Synchronization: none: programs
    own their tiles."""
    value, group, first, column = _load_group_tile(x, offsets, places, n, groups, GROUPS, BLOCK_M, BLOCK_N)
    is_there = (column < n) & (group < groups)
    factor = tl.load(factors + group.to(tl.int64) * n + column, mask=is_there, other=1.0)
    found = _saturate_tile(value * tl.div_rn(1.0, factor), LARGEST).to(out.dtype.element_ty)
    at = tl.trans(column).to(tl.int64) * room + first + tl.arange(0, BLOCK_M)[None, :]
    tl.store(out + at, tl.trans(found), mask=tl.trans(is_there))


@triton.jit
def _saturate_tile(value, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """At most LARGEST in magnitude. NaN stays NaN, which a maximum would not return."""
    value = tl.where(value > LARGEST, LARGEST, value)
    return tl.where(value < -LARGEST, -LARGEST, value)
