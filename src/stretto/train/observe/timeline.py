# SPDX-License-Identifier: Apache-2.0
"""Reads a trace into a timeline: how much of a step is computation, communication by axis, exposed, or idle.

A trace is Chrome's (Perfetto's) JSON, as torch.profiler writes it, with a key "stretto" that `observe.tracing` adds:
{"groups": {a process group's name: its axis}, "rank": this one, "grid": {axis: size}, "layers": of the model here}.

On a GPU, kernels and copies within it are computation, and NCCL's kernels are communication over their group's axis.
Copies between the host and the GPU are neither, and have a row for each direction. A collective's kernel also waits for
slower ranks, so their delay counts as communication. On a CPU there are no kernels: operators (aten) are computation,
and the work of gloo's threads is communication; before the first step each axis communicates alone under its own mark,
which identifies its threads.

What a mixture of experts' layers compute (operators within their mark, those of the backward pass that belong to them,
and the kernels of both) has a row in addition to that of all computation.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stretto.axes import EXPERT, EXPERT_DATA, EXPERT_Z, INNER_TO_OUTER, REPLICAS, SHARDS
from stretto.cluster import read_bounded
from stretto.train.observe.messages import SentMessage, match_gloo, read_kernel

Interval = tuple[float, float]  # start and end; half-open, so that neighbours do not overlap
Intervals = tuple[Interval, ...]

TRACE_FILE = "trace.json"
MAX_TRACE_BYTES = 4 << 30
COMPUTE = "compute"
EXPERTS = "experts"  # the part of computation that is in a mixture of experts' experts
OTHER = "other"  # communication over more than one axis, such as the gradient's norm, or over none of the grid's
TO_DEVICE, TO_HOST = HOST_COPIES = ("host to device", "device to host")
BUBBLE = "bubble"  # of a pipeline: the rank waits for a message that was not sent yet
AXES = (*INNER_TO_OUTER, EXPERT)
# What experts' parameters send over what expert leaves of an axis, and gradients over data and context.
ROW_OF = {EXPERT_DATA: "data", EXPERT_Z: "z", REPLICAS: "data", SHARDS: "z"}
ROWS = (COMPUTE, EXPERTS, *AXES, OTHER, *HOST_COPIES, BUBBLE)
# Copy engines communicate over z, and over context in its attention; these kernels start their copies, wait for them,
# and sum the received data.
COPY_ENGINE_AXIS = "z"
_ATTENTION_OVER_CONTEXT = ("_ContextAttention", "stretto::context_attention")  # begin the names of its operators
COPY_ENGINE_KERNELS = ("begin_call", "wait_for_all", "wait_for_channel", "begin_scatter", "sum_parts")

STEP_MARK, GROUP_MARK = "stretto step ", "stretto group "
_STEP = re.compile(re.escape(STEP_MARK) + r"(\d{1,18})")
_WAIT = re.compile(r"stretto waited (\d{1,12}\.\d{1,12}) (\d{1,12}\.\d{1,12})")  # stretto.parallel.pipeline marks them
_EXPERTS = "stretto experts"  # stretto.parallel.comm.collectives marks them
_LATEST = 1e18  # microseconds
_IDS = ("External id", "correlation", "stream", "Sequence number")  # of an event's arguments
_COPY_DIRECTION = re.compile(r"HtoD|DtoH")  # in "Memcpy HtoD (Pinned -> Device)"


@dataclass(frozen=True)
class Span:
    """A kernel, copy or operator that ran: its row, its name, start and end in seconds after the first step's start.

    sent: of a collective, what it sends; None if the trace does not have it.
    """

    row: str
    name: str
    start: float
    end: float
    sent: SentMessage | None = None


@dataclass(frozen=True)
class TracedStep:
    """A traced step: its number, start and end in seconds after the first step's start."""

    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One rank's traced steps. All durations are seconds per step: the mean over the traced steps.

    host: in which the host launches what a GPU runs: its steps without its waits; None where a trace has no GPU.
    layers: of the model on this rank; 0 where a trace does not say it.
    """

    grid: Mapping[str, int]
    rank: int
    steps: tuple[TracedStep, ...]
    spans: tuple[Span, ...]
    host: float | None = None
    layers: int = 0

    @property
    def rows(self) -> tuple[str, ...]:
        """Computation, the axes that communicate, and host copies, in the order in which a plot draws them."""
        there = {span.row for span in self.spans}
        return tuple(row for row in ROWS if row in there or row == COMPUTE)

    def busy(self, row: str) -> Intervals:
        """The times at which anything in a row runs."""
        return self._busy.get(row, ())

    def exposed(self, row: str) -> Intervals:
        """The times at which a collective of an axis, or a copy of a direction, runs and no computation does."""
        return subtract(self.busy(row), self.busy(COMPUTE))

    @property
    def step_time(self) -> float:
        """Seconds per step."""
        return (self.steps[-1].end - self.steps[0].start) / len(self.steps)

    @property
    def compute(self) -> float:
        """Seconds per step in which computation runs."""
        return self._a_step(self.busy(COMPUTE))

    @property
    def experts(self) -> float:
        """Seconds per step of the computation in experts."""
        return self._a_step(self.busy(EXPERTS))

    @property
    def communication(self) -> dict[str, float]:
        """Seconds per step in which an axis's collectives run, for every axis, and for "other" if it occurs."""
        return {row: self._a_step(self.busy(row)) for row in self._communication_rows}

    @property
    def exposed_by_axis(self) -> dict[str, float]:
        """Exposed communication: seconds per step in which an axis's collectives run and no computation does."""
        return {row: self._a_step(self.exposed(row)) for row in self._communication_rows}

    @property
    def exposed_total(self) -> float:
        """Seconds per step in which only communication runs. Time in which two axes are exposed counts once."""
        return self._a_step(merge(part for row in self._communication_rows for part in self.exposed(row)))

    @property
    def host_copies(self) -> dict[str, float]:
        """Seconds per step in which copies between host and device run, by direction."""
        return {row: self._a_step(self.busy(row)) for row in HOST_COPIES}

    @property
    def exposed_host_copies(self) -> dict[str, float]:
        """Seconds per step in which copies between host and device run and no computation does, by direction."""
        return {row: self._a_step(self.exposed(row)) for row in HOST_COPIES}

    @property
    def bubble(self) -> float:
        """Seconds per step in which a pipeline stage computes nothing, since a message was not sent yet."""
        return self._a_step(self.exposed(BUBBLE))

    @property
    def idle(self) -> float:
        """Seconds per step in which nothing runs: no computation, communication or copy."""
        return self.step_time - self._a_step(merge(part for row in self.rows for part in self.busy(row)))

    @property
    def host_per_layer(self) -> float | None:
        """The host's seconds per step for each layer, embeddings, loss and optimizer shared out among them."""
        return None if self.host is None or not self.layers else self.host / self.layers

    def summary(self) -> dict[str, Any]:
        """The numbers for `summary.json`, in seconds per step."""
        return (
            {
                "traced_steps": [step.number for step in self.steps],
                "traced_step_time": self.step_time,
                "compute": self.compute,
                "communication": self.communication,
                "exposed": self.exposed_by_axis,
                "exposed_total": self.exposed_total,
                "host_copies": self.host_copies,
                "exposed_host_copies": self.exposed_host_copies,
                "idle": self.idle,
            }
            | {row: getattr(self, row) for row in (EXPERTS, BUBBLE) if row in self.rows}
            | {key: getattr(self, key) for key in ("host", "host_per_layer") if getattr(self, key) is not None}
        )

    @property
    def _communication_rows(self) -> tuple[str, ...]:
        return (*INNER_TO_OUTER, *(row for row in (EXPERT, OTHER) if row in self.rows))

    @cached_property
    def _busy(self) -> dict[str, Intervals]:
        rows: dict[str, list[tuple[float, float]]] = {}
        for span in self.spans:
            rows.setdefault(span.row, []).append((span.start, span.end))
        return {row: merge(parts) for row, parts in rows.items()}

    def _a_step(self, intervals: Intervals) -> float:
        return total(intervals) / len(self.steps)


