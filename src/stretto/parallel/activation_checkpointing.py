"""Activation checkpointing: keep a block's input, compute the rest again in the backward pass."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from stretto.parallel.layers.linear import ParallelLinear
from stretto.parallel.roles import huggingface


def checkpoint_activations(model: nn.Module) -> None:
    """Checkpoint every block of the model: each child of its longest nn.ModuleList. Names do not change.

    Weights gathered over z are freed after use, and gathered again when a block is recomputed. Raises ValueError if
    there are no blocks.
    """
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            module.plan.shard.gatherer.stop_keeping()
    if huggingface.is_pretrained_model(model) and hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList, so its blocks are not known")
    for block in max(lists, key=len):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
