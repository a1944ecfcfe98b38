# SPDX-License-Identifier: Apache-2.0
"""Attention to keys that ranks make of gathered latents, against one device in fp64, with gradients of the latents."""

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.attention.whole import Case, attend_whole, draw_whole

from stretto.ops.attention import list_chunks
from stretto.ops.attention.gathered import attend_to_gathered, gather_rows
from stretto.ops.attention.plan import Mask

LATENT = 5


def expand(latents, case, matrix):
    """Keys and values [b, KV heads, rows, .] of latents [b, 1, rows, .]."""
    rows = (latents @ matrix).view(len(latents), latents.shape[2], case.kv_heads, -1).transpose(1, 2)
    return rows.split(case.sizes, -1)


def differ(cases, device="cpu"):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for case in cases:
        total = case.length * ranks
        q, _, _, _, grad = draw_whole(case, total, device=device)
        generator = torch.Generator().manual_seed(total)
        shapes = (2, 1, total, LATENT), (LATENT, case.kv_heads * sum(case.sizes))
        latents, matrix = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes)
        leaves = [each.requires_grad_() for each in (q, latents, matrix)]
        right = attend_whole(q, *expand(latents, case, matrix), None, case)
        rights = [right, *torch.autograd.grad(right, leaves, grad)]
        chunks = list_chunks(case.layout, rank, ranks, case.length, case.documents)
        rows = torch.cat([torch.arange(*chunk) for chunk in chunks]).to(device)
        own = [q.detach()[:, :, rows].requires_grad_(), latents.detach()[:, :, rows].requires_grad_(), matrix]
        mask = Mask(case.causal, case.window, case.documents)
        keys, values = expand(gather_rows(own[1], None, mask, layout=case.layout), case, matrix)
        out = attend_to_gathered(own[0], keys, values, None, mask, layout=case.layout)
        *gradients, of_matrix = torch.autograd.grad(out, own, grad[:, :, rows])
        dist.all_reduce(of_matrix)
        pairs = zip((out, *gradients), rights, strict=False)
        found += [float((one - whole[:, :, rows]).abs().max()) for one, whole in pairs]
        found.append(float((of_matrix - rights[-1]).abs().max()))
    return largest(found)


def list_cases(ranks):
    total = 8 * ranks
    return [
        Case(),
        Case(layout="contiguous", causal=False, sizes=(8, 4)),
        Case(layout="balanced", documents=(0, 3, total // 2 + 1, total)),
        Case(window=5),
        Case(layout="contiguous", documents=(*range(0, total, 8), total)),  # no rank sees another's
    ]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])
def test_it_is_attention_of_the_whole_sequence(ranks, count):
    assert largest(ranks(count).run(differ, list_cases(count))) < 1e-10
