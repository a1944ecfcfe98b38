# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine: tokens are sent to their experts' ranks, and the results back (expert parallelism).

Expert parallelism, as in Singh's dissertation, section 7.1. With `gather_group`, duplicate token dropping, section
7.3.1: tokens that tensor-parallel ranks have in common are sent once, and gathered after the all-to-all.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.ops.moe.fixed_rows import (
    FixedCombine,
    FixedDispatch,
    FixedRoute,
    find_fixed_route,
    look_for_errors,
    record_rows,
)
from stretto.ops.moe.permutation import (
    CopyOrder,
    copy_tokens,
    multiply_copies,
    require_tokens,
    require_weighted,
    sort_by_expert,
    sum_copies,
    unpermute,
    weigh_and_multiply,
    weigh_tokens,
)
from stretto.ops.moe.routes import CollectiveWrapper, Route, call, find_route
from stretto.ops.operator import find_name, require_agreement

_IMPLEMENTATIONS = ("auto", "library")


@dataclass(frozen=True)
class DispatchHandle:
    """The routing information of a `dispatch`, which `combine` needs to return the rows.

    num_rows: of the rows that were returned. shape: [t, k] of topk_ids. order: of this rank's copies. route: None where
    one rank has all experts.
    """

    num_rows: int
    shape: tuple[int, int]
    order: CopyOrder
    route: Route | FixedRoute | None
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Dispatched:
    """Rows for this rank's experts, sorted by expert.

    rows: [n, h]. offsets: int32 [local experts + 1], on the device; the rows of this rank's expert e are offsets[e] to
    offsets[e + 1], and those from offsets[-1] on are padding. handle: for `combine`.
    """

    rows: Tensor
    offsets: Tensor
    handle: DispatchHandle


def dispatch(
    x: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    *,
    max_rows: int | None = None,
    gather_group: dist.ProcessGroup | None = None,
    wrap_collective: CollectiveWrapper = call,
    implementation: str = "auto",
) -> Dispatched:
    """Send each token's copies to the ranks of its experts: x [t, h], topk_ids [t, k] -> rows [n, h], by expert.

    Expert e is on rank e // (num_experts / ranks) of the group. An expert's rows are in the order of their source rank,
    then of its tokens. group: None, or a group of one rank, has all experts here: nothing is sent, n = t * k, and
    nothing waits for the device. x is bf16, fp16, fp32 or fp64, topk_ids int64 or int32; ids are checked on CPUs, and
    where the host reads the rows' numbers (for others see `permute`). t may differ between ranks, and may be 0; all
    else is the same on all ranks.

    max_rows: None for a dynamic number of rows, which the host reads from the device once per call. Otherwise a fixed
    number of rows to return, padded with zeros: the host does not wait, and the call can be captured in a CUDA graph. t
    is then the same on all ranks. A rank that needs more rows returns NaN for all of them, so that its results, the
    loss and gradients are NaN too. The host detects this later: the next dispatch on the group, or `check_rows`, raises
    a ValueError that names the rank and the number of rows it needs.

    gather_group: another group, whose ranks have parts of the same experts and other tokens. Its ranks' rows are
    gathered after the exchange, and `combine` sums over it on the way back (Singh, section 7.3.1). An expert's rows are
    then in the order of that group's ranks, source ranks and tokens.

    wrap_collective: called in place of each collective, in the backward pass too, as wrap_collective(kind, make), with
    kind "all_to_all", "all_gather" or "reduce_scatter"; make() issues the collective, and its result is returned. In
    the forward pass the exchange of counts is one of them; its make() returns a tuple of tensors. If a collective needs
    the result of another, the calls nest: its make() calls wrap_collective for the other.

    implementation: "auto" or "library", which are the same; there is no kernel yet. x's gradient adds a token's copies
    in the order of topk_ids, in fp32 for 16-bit dtypes (with max_rows: each rank's in fp32, then the ranks', in x's
    dtype, by a reduce-scatter). It cannot be differentiated twice.

    With torch.compile, a group of one rank is part of the graph; with more ranks the graph breaks here. ValueError for
    other shapes, dtypes and numbers of experts, and if ranks make different calls.
    """
    _require_library("dispatch", implementation)
    require_tokens("dispatch", x, topk_ids, num_experts)
    group, gather_group = _find_several(group), _find_several(gather_group)
    world = 1 if group is None else group.size()
    _require_divisible(num_experts, world)
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"dispatch: max_rows is 1 or more, or None for as many as there are, not {max_rows}")
    if group is None and gather_group is None:
        return _dispatch_here(x, topk_ids, num_experts, max_rows)
    return _dispatch_to_ranks(x, topk_ids, num_experts, group, gather_group, max_rows, wrap_collective)


