# SPDX-License-Identifier: Apache-2.0
"""The peers of Stretto's collectives: NCCL, and torch's symmetric-memory operators."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class CollectiveBuffers:
    """Input and output of one collective, in ordinary (not symmetric) memory."""

    input: Tensor
    output: Tensor

    @classmethod
    def make(cls, collective: str, size: int, dtype: torch.dtype, device: torch.device) -> "CollectiveBuffers":
        world = dist.get_world_size()
        count = max(size // dtype.itemsize // world, 1) * world
        part = count // world
        of_input, of_output = {
            "allreduce": (count, count),
            "allgather": (part, count),
            "reducescatter": (count, part),
            "alltoall": (count, count),
        }[collective]
        return cls(torch.randn(of_input, device=device).to(dtype), torch.empty(of_output, dtype=dtype, device=device))


def nccl_run(
    collective: str, buffers: CollectiveBuffers, group: dist.ProcessGroup | None = None, *, is_async: bool = False
) -> Callable[[], Any]:
    """The collective by torch.distributed, which runs it with the group's backend, by default NCCL."""
    x, y = buffers.input, buffers.output
    options: dict[str, Any] = {"group": group, "async_op": is_async}
    match collective:
        case "allreduce":
            return lambda: dist.all_reduce(y, **options)
        case "allgather":
            return lambda: dist.all_gather_into_tensor(y, x, **options)
        case "reducescatter":
            return lambda: dist.reduce_scatter_tensor(y, x, **options)
        case _:
            return lambda: dist.all_to_all_single(y, x, **options)


class TorchPeers:
    """torch's own operators on symmetric memory, for all-reduce."""

    def __init__(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._storage = symmetric.empty(1 << 30, dtype=torch.uint8, device=device)
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD.group_name
        symmetric.rendezvous(self._storage, dist.group.WORLD)

    def runs(self, collective: str, buffers: CollectiveBuffers) -> dict[str, Callable[[], Any]]:
        """Callables by name: one-shot and two-shot all-reduce; none for other collectives."""
        x = buffers.input
        if collective != "allreduce" or x.numel() * x.itemsize > self._storage.numel() or x.itemsize * x.numel() < 64:
            return {}
        part = self._storage[: x.numel() * x.itemsize].view(x.dtype)
        part.zero_()
        one = partial(torch.ops.symm_mem.one_shot_all_reduce, part, "sum", self._group)
        two = partial(torch.ops.symm_mem.two_shot_all_reduce_, part, "sum", self._group)
        return {"torch one-shot": one, "torch two-shot": two}
