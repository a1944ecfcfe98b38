# SPDX-License-Identifier: Apache-2.0
"""Picture of `stretto bench embedding`: peers, studies of the kernel, and a timeline of programs."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lab.pictures import describe_origin
from stretto.report.style import (
    EXPOSED,
    FOURTH_PEER,
    OTHER_PEER,
    PEER,
    STRETTO,
    THIRD_PEER,
    Picture,
    drawing,
    group_bars,
    name_bars,
)

_BARS = (
    ("bags", "EmbeddingBags, then all-to-all", PEER),
    ("batched", "batched kernel, then all-to-all", OTHER_PEER),
    ("chunked", "the same, in chunks on two streams", FOURTH_PEER),
    ("alone", "batched kernel alone", THIRD_PEER),
)
_PEERS_CAPTION = (
    "Bars above the line took longer than Stretto's look-up, which is fused with its all-to-all. The batched kernel "
    "alone sends nothing. Cases: global batch x tables a rank x columns x rows in a bag; mlperf: the 26 tables and "
    "bags of MLPerf's DLRM-v2."
)
_STUDY_CAPTION = "Skew: how much longer the slowest rank takes than the fastest."
_TIMELINE_CAPTION = "A program is an instance of the kernel, and a slice the part of the batch that it sends as one."


def plot_embedding(result: Path, picture: Path) -> None:
    """Draw a panel for the forward and the backward pass, and one for each study and timeline of each case."""
    data = json.loads(result.read_text())
    rows: list[dict[str, Any]] = data["rows"]
    panels: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["what"], "" if row["study"] == "peers" else row["case"])
        panels.setdefault(key, []).append(row)
    width = max(8.5, *(1.3 * len(shown) for shown in panels.values()))
    captions = []
    with drawing(picture, width, 2.3 * len(panels)) as drawn:
        for panel, ((what, case), shown) in zip(drawn.panels(len(panels), 1)[:, 0], panels.items(), strict=True):
            match what:
                case "forward" | "backward":
                    _plot_peers(panel, what, shown)
                    captions.append(_PEERS_CAPTION)
                case "timeline":
                    _plot_timeline(panel, case, shown[-1]["timeline"])
                    captions.append(_TIMELINE_CAPTION)
                case _:
                    _plot_study(drawn, panel, what, case, shown)
                    captions.append(_STUDY_CAPTION)
        drawn.title = f"Embedding look-ups: {data['ranks']} ranks, {data['dtype']}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = " ".join(dict.fromkeys(captions))


def _plot_peers(panel: Axes, what: str, rows: list[dict[str, Any]]) -> None:
    """Bars of the peers' times divided by Stretto's, case by case."""
    bars = [bar for bar in _BARS if any(row.get(bar[0]) is not None for row in rows)]
    centres, width = group_bars(len(rows), len(bars))
    for at, (key, label, look) in zip(centres, bars, strict=True):
        found = [(x, row[key] / row["stretto"]) for x, row in zip(at, rows, strict=True) if row.get(key) is not None]
        panel.bar([x for x, _ in found], [y for _, y in found], width, label=label, **look.bar)
    panel.axhline(1, color=STRETTO.colour, linewidth=1.8, label="Stretto")
    name_bars(panel, range(len(rows)), [row["case"] for row in rows], is_horizontal=False)
    panel.set_xlim(-0.5, len(rows) - 0.5)
    panel.set_ylabel(f"{what} pass:\ntime / Stretto's")


def _plot_study(drawn: Picture, panel: Axes, what: str, case: str, rows: list[dict[str, Any]]) -> None:
    """Bars of milliseconds, one a setting, labelled with the skew between ranks."""
    bars = panel.bar(range(len(rows)), [row["stretto"] for row in rows], 0.6, **STRETTO.bar)
    drawn.label_bars(panel, bars, [f"skew {row['skew']:.1%}" for row in rows])
    names = [str(row["setting"]).replace(", ", ",\n") for row in rows]
    name_bars(panel, range(len(rows)), names, is_horizontal=False)
    panel.set_xlim(-0.5, len(rows) - 0.5)
    panel.set_ylabel(f"{what} ({case}),\nms")


def _plot_timeline(panel: Axes, case: str, timeline: dict[str, Any]) -> None:
    """Draw a line a program over microseconds: slices for other ranks, own slices, and the wait at the end."""
    kinds = (
        ("slices for other ranks", STRETTO, [each for each in timeline["slices"] if each[1] != timeline["rank"]]),
        ("slices for the rank itself", PEER, [each for each in timeline["slices"] if each[1] == timeline["rank"]]),
    )
    for label, look, slices in kinds:
        places, begins, ends = ([each[index] for each in slices] for index in (0, 2, 3))
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if slices:
            style = look.bar | {"linewidth": 0.2}
            panel.barh(places, lengths, 0.8, left=begins, label=label, **style)
    waits = [(program, begin, end - begin) for program, (_, begin, end) in enumerate(timeline["programs"])]
    places, begins, lengths = ([each[index] for each in waits] for index in range(3))
    panel.barh(places, lengths, 0.8, left=begins, label="waiting for other ranks", **EXPOSED.bar)
    panel.set_xlabel("microseconds")
    panel.set_yticks(range(0, len(waits), max(1, len(waits) // 8)))
    panel.set_ylim(-0.6, len(waits) - 0.4)
    panel.set_ylabel(f"program\n({case})")
