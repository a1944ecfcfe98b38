"""The collectives of Algorithm 3 on plain tensors, for autograd functions. A group of one rank costs nothing.

Those that start something return a `Pending`: NCCL runs it on a stream of its own, gloo in a thread of its own.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

# torch 2.13 renamed these two, and warns at each call of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Pending:
    """A collective that has been issued. `result` is valid once `wait` has returned, on the stream that waited."""

    result: Tensor
    work: dist.Work | None = None
    source: Tensor | None = None  # what is being sent must live until then

    def wait(self) -> Tensor:
        """The result. On a GPU the current stream waits for it, and the host does not."""
        if self.work is not None:
            self.work.wait()
        return self.result


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `tensor` over the group in place, and return it."""
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def own(product: Tensor) -> Tensor:
    """A product that may be written over: a copy where a dispatch mode is on, which may have kept the product.

    Selective activation checkpointing does, and gives it back when the block is run again, to be summed again.
    """
    return product if _get_current_dispatch_mode() is None else product.clone()


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Pending:
    """Begin to sum `tensor` over the group in place."""
    if group.size() == 1:
        return Pending(tensor)
    return Pending(tensor, dist.all_reduce(tensor, group=group, async_op=True))


def gather_rows(shard: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather dim 0: this rank's part [about rows / size, ...] becomes [rows, ...].

    The parts are those of torch.chunk; short ones travel padded, so the result may be a view of a longer buffer.
    """
    return start_gather_rows(shard, rows, group).wait()


def start_gather_rows(shard: Tensor, rows: int, group: dist.ProcessGroup) -> Pending:
    """Begin `gather_rows`."""
    size = group.size()
    if size == 1:
        return Pending(shard)
    chunk = -(-rows // size)
    whole = shard.new_empty(chunk * size, *shard.shape[1:])
    source = _padded(shard, chunk)
    return Pending(whole[:rows], _all_gather(whole, source, group=group, async_op=True), source)


def scatter_rows(whole: Tensor, local_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter dim 0, the reverse of `gather_rows`: [rows, ...] is summed, and this rank keeps its part."""
    return start_scatter_rows(whole, local_rows, group).wait()


def start_scatter_rows(whole: Tensor, local_rows: int, group: dist.ProcessGroup) -> Pending:
    """Begin `scatter_rows`."""
    size = group.size()
    if size == 1:
        return Pending(whole)
    chunk = -(-whole.shape[0] // size)
    part = whole.new_empty(chunk, *whole.shape[1:])
    source = _padded(whole, chunk * size)
    return Pending(part[:local_rows], _reduce_scatter(part, source, group=group, async_op=True), source)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    if missing:
        return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))
    return tensor.contiguous()
