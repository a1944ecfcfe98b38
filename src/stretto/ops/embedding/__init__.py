# SPDX-License-Identifier: Apache-2.0
"""Embedding look-ups fused with the exchange of the results, with gradients (Punniyamurthy et al., section 3)."""

from stretto.ops.embedding.backward import TableBlock
from stretto.ops.embedding.fused_optimizer import (
    TableUpdate,
    embedding_all_to_all_update,
    embedding_all_to_all_updating,
    table_settings,
)
from stretto.ops.embedding.module import EmbeddingAllToAll
from stretto.ops.embedding.operator import (
    check_indices,
    embedding_all_to_all,
    tune_embedding,
)

__all__ = [
    "EmbeddingAllToAll",
    "TableBlock",
    "TableUpdate",
    "check_indices",
    "embedding_all_to_all",
    "embedding_all_to_all_update",
    "embedding_all_to_all_updating",
    "table_settings",
    "tune_embedding",
]
