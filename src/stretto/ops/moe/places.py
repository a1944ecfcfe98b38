# SPDX-License-Identifier: Apache-2.0
"""Tokens at their experts' ranks without a copy for each expert, for experts that gather rows by index.

`send_tokens` and `return_sums` are the two halves of a layer of experts whose products gather their rows, and sum each
token's rows here. Their gradients are each other's transposes: the gradient of the sums is sent as tokens are, and that
of the tokens returns as sums do.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.ops.moe.call_route import can_send, check_call
from stretto.ops.moe.routes import CollectiveWrapper, PlaceIndex, Route, call
from stretto.ops.moe.sorting import sort_copies


@dataclass(frozen=True)
class SentTokens:
    """Tokens that this rank's experts process, one a place, in the order of their source ranks.

    tokens: [places, h]. weights: [places, k], those of a place's choices, of all ranks' experts. index: the rows of
    this rank's experts; row i is the token of place `index.places()[i]`, and a place's rows are `index.positions` where
    `index.is_here`. route, wrap_collective: for `return_sums`; route is None where one rank has all experts.
    """

    tokens: Tensor
    weights: Tensor
    index: PlaceIndex
    route: Route | None
    wrap_collective: CollectiveWrapper


def send_tokens(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    *,
    max_rows: int | None = None,
    gather_group: dist.ProcessGroup | None = None,
    wrap_collective: CollectiveWrapper = call,
    implementation: str = "auto",
) -> SentTokens:
    """Send each token and its weights to the ranks of its experts: x [t, h], topk_ids and topk_weights [t, k].

    The arguments are those of `dispatch`, and so are errors. A rank that needs more than max_rows has NaN in each of
    its tokens. The gradients of x and topk_weights add those of all places in fp32, in the order of ranks.
    """
    route_call = check_call(
        "send_tokens", x, topk_ids, topk_weights, num_experts, group, gather_group, max_rows, wrap_collective,
        implementation,
    )  # fmt: skip
    if route_call.is_alone and max_rows is None:
        index = PlaceIndex(*sort_copies(topk_ids, num_experts))
        return SentTokens(x, topk_weights, index, None, wrap_collective)
    if route_call.is_alone:
        raise ValueError("send_tokens: one rank with all experts has as many rows as choices: give max_rows=None")
    return _send(x, topk_ids, topk_weights, route_call)


def return_sums(sums: Tensor, sent: SentTokens) -> Tensor:
    """Sum what the ranks have for each token's places, at its rank: sums [places, h] -> [t, h].

    sums: in the order of `sent.tokens`, such as the weighted sums of this rank's rows of each place. They are added in
    fp32, in the order of ranks, and rounded once. ValueError for other shapes.
    """
    if sums.dim() != 2 or len(sums) != len(sent.tokens):
        raise ValueError(f"return_sums takes sums [{len(sent.tokens)}, h], one a place, not {list(sums.shape)}")
    return sums if sent.route is None else _return(sums, sent.route, sent.wrap_collective)


@torch.compiler.disable  # a graph break, as in `dispatch`
def _send(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, route_call: Any) -> SentTokens:
    given = topk_weights if can_send(topk_weights) else None
    route = route_call.find("send_tokens", x, topk_ids, given, "rank")
    tokens, weights = _Send.apply(x, topk_weights, route, route_call.wrap_collective)
    return SentTokens(tokens, weights, route.index, route, route_call.wrap_collective)


@torch.compiler.disable
def _return(sums: Tensor, route: Route, wrap_collective: CollectiveWrapper) -> Tensor:
    returned: Tensor = _Return.apply(sums, route, wrap_collective)
    return returned


class _Send(torch.autograd.Function):
    """Tokens and weights along a route; backward, gradients of places return and are summed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, route: Route, wrap_collective: CollectiveWrapper
    ) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.wrap_collective = route, wrap_collective
        tokens = route.send(lambda: x, wrap_collective)
        everyones = route.weights
        if everyones is None:
            everyones = route.send(lambda: weights, wrap_collective)
        return route.mark_excess(tokens), everyones

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor) -> Any:
        # Also what is not used on this rank, such as one without places: others wait for it.
        returned = [
            ctx.route.give_back(lambda one=one: one, ctx.wrap_collective) if needs else None
            for one, needs in zip((grad, grad_weights), ctx.needs_input_grad, strict=False)
        ]
        return *returned, None, None


class _Return(torch.autograd.Function):
    """Sums of places back along a route; backward, the tokens' gradients go forward."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, route: Route, wrap_collective: CollectiveWrapper) -> Tensor:
        ctx.route, ctx.wrap_collective = route, wrap_collective
        return route.give_back(lambda: sums, wrap_collective)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.route.send(lambda: grad, ctx.wrap_collective), None, None
