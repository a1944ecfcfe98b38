# SPDX-License-Identifier: Apache-2.0
"""Plots a schedule: a row for each thread block, a box for each step, an arrow for each message."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import FancyArrowPatch

from stretto.collectives.schedule import Schedule, StepType
from stretto.collectives.verifier.graph import Graph
from stretto.report.schedule_layout import MAX_STEPS, Places, ScheduleLayout, lay_out
from stretto.report.style import BLUE, GREEN, INK, LIGHT, ORANGE, PURPLE, SKY, SMALL, VERMILION, YELLOW, drawing

ARROWS_WITH_HEADS = 600
BOX = 0.62
COLUMN, ROW = 0.72, 0.36  # inches of a step and of a thread block

# The letters in the boxes give the type, too.
COLOURS = {
    StepType.SEND: SKY,
    StepType.RECEIVE: GREEN,
    StepType.RECEIVE_COPY_SEND: BLUE,
    StepType.RECEIVE_REDUCE_COPY: ORANGE,
    StepType.RECEIVE_REDUCE_SEND: VERMILION,
    StepType.RECEIVE_REDUCE_COPY_SEND: PURPLE,
    StepType.COPY: YELLOW,
    StepType.REDUCE: "#b8860b",
    StepType.NOP: LIGHT,
}
NAMES = {
    StepType.SEND: "send",
    StepType.RECEIVE: "receive",
    StepType.RECEIVE_COPY_SEND: "receive, copy, send",
    StepType.RECEIVE_REDUCE_COPY: "receive, reduce, copy",
    StepType.RECEIVE_REDUCE_SEND: "receive, reduce, send",
    StepType.RECEIVE_REDUCE_COPY_SEND: "receive, reduce, copy, send",
    StepType.COPY: "copy",
    StepType.REDUCE: "reduce",
    StepType.NOP: "wait for another thread block",
}

DARK = {StepType.RECEIVE, StepType.RECEIVE_COPY_SEND, StepType.RECEIVE_REDUCE_SEND}


def plot_schedule(schedule: Schedule, file: str | Path, ranks: range | None = None) -> None:
    """Plot a schedule, or some ranks of it, into a PNG or SVG. Raises ValueError as `lay_out` does."""
    draw_schedule(lay_out(schedule, Path(file), ranks), Path(file))


def draw_schedule(layout: ScheduleLayout, file: Path) -> None:
    """Draw a schedule that has been laid out into a PNG or SVG."""
    schedule, graph, rows, columns, places = layout
    with drawing(file, min(40.0, max(6.5, 2.8 + COLUMN * columns)), min(60.0, 0.6 + ROW * len(rows))) as picture:
        axes = picture.panels(1, 1)[0, 0]
        _draw_steps(axes, graph, places)
        _draw_messages(axes, graph, places)
        for row, (_, block) in enumerate(rows):
            if block == 0 and row:
                axes.axhline(row - 0.5, color="#999999", linewidth=0.5)
        axes.set_xlim(-0.2, columns - 1 + BOX + 0.2)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xticks([column + BOX / 2 for column in range(columns)], [str(column) for column in range(columns)])
        axes.set_yticks(range(len(rows)), [_row_name(schedule, *place) for place in rows])
        axes.set_xlabel("how many steps must come before")
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        picture.title = (
            f"{schedule.name}: {schedule.collective.name}, {schedule.collective.ranks} ranks, "
            f"protocol {schedule.protocol}"
        )
        picture.caption = (
            "A row is a thread block: the rank that it receives from → the rank that it sends to. Under a box's type "
            "are its chunks: i of the input, o of the output, s of scratch. An arrow is a message."
        )


def _draw_steps(axes: Axes, graph: Graph, places: Places) -> None:
    boxes: dict[StepType, list[list[tuple[float, float]]]] = {}
    for number, (column, row) in places.items():
        kind = graph.steps[number].type
        left, right, low, high = column, column + BOX, row - 0.4, row + 0.4
        boxes.setdefault(kind, []).append([(left, low), (right, low), (right, high), (left, high)])
        if len(places) <= MAX_STEPS // 10:
            ink = "white" if kind in DARK else "black"
            text = _label(graph, number)
            axes.text(column + BOX / 2, row, text, ha="center", va="center", fontsize=SMALL - 1, color=ink)
    for kind in StepType:
        if kind in boxes:
            label = f"{kind.value}: {NAMES[kind]}"
            style: dict[str, Any] = {"facecolors": COLOURS[kind], "edgecolors": INK, "linewidths": 0.4}
            axes.add_collection(PolyCollection(boxes[kind], label=label, **style))


def _draw_messages(axes: Axes, graph: Graph, places: Places) -> None:
    arrows = [
        ((places[number][0] + BOX, places[number][1]), places[receiver])
        for number, receiver in enumerate(graph.receiver)
        if number in places and receiver in places
    ]
    if len(arrows) > ARROWS_WITH_HEADS:
        axes.add_collection(LineCollection(arrows, colors="#222222", alpha=0.25, linewidths=0.4))
        return
    style: dict[str, Any] = {
        "arrowstyle": "-|>",
        "mutation_scale": 7,
        "color": "#222222",
        "alpha": 0.55,
        "linewidth": 0.7,
    }
    for start, end in arrows:
        axes.add_patch(FancyArrowPatch(start, end, shrinkB=0, **style))


def _label(graph: Graph, number: int) -> str:
    step = graph.steps[number]
    if step.type is StepType.NOP:
        return ""
    buffer, start = step.destination_buffer, step.destination
    if step.type.reads_source:
        buffer, start = step.source_buffer, step.source
    last = f"–{start + step.size - 1}" if step.size > 1 else ""
    return f"{step.type.value}\n{buffer[0]}{start}{last}"


def _row_name(schedule: Schedule, rank: int, number: int) -> str:
    block = schedule.ranks[rank].thread_blocks[number]
    take = "" if block.receive_peer is None else f"{block.receive_peer}→"
    give = "" if block.send_peer is None else f"→{block.send_peer}"
    return f"rank {rank}, block {number} ({take}·{give}, channel {block.channel})"
