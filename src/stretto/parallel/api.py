# SPDX-License-Identifier: Apache-2.0
"""`parallelize`: shards an nn.Module over a grid, in place, under its own names.

What it needs is imported when it is called, so that importing it imports neither Triton nor torch.compile nor DTensor.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
from torch import nn

from stretto.axes import LOSS, STAGE, check_sizes
from stretto.execution import ExecutionKeywords, ExecutionOptions
from stretto.parallel.grid import GradientReduction, Grid
from stretto.parallel.state import ParallelState, set_state, state_of, wrappers_of
from stretto.suggestions import did_you_mean

if TYPE_CHECKING:
    from stretto.parallel.builder import Builder
    from stretto.parallel.meta import MetaInitializer
    from stretto.parallel.pipeline.cutting import Cut
    from stretto.parallel.precision import Precision
    from stretto.parallel.roles.plan import Role, ShardingPlan

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    grid: Grid,
    *,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None = None,
    local_attributes: Mapping[str, str | None] | None = None,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    sharded_loss: bool = True,
    blocks: Sequence[str] | None = None,
    gradients: GradientReduction | None = None,
    seed: int | None = 0,
    options: ExecutionOptions | None = None,
    **changes: Unpack[ExecutionKeywords],
) -> Model:
    """Shard `model` over `grid` in place, and return it (Singh, Algorithm 3).

    Linears, embeddings, norms, dropouts, head and loss are replaced by parallel modules. Parameters keep their names
    and become DTensors on the grid's mesh; each rank holds 1 / (x y z) of every linear's weight. Every rank then calls
    the model with its own part of the batch [batch / (data x Z), ...]. The loss is the mean over the global batch, the
    same on every rank, and gradients are fully reduced when `backward()` returns. Collective: every rank must make the
    same call.

    A model without roles (neither passed nor declared by the model) is sharded block by block over z, as by FSDP2: each
    rank holds 1 / z of every parameter and computes the loss of its own rows, and gradients are averaged over the
    ranks. Ranks of x and y then repeat the same computation, and a warning is printed.

    roles: maps name patterns ("*" matches one component of a dotted name) to roles (`stretto.parallel.Role`), for
        models that do not declare their submodules' roles.
    local_attributes: maps patterns of integer attributes that must become local counts ("h.*.attn.n_head") to the axis
        that divides them, or to None if they keep the whole model's number.
    dtype: of activations, and of weights and partial sums in communication (None: the parameters' dtype). Parameters
        keep their dtype: fp32 parameters with dtype=torch.bfloat16 are master weights.
    reduce_dtype: dtype in which weight gradients are reduced (None: `dtype`).
    sharded_loss: pass False if the model modifies logits between head and loss: the logits are then gathered.
    blocks: shard block by block, without roles: names or patterns of the submodules that are gathered one at a time.
        None: for a model without roles, the children of its lists of modules.
    gradients: how gradients are reduced over ranks with different rows. "mean" (default): they are averaged, as by DDP
        and FSDP; the losses of models with roles, and `mean_over_batch`, are of the global batch and multiply their
        gradients by the number of ranks before. "sum": for losses of which each rank has a part, to be added.
    seed: a model on the meta device is initialized here, from this seed and each module's name: the same on every grid.
        None fills parameters with NaN, for weights that are loaded afterwards.
    options: how a step executes (`stretto.execution.ExecutionOptions`). Its fields may also be passed as keyword
        arguments (`changes`): overlap, reshard, recompute, shard_sequence, tune_matmuls, stages, drop_duplicates and
        expert_rows. shard_sequence takes a model that declares support (`takes_sharded_sequence`: attention reads
        shapes from the outputs of linears), such as `stretto.models.GPT`, and tokens, batch x seq, that x divides.

    Raises ValueError if a submodule with parameters has no role, if an integer attribute may be a local count but is
    not listed, if an axis does not divide a size that it splits, and if ranks hold different weights; the model is then
    unchanged.
    """
    _refuse_sharded(model)

    from stretto.parallel.meta import MetaInitializer
    from stretto.parallel.pipeline.cutting import cut_into_stages
    from stretto.parallel.precision import Precision
    from stretto.parallel.recomputation import check_blocks
    from stretto.parallel.roles.plan import ShardingPlan
    from stretto.parallel.roles.validation import check_takes_sharded_sequence

    precision = Precision(dtype, reduce_dtype)
    if gradients not in (None, "sum", "mean"):
        raise ValueError(f"gradients is {gradients!r}, but must be 'sum' or 'mean' (None: as the model's loss needs)")
    options = (options or ExecutionOptions()).replace(**changes)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"{name} has a hook, which its shard would never call: register it after parallelize")
    plan = _plan_or_blocks(model, grid.sizes, roles, local_attributes, blocks)
    if options.shard_sequence and isinstance(plan, ShardingPlan):
        check_takes_sharded_sequence(model, plan)
    if options.recomputation.is_on:
        check_blocks(model, options.recompute, () if isinstance(plan, ShardingPlan) else plan.names)
    initializer = MetaInitializer(model, grid.device, seed)
    cut = cut_into_stages(model, grid, options, initializer)
    gradients = gradients or "mean"
    try:
        if not isinstance(plan, ShardingPlan):
            return _shard_by_blocks(model, grid, precision, options, initializer, plan, gradients, cut)
        return _shard_by_roles(
            model, grid, precision, options, initializer, plan, gradients, cut, sharded_loss=sharded_loss
        )
    except Exception as error:
        if cut is not None:
            cut.undo()
            cut.refusal.meet(error)
        raise


def _refuse_sharded(model: nn.Module) -> None:
    """Raise ValueError for a model on a grid, or with a part that is on one or that others have sharded."""
    from torch.distributed.tensor import DTensor

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


def _shard_by_roles(
    model: Model,
    grid: Grid,
    precision: Precision,
    options: ExecutionOptions,
    initializer: MetaInitializer,
    plan: ShardingPlan,
    gradients: GradientReduction,
    cut: Cut | None,
    *,
    sharded_loss: bool,
) -> Model:
    """Shard a model, or its pipeline stages, by the roles of its submodules, and return it."""
    from stretto.parallel.builder import Builder
    from stretto.parallel.comm.agreement import check_ranks_agree
    from stretto.parallel.layers.gemm_layout import MatmulTuner
    from stretto.parallel.layers.plain_parts import gather_for_forward, place_plain, read_as_tensors, warn_of_copies
    from stretto.parallel.layers.router import route_whole_features
    from stretto.parallel.layers.sharded_module import place_shared
    from stretto.parallel.layers.token_shards import TokenShards
    from stretto.parallel.model_loss import install_loss, replace_module
    from stretto.parallel.pipeline.cutting import restrict_plan

    grid.gradients.add(gradients)
    for copies in sorted({role.copies for role in plan.copied.values()}):  # of all stages: their groups are collective
        grid.copies_mesh(copies)
    warn_of_copies(plan, grid)
    if cut is not None:
        plan = restrict_plan(plan, model)
    drops = any(getattr(model.get_submodule(name), "p", 0) > 0 for name in plan.named("dropout", "inner_dropout"))
    check_ranks_agree(model, grid, grid.communicator(STAGE), drops=drops)
    matmuls = MatmulTuner(options.tune_matmuls, grid.device, grid.communicator(STAGE))
    tokens = TokenShards(grid.group("x")) if options.shard_sequence and grid.size("x") > 1 else None
    is_stage = cut is not None
    builder = Builder(model, grid, precision, options, matmuls, tokens, initializer, is_stage=is_stage)
    builder.gradient_reducer.accumulates_unsharded = options.scatters_once
    builder.gradient_reducer.averages = gradients == "mean"
    if cut is not None:
        builder.tied |= cut.tied
        cut.stages.tokens = tokens
    # First comes everything that can fail, so that a failure leaves the model as it was.
    built = builder.build_all(plan)
    shared = builder.shared_places(plan)
    plain = builder.build_plain(plan)
    buffers = builder.buffers()
    attributes = _local_attributes(model, plan, grid)
    if cut is not None:
        cut.refusal.meet()
        cut.stages.has_roles = True
    for name, module in built.items():
        replace_module(model, name, module)
    for owner, key, parameter in shared:
        place_shared(owner, key, parameter)
    for part in plan.plain:
        places = place_plain(model, {name: plain[name] for name in part.parameters}, builder.gradient_reducer)
        if part.role.role == "gathered":
            frees = not options.keeps_weights and not options.recomputation.is_on
            shard = builder.block_shard(part.whose, places, frees=frees)
            builder.state.block_shards[model.get_submodule(part.whose)] = shard
            gather_for_forward(model, part, shard, grid)
        elif part.role.role == "router":
            reducer, overlaps = builder.gradient_reducer, options.overlap.all_reduce
            route_whole_features(model, part, places, precision, grid, tokens, reducer, overlaps=overlaps)
        else:
            read_as_tensors(model, part, places, precision, builder.state)
    for owner, attribute, value in [*attributes, *buffers]:
        setattr(owner, attribute, value)
    install_loss(model, plan, builder.gradient_reducer, sharded_loss)
    builder.state.stages = None if cut is None else cut.stages
    _finish(model, builder, by_blocks=False)
    if grid.size("x") * grid.size("y") > 1:
        model.register_forward_hook(torch.compiler.disable(_explain_sizes), always_call=True)
    _finish_blocks(model, options, cut)
    return model


def _finish_blocks(model: nn.Module, options: ExecutionOptions, cut: Cut | None, blocks: Sequence[str] = ()) -> None:
    """Have blocks be computed again, and follow the pipeline stage that runs."""
    from stretto.parallel.pipeline.cutting import wrap_forwards
    from stretto.parallel.recomputation import checkpoint_activations

    checkpoint_activations(model, options.recompute, blocks)
    if cut is not None:
        wrap_forwards(model, cut.stages)


@dataclasses.dataclass(frozen=True)
class _BlockPlan:
    """A model's blocks by name, and why it is sharded by these."""

    names: tuple[str, ...]
    reason: str


def _plan_or_blocks(
    model: nn.Module,
    sizes: Mapping[str, int],
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None,
    local_attributes: Mapping[str, str | None] | None,
    blocks: Sequence[str] | None,
) -> ShardingPlan | _BlockPlan:
    """How the roles of its submodules shard a model, or the blocks of one that has none."""
    from stretto.huggingface.formulas import UnknownRolesError
    from stretto.parallel.blocks import find_blocks
    from stretto.parallel.roles.plan import read_plan
    from stretto.parallel.roles.validation import validate_plan

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
        return _BlockPlan(tuple(find_blocks(model, blocks)), "blocks= was given")
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
        return _BlockPlan(tuple(find_blocks(model)), str(error))
    return plan


def _shard_by_blocks(
    model: Model,
    grid: Grid,
    precision: Precision,
    options: ExecutionOptions,
    initializer: MetaInitializer,
    blocks: _BlockPlan,
    gradients: GradientReduction,
    cut: Cut | None,
) -> Model:
    """Shard a model without roles, or its pipeline stages, over z, and return it."""
    from stretto.huggingface.pretrained_model import is_pretrained_model
    from stretto.parallel.blocks import BlockBuilder, check_modules, warn_of_replication
    from stretto.parallel.builder import Builder
    from stretto.parallel.comm.agreement import check_ranks_agree
    from stretto.parallel.layers.gemm_layout import MatmulTuner
    from stretto.parallel.layers.loss import MeansOverBatch
    from stretto.parallel.layers.router import count_over_ranks
    from stretto.parallel.model_loss import balance_over_batch, take_means_over_batch

    if options.shard_sequence:
        raise ValueError("shard_sequence takes roles of all submodules, and this model is sharded block by block")
    check_modules(model, grid.size(LOSS))
    copies = grid.size("x") * grid.size("y")
    drops = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
    check_ranks_agree(model, grid, grid.communicator(STAGE), drops=drops and copies > 1)
    warn_of_replication(model, grid, blocks.reason)
    matmuls = MatmulTuner(False, grid.device, grid.communicator(STAGE))
    is_stage = cut is not None
    builder = Builder(model, grid, precision, options, matmuls, None, initializer, is_stage=is_stage)
    builder.gradient_reducer.accumulates_unsharded = options.scatters_once
    if cut is not None:
        builder.tied |= cut.tied
    builder.gradient_reducer.averages = builder.gradient_reducer.loss_covers_own_rows = gradients == "mean"
    sharded = BlockBuilder(model, builder, blocks.names)
    buffers = builder.buffers()
    if cut is not None:
        cut.refusal.meet()
    grid.gradients.add(gradients)
    sharded.install(frees=not options.keeps_weights and not options.recomputation.is_on)
    for owner, attribute, value in buffers:
        setattr(owner, attribute, value)
    if is_pretrained_model(model):
        balance_over_batch(model, builder.gradient_reducer)
    for module in model.modules():
        if hasattr(module, "sum_over_ranks"):  # a router of stretto.models
            count_over_ranks(module, builder.gradient_reducer, None, overlaps=options.overlap.all_reduce)
    if is_pretrained_model(model) and grid.size(LOSS) > 1:
        means = MeansOverBatch(grid, passes_others=True, is_averaged=gradients == "mean")
        take_means_over_batch(model, means, only_with_labels=True)
    builder.state.stages = None if cut is None else cut.stages
    _finish(model, builder, by_blocks=True)
    _finish_blocks(model, options, cut, blocks.names)
    return model


def _finish(model: nn.Module, builder: Builder, *, by_blocks: bool) -> None:
    """Refuse what would lose the shards, and have gathers and reductions follow the model's passes."""
    from stretto.huggingface.pretrained_model import (
        generate_in_step,
        is_pretrained_model,
        refuse_resizing,
        refuse_saving,
    )
    from stretto.parallel.comm.autograd import in_backward
    from stretto.parallel.layers.dropout import AgreedRandomState
    from stretto.parallel.layers.sharded_module import refuse_copies, refuse_wrapping

    if is_pretrained_model(model) and builder.grid.size("z") > 1:
        generate_in_step(model)
    refuse_saving(model)
    refuse_resizing(model)
    refuse_copies(model)
    refuse_wrapping(model)
    builder.gradient_reducer.name(model.named_parameters())
    # The hooks hold the state, and not the builder, which holds the whole model as it was.
    state = builder.state
    set_state(model, state)
    begin, end = torch.compiler.disable(_begin_forward), torch.compiler.disable(_end_forward)
    model.register_forward_pre_hook(lambda model, _: begin(model, state))
    random_state = AgreedRandomState(model, builder.grid, always=by_blocks)
    if random_state.is_needed:
        model.register_forward_pre_hook(torch.compiler.disable(random_state))
    model.register_forward_hook(lambda *_: end(state), always_call=True)
    model.register_state_dict_pre_hook(
        lambda *_: None if in_backward() else state.gradient_reducer.drop_failed_passes()
    )


def validate(
    model: nn.Module,
    sizes: Mapping[str, int],
    *,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None = None,
    local_attributes: Mapping[str, str | None] | None = None,
    blocks: Sequence[str] | None = None,
) -> None:
    """Raise the ValueError that `parallelize` would, for a grid of these sizes. Needs no process group."""
    _plan_or_blocks(model, sizes, roles, local_attributes, blocks)


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


def _begin_forward(model: nn.Module, state: ParallelState) -> None:
    from stretto.parallel.capture import note_forward
    from stretto.parallel.comm.autograd import in_backward
    from stretto.parallel.layout import allow_anomaly_checks, check_is_sharded

    gatherer, gradient_reducer = state.weight_gatherer, state.gradient_reducer
    state.grid.require_open()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ValueError(
            "torch.func (grad, vmap, jvp, ...) was called over a parallelized model, whose gradients ranks reduce "
            "outside of such transforms: call the model, and backward()"
        )
    if torch.is_anomaly_enabled():
        allow_anomaly_checks()
    note_forward(model)
    if not in_backward():
        gradient_reducer.drop_failed_passes()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            check_is_sharded(name, parameter)
        gradient_reducer.defer_hooks(parameter, name)

    gatherer.is_in_forward = True
    if not in_backward():
        gatherer.begin_forward()


def _end_forward(state: ParallelState) -> None:
    state.weight_gatherer.is_in_forward = False
    state.weight_gatherer.end_forward()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have a method other than forward read whole parameters, as forward does (FSDP2: register_fsdp_forward_method).

        register_forward_method(model, "encode")
        model.encode(images).square().mean().backward()

    module: what `parallelize` has returned, or a submodule that it gathers by itself: a block, or one with the role
    "replicated" or "gathered". Its inputs are cast as forward's are. Submodules that the method calls need no such
    registration. Every rank must call the method.

    Raises ValueError for another module, and if it has no such method.
    """
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {name!r}{did_you_mean(name, dir(type(module)))}")
    wrappers, state = wrappers_of(module), state_of(module)
    if not wrappers and state is None:
        raise ValueError(
            f"this {type(module).__name__} is neither a model that stretto.parallelize has returned nor a block of "
            "one: register a method of the block that it is in, or name it in parallelize(..., blocks=[...])"
        )
    for wrap in wrappers:
        method = wrap(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if state is None or state.weight_gatherer.is_in_forward:
            return method(*args, **kwargs)
        _begin_forward(module, state)
        try:
            return method(*args, **kwargs)
        finally:
            _end_forward(state)

    setattr(module, name, torch.compiler.disable(run, recursive=False))


def _explain_sizes(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Add a likely cause to a forward's error about sizes: code that uses the whole model's number of heads."""
    error = sys.exception()
    if output is None and isinstance(error, RuntimeError) and re.search(r"\b(sizes?|shapes?)\b", str(error)):
        error.add_note(
            f"{type(model).__name__} is on a grid: a rank has 1/x of heads and inner features and 1/y of hidden ones. "
            "Code that views or splits by the whole model's numbers needs -1 there, or their attributes' names in "
            "parallelize(..., local_attributes=); what is passed in (inputs_embeds, say) must be this rank's part"
        )
