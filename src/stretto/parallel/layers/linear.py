"""The 3D-parallel linear of Singh, Algorithm 3."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.comm.autograd import is_asked_for
from stretto.parallel.comm.collectives import (
    Pending,
    all_reduce,
    own,
    start_all_reduce,
    start_gather_rows,
    start_scatter_rows,
)
from stretto.parallel.comm.copy_engine_gather import Pushable
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.comm.weight_prefetcher import WeightPrefetcher
from stretto.parallel.layers.gemm_layout import MatmulTuner
from stretto.parallel.layers.sequence import GatheringLinear, ScatteringLinear, TokenShards
from stretto.parallel.layers.sharded_module import ShardedModule, check_features, note_features
from stretto.parallel.layout import Version, local, version_of
from stretto.parallel.low_precision_weights import cast, keep_copy
from stretto.parallel.options import Precision

if TYPE_CHECKING:
    from stretto.parallel.comm.copy_engine_scatter import ScatterRing

# An output of at least so many bytes is summed over ranks in two halves, the first under the product of the second's
# rows, if it has at least so many inputs: with fewer, the product hides less than a second message costs.
HALVED_BYTES = 2 * 8 * 2**20
HALVED_INPUTS = 2048


@dataclass(frozen=True, eq=False)
class WeightShard:
    """How a weight's shard becomes the block that one rank multiplies with, and a gradient finds back to the shard.

    Gathered over z along dim 0 in the compute dtype (Algorithm 3, line 2); gradients are scattered over z in the
    reduction dtype (line 14), through the `ring` if there is one.
    """

    rows: int
    local_rows: int
    group: dist.ProcessGroup
    precision: Precision
    prefetcher: WeightPrefetcher
    gradients: GradientReducer
    ring: "ScatterRing | None" = None

    def gather(self, parameter: Tensor, *, is_recorded: bool = True) -> Tensor:
        """The whole rows of a DTensor parameter. `is_recorded`: for a pass that has a backward pass, or is one.

        Others cast the parameter itself: averaged weights are often put in for an evaluation, and taken out, through
        `.data`, of which nothing would tell a copy that an optimizer has written.
        """
        if self.group.size() == 1:
            return cast(parameter, self.precision.compute) if is_recorded else self.precision.cast(local(parameter))
        return self.prefetcher.gather(self, local(parameter), version_of(parameter), self._start)

    def deliver(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Send the gradient of the whole rows on its way to the parameter; it arrives before `backward` returns."""
        if self.precision.reduce is not None and self.is_sent(parameter):
            gradient = gradient.to(self.precision.reduce)
        if self.ring is None:
            start = partial(start_scatter_rows, gradient, self.local_rows, self.group)
        else:
            start = partial(self.ring.start, gradient, self.local_rows, parameter.dtype)
        self.gradients.scatter(parameter, start)

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype | None:
        """What the gradient of the whole rows is best made in: the parameter's own if it stays here (None: any)."""
        return self.precision.reduce if self.is_sent(parameter) else parameter.dtype

    def is_sent(self, parameter: nn.Parameter) -> bool:
        """Whether other ranks have parts of the gradient."""
        return self.group.size() > 1 or self.gradients.is_summed(parameter)

    def watch(self, parameter: nn.Parameter, *, stays: bool) -> None:
        """Gather this parameter ahead from now on. `stays`: its memory may be kept for as long as the model lives."""
        if stays and self.group.size() == 1:
            keep_copy(parameter, self.precision.compute)
        if self.ring is not None:
            self.ring.register(self.rows, local(parameter).shape[1:].numel())
        self.prefetcher.register(self, lambda: (local(parameter), version_of(parameter), self._start))
        if stays and self.prefetcher.pushed is not None:
            self.prefetcher.pushed.register(self, Pushable(parameter, self.rows, self.precision.compute))

    def version(self, whole: Tensor) -> Version | None:
        """Which state of the shard these gathered rows are of, if they lie in memory that is written over."""
        pushed = self.prefetcher.pushed
        return None if pushed is None else pushed.version(self, whole)

    def was_overwritten(self, version: Version | None) -> bool:
        """Whether rows of this version, as `version` gave it, have been written over since."""
        pushed = self.prefetcher.pushed
        return pushed is not None and pushed.was_overwritten(self, version)

    def _start(self, shard: Tensor) -> Pending:
        return start_gather_rows(self.precision.cast(shard), self.rows, self.group)


