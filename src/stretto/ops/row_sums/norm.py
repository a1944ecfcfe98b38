# SPDX-License-Identifier: Apache-2.0
"""Residual and norm of rows, in the kernels of an all-reduce, and by torch.

A row's numbers are rounded where separate operators would round them: the sum with its bias, the residual after it, and
the norm of the rounded residual. So a fused call gives the bits of the separate calls.

An invariant norm adds up squares exactly, as 64-bit integers relative to the row's largest number: every order of the
additions, hence every kernel, tile and device, gives the same bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.gemm import divide_up, fixed
from stretto.ops.operands import DTYPES, describe_tensor, require_like, show_shape, takes_tensors
from stretto.ops.operator import Autograd, define_operator
from stretto.suggestions import require_one_of
from stretto.tiles import INTERPRETED, kind_of
from stretto.tiles.launches import find_launches

NORMS = ("rms", "layer")
MAX_COLUMNS = 16384  # a program keeps whole rows in registers
_POINT = 40  # binary digits after the point of an exact sum
_POINT_SCALE = tl.constexpr(float(1 << _POINT))


class Norm(NamedTuple):
    """A norm: its kind ("rms" or "layer"), eps, the number added to the weight, and whether its sums are exact."""

    kind: str
    eps: float
    offset: float = 0.0
    is_exact: bool = False


class NormForm(NamedTuple):
    """A norm and its tile as kernels take them, compiled in. rows, block: of a tile. parts: of the total (`add_norm`).

    Constants: as arguments, fp64 would get them rounded to fp32.
    """

    kind: Any
    eps: Any
    offset: Any
    is_exact: Any
    rows: Any
    block: Any
    parts: Any


class NormRows(NamedTuple):
    """The tensors of a norm as kernels take them: what is added, weights, and where results go."""

    bias: Any
    residual: Any
    weight: Any
    norm_bias: Any
    normed: Any
    added: Any


class NormOperands(NamedTuple):
    """What a norm reads beside the sum: bias [n] of the sum, residual [m, n], the norm's weight [n] and bias [n]."""

    bias: Tensor | None
    residual: Tensor
    weight: Tensor
    norm_bias: Tensor | None


@takes_tensors
def invariant_norm(
    x: Tensor, weight: Tensor, *, eps: float, norm: str = "rms", bias: Tensor | None = None, offset: float = 0.0
) -> Tensor:
    """The norm of rows [..., n] with the bits of `all_reduce_norm` with invariant=True; rounded once, to x's dtype.

    norm: "rms" or "layer". weight, bias: [n] of any floating-point dtype. Differentiable. ValueError for other input.
    """
    require_norm("invariant_norm", norm, eps)
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"invariant_norm takes floating-point x [..., n], not {x.dtype} {show_shape(x)}")
    for name, one in (("weight", weight), ("bias", bias)):
        if one is not None and (one.shape != x.shape[-1:] or not one.is_floating_point() or one.device != x.device):
            wanted = f"[{x.shape[-1]}] of a floating-point dtype on {x.device}"
            raise ValueError(f"invariant_norm: {name} must be {wanted}, not {describe_tensor(one)}")
    return _exact_norm(x, weight, bias, float(eps), norm, float(offset))


def _run_exact_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, norm: str, offset: float) -> Tensor:
    described = Norm(norm, eps, offset, is_exact=True)
    if not can_launch(x) or x.shape[-1] > MAX_COLUMNS:
        return normalize_by_torch(x, weight, bias, described)
    rows = x.contiguous().view(-1, x.shape[-1])
    normed = torch.empty_like(rows)
    shift = None if bias is None else bias.contiguous()
    with torch.cuda.device_of(x):
        _launch(None, NormRows(None, rows, weight.contiguous(), shift, normed, None), described)
    return normed.view(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.norm = inputs
    ctx.save_for_backward(x, weight, bias)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate by torch's norm, which is not exact; with `create_graph=True` its derivatives have derivatives."""
    eps, norm, offset = ctx.norm
    is_again = torch.is_grad_enabled()
    # Views: x may have been computed of this very weight, and what goes that way is not of this call.
    saved = [
        one if one is None else one.view_as(one) if is_again and one.requires_grad else one.detach().requires_grad_()
        for one in ctx.saved_tensors
    ]
    x, weight, bias = saved
    assert x is not None
    assert weight is not None
    with torch.enable_grad():
        out = normalize_by_torch(x, weight, bias, Norm(norm, eps, offset))
    wanted = [one for one in saved if one is not None]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=is_again))
    return *(None if one is None else next(found) for one in saved), None, None, None


