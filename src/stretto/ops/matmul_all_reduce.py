# SPDX-License-Identifier: Apache-2.0
"""GEMM + all-reduce, for decoding: few rows, one launch (`small_m`), the same bits on all ranks."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops import small_m, unfused
from stretto.ops.checks import find_name, require_operands
from stretto.ops.dispatch import (
    Autograd,
    choose_config,
    define_operator,
    describe_problem,
    make_call_key,
    recall_config,
    save_operands,
)
from stretto.ops.gemm.config import LIBRARY, KernelConfig, encode_implementation
from stretto.ops.gemm.tile import Scales
from stretto.ops.matmul_reduce_scatter import launch_scatter
from stretto.ops.workspace import find_group, find_workspace


def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    implementation: str | KernelConfig = "auto",
) -> Tensor:
    """x times weight's transpose, summed over the group: [m, k], [n, k] -> [m, n], the same bits on all ranks.

    bf16, fp16 or fp32, all of one dtype. A rank's partial sums are fp32, travel in x's dtype, are added in fp32 in rank
    order, and rounded. bias: [n], the same on all ranks, added once. group: None for all ranks. x is contiguous; weight
    is, or its transpose. The gradient of x is summed over the ranks' outputs, as those of the other operators are.
    implementation: "auto" (the fastest measured, or a default), "kernel" (Stretto's, or it raises), "library" (a GEMM,
    then an all-reduce) or a `KernelConfig`. ValueError for other input and for a rank outside of the group; PeerError
    for a rank that does not call.
    """
    how = encode_implementation(implementation)
    return _call(x, weight, bias, find_name(group), how)


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    key = make_call_key("matmul_all_reduce", x, weight, bias, implementation)
    config = recall_config(group, key)
    if config is None:
        require_operands("matmul_all_reduce", x, weight, bias, implementation)
    (m, k), n = x.shape, weight.shape[0]
    if config is None:
        problem = describe_problem("matmul_all_reduce", m, x, weight, group)
        config = choose_config(problem, x, weight, group, implementation, key)
    if m == 0 or n == 0 or k == 0:  # nothing to wait for
        return x.new_zeros(m, n) if bias is None else x.new_zeros(m, n) + bias
    if config == LIBRARY:
        return unfused.matmul_all_reduce(x, weight, bias, group)
    return launch_all_reduce(config, x, weight, bias, x.dtype, group)


def launch_all_reduce(
    config: KernelConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    group: str,
    scales: Scales | None = None,
) -> Tensor:
    """Launch the configuration's kernel; returns the sum, of `dtype`. scales: of fp8 operands."""
    m, n, world = x.shape[0], weight.shape[0], find_group(group).size()
    assert config.blocks is not None
    if config.exchange == "tiles" and m % world == 0:  # of many rows each rank adds up its own
        own = x.new_empty(m // world, n, dtype=dtype)
        launch_scatter(config, x, weight, bias, own, dtype, group, scales)
        return unfused.gather_rows(own, group)
    form = "one-shot" if config.shots == 1 else "two-shot"
    out = x.new_empty(m, n, dtype=dtype)
    workspace = find_workspace(group, x.device, small_m.count_bytes(form, m, n, world, dtype), "packets")
    small_m.launch("matmul_all_reduce", form, workspace, group, x, weight, bias, out, config.blocks, scales)
    return out


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    require_operands("matmul_all_reduce", x, weight, bias, implementation)
    return x.new_empty(x.shape[0], weight.shape[0])


def _count_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * x[0] * prod(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _ = inputs
    ctx.group, ctx.has_bias = group, bias is not None
    save_operands(ctx, x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Each rank's partial sums are in all ranks' outputs, so its gradients are summed over all of them."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad = grad.contiguous()
    total = unfused.all_reduce(grad, ctx.group) if needs_x or needs_weight else grad
    grad_bias = grad.sum(0) if ctx.has_bias and needs_bias else None
    return total @ weight if needs_x else None, total.t() @ x if needs_weight else None, grad_bias, None, None


_call = define_operator(
    "matmul_all_reduce", _run, fake=_fake, count_flops=_count_flops, autograd=Autograd(_save, _differentiate)
)
