# SPDX-License-Identifier: Apache-2.0
"""Resolves how a model is sharded: by the roles of its submodules, or by blocks. Nothing is changed, and no rank asks
another; `parallel.place` then builds what `parallel.install` puts into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from stretto.axes import check_sizes
from stretto.execution import ExecutionOptions
from stretto.huggingface.formulas import UnknownRolesError
from stretto.parallel.blocks import find_blocks
from stretto.parallel.recomputation import check_blocks
from stretto.parallel.roles.plan import Role, ShardingPlan, read_plan
from stretto.parallel.roles.validation import check_takes_sharded_sequence, validate_plan
from stretto.parallel.state import BlockPlan, state_of


def refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError for a model on a grid, with a part that is on one or that others have sharded."""
    kind = type(model).__name__
    if state_of(model) is not None:
        raise ValueError(f"this {kind} is on a grid already: build another one to parallelize it anew")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "stretto_layout"):
            raise ValueError(
                f"{name} of this {kind} is on a grid already: parallelize the whole model once, and not its parts "
                "(blocks= names those that are gathered one at a time)"
            )
        if isinstance(parameter, DTensor):
            raise ValueError(f"{name} of this {kind} is a DTensor (of fully_shard, perhaps): pass a plain model")


def resolve(
    model: nn.Module,
    sizes: Mapping[str, int],
    *,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None = None,
    local_attributes: Mapping[str, str | None] | None = None,
    blocks: Sequence[str] | None = None,
    options: ExecutionOptions | None = None,
) -> ShardingPlan | BlockPlan:
    """Find the roles of a model's submodules, or the blocks of one that has none, and check the options against them.

    sizes: of a grid's axes. Arguments and errors are those of `parallelize`.
    """
    options = options or ExecutionOptions()
    plan = _find_plan(model, sizes, roles, local_attributes, blocks)
    if isinstance(plan, ShardingPlan):
        if options.shard_sequence:
            check_takes_sharded_sequence(model, plan)
    elif options.shard_sequence:
        raise ValueError("shard_sequence takes roles of all submodules, and this model is sharded block by block")
    if options.recomputation.is_on:
        check_blocks(model, options.recompute, () if isinstance(plan, ShardingPlan) else plan.names)
    return plan


def _find_plan(
    model: nn.Module,
    sizes: Mapping[str, int],
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None,
    local_attributes: Mapping[str, str | None] | None,
    blocks: Sequence[str] | None,
) -> ShardingPlan | BlockPlan:
    if blocks is not None:
        if roles or local_attributes:
            raise ValueError(
                "blocks and roles exclude each other: a block is sharded only over z, whatever it contains"
            )
        if sizes.get("expert", 1) > 1:
            raise ValueError(
                f"expert is {sizes['expert']}, but a model that is sharded block by block has all experts on every "
                "rank: leave blocks= out, and give submodules roles ('experts' and 'router' among them), or choose "
                "expert=1"
            )
        return BlockPlan(tuple(find_blocks(model, blocks)), "blocks= was given")
    sizes = check_sizes(sizes).sizes()
    has_roles = roles is not None or local_attributes is not None or hasattr(model, "parallel_plan")
    try:
        plan = read_plan(model, roles, local_attributes, sizes)
        validate_plan(model, plan, sizes)
    except ValueError as error:
        is_unsplit = sizes["x"] == sizes["y"] == 1
        is_divided = sizes.get("expert", 1) > 1
        if has_roles or is_divided or not (is_unsplit or isinstance(error, UnknownRolesError)):
            raise
        return BlockPlan(tuple(find_blocks(model)), str(error))
    return plan
