"""Activations between blocks sharded by tokens over x: all-gathers and reduce-scatters in place of all-reduces.

Between a rowwise linear and the next colwise one every x rank would do the same to the same activations. Here each has
its part of the tokens: a colwise linear gathers them, a rowwise one scatters its sum, and on GPUs both are done within
the product (`stretto.ops`). Tokens are those of the rank's batch in order, [batch x seq] cut into equal parts, so that
parts need be neither whole sequences nor parts of one.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.parallel.comm.autograd import is_asked_for
from stretto.parallel.comm.collectives import all_reduce, gather_rows, own, scatter_rows

if TYPE_CHECKING:
    from stretto.parallel.layers.linear import LinearPlan


class TokenShards:
    """How the tokens of the batch that a model was given last are shared out over the ranks of x.

    The embedding notes the batch's shape, which everything after it goes by.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.shape = (0, 0)

    def note(self, shape: torch.Size) -> None:
        """A batch of ids [batch, seq] begins. ValueError for one whose tokens the ranks cannot share equally."""
        if len(shape) != 2:
            raise ValueError(f"with sequence sharding, token ids are [batch, seq], not {list(shape)}")
        tokens, ranks = shape[0] * shape[1], self.group.size()
        if tokens % ranks:
            nearest = max(1, round(tokens / ranks)) * ranks
            raise ValueError(
                f"sequence sharding over x={ranks}: the {tokens} tokens of a batch [{shape[0]}, {shape[1]}] cannot be "
                f"shared equally; {nearest} could"
            )
        self.shape = (shape[0], shape[1])

    @property
    def here(self) -> slice:
        """This rank's tokens among all of the batch."""
        count = self.shape[0] * self.shape[1] // self.group.size()
        return slice(self.group.rank() * count, (self.group.rank() + 1) * count)

    def whole(self, rows: Tensor) -> Tensor:
        """[tokens, features] as [batch, seq, features]. ValueError for tokens of another batch than the last."""
        if rows.shape[0] != self.shape[0] * self.shape[1]:
            raise ValueError(
                f"{rows.shape[0]} tokens are not those of the last batch, {list(self.shape)}: with sequence sharding "
                "call the model as a whole, and end a batch's passes before one of another shape begins"
            )
        return rows.view(*self.shape, rows.shape[-1])

    def gather(self, part: Tensor) -> Tensor:
        """Hidden [tokens / x, features] of all tokens, whose gradients are the same on all ranks of x."""
        return _GatherTokens.apply(part, self.group)

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This rank's tokens [1, tokens / x, features] of the sum over x of [batch, seq, features]."""
        rows = whole.flatten(0, -2)
        return scatter_rows(rows, rows.shape[0] // self.group.size(), self.group).unsqueeze(0)

    def gather_rows(self, part: Tensor) -> Tensor:
        """[batch, seq, features] of [1, tokens / x, features], without a gradient."""
        rows = part.flatten(0, -2)
        return self.whole(gather_rows(rows, rows.shape[0] * self.group.size(), self.group))


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.here = slice(group.rank() * part.shape[0], (group.rank() + 1) * part.shape[0])
        return gather_rows(part, part.shape[0] * group.size(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient[ctx.here], None


class GatheringLinear(torch.autograd.Function):
    """A colwise linear: x [tokens / x, k] of this rank -> [tokens, n / x]; its input's gradient is scattered."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gathered: Tensor | None, parameter: Tensor, bias: Tensor | None, plan: "LinearPlan"
    ) -> tuple[Tensor, Tensor]:
        weight = plan.shard.gather(parameter, is_recorded=bool(ctx.next_functions))
        matrix = weight.t() if plan.is_transposed else weight
        ctx.took_gathered = gathered is not None
        if gathered is None:
            y, gathered = _gather_and_multiply(x, matrix, plan.input_group, overlaps=plan.hides_all_reduce)
        else:
            y = gathered @ matrix.t()
        y = all_reduce(own(y), plan.output_group)
        if bias is not None:
            y += bias
        ctx.plan, ctx.parameter, ctx.has_bias, ctx.version = (
            plan,
            parameter,
            bias is not None,
            plan.shard.version(weight),
        )
        ctx.columns = y.shape[1]
        ctx.save_for_backward(gathered, weight if plan.keep_gathered else None)
        ctx.mark_non_differentiable(gathered)
        ctx.set_materialize_grads(False)  # torch would fill zeros of gathered's size
        return y, gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        plan, (gathered, weight) = ctx.plan, ctx.saved_tensors
        if gradient is None:  # what took the output has none for it; other ranks' may, and they wait for this one
            gradient = gathered.new_zeros(gathered.shape[0], ctx.columns)
        gradient = gradient.contiguous()
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = plan.weight_for_backward(weight, ctx.parameter, ctx.version)
            across = weight if plan.is_transposed else weight.t()  # [k, n]
            grad_x = _multiply_and_scatter(gradient, across, plan.input_group, overlaps=plan.hides_all_reduce)
        if is_asked_for(ctx, 2 if ctx.took_gathered else 1):
            plan.deliver_gradient(ctx.parameter, gathered, gradient)
        grad_bias = gradient.sum(0) if ctx.has_bias and ctx.needs_input_grad[3] else None
        return grad_x, None, None, grad_bias, None


class ScatteringLinear(torch.autograd.Function):
    """A rowwise linear: x [tokens, k / x] -> this rank's tokens of the sum over x, [tokens / x, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, bias: Tensor | None, plan: "LinearPlan") -> Tensor:
        weight = plan.shard.gather(parameter, is_recorded=bool(ctx.next_functions))
        matrix = weight.t() if plan.is_transposed else weight
        y = _multiply_and_scatter(x, matrix, plan.output_group, overlaps=plan.hides_all_reduce)
        if bias is not None:
            y += bias
        ctx.plan, ctx.parameter, ctx.has_bias, ctx.version = (
            plan,
            parameter,
            bias is not None,
            plan.shard.version(weight),
        )
        ctx.save_for_backward(x, weight if plan.keep_gathered else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        plan, (x, weight) = ctx.plan, ctx.saved_tensors
        gradient = gradient.contiguous()
        grad_bias = gradient.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None  # of these tokens
        wants_weight = is_asked_for(ctx, 1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = plan.weight_for_backward(weight, ctx.parameter, ctx.version)
            across = weight if plan.is_transposed else weight.t()  # [k, n]
            grad_x, gradient = _gather_and_multiply(gradient, across, plan.output_group, overlaps=plan.hides_all_reduce)
            all_reduce(grad_x, plan.input_group)
        elif wants_weight:
            gradient = gather_rows(gradient, gradient.shape[0] * plan.output_group.size(), plan.output_group)
        if wants_weight:
            plan.deliver_gradient(ctx.parameter, x, gradient)
        return grad_x, None, grad_bias, None


def _gather_and_multiply(
    x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, overlaps: bool
) -> tuple[Tensor, Tensor]:
    """x of all ranks, [tokens, k], times weight [n, k] transposed; and that x itself."""
    if overlaps and _has_kernel(x, group):
        from stretto.ops import all_gather_matmul_gathered

        return all_gather_matmul_gathered(x, weight, group)
    gathered = gather_rows(x, x.shape[0] * group.size(), group)
    return gathered @ weight.t(), gathered


def _multiply_and_scatter(x: Tensor, weight: Tensor, group: dist.ProcessGroup, *, overlaps: bool) -> Tensor:
    """This rank's rows of the sum over ranks of x [tokens, k] times weight [n, k] transposed."""
    if overlaps and _has_kernel(x, group):
        from stretto.ops import matmul_reduce_scatter

        return matmul_reduce_scatter(x, weight, group)
    return scatter_rows(x @ weight.t(), x.shape[0] // group.size(), group)


def _has_kernel(x: Tensor, group: dist.ProcessGroup) -> bool:
    return x.is_cuda and group.size() > 1