_exact_norm = define_operator(
    "invariant_norm",
    _run_exact_norm,
    fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    autograd=Autograd(_save, _differentiate),
)


def require_norm(operator: str, norm: str, eps: float) -> None:
    """ValueError for a norm that is unknown, or divides by zero."""
    require_one_of(NORMS, f"{operator}: ", norm=norm)
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ValueError(f"{operator}: eps must be a number from 0 to 1, such as 1e-6, not {eps!r}")


def require_norm_operands(operator: str, x: Tensor, m: int, n: int, operands: NormOperands) -> None:
    """ValueError unless residual is [m, n] of x's dtype, contiguous, and weights and biases are [n], on one device."""
    bias, residual, weight, norm_bias = operands
    require_like(operator, "residual", residual, (m, n), x.dtype, x.device)
    if bias is not None:
        require_like(operator, "bias", bias, (n,), x.dtype, x.device)
    for name, one in (("norm_weight", weight), ("norm_bias", norm_bias)):
        if one is not None:
            require_like(operator, name, one, (n,), DTYPES, x.device)


def add_norm(total: Tensor, operands: NormOperands, norm: Norm) -> tuple[Tensor, Tensor]:
    """(norm of the new residual, the new residual): by one kernel on GPUs, and where kernels are interpreted.

    total: [m, n], or, of kernels alone, fp32 [parts, m, n], a power of two of them, which are added up by a tree.
    """
    if not can_launch(total) or total.shape[-1] > MAX_COLUMNS:
        return add_and_normalize_by_torch(total, operands, norm)
    bias, residual, weight, norm_bias = operands
    normed, added = torch.empty_like(residual), torch.empty_like(residual)
    _launch(total.contiguous(), NormRows(bias, residual, weight, norm_bias, normed, added), norm)
    return normed, added


def can_launch(x: Tensor) -> bool:
    """True if kernels run here, and there is something to do."""
    return x.numel() > 0 and (x.is_cuda or INTERPRETED.value)


def _launch(total: Tensor | None, tensors: NormRows, norm: Norm) -> None:
    (rows, columns), device = tensors.residual.shape, tensors.residual.device
    height, block, num_warps = find_tile(columns)
    launch = find_launches(device)
    parts = total.shape[0] if total is not None and total.dim() == 3 else 1
    key = norm, rows, columns, parts, kind_of(total), *map(kind_of, tensors)
    arguments = describe_norm(norm, height, block, parts), tensors, total, rows, columns
    options = {"num_warps": num_warps, "enable_fp_fusion": not norm.is_exact}
    launch(add_and_normalize, key, divide_up(rows, height), arguments, **options)


def add_and_normalize_by_torch(total: Tensor, operands: NormOperands, norm: Norm) -> tuple[Tensor, Tensor]:
    """(norm of the new residual, the new residual), by torch; total: [m, n], of the sum's dtype."""
    bias, residual, weight, norm_bias = operands
    if bias is not None:
        total = total.float() + bias.float()
    added = (residual.float() + total.to(residual.dtype).float()).to(residual.dtype)
    return normalize_by_torch(added, weight, norm_bias, norm), added


def normalize_by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
    """The norm of rows [m, n], by torch."""
    value, columns = x.float(), x.shape[-1]
    is_exact = norm.is_exact and columns > 0  # of none there is no largest
    if norm.kind == "layer":
        value = value - (_sum_exactly(value) / columns if is_exact else value.mean(-1, keepdim=True))
    if is_exact:
        square = _sum_exactly(value, squared=True) / columns
        scale = 1 / (square + norm.eps).double().sqrt().float()  # not all of torch's roots of fp32 are the nearest
    else:
        scale = torch.rsqrt(value.square().mean(-1, keepdim=True) + norm.eps)
    out = value * scale * (weight.float() + norm.offset)
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _sum_exactly(value: Tensor, *, squared: bool = False) -> Tensor:
    """The sum of rows, or of their squares, as `sum_exactly` of kernels: fp32 [m, 1]."""
    most = value.abs().amax(-1, keepdim=True)
    power = torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent.clamp(-100, 127) - 1)
    unit = value / power
    unit = (unit * unit if squared else unit) * float(1 << _POINT)
    total = unit.nan_to_num(0).to(torch.int64).sum(-1, keepdim=True).float() / float(1 << _POINT)
    total = total * power * (power if squared else 1)
    return torch.where(torch.isfinite(most), total, torch.nan)


