# SPDX-License-Identifier: Apache-2.0
"""Plots a schedule: a row for each thread block, a box for each step, an arrow for each message."""

from pathlib import Path

from matplotlib.collections import LineCollection, PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from stretto.collectives.schedule import Schedule, StepType
from stretto.collectives.verifier.graph import Graph, build_graph, linear_order

MAX_ROWS = 256
MAX_STEPS = 20_000
ARROWS_WITH_HEADS = 600
BOX = 0.62

# Distinguishable with colour blindness and in lightness; the letters in the boxes give the type, too.
COLOURS = {
    StepType.SEND: "#56b4e9",
    StepType.RECEIVE: "#009e73",
    StepType.RECEIVE_COPY_SEND: "#0072b2",
    StepType.RECEIVE_REDUCE_COPY: "#e69f00",
    StepType.RECEIVE_REDUCE_SEND: "#d55e00",
    StepType.RECEIVE_REDUCE_COPY_SEND: "#cc79a7",
    StepType.COPY: "#f0e442",
    StepType.REDUCE: "#b8860b",
    StepType.NOP: "#dddddd",
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
    StepType.NOP: "wait",
}

DARK = {StepType.RECEIVE, StepType.RECEIVE_COPY_SEND, StepType.RECEIVE_REDUCE_SEND}


def plot_schedule(schedule: Schedule, file: Path, ranks: range | None = None) -> None:
    """Plot a schedule, or some ranks of it, into a PNG or SVG.

    A step's horizontal position is the length of the longest path of steps before it. Raises ValueError for more than
    MAX_ROWS thread blocks or MAX_STEPS steps, for ranks that do not exist, for a schedule that cannot run to its end,
    and for another file format.
    """
    if file.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a picture is a .png or .svg file, not {file.name!r}")
    shown = range(schedule.collective.ranks) if ranks is None else ranks
    if not shown or shown[0] < 0 or shown[-1] >= schedule.collective.ranks:
        raise ValueError(f"the schedule has ranks 0 to {schedule.collective.ranks - 1}")
    graph, times = _times(schedule)
    rows = {
        (rank, block): row
        for row, (rank, block) in enumerate(
            (rank, block) for rank in shown for block in range(len(schedule.ranks[rank].thread_blocks))
        )
    }
    drawn = [number for number, (rank, block, _) in enumerate(graph.places) if (rank, block) in rows]
    if len(rows) > MAX_ROWS or len(drawn) > MAX_STEPS:
        raise ValueError(
            f"{len(rows)} thread blocks and {len(drawn)} steps are too many for a picture (at most {MAX_ROWS} and "
            f"{MAX_STEPS}): show fewer ranks"
        )
    width = max((times[number] for number in drawn), default=0) + 1
    figure = Figure(
        figsize=(min(40.0, 3 + 0.5 * width), min(60.0, 1.8 + 0.32 * len(rows))), dpi=120, layout="constrained"
    )
    axes = figure.subplots()
    where = {number: (times[number], rows[graph.places[number][:2]]) for number in drawn}
    patches, colours = [], []
    for number, (time, row) in where.items():
        patches.append(Rectangle((time, row - 0.4), BOX, 0.8))
        colours.append(COLOURS[graph.steps[number].type])
        if len(drawn) <= MAX_STEPS // 10:
            kind = graph.steps[number].type
            ink = "white" if kind in DARK else "black"
            axes.text(time + BOX / 2, row, _label(graph, number), ha="center", va="center", fontsize=5, color=ink)
    axes.add_collection(PatchCollection(patches, facecolors=colours, edgecolors="#444444", linewidths=0.4))
    arrows = [
        ((where[number][0] + BOX, where[number][1]), (where[receiver][0], where[receiver][1]))
        for number, receiver in enumerate(graph.receiver)
        if number in where and receiver in where
    ]
    if len(arrows) <= ARROWS_WITH_HEADS:
        for start, end in arrows:
            axes.add_patch(
                FancyArrowPatch(
                    start,
                    end,
                    arrowstyle="-|>",
                    mutation_scale=7,
                    color="#222222",
                    alpha=0.55,
                    linewidth=0.7,
                    shrinkB=0,
                )
            )
    else:
        axes.add_collection(LineCollection(arrows, colors="#222222", alpha=0.25, linewidths=0.4))
    axes.set_xlim(-0.2, width + 0.2)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [_row_name(schedule, *place) for place in rows], fontsize=6)
    axes.set_xlabel("steps that must come before")
    axes.set_title(
        f"{schedule.name}: {schedule.collective.name}, {schedule.collective.ranks} ranks, {schedule.protocol}",
        loc="left",
        fontsize=11,
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for row, (_, block) in enumerate(rows):
        if block == 0 and row:
            axes.axhline(row - 0.5, color="#999999", linewidth=0.5)
    used = {graph.steps[number].type for number in drawn}
    figure.legend(
        handles=[
            Patch(facecolor=COLOURS[kind], label=f"{kind.value}: {NAMES[kind]}") for kind in StepType if kind in used
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=7,
    )
    figure.savefig(file)


def _times(schedule: Schedule) -> tuple[Graph, list[int]]:
    """Build the schedule's graph, and compute the length of the longest path to each step."""
    errors: list[str] = []
    graph = build_graph(schedule, errors)
    order, left = linear_order(graph)
    if left or errors:
        why = errors[0] if errors else f"{graph.name(left[0])} never begins"
        raise ValueError(f"the schedule cannot run to its end: {why}")
    times = [0] * len(graph.steps)
    for number in order:
        times[number] = max((times[other] + 1 for other in graph.before(number)), default=0)
    return graph, times


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
