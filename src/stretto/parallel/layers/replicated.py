# SPDX-License-Identifier: Apache-2.0
"""Replicated modules and parameters, which every rank has whole: a convolution, a class token, an adapter."""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.axes import LOSS
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.grid import Grid
from stretto.parallel.layers.sharded_module import check_features, whole_as_shards
from stretto.parallel.layout import layout_of, local, note_layout
from stretto.parallel.precision import Precision
from stretto.parallel.roles.families import wildcard
from stretto.parallel.roles.plan import ParameterSharding, Replicated, ShardingPlan

# Ranks along x have the same activations, and so the same gradients; ranks along data and z have other rows.
REPLICATED = ParameterSharding((), (LOSS,))


_MUCH = 0.05  # part of a model's parameters above which a warning says that they are replicated


def warn_of_replicated_parts(model: nn.Module, plan: ShardingPlan) -> None:
    """Warn where the roles of a family replicate much of the model, and say what that costs. Rank 0 alone warns."""
    own = [part for part in plan.replicated if part.whose in plan.of_own_plan]
    count = sum(model.get_parameter(name).numel() for part in own for name in part.parameters)
    whole = sum(parameter.numel() for parameter in model.parameters())
    if count > _MUCH * whole and dist.get_rank() == 0:
        names = ", ".join(dict.fromkeys(wildcard(part.whose) for part in own))
        warnings.warn(
            f"{count / whole:.0%} of the parameters of {type(model).__name__} are replicated ({names}): each rank of x "
            "holds and computes all of them, and z does not shard them. blocks=[...] shards all parameters over z, and "
            "has each rank of x compute the whole model",
            stacklevel=4,
        )


def keep_whole(
    model: nn.Module,
    part: Replicated,
    parameters: Mapping[str, nn.Parameter],
    *,
    precision: Precision,
    gradients: GradientReducer,
) -> None:
    """Put parameters, by their names within `model`, in place, and let the code that reads them see plain tensors.

    While the submodule's forward runs, each is replaced by a tensor in the compute dtype, through which its gradient
    flows to the parameter.
    """
    places = []
    for parameter_name, parameter in parameters.items():
        owner_name, _, key = parameter_name.rpartition(".")
        owner = model.get_submodule(owner_name)
        owner._parameters[key] = parameter
        places.append((owner, key))
        keep_through_conversions(owner, key, gradients)
    reader = _reader_of(model, part.whose)
    reader.forward = _reading(reader, part.whose, places, precision, gradients.grid, casts=part.is_module)


def _reader_of(model: nn.Module, name: str) -> nn.Module:
    """The module whose forward reads the parameters: a list or dict of them has none, so the module that holds it."""
    reader = model.get_submodule(name)
    while name and type(reader).forward is nn.Module.forward:
        name = name.rpartition(".")[0]
        reader = model.get_submodule(name)
    return reader


def _reading(
    reader: nn.Module,
    name: str,
    places: Sequence[tuple[nn.Module, str]],
    precision: Precision,
    grid: Grid,
    *,
    casts: bool,
) -> Callable[..., Any]:
    """The module's forward, with plain tensors in place of its parameters."""
    forward = reader.forward
    checks = grid.size("x") > 1

    @functools.wraps(forward)
    def read(*args: Any, **kwargs: Any) -> Any:
        if casts:
            args = tuple(_taken(argument, name, precision, checks) for argument in args)
            kwargs = {key: _taken(argument, name, precision, checks) for key, argument in kwargs.items()}
        with _tensors_in(places, precision):
            return forward(*args, **kwargs)

    return torch.compiler.disable(read, recursive=False)


def _taken(argument: Any, name: str, precision: Precision, checks: bool) -> Any:
    if not isinstance(argument, Tensor) or not argument.is_floating_point():
        return argument
    if checks:
        check_features(argument, "y", name)
    return precision.cast(argument)


@contextmanager
def _tensors_in(places: Sequence[tuple[nn.Module, str]], precision: Precision) -> Iterator[None]:
    kept = [(owner, key, owner._parameters[key]) for owner, key in places]
    try:
        for owner, key, parameter in kept:
            if hasattr(parameter, "stretto_layout"):  # not inside another call of it
                owner._parameters[key] = precision.cast(local(parameter))  # type: ignore[assignment]
        yield
    finally:
        for owner, key, parameter in kept:
            owner._parameters[key] = parameter


def keep_through_conversions(owner: nn.Module, key: str, gradients: GradientReducer) -> None:
    """Do what `ShardedModule` does for its own: conversions keep layout and hooks, and state dicts may be whole."""
    convert = owner._apply

    def convert_and_restore(fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        parameter = owner._parameters[key]
        assert parameter is not None
        layout = layout_of(parameter)
        convert(fn, recurse)
        note_layout(owner.get_parameter(key), layout)
        gradients.restore_hooks(owner.get_parameter(key))
        return owner

    def load(_: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        state_dict |= whole_as_shards(state_dict, prefix, local_metadata, {key: owner._parameters[key]})

    owner._apply = convert_and_restore  # type: ignore[method-assign]
    owner.register_load_state_dict_pre_hook(load)
