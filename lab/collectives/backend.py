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
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.harness import Bench, Measured, column
from stretto.bench.collectives.peers import CollectiveBuffers, nccl_run
from stretto.bench.collectives.settings import COLLECTIVES
from stretto.bench.harness import run_ranks, shared_where_few
from stretto.bench.interleaved import TimingEffort, name_size, time_interleaved
from stretto.bench.settings import Needs, Option, Ranks, list_sizes, require_known
from stretto.cluster.detection import count_gpus

_PRODUCT = 4096  # rows, columns and inner size of the products that overlap a collective
_MAX_PRODUCTS = 64
_ONE_CALL = 1 << 30  # bytes for `time_interleaved`, which then times one call at a time
BACKEND_PARTS = ("alone", "beside", "ddp")
SIZES = list_sizes(16 << 10, 256 << 20, 4)  # bytes of the whole array
_WORK = 1.5  # time of the products that overlap a collective, in multiples of the collective's by NCCL
_LAYERS, _WIDTH, _ROWS = 8, 4096, 8192  # of DDP's linear layers, and of its batch on each rank
_BUCKET_MB = (25.0, 100.0)  # of DDP, in MiB


@dataclass(frozen=True)
class BackendSetting:
    """Settings of `python -m lab backend`: calls of torch.distributed alone, overlapped with products, and by DDP.

    Raises ValueError for unknown names.
    """

    parts: Annotated[tuple[str, ...], Option("alone, beside, ddp, with commas.")] = BACKEND_PARTS
    collectives: Annotated[tuple[str, ...], Option("Collectives, with commas.", "--only")] = COLLECTIVES
    ranks: Ranks = None

    def __post_init__(self) -> None:
        require_known("part", self.parts, BACKEND_PARTS)
        require_known("collective", self.collectives, COLLECTIVES)


@dataclass(frozen=True)
class Row:
    """Times of a call or step, by backend; work: what overlaps it, alone. In microseconds, and ms of DDP's steps."""

    part: str = column("part")
    collective: str | None = column("collective", default=None)
    bytes: int | None = None
    size: str | None = column("size", default=None)
    bucket_mb: float | None = column("bucket (MiB)", "{:g}", default=None)
    products: int | None = None
    work: float | None = column("work alone (us; ddp: ms)", "{:.2f}", default=None)
    nccl: float | None = column("NCCL", "{:.2f}", default=None)
    stretto: float | None = column("Stretto's backend", "{:.2f}", default=None)
    ratio: float | None = column("NCCL / Stretto", "{:.3f}", default=None)
    nccl_exposed: float | None = column("exposed, NCCL", "{:.2f}", default=None)
    stretto_exposed: float | None = column("exposed, Stretto", "{:.2f}", default=None)
    ran_as: str = column("ran as", default="")


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


def compare_backends(setting: BackendSetting) -> Measured:
    """Measure on the ranks, which share GPUs where there are fewer; then of the backend `stretto` alone."""
    assert setting.ranks is not None  # the harness has counted the GPUs
    with shared_where_few(setting.ranks):
        rows = run_ranks(setting.ranks, _measure_all, setting)
    return Measured(rows, {"gpus": min(setting.ranks, count_gpus())})


def _measure_all(setting: BackendSetting) -> list[Row]:
    groups = _Groups.make()
    rows: list[Row] = []
    for part in setting.parts:
        if part == "ddp":
            rows += [_measure_ddp(groups, megabytes) for megabytes in _BUCKET_MB]
            continue
        measure = _measure_alone if part == "alone" else _measure_overlapped
        rows += [measure(groups, collective, size) for collective in setting.collectives for size in SIZES]
    return rows


def _measure_alone(groups: _Groups, collective: str, size: int) -> Row:
    buffers = CollectiveBuffers.make(collective, size, torch.bfloat16, groups.device)
    runs = {name: nccl_run(collective, buffers, group) for name, group in groups.by_name.items()}
    return _compare("alone", runs, size, 1e6, collective=collective, bytes=size, size=name_size(size))


def _measure_overlapped(groups: _Groups, collective: str, size: int) -> Row:
    buffers = CollectiveBuffers.make(collective, size, torch.bfloat16, groups.device)
    a, b, c = (torch.randn(_PRODUCT, _PRODUCT, device=groups.device).bfloat16() for _ in range(3))
    first = next(iter(groups.by_name.values()))  # NCCL's where there is one
    probes: dict[str, Callable[[], Any]] = {
        "collective": nccl_run(collective, buffers, first),
        "product": partial(torch.mm, a, b, out=c),
    }
    alone = time_interleaved(probes, _ONE_CALL, is_graph=False, effort=TimingEffort(rounds=1, replays=5))
    wanted = _WORK * alone["collective"].seconds / alone["product"].seconds
    products = min(_MAX_PRODUCTS, max(1, math.ceil(wanted)))  # all ranks have the slowest one's times

    def work() -> None:
        for _ in range(products):
            torch.mm(a, b, out=c)

    def run_overlapped(group: dist.ProcessGroup) -> None:
        call = nccl_run(collective, buffers, group, is_async=True)()
        work()
        call.wait()

    runs: dict[str, Callable[[], Any]] = {"work": work}
    runs |= {name: partial(run_overlapped, group) for name, group in groups.by_name.items()}
    about = {"collective": collective, "bytes": size, "size": name_size(size), "products": products}
    return _compare("beside", runs, _ONE_CALL, 1e6, **about)


def _measure_ddp(groups: _Groups, bucket_mb: float) -> Row:
    x = torch.randn(_ROWS, _WIDTH, device=groups.device)

    def make(group: dist.ProcessGroup) -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
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
    return _compare("ddp", runs, _ONE_CALL, 1e3, bucket_mb=bucket_mb)


def _found_as(run: Callable[[], Any]) -> str:
    """Call once. Returns what ran the calls of the backend `stretto`: a schedule's name, or NCCL."""
    from stretto.collectives import call_counts

    before = call_counts()
    run()
    names = sorted({call[1] for call, count in call_counts().items() if count > before.get(call, 0)})
    return ", ".join(name.removeprefix("schedule ") for name in names)


def _compare(part: str, runs: Mapping[str, Callable[[], Any]], num_bytes: int, scale: float, **about: Any) -> Row:
    """Time "nccl" (where there is one), "stretto" and "work" (what overlaps a call), in units of 1 / scale seconds."""
    ran_as = _found_as(runs["stretto"])
    timed = time_interleaved(runs, num_bytes, is_graph=False, rests=part == "alone")
    times: dict[str, Any] = {name: one.seconds * scale for name, one in timed.items()}
    nccl, work = times.get("nccl"), times.get("work")
    exposed: dict[str, Any] = (
        {} if work is None else {f"{name}_exposed": max(0.0, times[name] - work) for name in times.keys() - {"work"}}
    )
    ratio = None if nccl is None else nccl / times["stretto"]
    return Row(part=part, **about, **times, **exposed, ratio=ratio, ran_as=ran_as)


BENCH = Bench(
    "backend",
    "torch.distributed calls with the backend `stretto` and with NCCL: alone, during matrix products, in DDP steps.",
    BackendSetting,
    compare_backends,
    Row,
    title=lambda setting: f"The backend `stretto` compared with NCCL, {setting.ranks} ranks",
    needs=Needs.TWO_GPUS,
    shares_gpus=True,
    about=lambda setting: {"ranks": setting.ranks},
)
