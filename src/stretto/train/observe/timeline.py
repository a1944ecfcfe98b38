"""What a trace says: which of a step's time is computation, each axis's communication, exposed, or idle.

A trace is Chrome's (Perfetto's) JSON, as torch.profiler writes it, with a key "stretto" that `observe.tracing` adds:
{"groups": {a process group's name: its axis}, "rank": this one, "grid": {axis: size}}.

On a GPU, kernels and copies are computation, and NCCL's kernels communication of their group's axis. A collective's
kernel also waits for the ranks that come later, so their delay counts as communication. On a CPU there are no kernels:
operators (aten) are computation, and what gloo's threads do is communication; before the first step each axis
communicates alone under a mark of its own, which shows whose threads those are.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stretto.axes import INNER_TO_OUTER, NAMES

Interval = tuple[float, float]  # from, to; half-open, so that neighbours do not overlap
Intervals = tuple[Interval, ...]

TRACE_FILE = "trace.json"
COMPUTE = "compute"
OTHER = "other"  # communication over more than one axis, such as the gradient's norm, or over none of the grid's
ROWS = (COMPUTE, *INNER_TO_OUTER, OTHER)
# Copy engines push over z alone; these kernels begin that, wait for it, and add up what has come.
PUSHED_AXIS = "z"
PUSHING_KERNELS = ("begin_call", "wait_for_all", "wait_for_channel", "begin_scatter", "sum_parts")

STEP_MARK, GROUP_MARK = "stretto step ", "stretto group "
_STEP = re.compile(re.escape(STEP_MARK) + r"(\d+)")


@dataclass(frozen=True)
class Span:
    """Something that ran: in which row, its name, and from when to when, in seconds after the first step's start."""

    row: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TracedStep:
    """A traced step and its place in time, in seconds after the first one's start."""

    number: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One rank's traced steps. Seconds are those of a step: the mean over the steps that were traced."""

    grid: Mapping[str, int]
    rank: int
    steps: tuple[TracedStep, ...]
    spans: tuple[Span, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """Computation and the axes that communicate, in the order in which they are drawn."""
        there = {span.row for span in self.spans}
        return tuple(row for row in ROWS if row in there or row == COMPUTE)

    def busy(self, row: str) -> Intervals:
        """When something of a row runs."""
        return self._busy.get(row, ())

    def exposed(self, row: str) -> Intervals:
        """When an axis's collective runs and no computation does."""
        return subtract(self.busy(row), self.busy(COMPUTE))

    @property
    def step_time(self) -> float:
        """Seconds a step."""
        return (self.steps[-1].end - self.steps[0].start) / len(self.steps)

    @property
    def compute(self) -> float:
        """Seconds a step in which computation runs."""
        return self._a_step(self.busy(COMPUTE))

    @property
    def communication(self) -> dict[str, float]:
        """Seconds a step in which an axis's collectives run, for every axis, and "other" where there is one."""
        return {row: self._a_step(self.busy(row)) for row in self._communication_rows}

    @property
    def exposed_by_axis(self) -> dict[str, float]:
        """Seconds a step in which an axis's collectives run and no computation does: what is not hidden."""
        return {row: self._a_step(self.exposed(row)) for row in self._communication_rows}

    @property
    def exposed_total(self) -> float:
        """Seconds a step in which only communication runs. When two axes are exposed at once, it counts once."""
        return self._a_step(merge(part for row in self._communication_rows for part in self.exposed(row)))

    @property
    def idle(self) -> float:
        """Seconds a step in which neither computation nor communication runs."""
        return self.step_time - self.compute - self.exposed_total

    def summary(self) -> dict[str, Any]:
        """The numbers, in seconds a step, for `summary.json`."""
        return {
            "traced_steps": [step.number for step in self.steps],
            "traced_step_time": self.step_time,
            "compute": self.compute,
            "communication": self.communication,
            "exposed": self.exposed_by_axis,
            "exposed_total": self.exposed_total,
            "idle": self.idle,
        }

    @property
    def _communication_rows(self) -> tuple[str, ...]:
        return (*INNER_TO_OUTER, OTHER) if OTHER in self.rows else INNER_TO_OUTER

    @cached_property
    def _busy(self) -> dict[str, Intervals]:
        rows: dict[str, list[tuple[float, float]]] = {}
        for span in self.spans:
            rows.setdefault(span.row, []).append((span.start, span.end))
        return {row: merge(parts) for row, parts in rows.items()}

    def _a_step(self, intervals: Intervals) -> float:
        return total(intervals) / len(self.steps)


def read_timeline(trace: Path | Mapping[str, Any]) -> Timeline:
    """The timeline of a trace, a file or what it holds. Raises ValueError for one that no traced run has written."""
    if isinstance(trace, Path):
        where = str(trace)
        try:
            content = json.loads(trace.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{where} is no trace: {error}") from error
    else:
        where, content = "the trace", trace
    try:
        about, events = content["stretto"], [event for event in content["traceEvents"] if "ts" in event]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} has no key {error}: `stretto train --trace` writes traces that have it") from error
    is_gpu = any(event.get("cat") == "kernel" for event in events)
    steps = _steps(events, "gpu_user_annotation") or _steps(events, "user_annotation")
    if not steps:
        raise ValueError(f"{where} has no step: `stretto train --trace` marks those that it traces")
    spans = _gpu_spans(events, about["groups"]) if is_gpu else _cpu_spans(events)
    origin, end = steps[0].start, steps[-1].end
    return Timeline(
        grid=dict(about["grid"]),
        rank=about["rank"],
        steps=tuple(TracedStep(step.number, step.start - origin, step.end - origin) for step in steps),
        spans=tuple(
            Span(span.row, span.name, max(span.start, origin) - origin, min(span.end, end) - origin)
            for span in sorted(spans, key=lambda span: span.start)
            if span.start < end and span.end > origin
        ),
    )


def _interval(event: Mapping[str, Any]) -> tuple[float, float]:
    """From when to when, in seconds: the file counts in microseconds."""
    return event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6


def _steps(events: Iterable[Mapping[str, Any]], category: str) -> list[TracedStep]:
    """The steps by their marks: the host's, or those of a GPU's streams, over what was launched under the host's."""
    marks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == category and (match := _STEP.fullmatch(event["name"])):
            marks.setdefault(int(match[1]), []).append(_interval(event))
    return [
        TracedStep(number, min(start for start, _ in parts), max(end for _, end in parts))
        for number, parts in sorted(marks.items())
    ]


def _gpu_spans(events: Iterable[Mapping[str, Any]], groups: Mapping[str, str]) -> list[Span]:
    """Kernels and copies. Which group NCCL works for is said with its kernel, or with the call that launched it."""
    calls = {
        event["args"]["External id"]: event["args"]
        for event in events
        if event["name"] == "record_param_comms" and "External id" in event.get("args", {})
    }
    spans, copying = [], copying_streams(events)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            about = event.get("args", {})
            row = COMPUTE
            if is_pushed(event, copying):
                row = PUSHED_AXIS
            elif event["name"].startswith("nccl") or "Collective name" in about:
                row = _axis_of_group(calls.get(about.get("External id"), {}) | about, groups)
            spans.append(Span(row, event["name"], *_interval(event)))
    return spans


def copying_streams(events: Iterable[Mapping[str, Any]]) -> set[Any]:
    """The streams of a GPU that copies run on and kernels never do, as those of `stretto.tiles`' copies."""
    streams: dict[str, set[Any]] = {"kernel": set(), "gpu_memcpy": set()}
    for event in events:
        if event.get("cat") in streams:
            streams[event["cat"]].add(event.get("args", {}).get("stream"))
    return streams["gpu_memcpy"] - streams["kernel"]


def is_pushed(event: Mapping[str, Any], copying: Collection[Any]) -> bool:
    """Whether a kernel or copy belongs to what copy engines push. copying: `copying_streams` of all events.

    Between two GPUs' memory a copy is called one within a device, or one between peers, as the driver mapped it.
    """
    if event.get("cat") != "gpu_memcpy":
        return event["name"] in PUSHING_KERNELS
    is_within = "DtoD" in event["name"] and event.get("args", {}).get("stream") in copying
    return is_within or "PtoP" in event["name"]


def _axis_of_group(about: Mapping[str, Any], groups: Mapping[str, str]) -> str:
    described = str(about.get("Process Group Description", "")).removeprefix("mesh_")
    axis = groups.get(str(about.get("Process Group Name")), described)
    return axis if axis in NAMES else OTHER


def _cpu_spans(events: list[Mapping[str, Any]]) -> list[Span]:
    """Operators that are inside no other operator, and what gloo's threads do."""
    gloo = [event for event in events if event["name"].startswith("gloo:")]
    axes = _axes_of_threads(events, gloo)
    spans = [
        Span(axes.get(event["tid"], OTHER), event["name"].removeprefix("gloo:"), *_interval(event)) for event in gloo
    ]
    gloo_threads = {event["tid"] for event in gloo}
    operators = sorted(
        (event for event in events if event.get("cat") == "cpu_op" and event["tid"] not in gloo_threads),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    busy_until: dict[Any, float] = {}
    for event in operators:
        (start, end), thread = _interval(event), event["tid"]
        is_collective = event["name"].startswith("c10d::")  # only hands it to gloo, whatever operators that takes
        if (is_collective or event["name"].startswith("aten::")) and start >= busy_until.get(thread, start):
            busy_until[thread] = end
            if not is_collective:
                spans.append(Span(COMPUTE, event["name"], start, end))
    return spans


def _axes_of_threads(events: Iterable[Mapping[str, Any]], gloo: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """Which axis each of gloo's threads works for: that under whose mark it worked."""
    marks = {
        event["name"].removeprefix(GROUP_MARK): _interval(event)
        for event in events
        if event["name"].startswith(GROUP_MARK) and event.get("cat") == "user_annotation"
    }
    return {
        event["tid"]: axis
        for axis, (start, end) in marks.items()
        for event in gloo
        if start <= _interval(event)[0] < end
    }


# --- sets of moments: sorted intervals that do not touch


def merge(intervals: Iterable[Interval]) -> Intervals:
    """The moments that are in any of the intervals, which may overlap and come in any order."""
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
    """The moments of `busy` that are not in `other`; both are merged, and so is what comes out."""
    left: list[Interval] = []
    first = 0  # the first of `other` that may still reach what follows
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
    """How long merged intervals are together."""
    return sum(end - start for start, end in intervals)
