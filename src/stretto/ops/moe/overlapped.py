# SPDX-License-Identifier: Apache-2.0
"""Experts' products with the exchange of their rows: dispatch + grouped GEMM, and grouped GEMM + combine.

The product begins when all rows have arrived, and rows leave when it has ended: these functions give the two halves of
a layer of experts one interface each.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from stretto.ops.moe.exchange import Dispatched, combine, dispatch
from stretto.ops.moe.grouped_matmul import grouped_matmul
from stretto.ops.moe.routes import CollectiveWrapper, call


def dispatch_grouped_matmul(
    x: Tensor, topk_ids: Tensor, weight: Tensor, group: dist.ProcessGroup | None = None, **options: Any
) -> tuple[Tensor, Dispatched]:
    """Send each token to the ranks of its experts, and multiply: x [t, h], weight [e, f, h] -> ([n, f], the dispatch).

    weight: those of this rank's experts, as many on each rank; e times the ranks are the experts that topk_ids [t, k]
    names. options: of `dispatch`. The product's rows are those of the dispatch, in its order, times their expert's
    weight's transpose; those of padding are zeros. Errors are those of `dispatch` and `grouped_matmul`.
    """
    ranks = 1 if group is None else group.size()
    sent = dispatch(x, topk_ids, weight.shape[0] * ranks, group, **options)
    return grouped_matmul(sent.rows, weight, sent.offsets), sent


def grouped_matmul_combine(
    rows: Tensor,
    weight: Tensor,
    sent: Dispatched,
    topk_weights: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    wrap_collective: CollectiveWrapper = call,
) -> Tensor:
    """Multiply each expert's rows, and sum each token's at its rank: rows [n, f], weight [e, h, f] -> [t, h].

    rows: in the order of `sent`, which `dispatch` or `dispatch_grouped_matmul` returned. topk_weights, by which
    products are weighted, group and wrap_collective: of `combine`. Errors are those of `grouped_matmul` and `combine`.
    """
    product = grouped_matmul(rows, weight, sent.offsets)
    return combine(product, sent.handle, topk_weights, group, wrap_collective=wrap_collective)
