# SPDX-License-Identifier: Apache-2.0
"""The picture of the ablations of operators, drawn from its JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.operators.peers_plot import _BAR, _NAMES
from lab.pictures import describe_origin
from stretto.report.style import PEER, STRETTO, drawing, name_bars


def plot_ablations(result: Path, picture: Path) -> None:
    """Draw a panel an operator and m: the time of each variation, as a bar."""
    data = json.loads(result.read_text())
    rows_of: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        rows_of.setdefault((row["operator"], row["case"], row["m"]), []).append(row)
    heights = [_BAR * len(rows) + 0.7 for rows in rows_of.values()]
    with drawing(picture, 8, sum(heights)) as drawn:
        panels = drawn.panels(len(rows_of), 1, height_ratios=heights)[:, 0]
        for panel, ((operator, case, m), rows) in zip(panels, rows_of.items(), strict=True):
            times = [row["milliseconds"] for row in rows[::-1]]
            looks = [STRETTO if row["variation"] == "as chosen" else PEER for row in rows[::-1]]
            bars = panel.barh(range(len(rows)), times, 0.75, color=[look.colour for look in looks])
            drawn.label_bars(panel, bars, [f"{time:.3f}" for time in times])
            name_bars(panel, range(len(rows)), [row["variation"] for row in rows[::-1]])
            panel.set_title(f"{_NAMES.get(operator, operator)}, {case}, m = {m}", loc="left")
            panel.set_xlabel("ms")
        drawn.title = f"One choice of the operators changed at a time: {data['ranks']} ranks, bf16, in CUDA graphs"
        drawn.subtitle = describe_origin(data)
        drawn.caption = "Blue: the operator as it is. Grey: with one choice changed, which the row names."
