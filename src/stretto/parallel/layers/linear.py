# SPDX-License-Identifier: Apache-2.0
"""The 3D-parallel linear of Singh, Algorithm 3: one autograd function, with the communication at its two edges.

Activations are sent where they enter a linear (its input edge) and where they leave it (its output edge). The backward
pass goes the other way: gradients enter at the output edge and leave at the input edge. At an edge the tokens are

    ReplicatedTokens: every rank of the edge's group has all of them    entering: nothing       leaving: all-reduce
    ShardedTokens:    each rank has its part (sequence sharding)        entering: all-gather    leaving: reduce-scatter

With sequence sharding, a colwise linear has a sharded input edge and a rowwise one a sharded output edge; on GPUs the
all-gather and the reduce-scatter run within the product then (`stretto.ops`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from stretto.execution import HALVED_BYTES, HALVED_INPUTS
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
from stretto.parallel.comm.collectives import (
    Pending,
    all_reduce,
    collective,
    gather_rows,
    own,
    scatter_rows,
    start_all_reduce,
)
from stretto.parallel.comm.graph_functions import GraphCode, GraphFunction
from stretto.parallel.comm.kept_outputs import is_given_back, is_recomputed, keep_output
from stretto.parallel.comm.weight_gathering import GatheredWeight
from stretto.parallel.grid import Grid
from stretto.parallel.layers.gemm_layout import MatmulTuner
from stretto.parallel.layers.local_tensors import TakeGradient
from stretto.parallel.layers.sharded_module import ShardedModule, check_features, note_features, refuse_compiler
from stretto.parallel.layers.token_shards import GatheredInput, TokenShards
from stretto.parallel.layers.weight_shard import WeightShard
from stretto.parallel.layout import local, writes_of

if TYPE_CHECKING:
    from stretto.parallel.layers.joined_linears import JoinedLinears


@dataclass(frozen=True)
class ReplicatedTokens:
    """An edge at which every rank of `group` has all tokens: entering sends nothing, leaving all-reduces."""

    group: dist.ProcessGroup


@dataclass(frozen=True)
class ShardedTokens:
    """An edge at which each rank of `group` has its part of the tokens: entering gathers them, leaving scatters sums.

    overlaps: on a GPU, communicate within the product.
    """

    group: dist.ProcessGroup
    overlaps: bool

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' rows of `part` [tokens / ranks, k]."""
        return gather_rows(part, part.shape[0] * self.group.size(), self.group)

    def gather_and_multiply(self, part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' rows of `part` [tokens / ranks, k] times `weight` [n, k] transposed; and these rows themselves."""
        if self.has_kernel(part):
            from stretto.ops import all_gather_matmul_gathered

            with collective("all_gather_matmul", self.group):
                return all_gather_matmul_gathered(part, weight, self.group)
        gathered = self.gather(part)
        return gathered @ weight.t(), gathered

    def multiply_and_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks of x [tokens, k] times `weight` [n, k] transposed."""
        if self.has_kernel(x):
            from stretto.ops import matmul_reduce_scatter

            with collective("matmul_reduce_scatter", self.group):
                return matmul_reduce_scatter(x, weight, self.group)
        return self.scatter(x @ weight.t())

    def scatter(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks of `whole` [tokens, n]."""
        return scatter_rows(whole, whole.shape[0] // self.group.size(), self.group)

    def has_kernel(self, x: Tensor) -> bool:
        """True if it communicates within the product."""
        return self.overlaps and x.is_cuda and self.group.size() > 1


@dataclass(frozen=True)
class LinearPlan:
    """Describes one linear of Algorithm 3: the ranks over which its forward and its backward pass sum.

    A colwise linear sums its output over y, along which its input's features are split, and its input's gradient over
    x, along which its output's are; a rowwise one the other way round. So `output_reduce_group`, which sums the output,
    has the ranks of the input's axis, and `input_grad_reduce_group`, which sums the input's gradient, those of the
    output's. Where every rank has all of the input's or the output's features, that axis is None, and the input's
    gradient is not summed: it is complete, or `CompressingLinear` sums it.

    `name` is its name in the model, `linear_index` its number among the model's linears. `is_transposed`: the weight is
    stored [in, out] (Conv1D) rather than [out, in]. `tokens`: None without sequence sharding. `used_rows`: the output
    features of the gathered weight that this rank computes, where it holds more (`Role.shared`); () for all.
    `is_invariant`: a row's bits depend on no other row, nor on the number of ranks.
    """

    name: str
    shard: WeightShard
    input_axis: str | None
    output_axis: str | None
    output_reduce_group: dist.ProcessGroup
    input_grad_reduce_group: dist.ProcessGroup
    is_transposed: bool
    keeps_weights: bool
    hides_all_reduce: bool
    matmuls: MatmulTuner
    linear_index: int
    is_rowwise: bool = False
    tokens: TokenShards | None = None
    used_rows: tuple[slice, ...] = ()
    is_invariant: bool = False

    @cached_property
    def input_edge(self) -> ReplicatedTokens | ShardedTokens:
        """The edge at which the input enters, and the input's gradient leaves."""
        if self.tokens is not None and not self.is_rowwise:
            return ShardedTokens(self.input_grad_reduce_group, self.hides_all_reduce)
        return ReplicatedTokens(self.input_grad_reduce_group)

    @cached_property
    def output_edge(self) -> ReplicatedTokens | ShardedTokens:
        """The edge at which the output leaves, and the output's gradient enters."""
        if self.tokens is not None and self.is_rowwise:
            return ShardedTokens(self.output_reduce_group, self.hides_all_reduce)
        return ReplicatedTokens(self.output_reduce_group)

    @cached_property
    def splits_features(self) -> bool:
        """True if ranks have parts of the input's or the output's features."""
        return self.output_reduce_group.size() * self.input_grad_reduce_group.size() > 1

    @cached_property
    def sends_nothing(self) -> bool:
        """True if this rank makes the output, and the input's gradient, from what it has."""
        return self.tokens is None and not self.splits_features

    def make_output(
        self,
        x: Tensor,
        matrix: Tensor,
        bias: Tensor | None,
        gathered: GatheredInput | None,
        *,
        may_share: bool = False,
        wants_columns: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The output of x times `matrix` [in, out]; and x of all tokens, which the weight's gradient needs.

        What it makes may be kept for recomputation (`stretto.parallel.comm.kept_outputs`). may_share, wants_columns:
        of `left_operand`.
        """
        if self.is_invariant:
            if isinstance(self.input_edge, ShardedTokens):
                assert gathered is not None
                if gathered.rows is None:
                    gathered.rows = keep_output("gathered tokens", partial(self.input_edge.gather, x))
                x = gathered.rows
            name = "product" if self.output_reduce_group.size() == 1 else "summed product"
            return keep_output(name, partial(self.multiply_invariantly, x, matrix.t(), bias)), x
        left = self.left_operand(x, may_share=may_share, wants_columns=wants_columns)
        if self.sends_nothing and bias is None:
            return keep_output("product", partial(self.multiply, "output", left, matrix)), self.saved_input(x, left)
        name = "product" if self.output_reduce_group.size() == 1 else "summed product"
        product: Tensor | None = None
        if isinstance(self.input_edge, ShardedTokens):
            assert gathered is not None
            if getattr(gathered, self.gathers_as) is None:
                entering, part, gathers_alone = self.input_edge, x, is_given_back(name)

                def gather() -> Tensor:
                    nonlocal product
                    if gathers_alone:
                        return self.gather(entering, part, matrix)
                    product, rows = self.gather_and_multiply(entering, part, matrix)
                    return rows

                setattr(gathered, self.gathers_as, keep_output("gathered tokens", gather))
            x = left = getattr(gathered, self.gathers_as)

        def make() -> Tensor:
            y = self._make_output(left, product, matrix, bias)
            # Autograd forbids writes to a view that a Function made, as Falcon's code does to its MLP's output. What
            # is kept must be this tensor: only its version shows that code has written to it.
            return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

        return keep_output(name, make), self.saved_input(x, left)

    def _make_output(self, x: Tensor, product: Tensor | None, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """The output of x, of which `product` is the product with `matrix` if a kernel has made it already."""
        leaving = self.output_edge
        if isinstance(leaving, ShardedTokens):
            y = self.multiply_and_scatter(leaving, x, matrix)
        elif isinstance(self.input_edge, ShardedTokens):
            y = all_reduce(own(self.multiply_and_add(x, matrix, None) if product is None else product), leaving.group)
        # A bias is added once: inside the product where one rank has all of it, after the sum otherwise.
        elif bias is not None and leaving.group.size() == 1:
            return self.multiply_and_add(x, matrix, bias)
        else:
            y = self.multiply_and_sum(x, matrix)
        if bias is not None:
            y += bias
        return y

    def start_input_gradient(
        self, gradient: Tensor, matrix: Tensor, *, wants_weight: bool = True, total: Tensor | None = None
    ) -> tuple[Pending, Tensor]:
        """Begin to make the input's gradient from the output's and `matrix` [in, out]; and the latter of all tokens.

        wants_weight: the weight's gradient is made of it, too. total: the sum so far, to which it is added.
        """
        if total is not None:
            total.flatten(0, -2).addmm_(gradient.flatten(0, -2), matrix.t())
            return Pending(total), gradient
        if isinstance(entering := self.output_edge, ShardedTokens):
            grad_x, gradient = self.gather_and_multiply(entering, gradient, matrix.t())
            return Pending(all_reduce(grad_x, self.input_edge.group)), gradient
        gradient = self.gradient_operand(gradient, needs_both=wants_weight)
        if self.sends_nothing:
            return Pending(self.multiply("input", gradient, matrix.t())), gradient
        if isinstance(leaving := self.input_edge, ShardedTokens):
            return Pending(self.multiply_and_scatter(leaving, gradient, matrix.t())), gradient
        pending = start_all_reduce(self.multiply("input", gradient, matrix.t()), leaving.group)
        if not self.hides_all_reduce:
            pending.wait()
        return pending, gradient

    # `stretto.parallel.fp8` overrides these. A right operand is [k, n]; left ones are what `left_operand`,
    # `gradient_operand` and `gather` return.

    @property
    def gathers_as(self) -> str:
        """The field of `GatheredInput` in which linears of one input share what they have gathered."""
        return "rows"

    def cast_in_graph(self, x: Tensor, *, wants_columns: bool) -> Sequence[Tensor]:
        """Cast the input for products, in the graph that is being traced: linears of one input make equal calls, which
        a compiler merges. The last two tensors are for the weight's gradient (wants_columns).
        """
        return ()

    def take_from_graph(self, x: Tensor, casts: Sequence[Tensor]) -> Tensor:
        """The input for `left_operand`, which holds the casts that `cast_in_graph` has made of it."""
        return x

    def left_operand(self, x: Tensor, *, may_share: bool, wants_columns: bool) -> Tensor:
        """The input as products take it. may_share: with the next linears that take this tensor. wants_columns: for the
        weight's gradient, too."""
        return x

    def saved_input(self, x: Tensor, left: Tensor) -> Tensor:
        """What the backward pass needs of the input; `left` was made of it."""
        return x

    def gradient_operand(self, gradient: Tensor, *, needs_both: bool) -> Tensor:
        """The output's gradient as products take it. needs_both: for the gradients of input and weight."""
        return gradient

    def restore(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """The input that `_pack` has saved."""
        return x

    def gather(self, edge: ShardedTokens, part: Tensor, matrix: Tensor) -> Tensor:
        """The left operand of all tokens of an edge."""
        return edge.gather(part)

    def gather_and_multiply(self, edge: ShardedTokens, part: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The product of an edge's gathered left operand with `matrix`, and that operand."""
        return edge.gather_and_multiply(part, matrix.t())

    def multiply_and_scatter(self, edge: ShardedTokens, x: Tensor, matrix: Tensor) -> Tensor:
        """This rank's rows of the sum over an edge's ranks of x @ matrix."""
        return edge.multiply_and_scatter(x, matrix.t())

    def multiply_and_add(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """x @ matrix, + bias."""
        return x @ matrix if bias is None else F.linear(x, matrix.t(), bias)

    def multiply_weight_gradient(self, x: Tensor, gradient: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The weight's gradient, of the outputs that this rank computes."""
        x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
        left, right = (x, gradient) if self.is_transposed else (gradient, x)
        return self.multiply("weight", left.t(), right, dtype)

    def multiply_traced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output from a weight in fp8 that this rank has all of. A compiler may trace it."""
        raise NotImplementedError

    def multiply(self, role: str, a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """a @ b, one of this linear's three products, in `dtype` if that is given; a may have leading dims.

        No view, to which autograd would forbid writes.
        """
        is_plain = not self.matmuls.is_on and (dtype is None or dtype == a.dtype)
        if is_plain and (a.ndim == 2 or a.is_contiguous()):
            return a @ b  # the same product of two matrices
        if a.ndim == 2:
            return self.matmuls.multiply(self.linear_index, role, a, b, dtype=dtype)
        product = self.matmuls.multiply(self.linear_index, role, a.flatten(0, -2), b, dtype=dtype)
        whole: Tensor = torch.ops.aten._unsafe_view(product, (*a.shape[:-1], b.shape[1]))
        return whole

    def multiply_invariantly(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output of x times `weight` [out, in] transposed, + bias: x cuts rowwise inputs, a power of two of 8."""
        from stretto.ops import LEAVES, invariant_matmul, matmul_all_reduce, matmul_reduce_scatter

        group = self.output_reduce_group
        if group.size() == 1:
            y = invariant_matmul(x.contiguous(), weight, bias=bias, leaves=LEAVES if self.input_axis == "x" else 1)
        elif isinstance(self.output_edge, ShardedTokens):
            with collective("matmul_reduce_scatter", group):
                y = matmul_reduce_scatter(x.contiguous(), weight, group, bias=bias, invariant=True)
        else:
            with collective("matmul_all_reduce", group):
                y = matmul_all_reduce(x.contiguous(), weight, group, bias=bias, invariant=True)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    def multiply_and_sum(self, x: Tensor, matrix: Tensor) -> Tensor:
        """The output x @ matrix, summed over the output's ranks."""
        group, rows, (inputs, columns) = self.output_reduce_group, x.flatten(0, -2), matrix.shape
        num_bytes = rows.shape[0] * columns * x.element_size()
        if group.size() == 1 or num_bytes < HALVED_BYTES or inputs < HALVED_INPUTS:
            product = self.multiply("output", x, matrix)
            return product if group.size() == 1 else all_reduce(own(product), group)
        y = x.new_empty(rows.shape[0], columns)
        pending = []
        for some_rows, out in zip(rows.chunk(2), y.chunk(2), strict=True):
            self.matmuls.multiply(self.linear_index, "output", some_rows, matrix, out=out)
            pending.append(start_all_reduce(out, group))
            if not self.hides_all_reduce:
                pending[-1].wait()
        for half in pending:
            half.wait()
        return y.view(*x.shape[:-1], columns)

    def matrix(self, weight: GatheredWeight, dtype: torch.dtype) -> Tensor:
        """The gathered weight as [in, out], in the other operand's dtype: of the outputs that this rank computes."""
        rows = weight.rows if weight.rows.dtype == dtype else weight.rows.to(dtype)  # under autocast
        if not self.used_rows:
            return rows if self.is_transposed else rows.t()
        return self.used(rows.t() if self.is_transposed else rows).t()

    def used(self, rows: Tensor) -> Tensor:
        """Those rows, one for each output feature, that this rank computes."""
        return torch.cat([rows[some] for some in self.used_rows]) if self.used_rows else rows

    def weight_for_backward(
        self, kept: Tensor | None, parameter: Tensor, version: Any, scale: Tensor | None = None
    ) -> GatheredWeight:
        """The weight of the forward pass, kept or gathered again. RuntimeError if it was overwritten since.

        version: that of the kept weight; `writes_of` the parameter if it is gathered again.
        """
        if kept is None:
            self.shard.check_unwritten(parameter, version)
            return self.shard.gather(parameter)
        if self.shard.was_overwritten(version):
            raise RuntimeError(
                f"the weight of {self.name} was changed, and written over by a forward pass or an optimizer's copy, "
                "before the backward pass of an earlier one: take that first, or parallelize with "
                "overlap=Overlap(copy_engines=False)"
            )
        return GatheredWeight(kept, scale=scale)

    def make_weight_gradient(self, parameter: nn.Parameter, x: Tensor, gradient: Tensor) -> None:
        """Make the weight's gradient now, or pass it to the caller that defers it."""
        if self.shard.gradients.deferred is None:
            self.reduce_weight_gradient(parameter, x, gradient)
        else:
            self.shard.gradients.defer(partial(self.reduce_weight_gradient, parameter, x, gradient))

    def reduce_weight_gradient(self, parameter: nn.Parameter, x: Tensor, gradient: Tensor) -> None:
        """Make the weight's gradient from x [..., in] and the output's gradient [..., out], and start its sum."""
        product = self.multiply_weight_gradient(x, gradient, self.shard.gradient_dtype(parameter))
        if self.used_rows:
            rows = product.t() if self.is_transposed else product
            whole = rows.new_zeros(self.used_rows[-1].stop, rows.shape[1])
            sizes = [some.stop - some.start for some in self.used_rows]
            for some, part in zip(self.used_rows, rows.split(sizes), strict=True):
                whole[some] = part
            product = whole.t().contiguous() if self.is_transposed else whole
        self.shard.start_reduction(parameter, product)


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