def read_timeline(trace: str | Path | Mapping[str, Any]) -> Timeline:
    """Read the timeline of a trace: a file, or its content. Raises ValueError for traces that Stretto did not write."""
    where = str(trace) if isinstance(trace, str | Path) else "the trace"
    content, events = read_events(trace)
    about: Any = content.get("stretto")
    if not _is_about(about):
        lacks = "has no key 'stretto'" if about is None else f"has a key 'stretto' that is damaged, {str(about)[:80]!r}"
        raise ValueError(f"{where} {lacks}: `stretto train --trace` writes traces that have it")
    is_gpu = any(event.get("cat") == "kernel" for event in events)
    steps = _steps(events, "gpu_user_annotation") or _steps(events, "user_annotation")
    if not steps:
        raise ValueError(f"{where} has no step: `stretto train --trace` marks those that it traces")
    experts = _expert_operators(events)
    spans = _gpu_spans(events, about["groups"], experts) if is_gpu else _cpu_spans(events, experts)
    spans += _waits(events)
    origin, end = steps[0].start, steps[-1].end
    return Timeline(
        grid=dict(about["grid"]),
        rank=about["rank"],
        steps=tuple(TracedStep(step.number, step.start - origin, step.end - origin) for step in steps),
        spans=tuple(
            replace(span, start=max(span.start, origin) - origin, end=min(span.end, end) - origin)
            for span in sorted(spans, key=lambda span: span.start)
            if span.start < end and span.end > origin
        ),
        host=_host_seconds(events) if is_gpu else None,
        layers=about.get("layers", 0),
    )


