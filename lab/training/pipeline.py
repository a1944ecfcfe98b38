# SPDX-License-Identifier: Apache-2.0
"""`python -m lab pipeline`: a step in pipeline stages that sleep, by schedule, and the timing model's makespan.

Ranks are processes of one machine, whose blocks sleep for their part of a unit instead of computing: F, I and W of a
stage take a unit each. The host's work for an action is a part of its unit, as on a GPU, which computes meanwhile: a
unit begins when the previous one has ended, or when an awaited message has arrived. Messages are real, and arrive a
latency after they were sent. Measured are the order in which ranks compute and the time that they wait, which sleeping
processes show even where they share a few cores.
"""

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.harness import Bench, column
from lab.pictures import describe_origin, group
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Repeats
from stretto.execution import StageOptions
from stretto.parallel import Grid, Pipeline, parallelize
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.pipeline.messages import MessageKey
from stretto.parallel.pipeline.shared_memory_transport import SharedMemoryTransport
from stretto.parallel.state import require_state
from stretto.schedules import (
    PipelineSchedule,
    PipelineTimeline,
    ServeFirst,
    StageCosts,
    StageLinks,
    build_schedule,
    live_micro_batches,
    simulate,
    simulate_message_driven,
)

PIPELINES = ((4, 16), (8, 32))  # stages, one on each process, and micro-batches
UNIT = 0.02  # seconds that F, I and W of a stage sleep each
LATENCIES = (0.0, 0.005)  # seconds that a message takes


@dataclass(frozen=True)
class PipelineSetting:
    """Settings of `python -m lab pipeline`."""

    repeats: Repeats = 3


@dataclass(frozen=True)
class Row:
    """A schedule on one pipeline and link."""

    stages: int = column("stages")
    micro_batches: int = column("micro-batches")
    latency_ms: float = column("latency (ms)", "{:g}")
    schedule: str = column("schedule")
    live: float = column("live")
    units: float = column("measured (units)", "{:.2f}")
    model_units: float = column("model (units)", "{:.2f}")
    to_model: float = column("to the model", "{:.3f}")
    to_1f1b: float = column("to 1f1b", "{:.3f}")


def run_pipelines(setting: PipelineSetting) -> Iterator[Row]:
    """Measure each schedule on each pipeline and link."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # stages sleep, and messages are between processes of the CPU
    for pipe, micro_batches in PIPELINES:
        yield from run_ranks(pipe, measure, setting, pipe, micro_batches)


_BACKWARD_FIRST: ServeFirst = "backward"


@dataclass(frozen=True)
class Case:
    """A schedule and its options. live: the most micro-batches that a rank has in flight, of whole stages."""

    label: str
    schedule: str
    placement: Literal["loops", "v"] = "loops"
    virtual_stages: int = 1
    extra_warm_up: int = 0
    limit: int | None = None
    serve_first: ServeFirst | None = None


class Pace:
    """The time at which a rank's units end: they follow each other, however long the host needs between them."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def waited(self) -> None:
        """Begin the next unit now: its message has just arrived."""
        self.free_at = max(self.free_at, time.perf_counter())

    def spend(self, seconds: float) -> None:
        self.free_at += seconds
        time.sleep(max(0.0, self.free_at - time.perf_counter()))


MIN_WAIT = 2e-4
"""Seconds. A message that is taken in less was there."""


class _SleepForward(torch.autograd.Function):
    """Sleeps in place of a block's forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: "SleepingBlock") -> Tensor:
        block.pace.spend(block.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SleepBackward(torch.autograd.Function):
    """Sleeps in place of a block's backward pass, or of I alone, where W is left for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: "SleepingBlock") -> Tensor:
        ctx.block = block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        block = ctx.block
        deferred = None if block.reducer is None else block.reducer.deferred
        block.pace.spend(block.seconds if deferred is not None else 2 * block.seconds)
        if deferred is not None:
            deferred.append(lambda: block.pace.spend(block.seconds))
        return gradient, None


class SleepingBlock(nn.Module):
    """A block whose F, I and W sleep for `seconds` each."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seconds = seconds
        self.reducer: GradientReducer | None = None
        self.pace = Pace()

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, 8]. The block's real computation precedes each sleep and counts as a part of it."""
        if (
            torch.is_grad_enabled() and not x.requires_grad
        ):  # the model's input: the first block has a backward pass, too
            x = x.detach().requires_grad_()
        return _SleepForward.apply(self.linear(_SleepBackward.apply(x, self)), self)


class SleepingModel(nn.Module):
    """Blocks that sleep, and a loss of no meaning."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock(seconds) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, 8]."""
        for block in self.blocks:
            x = block(x)
        return x.sum()


