# SPDX-License-Identifier: Apache-2.0
"""Picture of `stretto bench schedules`, drawn from its JSON: each order's makespan to plain 1F1B's, over the jitter."""

import json
from pathlib import Path

from stretto.bench.pictures import describe_origin
from stretto.report.style import GUIDE, SERIES, drawing

_MEMORY = {"equal": "live micro-batches as 1F1B", "twice": "twice as many"}


def plot_schedules(result: Path, picture: Path) -> None:
    """Draw a row of panels for each size: a panel for each latency, at equal memory and at twice that."""
    data = json.loads(result.read_text())
    sizes, latencies, memories, orders = (
        list(dict.fromkeys(row[key] for row in data["rows"])) for key in ("size", "latency", "memory", "order")
    )
    columns = [(latency, memory) for latency in latencies for memory in memories]
    with drawing(picture, max(6.0, 2.6 * len(columns)), 2.4 * len(sizes)) as drawn:
        panels = drawn.panels(len(sizes), len(columns), sharey="row", sharex=True)
        for across, size in zip(panels, sizes, strict=True):
            for panel, (latency, memory) in zip(across, columns, strict=True):
                panel.axhline(1, **GUIDE)
                for order, look in zip(orders, SERIES, strict=False):
                    rows = [
                        row
                        for row in data["rows"]
                        if (row["size"], row["latency"], row["memory"], row["order"]) == (size, latency, memory, order)
                    ]
                    jitters = [100 * row["jitter"] for row in rows]
                    if rows:
                        panel.plot(jitters, [row["to_1f1b"] for row in rows], label=order, **look.line)
                panel.set_title(f"{size}, latency {latency:g},\n{_MEMORY[memory]}")
            across[0].set_ylabel("to plain 1F1B")
        for panel in panels[-1]:
            panel.set_xlabel("jitter of units (%)")
        drawn.title = "Makespans of pipelines whose units take unequal times, to that of plain 1F1B"
        drawn.subtitle = f"{describe_origin(data)}, by the timing model"
        drawn.caption = (
            f"Medians of {data['setting']['seeds']} seeds; lower is faster. Stages x micro-batches; F = 1, B = 2; "
            "latencies in forward passes."
        )
