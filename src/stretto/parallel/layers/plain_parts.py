# SPDX-License-Identifier: Apache-2.0
"""Modules that are not sharded, and parameters that a model's own code reads as plain tensors.

Roles: "replicated" (a convolution, a class token, an adapter: every rank has it whole), "gathered" (experts: z shards
it, and every rank computes it whole) and "inner_parameter" (attention sinks: x splits it by heads).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.parallel.comm.autograd import compiled_within, scale_gradient, with_gradient_of_its_own
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.grid import Grid
from stretto.parallel.layers.held_tensors import ParameterPlace, hold, hold_and_check
from stretto.parallel.layers.local_tensors import local_tensor
from stretto.parallel.layers.sharded_module import (
    check_features,
    cut_features,
    gather_features,
    note_features,
    whole_as_shards,
)
from stretto.parallel.layout import has_layout, layout_of, local
from stretto.parallel.precision import Precision
from stretto.parallel.roles.plan import PlainPart
from stretto.parallel.segment_planner import refuse_default_planners
from stretto.parallel.sharded_parameter import note_layout
from stretto.parallel.state import ParallelState


def place_plain(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], gradients: GradientReducer
) -> list[tuple[nn.Module, str]]:
    """Put parameters, by their names within `model`, in place; returns where: their owners and names there."""
    places = []
    for name, parameter in parameters.items():
        owner_name, _, key = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        owner._parameters[key] = parameter
        places.append((owner, key))
        keep_through_conversions(owner, key, gradients)
    return places


def read_as_tensors(
    model: nn.Module,
    part: PlainPart,
    places: Sequence[tuple[nn.Module, str]],
    precision: Precision,
    state: ParallelState,
) -> None:
    """Let the code that reads the parameters in these places see plain tensors: what this rank has of each.

    While the submodule's forward runs, each is replaced by a tensor in the compute dtype, through which its gradient
    flows to the parameter.
    """

    def read(forward: Callable[..., Any]) -> Callable[..., Any]:
        return _reading(forward, part.whose, places, precision, state.gradient_reducer, casts=part.is_module)

    state.wrap_forward(_reader_of(model, part.whose), read)


def exchange_features(module: nn.Module, part: PlainPart, grid: Grid) -> None:
    """Have a module that computes with all of its parameters do so on whole hidden features.

    If y splits these, its first argument is gathered, and its output (the first of several) is split.
    """
    if grid.size("x") * grid.size("y") == 1:
        return
    forward, group = module.forward, grid.communicator("y")

    @functools.wraps(forward)
    def on_whole_features(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], Tensor):
            check_features(args[0], "y", part.whose)
        if group.size() == 1:
            return forward(*args, **kwargs)
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise ValueError(
                f"{part.whose} has the role 'gathered', but its first argument is not a tensor of features"
            )
        features = args[0].shape[-1] * group.size()
        found = forward(gather_features(args[0], features, group), *args[1:], **kwargs)
        first = found[0] if isinstance(found, tuple) else found
        if not isinstance(first, Tensor) or first.shape[-1:] != (features,):
            raise ValueError(
                f"{part.whose} has the role 'gathered', but does not return {features} hidden features as it takes "
                "them, alone or first, which y could split: choose y=1"
            )
        part_here = note_features(cut_features(first, group), "y")
        return (part_here, *found[1:]) if isinstance(found, tuple) else part_here

    module.forward = compiled_within(on_whole_features)


def _reader_of(model: nn.Module, name: str) -> nn.Module:
    """The module whose forward reads the parameters: a list or dict of them has none, so the module that holds it."""
    reader = model.get_submodule(name)
    while name and type(reader).forward is nn.Module.forward:
        name = name.rpartition(".")[0]
        reader = model.get_submodule(name)
    return reader


def _reading(
    forward: Callable[..., Any],
    name: str,
    places: Sequence[tuple[nn.Module, str]],
    precision: Precision,
    gradients: GradientReducer,
    *,
    casts: bool,
) -> Callable[..., Any]:
    """The module's forward, with plain tensors in place of its parameters."""
    checks = gradients.grid.size("x") > 1
    scales = forward_scales(places, gradients)

    @functools.wraps(forward)
    def read(*args: Any, **kwargs: Any) -> Any:
        if casts:
            args = tuple(_taken(argument, name, precision, checks) for argument in args)
            kwargs = {key: _taken(argument, name, precision, checks) for key, argument in kwargs.items()}
        with tensors_in(places, precision, scales, gradients):
            return forward(*args, **kwargs)

    return compiled_within(read)


def _taken(argument: Any, name: str, precision: Precision, checks: bool) -> Any:
    if not isinstance(argument, Tensor) or not argument.is_floating_point():
        return argument
    if checks:
        check_features(argument, "y", name)
    return precision.cast(argument)


def forward_scales(places: Sequence[tuple[nn.Module, str]], gradients: GradientReducer) -> list[float]:
    """The `forward_scale` of the parameters in these places."""
    return [gradients.forward_scale(owner.get_parameter(key)) for owner, key in places]


@contextmanager
def tensors_in(
    places: Sequence[tuple[nn.Module, str]],
    precision: Precision,
    scales: Sequence[float],
    gradients: GradientReducer,
) -> Iterator[None]:
    """Hold plain tensors in these places, in the compute dtype, through which gradients flow to the parameters.

    scales: of these gradients (`forward_scales`).
    """
    is_traced = torch.compiler.is_compiling()
    held: list[ParameterPlace] = []
    tensors: list[Tensor] = []
    copies = []
    for (owner, key), scale in zip(places, scales, strict=True):
        parameter = owner._parameters[key]
        if parameter is None or not has_layout(parameter):  # inside another call of it
            continue
        mine = scale_gradient(local(parameter), scale) if is_traced else local_tensor(parameter, gradients)
        mine = with_gradient_of_its_own(mine)
        if (tensor := precision.cast(mine)) is not mine:
            copies.append(len(held))
        held.append(ParameterPlace(owner, key, len(held)))
        tensors.append(tensor)
    if is_traced or not copies:
        with hold(held, tensors):
            yield
    else:
        with hold_and_check(type(held[0].owner).__name__, held, tensors, copies, sums=False):
            yield


def keep_through_conversions(owner: nn.Module, key: str, gradients: GradientReducer) -> None:
    """Do what `ShardedModule` does for its own.

    Conversions keep layout and hooks, state dicts may be whole, and torch's own planners refuse what has segments.
    """
    convert = owner._apply

    def convert_and_restore(fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        parameter = owner._parameters.get(key)
        if parameter is None:  # the user has deleted it
            return convert(fn, recurse)
        layout = layout_of(parameter)
        convert(fn, recurse)
        note_layout(owner.get_parameter(key), layout)
        gradients.restore_hooks(owner.get_parameter(key))
        return owner

    def load(_: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        state_dict |= whole_as_shards(state_dict, prefix, local_metadata, {key: owner._parameters.get(key)})

    def saved(_: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}{key}" in state_dict:
            refuse_default_planners(state_dict[f"{prefix}{key}"])

    owner._apply = convert_and_restore  # type: ignore[method-assign]
    owner.register_state_dict_post_hook(saved)
    owner.register_load_state_dict_pre_hook(load)
