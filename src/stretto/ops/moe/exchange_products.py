# SPDX-License-Identifier: Apache-2.0
"""Dispatch with the experts' first product, and their last product with combine: products overlap the exchange.

Forward, the first product gathers tokens as they arrive, and sums of some of the last one's columns return while the
others are multiplied. Backward, the gradient of the sums is multiplied as it arrives, and the tokens' gradients return
beside the weight's gradient. It is so with `reduce="rank"` and the kernels' exchange of bf16 and fp16; elsewhere a
product begins when the exchange has ended.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.collectives.schedule import Schedule
from stretto.ops.moe.activation import differentiate_weighed
from stretto.ops.moe.call_route import check_call
from stretto.ops.moe.exchange import (
    Dispatched,
    DispatchHandle,
    Reduce,
    combine,
    dispatch,
    find_handle,
    require_combined,
)
from stretto.ops.moe.grouped.matmul import grouped_matmul, grouped_weight_gradient, multiply_arriving, require_operands
from stretto.ops.moe.permutation import sum_dtype
from stretto.ops.moe.places import Places
from stretto.ops.moe.routes import CollectiveWrapper, call
from stretto.ops.operands import takes_tensors


@takes_tensors
def dispatch_grouped_matmul(
    x: Tensor,
    topk_ids: Tensor,
    weight: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    topk_weights: Tensor | None = None,
    max_rows: int | None = None,
    gather_group: dist.ProcessGroup | None = None,
    reduce: Reduce = "rank",
    wrap_collective: CollectiveWrapper = call,
    implementation: str = "auto",
    schedule: str | Schedule | None = None,
) -> tuple[Tensor, Dispatched]:
    """Send each token to the ranks of its experts, and multiply: x [t, h], weight [e, f, h] -> ([n, f], the dispatch).

    weight: those of this rank's experts, as many on each rank; e times the ranks are the experts that topk_ids [t, k]
    names. The other arguments are those of `dispatch`. The product's rows are those of the dispatch, in its order,
    times their expert's weight's transpose; those of padding are zeros. With reduce="rank" and several ranks rows are
    not copied for each expert, and products by kernels begin on those that have arrived: with a schedule each tile by
    the signals of the messages that bring its rows. Errors are those of `dispatch` and `grouped_matmul`.
    """
    num_experts = len(weight) * (1 if group is None else group.size()) if weight.dim() else 0
    route_call = check_call(
        "dispatch", x, topk_ids, topk_weights, num_experts, group, gather_group, max_rows, wrap_collective,
        implementation, schedule,
    )  # fmt: skip
    if route_call.is_alone or reduce != "rank":
        sent = dispatch(
            x, topk_ids, num_experts, group, topk_weights=topk_weights, max_rows=max_rows, gather_group=gather_group,
            reduce=reduce, wrap_collective=wrap_collective, implementation=implementation, schedule=schedule,
        )  # fmt: skip
        return grouped_matmul(sent.rows, weight, sent.offsets), sent
    require_operands("dispatch_grouped_matmul", x, weight, topk_ids.new_empty(weight.shape[0] + 1, dtype=torch.int32))
    return _dispatch(x, topk_ids, weight, topk_weights, route_call)


@takes_tensors
def grouped_matmul_combine(
    rows: Tensor,
    weight: Tensor,
    sent: Dispatched,
    topk_weights: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    wrap_collective: CollectiveWrapper = call,
) -> Tensor:
    """Multiply each expert's rows, and sum each token's at its rank: rows [n, f], weight [e, h, f] -> [t, h].

    rows: in the order of `sent`, which `dispatch` or `dispatch_grouped_matmul` returned. topk_weights, by which
    products are weighted, group and wrap_collective: of `combine`. With reduce="rank" and several ranks sums of some
    columns return while the others are multiplied, and no product is kept for the backward pass. Errors are those of
    `grouped_matmul` and `combine`.
    """
    handle = sent.handle
    if handle.route is None or handle.reduce != "rank":
        product = grouped_matmul(rows, weight, sent.offsets)
        return combine(product, handle, topk_weights, group, wrap_collective=wrap_collective)
    require_operands("grouped_matmul_combine", rows, weight, sent.offsets)
    require_combined("grouped_matmul_combine", rows, handle, topk_weights, group)
    return _combine(rows, weight, handle, topk_weights, wrap_collective)


@torch.compiler.disable  # a graph break, as in `dispatch`
def _dispatch(
    x: Tensor, topk_ids: Tensor, weight: Tensor, topk_weights: Tensor | None, route_call: Any
) -> tuple[Tensor, Dispatched]:
    handle, route = find_handle("dispatch_grouped_matmul", x, topk_ids, topk_weights, route_call, "rank")
    product = _DispatchProduct.apply(x, weight, Places(route.index, route, route_call.wrap_collective))
    return product, Dispatched(x.new_empty(0, x.shape[1]), route.index.offsets, handle)


@torch.compiler.disable
def _combine(
    rows: Tensor, weight: Tensor, handle: DispatchHandle, topk_weights: Tensor, wrap_collective: CollectiveWrapper
) -> Tensor:
    route = handle.route
    assert route is not None
    places = Places(route.index, route, wrap_collective)
    return _ProductCombine.apply(rows, weight, topk_weights, places, handle.knows(topk_weights))


class _DispatchProduct(torch.autograd.Function):
    """Products of tokens that are sent once to a rank, and gathered there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, places: Places) -> Tensor:
        index, route = places.index, places.route
        needs_x, needs_weight, _ = ctx.needs_input_grad
        tokens, arrivals = places.start(x, keeps=needs_weight)
        rows = tokens if arrivals is None else arrivals.rows
        product = multiply_arriving(rows, weight, index.offsets, index.places, arrivals)
        if arrivals is not None:
            arrivals.wait()
            if route is not None and route.needed is not None:  # so that every product with these rows is NaN
                product[:, :1].masked_fill_(route.needed > len(index.slots), torch.nan)
        ctx.places = places
        ctx.save_for_backward(tokens if needs_weight else None, weight if needs_x else None)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        places: Places = ctx.places
        index, grad = places.index, grad.contiguous()
        tokens, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        room = 0
        if weight is not None:
            finish, room = places.start_product_back(grad, weight.transpose(1, 2)), places.room_of_sums
        if tokens is not None:
            grad_weight = grouped_weight_gradient(grad, places.spread(tokens), index.offsets, room=room)
        if weight is not None:
            grad_x = finish()
        return grad_x, grad_weight, None


