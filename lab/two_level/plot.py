# SPDX-License-Identifier: Apache-2.0
"""Picture of `python -m lab two-level`, drawn from its JSON: measured and predicted times, and where they cross."""

import json
from pathlib import Path

from lab.pictures import describe_origin
from stretto.report.style import GREEN, INK, ORANGE, PEER, STRETTO, Look, drawing, plain_log

_LOOKS = {
    "recursive": STRETTO,
    "ring": Look(ORANGE, "^"),
    "flat": Look(PEER.colour, "s"),
}
_CROSSINGS = (("measured_kib", "-", "measured"), ("predicted_kib", (0, (4, 2)), "predicted"))


def plot_two_level(result: Path, picture: Path) -> None:
    """Draw a panel a collective: times over size, predictions dashed, and where recursive and ring cross."""
    data = json.loads(result.read_text())
    collectives = list(dict.fromkeys(row["collective"] for row in data["rows"]))
    setting = data["setting"]
    with drawing(picture, max(6.0, 4.5 * len(collectives)), 3.2) as drawn:
        panels = drawn.panels(1, len(collectives), sharey=True)[0]
        for panel, collective in zip(panels, collectives, strict=True):
            rows = [row for row in data["rows"] if row["collective"] == collective]
            sizes = [row["shard_kib"] for row in rows]
            for name, look in _LOOKS.items():
                panel.plot(sizes, [row[f"{name}_ms"] for row in rows], label=name, **look.line)
                predicted = [row[f"{name}_model_ms"] for row in rows]
                panel.plot(sizes, predicted, color=look.colour, linestyle=(0, (4, 2)), linewidth=1)
            crossing = next(
                row
                for row in data["crossovers"]
                if row["collective"] == collective and row["between"] == "recursive, ring"
            )
            for key, dashes, label in _CROSSINGS:
                if crossing[key] is not None:
                    colour = GREEN if key == "measured_kib" else INK
                    panel.axvline(
                        crossing[key],
                        color=colour,
                        linestyle=dashes,
                        linewidth=1,
                        label=f"recursive and ring cross, {label}",
                    )
            drawn.log_ticks(panel.xaxis, sizes)
            plain_log(panel.yaxis)
            panel.set_xlabel("KiB of each rank")
            panel.set_title(collective.replace("_", "-"))
        panels[0].set_ylabel("ms")
        drawn.title = (
            f"Two-level collectives: {setting['nodes']} network namespaces of {setting['ranks_per_node']} ranks, "
            f"{setting['bandwidth']:g} Mbit/s, {setting['delay']:g} ms"
        )
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Dashed without markers: predicted by the model. Recursive, ring: recursive doubling (halving) or a ring "
            "between nodes, and a collective inside each node. Flat: one ring over all ranks."
        )
