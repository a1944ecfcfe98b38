# SPDX-License-Identifier: Apache-2.0
"""Shards a model of any modules, without roles, block by block over z: what FSDP2's `fully_shard` does.

Every parameter is sharded over z by its dim 0, and replicated over data, x and y. A block is gathered whole for its
forward pass, and the next one meanwhile; whatever is in no block belongs to the model itself, and is gathered for its
whole forward pass. Ranks along x and y all compute the same.
"""

import re
import warnings
from collections.abc import Collection, Iterator, Sequence

import torch.distributed as dist
from torch import nn

from stretto.axes import LOSS, REPLICAS
from stretto.parallel.builder import Builder
from stretto.parallel.grid import Grid
from stretto.parallel.layers.block_shard import BlockShard, ParameterPlace
from stretto.parallel.layers.replicated import keep_through_conversions
from stretto.parallel.layers.sharded_module import place_shared
from stretto.parallel.layout import Split
from stretto.parallel.roles.plan import ParameterSharding
from stretto.suggestions import did_you_mean

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Find the names of a model's blocks, in order: those that match the patterns, or else those that are repeated.

    Repeated blocks are the children of each outermost nn.ModuleList, nn.Sequential or nn.ModuleDict in which at least
    two have parameters. A module under several names is found by its first. Raises ValueError for a pattern that
    matches no submodule, and for a block within another.
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
    return [name for name in modules if name in found]


def _repeated(module: nn.Module, prefix: str) -> Iterator[str]:
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if _has_parameters(child)]
    if isinstance(module, _CONTAINERS) and len(children) > 1:
        for name, child in children:
            # A list within a list has no forward of its own.
            if type(child).forward is nn.Module.forward or isinstance(child, nn.Sequential):
                inner = list(_repeated(child, f"{name}."))
                yield from inner if inner or isinstance(child, nn.ModuleList | nn.ModuleDict) else [name]
            else:
                yield name
        return
    for name, child in children:
        yield from _repeated(child, f"{name}.")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def warn_of_replication(model: nn.Module, grid: Grid, reason: str) -> None:
    """Warn where ranks of x and y are to compute the same, and say what that costs."""
    copies = grid.size("x") * grid.size("y")
    if copies > 1 and dist.get_rank() == 0:
        warnings.warn(
            f"{type(model).__name__} is sharded over z alone ({reason}), so each of the x * y = {copies} ranks that "
            f"share a batch computes all of it: {copies} times the work of a grid with x = y = 1",
            stacklevel=4,
        )


class BlockBuilder:
    """Builds the sharded parameters of all blocks, then puts them in place.

    blocks: names of submodules. Whatever is not in one is the model's own, "". scale: of all gradients.
    """

    def __init__(self, model: nn.Module, builder: Builder, blocks: Collection[str], *, scale: float) -> None:
        self.model = model
        self.builder = builder
        self.scale = scale
        self._whose = self._assign(blocks)
        self._first = {id(parameter): name for name, parameter in reversed(list(model.named_parameters()))}
        self._made = {name: self._build(name, parameter) for name, parameter in model.named_parameters()}

    def _assign(self, blocks: Collection[str]) -> dict[int, str]:
        """Each parameter's block, by its id: one that several blocks hold is the model's own."""
        whose: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            block = next((block for block in blocks if name.startswith(f"{block}.")), "")
            whose[id(parameter)] = block if whose.get(id(parameter), block) == block else ""
        return whose

    def _build(self, name: str, original: nn.Parameter) -> nn.Parameter:
        owner_name, _, key = name.rpartition(".")
        owner = self.model.get_submodule(owner_name)
        source = self.builder.initializer.real(owner_name, owner)
        sharding = ParameterSharding((), (LOSS,))
        if self._is_sharded(original):
            sharding = ParameterSharding((Split(0, "z"),), (REPLICAS,), is_weight=True)
        return self.builder.parameter(original, getattr(source, key), sharding)

    def _is_sharded(self, parameter: nn.Parameter) -> bool:
        return parameter.dim() > 0 and parameter.numel() > 0 and self.builder.grid.size("z") > 1

    def install(self, *, frees: bool) -> None:
        """Put the parameters in place, and have each block gather its own; frees: again for the backward pass."""
        places: dict[str, list[tuple[nn.Module, str, str]]] = {}
        originals = list(self.model.named_parameters(remove_duplicate=False))
        sharded = {name: self._is_sharded(parameter) for name, parameter in originals}
        seen: set[tuple[int, str]] = set()
        for name, original in originals:
            owner_name, _, key = name.rpartition(".")
            owner = self.model.get_submodule(owner_name)
            if (id(owner), key) in seen:
                continue
            seen.add((id(owner), key))
            first = self._first[id(original)]
            places.setdefault(self._whose[id(original)], []).append((owner, key, first))
            if name == first:
                owner._parameters[key] = self._made[name]
                keep_through_conversions(owner, key, self.builder.gradient_reducer)
            else:
                place_shared(owner, key, self._made[first])
        for block, held in places.items():
            names = list(dict.fromkeys(first for _, _, first in held))
            names.sort(key=lambda name: not sharded[name])  # those that are sharded come first
            index = {name: place for place, name in enumerate(names)}
            cut = [name for name in names if sharded[name]]
            module = self.model.get_submodule(block)
            shard = BlockShard(
                block or type(self.model).__name__,
                [self._made[name] for name in cut],
                [self._made[name] for name in names[len(cut) :]],
                [ParameterPlace(owner, key, index[first]) for owner, key, first in held],
                self.builder.grid.group("z"),
                self.builder.precision,
                self.builder.gatherer,
                self.builder.gradient_reducer,
                scale=self.scale,
                frees=frees and bool(block),  # the model's own are needed first in the backward pass
            )
            module.forward = shard.wrap(module.forward)
