# SPDX-License-Identifier: Apache-2.0
"""RMSNorm by one kernel forward and one backward on GPUs, which read and write each row once.

Torch's fused operator takes weights of the input's dtype alone, without an offset, and one row a block, however short:
the norms of queries and keys have rows of 128 numbers. These kernels take weights of any dtype, so that the fp32
weights of a bf16 model are not rounded before they are used, and several short rows a program.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.memory.gpus import count_multiprocessors
from stretto.ops.operands import needs_gradients
from stretto.ops.operator import Autograd, define_operator
from stretto.ops.row_sums.norm import MAX_COLUMNS, find_tile
from stretto.tiles.launches import launch_cached

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PROGRAMS_OF_PROCESSOR = 4  # of the backward pass, each with a partial gradient of the weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., n] / sqrt(mean of squares + eps) * (weight [n] + offset), of x's dtype (Zhang and Sennrich, equation 4).

    It computes in fp32 (fp64 for fp64), and rounds once. On a GPU it is one kernel forward, one backward, and the sum
    of the weight's partial gradients, which does not depend on timing. ValueError if weight is not [n].
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm of rows [..., n] takes a weight [n], not {list(x.shape)} and {list(weight.shape)}")
    if x.is_cuda and x.dtype in DTYPES and weight.dtype in DTYPES and x.shape[-1] <= MAX_COLUMNS and x.numel():
        return rms_norm_on_gpu(x, weight, eps, offset)[0]
    return _normalize(x, weight, eps, offset)


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _normalize(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`rms_norm` by torch's operators."""
    wide = x.to(_exact(x))
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normalized * (weight.to(wide.dtype) + offset)).to(x.dtype)


@triton.jit
def normalize_rows(  # type: ignore[no-untyped-def]
    x, weight, out, scales, rows, columns,
    EPS: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x * scale * (weight + OFFSET), scale = 1 / sqrt(mean of a row's squares + EPS), which is stored in scales.

    A program has ROWS rows of BLOCK >= columns numbers. EPS and OFFSET are constants: as arguments, fp64 would get them
    rounded to fp32. Bytes: x is read and out written once. Synchronization: none: programs own their rows.
    """
    dtype = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (row < rows) & (column < columns)
    value = tl.load(x + row * columns + column, mask=there, other=0.0).to(dtype)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(dtype) + OFFSET
    scale = 1 / tl.sqrt(tl.sum(value * value, 1)[:, None] / columns + EPS)
    tl.store(out + row * columns + column, (value * scale * factor).to(out.dtype.element_ty), mask=there)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def differentiate_norm(  # type: ignore[no-untyped-def]
    x, weight, scales, grad, of_x, of_weight, rows, columns, programs,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """of_x = the gradient of `normalize_rows` by x; of_weight [programs, columns] = each program's part of weight's.

    With u = x * scale and g = grad * (weight + OFFSET), a row's gradient is scale * (g - u * mean(g * u)). A program
    takes every `programs`-th tile of ROWS rows, in a fixed order. Bytes: x and grad are read, and of_x written, once.
    Synchronization: none: programs own their rows, and a row of of_weight.
    """
    dtype = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    column = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(dtype) + OFFSET
    total = tl.zeros((1, BLOCK), dtype)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), programs):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        there = (row < rows) & (column < columns)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        unit = tl.load(x + row * columns + column, mask=there, other=0.0).to(dtype) * scale
        of_out = tl.load(grad + row * columns + column, mask=there, other=0.0).to(dtype)
        total += tl.sum(of_out * unit, 0)[None, :]
        of_unit = of_out * factor
        projection = tl.sum(of_unit * unit, 1)[:, None] / columns
        result = scale * (of_unit - unit * projection)
        tl.store(of_x + row * columns + column, result.to(of_x.dtype.element_ty), mask=there)
    tl.store(of_weight + tl.program_id(0) * columns + column, total, mask=column < columns)


def _run(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    x, columns = x.contiguous(), x.shape[-1]
    rows, (tile, block, num_warps) = x.numel() // columns, find_tile(columns)
    out, scales = torch.empty_like(x), x.new_empty(rows, dtype=_exact(x))
    with torch.cuda.device_of(x):
        launch_cached(
            normalize_rows, triton.cdiv(rows, tile), x, weight.contiguous(), out, scales, rows, columns,
            EPS=float(eps), OFFSET=float(offset), ROWS=tile, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return out, scales


def _run_gradient(x: Tensor, weight: Tensor, scales: Tensor, grad: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    x, grad, columns = x.contiguous(), grad.contiguous(), x.shape[-1]
    rows, (tile, block, num_warps) = x.numel() // columns, find_tile(columns)
    programs = min(triton.cdiv(rows, tile), _PROGRAMS_OF_PROCESSOR * count_multiprocessors(x.device))
    of_x, of_weight = torch.empty_like(x), x.new_empty(programs, columns, dtype=_exact(x))
    with torch.cuda.device_of(x):
        launch_cached(
            differentiate_norm, programs,
            x, weight.contiguous(), scales, grad, of_x, of_weight, rows, columns, programs,
            OFFSET=float(offset), ROWS=tile, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return of_x, of_weight.sum(0).to(weight.dtype)


def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(x.numel() // x.shape[-1], dtype=_exact(x))


def _fake_gradient(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, scales = ctx.saved_tensors
    if grad is None:
        return None, None, None, None
    if not needs_gradients(x, weight, grad):
        return *norm_gradient_on_gpu(x, weight, scales, grad, ctx.offset), None, None
    wide, of_out = x.to(scales.dtype), grad.to(scales.dtype)  # for gradients of gradients, by torch's operators
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    unit, of_unit = wide * scale, of_out * (weight.to(scales.dtype) + ctx.offset)
    of_x = scale * (of_unit - unit * (of_unit * unit).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (of_out * unit).flatten(0, -2).sum(0).to(weight.dtype), None, None


norm_gradient_on_gpu = define_operator("rms_norm_gradient", _run_gradient, fake=_fake_gradient)
rms_norm_on_gpu = define_operator("rms_norm", _run, fake=_fake, autograd=Autograd(_save, _differentiate))
