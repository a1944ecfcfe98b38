# SPDX-License-Identifier: Apache-2.0
"""Puts what `parallel.place` has built into a model: modules, parameters, the loss, and hooks of its passes."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_module_registration_hook

from stretto.axes import EXPERT, SHARDS
from stretto.execution import MIN_COPIED_BYTES
from stretto.huggingface import pretrained_model
from stretto.huggingface.attention.packed_documents import install_packed
from stretto.huggingface.experts import choose_scaled_inputs
from stretto.huggingface.sequence import changes_in_place, shard_between_blocks
from stretto.parallel.blocks import has_forward
from stretto.parallel.builder import Builder
from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.context.sequence_parts import install_context, install_linear_attention
from stretto.parallel.experts.shared_experts import compute_under_exchange
from stretto.parallel.forward_passes import (
    RowsCheck,
    begin_forward,
    end_forward,
    exchange_whole_features,
    explain_sizes,
    warn_of_own_buffers,
)
from stretto.parallel.fused_modules import fuse_modules
from stretto.parallel.layers.block_shard import BlockShard
from stretto.parallel.layers.dropout import AgreedRandomState
from stretto.parallel.layers.joined_linears import join
from stretto.parallel.layers.plain_parts import (
    exchange_features,
    keep_through_conversions,
    place_plain,
    read_as_tensors,
)
from stretto.parallel.layers.router import route_whole_features
from stretto.parallel.layers.sharded_module import place_shared, refuse_copy
from stretto.parallel.layout import has_layout
from stretto.parallel.model_loss import balance_over_batch, install_loss, install_loss_of_rows
from stretto.parallel.pipeline.cutting import pass_over_other_stages, wrap_forwards
from stretto.parallel.place import PlacedBlocks, Placement
from stretto.parallel.recomputation import checkpoint_activations
from stretto.parallel.roles.plan import PlainPart, ShardingPlan
from stretto.parallel.state import ParallelState, ShardingRequest, set_state

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stretto.parallel.context.sequence_parts import SequenceParts

# They would reduce gradients a second time.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel")
_ADAPTERS = "BaseTuner"  # of which PEFT's classes of adapters inherit


def install(model: nn.Module, placement: Placement, parts: SequenceParts | None = None) -> None:
    """Change the model as a placement says: nothing here may fail. parts: what cuts its sequences, if anything does."""
    plan, builder, state, cut = placement.plan, placement.builder, placement.builder.state, placement.cut
    request, reducer = state.request, state.gradient_reducer
    has_roles, options = isinstance(plan, ShardingPlan), request.options
    frees = not options.keeps_weights and not options.recomputation.is_on
    request.grid.gradients.add(request.gradients)
    if cut is not None:
        state.stages = cut.stages
        cut.stages.tokens, cut.stages.has_roles = builder.tokens, has_roles
    state.sequence_parts = parts
    if parts is not None:  # before blocks wrap the forward of their layers
        install_linear_attention(model, parts)
    for name, module in placement.modules.items():
        _replace_module(model, name, module)
        if name in plan.experts and plan.experts[name].takes_copies:
            around = model.get_submodule(name.rpartition(".")[0])
            choose_scaled_inputs(around, overlaps=options.overlap.hides_any)
    if builder.is_fused:
        fuse_modules(model, builder.attention)
    for name in placement.modules.keys() & plan.experts.keys():
        parent, _, child = name.rpartition(".")
        compute_under_exchange(model.get_submodule(parent), child, is_on=options.overlap.hides_any)
    if options.invariant:
        from stretto.parallel.layers.invariant import install_invariant  # which imports Triton

        install_invariant(model)
    for owner, key, parameter in placement.shared:
        place_shared(owner, key, parameter)
    for part, parameters in placement.parts:
        _install_part(model, placement, part, parameters, frees=frees)
    if placement.blocks is not None:
        # Transformers' layers checkpoint within their forward, and so within what gathers them: that frees nothing.
        _install_blocks(model, placement.blocks, builder, frees=frees or options.recomputation.is_on)
    for owner, attribute, value in placement.values:
        setattr(owner, attribute, value)
    if isinstance(plan, ShardingPlan):
        install_loss(model, plan, reducer, request.sharded_loss)
    else:
        is_pretrained, overlaps = plan.is_pretrained, options.overlap.all_reduce
        install_loss_of_rows(model, reducer, is_pretrained=is_pretrained, overlaps=overlaps, is_fused=builder.is_fused)
    if plan.is_pretrained and has_roles:
        layers = (module for module in model.modules() if module not in state.block_shards)  # they see plain tensors
        pretrained_model.compile_inside_of_own_checkpoints(layers)
    if plan.is_pretrained:
        until_last = max(request.grid.size(axis) for axis in (SHARDS, EXPERT)) > 1
        random_state = AgreedRandomState((), request.grid, always=True)
        if until_last or random_state.is_needed:
            agree = random_state.agree if random_state.is_needed else None
            pretrained_model.generate_in_step(model, agree, until_last=until_last)
        _batch_over_x(model, request)
    pretrained_model.refuse_saving(model)
    pretrained_model.refuse_resizing(model)
    pretrained_model.count_without_embeddings(model)
    _refuse_copies(model)
    _refuse_wrapping(model)
    reducer.name(model.named_parameters())
    _follow_passes(model, state, by_blocks=not has_roles)
    if parts is not None:  # after the hook that compares ranks' rows
        expands_again = options.recomputation.is_on and builder.tokens is None
        install_context(model, parts, expands_again=expands_again)
    if plan.is_pretrained:  # by a mask that context has cut
        balance_over_batch(model, reducer)
    if plan.is_pretrained and parts is None and not options.invariant:  # whose attention is its own
        install_packed(model)
    set_state(model, state)
    if isinstance(plan, ShardingPlan) and plan.sharded_blocks and builder.tokens is not None:
        shard_between_blocks(model, plan.sharded_blocks, plan.attentions, builder.tokens)
        for attention, names in plan.attentions.items():
            if not changes_in_place(model.get_submodule(attention)):
                join([model.get_submodule(name) for name in names])
    if has_roles and plan.is_pretrained:
        exchange_whole_features(model, request.grid)
    if has_roles and request.grid.size("x") * request.grid.size("y") > 1:
        model.register_forward_hook(torch.compiler.disable(explain_sizes), always_call=True)
    if options.recomputation.is_on:
        checkpoint_activations(model, options.recompute, () if isinstance(plan, ShardingPlan) else plan.names)
    if cut is not None:
        wrap_forwards(model, cut.stages)
        pass_over_other_stages(model, cut.stages)


def _batch_over_x(model: nn.Module, request: ShardingRequest) -> None:
    """Have `generate_batch` of transformers run on grids of data and x."""
    grid, refusal = request.grid, None
    others = [axis for axis in ("pipe", "context", "y", "z", EXPERT) if grid.size(axis) > 1]
    if others:
        refusal = f"it runs on grids of data and x, not of {', '.join(others)}: an Engine, or generate, would do"
    elif request.options.invariant:
        refusal = "it has its own attention, whose bits are not those of invariant=True: an Engine would do"

    def make_mesh() -> DeviceMesh:
        return DeviceMesh.from_group(grid.group("x"), grid.device.type, mesh_dim_names=("tp",))

    pretrained_model.batch_over_ranks(model, refusal, grid.size("x"), make_mesh)


def _install_part(
    model: nn.Module, placement: Placement, part: PlainPart, parameters: Mapping[str, nn.Parameter], *, frees: bool
) -> None:
    """Put the parameters of a module that is not replaced in place, and have its code read them by its role."""
    builder, state = placement.builder, placement.builder.state
    grid, precision, reducer = state.grid, state.request.precision, state.gradient_reducer
    places = place_plain(model, parameters, reducer)
    if part.role.role == "gathered":
        module = model.get_submodule(part.whose)
        _gather_for_forward(module, builder.block_shard(part.whose, places, frees=frees), builder)
        exchange_features(module, part, grid)
    elif part.role.role == "router":
        overlaps = state.options.overlap.all_reduce
        route_whole_features(model, part, places, precision, grid, builder.tokens, reducer, overlaps=overlaps)
    else:
        read_as_tensors(model, part, places, precision, state)


def _replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put another module in the place of a submodule. Hooks of the old one go along."""
    parent, _, child = name.rpartition(".")
    old = model.get_submodule(name)
    for key in vars(nn.Module()):
        if "_hook" in key:  # the dicts themselves, so that what removes a user's hook still does
            setattr(new, key, getattr(old, key))
    model.get_submodule(parent)._modules[child] = new


