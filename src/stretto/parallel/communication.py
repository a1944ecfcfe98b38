"""The collectives of Algorithm 3 on plain tensors, for autograd functions. A group of one rank costs nothing."""

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two, and warns at each call of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` over the group in place, and return it."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def gather_rows(shard: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather dim 0: this rank's part [about rows / size, ...] becomes [rows, ...].

    The parts are those of torch.chunk; short ones travel padded, so the result may be a view of a longer buffer.
    """
    size = group.size()
    if size == 1:
        return shard
    chunk = -(-rows // size)
    whole = shard.new_empty(chunk * size, *shard.shape[1:])
    _all_gather(whole, _padded(shard, chunk), group=group)
    return whole[:rows]


def scatter_rows(whole: Tensor, local_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter dim 0, the reverse of `gather_rows`: [rows, ...] is summed, and this rank keeps its part."""
    size = group.size()
    if size == 1:
        return whole
    chunk = -(-whole.shape[0] // size)
    part = whole.new_empty(chunk, *whole.shape[1:])
    _reduce_scatter(part, _padded(whole, chunk * size), group=group)
    return part[:local_rows]


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    if missing:
        return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))
    return tensor.contiguous()