class DelayedTransport(SharedMemoryTransport):
    """Delivers messages of other ranks `latency` seconds after they were sent. Processes share one clock."""

    latency = 0.0
    pace = Pace()

    def begin_step(self, expected: Any) -> None:
        self.pace.free_at = time.perf_counter()
        self._held: dict[MessageKey, tuple[float, list[Tensor | None]]] = {}  # by key: when it is due, and its tensors
        self._reported: set[MessageKey] = set()
        super().begin_step(expected)

    def send(self, destination: int, key: MessageKey, tensors: Any) -> None:
        """Send a message with the time at which it may be seen."""
        due = 0.0 if destination == self.rank else time.perf_counter() + self.latency
        super().send(destination, key, [*tensors, torch.tensor(due, dtype=torch.float64)])

    def poll(self) -> list[MessageKey]:
        found = self._find_due()
        self._reported.update(found)
        return found

    def wait_any(self) -> MessageKey:
        while not (found := self._find_due()):
            if self._held.keys() - self._reported:
                time.sleep(2e-4)
            else:
                key = super().wait_any()
                self._held[key] = _split(super().take(key))
        self._reported.add(found[0])
        self.pace.waited()
        return found[0]

    def take(self, key: MessageKey, source: int | None = None) -> list[Tensor | None]:
        began = time.perf_counter()
        due, tensors = self._held.pop(key) if key in self._held else _split(super().take(key, source))
        self._reported.discard(key)
        time.sleep(max(0.0, due - time.perf_counter()))
        if time.perf_counter() - began > MIN_WAIT:
            self.pace.waited()
        return tensors

    def _find_due(self) -> list[MessageKey]:
        """Messages that are due and were not reported, the first one first."""
        for key in super().poll():
            self._held[key] = _split(super().take(key))
        now = time.perf_counter()
        due = sorted((when, key) for key, (when, _) in self._held.items() if when <= now and key not in self._reported)
        return [key for _, key in due]


def _split(message: list[Tensor | None]) -> tuple[float, list[Tensor | None]]:
    *tensors, due = message
    assert due is not None
    return float(due), tensors


def list_cases(pipe: int, micro_batches: int, latency: float) -> list[Case]:
    """Each schedule; message-driven as the paper has it and as planned, and 1F1B with as many live micro-batches.

    latency: in units.
    """
    limit, serve_first = plan_message_driven(pipe, micro_batches, latency)
    cases = [
        Case("gpipe", "gpipe"),
        Case("1f1b", "1f1b"),
        Case("interleaved, 2 stages a rank", "interleaved", virtual_stages=2),
        Case("zb-h1", "zb-h1"),
        Case("zb-v", "zb-v", "v", 2),
        Case("dualpipe-v", "dualpipe-v", "v", 2),
        Case(f"message-driven, limit {pipe}, arrival", "message-driven", limit=pipe, serve_first="arrival"),
        Case(f"message-driven, limit {pipe}, backward", "message-driven", limit=pipe, serve_first="backward"),
    ]
    if limit != pipe:
        name = f"message-driven as planned: limit {limit}, {serve_first}"
        cases.append(Case(name, "message-driven", limit=limit, serve_first=serve_first))
        cases.append(Case(f"1f1b, warm-up of {limit}", "1f1b", extra_warm_up=limit - pipe))
    return cases


def plan_message_driven(pipe: int, micro_batches: int, latency: float) -> tuple[int, ServeFirst]:
    """The limit, at most twice the stages, and the order (`serve_first`) with the shortest step in the timing model."""
    costs, links = StageCosts.uniform(pipe), StageLinks(latency)
    orders: tuple[ServeFirst, ...] = ("backward", "arrival")

    def makespan(limit: int, order: ServeFirst) -> float:
        return simulate_message_driven(micro_batches, costs, links, limit=limit, serve_first=order).makespan

    options = [
        (round(makespan(limit, order), 6), limit, order) for limit in range(pipe, 2 * pipe + 1) for order in orders
    ]
    _, limit, order = min(options, key=lambda option: option[:2])
    return limit, order


def model_of(case: Case, pipe: int, micro_batches: int, latency: float) -> PipelineTimeline:
    """The timing model's prediction of a case, in units."""
    links = StageLinks(latency)
    if case.schedule == "message-driven":
        costs = StageCosts.uniform(pipe)
        return simulate_message_driven(
            micro_batches, costs, links, limit=case.limit, serve_first=case.serve_first or _BACKWARD_FIRST
        )
    share = 1 / case.virtual_stages
    costs = StageCosts.uniform(pipe * case.virtual_stages, share, share, share)
    return simulate(_schedule(case, pipe, micro_batches), costs, links)