def read_events(trace: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """Read any trace of torch.profiler, a file or its content: the content, and the events that have a time.

    Raises ValueError that names the file, and the event that torch.profiler does not write; and OSError.
    """
    where, content = "the trace", trace
    if isinstance(trace, str | Path):
        where, text = str(trace), read_bounded(Path(trace), MAX_TRACE_BYTES, "a trace")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is no trace of torch.profiler: {error}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("traceEvents"), list):
        raise ValueError(f"{where} is no trace of torch.profiler: it is no object with a list 'traceEvents'")
    timed: list[Mapping[str, Any]] = []
    for number, event in enumerate(content["traceEvents"]):
        if not isinstance(event, Mapping) or not _is_event(event):
            raise ValueError(f"{where} is no trace of torch.profiler: traceEvents[{number}] is {str(event)[:80]!r}")
        if "ts" in event:
            timed.append({"tid": 0, **event})  # counters are of no thread
    return content, timed


def _is_event(event: Mapping[str, Any]) -> bool:
    """Check what is read of an event: it has a name, and where it has a time, a thread; times are finite."""
    about = event.get("args", {})
    return (
        isinstance(event.get("name"), str)
        and isinstance(event.get("cat", ""), str)
        and all(type(event.get(key, 0)) in (int, float) and abs(event.get(key, 0)) < _LATEST for key in ("ts", "dur"))
        and isinstance(about, Mapping)
        and all(isinstance(each, int | str) for each in (event.get("tid", 0), *(about.get(key, 0) for key in _IDS)))
    )


def _is_about(about: Any) -> bool:
    """Check what `observe.tracing` adds to a trace."""
    if not isinstance(about, Mapping):
        return False
    groups, grid = about.get("groups"), about.get("grid")
    return (
        isinstance(groups, Mapping)
        and all(isinstance(axis, str) for axis in groups.values())
        and isinstance(grid, Mapping)
        and all(type(number) is int for number in (*grid.values(), about.get("rank"), about.get("layers", 0)))
    )


def _interval(event: Mapping[str, Any]) -> tuple[float, float]:
    """Start and end of an event in seconds; the file has microseconds."""
    return event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6


def _steps(events: Iterable[Mapping[str, Any]], category: str) -> list[TracedStep]:
    """Find the steps by their marks: the host's, or those that span the GPU's work for the host's."""
    marks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == category and (match := _STEP.fullmatch(event["name"])):
            marks.setdefault(int(match[1]), []).append(_interval(event))
    return [
        TracedStep(number, min(start for start, _ in parts), max(end for _, end in parts))
        for number, parts in sorted(marks.items())
    ]


