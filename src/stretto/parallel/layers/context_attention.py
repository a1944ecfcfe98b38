# SPDX-License-Identifier: Apache-2.0
"""Attention of a part of each sequence to all of it: keys and values are all-gathered, and attended under a mask."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stretto.parallel.comm.collectives import gather_rows, scatter_rows


class _GatherParts(torch.autograd.Function):
    """[batch, heads, seq / ranks, size] -> [ranks, batch, heads, seq / ranks, size]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_rows(part.unsqueeze(0).contiguous(), group.size(), group).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return scatter_rows(gradient.contiguous(), 1, ctx.group)[0], None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    scale: float | None,
    layout: str,
    window: int | None,
    documents: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks."""
    ranks, part = group.size(), query.shape[2]
    whole = torch.arange(part * ranks, device=query.device)
    if layout == "zigzag":
        chunks = whole.chunk(2 * ranks)
        order = [torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank])) for rank in range(ranks)]
    else:
        order = list(whole.chunk(ranks))
    here, there = order[group.rank()][:, None], torch.cat(order)[None]
    mask = here >= there if causal else torch.ones(part, part * ranks, dtype=torch.bool, device=query.device)
    if window is not None:
        mask &= there > here - window
        if not causal:
            mask &= there < here + window
    if documents is not None:
        number = torch.bucketize(whole, documents.to(whole), right=True)
        mask &= number[here] == number[there]
    keys, values = (_GatherParts.apply(each, group).movedim(0, 2).flatten(2, 3) for each in (key, value))
    repeats = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    if sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask, -torch.inf)
    of_sinks = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, of_sinks), -1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values
