# SPDX-License-Identifier: Apache-2.0
"""The peers of Stretto's collectives: NCCL, torch's symmetric-memory operators, and all-reduce kernels by hand.

The hand-written kernels (bf16, sum, LL) show the overhead of a compiled schedule. Like a kernel author's first version,
they have no timeouts and no failure reports, and support only sizes that divide evenly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace


class HandwrittenAllReduce:
    """A one-shot or two-shot all-reduce by the LL protocol, written by hand.

    It shares the workspace's memory and epochs, so that calls may be mixed with other kernels. shots: 1 or 2. The whole
    array is bf16, a multiple of 8 bytes a rank.
    """

    def __init__(self, workspace: CollectiveWorkspace, shots: int) -> None:
        world, rank = workspace.world_size, workspace.rank
        names = [f"peer_{peer}" for peer in range(world)]
        source = (
            f"#define WORLD {world}\n#define RANK {rank}\n#define SHOTS {shots}\n"
            f"#define PEERS {', '.join(names)}\n"
            f"#define PEERS_PARAMETERS {', '.join(f'char* {name}' for name in names)}\n"
            + files(__package__).joinpath("handwritten.cu").read_text(encoding="utf-8")
        )
        self._function = workspace.load(source, ["input", "output", "epochs", "count", "half", *names])
        region = workspace.regions["LL"]
        self._capacity, self._shots, self._world = region.size, shots, world
        self._function.set("epochs", workspace.state.data_ptr())
        self._function.set("half", workspace.half)
        for name, address in zip(names, workspace.peers, strict=True):
            self._function.set(name, address + region.start)

    def fits(self, num_bytes: int) -> bool:
        """Whether the LL buffers are large enough for an array of `num_bytes` bytes."""
        return (
            num_bytes % (8 * self._world) == 0
            and 2 * num_bytes * (self._world if self._shots == 1 else 2) <= self._capacity
        )

    def __call__(self, input: Tensor, output: Tensor) -> None:
        """Sum `input` (bf16) over the ranks into `output`."""
        count = input.numel() * 2 // 8
        num_vectors = count if self._shots == 1 else count // self._world
        self._function.set("input", input.data_ptr())
        self._function.set("output", output.data_ptr())
        self._function.set("count", count)
        threads = 128 if num_vectors <= 128 * 128 else 512
        self._function.launch(max(1, min(-(-num_vectors // threads), 128)), threads)


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


def nccl_run(collective: str, buffers: CollectiveBuffers) -> Callable[[], Any]:
    """The collective by torch.distributed, which runs it with NCCL."""
    x, y = buffers.input, buffers.output
    match collective:
        case "allreduce":
            return lambda: dist.all_reduce(y)
        case "allgather":
            return lambda: dist.all_gather_into_tensor(y, x)
        case "reducescatter":
            return lambda: dist.reduce_scatter_tensor(y, x)
        case _:
            return lambda: dist.all_to_all_single(y, x)


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


def handwritten_runs(workspace: CollectiveWorkspace, buffers: CollectiveBuffers) -> dict[str, Callable[[], Any]]:
    """Hand-written all-reduces by name, those whose buffers are large enough."""
    runs: dict[str, Callable[[], Any]] = {}
    for shots in (1, 2):
        kernel = HandwrittenAllReduce(workspace, shots)
        if kernel.fits(buffers.input.numel() * buffers.input.itemsize):
            runs[f"hand-written {shots}-shot"] = partial(kernel, buffers.input, buffers.output)
    return runs
