# SPDX-License-Identifier: Apache-2.0
"""Puts the sharded loss into a model, and has means that its own code takes be of the global batch."""

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.axes import LOSS
from stretto.huggingface import router_loss
from stretto.huggingface.loss import (
    calls_loss_function,
    changes_logits,
    refuse_losses_of_one_rank,
    replace_loss_function,
)
from stretto.huggingface.pretrained_model import unwrap
from stretto.huggingface.router_loss import RanksOfBatch
from stretto.parallel.blocks import find_blocks
from stretto.parallel.comm.autograd import compiled_within
from stretto.parallel.comm.collectives import gather_rows
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.layers.loss import (
    LossOfRows,
    MeansOverBatch,
    ParallelHead,
    ParallelLoss,
    covers_batch,
    is_mean_over_batch,
)
from stretto.parallel.layers.router import count_over_ranks
from stretto.parallel.layers.sharded_module import ShardedModule
from stretto.parallel.roles.plan import ShardingPlan

_TARGETS = ("targets", "labels")  # their names in models' forward
_ANSWERS = ("start_positions", "end_positions", "ans")  # targets beside all whose names have "label" or "target"


def install_loss(model: nn.Module, plan: ShardingPlan, gradients: GradientReducer, is_sharded: bool) -> None:
    """Replace a loss function by the sharded loss, and have the head skip its product while the model computes it."""
    grid = gradients.grid
    head = next((model.get_submodule(name) for name in plan.named("head")), None)
    loss = ParallelLoss(head) if isinstance(head, ParallelHead) else None
    if plan.is_pretrained:
        calls = calls_loss_function(model)
        if loss is not None and not (calls and replace_loss_function(model, loss)):
            loss = None
        is_sharded = is_sharded and not changes_logits(model)
        if grid.size(LOSS) > 1:
            means = MeansOverBatch(grid, is_averaged=gradients.averages)
            if loss is None:  # the model's own code, or a function that is not known, computes it
                take_means_over_batch(model, means)
            refuse_losses_of_one_rank(model, loss or means)
    elif loss is None or not plan.named("loss"):  # the model returns whole logits, or computes its own loss
        if grid.size(LOSS) > 1:
            model.register_forward_hook(_refuse_means_of_one_rank)
        return
    taker = unwrap(model) if plan.is_pretrained else model
    signature = inspect.signature(taker.forward)
    target = next((name for name in _TARGETS if name in signature.parameters), None)
    if isinstance(head, ParallelHead) and loss is not None and target is not None and is_sharded:
        _defer_loss(taker, head, signature, target)


def balance_over_batch(model: nn.Module, gradients: GradientReducer) -> None:
    """Have the load-balancing loss that a transformers model's own code computes be that of the global batch."""
    grid, group = gradients.grid, gradients.grid.communicator(LOSS)
    scale = group.size() if gradients.averages else 1.0
    ranks = RanksOfBatch(group, gather_rows, grid.size("pipe"), gradients.loss_covers_own_rows, scale)
    router_loss.balance_over_batch(model, ranks)


def install_loss_of_rows(
    model: nn.Module, gradients: GradientReducer, *, is_pretrained: bool, overlaps: bool, is_fused: bool
) -> None:
    """Have a model that is sharded by blocks compute its loss, and losses of routers of stretto.models, over the global
    batch.

    overlaps: whether a sum of routers' counts goes on while the model computes. is_fused: whether a loss that is known
    is computed by kernels.
    """
    for module in model.modules():
        if hasattr(module, "sum_over_ranks"):  # a router of stretto.models
            count_over_ranks(module, gradients, None, overlaps=overlaps)
    if is_fused and calls_loss_function(model):
        loss = LossOfRows(gradients.grid, is_averaged=gradients.averages)
        if replace_loss_function(model, loss):
            return
    if is_pretrained and gradients.grid.size(LOSS) > 1:
        means = MeansOverBatch(gradients.grid, passes_others=True, is_averaged=gradients.averages)
        take_means_over_batch(model, means)
        _warn_of_losses_of_own_rows(model, gradients.grid.size(LOSS))