def _install_blocks(model: nn.Module, blocks: PlacedBlocks, builder: Builder, *, frees: bool) -> None:
    """Put the parameters in place, and have each block gather its own; frees: again for the backward pass."""
    first: dict[int, str] = {}
    places: dict[str, dict[tuple[int, str], tuple[nn.Module, str]]] = {}
    for name, original in list(model.named_parameters(remove_duplicate=False)):
        if has_layout(original):  # experts', which are in place
            continue
        owner_name, _, key = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        held = places.setdefault(blocks.block_of[id(original)], {})
        if (id(owner), key) in held:
            continue
        held[id(owner), key] = (owner, key)
        shard = blocks.shards[first.setdefault(id(original), name)]
        if name == first[id(original)]:
            owner._parameters[key] = shard
            keep_through_conversions(owner, key, builder.gradient_reducer)
        else:
            place_shared(owner, key, shard)
    if builder.precision.compute is not None:
        places.setdefault("", {})  # casts the model's inputs, also where blocks have all parameters
    for block, of_block in places.items():
        module = model.get_submodule(block)
        # The model's own are needed first in the backward pass.
        gathered = builder.block_shard(block or type(model).__name__, [*of_block.values()], frees=frees and bool(block))
        _gather_for_forward(module, gathered, builder)
        if not block:
            _gather_outside_of_forward(model, gathered)
            gathered.not_held = frozenset(each.number for each in gathered.places if _is_large_embedding(each.owner))


