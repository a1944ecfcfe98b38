# SPDX-License-Identifier: Apache-2.0
"""The experts of a mixture of experts on a grid: tensor, expert and data parallelism together (TED; Singh, chapter 7).

The axis `expert` divides the experts, so that tokens are sent to their experts' ranks and back (all-to-alls over
expert). x cuts each expert's inner features, y the hidden ones, as of any other MLP, and the weights' shards are
gathered over what expert leaves of z. All ranks of x have the same tokens. What becomes of them (`TokenFlow.of`):

    dropped     Each rank of x sends its part of them to the experts; there rows are gathered over x, and products
                summed by a reduce-scatter (duplicate token dropping, section 7.3.1). At last outputs are gathered over
                x.
    repeated    Each rank of x sends all, and products are summed by an all-reduce (TED without dropping).
    here        No token travels, for one rank has all experts; what x sums are tokens, of which there are fewer.
    distinct    Each rank of x has its own tokens (sequence sharding): as dropped, without the first and the last step.
    folded      The ranks of x are among those of expert: each sends its part to whole experts.

The gradient of the hidden features and of the experts' weights is complete, and equal, on ranks that have the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.axes import EXPERT
from stretto.execution import ExpertReduce
from stretto.huggingface.experts import ExpertsKind
from stretto.ops.moe import (
    ReplicaPlacement,
    combine,
    dispatch,
    gated_activation,
    grouped_matmul,
    grouped_weight_gradient,
)
from stretto.ops.moe.activation import is_silu
from stretto.ops.moe.experts import differentiate_gate, gate_tokens
from stretto.ops.moe.grouped.matmul import take_rows
from stretto.ops.moe.grouped.tile_order import Arrivals
from stretto.ops.moe.permutation import multiply_copies, sum_copies, sum_dtype
from stretto.ops.moe.places import Places, find_places, run_beside
from stretto.parallel.comm.autograd import is_asked_for, scale_gradient, sum_gradient
from stretto.parallel.comm.collectives import (
    Pending,
    all_reduce,
    collective,
    mark_experts,
    own,
    start_all_reduce,
)
from stretto.parallel.comm.graph_functions import GraphCode
from stretto.parallel.comm.kept_outputs import is_given_back, is_recomputed, keep_output
from stretto.parallel.grid import Grid
from stretto.parallel.layers.expert_replicas import ExpertReplicas
from stretto.parallel.layers.sharded_module import ShardedModule, check_features, note_features
from stretto.parallel.layers.token_shards import cut_tokens, gather_tokens, own_tokens
from stretto.parallel.layers.weight_shard import WeightShard
from stretto.parallel.layout import local

T = TypeVar("T")

# What recomputation keeps of each kind of collective of `dispatch` and `combine`, by its name in KEPT_IN.
_KEPT_AS = {
    "all_to_all": "exchanged rows",
    "all_gather": "gathered tokens",
    "reduce_scatter": "scattered sums",
    "moe_reduce_scatter": "summed product",
}


@dataclass(frozen=True)
class ExpertProduct:
    """One of the two products of experts' MLPs: rows [n, in] times each expert's weight [experts here, out, in].

    output_reduce_group sums the output, input_grad_reduce_group the gradient of the rows (None: nothing does). feeds:
    as what recomputation keeps what the output is sent for, so that it is not made again; None if it is needed.
    is_transposed: the parameter is [experts, in, out].
    """

    shard: WeightShard
    output_reduce_group: dist.ProcessGroup | None
    input_grad_reduce_group: dist.ProcessGroup | None
    keeps_weights: bool
    hides_all_reduce: bool
    feeds: str | None = None
    is_transposed: bool = False
    replicas: ExpertReplicas | None = None

    def gather(self, parameter: Tensor, placement: ReplicaPlacement | None, *, is_recorded: bool = False) -> Tensor:
        """The parameter of the experts here, and of the replicas that a placement has."""
        rows = self.shard.gather(parameter, is_recorded=is_recorded).rows
        return rows if placement is None or self.replicas is None else self.replicas.hold(rows, placement)

    @property
    def placement(self) -> ReplicaPlacement | None:
        """Of replicas, in this step."""
        return None if self.replicas is None else self.replicas.placement

    def orient(self, parameter: Tensor) -> Tensor:
        """The weight [experts here, out, in], of a parameter or a gathered one."""
        return parameter.transpose(1, 2) if self.is_transposed else parameter

    def multiply(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """The output, summed over ranks. If it will not be read, its values are arbitrary."""
        is_unread = self.feeds is not None and is_given_back(self.feeds)

        def make() -> Tensor:
            if is_unread:
                return rows.new_empty(rows.shape[0], weight.shape[1])
            product = grouped_matmul(rows, weight, offsets)
            return product if group is None else all_reduce(own(product), group)

        group = self.output_reduce_group
        return keep_output("product" if group is None else "summed product", make)

    def make_weight_gradient(
        self,
        parameter: nn.Parameter,
        rows: Tensor,
        gradient: Tensor,
        offsets: Tensor,
        placement: ReplicaPlacement | None,
        tokens: Tensor | None = None,
        room: int = 0,
    ) -> None:
        """Compute the weight gradient now, or defer it if requested. tokens (of rows), room: as in `grouped_matmul`."""
        make = partial(self._reduce_weight_gradient, parameter, rows, gradient, offsets, placement, tokens)
        deferred = self.shard.gradients.deferred
        if deferred is None:
            make(room)
        else:
            deferred.append(partial(make, 0))

    def _reduce_weight_gradient(
        self,
        parameter: nn.Parameter,
        rows: Tensor,
        gradient: Tensor,
        offsets: Tensor,
        placement: ReplicaPlacement | None,
        tokens: Tensor | None,
        room: int,
    ) -> None:
        operands = (rows, gradient) if self.is_transposed else (gradient, rows)
        found = grouped_weight_gradient(*operands, offsets, tokens=tokens, room=room)
        if placement is not None and self.replicas is not None:
            found = self.replicas.return_home(found, placement)
        self.shard.start_reduction(parameter, found)


class _Multiply(torch.autograd.Function):
    """Takes the DTensor parameter itself: its gradient goes there by `start_reduction`, not through autograd."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parameter: Tensor, offsets: Tensor, plan: ExpertProduct) -> Tensor:
        placement = plan.placement
        weight = plan.orient(plan.gather(parameter, placement, is_recorded=bool(ctx.next_functions)))
        ctx.plan, ctx.parameter, ctx.placement = plan, parameter, placement
        ctx.save_for_backward(rows, offsets, weight if plan.keeps_weights else None)
        return plan.multiply(rows, weight, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plan: ExpertProduct = ctx.plan
        rows, offsets, weight = ctx.saved_tensors
        gradient, pending = gradient.contiguous(), None
        if ctx.needs_input_grad[0]:
            weight = plan.orient(plan.gather(ctx.parameter, ctx.placement)) if weight is None else weight
            grad_rows = grouped_matmul(gradient, weight.transpose(1, 2), offsets)
            group = plan.input_grad_reduce_group
            pending = Pending(grad_rows) if group is None else start_all_reduce(grad_rows, group)
            if not plan.hides_all_reduce:
                pending.wait()
        if is_asked_for(ctx, 1):
            plan.make_weight_gradient(ctx.parameter, rows, gradient, offsets, ctx.placement)
        return None if pending is None else pending.wait(), None, None, None


@dataclass
class _Returning:
    """Gradients on their way back to tokens' ranks, between the two halves of a backward pass.

    needs_x, needs_weights: whether there are such gradients. is_ahead: whether something else runs on their way.
    finish: returns x's. of_weights: those of places' weights, or of_own_weights: of this rank's tokens'.
    """

    needs_x: bool
    needs_weights: bool
    is_ahead: bool
    finish: Callable[[], Tensor] | None = None
    of_weights: Tensor | None = None
    of_own_weights: Tensor | None = None


@dataclass(frozen=True)
class _Sent:
    """Tokens on their way to their experts' ranks, between the two halves of a forward pass.

    weights: of places. receive, arrivals: of `Places.begin`. own_weights: of this rank's tokens, for sums of choices.
    """

    places: Places
    weights: Tensor
    receive: Callable[[], Tensor]
    arrivals: Arrivals | None
    returning: _Returning
    own_weights: Tensor | None = None


class _SendTokens(torch.autograd.Function):
    """Begins to send tokens x [t, h] and their weights [t, k] to places; backward, awaits their gradients.

    Returns a tensor [1] for the functions that take what it has sent, of which only the gradient's way matters. What is
    between the two runs while tokens travel, and in the backward pass while their gradients do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        places: Places,
        columns: int,
        is_ahead: bool,
        note: Callable[[_Sent], None],
    ) -> Tensor:
        """columns: of `Places.start`. is_ahead: something else is called before the products. note: takes what they
        need."""
        needs_x, needs_weights, *_ = ctx.needs_input_grad
        ctx.places, ctx.returning = places, _Returning(needs_x, needs_weights, is_ahead)
        weights = places.send_weights(weights)
        note(_Sent(places, weights, *places.begin(x, columns, is_ahead=is_ahead), ctx.returning))
        return x.new_empty(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        returning: _Returning = ctx.returning
        of_x = None if returning.finish is None else returning.finish()
        of_weights = returning.of_own_weights
        if returning.of_weights is not None:
            of_weights = ctx.places.give_back(returning.of_weights)
        returning.finish = returning.of_weights = returning.of_own_weights = None
        return of_x, of_weights, None, None, None, None


class _MultiplyTokens(torch.autograd.Function):
    """The weighted sum of each sent token's experts, SiLU-gated MLPs. Saves places' tokens, and gate and up.

    Products begin on tokens, and on gradients of sums, that have arrived; the tokens' gradients return under the
    gradient of the first product's weight, and what else runs before the backward pass of `_SendTokens`. Takes the
    DTensor parameters themselves, as `_Multiply` does, and gathers them in its order.
    """

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, up: Tensor, down: Tensor, x: Tensor, sent: _Sent, products: Sequence[ExpertProduct]
    ) -> Tensor:
        is_recorded, places, index = bool(ctx.next_functions), sent.places, sent.places.index
        weights, arrivals = sent.weights, sent.arrivals
        tokens = x if places.route is None else sent.receive()
        of_up, of_down = products
        placement = of_up.placement
        is_here = None if places.route is None else index.is_here
        gated: Tensor | None = None

        def gate() -> Tensor:
            nonlocal gated
            numbers, rows = index.places().to(torch.int32), tokens if arrivals is None else arrivals.rows
            gated, inner = gate_tokens(rows, gate_up, index.offsets, numbers, is_recorded, arrivals)
            return inner

        def activate() -> Tensor:
            return gated_activation(inner) if gated is None else gated

        gate_up = of_up.gather(up, placement, is_recorded=is_recorded)
        inner = keep_output("product", gate)
        if arrivals is not None:
            arrivals.keep(tokens)
        whole_down = of_down.gather(down, placement, is_recorded=is_recorded)
        ctx.products, ctx.up, ctx.down, ctx.places, ctx.placement = products, up, down, places, placement
        ctx.returning = sent.returning
        kept = [one if products[0].keeps_weights else None for one in (gate_up, whole_down)]  # both do, or none
        ctx.save_for_backward(tokens, weights, inner, index.slots, index.positions, is_here, index.offsets, *kept)
        return places.multiply_and_give_back(activate, whole_down, weights, keep_output if is_recomputed() else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_up, of_down = ctx.products
        tokens, weights, inner, slots, positions, is_here, offsets, up, down = ctx.saved_tensors
        places: Places = ctx.places
        returning: _Returning = ctx.returning
        placement: ReplicaPlacement | None = ctx.placement
        gradient, arrivals = places.start(gradient.contiguous(), ctx.down.shape[2], keeps=False)
        numbers = (slots // positions.shape[1]).to(torch.int32)
        factors = weights.reshape(-1).index_select(0, slots).to(sum_dtype(tokens.dtype))
        down = of_down.gather(ctx.down, placement) if down is None else down
        of_inner, gated, products = differentiate_gate(gradient, down, offsets, inner, numbers, factors, arrivals)
        if arrivals is not None:
            arrivals.wait()
        if is_asked_for(ctx, 2):
            of_down.make_weight_gradient(ctx.down, gated, take_rows(gradient, numbers), offsets, placement)
        needs_x = ctx.needs_input_grad[0] and returning.needs_x
        if needs_x:
            up = of_up.gather(ctx.up, placement) if up is None else up
            transposed = up.transpose(1, 2)
            returning.finish = places.start_product_back(of_inner, transposed, is_ahead=returning.is_ahead)
        if is_asked_for(ctx, 1):
            room = places.room if needs_x else 0
            of_up.make_weight_gradient(ctx.up, tokens, of_inner, offsets, placement, numbers, room)
        if ctx.needs_input_grad[0] and returning.needs_weights:
            of_weights = products.index_select(0, positions.reshape(-1)).view_as(weights).to(weights.dtype)
            returning.of_weights = of_weights if is_here is None else of_weights.masked_fill(~is_here, 0)
        return torch.zeros(1, dtype=gradient.dtype, device=gradient.device), None, None, None, None, None


class _CopyRows(torch.autograd.Function):
    """A row for each choice of the sent tokens; backward, they are summed, and begin to return."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, sent: _Sent, reduce: ExpertReduce) -> Tensor:
        ctx.places, ctx.returning, ctx.reduce = sent.places, sent.returning, reduce
        tokens, route = sent.receive(), sent.places.route
        assert route is not None
        if sent.arrivals is not None:
            sent.arrivals.keep(tokens)
        return route.spread(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        places: Places = ctx.places
        returning: _Returning = ctx.returning
        route, index, gradient = places.route, places.index, gradient.contiguous()
        assert route is not None

        def give_back() -> Tensor:
            if ctx.reduce == "choice":
                return sum_copies(route.give_choices_back(lambda: gradient, places.wrap_collective), route.choices)
            return route.sum_back(lambda: gradient, None, places.wrap_collective)

        if returning.needs_x and returning.is_ahead and ctx.reduce == "rank":
            sums = sum_copies(gradient, index.positions, None, index.is_here)
            returning.finish = places.start_back(sums, is_ahead=True)
        elif returning.needs_x:
            returning.finish = run_beside(give_back, gradient, is_ahead=returning.is_ahead)
        return gradient.new_zeros(1), None, None


class _SumRows(torch.autograd.Function):
    """Weighted sums of rows at their tokens' ranks; backward, the tokens' gradients go forward again."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, rows: Tensor, sent: _Sent, reduce: ExpertReduce) -> Tensor:
        places, route = sent.places, sent.places.route
        assert route is not None
        ctx.places, ctx.returning, ctx.reduce = places, sent.returning, reduce
        if reduce == "rank":
            ctx.save_for_backward(sent.weights, rows if sent.returning.needs_weights else None)
            return route.sum_back(lambda: rows, sent.weights, places.wrap_collective)
        returned = route.give_choices_back(lambda: rows, places.wrap_collective)
        ctx.save_for_backward(sent.weights, returned if sent.returning.needs_weights else None)
        return sum_copies(returned, route.choices, sent.own_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        places: Places = ctx.places
        returning: _Returning = ctx.returning
        route, index, gradient = places.route, places.index, gradient.contiguous()
        assert route is not None
        weights, rows = ctx.saved_tensors
        tokens = route.send(lambda: gradient, places.wrap_collective, lends=True)
        of_rows = route.spread(tokens, weights)
        if returning.needs_weights and ctx.reduce == "rank":
            returning.of_weights = multiply_copies(tokens, rows, index.positions, index.is_here)
        elif returning.needs_weights:
            returning.of_own_weights = multiply_copies(gradient, rows, route.choices).to(weights.dtype)
        return gradient.new_zeros(1), of_rows, None, None


class _AddBias(torch.autograd.Function):
    """rows [n, out] + bias [experts here, out], each row's expert's. The bias's gradient is a product with ones, whose
    sums are of one order; so every rank that has the same rows has it whole, whether it `adds` or not."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, offsets: Tensor, adds: bool) -> Tensor:
        ctx.save_for_backward(offsets)
        if not adds:
            return rows.view_as(rows)
        numbers = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
        experts = torch.searchsorted(offsets[1:], numbers, right=True).clamp_(max=bias.shape[0] - 1)  # padding too
        return rows + bias[experts]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        gradient = gradient.contiguous()
        if not ctx.needs_input_grad[1]:
            return gradient, None, None, None
        ones = gradient.new_ones(gradient.shape[0], 16)  # rows of 16 bytes at least, which grouped GEMMs take
        return gradient, grouped_weight_gradient(gradient, ones, offsets)[..., 0], None, None


@dataclass(frozen=True)
class TokenFlow:
    """Paths of the tokens that all ranks of x have. Groups are None where they would have one rank.

    cut_over: the ranks of x, each of which takes its part of the tokens. gather_over: over them rows are gathered after
    the all-to-all, and scattered before the one back. sum_rows_over, sum_tokens_over: they sum products, before or
    after they are tokens' again.
    """

    cut_over: dist.ProcessGroup | None = None
    gather_over: dist.ProcessGroup | None = None
    sum_rows_over: dist.ProcessGroup | None = None
    sum_tokens_over: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, grid: Grid, *, shards_sequence: bool, drops: bool) -> "TokenFlow":
        """shards_sequence: ranks of x have different tokens. drops: whether duplicates are dropped."""
        x = several(grid.communicator("x"))
        if grid.expert_tensor == "fold":
            return cls(cut_over=None if shards_sequence else x)
        if shards_sequence:
            return cls(gather_over=x)
        if grid.size(EXPERT) == 1:
            return cls(sum_tokens_over=x)
        return cls(cut_over=x, gather_over=x) if drops else cls(sum_rows_over=x)


def several(group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The group; None if it has one rank."""
    return group if group.size() > 1 else None


@dataclass(frozen=True)
class ExpertsPlan:
    """The placement of one module's experts, and the routing of tokens.

    group: the ranks that divide the experts; None for one rank. over_y: the grid's group. checks_features: whether x
    or y have several ranks. max_rows, reduce: of `stretto.ops.moe.dispatch`. is_first_of_x: this rank is x's first.
    """

    name: str
    flow: TokenFlow
    group: dist.ProcessGroup | None
    over_y: dist.ProcessGroup | None
    checks_features: bool
    max_rows: int | None
    reduce: ExpertReduce
    is_first_of_x: bool

    @property
    def adds_bias(self) -> bool:
        """True if the second product's bias is added here: only one of the ranks whose products are summed later."""
        is_part = self.flow.gather_over is not None or self.flow.sum_tokens_over is not None
        return self.is_first_of_x or not is_part

    def kept_of_output(self) -> str | None:
        """As what recomputation keeps the first thing that `combine` sends; None if it needs the rows themselves."""
        if self.reduce == "rank":
            return None
        if self.group is not None:
            return _KEPT_AS["all_to_all"]
        return None if self.flow.gather_over is None else _KEPT_AS["reduce_scatter"]


class ParallelExperts(ShardedModule):
    """Experts of which each rank has some: hidden [t, h / y], top_k_index [t, k], top_k_weights [t, k] -> [t, h / y].

    Every rank gives its own tokens; those of x and y that share a batch give the same (with sequence sharding, ranks of
    x give their parts). Parameters have the names of the module that this replaces, and are DTensors of whole shapes. A
    choice of `num_experts` counts for nothing, if its weight is 0.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: ExpertsKind,
        parameters: Mapping[str, nn.Parameter],
        plan: ExpertsPlan,
        products: Mapping[str, ExpertProduct],
    ) -> None:
        """products: the first and the second, by the names of their weights in `parameters`."""
        self._up, self._down = products
        gradients = products[self._up].shard.gradients
        super().__init__(gradients)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self._bias_scales = {name: gradients.forward_scale(parameters[name]) for name in parameters if "bias" in name}
        self.num_experts: int = parameters[self._up].shape[0]
        self._own_gate = kind.own_gate(module) if kind.has_own_gate else None
        if self._own_gate is None:
            self.act_fn: Callable[[Tensor], Tensor] = module.act_fn  # type: ignore[assignment]
        self.plan = plan
        self.replicas = None if plan.group is None else ExpertReplicas(plan.group, plan.flow.gather_over)
        self.products = {name: replace(product, replicas=self.replicas) for name, product in products.items()}
        self.starts_early = False  # something runs between `start` and the products
        self._sent: list[_Sent] = []  # by `_start`, until `_finish`
        make = partial(GraphCode, keeps_inputs=lambda: gradients.deferred is not None)
        self._gathers_tokens = self._find_gathers_tokens()
        # On the group of expert nothing else is called, whatever is called between `start` and the products.
        self.can_start = plan.group is not None
        code: Callable[..., Tensor] = self._multiply_tokens if self._gathers_tokens else self._multiply_rows
        code = self._finish if self.can_start else code
        self.in_graphs: GraphCode = make(code, *self.weights_in_graphs())
        self._start_in_graphs = make(self._start)

    @property
    def has_biases(self) -> bool:
        """True if the products have biases."""
        return bool(self._bias_scales)

    def weights_in_graphs(self) -> Sequence[Tensor]:
        return self.get_parameter(self._up), self.get_parameter(self._down)

    def forward(
        self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, started: Tensor | None = None
    ) -> Tensor:
        if not self.is_being_traced():
            with mark_experts():
                return self._forward_on_grid(hidden, top_k_index, top_k_weights, started)
        up, down = (local(self.get_parameter(name)) for name in (self._up, self._down))
        x, ids = hidden.to(up.dtype).flatten(0, -2), self._known(top_k_index)
        found = dispatch(x, ids, self.num_experts, max_rows=self.plan.max_rows)
        inner = grouped_matmul(found.rows, self.products[self._up].orient(up), found.offsets)
        biases = self._biases()
        inner = self._activate(self._add_bias(self._up, inner, found.offsets, biases))
        rows = grouped_matmul(inner, self.products[self._down].orient(down), found.offsets)
        y = combine(self._add_bias(self._down, rows, found.offsets, biases), found.handle, top_k_weights)
        return y.view(hidden.shape)

    def _forward_on_grid(
        self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, started: Tensor | None
    ) -> Tensor:
        if self.plan.checks_features:
            check_features(hidden, "y", self.plan.name)
        x = self.products[self._up].shard.precision.cast(hidden).flatten(0, -2)
        inputs: tuple[Tensor, ...] = x, top_k_weights, top_k_index
        if self.can_start:
            started = _run(self._start_in_graphs, (1,), *inputs) if started is None else started
            # A compiler keeps the tokens' memory until this has read it. Their gradients go by `started`.
            inputs = started, x.detach()
        y = _run(self.in_graphs, x.shape, *inputs, *self._biases())
        return note_features(y.view(hidden.shape), "y")

    def start(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Begin to send tokens, where `can_start`. The next call takes the same arguments, and what this returns.

        What is called between the two runs while tokens travel, and backward while their gradients do.
        """
        x = self.products[self._up].shard.precision.cast(hidden).flatten(0, -2)
        with mark_experts():
            return _run(self._start_in_graphs, (1,), x, top_k_weights, top_k_index)

    def _take_part(self, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens, weights and choices that this rank sends."""
        plan, flow = self.plan, self.plan.flow
        if plan.group is not None and plan.max_rows is None and x.is_cuda:
            self._refuse_capture()
        ids, tokens = self._known(ids), x.shape[0]
        if plan.over_y is not None:
            weights = sum_gradient(weights, plan.over_y)
        if flow.cut_over is not None:
            if plan.max_rows is not None:
                self._check_divides(tokens, flow.cut_over.size())
            x, weights = cut_tokens(x, flow.cut_over), cut_tokens(weights, flow.cut_over)
            ids = ids[own_tokens(tokens, flow.cut_over)]
        if flow.sum_tokens_over is not None:
            x, weights = sum_gradient(x, flow.sum_tokens_over), sum_gradient(weights, flow.sum_tokens_over)
        if self.replicas is not None:
            self.replicas.note(ids, self.num_experts)
        return x, weights, ids

    def _complete(self, y: Tensor, x: Tensor) -> Tensor:
        """The output for the tokens x, of that for those that this rank has sent."""
        flow = self.plan.flow
        if flow.cut_over is not None:
            y = gather_tokens(y, x.shape[0], flow.cut_over)
        if flow.sum_tokens_over is not None:
            y = _SumTokens.apply(y, flow.sum_tokens_over)
        return y

    def _find_gathers_tokens(self) -> bool:
        """True if the products gather tokens by index: nothing is done between them but SiLU gates."""
        plan, is_plain = self.plan, self._own_gate is None and not self._bias_scales
        is_summed = plan.over_y is not None or plan.flow.sum_rows_over is not None
        is_transposed = any(product.is_transposed for product in self.products.values())
        is_gated = is_plain and self._up == "gate_up_proj" and is_silu(self.act_fn)
        return is_gated and not is_transposed and not is_summed and plan.reduce == "rank"

    def _multiply_tokens(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The output for tokens that are sent once to a rank, and gathered there by the products."""
        return self._finish(self._start(x, weights, ids), x)

    def _start(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Begin to send tokens, once to a rank."""
        plan, gather_group = self.plan, self.plan.flow.gather_over
        x, weights, ids = self._take_part(x, weights, ids)
        is_alone = plan.group is None and gather_group is None
        overlaps = self.products[self._up].hides_all_reduce
        places = find_places(
            x,
            *self._find_slots(ids, weights),
            plan.group,
            max_rows=None if is_alone else self._count_rows(ids),
            gather_group=gather_group,
            wrap_collective=_wrap_collective,
            implementation="auto" if plan.group is not None or overlaps else "library",
        )
        columns = self.get_parameter(self._up).shape[1]
        handle: Tensor = _SendTokens.apply(x, weights, places, columns, self.starts_early, self._sent.append)
        if plan.reduce == "choice":  # a copy: a compiled graph may overwrite its memory before the sums
            self._sent[-1] = replace(self._sent[-1], own_weights=weights.detach().clone())
        return handle

    def _finish(self, handle: Tensor, x: Tensor, *biases: Tensor) -> Tensor:
        """The output for the tokens x, which `_start` has begun to send."""
        sent, self._sent = self._sent[-1], []  # there may be one whose call an error has ended
        if self._gathers_tokens:
            parameters, products = map(self.get_parameter, self.products), tuple(self.products.values())
            return self._complete(_MultiplyTokens.apply(handle, *parameters, x, sent, products), x)
        rows = self._multiply_experts(
            _CopyRows.apply(handle, sent, self.plan.reduce), sent.places.index.offsets, biases
        )
        return self._complete(_SumRows.apply(handle, rows, sent, self.plan.reduce), x)

    def _find_slots(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, int]:
        """(choices, their weights, experts that they are among), replicas of experts counted, if there are any."""
        placement = None if self.replicas is None else self.replicas.placement
        return (
            (ids, weights, self.num_experts)
            if placement is None
            else (placement.spread(ids), weights, placement.num_slots)
        )

    def _count_rows(self, ids: Tensor) -> int | None:
        """The number of rows if it is fixed: as given, or all where a sharded sequence meets all experts here.

        Ranks of x have equal parts of a sequence, so that none need ask for the others' numbers.
        """
        plan, gather_group = self.plan, self.plan.flow.gather_over
        if plan.group is None and gather_group is not None:
            return max(gather_group.size() * ids.numel(), 1)
        return plan.max_rows

    def _multiply_rows(self, x: Tensor, weights: Tensor, ids: Tensor, *biases: Tensor) -> Tensor:
        """The output for tokens that are copied for each of their experts, and sent as the plan says."""
        plan = self.plan
        part, weights, ids = self._take_part(x, weights, ids)
        slots, _, count = self._find_slots(ids, weights)
        found = dispatch(
            part,
            slots,
            count,
            plan.group,
            topk_weights=weights,
            max_rows=self._count_rows(ids),
            gather_group=plan.flow.gather_over,
            reduce=plan.reduce,
            wrap_collective=_wrap_collective,
        )
        rows = self._multiply_experts(found.rows, found.offsets, biases)
        return self._complete(combine(rows, found.handle, weights, plan.group, wrap_collective=_wrap_collective), x)

    def _multiply_experts(self, rows: Tensor, offsets: Tensor, biases: Sequence[Tensor]) -> Tensor:
        inner = self._activate(self._multiply(self._up, rows, offsets, biases))
        return self._multiply(self._down, inner, offsets, biases)

    def _multiply(self, name: str, rows: Tensor, offsets: Tensor, biases: Sequence[Tensor]) -> Tensor:
        output: Tensor = _Multiply.apply(rows, self.get_parameter(name), offsets, self.products[name])
        return self._add_bias(name, output, offsets, biases)

    def _activate(self, inner: Tensor) -> Tensor:
        if self._own_gate is not None:
            return self._own_gate(inner)
        return gated_activation(inner, self.act_fn) if self._up == "gate_up_proj" else self.act_fn(inner)

    def _biases(self) -> tuple[Tensor, ...]:
        """This rank's parts of the biases, of the first product and the second; none if they have none."""
        scales = self._bias_scales.items()
        return tuple(scale_gradient(local(self.get_parameter(name)), scale) for name, scale in scales)

    def _add_bias(self, name: str, rows: Tensor, offsets: Tensor, biases: Sequence[Tensor]) -> Tensor:
        """The product with its bias, if it has one, which ranks of x that sum their parts of a product add once."""
        if f"{name}_bias" not in self._bias_scales:
            return rows
        bias = biases[list(self._bias_scales).index(f"{name}_bias")].to(rows.dtype)
        output: Tensor = _AddBias.apply(rows, bias, offsets, name == self._up or self.plan.adds_bias)
        return output

    def _known(self, ids: Tensor) -> Tensor:
        """The choices, with those that were dropped, whose weights are 0, divided evenly among the experts."""
        numbers = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) % self.num_experts
        return torch.where(ids == self.num_experts, numbers, ids)

    def _check_divides(self, tokens: int, ranks: int) -> None:
        """Raise ValueError unless ranks of x get equally many tokens, as required without exchanged counts."""
        if tokens % ranks:
            nearest = max(1, round(tokens / ranks)) * ranks
            raise ValueError(
                f"{self.plan.name}: expert_rows is {self.plan.max_rows}, so x={ranks} must divide a rank's {tokens} "
                f"tokens; {nearest} would do, or expert_rows=None"
            )

    def _refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{self.plan.name}: a CUDA graph cannot wait for the number of rows from other ranks: set a capacity, "
                "parallelize(..., expert_rows=), or choose expert=1"
            )

    def extra_repr(self) -> str:
        shapes = [(name, tuple(p.shape), tuple(local(p).shape)) for name, p in self.named_parameters(recurse=False)]
        return ", ".join(f"{name}={whole} of which {here} here" for name, whole, here in shapes)


def _run(code: GraphCode, shape: Sequence[int], *inputs: Tensor) -> Tensor:
    """Run code that returns a tensor of this shape, as one operator of a graph that is being traced."""
    return code(shape, *inputs) if torch.compiler.is_compiling() else code.code(*inputs)


def _wrap_collective(kind: str, make: Callable[[], T]) -> T:
    """Record the collective of `dispatch` or `combine`, and keep its output."""

    def marked() -> T:
        with collective(kind):
            return make()

    return keep_output(_KEPT_AS[kind], marked)


class _SumTokens(torch.autograd.Function):
    """The sum over ranks that have parts of a tensor; they all have its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return keep_output("summed product", lambda: all_reduce(tensor.clone(), group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
