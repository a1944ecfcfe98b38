# SPDX-License-Identifier: Apache-2.0
"""The parallel linears: modules around one autograd function, which computes by a `LinearPlan`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from stretto.parallel.comm.autograd import (
    apply,
    directly_called,
    input_chain,
    is_asked_for,
    not_compiled,
    once_differentiable,
    scale_gradient,
    sum_gradient,
)
from stretto.parallel.comm.graph_functions import GraphCode, GraphFunction
from stretto.parallel.comm.kept_outputs import is_recomputed
from stretto.parallel.comm.weight_gathering import GatheredWeight
from stretto.parallel.grid import Grid
from stretto.parallel.layers.linear_plan import LinearPlan, ShardedTokens
from stretto.parallel.layers.local_tensors import TakeGradient
from stretto.parallel.layers.sharded_module import ShardedModule, check_features, note_features, refuse_compiler
from stretto.parallel.layers.token_shards import GatheredInput
from stretto.parallel.layout import local, writes_of

if TYPE_CHECKING:
    from stretto.parallel.layers.joined_linears import JoinedLinears


@directly_called
class _SaveFirst(torch.autograd.Function):
    """Saves tensors for the backward pass of a `_Linear3D` before it computes its product.

    torch's checkpoint ends a recomputation once the last tensor has been saved. So the last linear of a
    block skips its product and the sum of it over ranks, which would not be read. A weight that is not kept is gathered
    after that, too. Returns an empty tensor, by whose node `_Linear3D` finds the gathered weight, if any, and its
    backward pass the saved tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, plan: LinearPlan) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = plan.shard.gather(parameter) if plan.keeps_weights else None
        ctx.save_for_backward(*_pack(x, ctx.weight))
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, gradient: None) -> tuple[None, None, None]:
        return None, None, None


