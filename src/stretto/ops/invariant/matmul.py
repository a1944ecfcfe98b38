# SPDX-License-Identifier: Apache-2.0
"""The invariant product of a rank, and its all-reduce and reduce-scatter: one torch.library operator of three forms."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stretto.ops.config import IMPLEMENTATIONS
from stretto.ops.invariant.kernels import multiply_and_sum, multiply_leaves
from stretto.ops.operands import divide_first_dim, flatten_rows, require_operands, restore_dims, takes_tensors
from stretto.ops.operator import (
    Autograd,
    all_reduce,
    count_product_flops,
    define_operator,
    differentiate_product,
    exchange_rows,
    find_group,
    gather_rows,
    require_agreement,
    save_operands,
)
from stretto.ops.row_sums.kernel import SumOperands, add_in_parts, count_rows_at_a_time, find_packets_obstacle
from stretto.tiles import INTERPRETED

LEAVES = 8
"""The parts of k, each with a sum of its own; a group has 1, 2, 4 or 8 ranks."""

_ELEMENTS = 1 << 22  # products that torch keeps at a time


@takes_tensors
def invariant_matmul(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, leaves: int = 1) -> Tensor:
    """x times weight's transpose, + bias: [..., k], [n, k] -> [..., n]; a row's bits depend on no other row.

    Nor do they depend on the number of rows, or on which other columns the weight has here: for products that all ranks
    compute of a whole k. leaves=8: the bits of `matmul_all_reduce` and `matmul_reduce_scatter` with invariant=True, on
    any number of ranks. bf16, fp16 or fp32, all of one dtype; sums are fp32, rounded once. Differentiable, by products
    that are not invariant. ValueError for other input, and for a k that the leaves do not divide.
    """
    if leaves not in (1, 2, 4, LEAVES):
        raise ValueError(f"invariant_matmul: leaves must be 1, 2, 4 or {LEAVES}, not {leaves!r}")
    rows = flatten_rows("invariant_matmul", x)
    return restore_dims(_call(rows, weight, bias, "", f"local {leaves}", "sum-of-losses", "auto"), x, x.shape[0])


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
    """fp32 [m, n]: the tree over the leaves of k, each a sum of elementwise products; for processes without kernels.

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
        out[first : first + step] = add_by_tree(sums)
    return out


def add_by_tree(parts: Sequence[Tensor]) -> Tensor:
    """The parts' sum: neighbours first, then sums of neighbours, and so on. Their number is a power of two."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def scatter_by_tree(partial: Tensor, group: str) -> Tensor:
    """This rank's rows [m / world, n] of the sum of all ranks' fp32 [m, n], by an all-to-all."""
    return partial if find_group(group).size() == 1 else add_by_tree(exchange_rows(partial, group).unbind())


def reduce_by_tree(partial: Tensor, bias: Tensor | None, dtype: torch.dtype, group: str) -> Tensor:
    """The sum of all ranks' fp32 [m, n], + bias, rounded to dtype, on all ranks; each adds up some rows."""
    world, rows = find_group(group).size(), partial.shape[0]
    if world == 1:
        return round_sum(partial, bias, dtype)
    padded = functional.pad(partial, (0, 0, 0, -rows % world))
    return gather_rows(round_sum(scatter_by_tree(padded, group), bias, dtype), group)[:rows]


def round_sum(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return (total if bias is None else total + bias.float()).to(dtype)


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: str, form: str, grad_convention: str, implementation: str
) -> Tensor:
    leaves = _require(x, weight, bias, group, form)
    if not group:
        return _multiply(x, weight, bias, leaves, x.dtype)
    (m, k), n, world = x.shape, weight.shape[0], find_group(group).size()
    rows = m // world if form == "reduce_scatter" else m
    name = f"invariant matmul_{form}"
    call = f"{name} m={m} n={n} k={k} {x.dtype} {(bias is None, grad_convention, implementation)}"
    require_agreement(call, False, group, x.device)
    if world == 1 or m == 0 or n == 0:
        return _multiply(x, weight, bias, leaves, x.dtype)[:rows]
    if goes_by_packets(name, m, n, group, x.device, implementation):
        # Rows of each rank at a time: what a scatter sends to each is a part of what an all-reduce sends.
        step = count_rows_at_a_time(n, torch.float32, world)
        each = x.unflatten(0, (world, rows)) if form == "reduce_scatter" else x[None]

        def add(some: slice) -> tuple[Tensor, Tensor]:
            part = each[:, some].flatten(0, 1)
            sums = SumOperands(bias, None, None, None, x.new_empty(len(part) // len(each), n))
            return multiply_and_sum(name, _FORMS[form], part, weight, leaves, sums, group)

        return add_in_parts(add, rows, step)[1]
    partial = _multiply(x, weight, None, leaves, torch.float32)
    if form == "all_reduce":
        return reduce_by_tree(partial, bias, x.dtype, group)
    return round_sum(scatter_by_tree(partial, group), bias, x.dtype)


_FORMS = {"all_reduce": "push", "reduce_scatter": "scatter"}
"""The form in which each operator's tiles are sent as packets."""


def goes_by_packets(name: str, m: int, n: int, group: str, device: torch.device, implementation: str) -> bool:
    """True if a call's sums go by packets. ValueError where a kernel was asked for and none can run."""
    obstacle = find_packets_obstacle(group, device, m, n, torch.float32, implementation)
    if implementation == "kernel" and obstacle:
        raise ValueError(f'{name}: no kernel can run: {obstacle}; implementation="library" can')
    return implementation != "library" and not obstacle


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, leaves: int, dtype: torch.dtype) -> Tensor:
    """This rank's product, + bias, of dtype."""
    if x.is_cuda or INTERPRETED.value:
        return multiply_leaves(x, weight, bias, leaves, dtype)
    return round_sum(multiply_by_torch(x, weight, leaves), bias, dtype)


def _require(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, form: str) -> int:
    """The leaves of a rank. ValueError for operands that the operator does not take."""
    name = f"matmul_{form}" if group else "invariant_matmul"
    require_operands(name, x, weight, bias)
    if not group:
        leaves = int(form.removeprefix("local "))
        if x.shape[1] % leaves or x.shape[1] == 0:
            nearest = max(1, round(x.shape[1] / leaves)) * leaves
            raise ValueError(f"{name}: {leaves} leaves do not divide k, {x.shape[1]}: {nearest} will do")
        return leaves
    world = find_group(group).size()
    if form == "reduce_scatter":
        divide_first_dim(name, x, world)
    return count_leaves(name, x.shape[1], world)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, form: str) -> Tensor:
    _require(x, weight, bias, group, form)
    world = find_group(group).size() if form == "reduce_scatter" else 1
    return x.new_empty(x.shape[0] // world, weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.group, ctx.form, grad_convention, _ = inputs
    ctx.has_bias, ctx.is_replicated = bias is not None, grad_convention == "replicated-loss"
    save_operands(ctx, x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients as of `matmul_all_reduce` and `matmul_reduce_scatter`."""
    exchange = {"reduce_scatter": gather_rows, "all_reduce": all_reduce}.get(ctx.form)
    return *differentiate_product(ctx, grad, None if ctx.is_replicated else exchange), None, None, None, None


_call = define_operator(
    "invariant_matmul", _run, fake=_fake, count_flops=count_product_flops, autograd=Autograd(_save, _differentiate)
)
