# SPDX-License-Identifier: Apache-2.0
"""Shards a model of any modules, without roles, block by block over z, as FSDP2's `fully_shard` does.

Every parameter is sharded over z by its dim 0, and replicated over data, x and y. A block is gathered whole for its
forward pass, during which the next one is prefetched; parameters in no block belong to the model itself, and are
gathered for its whole forward pass. Ranks along x and y all compute the same.
"""

import re
import warnings
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import nn

from stretto.parallel.grid import Grid
from stretto.suggestions import did_you_mean

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Find the names of a model's blocks, in order: those that match the patterns, or else those that are repeated.

    Repeated blocks are the children of each outermost nn.ModuleList, nn.Sequential or nn.ModuleDict in which at least
    two have parameters; of a child without a forward, which nothing calls, the children. A module under several names
    is found by its first. Raises ValueError for a pattern that matches no submodule, for a block without a forward, and
    for a block within another.
    """
    if patterns is None:
        return list(_repeated(model, ""))
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"blocks is {patterns!r}, but must be a list of names or patterns of submodules")
    modules = dict(model.named_modules())
    found: dict[str, None] = {}
    for pattern in patterns:
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        names = [name for name in modules if name and expression.fullmatch(name)]
        if not names:
            raise ValueError(f"no submodule is named {pattern!r}{did_you_mean(pattern, modules)}")
        found |= dict.fromkeys(names)
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(f"blocks: {name} is within {outer}: a block's parameters are gathered together")
        if not has_forward(modules[name]):
            raise ValueError(
                f"blocks: {name} ({type(modules[name]).__name__}) has no forward, for which its parameters would be "
                f"gathered: name the modules in it that have one ({name}.*)"
            )
    return [name for name in modules if name in found]


def _repeated(module: nn.Module, prefix: str) -> Iterator[str]:
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if _has_parameters(child)]
    is_list = isinstance(module, _CONTAINERS) and len(children) > 1
    for name, child in children:
        yield from _blocks_of_item(name, child) if is_list else _repeated(child, f"{name}.")


def _blocks_of_item(name: str, item: nn.Module) -> Iterator[str]:
    """The blocks of one item of a list: itself, or what is in it if it is a list, too, or has no forward."""
    if isinstance(item, nn.Sequential):
        yield from list(_repeated(item, f"{name}.")) or [name]
    elif has_forward(item):
        yield name
    else:
        for key, child in item.named_children():
            if _has_parameters(child):
                yield from _blocks_of_item(f"{name}.{key}", child)


def has_forward(module: nn.Module) -> bool:
    """True if a module can be called: a list of modules, for one, cannot."""
    return type(module).forward is not nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def warn_of_replication(model: nn.Module, grid: Grid, reason: str) -> None:
    """Warn where ranks of x and y are to compute the same, and say what that costs."""
    copies = grid.size("x") * grid.size("y")
    if copies > 1 and dist.get_rank() == 0:
        warnings.warn(
            f"{type(model).__name__} is sharded only over z ({reason}), so each of the x * y = {copies} ranks that "
            f"share a batch computes all of it: {copies} times the work of a grid with x = y = 1",
            stacklevel=5,
        )


def check_modules(model: nn.Module, ranks: int) -> None:
    """Raise ValueError for embeddings with options that a shard cannot follow; warn of batch norms' statistics.

    ranks: how many have rows of their own.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            unsupported = ("max_norm", "sparse", "scale_grad_by_freq") if ranks > 1 else ("max_norm", "sparse")
            if option := next((option for option in unsupported if getattr(module, option)), None):
                why = {
                    "max_norm": "its forward pass writes to the weight, of which it reads a copy",
                    "sparse": "gradients are reduced as dense tensors",
                    "scale_grad_by_freq": "each rank would count the indices of its own rows alone",
                }[option]
                raise ValueError(f"{name or type(model).__name__}: an embedding with {option} is not supported: {why}")
    norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and not isinstance(module, nn.SyncBatchNorm)
        and module.training
    ]
    if norms and ranks > 1 and dist.get_rank() == 0:
        warnings.warn(
            f"{norms[0]} is a batch norm: as under DistributedDataParallel, each of the {ranks} ranks that have rows "
            "of their own takes its statistics from these alone, so results differ from those of one rank. On GPUs, "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm takes them from all rows",
            stacklevel=5,
        )
