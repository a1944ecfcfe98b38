# SPDX-License-Identifier: Apache-2.0
"""The language-model head and its cross-entropy, with the vocabulary over x: whole logits are never materialized."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from stretto.axes import LOSS
from stretto.execution import IGNORED_TARGET, LOGITS_ROW_MULTIPLE, LOGITS_SLICE
from stretto.ops import cross_entropy
from stretto.parallel.comm.autograd import is_asked_for, once_differentiable
from stretto.parallel.comm.collectives import all_reduce
from stretto.parallel.comm.gradient_norm import scale_by, scale_gradients
from stretto.parallel.grid import Grid
from stretto.parallel.layers.embedding import check_ids
from stretto.parallel.layers.linear import ParallelLinear
from stretto.parallel.layers.linear_plan import LinearPlan
from stretto.parallel.layers.norm import statistics_dtype
from stretto.parallel.layers.sharded_module import gather_features
from stretto.suggestions import require_type

_TILE = 256  # tokens, of which a slice has a multiple, as products take them


class ParallelHead(ParallelLinear):
    """The head: hidden [..., hidden / Y] -> whole logits [..., vocab] on every rank.

    While the model computes its own loss, `defers_loss` is set and the head returns its input: the loss then computes
    the product slice by slice. `parallelize` sets it, by hooks on the model's forward. Without `gathers_logits` it
    returns those of this rank's part of the vocabulary: an engine draws tokens from these.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, plan: LinearPlan, first_row: int, grid: Grid
    ) -> None:
        super().__init__(weight, bias, plan)
        self.first_row = first_row
        self.grid = grid
        self.defers_loss = False
        self.gathers_logits = True
        self.passed_through: Tensor | None = None

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        if self.defers_loss:
            self.check_input(x)
            self.passed_through = x
            return x
        logits = super().forward(x)
        return gather_features(logits, self.vocab, self.grid.communicator("x")) if self.gathers_logits else logits


class _HeadLoss(torch.autograd.Function):
    """The loss summed over this rank's tokens, times `scale`, with its gradients taken in the same pass over slices."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        parameter: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        head: ParallelHead,
        is_recorded: bool,
    ) -> Tensor:
        plan = head.plan
        weight = plan.shard.gather(parameter, is_recorded=is_recorded).rows.to(hidden.dtype)
        rows = plan.shard.rows
        if rows % LOGITS_ROW_MULTIPLE:
            weight = F.pad(weight, (0, 0, 0, -rows % LOGITS_ROW_MULTIPLE))  # which copies, even where it adds no rows
        exact = statistics_dtype(hidden)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        # Gradients of a mean are too small for fp16, and a GradScaler's factor comes with the backward pass.
        divides_later = hidden.dtype == torch.float16
        factor = torch.ones_like(scale) if divides_later else scale
        needs_gradient = is_recorded and any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if needs_gradient else None
        wants_weight = needs_gradient and parameter.requires_grad
        grad_weight: Tensor | None = None
        grad_bias = (
            torch.zeros(rows, dtype=exact, device=hidden.device) if bias is not None and needs_gradient else None
        )
        has_kernels = bias is None and cross_entropy.suits_kernels(hidden)
        length = _tokens_of_slice(head, len(hidden), hidden.dtype, is_wide=not has_kernels)
        for start in range(0, hidden.shape[0], length):
            part = slice(start, start + length)
            if plan.is_invariant:
                logits = plan.multiply_invariantly(hidden[part], weight, None)
            else:
                logits = all_reduce(hidden[part] @ weight.t(), plan.output_reduce_group)
            is_valid = targets[part] != IGNORED_TARGET
            scales = torch.where(is_valid, factor, 0) if grad_hidden is not None else None  # it is inf of none
            own_targets, group = targets[part] - head.first_row, head.grid.communicator("x")
            if has_kernels:
                loss = _cross_entropy_by_kernels(logits, own_targets, scales, rows, group)
                gradient = logits
            else:
                logits = logits.to(exact)
                if bias is not None:
                    logits[:, :rows] += bias
                logits[:, rows:] = -torch.inf
                loss, gradient = _cross_entropy(logits, own_targets, rows, group)
                if scales is not None:
                    gradient *= scales.unsqueeze(-1)
                    if grad_bias is not None:
                        grad_bias += gradient[:, :rows].sum(0)
                    gradient = gradient.to(hidden.dtype)
            del logits  # the next slice's take its memory again
            total += torch.where(is_valid, loss, 0).sum()
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
                if wants_weight:
                    grad_weight = _add_product(grad_weight, gradient.t(), hidden[part], exact)
            del gradient
        if grad_hidden is not None:
            if wants_weight and grad_weight is None:  # of no tokens
                grad_weight = hidden.new_zeros(weight.shape)
            all_reduce(grad_hidden, plan.input_grad_reduce_group)
            dtype = plan.shard.precision.compute or parameter.dtype
            own = None if grad_weight is None else grad_weight[:rows].to(exact if divides_later else dtype)
            ctx.save_for_backward(grad_hidden, own, grad_bias)
            ctx.dtype, ctx.scale = dtype, torch.where(scale.isinf(), 0, scale) if divides_later else None
        ctx.plan, ctx.parameter = plan, parameter
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        if ctx.scale is not None:
            gradient = gradient * ctx.scale
        wanted = [each for each in (grad_hidden, grad_weight) if each is not None]
        if torch._C._autograd._get_current_graph_task_keep_graph():  # for another backward pass
            wanted = [scale_by(each, gradient) for each in wanted]
        else:
            scale_gradients(wanted, gradient)  # in their memory
        grad_hidden, grad_weight = wanted[0], wanted[-1]
        if is_asked_for(ctx, 1):
            ctx.plan.shard.start_reduction(ctx.parameter, grad_weight.to(ctx.dtype))
        return grad_hidden, None, None if grad_bias is None else grad_bias * gradient, None, None, None, None


def _sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of whole logits [..., vocabulary], summed over the targets [tokens] that are not ignored."""
    logits = logits.flatten(0, -2)
    if cross_entropy.suits_kernels(logits):
        return _WholeLogitsLoss.apply(logits.contiguous(), targets)
    return F.cross_entropy(logits.to(statistics_dtype(logits)), targets, ignore_index=IGNORED_TARGET, reduction="sum")


