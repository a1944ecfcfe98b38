# SPDX-License-Identifier: Apache-2.0
"""GEMM + reduce-scatter: partial sums go to the rank that owns their rows, which adds them up.

Flux (sections 3.2, 4.1 and 4.2). From top to bottom: the operator; its run, by the library or by a kernel; the
gradient. It is a joint schedule (`joint`), by default a direct algorithm's, or, of few rows, packets (`small_m`).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.schedule import Schedule
from stretto.ops import small_m
from stretto.ops.choices import find_config
from stretto.ops.config import LIBRARY, KernelConfig, encode_implementation, pin_backward
from stretto.ops.gemm import GroupProduct
from stretto.ops.invariant.matmul import multiply_reduce_scatter, require_plain
from stretto.ops.joint.launch import launch_joint
from stretto.ops.joint.registry import encode_schedule
from stretto.ops.operands import (
    divide_first_dim,
    flatten_rows,
    require_operands,
    require_out,
    restore_dims,
    takes_tensors,
)
from stretto.ops.operator import (
    Autograd,
    copy_to,
    count_product_flops,
    define_operator,
    find_group,
    find_name,
    gather_rows,
    reduce_scatter,
    save_operands,
)


@takes_tensors
def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    invariant: bool = False,
    implementation: str | KernelConfig = "auto",
    schedule: str | Schedule | None = None,
) -> Tensor:
    """x times weight's transpose, reduce-scattered over the group: [m, k], [n, k] -> [m / world, n].

    x may have more dims, [d, ..., k]: the output is [d / world, ..., n], rank r's part of the first dim (rows are the
    flattened dims before the last one, as in Megatron-LM's sequence parallelism, where x is [sequence, batch, k]).
    out: where to write the output, without gradients: of its shape and x's dtype, contiguous.

    bf16, fp16 or fp32, all of one dtype. A rank's partial sums are computed in fp32, sent in x's dtype (in fp32 if
    reduce_dtype is torch.float32), added in fp32 in rank order, and rounded. bias: [n], added once, by the row's owner;
    its gradient is of these rows. group: None for all ranks. x is contiguous; weight is, or its transpose. x's gradient
    is an `all_gather_matmul`, which gathers what weight's gradient needs. implementation: "auto" (the fastest measured,
    or a default), "kernel" (Stretto's, or it raises), "library" (a GEMM, then a reduce-scatter) or a `KernelConfig`.
    schedule: how sums travel: a reduce-scatter's algorithm by name, or any verified `Schedule` of one, which says in
    what order they are added, and rounded at each hop (docs/tutorial-kernel.md). invariant: the bits of a row depend
    neither on the other rows nor on the number of ranks, as in `matmul_all_reduce`. ValueError for other input (m that
    the group does not divide, say) and for a rank outside of the group; PeerError for a rank that does not call. Flux,
    sections 3.2 and 4.
    """
    how, name = encode_implementation(implementation), find_name(group)
    if schedule is not None:
        how = encode_schedule("matmul_reduce_scatter", schedule, how, name)
    rows, world = flatten_rows("matmul_reduce_scatter", x), dist.get_world_size(group)
    if invariant:
        require_plain("matmul_reduce_scatter", how, out, schedule)
        first = divide_first_dim("matmul_reduce_scatter", x, world)
        return restore_dims(multiply_reduce_scatter(rows, weight, bias, name, how), x, first)
    first = divide_first_dim("matmul_reduce_scatter", x, world) if x.dim() > 2 or out is not None else 0
    if out is not None:
        require_operands("matmul_reduce_scatter", rows, weight, bias, how)
        shape = first, *x.shape[1:-1], weight.shape[0]
        require_out("matmul_reduce_scatter", out, shape, x.dtype, x, weight, bias)
        _call(rows, weight, bias, name, reduce_dtype, how, out=out.flatten(0, -2))
        return out
    return restore_dims(_call(rows, weight, bias, name, reduce_dtype, how), x, first)


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    reduce_dtype: torch.dtype | None,
    implementation: str,
    out: Tensor | None = None,
) -> Tensor:
    """The output, in `out` if there is one."""

    def compute(config: KernelConfig, out: Tensor | None = None) -> Tensor:
        rows, (n, k) = x.shape[0] // find_group(group).size(), weight.shape
        if rows == 0 or n == 0 or k == 0:  # nothing to wait for
            return copy_to(out, x.new_zeros(rows, n) if bias is None else x.new_zeros(rows, n) + bias)
        dtype = reduce_dtype or x.dtype
        if config == LIBRARY:
            return copy_to(out, _run_library(x, weight, bias, group, dtype))
        out = x.new_empty(rows, n) if out is None else out
        launch_scatter(config, GroupProduct(x, weight, bias, out, group), dtype)
        return out

    config = find_config(
        "matmul_reduce_scatter", x, weight, bias, group, implementation, reduce_dtype, run=compute,
        check=lambda: _require(x, weight, bias, group, reduce_dtype, implementation),
    )  # fmt: skip
    return compute(config, out)


def _run_library(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, dtype: torch.dtype) -> Tensor:
    """Multiply by a library's GEMM, and sum by the group's backend: partial sums travel in `dtype`, as in kernels.

    Results equal the kernels' up to rounding. On CPUs the ranks' sums are added in fp32 in rank order, as in kernels;
    NCCL adds in its own order, and rounds at each hop.
    """
    if dtype == x.dtype:
        partial = x @ weight.t()
    elif x.is_cuda:
        partial = torch.mm(x, weight.t(), out_dtype=dtype)
    else:
        partial = x.to(dtype) @ weight.t().to(dtype)
    total = reduce_scatter(partial, group)
    return (total if bias is None else total + bias.to(dtype)).to(x.dtype)


def launch_scatter(config: KernelConfig, product: GroupProduct, dtype: torch.dtype) -> None:
    """Launch the call by packets or by a schedule, a direct one by default; sums are sent in `dtype`."""
    if config.exchange == "packets" and not config.schedule and dtype == product.out.dtype:
        small_m.launch("matmul_reduce_scatter", "scatter", config, product, find_group(product.group).size())
    else:
        launch_joint("matmul_reduce_scatter", config, product, dtype)


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> Tensor:
    return x.new_empty(_require(x, weight, bias, group, reduce_dtype, implementation), weight.shape[0])


def _require(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, reduce_dtype: torch.dtype | None, implementation: str
) -> int:
    """This rank's number of rows. ValueError for arguments that the operator does not take."""
    require_operands("matmul_reduce_scatter", x, weight, bias, implementation)
    return require_rows("matmul_reduce_scatter", x, x.dtype, reduce_dtype, group)


def require_rows(operator: str, x: Tensor, dtype: torch.dtype, reduce_dtype: torch.dtype | None, group: str) -> int:
    """This rank's number of x's rows. ValueError unless ranks divide them, and sums of `dtype` can be sent."""
    rows = divide_first_dim(operator, x, find_group(group).size())
    if reduce_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"{operator}: partial sums of {dtype} travel in {dtype} or torch.float32, not {reduce_dtype}")
    return rows


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _, implementation = inputs
    ctx.group, ctx.has_bias, ctx.implementation = group, bias is not None, pin_backward(implementation)
    save_operands(ctx, x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """C = reduce_scatter(x @ W.T): dx is gather(dC) @ W, overlapped as well, and dW is gather(dC).T @ x."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    operators = torch.ops.stretto
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if needs_x and needs_weight:
        grad_x, gathered = operators.all_gather_matmul_gathered(grad, weight.t(), None, ctx.group, ctx.implementation)
        grad_weight = gathered.t() @ x
    elif needs_x:
        grad_x = operators.all_gather_matmul(grad, weight.t(), None, ctx.group, ctx.implementation)
    elif needs_weight:
        grad_weight = gather_rows(grad, ctx.group).t() @ x
    return grad_x, grad_weight, grad.sum(0) if ctx.has_bias and needs_bias else None, None, None, None


_call = define_operator(
    "matmul_reduce_scatter", _run, fake=_fake, count_flops=count_product_flops, autograd=Autograd(_save, _differentiate)
)
