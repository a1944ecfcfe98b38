# SPDX-License-Identifier: Apache-2.0
"""Plots a simulated joint schedule: for each rank, when its tiles are multiplied, and when its moves run."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from stretto.report.pictures import require_few_boxes
from stretto.report.style import BLUE, INK, ORANGE, SMALL, drawing
from stretto.simulator.schedules.joint import Interval, JointTime

_MOST_NUMBERS = 400


def plot_joint(found: JointTime, title: str, file: Path) -> None:
    """Plot it into a PNG or SVG. ValueError for more boxes than a picture shows."""
    require_few_boxes(len(found.tiles) + len(found.moves))
    ranks = 1 + max(interval.rank for interval in found.tiles)
    with drawing(file, 9.0, min(60.0, 1.1 + 0.6 * ranks)) as picture:
        axes = picture.panels(1, 1)[0, 0]
        _draw(axes, found.tiles, 0.0, BLUE, "tiles, by chunk")
        _draw(axes, found.moves, 0.4, ORANGE, "moves")
        axes.set_xlim(0, 1e6 * found.seconds)
        axes.set_ylim(ranks - 0.1, -0.2)
        axes.set_yticks([rank + 0.35 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
        axes.set_xlabel("us")
        axes.grid(visible=False)
        picture.title = title
        picture.caption = (
            f"{1e6 * found.seconds:,.0f} us, of which {1e6 * found.exposed:,.0f} beyond the product alone "
            f"({found.fidelity})."
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
