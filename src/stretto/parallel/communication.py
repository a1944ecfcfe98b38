"""The collectives of Algorithm 3 on plain tensors, for autograd functions. A group of one rank costs nothing."""

import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` over the group in place, and return it."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def gather_rows(shard: Tensor, rows: int, group: dist.ProcessGroup, segments: int = 1) -> Tensor:
    """All-gather dim 0: this rank's part [about rows / size, ...] becomes [rows, ...].

    The parts are those of torch.chunk; short ones travel padded, so the result may be a view of a longer buffer. With
    `segments`, dim 0 holds so many fused parts, and each was cut on its own.
    """
    size = group.size()
    if size == 1:
        return shard
    chunk = segments * -(-(rows // segments) // size)
    if shard.shape[0] < chunk:
        shard = torch.cat((shard, shard.new_zeros(chunk - shard.shape[0], *shard.shape[1:])))
    whole = shard.new_empty(chunk * size, *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
    if segments > 1:
        return whole.view(size, segments, -1, *shard.shape[1:]).transpose(0, 1).reshape(rows, *shard.shape[1:])
    return whole[:rows]


def scatter_rows(whole: Tensor, local_rows: int, group: dist.ProcessGroup, segments: int = 1) -> Tensor:
    """Reduce-scatter dim 0, the reverse of `gather_rows`: [rows, ...] is summed, and this rank keeps its part."""
    size = group.size()
    if size == 1:
        return whole
    rows, rest = whole.shape[0], whole.shape[1:]
    chunk = segments * -(-(rows // segments) // size)
    if segments > 1:
        whole = whole.reshape(segments, size, -1, *rest).transpose(0, 1).reshape(rows, *rest)
    elif rows < chunk * size:
        whole = torch.cat((whole, whole.new_zeros(chunk * size - rows, *rest)))
    part = whole.new_empty(chunk, *rest)
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part[:local_rows]
