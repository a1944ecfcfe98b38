# SPDX-License-Identifier: Apache-2.0
"""The public ways of `python -m lab attention`: an all-gather, Ulysses and torch's context parallelism."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention  # torch's context parallelism patches its module's name

attend_here: Callable[..., Tensor] = partial(scaled_dot_product_attention, enable_gqa=True)
# torch 2.13 renamed this one, and warns at each call of the old name.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class _ContiguousGradient(torch.autograd.Function):
    """The backward passes of torch's collectives take no other gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


def by_gathering(group: dist.ProcessGroup, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All keys and values, then attention: where causal, once for each of two zig-zag chunks, to the keys before it."""
    rows, ranks, rank = torch.cat((k, v), -1).permute(2, 0, 1, 3).contiguous(), group.size(), group.rank()
    gathered = _ContiguousGradient.apply(_gather(rows, 0, group)).permute(1, 2, 0, 3)
    if not causal:
        return attend_here(q, *gathered.chunk(2, -1))
    half = k.shape[2] // 2
    parts = gathered.unflatten(2, (ranks, 2, half))
    ordered = torch.cat((parts[:, :, :, 0], parts[:, :, :, 1].flip(2)), 2).flatten(2, 3)
    results = []
    for chunk, part in zip((rank, 2 * ranks - 1 - rank), q.split(half, 2), strict=True):
        keys, values = ordered[:, :, : (chunk + 1) * half].chunk(2, -1)
        results.append(attend_here(part, keys, values, attn_mask=causal_lower_right(half, keys.shape[2])))
    return torch.cat(results, 2)


def by_ulysses(group: dist.ProcessGroup, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads for positions, attention of the whole sequence, and back; contiguous parts."""
    ranks = group.size()

    def exchange(parts: Tensor) -> Tensor:
        came = collectives.all_to_all_single_autograd(parts.contiguous(), [1] * ranks, [1] * ranks, group)
        return _ContiguousGradient.apply(came)

    heads = (each.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4) for each in (q, k, v))
    whole = (exchange(each).flatten(0, 1).permute(1, 2, 0, 3) for each in heads)
    rows = attend_here(*whole, is_causal=causal).unflatten(2, (ranks, -1)).permute(2, 3, 0, 1, 4)
    return exchange(rows).permute(2, 0, 3, 1, 4).flatten(1, 2)


@contextmanager
def torch_context(group: dist.ProcessGroup, length: int, method: str, causal: bool) -> Iterator[Callable[..., Tensor]]:
    """Inside, attention by torch's context parallelism; method: "allgather", or "alltoall", a ring of sends."""
    set_rotate_method(method)
    _cp_options.enable_load_balance = causal  # zig-zag, which it refuses otherwise
    mesh = DeviceMesh.from_group(group, "cuda")
    with experimental.context_parallel(mesh, buffers=[torch.zeros(length, device="cuda")], buffer_seq_dims=[0]):
        yield partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)
