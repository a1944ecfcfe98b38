"""Put a model on a grid of data x X x Y x Z ranks (Singh, section 5.1.1).

`Grid` lays the ranks out, `parallelize` shards an nn.Module over them in place, `distribute_tables` spreads embedding
tables of a recommendation model; the rest is what a training loop needs.
"""

from stretto.parallel.activation_checkpointing import checkpoint_activations
from stretto.parallel.capture import CapturedStep
from stretto.parallel.counting import Collective, CollectiveCounts, count_collectives
from stretto.parallel.dropout import micro_batch_of
from stretto.parallel.gradients import clip_grad_norm_, clip_scale, deferred_reduction, gradient_norm
from stretto.parallel.grid import AXES, Grid
from stretto.parallel.layout import Box, Layout, Split, gather, layout_of
from stretto.parallel.loss import mean_over_batch
from stretto.parallel.overlap import Overlap
from stretto.parallel.parallelize import parallelize, validate
from stretto.parallel.plan import Role
from stretto.parallel.table_placement import TablePlacement, TableSize, place_tables
from stretto.parallel.tables import ShardedTables, distribute_tables

__all__ = [
    "AXES",
    "Box",
    "CapturedStep",
    "Collective",
    "CollectiveCounts",
    "Grid",
    "Layout",
    "Overlap",
    "Role",
    "ShardedTables",
    "Split",
    "TablePlacement",
    "TableSize",
    "checkpoint_activations",
    "clip_grad_norm_",
    "clip_scale",
    "count_collectives",
    "deferred_reduction",
    "distribute_tables",
    "gather",
    "gradient_norm",
    "layout_of",
    "mean_over_batch",
    "micro_batch_of",
    "parallelize",
    "place_tables",
    "validate",
]
