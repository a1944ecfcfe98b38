# SPDX-License-Identifier: Apache-2.0
"""`python -m lab overlap`: step time with no overlap, then with all-reduce, reduce-scatter, all-gather, ... added.

One job measures all stages on one grid, then on the next. The results have the same bits, only their time differs. With
copy engines, the last stage, gradients over more than two ranks of z are added in another order.
"""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lab.harness import Bench, column
from lab.pictures import describe_origin, group
from stretto.axes import check_sizes, name_grid
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Needs, Option, Ranks, Repeats, Rounds, WarmUp
from stretto.bench.training.runs import Step, TrainingRun, build_stretto, measure
from stretto.bench.training.settings import PADDED_VOCAB, TrainingWorkload
from stretto.models import GPTConfig
from stretto.parallel import Grid, Overlap
from stretto.train.observe.timeline import Interval, copying_streams, is_by_copy_engine, merge, subtract, total

MODEL, SEQ_LEN = "gpt-5b", 2048


@dataclass(frozen=True)
class OverlapSetting:
    """Settings of `python -m lab overlap`."""

    ranks: Ranks = None
    grids: Annotated[str, Option("Grids to measure.")] = "x=2 z=2, data=2 z=2"
    warm_up: WarmUp = 3
    repeats: Repeats = 5
    rounds: Rounds = 3

    def __post_init__(self) -> None:
        if self.ranks is not None:
            parse_grids(self.grids, self.ranks)

    def workload(self) -> TrainingWorkload:
        """The workload that is trained: two sequences a rank."""
        config = GPTConfig.preset(MODEL, max_seq_len=SEQ_LEN, vocab=PADDED_VOCAB)
        return TrainingWorkload(config, 2 * (self.ranks or 1), SEQ_LEN, self.warm_up, self.repeats, self.rounds)


# In the order of Singh's dissertation (section 5.1.4: OAR, ORS, OAG); then the buckets of data parallelism.
STAGES = {
    "none": (none := replace(Overlap.parse(False), copy_engines=False)),
    "+ all_reduce": replace(none, all_reduce=True),
    "+ reduce_scatter": replace(none, all_reduce=True, reduce_scatter=True),
    "+ all_gather": replace(none, all_reduce=True, reduce_scatter=True, all_gather=True),
    "+ data": replace(Overlap(), copy_engines=False),
    "+ copy_engines": Overlap(),
}


@dataclass(frozen=True)
class Row:
    """One more option of overlap switched on, on one grid."""

    grid: str = column("grid")
    overlap: str = column("overlap")
    step_milliseconds: float = column("step (ms)", "{:.1f}")
    faster: float = column("over none", "{:+.1%}")
    tokens_per_second_per_gpu: float = column("tokens/s/GPU", "{:,.0f}")
    exposed_milliseconds: float = column("exposed (ms)", "{:.1f}")
    communication_milliseconds: float = column("communication (ms)", "{:.1f}")
    peak_memory_gib: float = column("peak memory (GiB)", "{:.1f}")
    loss: float = column("loss", "{:.4f}")


def parse_grids(text: str, ranks: int) -> list[dict[str, Any]]:
    """Parse grids written as "z=4, x=2 z=2". Raises ValueError for an invalid grid of that many ranks."""
    grids = []
    for part in text.split(","):
        fields = part.split()
        pairs = [re.fullmatch(r"(data|x|y|z)=(\d+)", field) for field in fields]
        if not all(pairs):
            raise ValueError(f"{part.strip()!r} is not a grid; write grids as 'z=4, x=2 z=2'")
        sizes = check_sizes({pair[1]: int(pair[2]) for pair in pairs if pair}).sizes()
        if prod(sizes.values()) != ranks:
            raise ValueError(f"the grid {name_grid(sizes)} has {prod(sizes.values())} ranks, but {ranks} are used")
        grids.append(sizes)
    return grids


