# SPDX-License-Identifier: Apache-2.0
"""One linear of Singh's Algorithm 3: its products, and what it sends at its two edges.

Activations are sent where they enter a linear (its input edge) and where they leave it (its output edge). The backward
pass goes the other way: gradients enter at the output edge and leave at the input edge. At an edge the tokens are

    ReplicatedTokens: every rank of the edge's group has all of them    entering: nothing       leaving: all-reduce
    ShardedTokens:    each rank has its part (sequence sharding)        entering: all-gather    leaving: reduce-scatter

With sequence sharding, a colwise linear has a sharded input edge and a rowwise one a sharded output edge; on GPUs the
all-gather and the reduce-scatter run within the product then (`stretto.ops`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.execution import HALVED_BYTES, HALVED_INPUTS
from stretto.parallel.comm.collectives import (
    Pending,
    all_reduce,
    collective,
    gather_rows,
    own,
    scatter_rows,
    start_all_reduce,
)
from stretto.parallel.comm.kept_outputs import is_given_back, keep_output
from stretto.parallel.comm.weight_gathering import GatheredWeight
from stretto.parallel.layers.gemm_layout import MatmulTuner
from stretto.parallel.layers.token_shards import GatheredInput, TokenShards
from stretto.parallel.layers.weight_shard import WeightShard


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
