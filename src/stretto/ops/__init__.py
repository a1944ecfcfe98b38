# SPDX-License-Identifier: Apache-2.0
"""Overlapped operators: computation fused with its collective, as torch.library operators with gradients.

An operator and its kernels are in the file of its name; a kernel's docstring says what it signals and waits for, by
`stretto.tiles`. GEMMs share `operator` (definition, gradients), `operands` (checks), `config`, `choices` and `tuning`
(choice of a kernel), `gemm` (the tiles' products) and `small_m` (few rows). `attention` shares a sequence; its kernels
are torch's. `decoding` has what inference needs beside them, `invariant` sums whose bits do not depend on the batch or
the ranks.
"""

from stretto.ops import moe
from stretto.ops.all_gather_matmul import all_gather_matmul, all_gather_matmul_gathered
from stretto.ops.attention import (
    AttentionOptions,
    all_gather_attention,
    context_attention,
    ring_attention,
    tune_attention,
    ulysses_attention,
)
from stretto.ops.choices import counts
from stretto.ops.config import KernelConfig
from stretto.ops.decoding import (
    all_reduce_norm,
    invariant_norm,
    matmul_all_reduce_norm,
    paged_attention,
    scaled_matmul_all_reduce_norm,
)
from stretto.ops.embedding import (
    EmbeddingAllToAll,
    TableBlock,
    TableUpdate,
    check_indices,
    embedding_all_to_all,
    embedding_all_to_all_update,
    embedding_all_to_all_updating,
    table_settings,
    tune_embedding,
)
from stretto.ops.gemm import Blocks
from stretto.ops.invariant import LEAVES, invariant_matmul
from stretto.ops.joint.matmul_all_to_all import matmul_all_to_all
from stretto.ops.maintenance import Workspace, check, free_workspaces, workspaces
from stretto.ops.matmul_all_reduce import matmul_all_reduce
from stretto.ops.matmul_reduce_scatter import matmul_reduce_scatter
from stretto.ops.mlp import mlp
from stretto.ops.scaled import (
    all_gather_scaled_matmul,
    quantize_rows,
    scaled_matmul_all_reduce,
    scaled_matmul_reduce_scatter,
)
from stretto.ops.tuning import tune

__all__ = [
    "LEAVES",
    "AttentionOptions",
    "Blocks",
    "EmbeddingAllToAll",
    "KernelConfig",
    "TableBlock",
    "TableUpdate",
    "Workspace",
    "all_gather_attention",
    "all_gather_matmul",
    "all_gather_matmul_gathered",
    "all_gather_scaled_matmul",
    "all_reduce_norm",
    "check",
    "check_indices",
    "context_attention",
    "counts",
    "embedding_all_to_all",
    "embedding_all_to_all_update",
    "embedding_all_to_all_updating",
    "free_workspaces",
    "invariant_matmul",
    "invariant_norm",
    "matmul_all_reduce",
    "matmul_all_reduce_norm",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "mlp",
    "moe",
    "paged_attention",
    "quantize_rows",
    "ring_attention",
    "scaled_matmul_all_reduce",
    "scaled_matmul_all_reduce_norm",
    "scaled_matmul_reduce_scatter",
    "table_settings",
    "tune",
    "tune_attention",
    "tune_embedding",
    "ulysses_attention",
    "workspaces",
]
