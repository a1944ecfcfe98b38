# SPDX-License-Identifier: Apache-2.0
"""Picture of `stretto bench embedding`: peers, studies of the kernel, and a timeline of programs."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stretto.bench.plots import EXPOSED, OURS, PEER, describe_origin

_BARS = (("bags", "EmbeddingBags"), ("batched", "batched"), ("chunked", "chunked"), ("alone", "look-up alone"))


def plot_embedding(result: Path, picture: Path) -> None:
    """Draw a panel for the forward and the backward pass, and one for each study and timeline of each case."""
    data = json.loads(result.read_text())
    rows: list[dict[str, Any]] = data["rows"]
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["what"], "" if row["study"] == "peers" else row["case"])
        panels.setdefault(key, []).append(row)
    figure = Figure(figsize=(11, 3.2 * len(panels)), layout="constrained")
    for index, ((what, case), shown) in enumerate(panels.items()):
        panel = figure.add_subplot(len(panels), 1, index + 1)
        match what:
            case "forward" | "backward":
                _plot_peers(panel, what, shown)
            case "timeline":
                _plot_timeline(panel, case, shown[-1]["timeline"])
            case _:
                _plot_study(panel, what, case, shown)
    figure.suptitle(f"Embedding look-ups, {data['ranks']} ranks, {data['dtype']}, {describe_origin(data)}", fontsize=10)
    figure.savefig(picture, dpi=110)


def _plot_peers(panel: Axes, what: str, rows: list[dict[str, Any]]) -> None:
    """Bars of the peers' times divided by Stretto's, case by case."""
    bars = [(key, name) for key, name in _BARS if any(row.get(key) is not None for row in rows)]
    for place, (key, name) in enumerate(bars):
        heights = [(row.get(key) or 0.0) / row["stretto"] for row in rows]
        at = [number + 0.8 * place / len(bars) for number in range(len(rows))]
        shade = 0.9 - 0.5 * place / len(bars)
        panel.bar(at, heights, 0.8 / len(bars), label=name, color=PEER, alpha=shade)
    panel.axhline(1, color=OURS, linewidth=1.5, label="Stretto")
    panel.set_xticks([number + 0.3 for number in range(len(rows))], [row["case"] for row in rows], fontsize=7)
    panel.set_ylabel(f"{what}: times Stretto's")
    panel.legend(fontsize=7)


def _plot_study(panel: Axes, what: str, case: str, rows: list[dict[str, Any]]) -> None:
    """Bars of milliseconds, one a setting, labelled with the skew between ranks."""
    names = [row["setting"] for row in rows]
    panel.bar(range(len(rows)), [row["stretto"] for row in rows], 0.6, color=OURS)
    for place, row in enumerate(rows):
        panel.annotate(f"skew {row['skew']:.1%}", (place, row["stretto"]), ha="center", va="bottom", fontsize=6)
    panel.set_xticks(range(len(rows)), names, fontsize=6, rotation=20)
    panel.set_ylabel(f"{what} ({case}), ms")


def _plot_timeline(panel: Axes, case: str, timeline: dict[str, Any]) -> None:
    """Draw a line a program over microseconds: slices for other ranks, own slices, and the wait at the end."""
    for program, destination, begin, end in timeline["slices"]:
        color = PEER if destination == timeline["rank"] else OURS
        panel.barh(program, end - begin, 0.8, left=begin, color=color, edgecolor="white", linewidth=0.2)
    for program, (_, waits, end) in enumerate(timeline["programs"]):
        panel.barh(program, end - waits, 0.8, left=waits, color=EXPOSED)
    panel.set_xlabel("microseconds; blue: slices for other ranks, grey: own ones, red: waiting", fontsize=7)
    panel.set_ylabel(f"program ({case})")
