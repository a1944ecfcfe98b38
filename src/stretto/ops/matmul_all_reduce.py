"""GEMM + all-reduce, for decoding: few rows, one launch, the same bits on all ranks."""

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from stretto.ops import small_m, unfused
from stretto.ops.checks import find_name, require_operands
from stretto.ops.dispatch import (
    choose_config,
    describe_problem,
    eager_fast_path,
    make_call_key,
    recall_config,
    save_operands,
    without_autocast,
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
    implementation: "auto" (what was measured to be the fastest, or a default), "kernel" (ours, or it raises), "library"
    (a GEMM, then an all-reduce) or a `KernelConfig`. ValueError for other input and for a rank outside of the group;
    PeerError for a rank that does not come.
    """
    how = encode_implementation(implementation)
    return _call(x, weight, bias, find_name(group), how)


@without_autocast
def _run(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    key = make_call_key("matmul_all_reduce", x, weight, bias, implementation)
    plan = recall_config(group, key)
    if plan is None:
        require_operands("matmul_all_reduce", x, weight, bias, implementation)
    (m, k), n = x.shape, weight.shape[0]
    if plan is None:
        call = describe_problem("matmul_all_reduce", m, x, weight, group)
        plan = choose_config(call, x, weight, group, implementation, key)
    if m == 0 or n == 0 or k == 0:  # nothing to wait for
        return x.new_zeros(m, n) if bias is None else x.new_zeros(m, n) + bias
    if plan == LIBRARY:
        return unfused.matmul_all_reduce(x, weight, bias, group)
    return run_kernel(plan, x, weight, bias, x.dtype, group)


def run_kernel(
    plan: KernelConfig,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    group: str,
    scales: Scales | None = None,
) -> Tensor:
    """The sum, of `dtype`, by a plan's kernel; scales: of fp8 operands."""
    m, n, world = x.shape[0], weight.shape[0], find_group(group).size()
    assert plan.blocks is not None
    if plan.exchange == "tiles" and m % world == 0:  # of many rows each rank adds up its own
        own = x.new_empty(m // world, n, dtype=dtype)
        launch_scatter(plan, x, weight, bias, own, dtype, group, scales)
        return unfused.gather_rows(own, group)
    form = "one-shot" if plan.shots == 1 else "two-shot"
    out = x.new_empty(m, n, dtype=dtype)
    workspace = find_workspace(group, x.device, small_m.count_bytes(form, m, n, world, dtype), "packets")
    small_m.launch("matmul_all_reduce", form, workspace, group, x, weight, bias, out, plan.blocks, scales)
    return out


def save_all_reduce(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _ = inputs
    ctx.group, ctx.has_bias = group, bias is not None
    save_operands(ctx, x, weight)


@without_autocast
def differentiate_all_reduce(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Each rank's sums are in all ranks' outputs, and so are its gradients in all of theirs."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    grad = grad.contiguous()
    total = unfused.all_reduce(grad, ctx.group) if needs_x or needs_weight else grad
    grad_bias = grad.sum(0) if ctx.has_bias and needs_bias else None
    return total @ weight if needs_x else None, total.t() @ x if needs_weight else None, grad_bias, None, None


_matmul_all_reduce = torch.library.custom_op("stretto::matmul_all_reduce", _run, mutates_args=())
_call = eager_fast_path(
    "MatmulAllReduce", _run, torch.ops.stretto.matmul_all_reduce, save_all_reduce, differentiate_all_reduce
)


@_matmul_all_reduce.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    require_operands("matmul_all_reduce", x, weight, bias, implementation)
    return x.new_empty(x.shape[0], weight.shape[0])


_matmul_all_reduce.register_autograd(differentiate_all_reduce, setup_context=save_all_reduce)


@register_flop_formula(torch.ops.stretto.matmul_all_reduce)
def _(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * x[0] * prod(weight)
