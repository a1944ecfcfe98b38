# SPDX-License-Identifier: Apache-2.0
"""Operators of inference: products and sums with the norm that follows them, and attention to a paged cache.

all_reduce_norm         all-reduce + residual + norm, in one launch for few rows
matmul_all_reduce_norm  the same after a product, in two launches
paged_attention         the attention operator: checks, choice, split of the work
paged_kernels           its kernels
rotary_cache            rotary positions, and the cache's new keys and values
"""

from stretto.ops.decoding.all_reduce_norm import all_reduce_norm
from stretto.ops.decoding.matmul_all_reduce_norm import matmul_all_reduce_norm, scaled_matmul_all_reduce_norm
from stretto.ops.decoding.paged_attention import paged_attention
from stretto.ops.row_sums.norm import invariant_norm

__all__ = [
    "all_reduce_norm",
    "invariant_norm",
    "matmul_all_reduce_norm",
    "paged_attention",
    "scaled_matmul_all_reduce_norm",
]
