# SPDX-License-Identifier: Apache-2.0
"""Begins and ends a parallelized model's forward passes, and the methods that are registered beside them."""

import functools
import re
import sys
import threading
import warnings
import zlib
from collections.abc import Mapping
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from stretto.parallel.capture import note_forward
from stretto.parallel.comm.autograd import compiled_within, in_backward, input_chain
from stretto.parallel.comm.collectives import find_spread
from stretto.parallel.comm.counting import not_counted
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.comm.streams import current_stream
from stretto.parallel.grid import Grid
from stretto.parallel.layers.sharded_module import ShardedModule, cut_features, gather_features
from stretto.parallel.layout import allow_anomaly_checks, check_is_sharded, has_layout
from stretto.parallel.state import ParallelState, state_of, wrappers_of
from stretto.suggestions import did_you_mean

_NO_STATES: Mapping[str, Any] = {}
_COMPARED = 4096  # numbers of the inputs of a forward pass


def begin_forward(model: nn.Module, state: ParallelState) -> None:
    """Check the model, and begin its gathers, before its forward pass."""
    gatherer, gradient_reducer = state.weight_gatherer, state.gradient_reducer
    state.grid.require_open()
    if _runs_elsewhere(state) and not in_backward():
        raise ValueError(
            "a forward pass of this model runs in another thread, and ranks would gather its weights in different "
            "orders: call it by one thread at a time"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ValueError(
            "torch.func (grad, vmap, jvp, ...) was called over a parallelized model, whose gradients ranks reduce "
            "outside of such transforms: call the model, and backward()"
        )
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        raise ValueError(
            "compiled autograd (torch._dynamo.config.compiled_autograd) cannot trace the hooks by which a parallelized "
            "model reduces gradients: turn it off; torch.compile(model), or of its blocks, works without it"
        )
    if torch.is_anomaly_enabled():
        allow_anomaly_checks()
    note_forward(model)
    current = current_stream(state.grid.device)
    if not in_backward():
        state.forward_thread = threading.get_ident()
        gradient_reducer.drop_failed_passes()
        gradient_reducer.stream.follow(current)
        if gradient_reducer.listener is not None:
            gradient_reducer.listener.begin_forward()
    stream = None if current is None else current.cuda_stream
    with torch._C.DisableTorchFunctionSubclass():  # torch 2.11 calls Python at each read of a parameter's attributes
        outdated = _find_outdated(model, gradient_reducer, stream)
    for sharded in outdated:  # all at first: of a weight that several have, each keeps autograd's node
        sharded.forget_weights()
    for sharded in outdated:
        sharded.follow_weights(stream)
    gatherer.is_in_forward = gradient_reducer.is_in_forward = True
    if not in_backward():
        gatherer.begin_forward()


def _runs_elsewhere(state: ParallelState) -> bool:
    """True if a forward pass runs in another thread; one that has ended in it may have been interrupted."""
    thread = state.forward_thread
    if thread in (None, threading.get_ident()):
        return False
    return thread in {each.ident for each in threading.enumerate()}


def _find_outdated(model: nn.Module, gradients: GradientReducer, stream: int | None) -> list[ShardedModule]:
    """The modules of which parameters, or the stream, have changed since they took these; defers users' hooks.

    Raises ValueError for a parameter that is not sharded.
    """
    waiting: list[tuple[str, nn.Module]] = [("", model)]  # `named_modules` takes several times as long
    outdated: list[ShardedModule] = []
    for prefix, module in waiting:  # without calls, which would cost more than the comparisons (`LocalTensors`)
        sharded, is_outdated = module if isinstance(module, ShardedModule) else None, False
        followed = None if sharded is None else sharded.followed
        states: Mapping[str, Any] = _NO_STATES if followed is None else followed.states
        for name, parameter in module._parameters.items():
            if parameter is not None:
                taken = states.get(name)
                if taken is None or taken.parameter is not parameter:
                    is_outdated = True
                    if not has_layout(parameter):
                        if getattr(module, "reduces_own_gradients", False):  # stretto.recommendation's tables
                            continue
                        if parameter.requires_grad:
                            check_is_sharded(prefix + name, parameter)
                elif taken.requires_grad != parameter.requires_grad or (
                    taken.shard is not None and taken.shard is not parameter._local_tensor
                ):
                    is_outdated = True
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    gradients.defer_hooks(parameter, prefix + name)
        if sharded is not None and (is_outdated or followed is None or followed.stream != stream):
            outdated.append(sharded)
        for name, each in module._modules.items():
            if each is not None:
                waiting.append((f"{prefix}{name}.", each))
    return outdated


def end_forward(state: ParallelState) -> None:
    if not in_backward():
        if _runs_elsewhere(state):  # and this call was refused
            return
        state.forward_thread = None
    state.weight_gatherer.is_in_forward = state.gradient_reducer.is_in_forward = False
    input_chain.forget()
    state.weight_gatherer.end_forward()


class RowsCheck:
    """Raises ValueError where ranks of x, y or context are given different rows, whose parts a forward pass would join.

    They would be under torch's DistributedSampler, which gives every rank rows of its own. A forward pre-hook of the
    model: compares the inputs of the first pass with gradients, and of the first without, by small all-reduces. In a
    model with roles only integers (tokens, labels, masks): real numbers may be a rank's own features.
    """

    def __init__(self, grid: Grid, *, has_roles: bool) -> None:
        axes = ("context", "y", "x") if grid.size("pipe") == 1 else ()
        self._groups = [grid.group(axis) for axis in axes if grid.size(axis) > 1]
        self._device = grid.device
        self._has_roles = has_roles
        self._compared: set[bool] = set()  # by whether gradients are on

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare the inputs of this pass, if no pass of its kind has been compared."""
        has_gradients = torch.is_grad_enabled()
        if not self._groups or has_gradients in self._compared or in_backward():
            return
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._compared.add(has_gradients)
        given = {f"argument {number}": value for number, value in enumerate(args, 1)} | dict(kwargs)
        found = {
            keystr(path).replace("'", "").removeprefix("[").replace("]", "", 1): value
            for path, value in tree_flatten_with_path(given)[0]
            if type(value) is Tensor and not value.is_meta and value.layout is torch.strided
            if not (value.is_complex() or (self._has_roles and value.is_floating_point()))
        }
        described = [f"{name} {[*value.shape]}" for name, value in found.items()]
        # Of one size on all ranks, whatever they are given: a hash of the shapes, and numbers of each tensor.
        message = torch.zeros(1 + _COMPARED, dtype=torch.float64, device=self._device)
        message[0] = zlib.crc32(repr(described).encode())
        places = message[1:].split(max(1, _COMPARED // max(1, len(found))))
        for value, place in zip(found.values(), places, strict=False):
            numbers = value.detach().flatten()
            numbers = numbers[:: max(1, -(-len(numbers) // len(place)))]
            place[: len(numbers)] = numbers
        with not_counted():
            shapes, *spreads = find_spread(message.nan_to_num_(), *self._groups).split([1, *map(len, places)])
        # What each GPU has computed of its rows itself may differ in the last bits.
        limits = [
            0.01 * float(place.abs().max()) * value.is_floating_point()
            for value, place in zip(found.values(), places, strict=False)
        ]
        different = (
            described
            if shapes.any()
            else [text for text, spread, limit in zip(described, spreads, limits, strict=False) if spread.max() > limit]
        )
        if different:
            raise ValueError(
                "ranks that differ only in x, y or context were given different rows, but compute parts of the same "
                f"ones (this rank: {', '.join(different)}): give each rank block grid.coordinate('batch') of "
                "grid.size('batch') of the batch; DistributedSampler(dataset, grid.size('batch'), "
                "grid.coordinate('batch')) does"
            )


def warn_of_own_buffers(model: nn.Module, state: ParallelState) -> None:
    """Have the first training step warn of persistent buffers that it has left different on ranks with other rows:
    codebooks, running means. Batch norms are named when a model is parallelized.

    They are compared in two all-reduces at the end of a backward pass, which no rank makes alone.
    """
    grid, whole = state.grid, ref(model)
    owners = [each for each in model.named_modules() if not isinstance(each[1], nn.modules.batchnorm._BatchNorm)]
    names = [
        f"{name}.{key}".removeprefix(".")
        for name, module in owners
        for key, buffer in module._buffers.items()
        if type(buffer) is Tensor and not buffer.is_complex() and key not in module._non_persistent_buffers_set
    ]
    group = grid.communicator("loss")
    if group.size() == 1 or grid.size("pipe") > 1 or not names:
        return

    def compare() -> None:
        model = whole()
        is_captured = grid.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if model is None or not model.training or is_captured:
            return
        state.gradient_reducer.after_sync = None
        buffers = [model.get_buffer(name).detach().to(grid.device, torch.float64) for name in names]
        with not_counted():
            spread = find_spread(torch.stack([buffer.sum() for buffer in buffers]).nan_to_num(1e300), group)
        own = [name for name, differs in zip(names, spread.tolist(), strict=True) if differs]
        if own and dist.get_rank() == 0:
            warnings.warn(
                f"{', '.join(own[:5])} of {type(model).__name__} differ between ranks after a training step: each of "
                f"the {group.size()} ranks that have rows of their own fills its buffers from these alone, and a "
                "checkpoint has those of one. Sum over grid.group('loss') what they are made of",
                stacklevel=2,
            )

    state.gradient_reducer.after_sync = compare


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

    setattr(module, name, compiled_within(run))


def exchange_whole_features(model: nn.Module, grid: Grid) -> None:
    """Have a transformers model with roles take and return whole features where its code has a rank's part of them.

    `inputs_embeds` [.., hidden] and hidden states are cut over y, and attention weights [batch, heads, ..] over x. A
    part that the caller passes is taken as it is.
    """
    over_x, over_y = grid.communicator("x"), grid.communicator("y")

    def whole(name: str, group: dist.ProcessGroup) -> int | None:
        config: Any = model.config
        return getattr(config.get_text_config(), name, None) if group.size() > 1 else None

    def cut(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        given = kwargs.get("inputs_embeds")
        if not isinstance(given, Tensor) or given.shape[-1] != whole("hidden_size", over_y):
            return None
        return args, kwargs | {"inputs_embeds": cut_features(given, over_y)}

    def gather(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(gather, value))
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 3 and value.shape[-1] * over_y.size() == (hidden := whole("hidden_size", over_y)):
            return gather_features(value, hidden, over_y)
        if value.dim() == 4 and value.shape[1] * over_x.size() == (heads := whole("num_attention_heads", over_x)):
            return gather_features(value.movedim(1, -1), heads, over_x).movedim(-1, 1)
        return value

    def gather_output(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(gather(each) if isinstance(each, tuple) else each for each in output)
        for name, value in [*output.items()] if isinstance(output, Mapping) else ():
            if isinstance(value, tuple):  # of a layer each: hidden states, or attention weights
                output[name] = gather(value)
        return output

    if over_x.size() * over_y.size() > 1:
        model.register_forward_pre_hook(torch.compiler.disable(cut), with_kwargs=True)
        model.register_forward_hook(torch.compiler.disable(gather_output))


def explain_sizes(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Add a likely cause to a forward's error about sizes: code that uses the whole model's number of heads."""
    error = sys.exception()
    if output is None and isinstance(error, RuntimeError) and re.search(r"\b(sizes?|shapes?)\b", str(error)):
        error.add_note(
            f"{type(model).__name__} is on a grid: a rank has 1/x of heads and inner features and 1/y of hidden ones. "
            "Code that views or splits by the whole model's numbers needs -1 there, or their attributes' names in "
            "parallelize(..., local_attributes=)"
        )
