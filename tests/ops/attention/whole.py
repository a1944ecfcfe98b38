# SPDX-License-Identifier: Apache-2.0
"""Context-parallel attention beside plain attention of the whole sequence, by a mask of all pairs of positions."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from stretto.ops.attention import all_gather_attention, context_attention, list_chunks


@dataclass(frozen=True)
class Case:
    """length: of a rank. documents: where they begin, and the whole length."""

    length: int = 8
    layout: str = "zigzag"
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None
    has_sinks: bool = False
    heads: int = 4
    kv_heads: int = 2
    sizes: tuple[int, int] = (8, 8)
    scale: float | None = None

    def options(self):
        documents = None if self.documents is None else torch.tensor(self.documents, dtype=torch.int32)
        return {
            "causal": self.causal, "scale": self.scale, "layout": self.layout, "window": self.window,
            "documents": documents,
        }  # fmt: skip


def see(case, total):
    """Which keys each position sees, bool [total, total]."""
    query, key = torch.arange(total)[:, None], torch.arange(total)
    seen = torch.ones(total, total, dtype=torch.bool)
    if case.causal:
        seen &= key <= query
    if case.window is not None:
        seen &= key > query - case.window
    if case.documents is not None:
        starts = torch.tensor(case.documents)
        document = torch.searchsorted(starts, torch.arange(total), right=True)
        seen &= document[:, None] == document
    return seen


def attend_whole(q, k, v, sinks, case):
    repeated = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(repeated, 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if case.scale is None else case.scale)
    scores = scores.masked_fill(~see(case, q.shape[2]).to(q.device), -torch.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(q.shape[0], -1, q.shape[2], 1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def draw_whole(case, total, dtype=torch.float64, device="cpu", batch=2):
    generator = torch.Generator().manual_seed(total)
    size, value_size = case.sizes

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    q, k = make(batch, case.heads, total, size), make(batch, case.kv_heads, total, size)
    v, grad = make(batch, case.kv_heads, total, value_size), make(batch, case.heads, total, value_size)
    return q, k, v, make(case.heads) if case.has_sinks else None, grad


def find_differences(case, implementation, dtype=torch.float64, **options):
    """Largest differences of this rank's output and gradients from the whole's in fp64."""
    pairs = list_pairs(case, implementation, dtype, **options)
    return [float((one.double() - other).abs().max()) for one, other in pairs]


def list_pairs(case, implementation, dtype, device="cpu", **options):
    """This rank's output and gradients, each with the whole's in fp64."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    *inputs, grad = draw_whole(case, case.length * ranks, dtype, device)
    wide = [None if each is None else each.double().clone().requires_grad_() for each in inputs]
    right = attend_whole(*wide, case)
    given = [each for each in wide if each is not None]
    rights = [right.detach(), *torch.autograd.grad(right, given, grad.double())]
    rows = torch.cat(
        [torch.arange(*each) for each in list_chunks(case.layout, rank, ranks, case.length, case.documents)]
    ).to(device)
    *here, sinks = inputs
    here = [each[:, :, rows].requires_grad_() for each in here]
    sinks = None if sinks is None else sinks.requires_grad_()
    attend = all_gather_attention if options else partial(context_attention, implementation=implementation)
    out = attend(*here, sinks=sinks, **case.options(), **options)
    out.backward(grad[:, :, rows])
    found = [out.detach(), *(each.grad for each in here)]
    if sinks is not None:
        dist.all_reduce(sinks.grad)
        found.append(sinks.grad)
    return list(zip(found, [*(each[:, :, rows] for each in rights[:4]), *rights[4:]], strict=True))
