# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the exchange of tokens between ranks that hold different experts, and the experts' products."""

from stretto.ops.moe.activation import gated_activation
from stretto.ops.moe.exchange import Dispatched, DispatchHandle, combine, dispatch
from stretto.ops.moe.exchange_products import dispatch_grouped_matmul, grouped_matmul_combine
from stretto.ops.moe.experts import experts_mlp, routed_experts
from stretto.ops.moe.few_tokens import DispatchedFew, FewHandle, combine_few, dispatch_few
from stretto.ops.moe.fixed_rows import check_rows
from stretto.ops.moe.grouped.matmul import grouped_matmul, grouped_weight_gradient
from stretto.ops.moe.permutation import Permuted, permute, unpermute
from stretto.ops.moe.replicas import ReplicaPlacement, place_replicas, replicate
from stretto.ops.moe.tensor_parallel import GatheredRows, all_gather_moe, moe_mlp, moe_reduce_scatter

__all__ = [
    "DispatchHandle",
    "Dispatched",
    "DispatchedFew",
    "FewHandle",
    "GatheredRows",
    "Permuted",
    "ReplicaPlacement",
    "all_gather_moe",
    "check_rows",
    "combine",
    "combine_few",
    "dispatch",
    "dispatch_few",
    "dispatch_grouped_matmul",
    "experts_mlp",
    "gated_activation",
    "grouped_matmul",
    "grouped_matmul_combine",
    "grouped_weight_gradient",
    "moe_mlp",
    "moe_reduce_scatter",
    "permute",
    "place_replicas",
    "replicate",
    "routed_experts",
    "unpermute",
]
