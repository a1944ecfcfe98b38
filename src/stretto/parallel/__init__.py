# SPDX-License-Identifier: Apache-2.0
"""Parallelizes a model over a grid of data x X x Y x Z ranks (Singh, section 5.1.1).

`Grid` lays the ranks out, `parallelize` shards an nn.Module over them in place, `distribute_tables` distributes the
embedding tables of a recommendation model; the rest is what a training loop needs.

api, builder: `parallelize`. roles: which submodule is what. layers: the modules that replace a model's own. comm:
collectives, weight gathering, gradient reduction. recsys: embedding tables.
"""

from stretto.deprecated import alias
from stretto.execution import Overlap
from stretto.parallel.api import checkpoint_activations, parallelize, validate
from stretto.parallel.capture import CapturedStep
from stretto.parallel.comm.counting import CollectiveCall, CollectiveCounts, count_collectives
from stretto.parallel.comm.gradient_norm import clip_grad_norm_, clip_scale, gradient_norm
from stretto.parallel.comm.gradient_reducer import no_sync
from stretto.parallel.grid import Grid
from stretto.parallel.layers.dropout import micro_batch_of
from stretto.parallel.layers.loss import mean_over_batch
from stretto.parallel.layout import Box, ParameterLayout, Split, gather, layout_of
from stretto.parallel.recsys.placement import TablePlacement, TableSize, place_tables
from stretto.parallel.recsys.tables import ShardedTables, distribute_tables
from stretto.parallel.roles.plan import Role

__all__ = [
    "Box",
    "CapturedStep",
    "CollectiveCall",
    "CollectiveCounts",
    "Grid",
    "Overlap",
    "ParameterLayout",
    "Role",
    "ShardedTables",
    "Split",
    "TablePlacement",
    "TableSize",
    "checkpoint_activations",
    "clip_grad_norm_",
    "clip_scale",
    "count_collectives",
    "distribute_tables",
    "gather",
    "gradient_norm",
    "layout_of",
    "mean_over_batch",
    "micro_batch_of",
    "no_sync",
    "parallelize",
    "place_tables",
    "validate",
]

__getattr__ = alias(
    __name__,
    {
        "AXES": "stretto.axes.NAMES",
        "Collective": "CollectiveCall",
        "Layout": "ParameterLayout",
        "deferred_reduction": "no_sync",
    },
)