def _host_seconds(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Seconds per step of the host's marks, without its waits for the GPU; None for a trace without such marks."""
    steps = _steps(events, "user_annotation")
    waits = merge(
        _interval(event) for event in events if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]
    )
    return total(subtract(merge((step.start, step.end) for step in steps), waits)) / len(steps) if steps else None


def _expert_operators(events: Iterable[Mapping[str, Any]]) -> set[Any]:
    """The ids of the operators that experts run: within their marks, and in the backward pass of such operators.

    A node of autograd has the sequence number of the operator that has made it.
    """
    operators = [event for event in events if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})]
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == _EXPERTS]
    numbers = {_sequence_number(event) for event in _within(operators, marks)} - {None}
    nodes = [
        event
        for event in operators
        if event["name"].startswith("autograd::engine::evaluate_function") and _sequence_number(event) in numbers
    ]
    return {event["args"]["External id"] for event in _within(operators, [*marks, *nodes])}


def _operators_over_context(events: Iterable[Mapping[str, Any]]) -> set[Any]:
    """The ids of the operators of attention over context, and of those within them."""
    operators = [event for event in events if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})]
    outer = [event for event in operators if event["name"].startswith(_ATTENTION_OVER_CONTEXT)]
    return {event["args"]["External id"] for event in _within(operators, outer)}


def _sequence_number(event: Mapping[str, Any]) -> Any:
    return event["args"].get("Sequence number")