@dataclass(frozen=True)
class LinearPlan:
    """One linear's part of Algorithm 3: over which ranks the forward and the backward pass sum.

    A colwise linear sums its output over y, along which its input's features are split, and its input's gradient over
    x, along which its output's are; a rowwise one the other way round. `name` is its name in the model.
    `is_transposed`: the weight is stored [in, out] (Conv1D) rather than [out, in].
    """

    name: str
    shard: WeightShard
    input_axis: str
    output_axis: str
    output_group: dist.ProcessGroup
    input_group: dist.ProcessGroup
    is_transposed: bool
    keep_gathered: bool
    hides_all_reduce: bool
    matmuls: MatmulTuner
    place: int  # which of the model's linears this is
    is_rowwise: bool = False
    tokens: TokenShards | None = None  # activations between blocks are sharded by tokens

    def multiply(self, role: str, a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """a @ b, one of this linear's three products, in `dtype` if that is given; a may have leading dims."""
        product = self.matmuls.multiply(self.place, role, a.flatten(0, -2), b, dtype=dtype)
        return product.view(*a.shape[:-1], b.shape[1])

    def multiply_and_sum(self, x: Tensor, matrix: Tensor) -> Tensor:
        """The output x @ matrix, summed over the output's ranks."""
        rows, (inputs, columns) = x.flatten(0, -2), matrix.shape
        num_bytes = rows.shape[0] * columns * x.element_size()
        if self.output_group.size() == 1 or num_bytes < HALVED_BYTES or inputs < HALVED_INPUTS:
            product = self.multiply("output", x, matrix)
            return product if self.output_group.size() == 1 else all_reduce(own(product), self.output_group)
        y = x.new_empty(rows.shape[0], columns)
        pending = []
        for some_rows, out in zip(rows.chunk(2), y.chunk(2), strict=True):
            self.matmuls.multiply(self.place, "output", some_rows, matrix, out=out)
            pending.append(start_all_reduce(out, self.output_group))
            if not self.hides_all_reduce:
                pending[-1].wait()
        for half in pending:
            half.wait()
        return y.view(*x.shape[:-1], columns)

    def weight_for_backward(self, kept: Tensor | None, parameter: Tensor, version: Version | None) -> Tensor:
        """The weight that the forward pass took, kept or gathered again. RuntimeError if it was written over since."""
        if kept is None:
            return self.shard.gather(parameter)
        if self.shard.was_overwritten(version):
            raise RuntimeError(
                f"the weight of {self.name} was changed, and a forward pass run with it, before the backward pass of "
                "an earlier one: take that first, or parallelize with overlap=Overlap(copy_engines=False)"
            )
        return kept

    def deliver_gradient(self, parameter: nn.Parameter, x: Tensor, gradient: Tensor) -> None:
        """Make the weight's gradient of x [tokens, inputs] and the output's [tokens, outputs], and send it."""
        left, right = (x, gradient) if self.is_transposed else (gradient, x)
        dtype = self.shard.gradient_dtype(parameter)
        self.shard.deliver(parameter, self.multiply("weight", left.t(), right, dtype))


class _Linear3D(torch.autograd.Function):
    """Takes the DTensor parameter itself: its gradient goes there by `WeightShard.deliver`, not through autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
        weight = plan.shard.gather(parameter, is_recorded=bool(ctx.next_functions))
        sums_output = plan.output_group.size() > 1
        matrix = weight if plan.is_transposed else weight.t()
        # A bias is added once: inside the product where one rank has all of it, after the sum otherwise.
        if bias is not None and not sums_output:
            y = F.linear(x, matrix.t(), bias)
        else:
            y = plan.multiply_and_sum(x, matrix)
            if bias is not None:
                y += bias
        ctx.plan, ctx.has_bias, ctx.parameter = plan, bias is not None, parameter
        ctx.version = plan.shard.version(weight)
        ctx.save_for_backward(x, weight if plan.keep_gathered else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plan: LinearPlan = ctx.plan
        x, weight = ctx.saved_tensors
        grad_x = grad_bias = pending = None
        if ctx.needs_input_grad[0]:
            weight = plan.weight_for_backward(weight, ctx.parameter, ctx.version)
            grad_x = plan.multiply("input", gradient, weight.t() if plan.is_transposed else weight)
            pending = start_all_reduce(grad_x, plan.input_group)
            if not plan.hides_all_reduce:
                pending.wait()
        rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)
        if is_asked_for(ctx, 1):
            plan.deliver_gradient(ctx.parameter, columns, rows)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        if pending is not None:
            pending.wait()
        return grad_x, None, grad_bias, None


class ParallelLinear(ShardedModule):
    """A linear whose weight is sharded over x, y and z.

    Colwise: x [..., in / Y] -> [..., out / X]; rowwise: x [..., in / X] -> [..., out / Y]; other axes see copies.
    `weight` and `bias` are DTensor parameters of the whole shape; the bias follows the output's features.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, plan: LinearPlan) -> None:
        super().__init__(plan.shard.gradients)
        self.weight = weight
        self.register_parameter("bias", bias)
        self.plan = plan

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        self.check_input(x)
        cast = self.plan.shard.precision.cast
        bias = None if self.bias is None else cast(local(self.bias))
        y = self._multiply(cast(x), bias)
        return note_features(y, self.plan.output_axis)

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        tokens = self.plan.tokens
        if tokens is None:
            return _Linear3D.apply(x, self.weight, bias, self.plan)
        rows = x.flatten(0, -2).contiguous()
        if self.plan.is_rowwise:
            tokens.whole(rows)  # refuses tokens of another batch
            return ScatteringLinear.apply(rows, self.weight, bias, self.plan).unsqueeze(0)
        # Linears that take the same input share what the first of them has gathered.
        version, known = getattr(x, "stretto_gathered", (None, None))
        gathered = known if version == x._version else None
        y, gathered = GatheringLinear.apply(rows, gathered, self.weight, bias, self.plan)
        x.stretto_gathered = (x._version, gathered)  # type: ignore[attr-defined]
        return tokens.whole(y)

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError for features that are split over the wrong axis, and for an autocast that would differ."""
        plan = self.plan
        if plan.input_group.size() * plan.output_group.size() > 1:
            check_features(x, plan.input_axis, plan.name)
        device, dtype = x.device.type, plan.shard.precision.compute or self.weight.dtype
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype:
            raise ValueError(
                f"torch.autocast to {torch.get_autocast_dtype(device)} is on around {plan.name}, which computes in "
                f"{dtype}: leave autocast out, and call parallelize(..., dtype={torch.get_autocast_dtype(device)})"
            )

    @property
    def in_features(self) -> int:
        """Of the whole input, as the linear had it: models read it in their own code."""
        return self.weight.shape[0 if self.plan.is_transposed else 1]

    @property
    def out_features(self) -> int:
        """Of the whole output."""
        return self.weight.shape[1 if self.plan.is_transposed else 0]

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)} of which {tuple(local(self.weight).shape)} here"
