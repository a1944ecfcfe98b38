# SPDX-License-Identifier: Apache-2.0
"""Pictures of `stretto bench ablations`, drawn from its JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stretto.bench.interleaved import name_size
from stretto.bench.plots import EXPOSED, OTHER_PEER, OURS, PEER, describe_origin


def plot_pipelining(result: Path, picture: Path) -> None:
    """A panel an algorithm and mode: microseconds over size, one tile beside every tile size."""
    data = json.loads(result.read_text())
    tiles = sorted({name for row in data["rows"] for name in row if name.startswith("tile ")}, key=_tile_bytes)
    shades = [f"C{index}" for index in range(len(tiles))]
    lines = [("whole", "one tile", PEER)]
    labels = [f"tiles of {name_size(_tile_bytes(name))}" for name in tiles]
    lines += zip(tiles, labels, shades, strict=True)
    _plot(data, picture, lines, "Pipelining over tiles")


def plot_composition(result: Path, picture: Path) -> None:
    """A panel an algorithm and mode: microseconds over size, one kernel beside library calls."""
    lines = [
        ("composed", "composed of NCCL calls", PEER),
        ("library", "NCCL's own", OTHER_PEER),
        ("interpreted", "one kernel, interpreted", EXPOSED),
        ("kernel", "one kernel, fused", OURS),
    ]
    _plot(json.loads(result.read_text()), picture, lines, "One kernel against the same algorithm composed")


def _plot(data: Mapping[str, Any], picture: Path, lines: Sequence[tuple[str, str, str]], title: str) -> None:
    algorithms = list(dict.fromkeys(row["algorithm"] for row in data["rows"]))
    modes = list(dict.fromkeys(row["mode"] for row in data["rows"]))
    width = max(1, len(algorithms))
    figure = Figure(figsize=(4.2 * width, 3.2 * max(1, len(modes))), layout="constrained")
    panels = figure.subplots(max(1, len(modes)), width, squeeze=False)
    for across, mode in zip(panels, modes, strict=False):
        for panel, algorithm in zip(across, algorithms, strict=False):
            rows = [row for row in data["rows"] if (row["algorithm"], row["mode"]) == (algorithm, mode)]
            _plot_times(panel, sorted(rows, key=lambda row: row["bytes"]), lines)
            panel.set_title(f"{algorithm}, {mode}", fontsize=9)
    figure.suptitle(f"{title}: {data['ranks']} ranks, {data['protocol']}, {describe_origin(data)}", fontsize=10)
    figure.savefig(picture, dpi=110)


def _plot_times(panel: Axes, rows: Sequence[Mapping[str, Any]], lines: Sequence[tuple[str, str, str]]) -> None:
    for key, label, colour in lines:
        points = [(row["bytes"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            panel.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=".", label=label)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xlabel("bytes of the whole array")
    panel.set_ylabel("microseconds")
    if panel.has_data():
        panel.legend(fontsize=7)


def _tile_bytes(name: str) -> int:
    return int(name.removeprefix("tile "))
