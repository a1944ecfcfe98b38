# SPDX-License-Identifier: Apache-2.0
"""`python -m lab embedding-studies`: launch configs of the fused look-up, and its programs on a time axis."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness import Bench, column
from lab.pictures import describe_origin, group
from stretto import ops
from stretto.bench.embedding.peers import LookupBatch
from stretto.bench.embedding.run import make_batch
from stretto.bench.embedding.settings import LookupShapes
from stretto.bench.harness import run_ranks, time_steps
from stretto.bench.settings import Needs, Option, Ranks, require_known
from stretto.ops.embedding.forward import count_trace, find_launch_config, look_up_and_send
from stretto.ops.embedding.forward_kernel import ORDERS, TRACE_WORDS
from stretto.ops.embedding.launch_config import LaunchConfig
from stretto.ops.embedding.table_set import find_tables
from stretto.parallel import Grid

STUDIES = ("orders", "slices", "occupancy", "timeline")
SHOWN_PROGRAMS = 32


@dataclass(frozen=True)
class EmbeddingStudiesSetting(LookupShapes):
    """Settings of the study of look-ups."""

    studies: Annotated[tuple[str, ...], Option("orders, slices, occupancy, timeline, with commas.")] = STUDIES
    ranks: Ranks = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known("study", self.studies, STUDIES)


@dataclass(frozen=True)
class Row:
    """The time of the look-up with one launch config; of the timeline, that of its longest program."""

    case: str = column("batch x tables x dim x pooling")
    what: str = column("what")
    setting: str = column("setting")
    stretto: float = column("Stretto (ms)", "{:.3f}")
    skew: float | None = column("skew", "{:.1%}", default=None)
    timeline: dict[str, Any] | None = None


def _measure_all(setting: EmbeddingStudiesSetting) -> list[Row]:
    """The job of each rank."""
    assert setting.ranks is not None
    device = Grid(data=setting.ranks, device=None if torch.cuda.is_available() else "cpu").device
    rows = []
    for case in setting.cases:
        batch = make_batch(case, setting, device)
        for study in setting.studies:
            found = trace_programs(batch) if study == "timeline" else study_launch_configs(batch, study)
            rows += [Row(str(case), **row) for row in found]
        ops.check_indices()
    return rows


def study_launch_configs(batch: LookupBatch, study: str) -> list[dict[str, Any]]:
    """The fused look-up with other launch configs; the skew is how much longer the slowest rank takes than the fastest.

    orders: which slices come first. slices: samples of a task. occupancy: programs on a multiprocessor.
    """
    placement, device = batch.placement, batch.offsets.device
    chosen = find_launch_config(placement, len(batch.tables), batch.indices.numel(), device)
    configs: dict[str, LaunchConfig]
    match study:
        case "orders":
            configs = {order: chosen._replace(order=order) for order in ORDERS}
        case "slices":
            sizes = (1, 2, 4, 8, 16, 32, 64, 128)
            configs = {f"slice {size}": chosen._replace(slice=size) for size in sizes if size >= chosen.bags}
        case _:
            counts = (2, 4, 8, 12, 16, 20, 24, 32)
            tiles = ((1, 4), (1, 8), (1, 16), (2, 4), (4, 2), (8, 1))
            configs = {f"{count} programs": chosen._replace(programs=count) for count in counts}
            for bags, depth in tiles:
                size = max(chosen.slice, bags)
                configs[f"tile {bags} x {depth}"] = chosen._replace(bags=bags, rows=depth, slice=size)
    rows = []
    for name, config in configs.items():
        run = partial(_launch, batch, config)
        times = _time_each_rank(run, device)
        slowest, fastest = max(times), min(times)
        chosen_mark = " (chosen)" if config == chosen else ""
        rows.append({"what": study, "setting": name + chosen_mark, "stretto": slowest, "skew": slowest / fastest - 1})
    return rows


def _launch(batch: LookupBatch, config: LaunchConfig, trace: Tensor | None = None) -> Tensor:
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    tables = find_tables(batch.tables, batch.offsets.device)
    return look_up_and_send(
        batch.indices, batch.offsets, tables, None, batch.placement, name, "sum", config=config, trace=trace
    )


def _time_each_rank(run: Callable[[], Any], device: torch.device, repeats: int = 9) -> list[float]:
    """Median milliseconds of a call on each rank; a barrier precedes each call, so that all ranks start together."""
    seconds = []
    for _ in range(repeats if device.type == "cuda" else 1):
        dist.barrier()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(end))
        else:
            seconds.append(1e3 * time_steps(run, warm_up=0, repeats=1))
    every = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([sorted(seconds)[len(seconds) // 2]], device=device))
    return [float(value) for value in every]


def trace_programs(batch: LookupBatch) -> list[dict[str, Any]]:
    """Rank 0's first programs on a time axis (figure 9): their slices for others and own ones, and how they wait."""
    placement, device = batch.placement, batch.offsets.device
    config = find_launch_config(placement, len(batch.tables), batch.indices.numel(), device)
    size = count_trace(config, placement, len(batch.tables), device)
    trace = torch.zeros(size, TRACE_WORDS, dtype=torch.int64, device=device)
    for _ in range(3):
        dist.barrier()
        _launch(batch, config, trace)
    if device.type == "cuda":
        torch.cuda.synchronize()
    tasks = placement.world_size * len(batch.tables) * -(-placement.local_batch // config.slice)
    words = trace.cpu()
    programs = words[tasks : tasks + SHOWN_PROGRAMS, :3]
    zero = int(words[tasks:, 0].min())
    slices = words[:tasks][words[:tasks, 0] < SHOWN_PROGRAMS]
    timeline = {
        "rank": placement.rank,
        "programs": ((programs - zero).double() / 1e3).tolist(),
        "slices": [
            [program, destination, (begin - zero) / 1e3, (end - zero) / 1e3]
            for program, destination, begin, end in slices.tolist()
        ],
        "milliseconds": float((words[tasks:, 2].max() - zero) / 1e6),
    }
    return [{"what": "timeline", "setting": str(config), "stretto": timeline["milliseconds"], "timeline": timeline}]


def plot_studies(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel for each study of each case."""
    from lab.style import drawing

    panels = group(data["rows"], "what", "case")
    width = max(8.5, *(1.3 * len(rows) for rows in panels.values()))
    with drawing(picture, width, 2.3 * len(panels)) as drawn:
        for panel, ((what, case), rows) in zip(drawn.panels(len(panels), 1)[:, 0], panels.items(), strict=True):
            if what == "timeline":
                _plot_timeline(panel, case, rows[-1]["timeline"])
            else:
                _plot_study(drawn, panel, what, case, rows)
        drawn.title = f"Launch configs of embedding look-ups: {data['ranks']} ranks, {data['dtype']}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Skew: how much longer the slowest rank takes than the fastest. A program is an instance of the kernel, "
            "and a slice the part of the batch that it sends as one."
        )


def _plot_study(drawn: Any, panel: Any, what: str, case: str, rows: list[Mapping[str, Any]]) -> None:
    """Bars of milliseconds, one a setting, labelled with the skew between ranks."""
    from lab.style import name_bars
    from stretto.report.style import STRETTO

    bars = panel.bar(range(len(rows)), [row["stretto"] for row in rows], 0.6, **STRETTO.bar)
    drawn.label_bars(panel, bars, [f"skew {row['skew']:.1%}" for row in rows])
    names = [str(row["setting"]).replace(", ", ",\n") for row in rows]
    name_bars(panel, range(len(rows)), names, is_horizontal=False)
    panel.set_xlim(-0.5, len(rows) - 0.5)
    panel.set_ylabel(f"{what} ({case}),\nms")


def _plot_timeline(panel: Any, case: str, timeline: dict[str, Any]) -> None:
    """Draw a line a program over microseconds: slices for other ranks, own slices, and the wait at the end."""
    from lab.style import PEER
    from stretto.report.style import EXPOSED, STRETTO

    kinds = (
        ("slices for other ranks", STRETTO, [each for each in timeline["slices"] if each[1] != timeline["rank"]]),
        ("slices for the rank itself", PEER, [each for each in timeline["slices"] if each[1] == timeline["rank"]]),
    )
    for label, look, slices in kinds:
        places, begins, ends = ([each[index] for each in slices] for index in (0, 2, 3))
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if slices:
            style = look.bar | {"linewidth": 0.2}
            panel.barh(places, lengths, 0.8, left=begins, label=label, **style)
    waits = [(program, begin, end - begin) for program, (_, begin, end) in enumerate(timeline["programs"])]
    places, begins, lengths = ([each[index] for each in waits] for index in range(3))
    panel.barh(places, lengths, 0.8, left=begins, label="waiting for other ranks", **EXPOSED.bar)
    panel.set_xlabel("microseconds")
    panel.set_yticks(range(0, len(waits), max(1, len(waits) // 8)))
    panel.set_ylim(-0.6, len(waits) - 0.4)
    panel.set_ylabel(f"program\n({case})")


BENCH = Bench(
    "embedding-studies",
    "The fused look-up's launch configs (orders, slices, occupancy), and its programs on a time axis.",
    EmbeddingStudiesSetting,
    lambda setting: run_ranks(setting.ranks, _measure_all, setting, trains=False),
    Row,
    title=lambda setting: f"Launch configs of embedding look-ups, {setting.ranks} ranks",
    plot=plot_studies,
    needs=Needs.RANKS,
    about=lambda setting: {"ranks": setting.ranks, "dtype": setting.dtype},
)