def _gather_for_forward(module: nn.Module, shard: BlockShard, builder: Builder) -> None:
    """Have a block, or the model with what is in none, gather its parameters for its forward pass."""
    adapted = _adapted_parameters(module)
    shard.parametrized = frozenset(place.number for place in shard.places if (place.owner, place.key) in adapted)
    builder.state.block_shards[module] = shard
    builder.state.wrap_forward(module, shard.wrap, shard.wrap_submodule)
    if module is not builder.model and (module._forward_pre_hooks or module._forward_hooks):
        module._call_impl = shard.wrap(module._call_impl)  # type: ignore[method-assign]  # they may read its parameters
    _refuse_copies(module)


def _adapted_parameters(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """Owners and names of the parameters that PEFT's `target_parameters` parametrizes in its wrappers' forward."""
    found = set()
    for module in model.modules():
        if isinstance(key := getattr(module, "parameter_name", None), str):
            owner = module
            while isinstance(inner := getattr(owner, "base_layer", None), nn.Module):
                owner = inner
            found.add((owner, key))
    return found


def _gather_outside_of_forward(model: nn.Module, shard: BlockShard) -> None:
    """Have submodules find the model's own parameters where they run outside of its forward.

    The user may call one directly, and activation checkpointing computes an embedding again in the backward pass.
    """
    own = {id(parameter) for parameter in shard.parameters}
    for name, module in model.named_modules():
        has_own = any(id(parameter) in own for parameter in module.parameters())
        if name and has_own and has_forward(module):
            module.forward = shard.wrap_submodule(module.forward)


def _is_large_embedding(module: nn.Module) -> bool:
    """True for an embedding, whose weight autograd does not save, of many bytes."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.nbytes > MIN_COPIED_BYTES


def _follow_passes(model: nn.Module, state: ParallelState, *, by_blocks: bool) -> None:
    """Have gathers and reductions follow the model's passes. The hooks keep its state alive (`state_of`)."""
    begin, end = torch.compiler.disable(begin_forward), torch.compiler.disable(end_forward)
    model.register_forward_pre_hook(lambda model, _: begin(model, state))
    rows = RowsCheck(state.grid, has_roles=not by_blocks)
    model.register_forward_pre_hook(torch.compiler.disable(rows), with_kwargs=True)
    random_state = AgreedRandomState(model.modules(), state.grid, always=by_blocks)
    if random_state.is_needed:
        model.register_forward_pre_hook(torch.compiler.disable(random_state))
    model.register_forward_hook(lambda *_: end(state), always_call=True)
    warn_of_own_buffers(model, state)
    reducer = state.gradient_reducer
    model.register_state_dict_pre_hook(lambda *_: None if in_backward() else reducer.drop_failed_passes())


def _refuse_copies(model: nn.Module) -> None:
    """Have copying or pickling the model raise ValueError: pickle would fail at its hooks, with another message."""
    model.__reduce_ex__ = refuse_copy  # type: ignore[method-assign]


class _Applied(OrderedDict[str, Any]):
    """The names of the composable APIs that a module has, among which torch looks before it applies one."""

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise ValueError(_refusal("fully_shard or replicate"))
        return super().__contains__(name)


def _refuse_wrapping(model: nn.Module) -> None:
    """Have DDP, FSDP, DataParallel, fully_shard, replicate and PEFT's adapters raise ValueError for the model.

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
    wrapper = next((base.__name__ for base in type(owner).__mro__ if base.__name__ in (*_WRAPPERS, _ADAPTERS)), None)
    if wrapper is None or module is None:
        return
    if any(isinstance(vars(each).get(REGISTRY_KEY), _Applied) for each in module.modules()):
        if wrapper == _ADAPTERS:
            raise ValueError(
                f"{type(owner).__name__} adapts a model that stretto.parallelize has returned, whose layers are "
                "sharded: call peft.get_peft_model first, then parallelize"
            )
        raise ValueError(_refusal(wrapper))


def _refusal(wrapper: str) -> str:
    return (
        f"{wrapper} around a model that stretto.parallelize has returned, or around a part of it: its gradients are "
        "reduced over all ranks already when backward() returns. Leave the wrapper out. Accelerate: prepare(optimizer, "
        "loader), not the model; Lightning: ModelParallelStrategy in place of 'ddp'; transformers' Trainer: "
        "stretto.huggingface.trainer_plugin"
    )
