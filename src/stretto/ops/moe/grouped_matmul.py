# SPDX-License-Identifier: Apache-2.0
"""Grouped products: each expert's rows times its own weight, in one call.

torch's grouped GEMM multiplies bf16 on GPUs, and reads the offsets there. Other dtypes and places take a loop over the
experts, for which the host reads the offsets.
"""

from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from stretto.ops.dispatch import Autograd, define_operator
from stretto.ops.moe.permutation import DTYPES

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
_ALIGNMENT = 16  # bytes, of addresses and of strides
_CAPABILITY = (8, 0)  # of the first GPUs that torch has grouped GEMMs for


def grouped_matmul(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each expert's rows times its weight's transpose: rows [n, a], weight [e, b, a], offsets [e + 1] -> [n, b].

    rows and weight are of one dtype: bf16, fp16, fp32 or fp64; sums are fp32 for 16-bit dtypes. offsets is int32 and
    begins with 0: expert i has rows offsets[i] to offsets[i + 1], which may be none. Rows from offsets[-1] on are
    padding; their result is zeros, and so is their gradient. The gradient of the weight of an expert without rows is
    zeros.

    For bf16 on GPUs, with a and b multiples of 8, nothing waits for the host; otherwise the host reads the offsets in
    each call. ValueError for other shapes and dtypes.
    """
    _require(rows, weight, offsets)
    result: Tensor = _multiply(rows, weight, offsets)
    return result


def _run(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    if _is_grouped(rows, weight):
        return _clear_padding(_grouped_mm(rows, weight.transpose(1, 2), offs=offsets[1:]), offsets)
    out = rows.new_zeros(rows.shape[0], weight.shape[1])
    bounds = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            torch.mm(rows[begin:end], weight[expert].t(), out=out[begin:end])
    return out


def _run_weight_gradient(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    if _is_grouped(grad, rows):
        product = _grouped_mm(grad.t(), rows, offs=offsets[1:])
        # Of an expert without rows torch's GEMM leaves what was in memory, on some GPUs.
        return product.masked_fill_((offsets[1:] == offsets[:-1])[:, None, None], 0)
    out = rows.new_zeros(offsets.shape[0] - 1, grad.shape[1], rows.shape[1])
    bounds = offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            torch.mm(grad[begin:end].t(), rows[begin:end], out=out[expert])
    return out


def _is_grouped(*operands: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these operands, and without the host."""
    first = operands[0]
    if (
        not first.is_cuda
        or first.dtype != torch.bfloat16
        or torch.cuda.get_device_capability(first.device) < _CAPABILITY
    ):
        return False
    return all(one.numel() > 0 and _is_aligned(one) for one in operands)


def _is_aligned(matrix: Tensor) -> bool:
    grain = _ALIGNMENT // matrix.element_size()
    *_, row, column = matrix.stride()
    is_dense = (column == 1 and row % grain == 0) or (row == 1 and column % grain == 0)
    return is_dense and matrix.data_ptr() % _ALIGNMENT == 0 and (matrix.dim() < 3 or matrix.stride(0) % grain == 0)


def _clear_padding(out: Tensor, offsets: Tensor) -> Tensor:
    """The rows of the output, with zeros from offsets[-1] on, where torch leaves what was in memory."""
    numbers = torch.arange(out.shape[0], device=out.device)
    return out.masked_fill_((numbers >= offsets[-1])[:, None], 0)


def _fake(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


def _fake_weight_gradient(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(offsets.shape[0] - 1, grad.shape[1], rows.shape[1])


def _count_flops(rows: torch.Size, weight: torch.Size, offsets: torch.Size, *_: object, **__: object) -> int:
    return 2 * prod(rows) * weight[1]


def _count_gradient_flops(grad: torch.Size, rows: torch.Size, offsets: torch.Size, *_: object, **__: object) -> int:
    return 2 * prod(rows) * grad[1]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, weight, offsets = inputs
    needs_rows, needs_weight, _ = ctx.needs_input_grad
    ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None, offsets)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """C = R @ W.T: dR is dC @ W, and dW is dC.T @ R, for each expert."""
    rows, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    grad_rows = None if weight is None else _multiply(grad, weight.transpose(1, 2), offsets)
    grad_weight = None if rows is None else grouped_weight_gradient(grad, rows, offsets)
    return grad_rows, grad_weight, None


_multiply = define_operator(
    "grouped_matmul", _run, fake=_fake, count_flops=_count_flops, autograd=Autograd(_save, _differentiate)
)
grouped_weight_gradient = define_operator(
    "grouped_matmul_weight_gradient",
    _run_weight_gradient,
    fake=_fake_weight_gradient,
    count_flops=_count_gradient_flops,
)


def _require(rows: Tensor, weight: Tensor, offsets: Tensor) -> None:
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[2]:
        raise ValueError(
            f"grouped_matmul takes rows [n, a] and weight [experts, b, a], not {list(rows.shape)} and "
            f"{list(weight.shape)}"
        )
    if rows.dtype not in DTYPES or weight.dtype != rows.dtype:
        raise ValueError(
            f"grouped_matmul takes rows and weight of one of {', '.join(map(str, DTYPES))}, not {rows.dtype} and "
            f"{weight.dtype}: convert one of them"
        )
    if offsets.shape != (weight.shape[0] + 1,) or offsets.dtype != torch.int32:
        raise ValueError(
            f"grouped_matmul: offsets for {weight.shape[0]} experts is torch.int32 [{weight.shape[0] + 1}], not "
            f"{offsets.dtype} {list(offsets.shape)}"
        )
    if not rows.device == weight.device == offsets.device:
        raise ValueError(
            f"grouped_matmul: rows is on {rows.device}, weight on {weight.device} and offsets on {offsets.device}: "
            "move them to one"
        )
