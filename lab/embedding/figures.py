# SPDX-License-Identifier: Apache-2.0
"""`python -m lab embedding-figures`: figures 9, 11, 12 and 13 of Punniyamurthy et al., and section 4.3, of our look-up.

    occupancy   (figure 11) programs on each multiprocessor
    slice       (figure 12) samples of a slice, after which its rank is signalled
    order       (figure 13) slices for other ranks first, and rank 0's first on every rank; how far ranks' times differ
    launches    (4.3) one persistent kernel; one kernel with a program for each slice; such a kernel for each table
    timeline    (figure 9) when rank 0's programs pool and store slices, for others and for itself, and wait

`--nodes 2x1` declares the ranks to be several nodes: then a slice is what is pooled before it is put. Beside it are the
times in which the proxies drop the slices' bytes and send signals alone, so that kernels alone count, and those of one
node, whose ranks store (002, figure 12, and what puts cost a kernel).

Figure 10 is `stretto bench embedding`.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness import Bench, column
from lab.pictures import describe_origin, group
from stretto import ops
from stretto.bench.embedding.run import LookupBatch, make_batch
from stretto.bench.embedding.settings import LookupShape, LookupShapes
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Needs, Option, Ranks, Repeats, WarmUp, require_known
from stretto.memory.network.native import NativeProxy
from stretto.ops.embedding import output_ring, scheduled
from stretto.ops.embedding.forward import count_programs, find_launch_config, look_up_and_send
from stretto.ops.embedding.forward_kernel import pool_and_send
from stretto.ops.embedding.launch_config import LaunchConfig
from stretto.ops.embedding.table_set import find_tables
from stretto.ops.operator import close_workspaces, list_put_channels
from stretto.parallel import Grid
from stretto.tiles.launches import Launches

STUDIES = ("occupancy", "slice", "order", "launches", "timeline")
_MANY = 1 << 16  # programs on a multiprocessor: more than there are slices, so that each has a program of its own
_SHOWN = 32  # programs of a timeline
_TRACE = pool_and_send.arg_names.index("trace")


@dataclass(frozen=True)
class FiguresSetting:
    """Settings of `python -m lab embedding-figures`."""

    case: Annotated[str, Option("BATCHxTABLESxDIMxPOOLING, tables of each rank.")] = "1024x256x256x70"
    rows: Annotated[int, Option("Rows of each table.", least=1)] = 10_000
    studies: Annotated[tuple[str, ...], Option(f"{', '.join(STUDIES)}, with commas.")] = STUDIES
    nodes: Annotated[str, Option("Nodes that the ranks are declared to be, as 2x2; slices alone are studied.")] = ""
    ranks: Ranks = None
    warm_up: WarmUp = 3
    repeats: Repeats = 10

    def __post_init__(self) -> None:
        require_known("study", self.studies, STUDIES)
        if self.nodes and self.studies != ("slice",):
            raise ValueError(f"between nodes, of {', '.join(self.studies)}, slices alone are studied: --studies slice")
        LookupShape.parse(self.case)


@dataclass(frozen=True)
class Row:
    """A way to launch the look-up."""

    study: str = column("study")
    what: str = column("launched")
    milliseconds: float = column("slowest rank (ms)", "{:.3f}")
    relative: float = column("of the default, or of stores", "{:.2f}")
    skew: float = column("ranks differ by", "{:.1%}")
    timeline: dict[str, Any] | None = None


def measure_figures(setting: FiguresSetting, ranks: int) -> list[dict[str, Any]]:
    if setting.nodes:
        os.environ["STRETTO_NODES"] = setting.nodes
    device = Grid(data=ranks, device=None if torch.cuda.is_available() else "cpu").device
    case = LookupShape.parse(setting.case)
    batch = make_batch(case, LookupShapes(rows=setting.rows), device)
    if setting.nodes:
        return _measure_puts(setting, batch, device)
    tables, placement = find_tables(batch.tables, device), batch.placement
    assert dist.group.WORLD is not None
    name = dist.group.WORLD.group_name
    default = find_launch_config(placement, len(batch.tables), batch.indices.numel(), device)

    def look_up(config: LaunchConfig) -> Tensor:
        return look_up_and_send(batch.indices, batch.offsets, tables, None, placement, name, "sum", config=config)

    alone = replace(placement, dims=tuple((case.dim,) for _ in range(ranks)))
    each = [find_tables([table], device) for table in batch.tables]

    def look_up_each() -> None:
        for number, table in enumerate(each):
            offsets = batch.offsets[number * placement.batch : (number + 1) * placement.batch + 1]
            config = default._replace(programs=_MANY)
            look_up_and_send(batch.indices, offsets, table, None, alone, name, "sum", config=config)

    usual = _time(lambda: look_up(default), setting, device)
    rows = []
    for study in setting.studies:
        if study == "timeline":
            rows.append(_trace(partial(look_up, default), default, batch, setting, max(usual)))
            continue
        for what, run in _list_runs(study, default, look_up, look_up_each):
            seconds = _time(run, setting, device)
            rows.append(
                {
                    "study": study,
                    "what": what,
                    "milliseconds": max(seconds) * 1e3,
                    "relative": max(seconds) / max(usual),
                    "skew": max(seconds) / min(seconds) - 1,
                }
            )
    ops.check_indices()
    return rows


def _measure_puts(setting: FiguresSetting, batch: LookupBatch, device: torch.device) -> list[dict[str, Any]]:
    """Time look-ups between nodes, whose vectors for a rank are put in parts of as many as so many samples have, table
    by table, in messages of a slot; with their bytes and, by the native proxy, without, beside look-ups that store.

    A pair of ranks has at least as many slices as signals.
    """
    found: dict[str, list[float]] = {}
    world, samples = dist.get_world_size(), batch.placement.local_batch
    least = output_ring.CHANNELS if device.type == "cuda" else 1
    sizes = [size for size in (4, 8, 16, 32, 64) if samples // size >= least]
    if not sizes:
        raise ValueError(f"{setting.case} has {samples} samples a rank: {4 * least} would do for slices of 4")
    for size in (None, *sizes):
        members = dist.new_group()
        run = partial(ops.embedding_all_to_all, batch.indices, batch.offsets, batch.tables, members)
        with torch.no_grad():
            if size is None:
                with mock.patch.dict(os.environ, STRETTO_NODES=""):
                    found["stores, one node"] = _time(run, setting, device)
            else:
                with (
                    mock.patch.object(scheduled, "_PARTS", samples // size * world),
                    mock.patch.object(scheduled, "_TILE_ROWS", 4),
                ):
                    found[f"{size} samples"] = _time(run, setting, device)
                    for channel in list_put_channels(members.group_name):
                        proxies = [proxy for proxy in channel._endpoint.lanes if isinstance(proxy, NativeProxy)]
                        for proxy in proxies:
                            proxy.drop_payloads(True)
                        if proxies:
                            found[f"{size} samples, bytes dropped"] = _time(run, setting, device)
        ops.check_indices(members)
        close_workspaces(members.group_name)
    stores = max(found["stores, one node"])
    return [
        {
            "study": "slice",
            "what": what,
            "milliseconds": max(seconds) * 1e3,
            "relative": max(seconds) / stores,
            "skew": max(seconds) / min(seconds) - 1,
        }
        for what, seconds in found.items()
    ]


def _trace(
    run: Callable[[], Tensor], config: LaunchConfig, batch: LookupBatch, setting: FiguresSetting, usual: float
) -> dict[str, Any]:
    """Have the kernel note when each slice begins and ends, and each program waits; in microseconds from rank 0's first
    program."""
    placement, device, tables = batch.placement, batch.offsets.device, len(batch.tables)
    tasks = placement.world_size * tables * -(-placement.local_batch // config.slice)
    trace = torch.zeros(tasks + count_programs(config, placement, tables, device), 4, dtype=torch.int64, device=device)
    launch = Launches.__call__

    def launch_traced(self: Launches, kernel: Any, key: Any, programs: int, given: Any, **options: Any) -> None:
        if kernel is pool_and_send:
            key, given = (key, "traced"), (*given[:_TRACE], trace, *given[_TRACE + 1 :])
        launch(self, kernel, key, programs, given, **options)

    with mock.patch.object(Launches, "__call__", launch_traced):
        seconds = _time(run, setting, device)
    words = trace.cpu()
    zero, programs = int(words[tasks:, 0].min()), words[tasks:][:_SHOWN, [0, 1, 3]]
    slices = [
        [program, destination, (begin - zero) / 1e3, (end - zero) / 1e3]
        for program, destination, begin, end in words[:tasks].tolist()
        if program < _SHOWN
    ]
    timeline = {"slices": slices, "programs": ((programs - zero).double() / 1e3).tolist(), "rank": placement.rank}
    times = {"milliseconds": max(seconds) * 1e3, "relative": max(seconds) / usual}
    skew = {"skew": max(seconds) / min(seconds) - 1, "timeline": timeline}
    return {"study": "timeline", "what": "with a clock in the kernel", **times, **skew}


def _list_runs(
    study: str, default: LaunchConfig, look_up: Callable[[LaunchConfig], Tensor], look_up_each: Callable[[], None]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    changed: dict[str, LaunchConfig] = {}
    match study:
        case "occupancy":
            for programs in (1, 2, 4, 8, 16, 32):
                changed[f"{programs} a multiprocessor"] = default._replace(programs=programs)
        case "slice":
            for size in (4, 8, 16, 32, 64, 128, 256):
                if size >= default.bags:
                    changed[f"{size} samples"] = default._replace(slice=size)
        case "order":
            changed |= {order: default._replace(order=order) for order in ("remote_first", "oblivious")}
        case _:
            changed |= {"persistent": default, "a program a slice": default._replace(programs=_MANY)}
    for what, config in changed.items():
        yield what, partial(look_up, config)
    if study == "launches":
        yield "a kernel a table", look_up_each


def _time(run: Callable[[], Any], setting: FiguresSetting, device: torch.device) -> list[float]:
    """Median seconds of each rank, whose calls begin together."""
    for _ in range(setting.warm_up):
        run()
    seconds = []
    for _ in range(setting.repeats):
        dist.barrier()
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, statistics.median(seconds))
    return found


def plot_figures(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel for each study: bars, or the timeline of rank 0's first programs."""
    from lab.style import drawing, name_bars
    from stretto.report.style import STRETTO

    studies = group(data["rows"], "study")
    with drawing(picture, 8, 1.9 * len(studies)) as drawn:
        for panel, (study, rows) in zip(drawn.panels(len(studies), 1)[:, 0], studies.items(), strict=True):
            if rows[0].get("timeline"):
                _draw_timeline(panel, rows[0]["timeline"])
                continue
            bars = panel.barh(range(len(rows)), [row["milliseconds"] for row in rows[::-1]], 0.7, **STRETTO.bar)
            drawn.label_bars(panel, bars, [f"{row['milliseconds']:.3f}" for row in rows[::-1]])
            name_bars(panel, range(len(rows)), [row["what"] for row in rows[::-1]])
            panel.set_xlabel(f"{study}: ms")
        drawn.title = f"The fused look-up, launched in other ways: {data['setting']['case']}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = "Slices, orders and programs of Punniyamurthy et al., figures 9 and 11 to 13, and section 4.3."


