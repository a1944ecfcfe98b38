# SPDX-License-Identifier: Apache-2.0
"""Pictures of the studies, drawn from their JSON."""

import json
from pathlib import Path

from stretto.bench.pictures import describe_origin
from stretto.report.style import SMALL, drawing


def plot_two_level_heat_maps(result: Path, picture: Path) -> None:
    """Draw figures 6.9 and 6.11: a panel a machine and collective, the speed-up of two levels by ranks and MB."""
    import numpy as np
    from matplotlib.colors import LogNorm

    data = json.loads(result.read_text())
    panels = list(dict.fromkeys((row["machine"], row["collective"]) for row in data["rows"]))
    machines = list(dict.fromkeys(machine for machine, _ in panels))
    collectives = list(dict.fromkeys(collective for _, collective in panels))
    with drawing(picture, 4.2 * len(collectives), 3.2 * len(machines)) as drawn:
        axes = drawn.panels(len(machines), len(collectives))
        for machine, collective in panels:
            panel = axes[machines.index(machine)][collectives.index(collective)]
            rows = [row for row in data["rows"] if (row["machine"], row["collective"]) == (machine, collective)]
            ranks = sorted({row["ranks"] for row in rows})
            sizes = sorted({row["mb"] for row in rows}, reverse=True)
            cells = np.full((len(sizes), len(ranks)), np.nan)
            for row in rows:
                found = row["speedup"] if row["event_speedup"] is None else row["event_speedup"]
                cells[sizes.index(row["mb"]), ranks.index(row["ranks"])] = found
            panel.imshow(cells, cmap="RdBu", norm=LogNorm(1 / 40, 40), aspect="auto")
            for line, column in np.ndindex(cells.shape):
                panel.text(
                    column, line, f"{cells[line, column]:.2g}", ha="center", va="center", fontsize=SMALL, color="black"
                )
            panel.set_xticks(range(len(ranks)), [f"{count}" for count in ranks])
            panel.set_yticks(range(len(sizes)), [f"{size}" for size in sizes])
            panel.grid(visible=False)
            panel.set_title(f"{machine.capitalize()}, {collective.replace('_', '-')}")
            panel.set_xlabel("ranks")
            panel.set_ylabel("MB")
        drawn.title = "Speed-up of two levels over the vendor's flat ring, simulated"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Event-driven: packets that queue on links; a node stands for all. Above 1, two levels (recursive between "
            "nodes) are faster. MB: an all-gather's output, a reduce-scatter's input, of a rank."
        )
