# SPDX-License-Identifier: Apache-2.0
"""Pictures of `stretto bench ops`, drawn from its JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lab.pictures import describe_origin, group
from lab.style import OTHER_PEER, PEER, Chart, drawing, name_bars
from stretto.report.style import GUIDE, STRETTO

_SERIES = (("nccl", "GEMM + NCCL", PEER), ("async_tp", "torch's async-TP", OTHER_PEER), ("stretto", "Stretto", STRETTO))
_NAMES = {
    "gather": "all-gather + GEMM",
    "gathered": "all-gather + GEMM, rows too",
    "scatter": "GEMM + reduce-scatter",
    "reduce": "GEMM + all-reduce",
}
_MODES = {"graph": "in CUDA graphs", "eager": "without CUDA graphs"}
_BAR = 0.2  # inches


def plot_operators(data: dict[str, Any], picture: Path) -> None:
    """Draw a row an operator: time beyond the GEMM over m, overlap efficiency, and speed-ups of all cases."""
    mode = "graph" if any(row["mode"] == "graph" for row in data["rows"]) else "eager"
    shown = [row for row in data["rows"] if row["mode"] == mode]
    rows_of = group(shown, "operator")
    heights = [max(2.0, _BAR * len(rows) + 0.5) for rows in rows_of.values()]
    with drawing(picture, 10, sum(heights)) as drawn:
        panels = drawn.panels(len(rows_of), 3, height_ratios=heights)
        for (times, efficiency, speed), (name, rows) in zip(panels, rows_of.items(), strict=True):
            flux = sorted((row for row in rows if row["case"] == "flux"), key=lambda row: row["m"])
            if flux:
                _plot_times(times, flux)
                _plot_efficiency(efficiency, flux)
                for panel in (times, efficiency):
                    drawn.log_ticks(panel.xaxis, [row["m"] for row in flux])
            _plot_speed(drawn, speed, rows)
            times.set_ylabel(f"{_NAMES.get(name, name)}\nmicroseconds")
            efficiency.set_ylabel("%")
        titles = ("time beyond the GEMM alone", "overlap efficiency", "GEMM + NCCL's time / Stretto's")
        for panel, title in zip(panels[0], titles, strict=True):
            panel.set_title(title)
        for panel in panels[-1, :2]:
            panel.set_xlabel("m, rows of the product")
        dtype = data.get("dtype", "bf16")
        drawn.title = f"GEMMs fused with their collective: {data['ranks']} ranks, {dtype}, {_MODES[mode]}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = _caption(shown)


def _caption(rows: Sequence[Mapping[str, Any]]) -> str:
    """The caption: explains what the picture does not show."""
    parts = [
        "Overlap efficiency (Flux, eq. 2): the part of the time which NCCL adds to the GEMM that the operator hides."
    ]
    if any(row["case"] == "flux" and row["efficiency"] > 1 for row in rows):
        parts.append("Above 100% the operator takes less time than torch's GEMM alone.")
    shapes = {(row["operator"], row["n"], row["k"]) for row in rows if row["case"] == "flux"}
    if shapes:
        sizes = sorted({f"{n} x {k}" for _, n, k in shapes})
        parts.append(f"Flux's shapes: a rank's product is m x {' or m x '.join(sizes)}.")
    if any(row["operator"] == "reduce" for row in rows) and any(row.get("async_tp") is not None for row in rows):
        parts.append("async-TP has no all-reduce, and does not run in a CUDA graph.")
    if any(row["ran"] != "kernel" for row in rows):
        parts.append("Starred: Stretto called the library.")
    return " ".join(parts)


def _plot_times(panel: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    for key, label, look in _SERIES:
        points = [(row["m"], (row[key] - row["gemm"]) * 1e3) for row in rows if row.get(key) is not None]
        if points:
            panel.plot([m for m, _ in points], [value for _, value in points], label=label, **look.line)
    panel.axhline(0, **GUIDE)


def _plot_efficiency(panel: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    percents = [100 * row["efficiency"] for row in rows]
    panel.plot([row["m"] for row in rows], percents, **STRETTO.line)
    for value in (0, 100):
        panel.axhline(value, **GUIDE)
    panel.set_ylim(min(0, *percents) - 5, max(100, *percents) * 1.06)


def _plot_speed(drawn: Chart, panel: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    labels = []
    for row in rows[::-1]:
        case = "" if row["case"] == "flux" else f"{row['case']}, "
        labels.append(f"{case}m = {row['m']}" + ("" if row["ran"] == "kernel" else " *"))
    values = [row["to_nccl"] for row in rows[::-1]]
    bars = panel.barh(range(len(rows)), values, 0.75, **STRETTO.bar)
    drawn.label_bars(panel, bars, [f"{value:.2f}" for value in values])
    name_bars(panel, range(len(rows)), labels)
    panel.axvline(1, **GUIDE)