@directly_called
class _Linear3D(torch.autograd.Function):
    """Takes the DTensor parameter itself: its gradient goes there by `start_reduction`, not through autograd.

    saved: of `_SaveFirst`; None: this function saves them. passes_on: also return x, for `input_chain`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        parameter: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        gathered: GatheredInput | None,
        saved: Tensor | None,
        passes_on: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.saver, weight = None if saved is None else saved.grad_fn, None
        passed_on = None
        if passes_on:
            ctx.set_materialize_grads(False)
            passed_on = x.view_as(x)
        if ctx.saver is not None:
            weight, ctx.saver.weight = ctx.saver.weight, None
        if weight is None:
            weight = plan.shard.gather(parameter, is_recorded=bool(ctx.next_functions))
        # A compiled graph writes to the memory of its tensors unseen.
        may_share = isinstance(ctx, FunctionCtx) and plan.tokens is None
        wants_columns = may_share and ctx.saver is None and bool(ctx.next_functions) and parameter.requires_grad
        # A graph has been traced under autocast, and runs outside of it. Else torch refuses operands of two dtypes.
        casts = torch.is_autocast_enabled(x.device.type) or not isinstance(ctx, FunctionCtx)
        matrix = plan.matrix(weight, x.dtype if casts else weight.rows.dtype)
        y, x = plan.make_output(x, matrix, bias, gathered, may_share=may_share, wants_columns=wants_columns)
        ctx.plan, ctx.has_bias, ctx.parameter = plan, bias is not None, parameter
        ctx.version = weight.version if plan.keeps_weights else writes_of(parameter)
        if ctx.saver is None:
            ctx.save_for_backward(*_pack(x, weight if plan.keeps_weights else None))
        return y if passed_on is None else (y, passed_on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, total: Tensor | None = None) -> tuple[Tensor | None, ...]:
        if gradient is None:  # the output is not used, and what was passed on is
            return total, None, None, None, None, None, None
        plan: LinearPlan = ctx.plan
        x, x_scale, rows, scale = (ctx if ctx.saver is None else ctx.saver).saved_tensors
        grad_bias = pending = None
        if plan.tokens is not None:
            gradient = gradient.contiguous()
        whole, wants_weight = gradient, is_asked_for(ctx, 1)
        if ctx.needs_input_grad[0]:
            matrix = plan.matrix(plan.weight_for_backward(rows, ctx.parameter, ctx.version, scale), gradient.dtype)
            pending, whole = plan.start_input_gradient(gradient, matrix, wants_weight=wants_weight, total=total)
        elif wants_weight and isinstance(plan.output_edge, ShardedTokens):
            whole = plan.output_edge.gather(gradient)
        flat = gradient.flatten(0, -2)  # for both
        if wants_weight:
            whole = flat if whole is gradient else whole
            plan.make_weight_gradient(ctx.parameter, plan.restore(x, x_scale), whole)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0)
        return None if pending is None else pending.wait(), None, grad_bias, None, None, None, None


def _pack(x: Any, weight: GatheredWeight | None) -> tuple[Tensor | None, ...]:
    """Pack what a linear saves: its input and weight, with scales if they are in fp8."""
    own = x if isinstance(x, tuple) else (x, None)
    return (*own, *((None, None) if weight is None else (weight.rows, weight.scale)))


class ParallelLinear(ShardedModule):
    """A linear whose weight is sharded over x, y and z.

    Colwise: x [..., in / Y] -> [..., out / X]; rowwise: x [..., in / X] -> [..., out / Y]; expanding: x [..., in] ->
    [..., out / X], a weight that y does not split; other axes see copies.
    `weight` and `bias` are DTensor parameters of the whole shape; the bias follows the output's features.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, plan: LinearPlan) -> None:
        super().__init__(plan.shard.gradients)
        self.weight = weight
        self.register_parameter("bias", bias)
        self.plan = plan
        self.joined: JoinedLinears | None = None  # the linears with which it is computed
        self._bias_scale = 1.0 if bias is None else plan.shard.gradients.forward_scale(bias)
        self.in_graphs: GraphFunction = self._in_graphs()
        rows = local(weight).shape[1] if plan.is_transposed else plan.shard.rows
        self._features_here = sum(some.stop - some.start for some in plan.used_rows) or rows

    def forward(self, x: Tensor) -> Tensor:
        in_fp8 = self.plan.shard.scaling is not None
        is_local = self.is_local and x.ndim > 1 and (not in_fp8 or torch.compiler.is_compiling())
        found = self.local_tensors() if is_local else None
        if found is not None and len(found) == 2:  # else the weight is cast first
            weight, bias = found
            assert weight is not None
            if torch.is_autocast_enabled(x.device.type):
                self.check_autocast(x)
            if in_fp8:
                return self.plan.multiply_traced(x, weight, bias)
            x = x if x.dtype == weight.dtype else self.plan.shard.precision.cast(x)
            return F.linear(x, weight.t() if self.plan.is_transposed else weight, bias)
        if not torch.compiler.is_compiling():
            return self.forward_on_grid(x)
        if self.plan.is_invariant:
            refuse_compiler()
        self.check_autocast(x)
        return self.forward_in_graph(x)

    def can_be_local(self, grid: Grid) -> bool:
        plan = self.plan
        has_all = plan.tokens is None and plan.shard.group.size() == grid.size("x") == grid.size("y") == 1
        return has_all and not (plan.matmuls.is_on or plan.is_invariant)

    def gradients_of_shards(self) -> Mapping[str, TakeGradient | None]:
        shard = self.plan.shard
        if self.is_local and shard.takes_own_gradient(self.weight):  # now: an optimizer may have converted it
            return {"weight": shard.taking(self.weight), "bias": None}
        return {} if self.bias is None else {"bias": None}

    @not_compiled
    def forward_on_grid(self, x: Tensor) -> Tensor:
        """The output, by Algorithm 3. A compiler's graph breaks here."""
        if x.dim() == 1:
            return self.forward_on_grid(x.unsqueeze(0)).squeeze(0)
        if self.plan.tokens is not None and (stand_in := self.plan.tokens.find_stand_in(x, self)) is not None:
            if self.joined is not None:
                return self.joined.output_of(self, stand_in)
            x = stand_in.part
        self.check_input(x)
        cast = self.plan.shard.precision.cast_operand
        bias = None if self.bias is None else cast(self.plan.used(self.local_bias()))
        y, axis = self._multiply(cast(x), bias), self.plan.output_axis
        return y if axis is None or not self.plan.splits_features else note_features(y, axis)

    def forward_in_graph(self, x: Tensor) -> Tensor:
        """The same, as one operator of a compiled graph."""
        cast, is_row, tokens = self.plan.shard.precision.cast_operand, x.dim() == 1, self.plan.tokens
        bias = () if self.bias is None else (cast(self.plan.used(self.local_bias())),)
        if tokens is not None and self.plan.is_rowwise:
            return self.in_graphs((*tokens.end_in_graph(x), self._features_here), cast(x), *bias)
        if tokens is not None:
            part = tokens.part_in_graph(x)
            if part is not x and self.joined is not None:
                return self.joined.output_in_graph(self, part, tokens)
            others = (tokens.number_in_graph(part), *bias)
            return self.in_graphs((*tokens.shape, self._features_here), cast(part), *others)
        x = cast(x.unsqueeze(0) if is_row else x)
        wants_columns = torch.is_grad_enabled() and self.weight.requires_grad
        casts = self.plan.cast_in_graph(x, wants_columns=wants_columns)
        not_saved = 1 + len(casts) - 2 * wants_columns if casts else 0
        y = self.in_graphs((*x.shape[:-1], self._features_here), x, *casts, *bias, not_saved=not_saved)
        return y.squeeze(0) if is_row else y

    def _in_graphs(self) -> GraphFunction:
        def keeps_inputs() -> bool:
            return self.plan.shard.gradients.deferred is not None

        if self.plan.tokens is not None:
            return GraphCode(self._multiply_tokens, self.weight, keeps_inputs=keeps_inputs)
        return GraphFunction(_Linear3D, self._arrange, self.weight, keeps_inputs=keeps_inputs)

    def _arrange(self, x: Tensor, *others: Tensor) -> tuple[Any, ...]:
        """The arguments of `_Linear3D` in a graph. others: casts of x, and the bias."""
        casts, bias = (others, None) if self.bias is None else (others[:-1], others[-1])
        return self.plan.take_from_graph(x, casts) if casts else x, self.weight, bias, self.plan, None, None

    def _multiply_tokens(self, x: Tensor, *others: Tensor) -> Tensor:
        """The output with sequence sharding. others: for a colwise linear the number of its input; then the bias."""
        tokens, bias = self.plan.tokens, None if self.bias is None else others[-1]
        assert tokens is not None
        rows = x.flatten(0, -2)
        if not self.plan.is_rowwise:
            gathered = tokens.gathered_by(others[0])
            return tokens.whole(apply(_Linear3D, rows, self.weight, bias, self.plan, gathered, None))
        tokens.whole(rows)  # refuses tokens of another batch
        tokens.forget_last_gathered()
        return apply(_Linear3D, rows, self.weight, bias, self.plan, None, None).unsqueeze(0)

    def weights_in_graphs(self) -> Sequence[Tensor]:
        return (self.weight,)

    def local_bias(self) -> Tensor:
        """This rank's part of the bias."""
        found = self.local_tensors()
        if found is not None and found[-1] is not None:
            return found[-1]
        assert self.bias is not None
        return scale_gradient(local(self.bias), self._bias_scale)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        tokens = self.plan.tokens
        if tokens is None:
            if not self._adds_gradients(x):
                return apply(_Linear3D, x, self.weight, bias, self.plan, None, self._save_first(x))
            given, saved = input_chain.follow(x), self._save_first(x)
            y, passed_on = apply(_Linear3D, given, self.weight, bias, self.plan, None, saved, True)
            input_chain.note(x, passed_on)
            return y
        rows = x.flatten(0, -2).contiguous()
        if self.plan.is_rowwise:
            tokens.whole(rows)  # refuses tokens of another batch
            return apply(_Linear3D, rows, self.weight, bias, self.plan, None, self._save_first(rows)).unsqueeze(0)
        return tokens.whole(apply(_Linear3D, rows, self.weight, bias, self.plan, tokens.gathered_input(x), None))

    def _adds_gradients(self, x: Tensor) -> bool:
        """True if `input_chain` leads the input on: its gradient is asked for, and nothing is sent."""
        plan, gradients = self.plan, self.plan.shard.gradients
        is_plain = type(plan) is LinearPlan and plan.sends_nothing and not (plan.is_invariant or plan.matmuls.is_on)
        if not is_plain or not (gradients.is_in_forward or is_recomputed()):
            return False
        return x.requires_grad and torch.is_grad_enabled()

    def _save_first(self, x: Tensor) -> Tensor | None:
        """The output of `_SaveFirst` in a pass that is recomputed; None in others, which would gain nothing by it."""
        if not is_recomputed():
            return None
        is_recorded = torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad)
        return apply(_SaveFirst, x, self.weight, self.plan) if is_recorded else None

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError for features that are split over the wrong axis, and for an autocast to another dtype."""
        if self.plan.input_axis and self.plan.splits_features:
            check_features(x, self.plan.input_axis, self.plan.name)
        self.check_autocast(x)

    def check_autocast(self, x: Tensor) -> None:
        """Raise ValueError for an autocast to another dtype than this linear was told to compute in."""
        device, shard = x.device.type, self.plan.shard
        if not torch.is_autocast_enabled(device) or (shard.precision.compute is None and shard.scaling is None):
            return
        autocast, dtype = torch.get_autocast_dtype(device), shard.precision.compute or self.weight.dtype
        if autocast != dtype:
            raise ValueError(
                f"torch.autocast to {autocast} is on around {self.plan.name}, which computes in {dtype}: leave "
                f"autocast out, and call parallelize(..., dtype={autocast})"
            )

    @property
    def in_features(self) -> int:
        """The whole input's features, as nn.Linear has them: models read it in their own code."""
        return self.weight.shape[0 if self.plan.is_transposed else 1]

    @property
    def out_features(self) -> int:
        """The whole output's features."""
        return self.weight.shape[1 if self.plan.is_transposed else 0]

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)} of which {tuple(local(self.weight).shape)} here"


class CompressingLinear(ParallelLinear):
    """A linear whose output every rank has whole, and which each x rank uses for its own heads: latent attention.

    x [..., in / Y] -> [..., out]. The output's gradient on a rank is of its heads alone, and is summed over x, so that
    norms between this linear and those that expand its output see what norms of heads see.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, plan: LinearPlan, heads_group: dist.ProcessGroup
    ) -> None:
        super().__init__(weight, bias, plan)
        self.heads_group = heads_group
        self._sum_in_graphs = GraphCode(lambda y: sum_gradient(y, heads_group))

    def forward_in_graph(self, x: Tensor) -> Tensor:
        y = super().forward_in_graph(x)
        return y if self.heads_group.size() == 1 else self._sum_in_graphs(y.shape, y)

    @not_compiled
    def forward_on_grid(self, x: Tensor) -> Tensor:
        y = super().forward_on_grid(x)
        return y if self.heads_group.size() == 1 else sum_gradient(y, self.heads_group)
