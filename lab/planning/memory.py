# SPDX-License-Identifier: Apache-2.0
"""`python -m lab memory`: the memory of training runs on one GPU, compared with the planner's predictions.

Runs of several kinds (large models with few tokens, small ones with many, with activation checkpointing, in fp32, with
a large vocabulary) are chosen so that their predicted memory lies evenly between two parts of the GPU's memory. Each
run has three measured peaks: memory of tensors (allocated), memory that torch's allocator got from the driver for them
(reserved), and other memory of the process (the CUDA context, libraries' workspaces, kernels' code).
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from lab.harness import Bench, Measured, column
from stretto.bench.harness import empty_memory, in_one_line, run_ranks
from stretto.bench.settings import Needs, Option
from stretto.bench.training.runs import build_stretto
from stretto.bench.training.settings import TrainingWorkload
from stretto.cluster import Cluster
from stretto.models import GPTConfig
from stretto.parallel import Grid
from stretto.planner import predict
from stretto.planner.memory import outside_of_allocator, reserved
from stretto.planner.workload import Dtype


@dataclass(frozen=True)
class MemorySetting:
    """Settings of `python -m lab memory`, which measures training runs:
    those whose predicted memory is in a range of the GPU's.

    smallest, largest: percent of the GPU's memory. Raises ValueError for a range that is empty or beyond 120%.
    """

    runs: Annotated[int, Option("Number of training runs.", least=1)] = 24
    smallest: Annotated[float, Option("Predicted memory of the smallest run, in percent of the GPU's.")] = 60.0
    largest: Annotated[float, Option("The same of the largest run.")] = 98.0
    steps: Annotated[int, Option("Steps of each run.", least=1)] = 3
    seconds: Annotated[float | None, Option("Start no run after so many seconds.", least=0)] = None
    on_cpu: Annotated[bool, Option("Two tiny runs that measure nothing, to try the command.", "--cpu")] = False

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= self.largest <= 120:
            raise ValueError(
                f"--smallest {self.smallest:g} --largest {self.largest:g} is no range of percents: 0 < smallest <= "
                "largest <= 120"
            )


_TINY_MEMORY = 64 << 20  # of the GPU that --cpu pretends to have
_MAX_LAYERS, _MAX_SEQUENCES = 48, 64
_MAX_STEP_SECONDS = 2.0  # runs whose predicted step takes longer are left out, so that many runs fit in minutes


@dataclass(frozen=True)
class Row:
    """A run's memory, predicted and measured, or why it was not measured."""

    run: str = column("run")
    predicted_allocated_gib: float = column("allocated: predicted (GiB)", "{:.2f}")
    allocated_gib: float = column("measured", "{:.2f}")
    allocated_ratio: float = column("ratio", "{:.3f}")
    predicted_reserved_gib: float = column("reserved: predicted (GiB)", "{:.2f}")
    reserved_gib: float = column("measured", "{:.2f}")
    reserved_ratio: float = column("ratio", "{:.3f}")
    outside_gib: float = column("outside of the allocator (GiB)", "{:.2f}")
    predicted_share: float = column("predicted, of the GPU", "{:.1%}")
    is_predicted_to_fit: str = column("predicted to fit")
    reason: str = column("why not")


@dataclass(frozen=True)
class _Kind:
    """Runs of one width: their layers and sequences vary. dtype: of the computation."""

    name: str
    model: GPTConfig
    dtype: Dtype = "bf16"
    checkpointing: bool = False

    def workload(self, layers: int, batch: int) -> TrainingWorkload:
        """The workload with the given layers and sequences."""
        return TrainingWorkload(
            replace(self.model, layers=layers),
            batch,
            self.model.max_seq_len,
            warm_up=0,
            repeats=1,
            rounds=1,
            checkpointing=self.checkpointing,
            dtype=self.dtype,
        )


