# SPDX-License-Identifier: Apache-2.0
"""GEMM + all-reduce + residual + norm, for decoding: in two launches for few rows."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory.gpus import count_processors
from stretto.ops import small_m
from stretto.ops.choices import find_config
from stretto.ops.config import KernelConfig, encode_implementation
from stretto.ops.gemm import GroupProduct
from stretto.ops.invariant.kernels import is_for_streaming, multiply_and_sum, multiply_in_parts
from stretto.ops.invariant.matmul import LEAVES, count_leaves, goes_by_packets, multiply_all_reduce, require_plain
from stretto.ops.matmul_all_reduce import compute_all_reduce
from stretto.ops.operands import (
    DTYPES,
    flatten_rows,
    require_like,
    require_matrices,
    require_no_gradients,
    require_operands,
    takes_tensors,
)
from stretto.ops.operator import abandon, count_product_flops, define_operator, find_group, find_name, require_agreement
from stretto.ops.prediction import FEW_ROWS
from stretto.ops.row_sums.kernel import SumOperands, add_in_parts, count_rows_at_a_time, launch_sums
from stretto.ops.row_sums.norm import (
    MAX_COLUMNS,
    Norm,
    NormOperands,
    add_norm,
    can_launch,
    require_norm,
    require_norm_operands,
)
from stretto.ops.scaled import scaled_matmul_all_reduce


@takes_tensors
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
    of `matmul_all_reduce`, an addition and the norm, one after another (on one rank, and of few rows on GPUs, within
    rounding). Few rows take two launches: a product that sends its tiles as packets, and a kernel that adds them up,
    with residual and norm.

    invariant: a row's bits depend neither on the number of rows nor on the other rows, nor on the number of ranks (1,
    2, 4 or 8 of the same k): see `matmul_all_reduce`. There are no gradients. ValueError for other input, PeerError for
    a rank that does not call.
    """
    how, name = encode_implementation(implementation), find_name(group)
    require_no_gradients("matmul_all_reduce_norm", x, weight, residual, norm_weight, bias, norm_bias)
    rows = flatten_rows("matmul_all_reduce_norm", x)
    if invariant:
        require_plain("matmul_all_reduce_norm", how, None, None)
    require_matrices("matmul_all_reduce_norm", rows, weight)
    shape = *x.shape[:-1], weight.shape[0]
    require_like("matmul_all_reduce_norm", "residual", residual, shape, x.dtype, x.device)
    operands = rows, weight, residual.flatten(0, -2), norm_weight, bias, norm_bias
    normed, added = _call(*operands, name, float(eps), norm, float(offset), invariant, how)
    return normed.view(shape), added.view(shape)


@takes_tensors
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
    implementation: str | KernelConfig = "auto",
) -> tuple[Tensor, Tensor]:
    """`matmul_all_reduce_norm` of fp8 operands; the output has the residual's dtype, bf16, fp16 or fp32.

    x, weight and their scales are as in `scaled_matmul_all_reduce`.
    """
    require_no_gradients(
        "scaled_matmul_all_reduce_norm", x, weight, x_scale, weight_scale, residual, norm_weight, bias, norm_bias
    )
    require_norm("scaled_matmul_all_reduce_norm", norm, eps)
    require_matrices("scaled_matmul_all_reduce_norm", flatten_rows("scaled_matmul_all_reduce_norm", x), weight)
    shape = *x.shape[:-1], weight.shape[0]
    require_like("scaled_matmul_all_reduce_norm", "residual", residual, shape, DTYPES, x.device)
    rows = residual.flatten(0, -2)
    operands = NormOperands(None, rows, norm_weight, norm_bias)
    require_norm_operands("scaled_matmul_all_reduce_norm", rows, rows.shape[0], rows.shape[1], operands)
    total = scaled_matmul_all_reduce(
        x, weight, x_scale, weight_scale, group, bias=bias, out_dtype=residual.dtype, implementation=implementation
    )
    normed, added = _add_norm(total.flatten(0, -2), rows, norm_weight, norm_bias, float(eps), norm)
    return normed.view_as(residual), added.view_as(residual)


def _run_add_norm(
    total: Tensor, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, eps: float, norm: str
) -> tuple[Tensor, Tensor]:
    return add_norm(total, NormOperands(None, residual, norm_weight, norm_bias), Norm(norm, eps))


