# SPDX-License-Identifier: Apache-2.0
"""Builds what will be put into a model: its parallel modules, and each parameter's shard. The model is not changed, so
that everything that can fail does so here, or in `parallel.resolve` before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from stretto.axes import LOSS, STAGE
from stretto.parallel.blocks import BlockBuilder, check_modules, warn_of_replication
from stretto.parallel.builder import Builder
from stretto.parallel.comm.agreement import check_ranks_agree
from stretto.parallel.grid import Grid
from stretto.parallel.layers.plain_parts import warn_of_copies
from stretto.parallel.meta import MetaInitializer
from stretto.parallel.pipeline.cutting import restrict_plan
from stretto.parallel.roles.plan import PlainPart, ShardingPlan
from stretto.parallel.state import BlockPlan, ShardingRequest

if TYPE_CHECKING:
    from stretto.parallel.pipeline.cutting import Cut


@dataclass(frozen=True)
class Placement:
    """What goes where in a model, or in its pipeline stages of this rank.

    modules: what replaces submodules, by name. shared: parameters of these that another module has too, with that
    module and the name there. parts: parameters that stay in their modules, with those parameters' shards by name.
    blocks: the parameters of blocks. values: attributes and buffers, with their modules.
    """

    plan: ShardingPlan | BlockPlan
    builder: Builder
    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    shared: Sequence[tuple[nn.Module, str, nn.Parameter]] = ()
    parts: Sequence[tuple[PlainPart, Mapping[str, nn.Parameter]]] = ()
    blocks: BlockBuilder | None = None
    values: Sequence[tuple[nn.Module, str, Any]] = ()


def place(
    model: nn.Module,
    request: ShardingRequest,
    plan: ShardingPlan | BlockPlan,
    initializer: MetaInitializer,
    cut: Cut | None,
) -> Placement:
    """Build all parallel modules and shards that a plan gives the model. Collective.

    Raises ValueError where ranks hold different weights or seeds, and where an axis does not divide what it splits.
    """
    grid = request.grid
    if isinstance(plan, ShardingPlan):
        for copies in sorted({role.copies for role in plan.copied.values()}):  # of all stages: groups are collective
            grid.copies_mesh(copies)
        warn_of_copies(plan, grid)
        plan = plan if cut is None else restrict_plan(plan, model)
        drops = any(getattr(model.get_submodule(name), "p", 0) > 0 for name in plan.named("dropout", "inner_dropout"))
    else:
        check_modules(model, grid.size(LOSS))
        warn_of_replication(model, grid, plan.reason)
        drops = grid.size("x") * grid.size("y") > 1 and any(
            isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()
        )
    check_ranks_agree(model, grid, grid.communicator(STAGE), drops=drops)
    builder = Builder(model, request, plan, initializer, cut)
    if isinstance(plan, ShardingPlan):
        modules, shared, plain = builder.build_all(plan), builder.shared_places(plan), builder.build_plain(plan)
        parts = [(part, {name: plain[name] for name in part.parameters}) for part in plan.plain]
        values = [*_local_attributes(model, plan, grid), *builder.buffers()]
        placement = Placement(plan, builder, modules, shared, parts, values=values)
    else:
        blocks = BlockBuilder(model, builder, plan.names)
        placement = Placement(plan, builder, blocks=blocks, values=builder.buffers())
    if cut is not None:
        cut.refusal.meet()
    return placement


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
