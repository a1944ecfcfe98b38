# SPDX-License-Identifier: Apache-2.0
"""Recommendation models: embedding tables that are distributed over ranks; DLRM.

`KeyedJaggedTensor`, `EmbeddingBagCollection`, `EmbeddingCollection` and their configs are TorchRec's, in plain PyTorch;
`distribute_embeddings` distributes the tables of any model that has these, TorchRec's own or torch's embeddings.

`DLRM` and `DLRMConfig` are the model in plain PyTorch. `distribute_tables` places tables on ranks, whole by
`place_tables`, or also cut and replicated by `plan_tables`, and replicates the MLPs. data: click logs. training: what
`stretto train` runs for `model.kind = "dlrm"`.

Names are imported on first use: configurations also work on a machine without torch.
"""

from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from stretto.recommendation.distribution import distribute_embeddings
    from stretto.recommendation.embedding_collections import (
        DataType,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        PoolingType,
    )
    from stretto.recommendation.index_exchange import begin_exchange
    from stretto.recommendation.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from stretto.recommendation.model import DLRM
    from stretto.recommendation.model_config import DLRMConfig
    from stretto.recommendation.placement import Growth, TablePlacement, TableSize, place_tables
    from stretto.recommendation.prefetch import prefetch_embeddings
    from stretto.recommendation.table_cache import measure_hit_rates
    from stretto.recommendation.table_planner import HitRates, TablePlan, TableRates, plan_tables
    from stretto.recommendation.table_state import distributed_state
    from stretto.recommendation.tables import ShardedTables, distribute_tables

__all__ = [
    "DLRM",
    "DLRMConfig",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "Growth",
    "HitRates",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "ShardedTables",
    "TablePlacement",
    "TablePlan",
    "TableRates",
    "TableSize",
    "begin_exchange",
    "distribute_embeddings",
    "distribute_tables",
    "distributed_state",
    "measure_hit_rates",
    "place_tables",
    "plan_tables",
    "prefetch_embeddings",
]

__getattr__, __dir__ = attach(__name__)
