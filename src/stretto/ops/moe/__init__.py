# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the exchange of tokens between ranks that hold different experts, and the experts' products."""

from stretto.ops.moe.activation import gated_activation
from stretto.ops.moe.exchange import (
    Dispatched,
    DispatchHandle,
    combine,
    dispatch,
)
from stretto.ops.moe.exchange_products import dispatch_grouped_matmul, grouped_matmul_combine
from stretto.ops.moe.experts import experts_mlp, routed_experts
from stretto.ops.moe.fixed_rows import check_rows
from stretto.ops.moe.grouped_matmul import grouped_matmul, grouped_weight_gradient
from stretto.ops.moe.permutation import Permuted, permute, unpermute
from stretto.ops.moe.places import SentTokens, return_sums, send_tokens

__all__ = [
    "DispatchHandle",
    "Dispatched",
    "Permuted",
    "SentTokens",
    "check_rows",
    "combine",
    "dispatch",
    "dispatch_grouped_matmul",
    "experts_mlp",
    "gated_activation",
    "grouped_matmul",
    "grouped_matmul_combine",
    "grouped_weight_gradient",
    "permute",
    "return_sums",
    "routed_experts",
    "send_tokens",
    "unpermute",
]