_add_norm = define_operator(
    "add_norm", _run_add_norm, fake=lambda residual: (torch.empty_like(residual), torch.empty_like(residual))
)


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
    described = Norm(norm, eps, offset, invariant)
    require_norm("matmul_all_reduce_norm", norm, eps)  # at each call: equal calls are known by the product's operands
    require_norm_operands("matmul_all_reduce_norm", x, x.shape[0], weight.shape[0], operands)
    if invariant:
        require_operands("matmul_all_reduce_norm", x, weight, bias)
        return multiply_sum_norm(x, weight, operands, described, group, implementation)

    is_alone = find_group(group).size() == 1 and weight.shape[0] <= MAX_COLUMNS
    if implementation == "auto" and is_alone and is_for_streaming(x, weight, LEAVES):
        # The norm's kernel adds up the parts of k, which libraries do by a kernel of its own.
        require_operands("matmul_all_reduce_norm", x, weight, bias)
        return add_norm(multiply_in_parts(x, weight, LEAVES), operands, described)

    def compute(config: KernelConfig) -> tuple[Tensor, Tensor]:
        goes_by_packets = config.implementation == "kernel" and config.exchange == "packets" and not config.schedule
        if not (goes_by_packets and config.shots == 1 and residual.shape[1] <= MAX_COLUMNS and 0 not in weight.shape):
            total = compute_all_reduce(config, x, weight, bias, group, None)
            return add_norm(total, operands._replace(bias=None), described)
        if implementation == "auto" and is_for_streaming(x, weight):  # else tiles are the configuration's
            blocks = small_m.choose_streaming(len(x), *weight.shape, count_processors(x.device.index))
            config = config if blocks is None else config._replace(blocks=blocks)
        product = GroupProduct(x, weight, None, residual, group)
        workspace = small_m.launch("matmul_all_reduce_norm", "push", config, product, find_group(group).size())
        try:
            channel = workspace.channel.describe("matmul_all_reduce_norm", "p2p", begun_in_kernel=True)
            sums = SumOperands(*operands, torch.empty_like(residual))
            return launch_sums(workspace, channel, None, sums, x.dtype, norm=described)
        except BaseException:
            abandon(group, workspace.channel)
            raise

    config = find_config(
        "matmul_all_reduce", x, weight, bias, group, implementation, "norm", norm, run=compute,
        check=lambda: require_operands("matmul_all_reduce_norm", x, weight, bias),
    )  # fmt: skip
    return compute(config)


def multiply_sum_norm(
    x: Tensor, weight: Tensor, operands: NormOperands, norm: Norm, group: str, implementation: str
) -> tuple[Tensor, Tensor]:
    """The invariant call: a product that sends its tiles, and a kernel for the rest, or one after another."""
    (m, k), n, world = x.shape, weight.shape[0], find_group(group).size()
    leaves = count_leaves("matmul_all_reduce_norm", k, world)
    call = f"invariant matmul_all_reduce_norm m={m} n={n} k={k} {x.dtype} {(norm, implementation)}"
    require_agreement(call, False, group, x.device)
    if world > 1 and m and goes_by_packets("matmul_all_reduce_norm", m, n, group, x.device, implementation):
        bias, residual, norm_weight, norm_bias = operands

        def add(rows: slice) -> tuple[Tensor, Tensor]:
            sums = SumOperands(bias, residual[rows], norm_weight, norm_bias, torch.empty_like(residual[rows]))
            return multiply_and_sum("matmul_all_reduce_norm", "push", x[rows], weight, leaves, sums, group, norm)

        return add_in_parts(add, m, count_rows_at_a_time(n, torch.float32, world))
    if world == 1 and m <= FEW_ROWS and can_launch(x) and n <= MAX_COLUMNS:
        return add_norm(multiply_in_parts(x, weight, leaves), operands, norm)
    total = multiply_all_reduce(x, weight, operands.bias, group, "sum-of-losses", "library")
    return add_norm(total, operands._replace(bias=None), norm)


def _fake(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, bias: Any, norm_bias: Any, eps: float, norm: str
) -> tuple[Tensor, Tensor]:
    operands = NormOperands(bias, residual, norm_weight, norm_bias)
    require_norm("matmul_all_reduce_norm", norm, eps)
    require_operands("matmul_all_reduce_norm", x, weight, bias)
    require_norm_operands("matmul_all_reduce_norm", x, x.shape[0], weight.shape[0], operands)
    return torch.empty_like(residual), torch.empty_like(residual)


_call = define_operator("matmul_all_reduce_norm", _run, fake=_fake, count_flops=count_product_flops)
