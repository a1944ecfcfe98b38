# SPDX-License-Identifier: Apache-2.0
"""Picture of `python -m lab checkouts`, drawn from its JSON: the ratio of each case with its confidence interval."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lab.pictures import describe_origin
from stretto.report.style import EXPOSED, GREY, GUIDE, STRETTO, Look, drawing

_ROW = 0.17  # inches
_KINDS: tuple[tuple[str, Look, bool], ...] = (
    ("median and 95% interval", STRETTO, False),
    ("the same, of a kernel that fills the GPU and waits", EXPOSED, True),
)


def plot_checkouts(result: Path, picture: Path) -> None:
    """Draw a line a case: the median of after / before with its interval, and the bounds; the first case on top."""
    data = json.loads(result.read_text())
    rows = data["rows"]
    bounds = (1 - data["bound"], 1 + data["bound"])
    with drawing(picture, 8, _ROW * len(rows) + 0.6) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        panel.axvspan(*bounds, color=GREY, alpha=0.25, linewidth=0, label=f"counts as equal: {data['bound']:.0%}")
        panel.axvline(1, **GUIDE)
        for label, look, is_bounded in _KINDS:
            mine = [(place, row) for place, row in enumerate(rows) if row["is_bounded"] == is_bounded]
            if mine:
                _plot_intervals(panel, mine, look, label)
        panel.set_yticks(range(len(rows)), [row["case"] for row in rows])
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.tick_params(axis="y", length=0)
        panel.set_xlabel("time after / before")
        if any(" LL " in row["case"] for row in rows):
            drawn.caption = "LL: the protocol for small messages, which sends a flag beside every 4 bytes."
        drawn.title = f"Two checkouts, interleaved: {data['ranks']} ranks on one device"
        drawn.subtitle = describe_origin(data)


def _plot_intervals(panel: Axes, rows: Sequence[tuple[int, Mapping[str, Any]]], look: Look, label: str) -> None:
    panel.errorbar(
        [row["ratio"] for _, row in rows],
        [place for place, _ in rows],
        xerr=(
            [row["ratio"] - row["low"] for _, row in rows],
            [row["high"] - row["ratio"] for _, row in rows],
        ),
        linestyle="none",
        color=look.colour,
        marker=look.marker,
        elinewidth=1.2,
        label=label,
    )
