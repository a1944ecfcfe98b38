# SPDX-License-Identifier: Apache-2.0
"""Charts of measured values, in the style of `stretto.report.style`: labelled bars, ticks at sizes, peers' looks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from stretto.report import style
from stretto.report.style import GREY, ORANGE, PURPLE, SKY, SMALL, Look, Picture

PEER = Look(GREY, "s", (0, (5, 1.5)))
OTHER_PEER = Look(ORANGE, "^", (0, (5, 1.5, 1, 1.5)), "...")
THIRD_PEER = Look(SKY, "D", (0, (1.5, 1)), "xxx")
FOURTH_PEER = Look(PURPLE, "v", (0, (3, 1, 1, 1, 1, 1)), "\\\\\\")


def drawing(file: Path, width: float, height: float) -> "AbstractContextManager[Chart]":
    """Draw a chart and write it to `file` (.png or .svg). width, height: of all panels together, in inches."""
    return style.drawing(file, width, height, Chart)


@dataclass
class Chart(Picture):
    """A picture whose axes fit the labels of bars, and whose ticks are at measured values."""

    _labels: list[tuple[Axes, str, Text]] = field(default_factory=list)
    _ticks: list[tuple[Axis, list[float], Callable[[Any], str]]] = field(default_factory=list)

    def label_bars(self, panel: Axes, bars: BarContainer, labels: Sequence[str]) -> None:
        """Write a label at the end of each bar, centred on it; the axis is made long enough for all of them."""
        is_horizontal = bars.orientation == "horizontal"
        alignment: dict[str, Any] = {"ha": "center", "va": "bottom"}
        if is_horizontal:
            alignment = {"ha": "left", "va": "center_baseline"}
        for bar, label in zip(bars.patches, labels, strict=True):
            left, bottom, right, top = bar.get_bbox().extents
            place = (right, (bottom + top) / 2) if is_horizontal else ((left + right) / 2, top)
            shift = (3, 0) if is_horizontal else (0, 2)
            text = panel.annotate(label, place, shift, textcoords="offset points", fontsize=SMALL, **alignment)
            self._labels.append((panel, "x" if is_horizontal else "y", text))

    def log_ticks(self, axis: Axis, values: Sequence[float], name: Callable[[Any], str] = "{:g}".format) -> None:
        """Make an axis logarithmic with ticks at measured values. Of their names as many are shown as fit."""
        axis.axes.set_xscale("log") if axis is axis.axes.xaxis else axis.axes.set_yscale("log")
        axis.set_minor_locator(NullLocator())
        self._ticks.append((axis, sorted(set(values)), name))
        axis.set_major_locator(FixedLocator(sorted(set(values))))
        axis.set_major_formatter(FuncFormatter(lambda value, _: name(value)))

    def fit_panels(self) -> None:
        """Thin out the ticks, and lengthen the axes."""
        self._thin_out_ticks()
        self._make_room_for_labels()

    def _thin_out_ticks(self) -> None:
        """Name ticks from the last on, leaving out those whose names would touch the one named before."""
        for axis, values, name in self._ticks:
            axis.set_major_formatter(FuncFormatter(lambda value, _, name=name: name(value)))
            labels = axis.get_majorticklabels()
            is_x = axis is axis.axes.xaxis
            room = (5 if is_x else 1) * self.figure.dpi / 72
            named, reached = set(), np.inf
            for value, label in zip(values[::-1], labels[::-1], strict=bool(labels)):  # a panel may hide them all
                box = label.get_window_extent(self._renderer)
                start, end = (box.x0, box.x1) if is_x else (box.y0, box.y1)
                if end <= reached - room:
                    named.add(value)
                    reached = start
            axis.set_major_formatter(
                FuncFormatter(lambda value, _, named=named, name=name: name(value) if value in named else "")
            )

    def _make_room_for_labels(self) -> None:
        """Lengthen axes from zero until each bar's label ends inside of the panel."""
        renderer = self._renderer
        needed: dict[tuple[Axes, str], float] = {}
        for panel, side, text in self._labels:
            box, frame = text.get_window_extent(renderer), panel.get_window_extent(renderer)
            place = text.xy[0] if side == "x" else text.xy[1]  # type: ignore[attr-defined]
            length, taken = (frame.width, box.width) if side == "x" else (frame.height, box.height)
            taken += 8 * self.figure.dpi / 72
            reach = place / (1 - min(0.9, taken / length))
            needed[panel, side] = max(needed.get((panel, side), 0.0), reach)
        for (panel, side), reach in needed.items():
            if side == "x":
                panel.set_xlim(right=max(reach, _widest(panel.dataLim.intervalx)))
            else:
                panel.set_ylim(top=max(reach, _widest(panel.dataLim.intervaly)))


def group_bars(count: int, series: int) -> tuple[NDArray[np.float64], float]:
    """Centres [series, count] of grouped bars, whose groups are centred on 0, 1, ..., and a bar's width."""
    each = min(0.4, 0.8 / max(1, series))
    shifts = (np.arange(series) - (series - 1) / 2) * each
    return np.arange(count)[None, :] + shifts[:, None], each


def name_bars(panel: Axes, places: Sequence[float], names: Sequence[str], *, is_horizontal: bool = True) -> None:
    """Name the bars, or groups of bars, at these places; the grid then marks their lengths alone."""
    axis, lengths = (panel.yaxis, panel.xaxis) if is_horizontal else (panel.xaxis, panel.yaxis)
    axis.set_ticks(list(places), list(names))
    axis.set_tick_params(length=0)
    axis.grid(visible=False)
    if is_horizontal:
        lengths.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        lengths.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def plain_log(axis: Axis) -> None:
    """Make an axis logarithmic, with plain numbers ("1,000") at its ticks."""
    axis.axes.set_xscale("log") if axis is axis.axes.xaxis else axis.axes.set_yscale("log")
    low, high = sorted(axis.get_data_interval())
    decades = np.log10(high / low) if 0 < low < high < np.inf else 1.0
    # Whatever the span, several values are named.
    is_short = decades < 0.6
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 1 else (1.0, 2.0, 5.0) if decades < 2 else (1.0,)
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]) if is_short else LogLocator(subs=subs))
    if is_short:
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def _widest(interval: NDArray[np.float64]) -> float:
    return float(interval[1]) if np.isfinite(interval[1]) else 0.0