def combine(
    rows: Tensor,
    handle: DispatchHandle,
    topk_weights: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    wrap_collective: CollectiveWrapper = call,
    implementation: str = "auto",
) -> Tensor:
    """Return rows to their tokens' ranks, and sum each token's, weighted: rows [n, h], topk_weights [t, k] -> [t, h].

    rows: the experts' outputs for the rows of `dispatch`, in the same order; handle: the handle of `dispatch`. group,
    wrap_collective and implementation are those of `dispatch`. With its gather_group, rows are summed over that group
    first. The sum over a token's experts is fp32 for 16-bit rows, in the order of topk_ids, and rounded once to rows'
    dtype (with max_rows: once for each rank, whose sums are added by a reduce-scatter). topk_weights may be of another
    floating dtype than rows; its gradient is of its own. It cannot be differentiated twice. ValueError for other
    shapes, dtypes and groups.
    """
    _require_library("combine", implementation)
    require_weighted("combine", rows, topk_weights, handle.shape)
    if rows.shape[0] != handle.num_rows:
        raise ValueError(f"combine: dispatch returned {handle.num_rows} rows with this handle, not {rows.shape[0]}")
    if _find_several(group) is not handle.group:
        raise ValueError("combine takes the group that dispatch was given, and was given another")
    if handle.route is None:
        return unpermute(rows, handle.order.positions, topk_weights)
    return _combine_from_ranks(rows, handle, topk_weights, wrap_collective)


def _dispatch_here(x: Tensor, topk_ids: Tensor, num_experts: int, max_rows: int | None) -> Dispatched:
    order = sort_by_expert(topk_ids, num_experts)
    rows = copy_tokens(x, order)
    if max_rows is not None:
        missing = max_rows - rows.shape[0]
        if missing < 0:
            raise ValueError(
                f"dispatch: rank 0 of a group of one needs {rows.shape[0]} rows, more than max_rows={max_rows}: give "
                f"max_rows={rows.shape[0]} or more, or None"
            )
        rows = torch.cat((rows, rows.new_zeros(missing, rows.shape[1])))
    t, k = topk_ids.shape
    return Dispatched(rows, order.offsets, DispatchHandle(rows.shape[0], (t, k), order, None, None))


@torch.compiler.disable  # a graph break: wrap_collective is a function, and an exchange returns the number of rows
def _dispatch_to_ranks(
    x: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
    gather_group: dist.ProcessGroup | None,
    max_rows: int | None,
    wrap_collective: CollectiveWrapper,
) -> Dispatched:
    groups = tuple(one for one in (group, gather_group) if one is not None)
    look_for_errors(groups[0], x.device)
    (t, k), h = topk_ids.shape, x.shape[1]
    same = f"moe.dispatch of {x.dtype} [., {h}], k={k}, {num_experts} experts, max_rows={max_rows}"
    for one in groups:
        # With max_rows the ranks' tokens are gathered, and the host does not learn how many they are.
        fixed = "" if max_rows is None else f", {t} tokens, {topk_ids.dtype}"
        require_agreement(same + fixed, False, find_name(one), x.device)
    order = sort_by_expert(topk_ids, num_experts)
    if max_rows is None:
        counts = (order.offsets[1:] - order.offsets[:-1]).to(torch.int64)
        with torch.no_grad():
            exact, offsets = find_route(counts, group, gather_group, wrap_collective)
        if sum(exact.sends) != t * k:  # on CPUs it was checked before
            raise ValueError(
                f"dispatch: {t * k - sum(exact.sends)} of topk_ids are no experts: they are numbered 0 to "
                f"{num_experts - 1}"
            )
        rows = _Dispatch.apply(x, order, exact, wrap_collective)
        return Dispatched(rows, offsets, DispatchHandle(rows.shape[0], (t, k), order, exact, group))
    shards, shard = (1, 0) if group is None else (group.size(), group.rank())
    with torch.no_grad():
        route, offsets, needed = find_fixed_route(
            topk_ids, num_experts, max_rows, groups, shards, shard, wrap_collective
        )
        record_rows(groups[0], needed, max_rows)
    rows = FixedDispatch.apply(x, route, wrap_collective)
    return Dispatched(rows, offsets, DispatchHandle(max_rows, (t, k), order, route, group))