class _ProductCombine(torch.autograd.Function):
    """Weighted sums of products at their tokens' ranks. The backward pass needs no products: it weighs their rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, weights: Tensor, places: Places, is_sent: bool) -> Tensor:
        route = places.route
        assert route is not None
        everyones = route.weights if is_sent else None
        if everyones is None:
            everyones = route.send(lambda: weights, places.wrap_collective)

        ctx.places, ctx.weights_dtype = places, weights.dtype
        ctx.save_for_backward(rows, weight, everyones)
        return places.multiply_and_give_back(lambda: rows, weight, everyones)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        places: Places = ctx.places
        index = places.index
        rows, weight, weights = ctx.saved_tensors
        _, needs_weight, needs_weights, *_ = ctx.needs_input_grad
        grad, arrivals = places.start(grad.contiguous(), keeps=False)
        dtype = sum_dtype(rows.dtype)
        tokens = places.spread(grad, arrivals) if needs_weight else None
        of_rows = multiply_arriving(grad, weight.transpose(1, 2), index.offsets, index.places, arrivals)
        if arrivals is not None:
            arrivals.wait()
        if not len(index.positions):  # no rank has sent a token here
            grad_weights = places.give_back(weights.to(dtype)).to(ctx.weights_dtype) if needs_weights else None
            return torch.zeros_like(rows), torch.zeros_like(weight), grad_weights, None, None
        factors = weights.reshape(-1).index_select(0, index.slots).to(dtype)
        found = differentiate_weighed(rows, of_rows, factors)
        grad_weight = grad_weights = None
        if needs_weights:
            products = found.products.index_select(0, index.positions.reshape(-1))
            finish = places.start_back(torch.where(index.is_here, products.view_as(weights), 0))
        if tokens is not None:
            grad_weight = grouped_weight_gradient(tokens, found.weighed, index.offsets)
        if needs_weights:
            grad_weights = finish().to(ctx.weights_dtype)
        return found.of_rows, grad_weight, grad_weights, None, None
