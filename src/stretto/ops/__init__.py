"""Overlapped operators: computation with its collective hidden inside, as torch.library operators with gradients."""

from stretto.ops.all_gather_matmul import all_gather_matmul, all_gather_matmul_gathered
from stretto.ops.embedding import (
    EmbeddingAllToAll,
    check_indices,
    embedding_all_to_all,
    embedding_all_to_all_update,
    tune_embedding,
)
from stretto.ops.matmul_reduce_scatter import matmul_reduce_scatter

__all__ = [
    "EmbeddingAllToAll",
    "all_gather_matmul",
    "all_gather_matmul_gathered",
    "check_indices",
    "embedding_all_to_all",
    "embedding_all_to_all_update",
    "matmul_reduce_scatter",
    "tune_embedding",
]
