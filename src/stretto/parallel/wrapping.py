# SPDX-License-Identifier: Apache-2.0
"""Refuses torch's data parallelism around a parallelized model, which would reduce its gradients a second time."""

import functools
from collections import OrderedDict
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.modules.module import register_module_module_registration_hook

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")


class _Applied(OrderedDict[str, Any]):
    """The names of the composable APIs that a module has, among which torch looks before it applies one."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ValueError(_refusal("fully_shard or replicate"))
        return super().__contains__(name)


def refuse_wrapping(model: nn.Module) -> None:
    """Have DDP, FSDP, DataParallel, fully_shard and replicate raise ValueError for the model.

    Also for a part of it, and (but for fully_shard, which fails in torch then) for a module that contains it.
    """
    _watch_registrations()
    for module in model.modules():
        vars(module).setdefault(REGISTRY_KEY, _Applied())


@functools.cache
def _watch_registrations() -> None:
    """Look at every module that becomes part of another, as a wrapped one does first. Once in a process."""
    register_module_module_registration_hook(_refuse_in_wrapper)


def _refuse_in_wrapper(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    wrapper = next((base.__name__ for base in type(owner).__mro__ if base.__name__ in _WRAPPERS), None)
    if wrapper is None or module is None:
        return
    if any(isinstance(vars(each).get(REGISTRY_KEY), _Applied) for each in module.modules()):
        raise ValueError(_refusal(wrapper))


def _refusal(wrapper: str) -> str:
    return (
        f"{wrapper} around a model that stretto.parallelize has returned, or around a part of it: its gradients are "
        "reduced over all ranks already when backward() returns. Leave the wrapper out. Accelerate: prepare(optimizer, "
        "loader), not the model; Lightning: ModelParallelStrategy in place of 'ddp'; transformers' Trainer: "
        "stretto.huggingface.trainer_plugin"
    )
