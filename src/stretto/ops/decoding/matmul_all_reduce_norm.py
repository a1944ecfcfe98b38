# SPDX-License-Identifier: Apache-2.0
"""GEMM + all-reduce + residual + norm, for decoding: in two launches for few rows."""

from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.config import KernelConfig, encode_implementation
from stretto.ops.decoding.all_reduce_norm import require_no_gradients, require_same_shape
from stretto.ops.decoding.norm import (
    Norm,
    NormOperands,
    add_and_normalize_by_torch,
    require_norm,
    require_norm_operands,
)
from stretto.ops.invariant.matmul import multiply_all_reduce, require_plain
from stretto.ops.operator import all_reduce, define_operator, find_name, flatten_rows, require_operands
from stretto.ops.scaled import scaled_matmul_all_reduce


def matmul_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    eps: float,
    norm: str = "rms",
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    offset: float = 0.0,
    invariant: bool = False,
    implementation: str | KernelConfig = "auto",
) -> tuple[Tensor, Tensor]:
    """(norm of the new residual, the new residual), which is residual + matmul_all_reduce(x, weight, bias): [..., n].

    x: [..., k], weight: [n, k], as in `matmul_all_reduce`; residual: [..., n], the same on all ranks; bias: [n] of x's
    dtype, added once. norm, eps, offset, norm_weight and norm_bias are those of `all_reduce_norm`. The bits are those
    of `matmul_all_reduce`, an addition and the norm, one after another. Few rows take two launches: a product that sends
    its tiles as packets, and a kernel that adds them up, with residual and norm.

    invariant: a row's bits depend neither on the number of rows nor on the other rows, nor on the number of ranks (1,
    2, 4 or 8 of the same k): see `matmul_all_reduce`. There are no gradients. ValueError for other input, PeerError for
    a rank that does not call.
    """
    how, name = encode_implementation(implementation), find_name(group)
    require_no_gradients("matmul_all_reduce_norm", x, weight, residual, norm_weight, bias, norm_bias)
    rows = flatten_rows("matmul_all_reduce_norm", x)
    if invariant:
        require_plain("matmul_all_reduce_norm", how, None, None)
    shape = *x.shape[:-1], weight.shape[0]
    require_same_shape("matmul_all_reduce_norm", shape, residual)
    operands = rows, weight, residual.flatten(0, -2), norm_weight, bias, norm_bias
    normed, added = _call(*operands, name, float(eps), norm, float(offset), invariant, how)
    return normed.view(shape), added.view(shape)


def scaled_matmul_all_reduce_norm(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    eps: float,
    norm: str = "rms",
    bias: Tensor | None = None,
    norm_bias: Tensor | None = None,
    offset: float = 0.0,
    implementation: str | KernelConfig = "auto",
) -> tuple[Tensor, Tensor]:
    """`matmul_all_reduce_norm` of fp8 operands; the output has the residual's dtype, bf16, fp16 or fp32.

    x, weight and their scales are as in `scaled_matmul_all_reduce`.
    """
    require_norm("scaled_matmul_all_reduce_norm", norm, eps)
    require_same_shape("scaled_matmul_all_reduce_norm", (*x.shape[:-1], weight.shape[0]), residual)
    rows = residual.flatten(0, -2)
    operands = NormOperands(None, rows, norm_weight, norm_bias)
    require_norm_operands("scaled_matmul_all_reduce_norm", rows, *rows.shape, operands)
    total = scaled_matmul_all_reduce(
        x, weight, x_scale, weight_scale, group, bias=bias, out_dtype=residual.dtype, implementation=implementation
    )
    normed, added = add_and_normalize_by_torch(total.flatten(0, -2), operands, Norm(norm, eps, offset))
    return normed.view_as(residual), added.view_as(residual)


def _run(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    norm_bias: Tensor | None,
    group: str,
    eps: float,
    norm: str,
    offset: float,
    invariant: bool,
    implementation: str,
) -> tuple[Tensor, Tensor]:
    operands = NormOperands(bias, residual, norm_weight, norm_bias)
    _require(x, weight, operands, norm, eps)
    if invariant:
        total = multiply_all_reduce(x, weight, bias, group, "sum-of-losses", implementation)
        operands = operands._replace(bias=None)
    else:
        total = all_reduce(x @ weight.t(), group)
    return add_and_normalize_by_torch(total, operands, Norm(norm, eps, offset, invariant))


def _require(x: Tensor, weight: Tensor, operands: NormOperands, norm: str, eps: float) -> None:
    require_norm("matmul_all_reduce_norm", norm, eps)
    require_operands("matmul_all_reduce_norm", x, weight, operands.bias)
    require_norm_operands("matmul_all_reduce_norm", x, x.shape[0], weight.shape[0], operands)


def _fake(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None,
    norm_bias: Tensor | None,
    group: str,
    eps: float,
    norm: str,
    *_: object,
) -> tuple[Tensor, Tensor]:
    _require(x, weight, NormOperands(bias, residual, norm_weight, norm_bias), norm, eps)
    return torch.empty_like(residual), torch.empty_like(residual)


def _count_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * x[0] * prod(weight)


_call = define_operator("matmul_all_reduce_norm", _run, fake=_fake, count_flops=_count_flops, tensors=slice(6))