@torch.compiler.disable
def _combine_from_ranks(
    rows: Tensor, handle: DispatchHandle, weights: Tensor, wrap_collective: CollectiveWrapper
) -> Tensor:
    if isinstance(handle.route, FixedRoute):
        fixed: Tensor = FixedCombine.apply(rows, weights, handle.route, wrap_collective)
        return fixed
    exact: Tensor = _Combine.apply(rows, weights, handle.order, handle.route, wrap_collective)
    return exact


class _Dispatch(torch.autograd.Function):
    """Copies of tokens, forward along a route; backward, the copies' gradients return and are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: CopyOrder, route: Route, wrap_collective: CollectiveWrapper) -> Tensor:
        ctx.order, ctx.route, ctx.wrap_collective = order, route, wrap_collective
        k = order.positions.shape[1]
        return route.forward(lambda: x.index_select(0, order.slots // k), wrap_collective)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        returned = ctx.route.backward(lambda: grad, ctx.wrap_collective)
        return sum_copies(returned, ctx.order.positions), None, None, None


class _Combine(torch.autograd.Function):
    """Rows back along a route, and weighted sums of them; backward, the tokens' gradients go forward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, order: CopyOrder, route: Route, wrap_collective: CollectiveWrapper
    ) -> Tensor:
        ctx.order, ctx.route, ctx.wrap_collective = order, route, wrap_collective
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        ctx.weights_dtype = weights.dtype
        returned = route.backward(lambda: rows, wrap_collective)
        ctx.save_for_backward(weights if needs_rows else None, returned if needs_weights else None)
        return sum_copies(returned, order.positions, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, returned = ctx.saved_tensors
        order = ctx.order
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        grad_rows = grad_weights = None
        if needs_rows and needs_weights:
            copies, grad_weights = weigh_and_multiply(grad, returned, order.positions, weights)
            grad_rows = ctx.route.forward(lambda: copies, ctx.wrap_collective)
        elif needs_rows:
            grad_rows = ctx.route.forward(lambda: weigh_tokens(grad, weights, order.slots), ctx.wrap_collective)
        elif needs_weights:
            grad_weights = multiply_copies(grad, returned, order.positions)
        if grad_weights is not None:
            grad_weights = grad_weights.to(ctx.weights_dtype)
        return grad_rows, grad_weights, None, None, None


def _find_several(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, or None where it has one rank. ValueError for a rank outside of it."""
    if group is None:
        return None
    find_name(group)
    return None if group.size() == 1 else group


def _require_divisible(num_experts: int, world: int) -> None:
    if num_experts % world:
        nearest = max(round(num_experts / world), 1) * world
        raise ValueError(
            f"dispatch: {num_experts} experts cannot be divided among {world} ranks: a multiple of the group's size "
            f"will do, such as {nearest}"
        )


def _require_library(operator: str, implementation: str) -> None:
    """ValueError for an implementation that there is not."""
    if implementation == "kernel":
        raise ValueError(f'{operator} has no kernel yet: implementation="library" or "auto" will do')
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f'{operator}: implementation is "auto" or "library", not {implementation!r}')