def _gpt(hidden: int, seq_len: int, vocab: int = 50304, **options: Any) -> GPTConfig:
    return GPTConfig(1, hidden, max(hidden // 128, 1), vocab=vocab, max_seq_len=seq_len, **options)


_LLAMA: dict[str, Any] = {"positions": "rotary", "activation": "swiglu", "norm": "rmsnorm", "bias": False}
KINDS = (
    _Kind("wide", _gpt(4096, 2048)),
    _Kind("narrow", _gpt(1024, 2048)),
    _Kind("long sequences", _gpt(2048, 8192)),
    _Kind("checkpointing", _gpt(4096, 2048), checkpointing=True),
    _Kind("fp32", _gpt(4096, 512), dtype="fp32"),
    _Kind("Llama, large vocabulary", _gpt(2048, 4096, 128_256, tie_embeddings=False, kv_heads=4, **_LLAMA)),
)
TINY_KINDS = (_Kind("tiny", GPTConfig(1, 128, 2, vocab=512, max_seq_len=64)),)


@dataclass(frozen=True)
class PlannedRun:
    """A run to measure, and the bytes that the planner predicts for its peak: allocated, and with all else."""

    name: str
    workload: TrainingWorkload
    allocated: float
    predicted: float
    fits: bool


def choose_runs(setting: MemorySetting, kinds: Sequence[_Kind], cluster: Cluster) -> list[PlannedRun]:
    """Choose the runs: for each target, in turn a kind's layers and sequences whose prediction is nearest to it.

    Targets lie evenly between the smallest and the largest part of the GPU's memory. Raises ValueError for a cluster
    whose GPU's memory is unknown.
    """
    memory = cluster.require("gpu.memory")
    spread = (setting.largest - setting.smallest) / max(setting.runs - 1, 1)
    targets = [(setting.smallest + spread * number) / 100 * memory for number in range(setting.runs)]
    known = {kind.name: list(_predict_all(kind, cluster, 1.3 * memory)) for kind in kinds}
    chosen: list[PlannedRun] = []
    for target, kind in zip(targets, itertools.cycle(kinds), strict=False):
        candidates = [run for run in known[kind.name] if run not in chosen]
        if candidates:
            _, nearest = min((abs(run.predicted - target), place) for place, run in enumerate(candidates))
            chosen.append(candidates[nearest])
    return chosen


def _predict_all(kind: _Kind, cluster: Cluster, limit: float) -> Iterator[PlannedRun]:
    """Every number of layers and sequences of a kind that is predicted to need less than `limit` bytes."""
    for layers in range(1, _MAX_LAYERS + 1):
        for batch in range(1, _MAX_SEQUENCES + 1):
            workload = kind.workload(layers, batch)
            plan = predict(
                workload.model,
                cluster,
                grid={},
                batch=batch,
                seq_len=workload.seq_len,
                dtype=kind.dtype,
                cost="full",
                recompute="full" if kind.checkpointing else "none",
                reshard="after_backward",
            )
            needed = plan.reserved_memory + outside_of_allocator(cluster.require("gpu.memory"))
            if needed > limit:
                break
            if plan.step_time <= _MAX_STEP_SECONDS:
                name = f"{kind.name}, {layers} layers, {batch} x {workload.seq_len} tokens"
                yield PlannedRun(name, workload, plan.peak_memory, needed, plan.fits)


def measure_memory(setting: MemorySetting) -> Measured:
    """Choose and measure the runs. Raises ValueError where there is no GPU."""
    memory: float = _TINY_MEMORY
    if not setting.on_cpu:
        if not torch.cuda.is_available():
            raise ValueError("this bench takes a GPU, and torch finds none here: --cpu tries the command without one")
        memory = torch.cuda.get_device_properties(0).total_memory
    # Its rates only serve to exclude runs that take too long.
    cluster = Cluster.find("dgx-h100")
    cluster = replace(cluster, gpu=replace(cluster.gpu, memory=memory))
    if setting.on_cpu:
        runs = choose_runs(replace(setting, runs=min(setting.runs, 2)), TINY_KINDS, cluster)
    else:
        runs = choose_runs(setting, KINDS, cluster)
    found = run_ranks(1, measure_runs, [run.workload for run in runs], setting.steps, setting.seconds)
    rows = [_compare(run, measured, memory) for run, measured in zip(runs, found, strict=True)]
    return Measured(rows, {"gpu_memory_gib": memory / 2**30})


def _compare(run: PlannedRun, measured: dict[str, Any], memory: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": run.name,
        "predicted_allocated_gib": run.allocated / 2**30,
        "predicted_reserved_gib": reserved(run.allocated) / 2**30,
        "predicted_share": run.predicted / memory,
        "is_predicted_to_fit": "yes" if run.fits else "no",
    }
    row |= {"allocated_gib": None, "reserved_gib": None, "outside_gib": None, "reason": None} | measured
    for kind in ("allocated", "reserved"):
        value = row[f"{kind}_gib"]
        row[f"{kind}_ratio"] = None if not value else row[f"predicted_{kind}_gib"] / value
    return row


def measure_runs(workloads: Sequence[TrainingWorkload], steps: int, seconds: float | None) -> list[dict[str, Any]]:
    """The job of the only rank: train each workload for some steps.

    Returns for each either its peaks in GiB (allocated_gib, reserved_gib, outside_gib; nothing on a CPU) or the reason
    why there are none: it ran out of memory, or there was no time left.
    """
    grid = Grid(device="cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for workload in workloads:
        if seconds is not None and time.monotonic() - began > seconds:
            rows.append({"reason": "there was no time left"})
            continue
        empty_memory()
        try:
            rows.append(_train(workload, grid, steps))
        except RuntimeError as error:  # torch.OutOfMemoryError among others
            rows.append({"reason": in_one_line(error)})
        print(f"{len(rows)} of {len(workloads)}: {rows[-1]}", flush=True)
    return rows


def _train(workload: TrainingWorkload, grid: Grid, steps: int) -> dict[str, Any]:
    step = build_stretto(workload, grid)
    for _ in range(steps):
        step()
    if grid.device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(grid.device)
    return {
        "allocated_gib": torch.cuda.max_memory_allocated(grid.device) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(grid.device) / 2**30,
        "outside_gib": (total - free - torch.cuda.memory_reserved(grid.device)) / 2**30,
    }


BENCH = Bench(
    "memory",
    "Memory of training runs that nearly fill one GPU, compared with the planner's predictions.",
    MemorySetting,
    measure_memory,
    Row,
    title="Memory of training runs on one GPU",
    needs=Needs.ONE_GPU,
    about=lambda setting: {},
)
