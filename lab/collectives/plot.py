# SPDX-License-Identifier: Apache-2.0
"""Pictures of `ablations`, drawn from their JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.collectives.peers_plot import _MODES
from lab.pictures import describe_origin
from stretto.bench.interleaved import name_size
from stretto.report.style import (
    OTHER_PEER,
    PEER,
    SERIES,
    STRETTO,
    THIRD_PEER,
    Look,
    drawing,
    plain_log,
)


def plot_pipelining(result: Path, picture: Path) -> None:
    """A panel an algorithm and mode: microseconds over size, one tile compared with every tile size."""
    data = json.loads(result.read_text())
    tiles = sorted({name for row in data["rows"] for name in row if name.startswith("tile ")}, key=_tile_bytes)
    series = [("whole", "a chunk in one tile", PEER)]
    labels = [f"tiles of {name_size(_tile_bytes(name))}" for name in tiles]
    series += zip(tiles, labels, [SERIES[number % len(SERIES)] for number in range(len(tiles))], strict=True)
    _plot_ablation(
        data,
        picture,
        series,
        "Pipelining over tiles",
        "With tiles, a thread block passes a part of a chunk on before it has received the rest.",
    )


def plot_composition(result: Path, picture: Path) -> None:
    """A panel an algorithm and mode: microseconds over size, one kernel compared with library calls."""
    series = [
        ("composed", "the algorithm, composed of NCCL calls", PEER),
        ("library", "NCCL's own collective", OTHER_PEER),
        ("interpreted", "the algorithm in one kernel, interpreted", THIRD_PEER),
        ("kernel", "the algorithm in one kernel, fused", STRETTO),
    ]
    _plot_ablation(
        json.loads(result.read_text()),
        picture,
        series,
        "One kernel beside the same algorithm composed of calls",
        "Interpreted: the kernel reads the schedule's steps from memory. Fused: it is generated for the schedule.",
    )


def _plot_ablation(
    data: Mapping[str, Any], picture: Path, series: Sequence[tuple[str, str, Look]], title: str, caption: str
) -> None:
    algorithms = list(dict.fromkeys(row["algorithm"] for row in data["rows"]))
    modes = list(dict.fromkeys(row["mode"] for row in data["rows"]))
    with drawing(picture, max(6.0, 3.1 * len(algorithms)), 2.3 * max(1, len(modes))) as drawn:
        panels = drawn.panels(len(modes), len(algorithms), sharey="col")
        for across, mode in zip(panels, modes, strict=False):
            for panel, algorithm in zip(across, algorithms, strict=False):
                rows = [row for row in data["rows"] if (row["algorithm"], row["mode"]) == (algorithm, mode)]
                rows.sort(key=lambda row: row["bytes"])
                for key, label, look in series:
                    points = [(row["bytes"], row[key]) for row in rows if row.get(key) is not None]
                    if points:
                        panel.plot([x for x, _ in points], [y for _, y in points], label=label, **look.line)
                drawn.log_ticks(panel.xaxis, [row["bytes"] for row in rows], name_size)
        for panel in panels.flat:
            if panel.has_data():
                plain_log(panel.yaxis)
        for panel in panels[-1]:
            panel.set_xlabel("size of the whole array")
        for panel, mode in zip(panels[:, 0], modes, strict=False):
            panel.set_ylabel(f"{_MODES.get(mode, mode)},\nmicroseconds")
        for panel, algorithm in zip(panels[0], algorithms, strict=False):
            panel.set_title(algorithm)
        drawn.title = f"{title}: {data['ranks']} ranks, protocol {data['protocol']}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = caption


def _tile_bytes(name: str) -> int:
    return int(name.removeprefix("tile "))
