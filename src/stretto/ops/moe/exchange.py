# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine: tokens are sent to their experts' ranks, and the results back (expert parallelism).

Expert parallelism, as in Singh's dissertation, section 7.1. With `gather_group`, duplicate token dropping, section
7.3.1: tokens that tensor-parallel ranks have in common are sent once, and gathered after the all-to-all.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.collectives.schedule import Schedule
from stretto.ops.moe.call_route import RouteCall, can_send, check_call, find_several
from stretto.ops.moe.permutation import (
    copy_tokens,
    multiply_copies,
    require_weighted,
    sort_by_expert,
    sum_copies,
    unpermute,
)
from stretto.ops.moe.routes import CollectiveWrapper, Route, call
from stretto.ops.operands import takes_tensors

Reduce = Literal["rank", "choice"]
"""The ranks that sum a token's rows: each of its experts' ranks first, or its own, in the order of its choices."""


@dataclass(frozen=True)
class DispatchHandle:
    """The routing information of a `dispatch`, which `combine` needs to return the rows.

    num_rows: of the rows that were returned. shape: [t, k] of topk_ids. positions: int64 [t, k], the row of each copy,
    where one rank has all experts; elsewhere the route. reduce: of `dispatch`. weights: those that it was given, with
    their version.
    """

    num_rows: int
    shape: tuple[int, int]
    positions: Tensor | None
    route: Route | None
    group: dist.ProcessGroup | None
    reduce: Reduce
    weights: tuple[Tensor, int] | None = None

    def knows(self, topk_weights: Tensor) -> bool:
        """True if these are the weights that `dispatch` was given, and nobody has written to them since."""
        if self.weights is None or topk_weights.is_inference():
            return False
        weights, version = self.weights
        return weights is topk_weights and weights._version == version


@dataclass(frozen=True)
class Dispatched:
    """Rows for this rank's experts, sorted by expert.

    rows: [n, h]; [0, h] of a `dispatch_grouped_matmul` that gathers them as it multiplies. offsets: int32 [local
    experts + 1], on the device; the rows of this rank's expert e are offsets[e] to offsets[e + 1], and those from
    offsets[-1] on are padding. handle: for `combine`.
    """

    rows: Tensor
    offsets: Tensor
    handle: DispatchHandle


