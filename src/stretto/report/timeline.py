# SPDX-License-Identifier: Apache-2.0
"""Plots a timeline: rows for computation, each axis's communication and host copies, with exposed parts marked."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from stretto.cluster import name_grid
from stretto.report.style import BLUE, EXPOSED, GREEN, INK, ORANGE, SKY, SMALL, Look, drawing
from stretto.train.observe.timeline import BUBBLE, COMPUTE, EXPERTS, HOST_COPIES, OTHER, Intervals, Timeline, subtract

IN_EXPERTS = "the part of computation that is in experts"
WAITING = "bubble: the message to compute on was not sent yet"
KINDS = {
    "computation": Look(BLUE, "o"),
    "communication that overlaps with computation": Look("#b3b3b3", "s"),
    "exposed communication": EXPOSED,
    "copies between host and device that overlap with computation": Look(SKY, "D"),
    "exposed copies": Look(ORANGE, "^", (0, (5, 1.5)), "...."),
    WAITING: Look("#e6e6e6", "v", (0, (1, 1)), "\\\\"),
    IN_EXPERTS: Look(GREEN, "P", (0, (3, 1)), "xx"),
}
"""The meaning of the bars. The kinds of a row differ in lightness, and exposed parts are also hatched."""

MILLISECONDS = 1e3


def plot_timeline(timeline: Timeline, file: str | Path, *, origin: str = "") -> None:
    """Plot a timeline into a PNG. The right margin has each row's milliseconds per step, and those exposed.

    origin: the machine and the date.
    """
    rows = timeline.rows
    with drawing(file, 10, 0.9 + 0.5 * len(rows)) as picture:
        axes = picture.panels(1, 1)[0, 0]
        computation, *communication, copies_overlapped, copies_exposed, _, _ = KINDS
        totals = timeline.communication | timeline.host_copies
        exposed_totals = timeline.exposed_by_axis | timeline.exposed_host_copies
        labels = list(KINDS)  # each kind is labelled where it is first drawn, so that the legend has what there is
        for place, row in enumerate(rows):
            if row == COMPUTE:
                _draw(axes, timeline.busy(row), place, computation, labels)
                text = f"{_ms(timeline.compute)} ms a step"
            elif row == EXPERTS:
                _draw(axes, timeline.busy(row), place, IN_EXPERTS, labels)
                text = f"{_ms(timeline.experts)} ms a step"
            elif row == BUBBLE:
                _draw(axes, timeline.exposed(row), place, WAITING, labels)
                text = f"{_ms(timeline.bubble)} ms a step"
            else:
                overlapped, exposed = (copies_overlapped, copies_exposed) if row in HOST_COPIES else communication
                alone = timeline.exposed(row)
                _draw(axes, subtract(timeline.busy(row), alone), place, overlapped, labels)
                _draw(axes, alone, place, exposed, labels)
                text = f"{_ms(totals[row])} ms a step,\n{_ms(exposed_totals[row])} exposed"
            axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)
        _mark_steps(axes, timeline)
        axes.set_xlim(0, timeline.steps[-1].end * MILLISECONDS)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), ["several axes" if row == OTHER else row for row in rows])
        axes.set_xlabel(f"ms, on rank {timeline.rank}")
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        picture.title = _title(timeline)
        picture.subtitle = origin
        picture.caption = (
            "Exposed: only communication runs. Empty in all rows: neither computation nor communication runs."
            if not set(rows) & set(HOST_COPIES)
            else "Exposed: no computation runs meanwhile. Empty in all rows: nothing runs."
        )
        if timeline.host is not None:
            picture.caption += f" Launching a step takes the host {_ms(timeline.host)} ms"
            layer = timeline.host_per_layer
            picture.caption += "." if layer is None else f", {layer * MILLISECONDS:.2f} ms a layer."


def _draw(axes: Axes, intervals: Intervals, place: int, kind: str, unlabelled: list[str]) -> None:
    """Draw intervals as bars of one kind, labelled if none of that kind was drawn before."""
    if not intervals:
        return
    bars = [(start * MILLISECONDS, (end - start) * MILLISECONDS) for start, end in intervals]
    label = kind if kind in unlabelled else None
    if label is not None:
        unlabelled.remove(label)
    # The hatch has the edge's colour. No edge is drawn, so a short bar is not wider than its duration.
    axes.broken_barh(bars, (place - 0.38, 0.76), label=label, **KINDS[kind].bar)


def _mark_steps(axes: Axes, timeline: Timeline) -> None:
    above = blended_transform_factory(axes.transData, axes.transAxes)
    for step in timeline.steps:
        axes.axvline(step.start * MILLISECONDS, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.text(step.start * MILLISECONDS, 1.02, f"step {step.number}", transform=above, fontsize=SMALL, color=INK)


def _title(timeline: Timeline) -> str:
    sizes = name_grid(timeline.grid)
    share = timeline.exposed_total / timeline.step_time
    return (
        f"{sizes}: {_ms(timeline.step_time)} ms a step, "
        f"{_ms(timeline.exposed_total)} ms ({share:.0%}) of it exposed communication"
    )


def _ms(seconds: float) -> str:
    """Format seconds as milliseconds, large values without decimals."""
    value = seconds * MILLISECONDS
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
