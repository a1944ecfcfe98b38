# SPDX-License-Identifier: Apache-2.0
"""`parallelize`: shards an nn.Module over a grid, in place, under its own names.

What it needs is imported when it is called, so that importing it imports neither Triton nor torch.compile nor DTensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
from torch import nn

from stretto.execution import ExecutionKeywords, ExecutionOptions
from stretto.parallel.grid import GradientReduction, Grid
from stretto.parallel.state import ShardingRequest
from stretto.suggestions import require_type

if TYPE_CHECKING:
    from stretto.parallel.roles.plan import Role

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
    ranks. Ranks of x and y then repeat the same computation, and a warning is printed. On GPUs, blocks of a
    transformers model that have small weights alone are gathered so, too, over z alone; roles={} keeps their roles.

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
        arguments (`changes`): overlap, reshard, recompute, shard_sequence, tune_matmuls, fused, two_level, fp8, stages,
        drop_duplicates, expert_rows, invariant and expert_reduce. shard_sequence takes transformers' models of known
        families, and models that declare support (`takes_sharded_sequence`: attention reads shapes from the outputs of
        linears), such as `stretto.models.GPT`; and tokens, batch x seq, that x divides.

    Raises ValueError if a submodule with parameters has no role, if an integer attribute may be a local count but is
    not listed, if an axis does not divide a size that it splits, if ranks hold different weights, and if two_level is
    True and nodes have unequal numbers of ranks; the model is then unchanged.
    """
    from stretto.parallel.comm.users_hooks import refuse_optimizers_of
    from stretto.parallel.context.sequence_parts import SequenceParts
    from stretto.parallel.install import install
    from stretto.parallel.place import place
    from stretto.parallel.precision import Precision
    from stretto.parallel.resolve import prefer_blocks, refuse_sharded, resolve

    require_type(model, nn.Module, "model")
    require_type(grid, Grid, "grid")
    options = options or ExecutionOptions()
    require_type(options, ExecutionOptions, "options")
    require_type(sharded_loss, bool, "sharded_loss")
    require_type(seed, int | None, "seed")
    refuse_sharded(model)
    precision = Precision(dtype, reduce_dtype)
    if gradients not in (None, "sum", "mean"):
        raise ValueError(f"gradients is {gradients!r}, but must be 'sum' or 'mean' (None: as the model's loss needs)")
    options = options.replace(**changes)
    plan = resolve(model, grid.sizes, roles=roles, local_attributes=local_attributes, blocks=blocks, options=options)
    request = ShardingRequest(grid, precision, options, gradients or "mean", sharded_loss)
    if roles is None and local_attributes is None:
        plan = prefer_blocks(model, plan, request)
    # Of the whole model, of which a pipeline stage may lack the layers that decide how sequences are cut.
    parts = SequenceParts(model, grid) if grid.size("context") > 1 else None
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    install(model, place(model, request, plan, seed=seed), parts)
    refuse_optimizers_of(before, model.parameters())
    return model


def validate(
    model: nn.Module,
    sizes: Mapping[str, int],
    *,
    roles: Mapping[str, Role | str | Mapping[str, Any]] | None = None,
    local_attributes: Mapping[str, str | None] | None = None,
    blocks: Sequence[str] | None = None,
) -> None:
    """Raise the ValueError that `parallelize` would, for a grid of these sizes. Needs no process group."""
    from stretto.parallel.resolve import resolve

    require_type(model, nn.Module, "model")
    resolve(model, sizes, roles=roles, local_attributes=local_attributes, blocks=blocks)
