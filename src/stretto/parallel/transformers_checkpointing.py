# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that a transformers model does itself, in a model that is sharded block by block.

Layers checkpoint themselves within their own forward (`_gradient_checkpointing_func`), whose wrapper gathered the
block's parameters. What computes a layer again calls no wrapper, and must gather them itself.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from stretto.parallel.layers.block_shard import BlockShard

# The second is the name before transformers 5.
ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def follow_checkpointing(model: nn.Module) -> None:
    """Have layers that checkpoint themselves gather their block when they are computed again.

    Of checkpointing that is on now, and of what the model's own methods turn on later.
    """
    if not _block_shards(model):
        return
    gather_in_recomputation(model)
    for module in model.modules():
        for name in ENABLE:
            enable: Any = getattr(module, name, None)
            if callable(enable):
                setattr(module, name, _then_gather(enable, model))


def _then_gather(enable: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    @functools.wraps(enable)
    def enable_checkpointing(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        gather_in_recomputation(model)

    return enable_checkpointing


def _block_shards(model: nn.Module) -> dict[str, BlockShard]:
    found = {name: getattr(vars(module).get("forward"), "block_shard", None) for name, module in model.named_modules()}
    return {name: shard for name, shard in found.items() if isinstance(shard, BlockShard)}


def gather_in_recomputation(model: nn.Module) -> None:
    """Have the functions that layers checkpoint themselves with gather their block, where they do not yet."""
    shards = _block_shards(model)
    for name, module in model.named_modules():
        run = getattr(module, "_gradient_checkpointing_func", None)
        held = [shard for block, shard in shards.items() if block and f"{name}.".startswith(f"{block}.")]
        if run is None or _gathers(run) or not (held or list(shards) == [""]):
            continue
        own = {id(parameter) for parameter in shards[""].parameters} if "" in shards else set()
        if any(id(parameter) in own for parameter in module.parameters()):  # such as one that several blocks share
            held.append(shards[""])
        module._gradient_checkpointing_func = partial(_checkpoint_gathered, run, held)


def _gathers(run: Any) -> bool:
    return isinstance(run, partial) and run.func is _checkpoint_gathered


def _checkpoint_gathered(
    run: Callable[..., Any], held: Sequence[BlockShard], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # A functools.partial stays one: reentrant checkpoints take no keyword arguments, which transformers passes in it.
    inner = function.func if isinstance(function, partial) else function

    def call(*inputs: Any, **options: Any) -> Any:
        with ExitStack() as stack:
            for shard in held:
                stack.enter_context(shard.running())
            return inner(*inputs, **options)

    gathered = partial(call, *function.args, **function.keywords) if isinstance(function, partial) else call
    return run(gathered, *args, **kwargs)
