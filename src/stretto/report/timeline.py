# SPDX-License-Identifier: Apache-2.0
"""Plots a timeline: a row for computation and one for each axis's communication, with exposed parts marked."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

from stretto.cluster import name_grid
from stretto.train.observe.timeline import COMPUTE, OTHER, Intervals, Timeline, subtract

# Blue, grey and vermilion are distinguishable with colour blindness, and in lightness; exposed parts are also hatched.
COMPUTATION, HIDDEN, EXPOSED = "#1f5fa8", "#a8b4bf", "#d55e00"
HATCH = "////"
MILLISECONDS = 1e3


def plot_timeline(timeline: Timeline, file: Path) -> None:
    """Plot a timeline into a PNG. The right margin has each row's milliseconds per step, and those exposed."""
    rows = timeline.rows
    # Figure is used without pyplot, which needs no window system and has no global state.
    figure = Figure(figsize=(11, 1.9 + 0.55 * len(rows)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        if row == COMPUTE:
            _draw(axes, timeline.busy(row), place, COMPUTATION)
            label = f"{_ms(timeline.compute)} ms a step"
        else:
            exposed = timeline.exposed(row)
            _draw(axes, subtract(timeline.busy(row), exposed), place, HIDDEN)
            _draw(axes, exposed, place, EXPOSED, hatch=HATCH)
            label = f"{_ms(timeline.communication[row])} ms a step,\n{_ms(timeline.exposed_by_axis[row])} exposed"
        axes.text(1.01, place, label, transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    _mark_steps(axes, timeline)
    axes.set_xlim(0, timeline.steps[-1].end * MILLISECONDS)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), ["several axes" if row == OTHER else row for row in rows])
    axes.set_xlabel(f"ms, on rank {timeline.rank}")
    axes.set_title(_title(timeline), loc="left", pad=22, fontsize=12)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file)


def _draw(axes: Axes, intervals: Intervals, place: int, colour: str, hatch: str | None = None) -> None:
    bars = [(start * MILLISECONDS, (end - start) * MILLISECONDS) for start, end in intervals]
    # The hatch has the edge's colour. No edge is drawn, so a short bar is not wider than its duration.
    axes.broken_barh(bars, (place - 0.38, 0.76), facecolor=colour, edgecolor="white", linewidth=0, hatch=hatch)


def _mark_steps(axes: Axes, timeline: Timeline) -> None:
    above = blended_transform_factory(axes.transData, axes.transAxes)
    for step in timeline.steps:
        axes.axvline(step.start * MILLISECONDS, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(step.start * MILLISECONDS, 1.02, f" step {step.number}", transform=above, fontsize=9, color="#444444")


def _title(timeline: Timeline) -> str:
    sizes = name_grid(timeline.grid)
    share = timeline.exposed_total / timeline.step_time
    return (
        f"{sizes}: {_ms(timeline.step_time)} ms a step, "
        f"{_ms(timeline.exposed_total)} ms ({share:.0%}) of it exposed communication"
    )


def _legend() -> list[Patch]:
    return [
        Patch(facecolor=COMPUTATION, label="computation"),
        Patch(facecolor=HIDDEN, label="communication under computation"),
        Patch(facecolor=EXPOSED, edgecolor="white", linewidth=0, hatch=HATCH, label="exposed communication"),
    ]


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds, large values without decimals."""
    value = seconds * MILLISECONDS
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
