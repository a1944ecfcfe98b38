"""Collectives by Stretto's kernels beside NCCL and torch's symmetric-memory operators, interleaved, size by size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.bench.collectives.peers import HandwrittenAllReduce
from stretto.bench.collectives.plot import plot_collectives
from stretto.bench.harness import Column, print_table, require_known, run_ranks, write_result
from stretto.bench.interleaved import name_size, time_interleaved
from stretto.collectives.executor.cuda.communicator import CudaCommunicator, machine_name
from stretto.collectives.selection import (
    ALGORITHMS_OF,
    COPY_ENGINE_MIN_BYTES,
    LIBRARY,
    AlgorithmChoice,
    Table,
    find_choices,
    time_key,
)
from stretto.memory import empty
from stretto.parallel import Grid
from stretto.tuning import TuningStore, read_times

MODES = ("graph", "eager")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COLLECTIVES = tuple(ALGORITHMS_OF)
COLUMNS = (
    Column("collective", "collective"),
    Column("dtype", "dtype"),
    Column("mode", "mode"),
    Column("size", "size"),
    Column("nccl", "NCCL (us)", "{:.1f}"),
    Column("torch", "torch's best (us)", "{:.1f}"),
    Column("handwritten", "hand-written (us)", "{:.1f}"),
    Column("stretto", "Stretto (us)", "{:.1f}"),
    Column("symmetric", "into symmetric tensors (us)", "{:.1f}"),
    Column("way", "ran as"),
    Column("ratio", "NCCL / Stretto", "{:.2f}"),
    Column("busbw", "busbw (GB/s)", "{:.0f}"),
    Column("host", "host, a call (us)", "{:.1f}"),
    Column("nccl_host", "NCCL's (us)", "{:.1f}"),
)


@dataclass(frozen=True)
class CollectivesSetting:
    """What is measured: every collective, dtype and size (bytes of the whole array), as a CUDA graph and as calls.

    tunes: measure every way first, and keep the times, in the file `table` or else in the store; table: the file whose
    times choose (None: the store's). ValueError for what there is not.
    """

    sizes: tuple[int, ...]
    collectives: tuple[str, ...] = COLLECTIVES
    dtypes: tuple[str, ...] = tuple(DTYPES)
    modes: tuple[str, ...] = MODES
    tunes: bool = False
    table: Path | None = None

    def __post_init__(self) -> None:
        require_known("collective", self.collectives, COLLECTIVES)
        require_known("dtype", self.dtypes, DTYPES)
        require_known("mode", self.modes, MODES)
        if self.table is not None and (self.table.exists() or not self.tunes):
            read_times(self.table)  # what is no such file is neither used nor overwritten


def bench_collectives(ranks: int, out: Path, setting: CollectivesSetting) -> list[dict[str, Any]]:
    """Measure on that many GPUs; print the table, write JSON and a picture; returns the rows."""
    rows: list[dict[str, Any]] = run_ranks(ranks, _measure_all, ranks, setting, trains=False)
    print_table(f"Collectives, {ranks} ranks, whole arrays", COLUMNS, rows)
    path = write_result(out, "collectives", COLUMNS, rows, ranks=ranks)
    plot_collectives(path, path.with_suffix(".png"))
    return rows


def _measure_all(ranks: int, setting: CollectivesSetting) -> list[dict[str, Any]]:
    device = Grid(data=ranks).device
    if setting.tunes:
        communicator = CudaCommunicator(table=Table())
        _tune(communicator, setting.collectives, setting.dtypes, setting.sizes, device, TuningStore(setting.table))
        communicator.close()
    communicator = CudaCommunicator(table=setting.table)
    peers = _TorchPeers(device)
    rows = []
    for collective in setting.collectives:
        for dtype in setting.dtypes:
            for size in setting.sizes:
                for mode in setting.modes:
                    row = _measure(communicator, peers, collective, dtype, size, mode, device)
                    rows.append(row)
                    if dist.get_rank() == 0:
                        print(" ".join(f"{key}={value}" for key, value in row.items() if value is not None), flush=True)
    communicator.workspace.check()
    return rows


@dataclass(frozen=True)
class _Buffers:
    """A collective's ordinary tensors."""

    input: Tensor
    output: Tensor

    @classmethod
    def make(cls, collective: str, size: int, dtype: torch.dtype, device: torch.device) -> "_Buffers":
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


def _nccl(collective: str, buffers: _Buffers) -> Callable[[], Any]:
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


class _TorchPeers:
    """torch's own operators on symmetric memory, for all-reduce."""

    def __init__(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._storage = symmetric.empty(1 << 30, dtype=torch.uint8, device=device)
        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD.group_name
        symmetric.rendezvous(self._storage, dist.group.WORLD)

    def runs(self, collective: str, buffers: _Buffers) -> dict[str, Callable[[], Any]]:
        """What there is for this call, by name."""
        x = buffers.input
        if collective != "allreduce" or x.numel() * x.itemsize > self._storage.numel() or x.itemsize * x.numel() < 64:
            return {}
        part = self._storage[: x.numel() * x.itemsize].view(x.dtype)
        part.zero_()
        one = partial(torch.ops.symm_mem.one_shot_all_reduce, part, "sum", self._group)
        two = partial(torch.ops.symm_mem.two_shot_all_reduce_, part, "sum", self._group)
        return {"torch one-shot": one, "torch two-shot": two}


def _measure(
    communicator: CudaCommunicator,
    peers: _TorchPeers,
    collective: str,
    dtype: str,
    size: int,
    mode: str,
    device: torch.device,
) -> dict[str, Any]:
    buffers = _Buffers.make(collective, size, DTYPES[dtype], device)
    library = _nccl(collective, buffers)
    way = communicator.run(collective, buffers.input, buffers.output)
    ours = library if way is None else partial(communicator.run, collective, buffers.input, buffers.output)
    runs: dict[str, Callable[[], Any]] = {"nccl": library, **peers.runs(collective, buffers)}
    if way is not None:
        runs["stretto"] = ours
        given, taken = (empty(one.shape, one.dtype, device=device) for one in (buffers.input, buffers.output))
        given.copy_(buffers.input)
        communicator.run(collective, given, taken)
        runs["symmetric"] = partial(communicator.run, collective, given, taken)
    if collective == "allreduce" and dtype == "bf16" and size <= 4 << 20:
        runs |= _handwritten(communicator, buffers)
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
        "handwritten": min((value for name, value in seconds.items() if name.startswith("hand")), default=None),
        "stretto": stretto,
        "symmetric": seconds.get("symmetric"),
        "way": way or "NCCL",
        "ratio": seconds["nccl"] / stretto,
        "busbw": factor * size / stretto / 1e3,
        "host": None if mode == "graph" else host * 1e6,
        "nccl_host": None if mode == "graph" else found["nccl"].host * 1e6,
    }


def _handwritten(communicator: CudaCommunicator, buffers: _Buffers) -> dict[str, Callable[[], Any]]:
    runs: dict[str, Callable[[], Any]] = {}
    for shots in (1, 2):
        kernel = HandwrittenAllReduce(communicator.workspace, shots)
        if kernel.fits(buffers.input.numel() * buffers.input.itemsize):
            runs[f"hand-written {shots}-shot"] = partial(kernel, buffers.input, buffers.output)
    return runs


def _tune(
    communicator: CudaCommunicator,
    collectives: Sequence[str],
    dtypes: Sequence[str],
    sizes: Sequence[int],
    device: torch.device,
    store: TuningStore,
) -> None:
    """Time all ways in graphs, and keep the seconds in the store."""
    measured: dict[str, list[float]] = {}
    has_nvlink = communicator.workspace.has_nvlink
    for collective in collectives:
        for dtype in dtypes:
            name = str(DTYPES[dtype]).removeprefix("torch.")
            ways = find_choices(collective, has_nvlink=has_nvlink)
            kernels = {way: communicator.kernel(way, name, in_place=False) for way in ways if way != LIBRARY}
            for size in sizes:
                buffers = _Buffers.make(collective, size, DTYPES[dtype], device)
                runs: dict[str, Callable[[], Any]] = {LIBRARY.name: _nccl(collective, buffers)}
                for way, kernel in kernels.items():
                    if not _is_hopeless(way, size):
                        runs[way.name] = partial(kernel, buffers.input, buffers.output)
                found = time_interleaved(runs, size, is_graph=True)
                for way in ways:
                    if way.name in found:
                        key = time_key(collective, name, communicator.world_size, size, way)
                        measured[key] = [found[way.name].seconds]
                communicator.workspace.check()  # a way whose waits were given up has no time
                if dist.get_rank() == 0:
                    fastest = min(found, key=lambda way: found[way].seconds)
                    print(f"{collective} {dtype} {name_size(size)}: {fastest} of {len(found)} ways", flush=True)
    if dist.get_rank() == 0:
        store.add(machine_name(has_nvlink), measured)
    dist.barrier()


def _is_hopeless(way: AlgorithmChoice, size: int) -> bool:
    """Whether a way is not worth timing at that size; in graphs, which are timed, copies cost the host nothing."""
    if way.protocol == "Copy":
        return size < COPY_ENGINE_MIN_BYTES
    return way.algorithm == "one-shot-all-reduce" and size > 8 << 20
