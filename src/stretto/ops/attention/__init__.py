# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention: attention over a sequence of which each rank has a part.

context        the functions, their torch.library operators, what a rank does forward and backward
gathered       attention to keys that a rank makes of gathered latents
choice         which implementation "auto" is
tuning         its measurement
plan           which blocks of scores a rank computes, and whose keys it needs: integers on the host
balance        packed documents cut among ranks by work
joint          keys that a collective's schedule gathers
exchange       keys, values, their gradients and heads between ranks
kernels        attention of a block, with its log-sum-exp: cuDNN's, flash, torch's on CPUs, a plain one
merge          results and gradients of blocks, merged and added
block_mask     torch's BlockMask as causal, window and documents
"""

from stretto.ops.attention.block_mask import read_block_mask
from stretto.ops.attention.context import (
    AttentionOptions,
    all_gather_attention,
    context_attention,
    find_starts,
    packed_attention,
    ring_attention,
    ulysses_attention,
)
from stretto.ops.attention.plan import list_chunks
from stretto.ops.attention.tuning import tune_attention

__all__ = [
    "AttentionOptions",
    "all_gather_attention",
    "context_attention",
    "find_starts",
    "list_chunks",
    "packed_attention",
    "read_block_mask",
    "ring_attention",
    "tune_attention",
    "ulysses_attention",
]
