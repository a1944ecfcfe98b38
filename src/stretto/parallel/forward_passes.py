# SPDX-License-Identifier: Apache-2.0
"""Begins and ends a parallelized model's forward passes, and the methods that are registered beside them."""

import functools
import re
import sys
from typing import Any

import torch
from torch import nn

from stretto.parallel.capture import note_forward
from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.comm.graph_functions import current_stream
from stretto.parallel.layers.sharded_module import ShardedModule
from stretto.parallel.layout import allow_anomaly_checks, check_is_sharded
from stretto.parallel.state import ParallelState, state_of, wrappers_of
from stretto.suggestions import did_you_mean


def begin_forward(model: nn.Module, state: ParallelState) -> None:
    """Check the model, and begin its gathers, before its forward pass."""
    gatherer, gradient_reducer = state.weight_gatherer, state.gradient_reducer
    state.grid.require_open()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ValueError(
            "torch.func (grad, vmap, jvp, ...) was called over a parallelized model, whose gradients ranks reduce "
            "outside of such transforms: call the model, and backward()"
        )
    if torch.is_anomaly_enabled():
        allow_anomaly_checks()
    note_forward(model)
    if not in_backward():
        gradient_reducer.drop_failed_passes()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            check_is_sharded(name, parameter)
        gradient_reducer.defer_hooks(parameter, name)
    stream = current_stream(state.grid.device)
    for module in model.modules():
        if isinstance(module, ShardedModule) and module.in_graphs is not None and module.in_graphs.is_outdated(stream):
            module.follow_weights()

    gatherer.is_in_forward = True
    if not in_backward():
        gatherer.begin_forward()


def end_forward(state: ParallelState) -> None:
    """End the gathers of a forward pass, which may have raised."""
    state.weight_gatherer.is_in_forward = False
    state.weight_gatherer.end_forward()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have a method other than forward read whole parameters, as forward does (FSDP2: register_fsdp_forward_method).

        register_forward_method(model, "encode")
        model.encode(images).square().mean().backward()

    module: what `parallelize` has returned, or a submodule that it gathers by itself: a block, or one with the role
    "replicated" or "gathered". Its inputs are cast as forward's are. Submodules that the method calls need no such
    registration. Every rank must call the method.

    Raises ValueError for another module, and if it has no such method.
    """
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {name!r}{did_you_mean(name, dir(type(module)))}")
    wrappers, state = wrappers_of(module), state_of(module)
    if not wrappers and state is None:
        raise ValueError(
            f"this {type(module).__name__} is neither a model that stretto.parallelize has returned nor a block of "
            "one: register a method of the block that it is in, or name it in parallelize(..., blocks=[...])"
        )
    for wrap in wrappers:
        method = wrap(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if state is None or state.weight_gatherer.is_in_forward:
            return method(*args, **kwargs)
        begin_forward(module, state)
        try:
            return method(*args, **kwargs)
        finally:
            end_forward(state)

    setattr(module, name, torch.compiler.disable(run, recursive=False))


def explain_sizes(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Add a likely cause to a forward's error about sizes: code that uses the whole model's number of heads."""
    error = sys.exception()
    if output is None and isinstance(error, RuntimeError) and re.search(r"\b(sizes?|shapes?)\b", str(error)):
        error.add_note(
            f"{type(model).__name__} is on a grid: a rank has 1/x of heads and inner features and 1/y of hidden ones. "
            "Code that views or splits by the whole model's numbers needs -1 there, or their attributes' names in "
            "parallelize(..., local_attributes=); what is passed in (inputs_embeds, say) must be this rank's part"
        )