def _within(events: Iterable[Mapping[str, Any]], outer: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The events that begin within one of the outer events of their thread."""
    spans: dict[Any, list[Interval]] = {}
    for event in outer:
        spans.setdefault(event["tid"], []).append(_interval(event))
    merged = {thread: merge(parts) for thread, parts in spans.items()}
    starts = {thread: [start for start, _ in parts] for thread, parts in merged.items()}
    for event in events:
        if (thread := event["tid"]) in merged:
            begin, _ = _interval(event)
            place = bisect_right(starts[thread], begin) - 1
            if place >= 0 and begin < merged[thread][place][1]:
                yield event


def _gpu_spans(events: Iterable[Mapping[str, Any]], groups: Mapping[str, str], experts: Collection[Any]) -> list[Span]:
    """Collect kernels and copies. NCCL's group is named by the kernel's event, or by the call that launched it.

    experts: the ids of experts' operators, whose kernels also have a separate row.
    """
    calls = {
        event["args"]["External id"]: event["args"]
        for event in events
        if event["name"] == "record_param_comms" and "External id" in event.get("args", {})
    }
    spans, copying, over_context = [], copying_streams(events), _operators_over_context(events)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            about = event.get("args", {})
            row, sent = COMPUTE, None
            if event.get("cat") == "gpu_memcpy" and (direction := _COPY_DIRECTION.search(event["name"])):
                row = {"HtoD": TO_DEVICE, "DtoH": TO_HOST}[direction[0]]
            elif is_by_copy_engine(event, copying):
                row = "context" if about.get("External id") in over_context else COPY_ENGINE_AXIS
            elif event["name"].startswith("nccl") or "Collective name" in about:
                about = calls.get(about.get("External id"), {}) | about
                row, sent = _axis_of_group(about, groups), read_kernel(about)
            rows = [row, EXPERTS] if row == COMPUTE and about.get("External id") in experts else [row]
            spans += [Span(each, event["name"], *_interval(event), sent) for each in rows]
    return spans


def _waits(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Collect the waits of a pipeline stage, whose ends are marked: bubbles, and messages in flight."""
    spans = []
    for event in events:
        if event.get("cat") == "user_annotation" and (found := _WAIT.fullmatch(event["name"])):
            end, _ = _interval(event)
            bubble, message = map(float, found.groups())
            spans.append(Span(BUBBLE, "bubble", end - message - bubble, end - message))
            spans.append(Span("pipe", "message", end - message, end))
    return spans


def copying_streams(events: Iterable[Mapping[str, Any]]) -> set[Any]:
    """Find the GPU's streams on which copies run and kernels never do, such as the copy engines' of `stretto.tiles`."""
    streams: dict[str, set[Any]] = {"kernel": set(), "gpu_memcpy": set()}
    for event in events:
        if event.get("cat") in streams:
            streams[event["cat"]].add(event.get("args", {}).get("stream"))
    return streams["gpu_memcpy"] - streams["kernel"]


def is_by_copy_engine(event: Mapping[str, Any], copying: Collection[Any]) -> bool:
    """Check whether a kernel or copy belongs to the copy engines' communication. copying: `copying_streams(events)`.

    A copy between two GPUs is named as one within a device (DtoD) or between peers (PtoP), depending on how the driver
    has mapped the memory.
    """
    if event.get("cat") != "gpu_memcpy":
        return event["name"] in COPY_ENGINE_KERNELS
    is_within = "DtoD" in event["name"] and event.get("args", {}).get("stream") in copying
    return is_within or "PtoP" in event["name"]


def _axis_of_group(about: Mapping[str, Any], groups: Mapping[str, str]) -> str:
    described = str(about.get("Process Group Description", "")).removeprefix("mesh_")
    axis = groups.get(str(about.get("Process Group Name")), described)
    axis = ROW_OF.get(axis, axis)
    return axis if axis in AXES else OTHER


def _cpu_spans(events: list[Mapping[str, Any]], experts: Collection[Any]) -> list[Span]:
    """Collect the outermost operators, those of experts also in a separate row, and the work of gloo's threads."""
    gloo = [event for event in events if event["name"].startswith("gloo:")]
    axes = _axes_of_threads(events, gloo)
    sent = match_gloo(events, gloo, axes)
    spans = [
        Span(axes.get(event["tid"], OTHER), event["name"].removeprefix("gloo:"), *_interval(event), sent.get(id(event)))
        for event in gloo
    ]
    gloo_threads = {event["tid"] for event in gloo}
    operators = sorted(
        (event for event in events if event.get("cat") == "cpu_op" and event["tid"] not in gloo_threads),
        key=lambda event: (event["ts"], -event.get("dur", 0)),
    )
    busy_until: dict[Any, float] = {}
    for event in operators:
        (start, end), thread = _interval(event), event["tid"]
        is_collective = event["name"].startswith("c10d::")  # hands the work to gloo; the operators in it do not count
        if (is_collective or event["name"].startswith("aten::")) and start >= busy_until.get(thread, start):
            busy_until[thread] = end
            if not is_collective:
                rows = [COMPUTE, EXPERTS] if event.get("args", {}).get("External id") in experts else [COMPUTE]
                spans += [Span(row, event["name"], start, end) for row in rows]
    return spans


def _axes_of_threads(events: Iterable[Mapping[str, Any]], gloo: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """Map each of gloo's threads to its axis: the one under whose mark it worked."""
    marks = {
        event["name"].removeprefix(GROUP_MARK): _interval(event)
        for event in events
        if event["name"].startswith(GROUP_MARK) and event.get("cat") == "user_annotation"
    }
    return {
        event["tid"]: ROW_OF.get(axis, axis)
        for axis, (start, end) in marks.items()
        for event in gloo
        if start <= _interval(event)[0] < end
    }


# --- intervals of time


def merge(intervals: Iterable[Interval]) -> Intervals:
    """Unite intervals, which may overlap and come in any order, into sorted ones that do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def subtract(busy: Intervals, other: Intervals) -> Intervals:
    """Remove `other` from `busy`. Both must be merged; the result is merged, too."""
    left: list[Interval] = []
    first = 0  # the first of `other` that may overlap with this or a later interval
    for start, end in busy:
        while first < len(other) and other[first][1] <= start:
            first += 1
        at = first
        while at < len(other) and other[at][0] < end:
            if start < other[at][0]:
                left.append((start, other[at][0]))
            start = other[at][1]
            at += 1
        if start < end:
            left.append((start, end))
    return tuple(left)


def total(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)
