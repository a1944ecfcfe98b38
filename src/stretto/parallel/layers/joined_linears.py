# SPDX-License-Identifier: Apache-2.0
"""Linears that take the same sharded tokens, as one: queries, keys and values of separate weights.

Each would make its own product with gathered tokens, and its own reduce-scatter of the input's gradient, which that of
a few KV heads is too small to hide. Here weights are put together for one product (a copy of them a pass), and their
gradients taken apart.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.parallel.comm.autograd import is_asked_for, once_differentiable
from stretto.parallel.comm.graph_functions import GraphCode
from stretto.parallel.layers.linear import ParallelLinear
from stretto.parallel.layers.linear_plan import LinearPlan
from stretto.parallel.layers.sharded_module import note_features
from stretto.parallel.layers.token_shards import GatheredInput, TokenShards, TokenStandIn
from stretto.parallel.layout import writes_of


class JoinedLinears:
    """Colwise linears, weights [out, in], that an attention calls with the stand-in of its input: the first that it
    calls makes all outputs, and the others return theirs."""

    def __init__(self, linears: Sequence[ParallelLinear]) -> None:
        self._linears = tuple(linears)
        self._places = {linear: place for place, linear in enumerate(linears)}
        self._in_graphs = GraphCode(
            self._multiply_in_graph, keeps_inputs=lambda: linears[0].plan.shard.gradients.deferred is not None
        )

    def output_of(self, linear: ParallelLinear, stand_in: TokenStandIn) -> Tensor:
        """One linear's output [batch, seq, out / X]."""
        if linear not in stand_in.outputs:
            stand_in.outputs |= self._multiply(stand_in.part)
        return stand_in.outputs.pop(linear)

    def _multiply(self, part: Tensor) -> dict[nn.Module, Tensor]:
        plans = [linear.plan for linear in self._linears]
        tokens, cast = plans[0].tokens, plans[0].shard.precision.cast_operand
        assert tokens is not None
        for linear in self._linears:
            linear.check_input(part)
        gathered = tokens.gathered_input(part)
        outputs = self._multiply_rows(gathered, cast(part), self._biases()).split(_widths(plans), -1)
        return {linear: note_features(y, "x") for linear, y in zip(self._linears, outputs, strict=True)}

    def output_in_graph(self, linear: ParallelLinear, part: Tensor, tokens: TokenShards) -> Tensor:
        """The same of the part that a stand-in is for, in a compiled graph: one operator makes all outputs."""
        if tokens.traced_outputs is None:
            widths = _widths([each.plan for each in self._linears])
            # Through these the graph leads to the weights.
            keys = [each.in_graphs.key for each in self._linears]
            x = linear.plan.shard.precision.cast_operand(part)
            y = self._in_graphs((*tokens.shape, sum(widths)), x, *keys, *self._biases())
            tokens.traced_outputs = y.split(widths, -1)
        return tokens.traced_outputs[self._places[linear]]

    def _multiply_in_graph(self, part: Tensor, *keys_and_biases: Tensor) -> Tensor:
        return self._multiply_rows(GatheredInput(), part, keys_and_biases[len(self._linears) :])

    def _multiply_rows(self, gathered: GatheredInput, part: Tensor, biases: Sequence[Tensor]) -> Tensor:
        plans, weights = [linear.plan for linear in self._linears], [linear.weight for linear in self._linears]
        bias, rows = torch.cat(list(biases)) if biases else None, part.flatten(0, -2).contiguous()
        assert plans[0].tokens is not None
        return plans[0].tokens.whole(_OneProduct.apply(plans, gathered, bias, rows, *weights))

    def _biases(self) -> list[Tensor]:
        cast = self._linears[0].plan.shard.precision.cast_operand
        return [cast(each.plan.used(each.local_bias())) for each in self._linears if each.bias is not None]


def join(modules: Sequence[nn.Module]) -> None:
    """Have an attention's linears be computed together, if they are several that can be."""
    linears = [
        each
        for each in modules
        if isinstance(each, ParallelLinear) and each.plan.tokens and not each.plan.is_transposed
        if each.plan.shard.scaling is None  # one product takes one scale
    ]
    if len(modules) == len(linears) > 1 and len({each.bias is None for each in linears}) == 1:
        joined = JoinedLinears(linears)
        for each in linears:
            each.joined = joined


def _widths(plans: Sequence[LinearPlan]) -> list[int]:
    """The numbers of output features of each linear that this rank computes."""
    return [sum(some.stop - some.start for some in plan.used_rows) or plan.shard.rows for plan in plans]


def _join(plans: Sequence[LinearPlan], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Gathered weights [out, in] as one matrix [in, all outs], in the other operand's dtype."""
    return torch.cat([plan.used(rows) for plan, rows in zip(plans, weights, strict=True)]).to(dtype).t()


class _OneProduct(torch.autograd.Function):
    """Multiplies as `_Linear3D`, by several parameters, whose biases are put together."""

    @staticmethod
    def forward(
        ctx: Any, plans: Sequence[LinearPlan], gathered: GatheredInput, bias: Tensor | None, *tensors: Tensor
    ) -> Tensor:
        x, *parameters = tensors
        is_recorded = bool(ctx.next_functions)
        weights = [
            plan.shard.gather(parameter, is_recorded=is_recorded)
            for plan, parameter in zip(plans, parameters, strict=True)
        ]
        matrix = _join(plans, [weight.rows for weight in weights], x.dtype)
        y, x = plans[0].make_output(x, matrix, bias, gathered)
        ctx.plans, ctx.parameters, keeps = plans, parameters, plans[0].keeps_weights
        ctx.versions = [weight.version for weight in weights] if keeps else list(map(writes_of, parameters))
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, *(weight.rows if keeps else None for weight in weights))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plans, parameters = ctx.plans, ctx.parameters
        x, *weights = ctx.saved_tensors
        gradient, pending = gradient.contiguous(), None
        if ctx.needs_input_grad[3]:
            weights = [
                plan.weight_for_backward(weight, parameter, version).rows
                for plan, weight, parameter, version in zip(plans, weights, parameters, ctx.versions, strict=True)
            ]
            pending, _ = plans[0].start_input_gradient(gradient, _join(plans, weights, gradient.dtype))
        parts = gradient.split(_widths(plans), -1)
        for place, (plan, parameter, part) in enumerate(
            zip(plans, parameters, parts, strict=True), start=1 + ctx.has_bias
        ):
            if is_asked_for(ctx, place):
                plan.make_weight_gradient(parameter, x, part)
        grad_bias = gradient.sum(0) if ctx.needs_input_grad[2] else None
        grad_x = None if pending is None else pending.wait()
        return None, None, grad_bias, grad_x, *(None for _ in parameters)
