# SPDX-License-Identifier: Apache-2.0
"""Sorts copies of tokens by their experts, and sums them back, with gradients that are gathers.

The gradient of a gather of rows is a scatter with additions, which GPUs do by atomic additions in any order. Here each
token knows the rows of its copies, so that gradients gather, too, and are added in the order of a token's experts: the
bits are the same in every run.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.ops.moe import copies_kernels
from stretto.ops.moe.copies_kernels import DTYPES, sum_dtype
from stretto.ops.operator import is_traced


class Permuted(NamedTuple):
    """Tokens sorted by expert: what `permute` returns.

    rows: [t * k, h], the rows of an expert in the order of their tokens. offsets: int32 [num_experts + 1]; expert e's
    rows are offsets[e] to offsets[e + 1]. positions: int64 [t, k], the row of each token's copy.
    """

    rows: Tensor
    offsets: Tensor
    positions: Tensor


class CopyOrder(NamedTuple):
    """The order of copies of tokens by expert.

    slots: int64 [t * k], for each row the copy that it is (token * k + slot, of the token's k). positions and offsets:
    those of `Permuted`.
    """

    slots: Tensor
    positions: Tensor
    offsets: Tensor


def permute(x: Tensor, topk_ids: Tensor, num_experts: int) -> Permuted:
    """Copy each token once for each of its experts, sorted by expert: x [t, h], topk_ids [t, k] -> rows [t * k, h].

    bf16, fp16, fp32 or fp64; topk_ids is int64 or int32, with 0 <= id < num_experts. Nothing waits for the device. On
    CPUs an id out of range is a ValueError; on GPUs, where a check would wait, its copy lies outside of all experts'
    rows and its result is undefined. x's gradient adds a token's copies in the order of topk_ids, in fp32 for 16-bit
    dtypes. ValueError for other shapes and dtypes, and for k > num_experts.
    """
    require_tokens("permute", x, topk_ids, num_experts)
    order = sort_by_expert(topk_ids, num_experts)
    return Permuted(copy_tokens(x, order), order.offsets, order.positions)


def unpermute(rows: Tensor, positions: Tensor, topk_weights: Tensor) -> Tensor:
    """Sum each token's rows, weighted: rows [n, h], positions [t, k], topk_weights [t, k] -> [t, h].

    The reverse of `permute`, which gives the positions. Each occurs once, n >= t * k, and rows that no position names
    have no influence. The sum is fp32 for 16-bit rows, in the order of a token's experts, and rounded once to rows'
    dtype. topk_weights may be of another floating dtype than rows (fp32 beside bf16, as a rule); its gradient is of its
    own. ValueError for other shapes and dtypes.
    """
    require_weighted("unpermute", rows, topk_weights, positions.shape)
    if rows.shape[0] < positions.numel():
        raise ValueError(f"unpermute: {positions.numel()} positions need as many rows or more, not {rows.shape[0]}")
    result: Tensor = _Unpermute.apply(rows, positions, topk_weights)
    return result


def sort_by_expert(topk_ids: Tensor, num_experts: int) -> CopyOrder:
    """The order of the copies, on the ids' device, which nothing waits for."""
    in_order, slots = torch.sort(topk_ids.reshape(-1), stable=True)
    experts = torch.arange(num_experts + 1, device=topk_ids.device, dtype=topk_ids.dtype)
    offsets = torch.searchsorted(in_order, experts, out_int32=True)
    return CopyOrder(slots, invert(slots).view_as(topk_ids), offsets)


def invert(permutation: Tensor) -> Tensor:
    """The inverse of a permutation, int64 [n]."""
    numbers = torch.arange(permutation.shape[0], device=permutation.device)
    return torch.empty_like(numbers).scatter_(0, permutation, numbers)


def copy_tokens(x: Tensor, order: CopyOrder) -> Tensor:
    """The copies of x's tokens in this order, with a gradient."""
    result: Tensor = _Permute.apply(x, order.slots, order.positions)
    return result


def sum_copies(
    rows: Tensor, positions: Tensor, weights: Tensor | None = None, is_valid: Tensor | None = None
) -> Tensor:
    """Sum each token's rows, times `weights` [t, k]: rows [n, h], positions [t, k] -> [t, h] of rows' dtype.

    is_valid: bool [t, k], False for positions that name no row: their copies count as zeros, whatever is read there.
    """
    if copies_kernels.suits_kernels(rows, weights):
        result: Tensor = copies_kernels.sum_on_gpu(rows, positions, weights, is_valid)
        return result
    dtype = sum_dtype(rows.dtype)
    total = None
    for slot in range(positions.shape[1]):  # not one gather [t, k, h], which needs k times the memory
        copies = rows.index_select(0, positions[:, slot]).to(dtype)
        if is_valid is not None:
            copies = copies.masked_fill(~is_valid[:, slot, None], 0)  # no product: it may be NaN
        if weights is not None:
            copies = copies * weights[:, slot, None].to(dtype)
        total = copies if total is None else total + copies
    assert total is not None
    return total.to(rows.dtype)


def weigh_tokens(tokens: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """Each copy's token times its weight: tokens [t, h], weights [t, k], slots [n] -> [n, h] of tokens' dtype."""
    if copies_kernels.suits_kernels(tokens, weights):
        result: Tensor = copies_kernels.weigh_on_gpu(tokens, weights, slots)
        return result
    dtype = sum_dtype(tokens.dtype)
    factors = weights.reshape(-1).index_select(0, slots).to(dtype)
    copies = tokens.index_select(0, slots // weights.shape[1])
    return (copies.to(dtype) * factors[:, None]).to(tokens.dtype)


def multiply_copies(tokens: Tensor, rows: Tensor, positions: Tensor, is_valid: Tensor | None = None) -> Tensor:
    """The scalar product of each token with each of its rows: [t, h], [n, h], [t, k] -> [t, k] of `sum_dtype`."""
    if copies_kernels.suits_kernels(tokens, rows):
        result: Tensor = copies_kernels.multiply_on_gpu(tokens, rows, positions, is_valid)
        return result
    dtype = sum_dtype(rows.dtype)
    factor = tokens.to(dtype)
    products = []
    for slot in range(positions.shape[1]):
        copies = rows.index_select(0, positions[:, slot]).to(dtype)
        if is_valid is not None:
            copies = copies.masked_fill(~is_valid[:, slot, None], 0)
        products.append((factor * copies).sum(1))
    return torch.stack(products, 1)


def weigh_and_multiply(tokens: Tensor, rows: Tensor, positions: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_copies` for a gradient `tokens` [t, h] of its result: of rows [n, h], of weights [t, k].

    No two copies have one position; gradients of rows that no position names are zeros. The second is of `sum_dtype`.
    """
    if copies_kernels.suits_kernels(tokens, rows, weights):
        both: tuple[Tensor, Tensor] = copies_kernels.weigh_and_multiply_on_gpu(tokens, rows, positions, weights)
        return both
    return weigh_named(tokens, weights, positions, rows.shape[0]), multiply_copies(tokens, rows, positions)


def weigh_named(tokens: Tensor, weights: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """As `weigh_tokens`, by the position of each copy, of which no two are one: [num_rows, h], zeros elsewhere."""
    copies = positions.numel()
    if copies == 0:
        return tokens.new_zeros(num_rows, tokens.shape[1])
    numbers = torch.arange(copies, device=positions.device)
    slots = torch.zeros(num_rows, dtype=torch.int64, device=positions.device)
    slots = slots.scatter_(0, positions.reshape(-1), numbers)
    weighed = weigh_tokens(tokens, weights, slots)
    if num_rows == copies:
        return weighed
    is_named = torch.zeros(num_rows, dtype=torch.bool, device=positions.device)
    is_named = is_named.scatter_(0, positions.reshape(-1), True)
    return weighed.masked_fill(~is_named[:, None], 0)


class _Permute(torch.autograd.Function):
    """rows[i] = x[token of copy i]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return x.index_select(0, slots // positions.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        return sum_copies(grad, positions), None, None


class _Unpermute(torch.autograd.Function):
    """out[t] = sum over a token's copies of weight * row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        needs_rows, _, needs_weights = ctx.needs_input_grad
        ctx.rows, ctx.weights_dtype = rows.shape[0], weights.dtype
        ctx.save_for_backward(positions, weights if needs_rows else None, rows if needs_weights else None)
        return sum_copies(rows, positions, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        positions, weights, rows = ctx.saved_tensors
        needs_rows, _, needs_weights = ctx.needs_input_grad
        grad_rows = grad_weights = None
        if needs_rows and needs_weights:
            grad_rows, grad_weights = weigh_and_multiply(grad, rows, positions, weights)
        elif needs_rows:
            grad_rows = weigh_named(grad, weights, positions, ctx.rows)
        elif needs_weights:
            grad_weights = multiply_copies(grad, rows, positions)
        if grad_weights is not None:
            grad_weights = grad_weights.to(ctx.weights_dtype)
        return grad_rows, None, grad_weights


def require_tokens(operator: str, x: Tensor, topk_ids: Tensor, num_experts: int) -> None:
    """ValueError unless x is [t, h] of a floating dtype and topk_ids [t, k] of ids of experts on its device."""
    if x.dim() != 2 or topk_ids.dim() != 2 or x.shape[0] != topk_ids.shape[0]:
        raise ValueError(
            f"{operator} takes x [t, h] and topk_ids [t, k] of as many tokens, not {list(x.shape)} and "
            f"{list(topk_ids.shape)}"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"{operator} takes x of {', '.join(map(str, DTYPES))}, not {x.dtype}")
    if topk_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{operator}: topk_ids is torch.int64 or torch.int32, not {topk_ids.dtype}: convert it")
    if topk_ids.device != x.device:
        raise ValueError(f"{operator}: x is on {x.device} and topk_ids on {topk_ids.device}: move one of them")
    if not 1 <= topk_ids.shape[1] <= num_experts:
        raise ValueError(
            f"{operator}: topk_ids has {topk_ids.shape[1]} experts a token (its second dim), and there are "
            f"{num_experts}: 1 to {num_experts} will do"
        )
    if topk_ids.device.type == "cpu" and topk_ids.numel() and not is_traced(topk_ids):
        low, high = (int(bound) for bound in torch.aminmax(topk_ids))
        if low < 0 or high >= num_experts:
            raise ValueError(
                f"{operator}: topk_ids has {low if low < 0 else high}, but experts are numbered 0 to {num_experts - 1}"
            )


def require_weighted(operator: str, rows: Tensor, topk_weights: Tensor, shape: tuple[int, ...]) -> None:
    """ValueError unless rows is [n, h] and topk_weights of this shape [t, k], both floating and on one device."""
    if rows.dim() != 2 or topk_weights.shape != shape:
        raise ValueError(
            f"{operator} takes rows [n, h] and, for these tokens, topk_weights {list(shape)}, not {list(rows.shape)} "
            f"and {list(topk_weights.shape)}"
        )
    for name, one in (("rows", rows), ("topk_weights", topk_weights)):
        if one.dtype not in DTYPES:
            raise ValueError(f"{operator} takes {name} of {', '.join(map(str, DTYPES))}, not {one.dtype}")
    if rows.device != topk_weights.device:
        raise ValueError(
            f"{operator}: rows is on {rows.device} and topk_weights on {topk_weights.device}: move one of them"
        )
