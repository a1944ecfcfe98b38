# SPDX-License-Identifier: Apache-2.0
"""Saves the state of a torch optimizer of a parallelized model, and loads it on any grid."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.memory import exchange, group_timeout
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.staging import Key, sizes_of
from stretto.train.checkpoint.state import load_state, sharded_state_of
from stretto.train.checkpoint.storage import LocalBox, ShardedState
from stretto.train.checkpoint.writing import CheckpointWriter, bytes_on_disk, write_checkpoint


def save_optimizer(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the optimizer's state to the folder `path`, as a checkpoint without weights. Collective.

    Raises ValueError for state that is neither a number nor sharded as its parameter is; NoSpaceError for a full disk.
    """
    state = {
        f"optimizer.{name}.{key}": _describe(f"{name}'s {key}", parameter, value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }
    groups = _groups(model, optimizer)
    description = {"step": step, "optimizer": _name(optimizer), "model": {}, "data": {}, "run": {"groups": groups}}
    own = sizes_of(state)
    of_ranks = [own] if dist.get_world_size() == 1 else exchange(own, None, group_timeout(None), dict[Key, int])
    sizes = {key: size for of_rank in of_ranks for key, size in of_rank.items()}
    write_checkpoint(state, CheckpointWriter(path, description), needed=bytes_on_disk(sum(sizes.values()), len(sizes)))


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what `save_optimizer` wrote, on whatever grid. Collective.

    Raises ValueError for the state of another optimizer, and of groups with other parameters.
    """
    metadata = read_metadata(path)
    groups, own = metadata.run.get("groups", []), _groups(model, optimizer)
    if metadata.optimizer != _name(optimizer):
        raise ValueError(f"{path} has the state of {metadata.optimizer}, and the optimizer is {_name(optimizer)}")
    if [group["params"] for group in groups] != [group["params"] for group in own]:
        raise ValueError(f"{path} has the state of other parameters, or in other groups, than the optimizer's")
    numbers = {name: number for number, name in enumerate(name for group in own for name in group["params"])}
    parameters = dict(model.named_parameters())
    state: dict[str, ShardedState] = {}
    values: dict[int, dict[str, Tensor]] = {}
    for full_name, entry in metadata.tensors.items():
        name, _, key = full_name.removeprefix("optimizer.").rpartition(".")
        parameter = parameters.get(name)
        if parameter is None or name not in numbers or entry.shape not in ((), tuple(parameter.shape)):
            raise ValueError(f"{path} has {full_name}, which is no state of this optimizer")
        value = torch.zeros_like(parameter, dtype=entry.torch_dtype) if entry.shape else torch.zeros((), device="cpu")
        value = value.detach() if entry.shape else value.to(entry.torch_dtype)
        values.setdefault(numbers[name], {})[key] = value
        state[full_name] = _describe(full_name, parameter, value)
    load_state(path, metadata, state)
    numbered = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": values, "param_groups": numbered})


def _describe(what: str, parameter: Tensor, value: Any) -> ShardedState:
    """This rank's part of a tensor of the optimizer's state."""
    if isinstance(value, Tensor) and not value.dim():
        return ShardedState((), (LocalBox((), value.detach()),))
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        raise ValueError(f"{what} of the optimizer is {type(value).__name__}, but must be a number or like its weight")
    return sharded_state_of(parameter, value.to_local() if isinstance(value, DTensor) else value)


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups, with the names of their parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]


def _name(optimizer: torch.optim.Optimizer) -> str:
    return type(getattr(optimizer, "optimizer", optimizer)).__name__  # Accelerate wraps it
