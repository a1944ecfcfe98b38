# SPDX-License-Identifier: Apache-2.0
"""Plots a simulated joint schedule: for each rank, when its tiles are multiplied, and when its moves run; and beside it
a call that a GPU ran, of a trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from stretto.report.pictures import require_few_boxes
from stretto.report.style import BLUE, GREEN, INK, ORANGE, SKY, SMALL, drawing
from stretto.simulator.schedules.joint import Interval, JointTime
from stretto.train.observe.timeline import read_events

_MOST_NUMBERS = 400


class TracedCall(NamedTuple):
    """A call that a rank's GPU ran: its kernels, copies between GPUs, and seconds from its first to its last."""

    rank: int
    kernels: tuple[Interval, ...]
    copies: tuple[Interval, ...]
    seconds: float


def read_call(trace: Path, operator: str) -> TracedCall:
    """Read the last call that `torch.profiler.record_function` marks with the operator's name, of a profiler's trace.

    ValueError for a file that is no trace, or has no such call of a GPU.
    """
    content, events = read_events(trace)
    events = [event for event in events if "dur" in event]
    marks = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == operator]
    none: dict[str, Any] = {"ts": 0, "dur": -1, "tid": None}
    mark = max(marks, key=lambda event: event["ts"], default=none)
    begun = {
        event.get("args", {}).get("correlation")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and event["tid"] == mark["tid"]
        and mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"]
    }
    kinds: dict[str, list[Any]] = {"kernel": [], "gpu_memcpy": []}
    for event in events:
        if event.get("cat") in kinds and event.get("args", {}).get("correlation") in begun:
            kinds[event["cat"]].append(event)
    every = [*kinds["kernel"], *kinds["gpu_memcpy"]]
    if not every:
        raise ValueError(
            f"{trace} has no kernels of a call that is marked {operator}: trace `with record_function({operator!r}):` "
            "around it on a GPU"
        )
    about = content.get("distributedInfo")
    rank = about.get("rank", 0) if isinstance(about, dict) else 0
    start = min(event["ts"] for event in every)
    kernels, copies = (
        tuple(
            Interval(rank, number, (event["ts"] - start) / 1e6, (event["ts"] + event["dur"] - start) / 1e6)
            for number, event in enumerate(sorted(listed, key=lambda event: event["ts"]))
        )
        for listed in kinds.values()
    )
    return TracedCall(rank, kernels, copies, max(one.end for one in (*kernels, *copies)))


def plot_joint(found: JointTime, title: str, file: Path, traced: Sequence[TracedCall] = ()) -> None:
    """Plot it into a PNG or SVG, and calls of GPUs below. ValueError for more boxes than a picture shows."""
    require_few_boxes(len(found.tiles) + len(found.moves))
    ranks = 1 + max(interval.rank for interval in found.tiles)
    with drawing(file, 9.0, min(60.0, 1.1 + 0.6 * (ranks + len(traced)))) as picture:
        axes = picture.panels(1, 1)[0, 0]
        _draw(axes, found.tiles, 0.0, BLUE, "tiles, by chunk")
        _draw(axes, found.moves, 0.4, ORANGE, "moves")
        for row, call in enumerate(traced, ranks):
            of_row = [tuple(one._replace(rank=row) for one in listed) for listed in call[1:3]]
            _draw(axes, of_row[0], 0.0, GREEN, "kernels of a GPU" if row == ranks else "_")
            _draw(axes, of_row[1], 0.4, SKY, "copies of a GPU" if row == ranks else "_")
        labels = [f"rank {rank}" for rank in range(ranks)] + [f"rank {call.rank}, traced" for call in traced]
        axes.set_xlim(0, 1e6 * max([found.seconds, *(call.seconds for call in traced)]))
        axes.set_ylim(len(labels) - 0.1, -0.2)
        axes.set_yticks([row + 0.35 for row in range(len(labels))], labels)
        axes.set_xlabel("us")
        axes.grid(visible=False)
        picture.title = title
        picture.caption = (
            f"{1e6 * found.seconds:,.0f} us, of which {1e6 * found.exposed:,.0f} beyond the product alone "
            f"({found.fidelity})."
            + "".join(f" Traced on rank {call.rank}: {1e6 * call.seconds:,.0f} us." for call in traced)
        )


def _draw(axes: Axes, intervals: tuple[Interval, ...], offset: float, colour: str, label: str) -> None:
    boxes = []
    for rank, number, start, end in intervals:
        left, right, low = 1e6 * start, 1e6 * end, rank + offset
        boxes.append([(left, low), (right, low), (right, low + 0.32), (left, low + 0.32)])
        if len(intervals) <= _MOST_NUMBERS:
            axes.text((left + right) / 2, low + 0.16, str(number), ha="center", va="center", fontsize=SMALL - 2)
    style: dict[str, Any] = {"facecolors": colour, "edgecolors": INK, "linewidths": 0.3, "alpha": 0.6}
    axes.add_collection(PolyCollection(boxes, label=label, **style))