@takes_tensors
def dispatch(
    x: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    *,
    topk_weights: Tensor | None = None,
    max_rows: int | None = None,
    gather_group: dist.ProcessGroup | None = None,
    reduce: Reduce = "rank",
    wrap_collective: CollectiveWrapper = call,
    implementation: str = "auto",
    schedule: str | Schedule | None = None,
) -> Dispatched:
    """Send each token to the ranks of its experts, and copy it there: x [t, h], topk_ids [t, k] -> rows [n, h].

    A token is sent once to each of these ranks, however many of its k experts a rank has. Rows are sorted by expert.
    Expert e is on rank e // (num_experts / ranks) of the group. An expert's rows are in the order of their source rank,
    then of its tokens. group: None, or a group of one rank, has all experts here: nothing is sent, n = t * k, and
    nothing waits for the device. x is bf16, fp16, fp32 or fp64, topk_ids int64 or int32; ids are checked on CPUs, and
    where the host reads the rows' numbers (for others see `permute`). t may differ between ranks, and may be 0; all
    else is the same on all ranks.

    topk_weights: those that `combine` will be given, [t, k]: they are sent with the ids, so that it need not send
    them. They are used only there; without them the results are the same.

    max_rows: None for a dynamic number of rows, which the host reads from the device once per call. Otherwise a fixed
    number of rows to return, padded with zeros: the host does not wait, and the call can be captured in a CUDA graph. t
    is then the same on all ranks. A rank that needs more rows returns NaN for all of them, so that its results, the
    loss and gradients are NaN too. The host detects this later: the next dispatch on the group, or `check_rows`, raises
    a ValueError that names the rank and the number of rows it needs.

    gather_group: another group, whose ranks have parts of the same experts and other tokens. Its ranks' rows are
    gathered after the exchange, and `combine` sums over it on the way back (Singh, section 7.3.1). An expert's rows are
    then in the order of that group's ranks, source ranks and tokens. Kernels send each row to all ranks that have parts
    of its expert instead, as many bytes in one step; rows are then in the order of all these ranks' numbers in the job,
    and a token's rank adds all parts at once, in that order too.

    reduce: where `combine` sums a token's rows, and the backward pass its copies' gradients, both in fp32 for 16-bit
    dtypes. "rank": each rank sums those of its experts, in the order of topk_ids, rounds, and sends one row; the
    token's rank adds up those of all ranks in their order. So the bits depend on which rank has which expert; they are
    the same in each run. "choice": all rows are sent back, and added in the order of topk_ids: the bits are those of
    one rank with all experts (without gather_group, which sums parts of rows).

    wrap_collective: called in place of each collective, in the backward pass too, as wrap_collective(kind, make), with
    kind "all_to_all", "all_gather" or "reduce_scatter"; make() issues the collective, and its result is returned. In
    the forward pass the exchanges of counts and of experts are two of them; their make() may return a tuple of
    tensors. If a collective needs the result of another, the calls nest: its make() calls wrap_collective for the
    other.

    implementation: "kernel" stores rows into the ranks' symmetric memory, and with max_rows a rank receives only its
    own. "library" sends them by the group's all-to-all, and with max_rows gathers all tokens. "auto": the kernel
    between GPUs that NVLink connects, if there is no gather_group, else the library. It cannot be differentiated twice.

    schedule: a verified all-to-all, by whose messages kernels move all rows of this call, of its `combine` and of the
    backward passes: an algorithm's name ("direct-all-to-all"), or a compiled `Schedule` of as many ranks, such as a
    two-step one. The bits are those without. Not with gather_group.

    With torch.compile, a group of one rank is part of the graph; with more ranks the graph breaks here. ValueError for
    other shapes, dtypes and numbers of experts, and if ranks make different calls.
    """
    if reduce not in get_args(Reduce):
        raise ValueError(f'dispatch: reduce must be "rank" or "choice", not {reduce!r}')
    route_call = check_call(
        "dispatch", x, topk_ids, topk_weights, num_experts, group, gather_group, max_rows, wrap_collective,
        implementation, schedule,
    )  # fmt: skip
    if route_call.is_alone:
        return _dispatch_here(x, topk_ids, num_experts, max_rows, reduce)
    return _dispatch_to_ranks(x, topk_ids, topk_weights, route_call, reduce)


@takes_tensors
def combine(
    rows: Tensor,
    handle: DispatchHandle,
    topk_weights: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    wrap_collective: CollectiveWrapper = call,
) -> Tensor:
    """Return rows to their tokens' ranks, and sum each token's, weighted: rows [n, h], topk_weights [t, k] -> [t, h].

    rows: the experts' outputs for the rows of `dispatch`, in the same order; handle: the handle of `dispatch`. group
    and wrap_collective are those of `dispatch`, whose `reduce` says how a token's rows are summed, and whose
    implementation runs here too. With its gather_group, rows, or the ranks' sums of them, are summed over that group
    first. topk_weights may be of another floating dtype than rows; its gradient is of its own. It cannot be
    differentiated twice. ValueError for other shapes, dtypes and groups.
    """
    require_combined("combine", rows, handle, topk_weights, group)
    if handle.positions is not None:
        return unpermute(rows, handle.positions, topk_weights)
    return _combine_from_ranks(rows, handle, topk_weights, wrap_collective)


def require_combined(
    operator: str, rows: Tensor, handle: DispatchHandle, topk_weights: Tensor, group: dist.ProcessGroup | None
) -> None:
    require_weighted(operator, rows, topk_weights, handle.shape)
    if rows.shape[0] != handle.num_rows:
        raise ValueError(f"{operator}: dispatch returned {handle.num_rows} rows with this handle, not {rows.shape[0]}")
    if find_several(group) is not handle.group:
        raise ValueError(f"{operator} takes the group that dispatch was given, and was given another")


def _dispatch_here(x: Tensor, topk_ids: Tensor, num_experts: int, max_rows: int | None, reduce: Reduce) -> Dispatched:
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
    return Dispatched(rows, order.offsets, DispatchHandle(rows.shape[0], (t, k), order.positions, None, None, reduce))


@torch.compiler.disable  # a graph break: wrap_collective is a function, and an exchange returns the number of rows
def _dispatch_to_ranks(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, route_call: RouteCall, reduce: Reduce
) -> Dispatched:
    handle, route = find_handle("dispatch", x, topk_ids, topk_weights, route_call, reduce)
    rows = _Dispatch.apply(x, route, reduce, route_call.wrap_collective)
    return Dispatched(rows, route.index.offsets, handle)


