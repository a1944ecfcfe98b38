# SPDX-License-Identifier: Apache-2.0
"""Picture of `stretto bench embedding`: its peers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lab.pictures import describe_origin, group
from lab.style import FOURTH_PEER, OTHER_PEER, PEER, THIRD_PEER, drawing, group_bars, name_bars
from stretto.report.style import STRETTO

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


def plot_embedding(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel for the forward pass, and one for the backward pass."""
    passes = group(data["rows"], "what")
    width = max(8.5, *(1.3 * len(rows) for rows in passes.values()))
    with drawing(picture, width, 2.3 * len(passes)) as drawn:
        for panel, (what, rows) in zip(drawn.panels(len(passes), 1)[:, 0], passes.items(), strict=True):
            _plot_peers(panel, what, rows)
        drawn.title = f"Embedding look-ups: {data['ranks']} ranks, {data['dtype']}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = _PEERS_CAPTION


def _plot_peers(panel: Axes, what: str, rows: Sequence[Mapping[str, Any]]) -> None:
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
