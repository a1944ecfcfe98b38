"""Pictures of bench results, made from their JSON so that they can be made again."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS, PEER, EXPOSED = "#2a6f97", "#8a8a8a", "#e07a5f"


def plot_train(result: Path, picture: Path) -> None:
    """Tokens/s a GPU and peak memory of each run, as bars; peers in another colour."""
    data = json.loads(result.read_text())
    model = data["workload"]["model"]
    what = f"GPT, {model['layers']} layers of hidden {model['hidden']}, sequence length {data['workload']['seq_len']}"
    _plot_runs(data, lambda row: "FSDP" in row["name"], what, picture)


def plot_peers(result: Path, picture: Path) -> None:
    """Tokens/s a GPU and peak memory of each run, as bars; peers in another colour."""
    data = json.loads(result.read_text())
    work = data["workload"]
    what = f"{data['model']}, {work['model']['layers']} layers, global batch {work['batch']} x {work['seq_len']} tokens"
    _plot_runs(data, lambda row: row["is_peer"], what, picture)


def plot_overlap(result: Path, picture: Path) -> None:
    """A panel a grid: step time of each stage, of which what is exposed stands out where it was measured."""
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
    figure.suptitle(f"{data['model']}, {_where(data)}", fontsize=10)
    figure.savefig(picture, dpi=130)


def plot_dlrm(result: Path, picture: Path) -> None:
    """The step of each implementation as a bar, of which the look-up with its exchange stands out."""
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
    figure.suptitle(f"DLRM, {tables} tables, global batch {setting['batch']}, {_where(data)}", fontsize=10)
    figure.savefig(picture, dpi=130)


def plot_plan(result: Path, picture: Path) -> None:
    """Predicted against measured, step time and peak memory, a colour a workload."""
    data = json.loads(result.read_text())
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    time, memory = figure.subplots(1, 2)
    for workload in dict.fromkeys(row["workload"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["workload"] == workload]
        _plot_pairs(time, rows, "measured_milliseconds", "predicted_milliseconds", workload)
        _plot_pairs(memory, rows, "measured_gib", "predicted_gib", workload)
    for panel, what in ((time, "step (ms)"), (memory, "peak memory (GiB)")):
        start = panel.dataLim.xmin if panel.has_data() else 0.0
        panel.axline((start, start), slope=1, color=PEER, linewidth=1)
        panel.set_xlabel(f"measured {what}")
        panel.set_ylabel(f"predicted {what}")
    time.legend(fontsize=7)
    figure.suptitle(f"Predicted before it was measured, {_where(data)}", fontsize=10)
    figure.savefig(picture, dpi=130)


def plot_two_level(result: Path, picture: Path) -> None:
    """A panel a collective: measured times over the size, the model's dashed, and where recursive and ring cross."""
    data = json.loads(result.read_text())
    collectives = list(dict.fromkeys(row["collective"] for row in data["rows"]))
    figure = Figure(figsize=(5.2 * len(collectives), 4.2), layout="constrained")
    for panel, collective in zip(figure.subplots(1, len(collectives), squeeze=False)[0], collectives, strict=True):
        rows = [row for row in data["rows"] if row["collective"] == collective]
        sizes = [row["shard_kib"] for row in rows]
        for name, colour in (("recursive", OURS), ("ring", EXPOSED), ("flat", PEER)):
            panel.plot(sizes, [row[f"{name}_ms"] for row in rows], "o-", color=colour, label=name, markersize=4)
            panel.plot(sizes, [row[f"{name}_model_ms"] for row in rows], "--", color=colour, linewidth=1)
        crossing = next(
            row for row in data["crossovers"] if row["collective"] == collective and row["between"] == "recursive, ring"
        )
        for key, style, label in (("measured_kib", "-", "measured"), ("predicted_kib", "--", "predicted")):
            if crossing[key] is not None:
                panel.axvline(crossing[key], color="#333333", linestyle=style, linewidth=0.8)
                panel.plot([], [], color="#333333", linestyle=style, linewidth=0.8, label=f"crossing, {label}")
        panel.set(xscale="log", yscale="log", xlabel="KiB a rank", ylabel="ms", title=collective.replace("_", "-"))
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes], minor=False)
        panel.minorticks_off()
        panel.legend(frameon=False, fontsize=8)
    setting = data["setting"]
    figure.suptitle(
        f"{setting['nodes']} namespaces of {setting['ranks_per_node']} ranks, {setting['bandwidth']:g} Mbit/s, "
        f"{setting['delay']:g} ms; dashed: the model. {_where(data)}",
        fontsize=9,
    )
    figure.savefig(picture, dpi=130)


def _plot_pairs(panel: Axes, rows: Sequence[Mapping[str, Any]], x: str, y: str, label: str) -> None:
    pairs = [(row[x], row[y], row["grid"]) for row in rows if row.get(x) is not None and row.get(y) is not None]
    panel.scatter([pair[0] for pair in pairs], [pair[1] for pair in pairs], s=18, label=label)
    for measured, predicted, grid in pairs:
        panel.annotate(grid, (measured, predicted), fontsize=5, xytext=(3, 3), textcoords="offset points")


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
    figure.suptitle(f"{what}, {_where(data)}", fontsize=10)
    figure.savefig(picture, dpi=130)


def _where(data: Mapping[str, Any]) -> str:
    return f"{data['machine']['devices']}, {data['date']}"
