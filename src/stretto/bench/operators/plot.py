# SPDX-License-Identifier: Apache-2.0
"""Pictures of `stretto bench ops`, drawn from its JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stretto.bench.plots import OTHER_PEER, OURS, PEER, describe_origin

_WAYS = (("nccl", "GEMM + NCCL", PEER), ("async_tp", "async-TP", OTHER_PEER), ("stretto", "Stretto", OURS))


def plot_operators(result: Path, picture: Path) -> None:
    """Draw a row an operator: time beyond the GEMM over m, overlap efficiency, and speed-ups of all cases."""
    data = json.loads(result.read_text())
    mode = "graph" if any(row["mode"] == "graph" for row in data["rows"]) else "eager"
    shown = [row for row in data["rows"] if row["mode"] == mode]
    names = list(dict.fromkeys(row["operator"] for row in shown))
    figure = Figure(figsize=(14, 3.4 * max(1, len(names))), layout="constrained")
    panels = figure.subplots(max(1, len(names)), 3, squeeze=False)
    for (times, efficiency, speed), name in zip(panels, names, strict=False):
        rows = [row for row in shown if row["operator"] == name]
        flux = sorted((row for row in rows if row["case"] == "flux"), key=lambda row: row["m"])
        _plot_times(times, flux)
        _plot_efficiency(efficiency, flux)
        _plot_speed(speed, rows)
        times.set_title(f"{name}: Flux's shapes", fontsize=9)
        speed.set_title(f"{name}: how many times as fast as GEMM + NCCL", fontsize=9)
    dtype = data.get("dtype", "bf16")
    figure.suptitle(f"{data['ranks']} ranks, {dtype}, {mode}, {describe_origin(data)}", fontsize=10)
    figure.savefig(picture, dpi=110)


def plot_ablations(result: Path, picture: Path) -> None:
    """Draw a panel an operator and m: the time of each variation, as a bar."""
    data = json.loads(result.read_text())
    panels = list(dict.fromkeys((row["operator"], row["case"], row["m"]) for row in data["rows"]))
    figure = Figure(figsize=(9, 4.5 * max(1, len(panels))), layout="constrained")
    for axes, key in zip(figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0], panels, strict=False):
        rows = [row for row in data["rows"] if (row["operator"], row["case"], row["m"]) == key][::-1]
        bars = axes.barh([row["variation"] for row in rows], [row["milliseconds"] for row in rows], color=OURS)
        axes.bar_label(bars, fmt="{:.3f}", padding=3, fontsize=8)
        axes.set_title(f"{key[0]}, {key[1]}, m = {key[2]}", fontsize=9)
        axes.set_xlabel("ms")
        axes.margins(x=0.12, y=0.02)
    figure.suptitle(f"{data['ranks']} ranks, bf16, CUDA graphs, {describe_origin(data)}", fontsize=10)
    figure.savefig(picture, dpi=110)


def _plot_times(panel: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for key, label, colour in _WAYS:
        points = [(row["m"], (row[key] - row["gemm"]) * 1e3) for row in rows if row.get(key) is not None]
        panel.plot([m for m, _ in points], [value for _, value in points], color=colour, marker=".", label=label)
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("m")
    panel.set_ylabel("beyond the GEMM alone (us)")
    panel.legend(fontsize=7)


def _plot_efficiency(panel: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    panel.plot([row["m"] for row in rows], [100 * row["efficiency"] for row in rows], color=OURS, marker=".")
    panel.axhline(0, color=PEER, linewidth=1)
    panel.set_xscale("log", base=2)
    panel.set_ylim(top=100)
    panel.set_xlabel("m")
    panel.set_ylabel("overlap efficiency (%)")


def _plot_speed(panel: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    labels = [f"{row['case']}, {row['m']}" + ("" if row["ran"] == "kernel" else "*") for row in rows]
    panel.barh(labels[::-1], [row["to_nccl"] for row in rows][::-1], color=OURS)
    panel.axvline(1, color=PEER, linewidth=1)
    panel.tick_params(axis="y", labelsize=6)
    panel.set_xlabel("* the library ran" if any(label.endswith("*") for label in labels) else "")
