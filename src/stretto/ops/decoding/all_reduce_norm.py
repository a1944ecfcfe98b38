# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + norm: in one launch for few rows, whose sums travel as packets."""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops.config import encode_implementation
from stretto.ops.invariant.matmul import LEAVES, count_leaves, reduce_by_tree
from stretto.ops.operands import DTYPES, flatten_rows, require_like, require_no_gradients, require_place, takes_tensors
from stretto.ops.operator import all_reduce, define_operator, find_group, find_name, require_agreement
from stretto.ops.row_sums.kernel import (
    SumOperands,
    add_in_parts,
    count_rows_at_a_time,
    find_packets_obstacle,
    send_and_sum,
)
from stretto.ops.row_sums.norm import Norm, NormOperands, add_norm, require_norm, require_norm_operands


@takes_tensors
def all_reduce_norm(
    x: Tensor,
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
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(norm of the new residual, the new residual), which is residual + (the sum of all ranks' x, + bias): [..., n].

    x, residual: [..., n] of bf16, fp16 or fp32, contiguous; the residual is the same on all ranks. norm: "rms"
    (x / sqrt(mean of squares + eps) * (norm_weight + offset)) or "layer" (of x - mean, + norm_bias); it computes in
    fp32. norm_weight, norm_bias: [n] of bf16, fp16 or fp32, whatever x's dtype; bias: [n] of x's dtype. A sum and a
    residual are rounded to x's dtype, as separate operators round them. All ranks get the same bits. group: None for
    all ranks.

    invariant: a row's bits depend on x, and on no other row, nor on the number of rows, kernel or device; the ranks'
    numbers are added by a binary tree, in fp32. With `implementation`: "auto", "kernel" (in one launch, or it raises)
    or "library" (an all-reduce, then one kernel).

    There are no gradients. ValueError for other input, PeerError for a rank that does not call.
    """
    how, name = encode_implementation(implementation), find_name(group)
    require_no_gradients("all_reduce_norm", x, residual, norm_weight, bias, norm_bias)
    rows = flatten_rows("all_reduce_norm", x)
    require_like("all_reduce_norm", "residual", residual, x.shape, x.dtype, x.device)
    operands = rows, residual.view_as(rows), norm_weight, bias, norm_bias
    normed, added = _call(*operands, name, float(eps), norm, float(offset), invariant, how)
    return normed.view_as(x), added.view_as(x)


def _run(
    x: Tensor,
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
    _require(x, operands, norm, eps)
    (m, n), world, described = x.shape, find_group(group).size(), Norm(norm, eps, offset, invariant)
    if invariant:
        count_leaves("all_reduce_norm", LEAVES, world)
    wire = torch.float32 if invariant else x.dtype
    call = f"all_reduce_norm {list(x.shape)} {x.dtype} {(norm, bias is None, invariant, implementation)}"
    require_agreement(call, False, group, x.device)
    obstacle = find_packets_obstacle(group, x.device, m, n, wire, implementation)
    if implementation == "kernel" and obstacle:
        raise ValueError(f'all_reduce_norm: no kernel can run: {obstacle}; implementation="library" can')
    if implementation == "library" or obstacle or not x.numel():
        if invariant:
            total, operands = reduce_by_tree(x.float(), bias, x.dtype, group), operands._replace(bias=None)
        else:
            total = all_reduce(x, group)
        return add_norm(total, operands, described)

    def add(rows: slice) -> tuple[Tensor, Tensor]:
        part = x[rows]
        sums = SumOperands(bias, residual[rows], norm_weight, norm_bias, torch.empty_like(part))
        return send_and_sum("all_reduce_norm", part, sums, wire, group, by_tree=invariant, norm=described)

    return add_in_parts(add, m, count_rows_at_a_time(n, wire, world))


def _require(x: Tensor, operands: NormOperands, norm: str, eps: float) -> None:
    require_norm("all_reduce_norm", norm, eps)
    if x.dtype not in DTYPES:
        raise ValueError(f"all_reduce_norm takes {', '.join(map(str, DTYPES))}, not {x.dtype}: convert x")
    require_place("all_reduce_norm", x)
    require_norm_operands("all_reduce_norm", x, x.shape[0], x.shape[1], operands)


def _fake(
    x: Tensor, residual: Tensor, norm_weight: Tensor, bias: Tensor, norm_bias: Tensor, eps: float, norm: str
) -> tuple[Tensor, Tensor]:
    _require(x, NormOperands(bias, residual, norm_weight, norm_bias), norm, eps)
    return torch.empty_like(x), torch.empty_like(x)


_call = define_operator("all_reduce_norm", _run, fake=_fake)
