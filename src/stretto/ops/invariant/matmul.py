# SPDX-License-Identifier: Apache-2.0
"""The invariant product of a rank, and its all-reduce and reduce-scatter: one torch.library operator of three forms."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from stretto.ops.config import IMPLEMENTATIONS
from stretto.ops.invariant.ranks import reduce_by_tree, round_sum, scatter_by_tree
from stretto.ops.operator import (
    Autograd,
    all_reduce,
    define_operator,
    find_group,
    flatten_rows,
    gather_rows,
    require_operands,
    restore_dims,
    save_operands,
)

LEAVES = 8
"""The parts of k, each with a sum of its own; a group has 1, 2, 4 or 8 ranks."""

_ELEMENTS = 1 << 22  # products that torch keeps at a time


def invariant_matmul(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """x times weight's transpose, + bias: [..., k], [n, k] -> [..., n]; a row's bits depend on no other row.

    Nor do they depend on the number of rows, or on which other columns the weight has here. They equal those of
    `matmul_all_reduce` and `matmul_reduce_scatter` with invariant=True, of the same whole k over 1, 2, 4 or 8 ranks.
    bf16, fp16 or fp32, all of one dtype; sums are fp32, rounded once. Differentiable, by products that are not
    invariant. ValueError for other input, and for a k that is no multiple of 8.
    """
    rows = flatten_rows("invariant_matmul", x)
    return restore_dims(_call(rows, weight, bias, "", "local", "sum-of-losses", "auto"), x, x.shape[0])


def multiply_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, grad_convention: str, implementation: str
) -> Tensor:
    """`matmul_all_reduce` with invariant=True, of rows [m, k]."""
    return _call(x, weight, bias, group, "all_reduce", grad_convention, implementation)


def multiply_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, implementation: str) -> Tensor:
    """`matmul_reduce_scatter` with invariant=True, of rows [m, k]."""
    return _call(x, weight, bias, group, "reduce_scatter", "sum-of-losses", implementation)


def require_plain(operator: str, implementation: str, out: object, schedule: object) -> None:
    """ValueError for options that an invariant call does not have."""
    if out is not None or schedule is not None or implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{operator} with invariant=True has one order of additions: it takes no out, no schedule and no "
            f"configuration, but implementation={', '.join(map(repr, IMPLEMENTATIONS))}"
        )


def count_leaves(operator: str, k: int, world: int) -> int:
    """The leaves that each rank holds. ValueError for other numbers of ranks than 1, 2, 4, 8, and for an uneven k."""
    if world not in (1, 2, 4, 8):
        raise ValueError(f"{operator} with invariant=True takes a group of 1, 2, 4 or 8 ranks, not {world}")
    if k * world % LEAVES or k == 0:
        nearest = max(1, round(k * world / LEAVES)) * LEAVES
        raise ValueError(
            f"{operator} with invariant=True adds up k in {LEAVES} equal parts, which do not divide {k * world} (of "
            f"all ranks): {nearest} will do"
        )
    return LEAVES // world


def multiply_by_torch(x: Tensor, weight: Tensor, leaves: int) -> Tensor:
    """fp32 [m, n]: the tree over the leaves of k, each a sum of elementwise products.

    A library's product of matrices may add up in another order for another m or n; torch's sum along contiguous rows
    has one order for one length.
    """
    (m, k), n = x.shape, weight.shape[0]
    size = k // leaves
    out = x.new_empty(m, n, dtype=torch.float32)
    step = max(1, _ELEMENTS // max(1, n * size))
    wide_x, wide_weight = x.float(), weight.float().contiguous()
    for first in range(0, m, step):
        rows = wide_x[first : first + step]
        sums = []
        for leaf in range(leaves):
            part = slice(leaf * size, (leaf + 1) * size)
            sums.append((rows[:, None, part] * wide_weight[None, :, part]).sum(-1))
        while len(sums) > 1:
            sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
        out[first : first + step] = sums[0]
    return out


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    form: str,
    grad_convention: str,
    implementation: str,
) -> Tensor:
    leaves = _require(x, weight, bias, group, form)
    partial = multiply_by_torch(x, weight, leaves)
    match form:
        case "local":
            return round_sum(partial, bias, x.dtype)
        case "all_reduce":
            return reduce_by_tree(partial, bias, x.dtype, group)
    return round_sum(scatter_by_tree(partial, group), bias, x.dtype)


def _require(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, form: str) -> int:
    """The leaves of a rank. ValueError for operands that the operator does not take."""
    name = "invariant_matmul" if form == "local" else f"matmul_{form}"
    require_operands(name, x, weight, bias)
    world = find_group(group).size() if group else 1
    if form == "reduce_scatter" and x.shape[0] % world:
        more = -(-x.shape[0] // world) * world
        raise ValueError(f"{name}: {world} ranks do not divide x's {x.shape[0]} rows: {more} rows will do")
    return count_leaves(name, x.shape[1], world)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, form: str, *_: object) -> Tensor:
    _require(x, weight, bias, group, form)
    world = find_group(group).size() if form == "reduce_scatter" else 1
    return x.new_empty(x.shape[0] // world, weight.shape[0])


def _count_flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    return 2 * x[0] * prod(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.group, ctx.form, grad_convention, _ = inputs
    ctx.has_bias, ctx.is_replicated = bias is not None, grad_convention == "replicated-loss"
    save_operands(ctx, x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients as of `matmul_all_reduce` and `matmul_reduce_scatter`."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    total = grad = grad.contiguous()
    if (needs_x or needs_weight) and ctx.form == "reduce_scatter":
        total = gather_rows(grad, ctx.group)
    elif (needs_x or needs_weight) and ctx.form == "all_reduce" and not ctx.is_replicated:
        total = all_reduce(grad, ctx.group)
    grad_bias = grad.sum(0) if ctx.has_bias and needs_bias else None
    return (
        total @ weight if needs_x else None, total.t() @ x if needs_weight else None, grad_bias,
        None, None, None, None,
    )  # fmt: skip


_call = define_operator(
    "invariant_matmul", _run, fake=_fake, count_flops=_count_flops, autograd=Autograd(_save, _differentiate)
)
