# SPDX-License-Identifier: Apache-2.0
"""Collective algorithms composed of NCCL calls, step by step, as one would write them without a custom kernel.

Each takes ordinary tensors of `count` elements on all ranks of the default group. Each keeps its own buffers, so that a
CUDA graph can capture it.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class RingAllReduce:
    """Ring all-reduce: steps of send, receive and add (reduce-scatter), then as many without the add (all-gather)."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        world = _parts(count)
        self._arrived = torch.empty(count // world, dtype=dtype, device=device)

    def __call__(self, input: Tensor, output: Tensor) -> None:
        """Sum `input` over the ranks into `output`."""
        rank, world = dist.get_rank(), dist.get_world_size()
        after, before = (rank + 1) % world, (rank - 1) % world
        output.copy_(input)
        parts = output.view(world, -1)
        for step in range(world - 1):
            _exchange([(parts[(rank - step) % world], after)], [(self._arrived, before)])
            parts[(rank - step - 1) % world] += self._arrived
        for step in range(world - 1):
            _exchange([(parts[(rank - step + 1) % world], after)], [(parts[(rank - step) % world], before)])


class TwoShotAllReduce:
    """Two-shot all-reduce: an all-to-all of the parts, a local sum, and an all-gather of the sums."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._arrived = torch.empty(count, dtype=dtype, device=device)
        self._sum = torch.empty(count // _parts(count), dtype=dtype, device=device)

    def __call__(self, input: Tensor, output: Tensor) -> None:
        """Sum `input` over the ranks into `output`."""
        dist.all_to_all_single(self._arrived, input)
        torch.sum(self._arrived.view(dist.get_world_size(), -1), 0, out=self._sum)
        dist.all_gather_into_tensor(output, self._sum)


class TwoStepAllToAll:
    """Two-step all-to-all: GPUs of a node gather the data for one GPU of another node, and send it as one message.

    Rank n * gpus + g is GPU g of node n. Raises ValueError if the nodes do not divide the ranks.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, nodes: int) -> None:
        world = _parts(count)
        if world % nodes:
            raise ValueError(f"{nodes} nodes do not divide {world} ranks")
        self._nodes, self._gpus = nodes, world // nodes
        self._packed = torch.empty(self._gpus, nodes, count // world, dtype=dtype, device=device)
        self._together = torch.empty(nodes, self._gpus, count // world, dtype=dtype, device=device)
        self._arrived = torch.empty_like(self._packed)

    def __call__(self, input: Tensor, output: Tensor) -> None:
        """Part i of each rank's `input` becomes part (that rank) of rank i's `output`."""
        node, gpu = divmod(dist.get_rank(), self._gpus)
        # Ordered by the target's GPU number: each neighbour gets its number's parts for all nodes in one message.
        self._packed.copy_(input.view(self._nodes, self._gpus, -1).transpose(0, 1))
        neighbours = [node * self._gpus + other for other in range(self._gpus)]
        _exchange(list(zip(self._packed, neighbours, strict=True)), list(zip(self._arrived, neighbours, strict=True)))
        self._together.copy_(self._arrived.transpose(0, 1))
        across = [other * self._gpus + gpu for other in range(self._nodes)]
        taken = output.view(self._nodes, self._gpus, -1)
        _exchange(list(zip(self._together, across, strict=True)), list(zip(taken, across, strict=True)))


def _exchange(given: Sequence[tuple[Tensor, int]], taken: Sequence[tuple[Tensor, int]]) -> None:
    """Exchange all messages of a step at once; a message to this rank itself is a copy."""
    rank = dist.get_rank()
    own = [tensor for tensor, peer in given if peer == rank]
    for source, (target, _) in zip(own, [each for each in taken if each[1] == rank], strict=True):
        target.copy_(source)
    messages = [dist.P2POp(dist.isend, tensor, peer) for tensor, peer in given if peer != rank]
    messages += [dist.P2POp(dist.irecv, tensor, peer) for tensor, peer in taken if peer != rank]
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()


def _parts(count: int) -> int:
    """The number of parts of the array, one a rank. Raises ValueError if the ranks do not divide the elements."""
    world = dist.get_world_size()
    if count % world:
        raise ValueError(f"{count} elements do not divide among {world} ranks")
    return world
