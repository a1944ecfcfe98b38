"""The 3D-parallel linear of paper 003, Algorithm 3."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.parallel.communication import all_reduce, gather_rows, scatter_rows


@dataclass(frozen=True)
class Precision:
    """In which dtypes a parallelized module works.

    `compute` is the dtype of activations and of weights on the wire (None: the parameter's own); `reduce` that of
    weight gradients on the wire (None: as computed). Parameters and their accumulated gradients keep their own dtype.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor if self.compute is None else tensor.to(self.compute)


@dataclass(frozen=True)
class WeightShard:
    """How a weight's shard becomes the block that one rank multiplies with: gathered over z along dim 0."""

    rows: int
    local_rows: int
    group: dist.ProcessGroup
    precision: Precision

    def gather(self, shard: Tensor) -> Tensor:
        """All-gather over z (Algorithm 3, line 2), in the compute dtype."""
        return gather_rows(self.precision.cast(shard), self.rows, self.group)

    def scatter(self, gradient: Tensor) -> Tensor:
        """Reduce-scatter over z (line 14), in the reduction dtype."""
        if self.precision.reduce is not None:
            gradient = gradient.to(self.precision.reduce)
        return scatter_rows(gradient, self.local_rows, self.group)


@dataclass(frozen=True)
class LinearPlan:
    """One linear's part of Algorithm 3: over which ranks the forward and the backward pass sum.

    A normal linear sums its output over y and its input's gradient over x; a swapped one the other way round.
    `is_transposed`: the weight is stored [in, out] (Conv1D) rather than [out, in].
    """

    shard: WeightShard
    output_group: dist.ProcessGroup
    input_group: dist.ProcessGroup
    is_transposed: bool
    keep_gathered: bool


class _Linear3D(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Tensor, bias: Tensor | None, plan: LinearPlan) -> Tensor:
        weight = plan.shard.gather(shard)
        sums_output = plan.output_group.size() > 1
        matrix = weight.t() if plan.is_transposed else weight
        # A bias is added once: inside the product where one rank has all of it, after the sum otherwise.
        y = F.linear(x, matrix, None if sums_output else bias)
        if sums_output:
            all_reduce(y, plan.output_group)
            if bias is not None:
                y += bias
        ctx.plan, ctx.has_bias = plan, bias is not None
        ctx.save_for_backward(x, weight if plan.keep_gathered else shard)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plan: LinearPlan = ctx.plan
        x, kept = ctx.saved_tensors
        grad_x = grad_shard = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight = kept if plan.keep_gathered else plan.shard.gather(kept)
            grad_x = all_reduce(gradient @ (weight.t() if plan.is_transposed else weight), plan.input_group)
        rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            product = columns.t() @ rows if plan.is_transposed else rows.t() @ columns
            grad_shard = plan.shard.scatter(product)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_shard, grad_bias, None


class ParallelLinear(nn.Module):
    """A linear whose weight is sharded over x, y and z.

    Normal: x [..., in / Y] -> [..., out / X]; swapped: x [..., in / X] -> [..., out / Y]; other axes see copies.
    `weight` and `bias` are DTensor parameters of the whole shape; the bias follows the output's features.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, plan: LinearPlan) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.plan = plan

    def forward(self, x: Tensor) -> Tensor:
        cast = self.plan.shard.precision.cast
        bias = None if self.bias is None else cast(local(self.bias))
        return _Linear3D.apply(cast(x), local(self.weight), bias, self.plan)

    def extra_repr(self) -> str:
        return f"weight={tuple(self.weight.shape)} of which {tuple(local(self.weight).shape)} here"


def local(parameter: Any) -> Tensor:
    """This rank's shard of a DTensor parameter; its gradient flows back into the parameter's own shard."""
    return parameter.to_local()