def _warn_of_losses_of_own_rows(model: nn.Module, ranks: int) -> None:
    """Have the first loss that a model returns warn, if it has terms that are known to be of each rank's rows alone."""
    is_told = False

    @torch.compiler.disable
    def look(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal is_told
        loss = output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)
        if is_told or not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            return
        is_told = True
        if dist.get_rank() == 0 and not covers_batch(loss):
            warnings.warn(
                f"{type(unwrap(model)).__name__} computes its loss, or a term of it, from each rank's own rows, and "
                f"gradients are averaged over {ranks} ranks. That is what one process computes only of a mean to which "
                "all rows add alike, not where rows are compared with each other (contrastive losses), in a sum, or in "
                "a mean of elements of which ranks have different numbers: have it compute none then, and use "
                "stretto.parallel.mean_over_batch",
                stacklevel=2,
            )

    model.register_forward_hook(look)


def take_means_over_batch(model: nn.Module, means: MeansOverBatch) -> None:
    """Have the means of torch's loss functions that a model computes in calls with targets, or in all calls if it takes
    none, be of the global batch."""
    forward = model.forward
    names = [*inspect.signature(forward).parameters]
    variables = getattr(getattr(inspect.unwrap(type(unwrap(model)).forward), "__code__", None), "co_varnames", ())
    has_targets = means.has_targets = any(map(_is_target, variables)) or "loss" not in variables
    for name in find_blocks(model):
        if not names_loss(block := model.get_submodule(name)):
            block.register_forward_pre_hook(means.leave)
            block.register_forward_hook(means.enter_again)

    @functools.wraps(forward)
    def forward_with_means(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        if has_targets and all(value is None for key, value in given.items() if _is_target(key)):
            return forward(*args, **kwargs)
        means.adds_sums = given.get("num_items_in_batch") is not None  # transformers divides a sum by it
        with means:
            return forward(*args, **kwargs)

    model.forward = compiled_within(forward_with_means)


def _is_target(argument: str) -> bool:
    return "label" in argument or "target" in argument or argument in _ANSWERS


def names_loss(module: nn.Module) -> bool:
    """True if a module may compute a loss: if its classes' code, or a class, has a name that says so."""
    others = [each for each in module.modules() if not isinstance(each, ShardedModule)]
    kinds = {kind for each in others for kind in type(each).__mro__ if kind is not nn.Module}
    functions = [value for kind in kinds for value in vars(kind).values() if inspect.isfunction(value)]
    names = [*[kind.__name__ for kind in kinds], *[name for each in functions for name in each.__code__.co_names]]
    return any("loss" in name.lower() or "cross_entropy" in name for name in names)


def _defer_loss(model: nn.Module, head: ParallelHead, signature: inspect.Signature, target: str) -> None:
    """Have the head leave its product to the loss in calls of the model that have targets."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        head.defers_loss = signature.bind_partial(*args, **kwargs).arguments.get(target) is not None

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        was_deferred, was_taken = head.defers_loss, head.passed_through is None
        head.defers_loss, head.passed_through = False, None
        if was_deferred and not was_taken and output is not None:  # None: the forward has raised
            raise ValueError(
                f"{type(model).__name__} was given {target}, but has not called the loss that Stretto has put in the "
                "place of its own: call parallelize(..., sharded_loss=False)"
            )
        if was_deferred and getattr(output, "logits", None) is not None:
            # Logits were never made: the field holds the head's input. Setting it to None would leave the item.
            output = dataclasses.replace(output, logits=None)
        elif was_deferred and isinstance(output, tuple):
            output = (output[0], None, *output[2:])
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)


@torch.compiler.disable
def _refuse_means_of_one_rank(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Raise ValueError if a model returns a loss that its own code has computed from this rank's rows."""
    found = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else [output]
    for item in found:
        if isinstance(item, Tensor) and not item.dim() and item.requires_grad and not is_mean_over_batch(item):
            raise ValueError(
                f"{type(model).__name__} has computed a loss in its own code, from this rank's rows alone, where ranks "
                "have parts of the batch, and not the mean over all of these. Use "
                "stretto.parallel.mean_over_batch there, or have the model return its logits and use it on these; or "
                "make the loss a module (nn.CrossEntropyLoss, say) with the role 'loss'"
            )
