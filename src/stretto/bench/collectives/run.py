# SPDX-License-Identifier: Apache-2.0
"""`stretto bench collectives`: Stretto's kernels, NCCL and torch's symmetric-memory operators, interleaved."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stretto.bench.collectives.peers import CollectiveBuffers, TorchPeers, nccl_run
from stretto.bench.collectives.settings import CollectivesSetting
from stretto.bench.harness import TORCH_DTYPES, Column, print_row, print_table, run_ranks, write_result
from stretto.bench.interleaved import name_size, time_interleaved
from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.memory import empty
from stretto.parallel import Grid

COLUMNS = (
    Column("collective", "collective"),
    Column("dtype", "dtype"),
    Column("mode", "mode"),
    Column("size", "size"),
    Column("nccl", "NCCL (us)", "{:.1f}"),
    Column("torch", "torch's best (us)", "{:.1f}"),
    Column("stretto", "Stretto (us)", "{:.1f}"),
    Column("symmetric", "into symmetric tensors (us)", "{:.1f}"),
    Column("way", "ran as"),
    Column("ratio", "NCCL / Stretto", "{:.2f}"),
    Column("busbw", "busbw (GB/s)", "{:.0f}"),
    Column("host", "host, a call (us)", "{:.1f}"),
    Column("nccl_host", "NCCL's (us)", "{:.1f}"),
)


def bench_collectives(ranks: int, out: Path, setting: CollectivesSetting) -> list[dict[str, Any]]:
    """Measure on the given number of GPUs, print the table, write the JSON. Returns the rows."""
    rows: list[dict[str, Any]] = run_ranks(ranks, _measure_all, ranks, setting, trains=False)
    print_table(f"Collectives, {ranks} ranks, whole arrays", COLUMNS, rows)
    write_result(out, "collectives", COLUMNS, rows, ranks=ranks)
    return rows


def _measure_all(ranks: int, setting: CollectivesSetting) -> list[dict[str, Any]]:
    device = Grid(data=ranks).device
    communicator = CudaCommunicator(table=setting.table)
    peers = TorchPeers(device)
    rows = []
    for collective in setting.collectives:
        for dtype in setting.dtypes:
            for size in setting.sizes:
                for mode in setting.modes:
                    rows.append(_measure(communicator, peers, collective, dtype, size, mode, device))
                    print_row(rows[-1])
    communicator.workspace.check()
    return rows


def _measure(
    communicator: CudaCommunicator,
    peers: TorchPeers,
    collective: str,
    dtype: str,
    size: int,
    mode: str,
    device: torch.device,
) -> dict[str, Any]:
    buffers = CollectiveBuffers.make(collective, size, TORCH_DTYPES[dtype], device)
    library = nccl_run(collective, buffers)
    choice = communicator.run(collective, buffers.input, buffers.output)
    ours = library if choice is None else partial(communicator.run, collective, buffers.input, buffers.output)
    runs: dict[str, Callable[[], Any]] = {"nccl": library, **peers.runs(collective, buffers)}
    if choice is not None:
        runs["stretto"] = ours
        symmetric_input, symmetric_output = (
            empty(one.shape, one.dtype, device=device) for one in (buffers.input, buffers.output)
        )
        symmetric_input.copy_(buffers.input)
        communicator.run(collective, symmetric_input, symmetric_output)
        runs["symmetric"] = partial(communicator.run, collective, symmetric_input, symmetric_output)
    found = time_interleaved(runs, size, is_graph=mode == "graph")
    seconds = {name: one.seconds * 1e6 for name, one in found.items()}
    stretto = seconds.get("stretto", seconds["nccl"])
    world = dist.get_world_size()
    factor = (2 if collective == "allreduce" else 1) * (world - 1) / world
    host = found.get("stretto", found["nccl"]).host
    return {
        "collective": collective,
        "dtype": dtype,
        "mode": mode,
        "bytes": size,
        "size": name_size(size),
        "nccl": seconds["nccl"],
        "torch": min((value for name, value in seconds.items() if name.startswith("torch")), default=None),
        "stretto": stretto,
        "symmetric": seconds.get("symmetric"),
        "way": choice or "NCCL",
        "ratio": seconds["nccl"] / stretto,
        "busbw": factor * size / stretto / 1e3,
        "host": None if mode == "graph" else host * 1e6,
        "nccl_host": None if mode == "graph" else found["nccl"].host * 1e6,
    }
