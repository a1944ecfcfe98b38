# SPDX-License-Identifier: Apache-2.0
"""Parallelizes a model over a grid of pipe x data x context x X x Y x Z ranks (Singh, chapters 3 and 5).

`Grid` arranges the ranks along axes, and `parallelize` shards an nn.Module over them in place; the other names are for
training loops.

Modules of `parallelize`, in the order of its passes:

    api                    `parallelize`
    resolve, blocks        finds the role of each submodule, or the blocks of a model without roles, and checks them
      roles                `plan`: roles, and how each shards parameters; `validation`: whether the grid can hold them
    place, builder, meta   builds parallel modules and shards (`layout`, `sharded_parameter`); the last that may fail
    install                puts them into the model

The model that this makes: `layers` (parallel modules; `context` cuts sequences), `comm` (collectives;
`weight_gathering` before a weight is used, `gradient_reducer` from a gradient to `.grad`), `forward_passes`,
`model_loss`, `recomputation`, `pipeline` (stages).
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.execution import Overlap, StageOptions
    from stretto.parallel.api import parallelize, validate
    from stretto.parallel.capture import CapturedStep
    from stretto.parallel.comm.counting import CollectiveCall, CollectiveCounts, count_collectives
    from stretto.parallel.comm.gradient_norm import clip_grad_norm_, clip_scale, gradient_norm
    from stretto.parallel.comm.gradient_reducer import no_sync
    from stretto.parallel.comm.kept_outputs import recomputation_contexts, run_once
    from stretto.parallel.comm.weight_gathering import gather_once
    from stretto.parallel.context.cutting import cut_sequences
    from stretto.parallel.experts.replicas import balance_experts
    from stretto.parallel.forward_passes import register_forward_method
    from stretto.parallel.gathered_parameters import full_parameters
    from stretto.parallel.grid import Grid
    from stretto.parallel.layers.dropout import micro_batch_of
    from stretto.parallel.layers.loss import mean_over_batch
    from stretto.parallel.layout import Box, ParameterLayout, Split, gather, layout_of
    from stretto.parallel.pipeline.pipeline import Pipeline
    from stretto.parallel.recomputation import checkpoint_activations
    from stretto.parallel.roles.plan import Role
    from stretto.parallel.segment_planner import SegmentLoadPlanner, SegmentSavePlanner

__all__ = [
    "Box",
    "CapturedStep",
    "CollectiveCall",
    "CollectiveCounts",
    "Grid",
    "Overlap",
    "ParameterLayout",
    "Pipeline",
    "Role",
    "SegmentLoadPlanner",
    "SegmentSavePlanner",
    "Split",
    "StageOptions",
    "balance_experts",
    "checkpoint_activations",
    "clip_grad_norm_",
    "clip_scale",
    "count_collectives",
    "cut_sequences",
    "full_parameters",
    "gather",
    "gather_once",
    "gradient_norm",
    "layout_of",
    "mean_over_batch",
    "micro_batch_of",
    "no_sync",
    "parallelize",
    "recomputation_contexts",
    "register_forward_method",
    "run_once",
    "validate",
]

__getattr__, __dir__ = attach(__name__)