def _draw_timeline(panel: Any, timeline: dict[str, Any]) -> None:
    """A line a program: slices for other ranks, own ones, and the wait at the end."""
    from lab.style import PEER
    from stretto.report.style import EXPOSED, STRETTO

    own = timeline["rank"]
    kinds = [
        ("slices for other ranks", STRETTO, [each for each in timeline["slices"] if each[1] != own]),
        ("slices for the rank itself", PEER, [each for each in timeline["slices"] if each[1] == own]),
        ("waiting for other ranks", EXPOSED, [[at, own, *each[1:]] for at, each in enumerate(timeline["programs"])]),
    ]
    for label, look, spans in kinds:
        if spans:
            places, _, begins, ends = zip(*spans, strict=True)
            lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
            panel.barh(places, lengths, 0.8, left=begins, label=label, **look.bar | {"linewidth": 0.2})
    count = len(timeline["programs"])
    panel.set_yticks(range(0, count, max(1, count // 8)))
    panel.set_ylim(-0.6, count - 0.4)
    panel.set_ylabel("program")
    panel.set_xlabel("timeline: microseconds")


BENCH = Bench(
    "embedding-figures",
    "The fused look-up launched in other ways, and a timeline (Punniyamurthy et al., figures 9 and 11 to 13).",
    FiguresSetting,
    lambda setting: run_ranks(setting.ranks, measure_figures, setting, setting.ranks, trains=False),
    Row,
    title=lambda setting: f"Fused look-up, {setting.case}, {setting.ranks} ranks",
    plot=plot_figures,
    needs=Needs.RANKS,
)
