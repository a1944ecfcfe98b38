# SPDX-License-Identifier: Apache-2.0
"""Pictures of `stretto bench train`, `peers`, `overlap` and `dlrm`, drawn from their JSON."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stretto.bench.plots import EXPOSED, OURS, PEER, describe_origin


def plot_train(result: Path, picture: Path) -> None:
    """Draw tokens/s a GPU and peak memory of each run as bars, peers in another colour."""
    data = json.loads(result.read_text())
    model = data["workload"]["model"]
    what = f"GPT, {model['layers']} layers of hidden {model['hidden']}, sequence length {data['workload']['seq_len']}"
    _plot_runs(data, lambda row: "FSDP" in row["name"], what, picture)


def plot_peers(result: Path, picture: Path) -> None:
    """Draw tokens/s a GPU and peak memory of each run as bars, peers in another colour."""
    data = json.loads(result.read_text())
    work = data["workload"]
    what = f"{data['model']}, {work['model']['layers']} layers, global batch {work['batch']} x {work['seq_len']} tokens"
    _plot_runs(data, lambda row: row["is_peer"], what, picture)


def plot_overlap(result: Path, picture: Path) -> None:
    """Draw a panel a grid: step time of each stage, with its exposed communication (if measured) in red."""
    data = json.loads(result.read_text())
    rows = [row for row in data["rows"] if "step_milliseconds" in row]
    grids = list(dict.fromkeys(row["grid"] for row in rows))
    figure = Figure(figsize=(4.5 * max(1, len(grids)), 3), layout="constrained")
    for index, grid in enumerate(grids):
        panel = figure.add_subplot(1, len(grids), index + 1)
        stages = [row for row in rows if row["grid"] == grid][::-1]
        names = [row["overlap"] for row in stages]
        exposed = [row.get("exposed_milliseconds") or 0.0 for row in stages]
        rest = [row["step_milliseconds"] - part for row, part in zip(stages, exposed, strict=True)]
        panel.barh(names, rest, color=OURS)
        bars = panel.barh(names, exposed, left=rest, color=EXPOSED)
        labels = [f"{row['step_milliseconds']:,.0f}" for row in stages]
        panel.bar_label(bars, labels=labels, padding=3, fontsize=8)
        panel.set_title(grid, fontsize=9)
        panel.set_xlabel("step (ms), exposed communication in red")
        panel.margins(x=0.15)
    figure.suptitle(f"{data['model']}, {describe_origin(data)}", fontsize=10)
    figure.savefig(picture, dpi=130)


def plot_dlrm(result: Path, picture: Path) -> None:
    """Draw the step time of each implementation as a bar, with the look-up and its all-to-all in red."""
    data = json.loads(result.read_text())
    rows = [row for row in data["rows"] if "step_milliseconds" in row][::-1]
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.6), layout="constrained")
    panel = figure.add_subplot()
    names = [row["name"] for row in rows]
    forward = [row["forward_milliseconds"] for row in rows]
    rest = [row["step_milliseconds"] - part for row, part in zip(rows, forward, strict=True)]
    panel.barh(names, rest, color=OURS)
    bars = panel.barh(names, forward, left=rest, color=EXPOSED)
    panel.bar_label(bars, labels=[f"{row['step_milliseconds']:,.2f}" for row in rows], padding=3, fontsize=8)
    panel.set_xlabel("training step (ms), forward look-up and exchange in red")
    panel.margins(x=0.15)
    setting = data["setting"]
    tables = len(setting["model"]["rows"])
    figure.suptitle(f"DLRM, {tables} tables, global batch {setting['batch']}, {describe_origin(data)}", fontsize=10)
    figure.savefig(picture, dpi=130)


def _plot_runs(data: Mapping[str, Any], is_peer: Callable[[Mapping[str, Any]], bool], what: str, picture: Path) -> None:
    rows = [row for row in data["rows"] if "tokens_per_second_per_gpu" in row][::-1]
    figure = Figure(figsize=(9, 0.4 * len(rows) + 1.6), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True)
    names = [row["name"] for row in rows]
    colours = [PEER if is_peer(row) else OURS for row in rows]
    bars = speed.barh(names, [row["tokens_per_second_per_gpu"] for row in rows], color=colours)
    speed.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    speed.set_xlabel("tokens/s a GPU")
    speed.margins(x=0.18, y=0.02)
    bars = memory.barh(names, [row["peak_memory_gib"] or 0.0 for row in rows], color=colours)
    memory.bar_label(bars, fmt="{:.0f}", padding=3, fontsize=8)
    memory.set_xlabel("peak memory (GiB)")
    memory.margins(x=0.15, y=0.02)
    figure.suptitle(f"{what}, {describe_origin(data)}", fontsize=10)
    figure.savefig(picture, dpi=130)
