# SPDX-License-Identifier: Apache-2.0
"""Picture of `stretto bench faults`, drawn from its JSON."""

import json
import statistics
from pathlib import Path
from typing import Any

from stretto.bench.faults.settings import KINDS
from stretto.bench.pictures import describe_origin
from stretto.report.style import INK, PEER, SERIES, drawing

_PANELS = {"seconds_named": "until it was named", "seconds_again": "until the first step after it"}
_SPREAD = 0.6  # of a kind's row: the height over which its points lie


def plot_faults(result: Path, picture: Path) -> None:
    """Draw a panel for each of the two times, with a row for each kind of fault and a point for each fault."""
    data = json.loads(result.read_text())
    kinds = [kind for kind in KINDS.values() if any(row["kind"] == kind for row in data["faults"])]
    with drawing(picture, 9.0, 1.4 + 0.45 * len(kinds)) as drawn:
        for panel, (key, title) in zip(drawn.panels(1, 2)[0], _PANELS.items(), strict=True):
            for place, kind in enumerate(reversed(kinds)):
                rows = [row for row in data["faults"] if row["kind"] == kind and row.get(key) is not None]
                _draw_points(panel, place, rows, key)
            if key == "seconds_named":
                panel.axvline(data["limit"], color=PEER.colour, linestyle="--", linewidth=1.2, label="limit")
            panel.set_yticks(range(len(kinds)), [*reversed(kinds)] if key == "seconds_named" else [""] * len(kinds))
            panel.set_ylim(-0.6, len(kinds) - 0.4)
            panel.set_xlim(left=0)
            panel.set_xlabel("s")
            panel.set_title(title)
        drawn.title = f"{len(data['faults'])} faults in training on {data['ranks']} ranks, and when it goes on"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            f"A point for each fault, and a line for the median; train.timeout is {data['timeout']:g} s, and the "
            "dashed line is the limit within which a failure must have been named. Faults that strike before a step "
            "was trained have no point on the right. A cross is a fault that did not go as it should."
        )


def _draw_points(panel: Any, place: int, rows: list[dict[str, Any]], key: str) -> None:
    """Draw a kind's faults, those that did not go as they should as crosses, and the median as a line."""
    if not rows:
        return
    for is_right, marker, look in ((True, "o", SERIES[0]), (False, "x", SERIES[1])):
        chosen = [(number, row) for number, row in enumerate(rows) if (not row["problems"]) == is_right]
        heights = [place + _SPREAD * ((number + 0.5) / len(rows) - 0.5) for number, _ in chosen]
        panel.plot(
            [row[key] for _, row in chosen],
            heights,
            marker=marker,
            linestyle="",
            markersize=3.5,
            color=look.colour,
        )
    median = statistics.median(row[key] for row in rows)
    panel.vlines(median, place - _SPREAD * 0.6, place + _SPREAD * 0.6, color=INK, linewidth=1.2)
