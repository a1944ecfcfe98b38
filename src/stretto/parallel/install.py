# SPDX-License-Identifier: Apache-2.0
"""Puts what `parallel.place` has built into a model: modules, parameters, the loss, and hooks of its passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from stretto.huggingface import pretrained_model
from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.forward_passes import begin_forward, end_forward, explain_sizes
from stretto.parallel.layers.dropout import AgreedRandomState
from stretto.parallel.layers.plain_parts import gather_for_forward, place_plain, read_as_tensors
from stretto.parallel.layers.router import route_whole_features
from stretto.parallel.layers.sharded_module import place_shared, refuse_copies, refuse_wrapping
from stretto.parallel.model_loss import install_loss, install_loss_of_rows, replace_module
from stretto.parallel.pipeline.cutting import wrap_forwards
from stretto.parallel.place import Placement
from stretto.parallel.recomputation import checkpoint_activations
from stretto.parallel.roles.plan import PlainPart, ShardingPlan
from stretto.parallel.state import ParallelState, set_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.parallel.pipeline.cutting import Cut


def install(model: nn.Module, placement: Placement, cut: Cut | None) -> None:
    """Change the model as a placement says: nothing here may fail."""
    plan, builder, state = placement.plan, placement.builder, placement.builder.state
    request, reducer = state.request, state.gradient_reducer
    has_roles, options = isinstance(plan, ShardingPlan), request.options
    frees = not options.keeps_weights and not options.recomputation.is_on
    request.grid.gradients.add(request.gradients)
    if cut is not None:
        state.stages = cut.stages
        cut.stages.tokens, cut.stages.has_roles = builder.tokens, has_roles
    for name, module in placement.modules.items():
        replace_module(model, name, module)
    for owner, key, parameter in placement.shared:
        place_shared(owner, key, parameter)
    for part, parameters in placement.parts:
        _install_part(model, placement, part, parameters, frees=frees)
    if placement.blocks is not None:
        placement.blocks.install(frees=frees)
    for owner, attribute, value in placement.values:
        setattr(owner, attribute, value)
    if isinstance(plan, ShardingPlan):
        install_loss(model, plan, reducer, request.sharded_loss)
    else:
        install_loss_of_rows(model, reducer, overlaps=options.overlap.all_reduce)
    if pretrained_model.is_pretrained_model(model) and request.grid.size("z") > 1:
        pretrained_model.generate_in_step(model)
    pretrained_model.refuse_saving(model)
    pretrained_model.refuse_resizing(model)
    refuse_copies(model)
    refuse_wrapping(model)
    reducer.name(model.named_parameters())
    set_state(model, state)
    _follow_passes(model, state, by_blocks=not has_roles)
    if has_roles and request.grid.size("x") * request.grid.size("y") > 1:
        model.register_forward_hook(torch.compiler.disable(explain_sizes), always_call=True)
    if options.recomputation.is_on:
        checkpoint_activations(model, options.recompute, () if isinstance(plan, ShardingPlan) else plan.names)
    if cut is not None:
        wrap_forwards(model, cut.stages)


def _install_part(
    model: nn.Module, placement: Placement, part: PlainPart, parameters: Mapping[str, nn.Parameter], *, frees: bool
) -> None:
    """Put the parameters of a module that is not replaced in place, and have its code read them by its role."""
    builder, state = placement.builder, placement.builder.state
    grid, precision, reducer = state.grid, state.request.precision, state.gradient_reducer
    places = place_plain(model, parameters, reducer)
    if part.role.role == "gathered":
        shard = builder.block_shard(part.whose, places, frees=frees)
        state.block_shards[model.get_submodule(part.whose)] = shard
        gather_for_forward(model, part, shard, grid)
    elif part.role.role == "router":
        overlaps = state.options.overlap.all_reduce
        route_whole_features(model, part, places, precision, grid, builder.tokens, reducer, overlaps=overlaps)
    else:
        read_as_tensors(model, part, places, precision, state)


def _follow_passes(model: nn.Module, state: ParallelState, *, by_blocks: bool) -> None:
    """Have gathers and reductions follow the model's passes. The hooks keep its state alive (`state_of`)."""
    begin, end = torch.compiler.disable(begin_forward), torch.compiler.disable(end_forward)
    model.register_forward_pre_hook(lambda model, _: begin(model, state))
    random_state = AgreedRandomState(model, state.grid, always=by_blocks)
    if random_state.is_needed:
        model.register_forward_pre_hook(torch.compiler.disable(random_state))
    model.register_forward_hook(lambda *_: end(state), always_call=True)
    reducer = state.gradient_reducer
    model.register_state_dict_pre_hook(lambda *_: None if in_backward() else reducer.drop_failed_passes())
