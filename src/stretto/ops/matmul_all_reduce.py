# SPDX-License-Identifier: Apache-2.0
"""GEMM + all-reduce, the same bits on all ranks: of few rows, for decoding, in one launch (`small_m`), else by `joint`.

Of more rows each rank adds up a share, as copy engines bring it beside the product, and sends the sum on.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from stretto.collectives.schedule import Schedule
from stretto.ops import small_m
from stretto.ops.choices import find_config
from stretto.ops.config import LIBRARY, KernelConfig, encode_implementation
from stretto.ops.gemm import GroupProduct
from stretto.ops.invariant.matmul import multiply_all_reduce, require_plain
from stretto.ops.joint.launch import launch_joint
from stretto.ops.joint.registry import encode_schedule
from stretto.ops.operands import flatten_rows, require_operands, require_out, restore_dims, takes_tensors
from stretto.ops.operator import (
    Autograd,
    all_reduce,
    copy_to,
    count_product_flops,
    define_operator,
    differentiate_product,
    find_group,
    find_name,
    save_operands,
)
from stretto.suggestions import require_one_of

GRAD_CONVENTIONS = ("sum-of-losses", "replicated-loss")


@takes_tensors
def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    bias: Tensor | None = None,
    grad_convention: str = "sum-of-losses",
    out: Tensor | None = None,
    invariant: bool = False,
    implementation: str | KernelConfig = "auto",
    schedule: str | Schedule | None = None,
) -> Tensor:
    """x times weight's transpose, all-reduced over the group: [..., k], [n, k] -> [..., n], bitwise equal on all ranks.

    bf16, fp16 or fp32, all of one dtype. A rank's partial sums are computed in fp32, sent in x's dtype, added in fp32
    in rank order, and rounded. bias: [n], the same on all ranks, added once. group: None for all ranks. x is
    contiguous; weight is, or its transpose. out: where to write the output, without gradients: [..., n] of x's dtype,
    contiguous. implementation: "auto" (the fastest measured, or a default), "kernel" (Stretto's, or it raises),
    "library" (a GEMM, then an all-reduce) or a `KernelConfig`. schedule: how sums travel: an all-reduce's algorithm by
    name, or any verified `Schedule` of one (docs/tutorial-kernel.md).

    grad_convention: the meaning of the ranks' losses. Let G_s be the gradient of rank s's loss with respect to its
    output:

    - "sum-of-losses": each rank has its own loss, and their sum is differentiated, as in
      `torch.distributed.nn.functional.all_reduce`. The gradients of x and weight are (sum of G_s over ranks s) @ weight
      and (sum of G_s).T @ x; the backward pass has an all-reduce. The bias's gradient on a rank is that of its own
      output, G_r summed over the rows: add up the ranks'.
    - "replicated-loss": all ranks compute one and the same loss from the same output, as in Megatron-LM's
      RowParallelLinear, and it counts once. They are G @ weight and G.T @ x, where G is the same on all ranks, and the
      backward pass has no collective. The bias's is G summed over the rows, the same on all ranks. There are no second
      derivatives.

    invariant: a row of the output has the same bits whatever the number of rows and the other rows, and on 1, 2, 4 or 8
    ranks of the same whole k, which 8 divides: k is added up in 8 parts by one binary tree through ranks, in fp32, and
    rounded once (`stretto.ops.invariant`). Without out, schedule and configurations.

    With one replicated loss, "sum-of-losses" makes gradients of x and weight too large by the number of ranks: of
    loss = out.sum() and 4 ranks, 4 times weight.sum(0) for each row of x.

    ValueError for other input and for a rank outside of the group; PeerError for a rank that does not call.
    NotImplementedError for unsupported second derivatives.
    """
    how, name = encode_implementation(implementation), find_name(group)
    if schedule is not None:
        how = encode_schedule("matmul_all_reduce", schedule, how, name)
    require_one_of(GRAD_CONVENTIONS, grad_convention=grad_convention)
    rows = flatten_rows("matmul_all_reduce", x)
    if invariant:
        require_plain("matmul_all_reduce", how, out, schedule)
        return restore_dims(multiply_all_reduce(rows, weight, bias, name, grad_convention, how), x, x.shape[0])
    if out is not None:
        require_operands("matmul_all_reduce", rows, weight, bias, how)
        shape = *x.shape[:-1], weight.shape[0]
        require_out("matmul_all_reduce", out, shape, x.dtype, x, weight, bias)
        _call(rows, weight, bias, name, how, grad_convention, out=out.flatten(0, -2))
        return out
    return restore_dims(_call(rows, weight, bias, name, how, grad_convention), x, x.shape[0])


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    implementation: str,
    grad_convention: str = "sum-of-losses",
    out: Tensor | None = None,
) -> Tensor:
    """The output, in `out` if there is one."""

    def compute(config: KernelConfig, out: Tensor | None = None) -> Tensor:
        return compute_all_reduce(config, x, weight, bias, group, out)

    # The convention is among the options since ranks compare them: their backward passes would wait for each other.
    config = find_config(
        "matmul_all_reduce", x, weight, bias, group, implementation, grad_convention, run=compute,
        check=lambda: require_operands("matmul_all_reduce", x, weight, bias, implementation),
    )  # fmt: skip
    return compute(config, out)


def compute_all_reduce(
    config: KernelConfig, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, out: Tensor | None
) -> Tensor:
    """The output by this configuration, in `out` if there is one."""
    (m, k), n = x.shape, weight.shape[0]
    if m == 0 or n == 0 or k == 0:  # nothing to wait for
        return copy_to(out, x.new_zeros(m, n) if bias is None else x.new_zeros(m, n) + bias)
    if config == LIBRARY:
        total = all_reduce(x @ weight.t(), group)
        return copy_to(out, total if bias is None else total + bias)
    out = x.new_empty(m, n) if out is None else out
    launch_all_reduce(config, GroupProduct(x, weight, bias, out, group))
    return out


def launch_all_reduce(config: KernelConfig, product: GroupProduct) -> None:
    """Launch the call by packets or by a schedule, two shots' by default."""
    if config.schedule or config.exchange == "tiles":
        launch_joint("matmul_all_reduce", config, product, product.out.dtype)
    else:
        form = "one-shot" if config.shots == 1 else "two-shot"
        small_m.launch("matmul_all_reduce", form, config, product, find_group(product.group).size())


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, implementation: str) -> Tensor:
    require_operands("matmul_all_reduce", x, weight, bias, implementation)
    return x.new_empty(x.shape[0], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group, _, grad_convention = inputs
    ctx.group, ctx.has_bias, ctx.is_replicated = group, bias is not None, grad_convention == "replicated-loss"
    save_operands(ctx, x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Each rank's partial sums are in all ranks' outputs: gradients of losses that differ are summed over the ranks."""
    return *differentiate_product(ctx, grad, None if ctx.is_replicated else all_reduce), None, None, None


_call = define_operator(
    "matmul_all_reduce", _run, fake=_fake, count_flops=count_product_flops, autograd=Autograd(_save, _differentiate)
)