@triton.jit
def sum_exactly(value, there, SQUARED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of each row of a tile, or of its squares, whose bits depend on no order of additions: fp32 [rows, 1].

    Numbers are divided by a power of two near the row's largest, an exact operation, and added as integers of 2^-40. A
    row with an infinity or a NaN has a NaN.
    """
    size = tl.where(there, tl.abs(value), 0.0)
    is_finite = tl.min(tl.where(size < float("inf"), 1, 0), 1)[:, None] > 0
    most = tl.max(tl.where(size < float("inf"), size, 0.0), 1)[:, None]
    exponent = tl.minimum(tl.maximum((most.to(tl.int32, bitcast=True) >> 23) & 0xFF, 26), 253)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = value * inverse
    if SQUARED:
        unit = unit * unit
    unit = tl.where(there & is_finite, unit * _POINT_SCALE, 0.0)
    total = tl.sum(unit.to(tl.int64), 1)[:, None].to(tl.float32) * (1 / _POINT_SCALE) * power
    if SQUARED:
        total = total * power
    return tl.where(is_finite, total, float("nan"))


@triton.jit
def load_factor(form, weight, column, columns):  # type: ignore[no-untyped-def]
    """Load the factors by which a norm multiplies columns: fp32 [1, block]."""
    return tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32) + form.offset


@triton.jit
def normalize_tile(form, value, there, factor, norm_bias, column, columns):  # type: ignore[no-untyped-def]
    """The norm of a tile of whole rows: fp32. value: fp32 [rows, block], 0 outside; factor, column: [1, block]."""
    count = columns.to(tl.float32)
    if form.kind == "layer":
        if form.is_exact:
            mean = tl.div_rn(sum_exactly(value, there, False), count)
        else:
            mean = tl.sum(value, 1)[:, None] / count
        value = tl.where(there, value - mean, 0.0)
    if form.is_exact:
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_exactly(value, there, True), count) + form.eps))
    else:
        scale = 1 / tl.sqrt(tl.sum(value * value, 1)[:, None] / count + form.eps)
    result = value * scale * factor
    if norm_bias is not None:
        result += tl.load(norm_bias + column, mask=column < columns, other=0.0).to(tl.float32)
    return result


@triton.jit
def add_and_normalize(form, tensors, total, rows, columns):  # type: ignore[no-untyped-def]
    """added = residual + (total + bias); normed = its norm. total, bias: or None; without total, normed alone.

    A program has form.rows rows of form.block >= columns numbers. Bytes: each tensor is read or written once.
    Synchronization: none: programs own their rows.
    """
    dtype: tl.constexpr = tensors.residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * form.rows + tl.arange(0, form.rows)[:, None]
    column = tl.arange(0, form.block)[None, :]
    there = (row < rows) & (column < columns)
    place = row * columns + column
    value = tl.load(tensors.residual + place, mask=there, other=0.0).to(tl.float32)
    if total is not None:
        sums = _add_parts(total + place, there, tl.cast(rows, tl.int64) * columns, form.parts)
        value = add_to_residual(value, sums, tensors.bias, column, columns, dtype)
        tl.store(tensors.added + place, value.to(dtype), mask=there)
    factor = load_factor(form, tensors.weight, column, columns)
    result = normalize_tile(form, value, there, factor, tensors.norm_bias, column, columns)
    tl.store(tensors.normed + place, result.to(dtype), mask=there)


@triton.jit
def _add_parts(total, there, stride, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of so many tiles, `stride` elements apart, by a binary tree: fp32."""
    if PARTS == 1:
        value = tl.load(total, mask=there, other=0.0).to(tl.float32)
    else:
        half: tl.constexpr = PARTS // 2
        value = _add_parts(total, there, stride, half) + _add_parts(total + half * stride, there, stride, half)
    return value


@triton.jit
def add_to_residual(value, sums, bias, column, columns, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """residual + (sums + bias), rounded to dtype after each addition: fp32."""
    if bias is not None:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    return (value + sums.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


def find_tile(columns: int) -> tuple[int, int, int]:
    """(rows and columns of a tile, warps of a program); depends on the columns alone."""
    block = triton.next_power_of_2(columns)
    return max(1, 2048 // block), block, min(16, max(4, block // 512))


def describe_norm(norm: Norm, rows: int, block: int, parts: int = 1) -> NormForm:
    """A norm as kernels take it."""
    constants = norm.kind, float(norm.eps), float(norm.offset), norm.is_exact, rows, block, parts
    return NormForm(*map(fixed, constants))
