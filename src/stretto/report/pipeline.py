# SPDX-License-Identifier: Apache-2.0
"""Plots the timeline of a pipeline: a row for each rank, a box for each forward or backward pass."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from stretto.report.pictures import require_few_boxes
from stretto.report.style import GREEN, INK, ORANGE, PURPLE, SKY, SMALL, drawing, tint
from stretto.schedules import PipelineOperation, PipelineTimeline

MAX_NUMBERS = 2_000  # boxes with the number of their micro-batch
ROW = 0.3  # inches of a rank
DIGIT, MARGIN = 0.07, 0.09  # inches of a digit, and beside a number
WIDTHS = (6.5, 30.0)  # inches of a picture, least and most

COLOURS = {
    PipelineOperation.FORWARD: SKY,
    PipelineOperation.BACKWARD: GREEN,
    PipelineOperation.BACKWARD_INPUT: ORANGE,
    PipelineOperation.BACKWARD_WEIGHT: PURPLE,
}
NAMES = {
    PipelineOperation.FORWARD: "F: forward",
    PipelineOperation.BACKWARD: "B: backward, whole",
    PipelineOperation.BACKWARD_INPUT: "I: gradient of the input",
    PipelineOperation.BACKWARD_WEIGHT: "W: gradients of weights",
}


def plot_pipeline(timeline: PipelineTimeline, file: Path) -> None:
    """Plot a timeline into a PNG or SVG file. ValueError for more actions than a picture has room for."""
    schedule = timeline.schedule
    boxes = sum(map(len, schedule.ranks))
    require_few_boxes(boxes)
    spans = [
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    ]
    narrowest = DIGIT * len(str(schedule.micro_batches - 1)) + MARGIN
    width = min(WIDTHS[1], max(WIDTHS[0], narrowest * timeline.makespan / min(spans, default=1.0)))
    with drawing(file, width, 0.55 + ROW * schedule.pipe) as picture:
        axes = picture.panels(1, 1)[0, 0]
        _draw_boxes(axes, timeline)
        if timeline.makespan and boxes <= MAX_NUMBERS:
            _write_numbers(axes, timeline, width / timeline.makespan)
        axes.set(xlim=(0, timeline.makespan or 1), ylim=(schedule.pipe - 0.45, -0.55))
        axes.set_xlabel("time (in the unit of the costs)")
        axes.set_yticks(range(schedule.pipe), [f"rank {rank}" for rank in range(schedule.pipe)])
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        stages = f", {schedule.virtual_stages} stages on each" if schedule.virtual_stages > 1 else ""
        picture.title = f"{schedule.name}: {schedule.pipe} ranks{stages}, {schedule.micro_batches} micro-batches"
        idle = timeline.idle
        waits = f"{idle[0]:g}" if max(idle) - min(idle) < 1e-9 else f"{min(idle):.4g} to {max(idle):.4g}"
        texts = [f"Makespan {timeline.makespan:.5g}, of which each rank waits {waits} (the gaps)."]
        if schedule.virtual_stages > 1:
            texts.append("The stronger a box's colour, the later is its stage in the model.")
        picture.caption = " ".join(texts)


def _draw_boxes(axes: Axes, timeline: PipelineTimeline) -> None:
    schedule = timeline.schedule
    strengths: dict[int, float] = {}
    for rank in range(schedule.pipe):
        stages = schedule.stages_of(rank)
        strengths |= {stage: 0.4 + 0.5 * place / max(1, len(stages) - 1) for place, stage in enumerate(stages)}
    boxes: dict[tuple[PipelineOperation, float], list[list[tuple[float, float]]]] = {}
    for rank, actions in enumerate(schedule.ranks):
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
            corners = [(start, rank - 0.42), (end, rank - 0.42), (end, rank + 0.42), (start, rank + 0.42)]
            boxes.setdefault((action.operation, strengths[action.stage]), []).append(corners)
    for operation, colour in COLOURS.items():
        of_operation = sorted(strength for kind, strength in boxes if kind is operation)
        for strength in of_operation:
            axes.add_collection(
                PolyCollection(
                    boxes[operation, strength],
                    facecolors=tint(colour, strength),
                    edgecolors=INK,
                    linewidths=0.3,
                    label=NAMES[operation] if strength == of_operation[0] else None,
                )
            )


def _write_numbers(axes: Axes, timeline: PipelineTimeline, inches: float) -> None:
    """Write each micro-batch's number into its box, where it has room. inches: of a unit of time."""
    for rank, actions in enumerate(timeline.schedule.ranks):
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
            text = str(action.micro_batch)
            if action.operation in COLOURS and DIGIT * len(text) + 0.03 <= (end - start) * inches * 0.93:
                axes.text((start + end) / 2, rank, text, ha="center", va="center_baseline", fontsize=SMALL - 1)
