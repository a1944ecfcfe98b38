# SPDX-License-Identifier: Apache-2.0
"""Builds what will be put into a model: its parallel modules, and each parameter's shard. The model is not changed,
except that it is cut into pipeline stages, which an error undoes. Everything that can fail does so here, or in
`parallel.resolve` before."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from stretto.axes import LOSS, STAGE
from stretto.huggingface.family_roles import wildcard
from stretto.parallel.blocks import check_modules, warn_of_replication
from stretto.parallel.builder import Builder
from stretto.parallel.comm.agreement import check_ranks_agree
from stretto.parallel.grid import Grid
from stretto.parallel.layers.dropout import ParallelDropout
from stretto.parallel.meta import MetaInitializer
from stretto.parallel.pipeline.cutting import Cut, cut_into_stages, restrict_plan
from stretto.parallel.roles.plan import PlainPart, Role, ShardingPlan
from stretto.parallel.state import BlockPlan, ShardingRequest

_WARNED_PART = 0.05  # part of a model's parameters above which a warning says that all ranks compute them


@dataclass(frozen=True)
class PlacedBlocks:
    """The shards of a model's parameters by first name, and the block of each, by the id of the model's own: "" where
    several blocks hold it, or none."""

    shards: Mapping[str, nn.Parameter]
    block_of: Mapping[int, str]


@dataclass(frozen=True)
class Placement:
    """New modules, shards and values for a model, or for its pipeline stages of this rank, by place.

    modules: what replaces submodules, by name. shared: parameters of these that another module has too, with that
    module and the name there. parts: parameters that stay in their modules, with those parameters' shards by name.
    blocks: the parameters of blocks. values: attributes and buffers, with their modules. cut: into pipeline stages.
    """

    plan: ShardingPlan | BlockPlan
    builder: Builder
    cut: Cut | None
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    shared: Sequence[tuple[nn.Module, str, nn.Parameter]] = ()
    parts: Sequence[tuple[PlainPart, Mapping[str, nn.Parameter]]] = ()
    blocks: PlacedBlocks | None = None
    values: Sequence[tuple[nn.Module, str, Any]] = ()


def place(model: nn.Module, request: ShardingRequest, plan: ShardingPlan | BlockPlan, *, seed: int | None) -> Placement:
    """Build all parallel modules and shards that a plan gives the model. Collective.

    seed: of a model on the meta device, as in `parallelize`. Raises ValueError where ranks hold different weights or
    seeds, and where an axis does not divide what it splits.
    """
    grid, stages = request.grid, request.options.stages
    if request.options.fp8 is not None:
        from stretto.parallel.fp8.selection import choose_layers

        chosen = choose_layers(model, plan, request.options.fp8, request.precision, grid.sizes)
        request = replace(request, fp8_layers=chosen)
    is_on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    initializer = MetaInitializer(model, grid.device, seed) if is_on_meta else None
    if grid.size("pipe") * stages.virtual_stages == 1:
        return _place(model, request, plan, initializer, None)
    cut = cut_into_stages(model, grid, stages)
    if initializer is not None and cut.stages.skeleton is not None:
        initializer.remember(cut.stages.skeleton)
    try:
        placement = _place(model, request, plan, initializer, cut)
        cut.refusal.exchange()
    except Exception as error:
        cut.undo()
        cut.refusal.exchange(error)
        raise
    return placement


def _place(
    model: nn.Module,
    request: ShardingRequest,
    plan: ShardingPlan | BlockPlan,
    initializer: MetaInitializer | None,
    cut: Cut | None,
) -> Placement:
    grid = request.grid
    if isinstance(plan, ShardingPlan):
        for copies in sorted({role.copies for role in plan.copied.values()}):  # of all stages: groups are collective
            grid.copies_mesh(copies)
        _warn_of_copies(plan, grid)
    plan = plan if cut is None else restrict_plan(plan, model)
    if isinstance(plan, ShardingPlan):
        _warn_of_whole_parts(model, plan, grid)
        drops = any(getattr(model.get_submodule(name), "p", 0) > 0 for name in plan.named("dropout", "inner_dropout"))
        values: list[tuple[nn.Module, str, Any]] = [*_local_attributes(model, plan, grid)]
    else:
        check_modules(model, grid.size(LOSS))
        warn_of_replication(model, grid, plan.reason)
        drops = (plan.dropouts or grid.size("x") * grid.size("y") > 1) and any(
            isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()
        )
        values, block_of = [], _block_of_each(model, plan.names)
    check_ranks_agree(dict(model.named_parameters()), grid, grid.communicator(STAGE), drops=drops)
    builder = Builder(model, request, plan, initializer, cut)
    if isinstance(plan, ShardingPlan):
        modules, shared = builder.build_all(plan), builder.shared_places(plan)
        plain = {name: builder.plain_parameter(name, part.role) for part in plan.plain for name in part.parameters}
        parts = [(part, {name: plain[name] for name in part.parameters}) for part in plan.plain]
        return Placement(plan, builder, cut, modules, shared, parts, values=[*values, *builder.buffers()])
    modules = {name: builder.experts(name, model.get_submodule(name), kind) for name, kind in plan.experts.items()}
    others = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in modules]
    modules |= {name: ParallelDropout(model.get_submodule(name).p, grid, "y", name) for name in plan.dropouts}
    shards = {name: builder.plain_parameter(name, Role("gathered")) for name in others}
    return Placement(plan, builder, cut, modules, blocks=PlacedBlocks(shards, block_of), values=builder.buffers())


def _block_of_each(model: nn.Module, blocks: Collection[str]) -> dict[int, str]:
    """Each parameter's block, by its id: one that several blocks hold is the model's own."""
    found: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        found[id(parameter)] = block if found.get(id(parameter), block) == block else ""
    return found


def _local_attributes(model: nn.Module, plan: ShardingPlan, grid: Grid) -> list[tuple[nn.Module, str, int]]:
    """The value of each local attribute on this rank; a module under several names is listed once."""
    found = {}
    for name, axis in plan.local_attributes.items():
        if axis is None:
            continue
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        found[id(module), attribute] = (module, attribute, max(1, getattr(module, attribute) // grid.size(axis)))
    for name, role in plan.copied.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if hasattr(module, role.shared_by):
            value = getattr(module, role.shared_by) // role.copies
            found[id(module), role.shared_by] = (module, role.shared_by, value)
    return list(found.values())


def _warn_of_whole_parts(model: nn.Module, plan: ShardingPlan, grid: Grid) -> None:
    """Warn where the roles of a family have every rank of x and y compute much of the model, and say what that costs.

    Rank 0 alone warns.
    """
    copies = grid.size("x") * grid.size("y")
    own = [part for part in plan.replicated if part.whose in plan.of_own_plan]
    count = sum(model.get_parameter(name).numel() for part in own for name in part.parameters)
    whole = sum(parameter.numel() for parameter in model.parameters())
    if copies > 1 and count > _WARNED_PART * whole and dist.get_rank() == 0:
        names = ", ".join(dict.fromkeys(wildcard(part.whose) for part in own))
        warnings.warn(
            f"{count / whole:.0%} of the parameters of {type(model).__name__} are split neither over x nor over y "
            f"({names}): each of the x * y = {copies} ranks that share a batch computes all of them, {copies} times "
            "the work of a grid with x = y = 1",
            stacklevel=5,
        )


def _warn_of_copies(plan: ShardingPlan, grid: Grid) -> None:
    """Say once, on rank 0, that several ranks of x hold the same KV heads."""
    if plan.copied and dist.get_rank() == 0:
        role = next(iter(plan.copied.values()))
        units = grid.size("x") // role.copies
        warnings.warn(
            f"x={grid.size('x')} is more than the {units} {role.unit_name}: {role.copies} ranks hold each of them, and "
            "sum its gradients",
            stacklevel=5,
        )
