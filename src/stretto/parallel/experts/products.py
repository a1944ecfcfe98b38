# SPDX-License-Identifier: Apache-2.0
"""The products of experts' MLPs on a grid, and what travels before and after them, as autograd functions.

Tokens are sent, multiplied as they arrive, and returned as sums; the backward pass takes the same ways. `KEPT_AS` names
what recomputation keeps of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.execution import ExpertReduce
from stretto.ops.invariant.grouped import multiply_groups
from stretto.ops.moe import ReplicaPlacement, gated_activation, grouped_matmul, grouped_weight_gradient
from stretto.ops.moe.experts import differentiate_gate, gate_tokens
from stretto.ops.moe.grouped.tile_order import Arrivals
from stretto.ops.moe.permutation import multiply_copies, sum_copies, sum_dtype
from stretto.ops.moe.places import Places, run_beside
from stretto.parallel.comm.autograd import is_asked_for, once_differentiable
from stretto.parallel.comm.collectives import Pending, all_reduce, collective, own, start_all_reduce
from stretto.parallel.comm.kept_outputs import is_given_back, is_recomputed, keep_output
from stretto.parallel.experts.replicas import ExpertReplicas
from stretto.parallel.layers.weight_shard import WeightShard
from stretto.parallel.layout import writes_of

T = TypeVar("T")

# What recomputation keeps of each kind of collective of `dispatch` and `combine`, by its name in KEPT_IN.
KEPT_AS = {
    "all_to_all": "exchanged rows",
    "all_gather": "gathered tokens",
    "reduce_scatter": "scattered sums",
    "moe_reduce_scatter": "summed product",
}


@dataclass(frozen=True)
class ExpertProduct:
    """One of the two products of experts' MLPs: rows [n, in] times each expert's weight [experts here, out, in].

    output_reduce_group sums the output, input_grad_reduce_group the gradient of the rows (None: nothing does). feeds:
    the name by which recomputation keeps what is made of the output, which then is not made again; None if it must be.
    is_transposed: the parameter is [experts, in, out]. leaves: of the inputs here, each with a sum of its own, for rows
    whose bits depend on no other row (None: those of a library).
    """

    shard: WeightShard
    output_reduce_group: dist.ProcessGroup | None
    input_grad_reduce_group: dist.ProcessGroup | None
    keeps_weights: bool
    hides_all_reduce: bool
    feeds: str | None = None
    is_transposed: bool = False
    replicas: ExpertReplicas | None = None
    leaves: int | None = None

    def gather(self, parameter: Tensor, placement: ReplicaPlacement | None, *, is_recorded: bool = False) -> Tensor:
        """The parameter of the experts here, and of the replicas that a placement has."""
        rows = self.shard.gather(parameter, is_recorded=is_recorded).rows
        if placement is None or self.replicas is None:
            return rows
        return self.replicas.hold(rows, placement, parameter if is_recorded else None)

    def gather_again(self, parameter: Tensor, placement: ReplicaPlacement | None, writes: int) -> Any:
        """The same in the backward pass, which refuses a parameter that was written since the forward pass."""
        self.shard.check_unwritten(parameter, writes)
        return self.gather(parameter, placement)

    @property
    def placement(self) -> ReplicaPlacement | None:
        """The replicas' placement in this step."""
        return None if self.replicas is None else self.replicas.placement

    def orient(self, parameter: Tensor) -> Tensor:
        """The weight [experts here, out, in], of a parameter or a gathered one."""
        return parameter.transpose(1, 2) if self.is_transposed else parameter

    # What `stretto.parallel.fp8` does in another way, with weights as `gather` makes them.

    def pack(self, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Pack what is saved of a weight for the backward pass: its numbers and scales."""
        return weight if self.keeps_weights else None, None

    def unpack(self, weight: Tensor, scale: Tensor | None) -> Tensor:
        """The weight that `pack` has saved."""
        return weight

    def outputs(self, weight: Tensor) -> int:
        return weight.shape[1]

    def product(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """Each expert's rows times its weight."""
        return grouped_matmul(rows, weight, offsets)

    def differentiate_rows(self, gradient: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return grouped_matmul(gradient, weight.transpose(1, 2), offsets)

    def differentiate_weights(
        self, left: Tensor, right: Tensor, offsets: Tensor, room: int, form: tuple[torch.dtype, float] | None = None
    ) -> Tensor:
        """Each expert's left.T @ right. room, and form, dtype and factor: as in `grouped_weight_gradient`."""
        dtype, factor = (left.dtype, 1.0) if form is None else form
        return grouped_weight_gradient(left, right, offsets, room=room, dtype=dtype, factor=factor)

    def multiply(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """The output, summed over ranks. If it will not be read, its values are arbitrary."""
        is_unread = self.feeds is not None and is_given_back(self.feeds)

        def make() -> Tensor:
            if is_unread:
                return rows.new_empty(rows.shape[0], self.outputs(weight))
            if self.leaves is not None:
                return multiply_groups(rows, weight, offsets, self.leaves, "" if group is None else group.group_name)
            product = self.product(rows, weight, offsets)
            return product if group is None else all_reduce(own(product), group)

        group = self.output_reduce_group
        return keep_output("product" if group is None else "summed product", make)

    def make_weight_gradient(
        self,
        parameter: nn.Parameter,
        rows: Tensor | Callable[[], Tensor],
        gradient: Tensor,
        offsets: Tensor,
        placement: ReplicaPlacement | None,
        room: int = 0,
    ) -> None:
        """Compute the weight gradient now, or defer it if requested.

        rows: or what makes them. room: as in `grouped_matmul`.
        """
        make = partial(self._reduce_weight_gradient, parameter, rows, gradient, offsets, placement)
        if self.shard.gradients.deferred is None:
            make(room)
        else:
            self.shard.gradients.defer(partial(make, 0))

    def _reduce_weight_gradient(
        self,
        parameter: nn.Parameter,
        rows: Tensor | Callable[[], Tensor],
        gradient: Tensor,
        offsets: Tensor,
        placement: ReplicaPlacement | None,
        room: int,
    ) -> None:
        rows = rows if isinstance(rows, Tensor) else rows()
        operands = (rows, gradient) if self.is_transposed else (gradient, rows)
        if not self.shard.is_sharded and placement is None:
            form = self.shard.own_form(parameter, rows.dtype)
            self.shard.gradients.take(parameter, self.differentiate_weights(*operands, offsets, room, form))
            return
        found = self.differentiate_weights(*operands, offsets, room)
        if placement is not None and self.replicas is not None:
            found = self.replicas.return_home(found, placement)
        self.shard.start_reduction(parameter, found)


class MultiplyRows(torch.autograd.Function):
    """Takes the DTensor parameter itself: its gradient goes there by `start_reduction`, not through autograd."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parameter: Tensor, offsets: Tensor, plan: ExpertProduct) -> Tensor:
        placement = plan.placement
        weight = plan.orient(plan.gather(parameter, placement, is_recorded=bool(ctx.next_functions)))
        ctx.plan, ctx.parameter, ctx.placement = plan, parameter, placement
        ctx.writes = None if plan.keeps_weights else writes_of(parameter)
        ctx.save_for_backward(rows, offsets, *plan.pack(weight))
        return plan.multiply(rows, weight, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plan: ExpertProduct = ctx.plan
        rows, offsets, weight, scale = ctx.saved_tensors
        gradient, pending = gradient.contiguous(), None
        if ctx.needs_input_grad[0]:
            if weight is None:
                weight = plan.orient(plan.gather_again(ctx.parameter, ctx.placement, ctx.writes))
            else:
                weight = plan.unpack(weight, scale)
            grad_rows = plan.differentiate_rows(gradient, weight, offsets)
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
    finish: returns x's. of_weights: those of this rank's tokens' weights.
    """

    needs_x: bool
    needs_weights: bool
    is_ahead: bool
    finish: Callable[[], Tensor] | None = None
    of_weights: Tensor | None = None


@dataclass(frozen=True)
class PendingTokens:
    """Tokens on their way to their experts' ranks, between the two halves of a forward pass.

    weights: of places. receive, arrivals: of `Places.begin`. own_weights: of this rank's tokens, for sums of choices.
    """

    places: Places
    weights: Tensor
    receive: Callable[[], Tensor]
    arrivals: Arrivals | None
    returning: _Returning
    own_weights: Tensor | None = None


class SendTokens(torch.autograd.Function):
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
        note: Callable[[PendingTokens], None],
    ) -> Tensor:
        """columns: of `Places.start`. is_ahead: something else is called before the products. note: takes what they
        need."""
        needs_x, needs_weights, *_ = ctx.needs_input_grad
        ctx.returning = _Returning(needs_x, needs_weights, is_ahead)
        weights = places.send_weights(weights)
        note(PendingTokens(places, weights, *places.begin(x, columns, is_ahead=is_ahead), ctx.returning))
        return x.new_empty(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        returning: _Returning = ctx.returning
        of_x = None if returning.finish is None else returning.finish()
        of_weights, returning.finish, returning.of_weights = returning.of_weights, None, None
        return of_x, of_weights, None, None, None, None


class MultiplyTokens(torch.autograd.Function):
    """The weighted sum of each sent token's experts, SiLU-gated MLPs. Saves places' tokens, and gate and up.

    Products begin on tokens, and on gradients of sums, that have arrived; routers' weights' gradients return under the
    gradient of the second product's weight, and the tokens' under that of the first one's, and what else runs before
    the backward pass of `SendTokens`. Takes the
    DTensor parameters themselves, as `MultiplyRows` does, and gathers them in its order.
    """

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        up: Tensor,
        down: Tensor,
        x: Tensor,
        sent: PendingTokens,
        products: Sequence[ExpertProduct],
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
            rows = tokens if arrivals is None else arrivals.rows
            gated, inner = gate_tokens(rows, gate_up, index.offsets, index.places, is_recorded, arrivals)
            return inner

        def activate() -> Tensor:
            return gated_activation(inner) if gated is None else gated

        gate_up = of_up.gather(up, placement, is_recorded=is_recorded)
        inner = keep_output("product", gate)
        if arrivals is not None:
            arrivals.wait()
        whole_down = of_down.gather(down, placement, is_recorded=is_recorded)
        ctx.products, ctx.up, ctx.down, ctx.places, ctx.placement = products, up, down, places, placement
        ctx.returning = sent.returning
        ctx.writes = None if products[0].keeps_weights else (writes_of(up), writes_of(down))
        kept = [one if products[0].keeps_weights else None for one in (gate_up, whole_down)]  # both do, or none
        sorted_by = index.slots, index.places, index.positions, is_here, index.offsets
        ctx.save_for_backward(tokens, weights, inner, *sorted_by, *kept)
        return places.multiply_and_give_back(activate, whole_down, weights, keep_output if is_recomputed() else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_up, of_down = ctx.products
        tokens, weights, inner, slots, numbers, positions, is_here, offsets, up, down = ctx.saved_tensors
        places: Places = ctx.places
        returning: _Returning = ctx.returning
        placement: ReplicaPlacement | None = ctx.placement
        gradient, arrivals = places.start(gradient.contiguous(), ctx.down.shape[2], keeps=False)
        rows = places.spread(gradient, arrivals) if is_asked_for(ctx, 2) else None
        factors = weights.reshape(-1).index_select(0, slots).to(sum_dtype(tokens.dtype))
        down = of_down.gather_again(ctx.down, placement, ctx.writes[1]) if down is None else down
        of_inner, gated, products = differentiate_gate(gradient, down, offsets, inner, numbers, factors, arrivals)
        if arrivals is not None:
            arrivals.wait()
        finish_weights: Callable[[], Tensor] | None = None
        if ctx.needs_input_grad[0] and returning.needs_weights:
            of_weights = products.index_select(0, positions.reshape(-1)).view_as(weights).to(weights.dtype)
            finish_weights = places.start_back(of_weights if is_here is None else torch.where(is_here, of_weights, 0))
        if rows is not None:
            of_down.make_weight_gradient(ctx.down, gated, rows, offsets, placement)
        returning.of_weights = None if finish_weights is None else finish_weights()
        needs_x = ctx.needs_input_grad[0] and returning.needs_x
        if needs_x:
            up = of_up.gather_again(ctx.up, placement, ctx.writes[0]) if up is None else up
            transposed = up.transpose(1, 2)
            returning.finish = places.start_product_back(of_inner, transposed, is_ahead=returning.is_ahead)
        if is_asked_for(ctx, 1):
            room = places.room_of_sums if needs_x else 0
            of_up.make_weight_gradient(ctx.up, partial(places.spread, tokens), of_inner, offsets, placement, room)
        return torch.zeros(1, dtype=gradient.dtype, device=gradient.device), None, None, None, None, None


class CopyRows(torch.autograd.Function):
    """A row for each choice of the sent tokens; backward, they are summed, and begin to return."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, sent: PendingTokens, reduce: ExpertReduce) -> Tensor:
        ctx.places, ctx.returning, ctx.reduce = sent.places, sent.returning, reduce
        tokens, route = sent.receive(), sent.places.route
        assert route is not None
        if sent.arrivals is not None:
            sent.arrivals.wait()
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


class SumRows(torch.autograd.Function):
    """Weighted sums of rows at their tokens' ranks; backward, the tokens' gradients go forward again."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, rows: Tensor, sent: PendingTokens, reduce: ExpertReduce) -> Tensor:
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
            returning.of_weights = places.give_back(multiply_copies(tokens, rows, index.positions, index.is_here))
        elif returning.needs_weights:
            returning.of_weights = multiply_copies(gradient, rows, route.choices).to(weights.dtype)
        return gradient.new_zeros(1), of_rows, None, None


class AddBias(torch.autograd.Function):
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


def keep_collective(kind: str, make: Callable[[], T]) -> T:
    """Record the collective of `dispatch` or `combine`, and keep its output."""

    def marked() -> T:
        with collective(kind):
            return make()

    return keep_output(KEPT_AS[kind], marked)


class SumTokens(torch.autograd.Function):
    """The sum over ranks that have parts of a tensor; they all have its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return keep_output("summed product", lambda: all_reduce(tensor.clone(), group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