def find_handle(
    operator: str, x: Tensor, topk_ids: Tensor, topk_weights: Tensor | None, route_call: RouteCall, reduce: Reduce
) -> tuple[DispatchHandle, Route]:
    # With "choice" the backward pass needs weights at the experts, and sends them.
    given = topk_weights if topk_weights is not None and reduce == "rank" and can_send(topk_weights) else None
    route = route_call.find(operator, x, topk_ids, given, reduce, starts=operator == "dispatch_grouped_matmul")
    version = None if given is None else (given, given._version)
    shape = topk_ids.shape[0], topk_ids.shape[1]
    return DispatchHandle(len(route.index.slots), shape, None, route, route_call.group, reduce, version), route


@torch.compiler.disable
def _combine_from_ranks(
    rows: Tensor, handle: DispatchHandle, weights: Tensor, wrap_collective: CollectiveWrapper
) -> Tensor:
    if handle.reduce == "choice":
        out: Tensor = _CombineChoices.apply(rows, weights, handle.route, wrap_collective)
    else:
        out = _Combine.apply(rows, weights, handle.route, handle.knows(weights), wrap_collective)
    return out


class _Dispatch(torch.autograd.Function):
    """Tokens along a route, and a copy for each row; backward, gradients are summed, and returned as `reduce` says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, reduce: Reduce, wrap_collective: CollectiveWrapper) -> Tensor:
        ctx.route, ctx.reduce, ctx.wrap_collective = route, reduce, wrap_collective
        return route.spread(route.send(lambda: x, wrap_collective, lends=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        route: Route = ctx.route
        if ctx.reduce == "choice":
            grad_x = sum_copies(route.give_choices_back(lambda: grad, ctx.wrap_collective), route.choices)
        else:
            grad_x = route.sum_back(lambda: grad, None, ctx.wrap_collective)
        return grad_x, None, None, None


class _Combine(torch.autograd.Function):
    """Rows summed by place, weighted, and back along a route; backward, the tokens' gradients go forward again.

    Weights are sent to the experts' ranks, where the rows are, and products with rows, the weights' gradients, return.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, route: Route, is_sent: bool, wrap_collective: CollectiveWrapper
    ) -> Tensor:
        """is_sent: the route has these weights."""
        ctx.route, ctx.wrap_collective = route, wrap_collective
        everyones = route.weights if is_sent else None
        if everyones is None:
            everyones = route.send(lambda: weights, wrap_collective)
        ctx.save_for_backward(everyones, rows if ctx.needs_input_grad[1] else None)
        return route.sum_back(lambda: rows, everyones, wrap_collective)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        route, index, wrap_collective = ctx.route, ctx.route.index, ctx.wrap_collective
        weights, rows = ctx.saved_tensors
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        grad_rows = grad_weights = None
        tokens = route.send(lambda: grad, wrap_collective, lends=True)
        if needs_rows:
            grad_rows = route.spread(tokens, weights)
        if needs_weights:
            grad_weights = route.give_back(
                lambda: multiply_copies(tokens, rows, index.positions, index.is_here), wrap_collective
            ).to(weights.dtype)
        return grad_rows, grad_weights, None, None, None


class _CombineChoices(torch.autograd.Function):
    """Rows back along a route, one a choice, and weighted sums of them in the order of topk_ids."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, route: Route, wrap_collective: CollectiveWrapper) -> Tensor:
        ctx.route, ctx.wrap_collective = route, wrap_collective
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        returned = route.give_choices_back(lambda: rows, wrap_collective)
        ctx.weights_dtype = weights.dtype
        ctx.save_for_backward(weights if needs_rows else None, returned if needs_weights else None)
        return sum_copies(returned, route.choices, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        weights, returned = ctx.saved_tensors
        grad_rows = grad_weights = None
        if weights is not None:
            everyones = ctx.route.send(lambda: weights, ctx.wrap_collective)
            grad_rows = ctx.route.spread(ctx.route.send(lambda: grad, ctx.wrap_collective, lends=True), everyones)
        if returned is not None:
            grad_weights = multiply_copies(grad, returned, ctx.route.choices).to(ctx.weights_dtype)
        return grad_rows, grad_weights, None, None