def _schedule(case: Case, pipe: int, micro_batches: int) -> PipelineSchedule:
    return build_schedule(case.schedule, pipe, micro_batches, case.virtual_stages, case.extra_warm_up)


def measure(setting: PipelineSetting, pipe: int, micro_batches: int) -> list[Row]:
    """The job of each rank: every case, in turn, `repeats` times."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    grid = Grid(pipe=pipe, device="cpu")
    rows: list[Row] = []
    for latency in LATENCIES:
        cases = list_cases(pipe, micro_batches, latency / UNIT)
        runs = {case: prepare_pipeline(case, grid, latency) for case in cases}
        x = torch.ones(micro_batches, 8)
        for pipeline in runs.values():
            pipeline.step(x)  # connects, and exchanges shapes
        times: dict[Case, list[float]] = {case: [] for case in cases}
        for _ in range(setting.repeats):
            for case, pipeline in runs.items():
                dist.barrier()
                pipeline.step(x)
                times[case].append(_makespan(pipeline))
        for pipeline in runs.values():
            pipeline.close()
        units = {case: statistics.median(found) / UNIT for case, found in times.items()}
        base = next(units[case] for case in cases if case.label == "1f1b")
        for case, measured in units.items():
            timeline = model_of(case, pipe, micro_batches, latency / UNIT)
            live = max(live_micro_batches(timeline.schedule).ranks) / case.virtual_stages
            about = pipe, micro_batches, latency * 1e3, case.label, live
            predicted = timeline.makespan
            rows.append(Row(*about, measured, predicted, to_model=measured / predicted, to_1f1b=measured / base))
    return rows


def prepare_pipeline(case: Case, grid: Grid, latency: float) -> Pipeline:
    """Make the pipeline of a case, of stages that sleep `UNIT` seconds for each of F, I and W."""
    pipe = grid.size("pipe")
    torch.manual_seed(0)
    pace = Pace()
    model = SleepingModel(2 * pipe, UNIT / 2)
    stages = StageOptions(case.virtual_stages, case.placement)
    parallelize(model, grid, roles={"blocks.*.linear": "colwise"}, stages=stages)
    for module in model.modules():
        if isinstance(module, SleepingBlock):
            module.reducer = require_state(model, "this bench").gradient_reducer
            module.pace = pace
    transport = DelayedTransport(grid.group("pipe"), "cpu")
    transport.latency, transport.pace = latency, pace
    return Pipeline(
        model,
        grid,
        schedule=case.schedule,
        micro_batch_size=1,
        limit=case.limit,
        serve_first=case.serve_first,
        extra_warm_up=case.extra_warm_up,
        transport=transport,
    )


def _makespan(pipeline: Pipeline) -> float:
    """Seconds from the first action of any rank to the end of the last one."""
    bounds = torch.tensor([-pipeline.computed[0].start, pipeline.computed[-1].end], dtype=torch.float64)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    return float(bounds.sum())


def plot_pipeline(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel for each pipeline and latency: measured makespan and the timing model's, by schedule."""
    from lab.style import PEER, drawing
    from stretto.report.style import STRETTO

    rows_of = group(data["rows"], "stages", "micro_batches", "latency_ms")
    most = max(map(len, rows_of.values()))
    unit = data["setting"]["unit"] * 1e3
    columns = min(2, len(rows_of))
    lines = -(-len(rows_of) // columns)
    with drawing(picture, 5.2 * columns, (1.2 + 0.3 * most) * lines) as drawn:
        panels = list(drawn.panels(lines, columns).flat)
        for panel in panels[len(rows_of) :]:
            panel.remove()
        for panel, (key, rows) in zip(panels, rows_of.items(), strict=False):
            rows.reverse()
            places = range(len(rows))
            panel.barh(places, [row["units"] for row in rows], height=0.6, color=STRETTO.colour, label="measured")
            panel.scatter(
                [row["model_units"] for row in rows], places, label="timing model", color=PEER.colour, zorder=3
            )
            panel.set_yticks(places, [row["schedule"] for row in rows])
            panel.set(xlabel=f"units of {unit:g} ms", title=f"{key[0]} x {key[1]}, {key[2]:g} ms")
        drawn.title = "A step in pipeline stages that sleep"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Panels: stages x micro-batches, and the latency of messages. F, I and W of a stage take a unit of "
            f"{unit:g} ms each."
        )


BENCH = Bench(
    "pipeline",
    "Pipeline steps with stages that sleep, by schedule, compared with the timing model.",
    PipelineSetting,
    run_pipelines,
    Row,
    title="A step in pipeline stages that sleep",
    plot=plot_pipeline,
    about=lambda setting: {"setting": {"repeats": setting.repeats, "unit": UNIT}},
)