def measure_overlap(workload: TrainingWorkload, ranks: int, grids: str) -> list[dict[str, Any]]:
    """The job of each rank; returns the rows, grid by grid in the order of `STAGES`."""
    world = Grid(data=ranks)  # joins the job
    rows: list[dict[str, Any]] = []
    for sizes in parse_grids(grids, ranks):
        grid, label = Grid(**sizes), name_grid(sizes)
        runs = [
            TrainingRun(f"{label}: {stage}", partial(build_stretto, workload, grid, overlap=overlap))
            for stage, overlap in STAGES.items()
        ]
        measured = measure(runs, workload, world.device, extra=profile_exposed)
        first = measured[0].get("step_milliseconds")
        for stage, row in zip(STAGES, measured, strict=True):
            if first is not None and "step_milliseconds" in row:
                row["faster"] = first / row["step_milliseconds"] - 1
            rows.append({"grid": label, "overlap": stage} | row)
    return rows


PROFILED_STEPS = 2
WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def profile_exposed(step: Step) -> dict[str, Any]:
    """Profile rank 0: exposed_milliseconds and communication_milliseconds a step, None without a GPU. Collective."""
    if not torch.cuda.is_available():
        return {"exposed_milliseconds": None, "communication_milliseconds": None}
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() != 0:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
        return {"exposed_milliseconds": None, "communication_milliseconds": None}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    exposed, communication = exposed_time(events)
    return {
        "exposed_milliseconds": exposed / 1e3 / PROFILED_STEPS,
        "communication_milliseconds": communication / 1e3 / PROFILED_STEPS,
    }


def exposed_time(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns (exposed, all) time of collectives, in the unit of a Chrome trace's events (microseconds).

    Collectives are NCCL's kernels, copies between GPUs, and the kernels around these; other kernels, copies and fills
    are work that may hide them. Where two collectives run at once, the time counts once.
    """
    intervals: dict[bool, list[Interval]] = {True: [], False: []}
    events = list(events)
    copying = copying_streams(events)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in WORK:
            start, is_nccl = float(event["ts"]), "nccl" in str(event["name"]).lower()
            intervals[is_nccl or is_by_copy_engine(event, copying)].append((start, start + float(event["dur"])))
    collectives, work = merge(intervals[True]), merge(intervals[False])
    return total(subtract(collectives, work)), total(collectives)


def plot_overlap(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel a grid: step time of each stage, with its exposed communication (if measured) hatched."""
    from lab.style import drawing, name_bars
    from lab.training.throughput_plot import BAR
    from stretto.report.style import EXPOSED, STRETTO

    rows = [row for row in data["rows"] if "step_milliseconds" in row]
    grids = group(rows, "grid")
    most = max(map(len, grids.values()), default=1)
    has_exposed = any(row.get("exposed_milliseconds") for row in rows)
    with drawing(picture, max(6.0, 4.4 * len(grids)), BAR * most + 0.9) as drawn:
        for panel, (grid, stages) in zip(drawn.panels(1, len(grids))[0], grids.items(), strict=False):
            stages.reverse()
            exposed = [row.get("exposed_milliseconds") or 0.0 for row in stages]
            rest = [row["step_milliseconds"] - part for row, part in zip(stages, exposed, strict=True)]
            places = range(len(stages))
            bars = panel.barh(places, rest, 0.75, label="computation, and what runs beside it", **STRETTO.bar)
            if has_exposed:
                bars = panel.barh(places, exposed, 0.75, left=rest, label="exposed communication", **EXPOSED.bar)
            drawn.label_bars(panel, bars, [f"{row['step_milliseconds']:,.0f}" for row in stages])
            name_bars(panel, places, [row["overlap"] for row in stages])
            panel.set(title=grid, xlabel="ms a step")
        drawn.title = f"What overlap is worth: {data['model']}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = "Each row switches on one more option of [overlap]." + (
            " Exposed: only communication runs." if has_exposed else ""
        )


BENCH = Bench(
    "overlap",
    "Step time without overlap, then with all-reduce, reduce-scatter, all-gather, data's buckets, copy engines.",
    OverlapSetting,
    lambda setting: run_ranks(setting.ranks, measure_overlap, setting.workload(), setting.ranks, setting.grids),
    Row,
    title=lambda setting: f"{MODEL}, {setting.ranks} ranks, {SEQ_LEN} tokens a sequence",
    plot=plot_overlap,
    needs=Needs.RANKS,
    about=lambda setting: {"model": MODEL, "ranks": setting.ranks, "workload": asdict(setting.workload())},
)