def _tokens_of_slice(head: ParallelHead, tokens: int, dtype: torch.dtype, *, is_wide: bool) -> int:
    """The number of tokens whose logits are in memory at a time: of about equal slices. is_wide: they are also stored
    in fp32.

    Ranks that have the same tokens must take the same slices, whatever their part of the vocabulary.
    """
    widest = max(1, -(-head.vocab // head.grid.size("x")))
    numbers = LOGITS_SLICE if is_wide else LOGITS_SLICE * (torch.float32.itemsize + dtype.itemsize) // dtype.itemsize
    most = max(1, numbers // widest)
    if most < _TILE:
        return most
    slices = -(-tokens // (most // _TILE * _TILE))
    return -(-tokens // max(slices, 1) // _TILE) * _TILE or most


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Add a @ b to `total`, if there is one, of `dtype`: on a GPU within the product, without a rounding between."""
    if total is None:
        narrow = dtype != a.dtype
        return torch.mm(a, b, out_dtype=dtype) if narrow and a.is_cuda else (a @ b).to(dtype)
    if dtype == a.dtype:
        return total.addmm_(a, b)
    if total.is_cuda:
        return torch.ops.aten.addmm.dtype_out(total, a, b, dtype, out=total)
    return total.add_(a @ b)


def _cross_entropy_by_kernels(
    logits: Tensor, targets: Tensor, scales: Tensor | None, rows: int, group: dist.ProcessGroup
) -> Tensor:
    """Cross-entropy [tokens] as of `_cross_entropy`, by kernels.

    Logits become its gradient times `scales` [tokens] if that is given, and are not changed otherwise.
    """
    highest, sums, of_target = cross_entropy.read_statistics(logits, targets, rows)
    if group.size() > 1:
        own_highest = highest
        highest = all_reduce(own_highest.clone(), group, dist.ReduceOp.MAX)
        sums = sums * (own_highest - highest).exp()
        sums, of_target = all_reduce(torch.stack((sums, of_target)), group)
    if scales is not None:
        cross_entropy.write_gradients(logits, targets, highest, sums, scales, rows)
    return sums.log() + highest - of_target


def _cross_entropy(logits: Tensor, targets: Tensor, rows: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Cross-entropy [tokens] of logits [tokens, part of the vocabulary], and its gradient by the logits (in place).

    `targets` count from this rank's first row; those outside [0, rows) belong to other ranks.
    """
    highest = all_reduce(logits.amax(-1), group, dist.ReduceOp.MAX)
    logits -= highest.unsqueeze(-1)
    is_here = (targets >= 0) & (targets < rows)
    index = targets.clamp(0, max(rows - 1, 0)).unsqueeze(-1)
    of_target = torch.where(is_here, logits.gather(-1, index).squeeze(-1), 0)
    logits.exp_()
    sums = all_reduce(torch.stack((logits.sum(-1), of_target)), group)
    loss = sums[0].log() - sums[1]
    logits /= sums[0].unsqueeze(-1)
    logits.scatter_add_(-1, index, -is_here.to(logits.dtype).unsqueeze(-1))
    return loss, logits


class _WholeLogitsLoss(torch.autograd.Function):
    """The loss of whole logits [tokens, vocabulary] summed over the tokens that have a target, by kernels.

    They read the logits twice, and write the gradient once; torch's operators also write two fp32 copies.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        highest, sums, of_target = cross_entropy.read_statistics(logits, targets, logits.shape[1])
        ctx.save_for_backward(logits, targets, highest, sums)
        return torch.where(targets != IGNORED_TARGET, sums.log() + highest - of_target, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets, highest, sums = ctx.saved_tensors
        scales, of_logits = torch.where(targets != IGNORED_TARGET, gradient, 0), torch.empty_like(logits)
        cross_entropy.write_gradients(logits, targets, highest, sums, scales, logits.shape[1], of_logits)
        return of_logits, None


class _SumOverLossGroup(torch.autograd.Function):
    """Sum the ranks' parts of the loss. Gradients flow to a rank's own part.

    averages: those of parameters are averaged over the ranks later, so that here they are multiplied by their number.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, averages: bool) -> Tensor:
        ctx.scale = group.size() if averages else 1
        return all_reduce(part.clone(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient if ctx.scale == 1 else gradient * ctx.scale, None, None


def mean_over_batch(total: Tensor, count: Tensor | int, grid: Grid) -> Tensor:
    """The global mean of a loss of which each rank has a part: the sum of `total` over the sum of `count`.

    `total` is this rank's sum over its own valid tokens (a scalar), `count` how many they are. The value is the same on
    every rank, and its gradients are final: for losses of your own, use it in place of `.mean()`. Raises ValueError if
    the grid has models that sum gradients and others that average them (`parallelize(gradients=...)`).
    """
    require_type(grid, Grid, "grid")
    require_type(total, Tensor, "total")
    require_type(count, Tensor | float, "count")
    if not isinstance(count, Tensor) and count < 0:
        raise ValueError(f"count is {count}, but must be at least 0: the targets of this rank's part of the batch")
    if len(grid.gradients) > 1 and grid.size(LOSS) > 1:
        raise ValueError(
            "mean_over_batch: this grid has models whose gradients are summed and others whose gradients are averaged: "
            "make a Grid for each kind"
        )
    return _mean_over_batch(total, count, grid, is_averaged="sum" not in grid.gradients)


def _mean_over_batch(total: Tensor, count: Tensor | int, grid: Grid, *, is_averaged: bool) -> Tensor:
    # A number is filled in on the device: a copy from the host cannot be captured.
    counts = (
        count.to(total.device, copy=True) if isinstance(count, Tensor) else torch.full((), count, device=total.device)
    )
    part, group = total / all_reduce(counts, grid.communicator(LOSS)), grid.communicator(LOSS)
    return _SumOverLossGroup.apply(part, group, is_averaged)


def is_mean_over_batch(loss: Tensor) -> bool:
    """True if `mean_over_batch` has computed the loss, or a term of it."""
    seen, waiting = set(), [loss.grad_fn]
    for node in waiting:  # breadth first: it is among the last things that were done
        if node is None or node in seen:
            continue
        if node.name() == "_SumOverLossGroupBackward":
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False


class MeansOverBatch(TorchFunctionMode):
    """Replaces the mean of a loss function of torch over this rank's rows by that over the global batch, wherever
    Python code calls it; also the sum of CTC losses.

    For models whose own code computes a loss. A cross-entropy with another reduction raises ValueError, unless
    `passes_others`: it stays each rank's own, as does any without `has_targets`: a model that is given none compares
    rows with each other (CLIP). is_averaged: whether the model's gradients are averaged over the ranks, and not summed.
    The attribute `adds_sums`: whether a sum of cross-entropies is one over the global batch, which the caller divides
    by its own count. `was_computed`: a loss of the global batch, since the caller that reads it has set it to False.
    """

    def __init__(self, grid: Grid, *, passes_others: bool = False, is_averaged: bool = True) -> None:
        super().__init__()
        self.grid = grid
        self.passes_others = passes_others
        self.is_averaged = is_averaged
        self.has_targets = True
        self.adds_sums = False
        self.was_computed = False
        self._left_by: nn.Module | None = None

    def leave(self, module: nn.Module, *_: object) -> None:
        """A forward pre-hook of a module that computes no loss: a mode costs each of its operators a call of Python."""
        if not torch.compiler.is_dynamo_compiling() and _get_current_function_mode() is self:
            _pop_mode()
            self._left_by = module

    def enter_again(self, module: nn.Module, *_: object) -> None:
        """The forward hook that belongs to `leave`."""
        if not torch.compiler.is_dynamo_compiling() and self._left_by is module:
            self._left_by = None
            _push_mode(self)

    def __exit__(self, *error: Any) -> None:
        if self._left_by is None:
            super().__exit__(*error)
        self._left_by = None  # else that module has raised

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _LOSSES:
            return func(*args, **(kwargs or {}))
        return self._replace(func, args, kwargs or {})

    @torch.compiler.disable
    def _replace(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        reduction, group = options["reduction"], self.grid.communicator(LOSS)
        is_ctc, is_entropy = func is F.ctc_loss, func in _ENTROPIES
        if reduction == "sum" and (is_ctc or (is_entropy and self.adds_sums)):
            self.was_computed = True
            return _SumOverLossGroup.apply(func(*args, **kwargs), group, self.is_averaged)
        if reduction != "mean" or (is_entropy and not self.has_targets):
            if self.passes_others or not is_entropy:
                return func(*args, **kwargs)
            raise ValueError(
                "this model's own code computes a cross-entropy that is no mean, which Stretto cannot take over the "
                "global batch: call it without labels, and use stretto.parallel.mean_over_batch"
            )
        self.was_computed = True
        options["reduction"] = "none" if is_ctc else "sum"
        total = func(*given.args, **given.kwargs)
        if is_ctc:
            lengths = torch.as_tensor(options["target_lengths"], device=total.device)
            count, total = lengths.numel(), (total / lengths.clamp(min=1)).sum()
        else:
            count = _count_entropies(options) if is_entropy else _count_elements(options)
        return _mean_over_batch(total, count, self.grid, is_averaged=self.is_averaged)


_ENTROPIES = frozenset((F.cross_entropy, F.nll_loss))
_LOSSES = _ENTROPIES | {
    F.ctc_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
}  # fmt: skip


def _count_entropies(options: dict[str, Any]) -> Any:
    """The divisor of a mean of cross-entropies: targets that are not ignored, or the sum of their classes' weights."""
    target, weight = options["target"], options["weight"]
    if target.is_floating_point():  # probabilities, of which torch weighs none
        return torch.tensor(
            target.numel() // options["input"].shape[1 if target.dim() > 1 else 0], device=target.device
        )
    is_valid = target != options["ignore_index"]
    return is_valid.sum() if weight is None else weight[target[is_valid]].sum()


def _count_elements(options: dict[str, Any]) -> int:
    return torch.broadcast_shapes(options["input"].shape, options["target"].shape).numel()


class ParallelLoss(nn.Module):
    """Cross-entropy of the head's logits over the global batch: one mean over all valid targets, whatever the grid.

    targets [batch / (data x Z), seq] int64, -100 where there is none; `num_targets`, when given, is the divisor (of the
    global batch: with gradient accumulation one micro-batch cannot know it). Returns the same scalar on every rank.
    ValueError for targets outside of the vocabulary, and where there is not one for each of this rank's tokens.
    """

    def __init__(self, head: ParallelHead) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple: not a submodule, or its parameters would be there under two names
        self.was_computed = False  # since the caller that reads it has set it to False

    @torch.compiler.disable
    def forward(self, logits: Tensor, targets: Tensor, num_targets: Tensor | int | None = None) -> Tensor:
        (head,) = self._head
        self.was_computed = True
        hidden, head.passed_through = head.passed_through, None
        if hidden is not None and logits is not hidden:
            raise ValueError(
                "this model changes its logits between head and loss (scales or caps them, say), which a sharded loss "
                "would miss: call parallelize(..., sharded_loss=False)"
            )
        loss_group, averages = head.grid.communicator(LOSS), head.plan.shard.gradients.averages
        check_ids(targets, head.vocab, "target", ignored=IGNORED_TARGET)
        tokens = logits.shape[:-1].numel()
        if hidden is not None and head.plan.tokens is not None:
            tokens *= head.plan.tokens.group.size()
        if targets.numel() != tokens:  # taken slice by slice, those that are too many could go unnoticed
            raise ValueError(
                f"targets {list(targets.shape)} are {targets.numel()}, but there are logits for {tokens} tokens: give "
                f"each token a target, {IGNORED_TARGET} where it has none"
            )
        targets = targets.flatten()
        if num_targets is None:
            num_targets = all_reduce((targets != IGNORED_TARGET).sum(), loss_group)
        if hidden is None:  # the model's forward has no targets: these are whole logits
            return _SumOverLossGroup.apply(_sum_of_losses(logits, targets) / num_targets, loss_group, averages)
        precision = head.plan.shard.precision
        hidden = precision.cast_operand(hidden).flatten(0, -2)
        if head.plan.tokens is not None:
            hidden = head.plan.tokens.gather(hidden)
        scale = torch.ones((), dtype=statistics_dtype(hidden), device=hidden.device) / num_targets
        bias = None if head.bias is None else head.local_bias()
        # A Function's own flags say that gradients are needed under no_grad too.
        part = _HeadLoss.apply(hidden, head.weight, bias, targets, scale, head, torch.is_grad_enabled())
        return _SumOverLossGroup.apply(part, loss_group, averages)


class LossOfRows(nn.Module):
    """Cross-entropy of whole logits [..., vocabulary] of this rank's rows, over the global batch: one mean over all
    valid targets.

    It takes and returns what `ParallelLoss` does, for a model that is sharded block by block.
    """

    def __init__(self, grid: Grid, *, is_averaged: bool) -> None:
        super().__init__()
        self.grid = grid
        self.is_averaged = is_averaged
        self.was_computed = False

    @torch.compiler.disable
    def forward(self, logits: Tensor, targets: Tensor, num_targets: Tensor | int | None = None) -> Tensor:
        check_ids(targets, logits.shape[-1], "target", ignored=IGNORED_TARGET)
        total, targets = _sum_of_losses(logits, targets.flatten()), targets.flatten()
        if num_targets is None:
            count = (targets != IGNORED_TARGET).sum()
            return _mean_over_batch(total, count, self.grid, is_averaged=self.is_averaged)
        return _SumOverLossGroup.apply(total / num_targets, self.grid.communicator(LOSS), self.is_averaged)


def covers_batch(loss: Tensor) -> bool:
    """True if all of a loss depends on parameters by terms of the global batch alone."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:  # depth first: the way to a parameter is found soon
        node = waiting.pop()
        if node is None or node in seen or node.name() in _OF_BATCH:
            continue
        if not node.next_functions:
            return False
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return True


_OF_BATCH = ("_SumOverLossGroupBackward", "_GatherTokensOfRanksBackward")  # of the loss, and of routers' losses
