# SPDX-License-Identifier: Apache-2.0
"""`python -m lab backend`: the backend `stretto` compared with NCCL, by torch.distributed's own calls in one job.

Three tables: collectives alone, collectives with `async_op=True` overlapped with matrix products, and steps of
DistributedDataParallel, whose buckets are such calls. Both backends run interleaved in the same processes. The exposed
time is what a collective (or a step's collectives) adds to the work that overlaps it.

NCCL does not support ranks that share a GPU: the command then runs the backend `stretto` alone, as a functional test.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.collectives.settings import BackendSetting
from lab.shared_gpus import shared_where_few
from lab.tables import write_tables
from stretto.bench.collectives.peers import CollectiveBuffers
from stretto.bench.harness import Column, print_table, run_ranks, write_result
from stretto.bench.interleaved import TimingEffort, name_size, time_interleaved
from stretto.cluster.detection import count_gpus

_PRODUCT = 4096  # rows, columns and inner size of the products that overlap a collective
_MAX_PRODUCTS = 64
_ONE_CALL = 1 << 30  # bytes for `time_interleaved`, which then times one call at a time
ALONE_COLUMNS = (
    Column("collective", "collective"),
    Column("size", "size"),
    Column("nccl", "NCCL (us)", "{:.1f}"),
    Column("stretto", "Stretto's backend (us)", "{:.1f}"),
    Column("ratio", "NCCL / Stretto", "{:.2f}"),
    Column("ran_as", "ran as"),
)
BESIDE_COLUMNS = (
    Column("collective", "collective"),
    Column("size", "size"),
    Column("work", "products alone (us)", "{:.1f}"),
    Column("nccl", "with NCCL's beside them (us)", "{:.1f}"),
    Column("stretto", "with Stretto's (us)", "{:.1f}"),
    Column("ratio", "NCCL / Stretto", "{:.2f}"),
    Column("nccl_exposed", "exposed, NCCL (us)", "{:.1f}"),
    Column("stretto_exposed", "exposed, Stretto (us)", "{:.1f}"),
    Column("ran_as", "ran as"),
)
DDP_COLUMNS = (
    Column("bucket_mb", "bucket (MiB)", "{:g}"),
    Column("work", "step without all-reduces (ms)", "{:.2f}"),
    Column("nccl", "step, NCCL (ms)", "{:.2f}"),
    Column("stretto", "step, Stretto's backend (ms)", "{:.2f}"),
    Column("ratio", "NCCL / Stretto", "{:.3f}"),
    Column("nccl_exposed", "exposed, NCCL (ms)", "{:.2f}"),
    Column("stretto_exposed", "exposed, Stretto (ms)", "{:.2f}"),
    Column("ran_as", "ran as"),
)
_TITLES = {
    "alone": ("Collectives alone", ALONE_COLUMNS),
    "beside": ("Collectives with async_op=True beside matrix products", BESIDE_COLUMNS),
    "ddp": ("Steps of DistributedDataParallel", DDP_COLUMNS),
}


@dataclass(frozen=True)
class _Groups:
    """The group of each backend, by its name; "nccl" only where each rank has a GPU of its own."""

    by_name: Mapping[str, dist.ProcessGroup]
    device: torch.device

    @classmethod
    def make(cls) -> "_Groups":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("stretto")
        assert dist.group.WORLD is not None
        groups: dict[str, dist.ProcessGroup] = {}
        if dist.get_world_size() <= torch.cuda.device_count():
            groups["nccl"] = dist.new_group(backend="nccl")
        return cls(groups | {"stretto": dist.group.WORLD}, device)


def bench_backend(ranks: int, out: Path, setting: BackendSetting) -> list[dict[str, Any]]:
    """Measure with `ranks` ranks, print the tables, write backend.json and .md. Returns the rows of all tables.

    Raises ValueError on a machine without a GPU.
    """
    if not count_gpus():
        raise ValueError("this bench takes GPUs, and torch sees none here")
    with shared_where_few(ranks):
        tables: dict[str, list[dict[str, Any]]] = run_ranks(ranks, _measure_all, setting)
    for part, rows in tables.items():
        print_table(f"{_TITLES[part][0]}, {ranks} ranks", _TITLES[part][1], rows)
    rows = [{"part": part, **row} for part, of_part in tables.items() for row in of_part]
    path = write_result(out, "backend", (), rows, ranks=ranks, gpus=min(ranks, count_gpus()))
    write_tables(path, [(*_TITLES[part], of_part) for part, of_part in tables.items()])
    return rows


def _measure_all(setting: BackendSetting) -> dict[str, list[dict[str, Any]]]:
    groups = _Groups.make()
    tables: dict[str, list[dict[str, Any]]] = {}
    for part in setting.parts:
        if part == "ddp":
            tables[part] = [_measure_ddp(groups, setting, megabytes) for megabytes in setting.bucket_mb]
            continue
        measure = _measure_alone if part == "alone" else _measure_overlapped
        tables[part] = [
            measure(groups, setting, collective, size) for collective in setting.collectives for size in setting.sizes
        ]
    return tables


def _measure_alone(groups: _Groups, setting: BackendSetting, collective: str, size: int) -> dict[str, Any]:
    buffers = CollectiveBuffers.make(collective, size, torch.bfloat16, groups.device)
    runs = {name: partial(_call, collective, buffers, group) for name, group in groups.by_name.items()}
    ran_as = _found_as(runs["stretto"])
    found = time_interleaved(runs, size, is_graph=False)
    return {
        "collective": collective,
        "bytes": size,
        "size": name_size(size),
        **_compare({name: timed.seconds * 1e6 for name, timed in found.items()}),
        "ran_as": ran_as,
    }


def _measure_overlapped(groups: _Groups, setting: BackendSetting, collective: str, size: int) -> dict[str, Any]:
    buffers = CollectiveBuffers.make(collective, size, torch.bfloat16, groups.device)
    a, b, c = (torch.randn(_PRODUCT, _PRODUCT, device=groups.device).bfloat16() for _ in range(3))
    first = next(iter(groups.by_name.values()))  # NCCL's where there is one
    probes: dict[str, Callable[[], Any]] = {
        "collective": partial(_call, collective, buffers, first),
        "product": partial(torch.mm, a, b, out=c),
    }
    alone = time_interleaved(probes, _ONE_CALL, is_graph=False, effort=TimingEffort(rounds=1, replays=5))
    wanted = setting.work * alone["collective"].seconds / alone["product"].seconds
    products = min(_MAX_PRODUCTS, max(1, math.ceil(wanted)))  # all ranks have the slowest one's times

    def work() -> None:
        for _ in range(products):
            torch.mm(a, b, out=c)

    def run_overlapped(group: dist.ProcessGroup) -> None:
        call = _call(collective, buffers, group, is_async=True)
        work()
        call.wait()

    runs: dict[str, Callable[[], Any]] = {"work": work}
    runs |= {name: partial(run_overlapped, group) for name, group in groups.by_name.items()}
    ran_as = _found_as(runs["stretto"])
    found = time_interleaved(runs, _ONE_CALL, is_graph=False, rests=False)
    return {
        "collective": collective,
        "bytes": size,
        "size": name_size(size),
        "products": products,
        **_compare({name: timed.seconds * 1e6 for name, timed in found.items()}),
        "ran_as": ran_as,
    }


def _measure_ddp(groups: _Groups, setting: BackendSetting, bucket_mb: float) -> dict[str, Any]:
    x = torch.randn(setting.rows, setting.width, device=groups.device)

    def make(group: dist.ProcessGroup) -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = [
            layer for _ in range(setting.layers) for layer in (nn.Linear(setting.width, setting.width), nn.ReLU())
        ]
        model = nn.Sequential(*layers).to(groups.device)
        return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, process_group=group)

    models = {name: make(group) for name, group in groups.by_name.items()}

    def step(model: DistributedDataParallel) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    def without_all_reduces() -> None:
        with models["stretto"].no_sync():
            step(models["stretto"])

    runs: dict[str, Callable[[], Any]] = {"work": without_all_reduces}
    runs |= {name: partial(step, model) for name, model in models.items()}
    ran_as = _found_as(runs["stretto"])
    found = time_interleaved(runs, _ONE_CALL, is_graph=False, rests=False)
    return {
        "bucket_mb": bucket_mb,
        **_compare({name: timed.seconds * 1e3 for name, timed in found.items()}),
        "ran_as": ran_as,
    }


def _call(collective: str, buffers: CollectiveBuffers, group: dist.ProcessGroup, *, is_async: bool = False) -> Any:
    """Make one call of torch.distributed; returns its Work if it is asynchronous."""
    x, y = buffers.input, buffers.output
    match collective:
        case "allreduce":
            return dist.all_reduce(y, group=group, async_op=is_async)
        case "allgather":
            return dist.all_gather_into_tensor(y, x, group=group, async_op=is_async)
        case "reducescatter":
            return dist.reduce_scatter_tensor(y, x, group=group, async_op=is_async)
        case _:
            return dist.all_to_all_single(y, x, group=group, async_op=is_async)


def _found_as(run: Callable[[], Any]) -> str:
    """Call once. Returns what ran the calls of the backend `stretto`: a schedule's name, or NCCL."""
    from stretto.collectives import call_counts

    before = call_counts()
    run()
    names = sorted({call[1] for call, count in call_counts().items() if count > before.get(call, 0)})
    return ", ".join(name.removeprefix("schedule ") for name in names)


def _compare(found: Mapping[str, float]) -> dict[str, float | None]:
    """The columns that every table has, of the times of "nccl" (where there is one), "stretto" and "work"."""
    nccl, work = found.get("nccl"), found.get("work")
    row: dict[str, float | None] = {"nccl": nccl, "stretto": found["stretto"]}
    row["ratio"] = None if nccl is None else nccl / found["stretto"]
    if work is not None:
        row["work"] = work
        row["stretto_exposed"] = max(0.0, found["stretto"] - work)
        row["nccl_exposed"] = None if nccl is None else max(0.0, nccl - work)
    return row
