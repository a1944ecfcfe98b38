# SPDX-License-Identifier: Apache-2.0
"""`python -m lab handwritten`: compiled all-reduces, and kernels written by hand (bf16, sum, LL).

The hand-written kernels show the overhead of a compiled schedule. Like a kernel author's first version, they have no
timeouts and no failure reports, and support only sizes that divide evenly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from lab.harness import Bench, column
from stretto.bench.collectives.peers import CollectiveBuffers, nccl_run
from stretto.bench.harness import run_ranks
from stretto.bench.interleaved import name_size, time_interleaved
from stretto.bench.settings import Needs, Option, Ranks, list_sizes
from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace
from stretto.parallel import Grid


@dataclass(frozen=True)
class HandwrittenSetting:
    """The largest array that is summed, in bytes; from 1 KiB, by factors of 4."""

    largest: Annotated[int, Option("Bytes of the largest array.", least=1024)] = 4 << 20
    ranks: Ranks = None


@dataclass(frozen=True)
class Row:
    """Microseconds of an all-reduce in a CUDA graph."""

    size: str = column("size")
    nccl: float = column("NCCL (us)", "{:.1f}")
    way: str = column("Stretto ran as")
    stretto: float | None = column("Stretto (us)", "{:.1f}", default=None)
    one_shot: float | None = column("one-shot by hand (us)", "{:.1f}", default=None)
    two_shot: float | None = column("two-shot by hand (us)", "{:.1f}", default=None)


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
            + Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
        )
        self._function = workspace.load(source, ["input", "output", "epochs", "count", "half", *names])
        region = workspace.regions["LL"]
        self._capacity, self._shots, self._world = region.size, shots, world
        self._function.set("epochs", workspace.state.data_ptr())
        self._function.set("half", workspace.half)
        for name, address in zip(names, workspace.peers, strict=True):
            self._function.set(name, address + region.start)

    def fits(self, num_bytes: int) -> bool:
        """True if the LL buffers are large enough for an array of `num_bytes` bytes."""
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


def _measure_all(setting: HandwrittenSetting) -> list[Row]:
    assert setting.ranks is not None
    device = Grid(data=setting.ranks).device
    communicator = CudaCommunicator()
    rows = []
    for size in list_sizes(1024, setting.largest, 4):
        buffers = CollectiveBuffers.make("allreduce", size, torch.bfloat16, device)
        runs: dict[str, Callable[[], Any]] = {"nccl": nccl_run("allreduce", buffers)}
        if (choice := communicator.run("allreduce", buffers.input, buffers.output)) is not None:
            runs["stretto"] = partial(communicator.run, "allreduce", buffers.input, buffers.output)
        for shots, name in ((1, "one_shot"), (2, "two_shot")):
            kernel = HandwrittenAllReduce(communicator.workspace, shots)
            if kernel.fits(size):
                runs[name] = partial(kernel, buffers.input, buffers.output)
        found = {name: timed.seconds * 1e6 for name, timed in time_interleaved(runs, size, is_graph=True).items()}
        times = (found.get(name) for name in ("stretto", "one_shot", "two_shot"))
        rows.append(Row(name_size(size), found["nccl"], choice or "NCCL", *times))
    communicator.workspace.check()
    return rows


BENCH = Bench(
    "handwritten",
    "All-reduces as compiled schedules and as kernels written by hand, beside NCCL's.",
    HandwrittenSetting,
    lambda setting: run_ranks(setting.ranks, _measure_all, setting, trains=False),
    Row,
    title=lambda setting: f"All-reduces of bf16, {setting.ranks} ranks",
    needs=Needs.TWO_GPUS,
    about=lambda setting: {"ranks": setting.ranks},
)
