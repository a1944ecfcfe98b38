# SPDX-License-Identifier: Apache-2.0
"""Pictures of `python -m lab plan`, drawn from their JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lab.pictures import describe_origin
from stretto.report.style import GREY, GUIDE, ORANGE, PEER, SERIES, STRETTO, Look, drawing

_ROW = 0.2  # inches
_QUANTITIES = (("step time", "milliseconds", "ms"), ("peak memory", "gib", "GiB"))


def plot_plan(result: Path, picture: Path) -> None:
    """Draw a row of panels a workload: a line a grid, from its predicted to its measured time, and memory."""
    _plot_predicted(json.loads(result.read_text()), picture, "grid", "Grids are the sizes of data, x, y and z")


def plot_layouts(result: Path, picture: Path) -> None:
    """Draw a line a layout, from its predicted to its measured time, and memory; peers have no prediction."""
    _plot_predicted(json.loads(result.read_text()), picture, "layout", "Layouts are grids with how they run")


def _plot_predicted(data: Mapping[str, Any], picture: Path, kind: str, what_they_are: str) -> None:
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        if row.get("measured_milliseconds") is not None:
            rows_of.setdefault(row["workload"], []).append(row)
    quantities = [
        each for each in _QUANTITIES if any(_has_both(row, each[1]) for rows in rows_of.values() for row in rows)
    ]
    heights = [_ROW * len(rows) + 1.0 for rows in rows_of.values()]
    with drawing(picture, 9, sum(heights) or 1) as drawn:
        panels = drawn.panels(len(heights), len(quantities), height_ratios=heights or None, sharey="row")
        for across, (workload, rows) in zip(panels, rows_of.items(), strict=False):
            for panel, (quantity, key, unit) in zip(across, quantities, strict=True):
                _plot_pairs(panel, rows, key)
                panel.set_xlabel(f"{quantity} ({unit})")
            across[0].set_yticks(range(len(rows)), [row["grid"] for row in rows])
            across[0].set_ylim(len(rows) - 0.4, -0.6)
            predicted = [row for row in rows if row.get("predicted_milliseconds") is not None]
            chosen = min(predicted, key=lambda row: row["predicted_milliseconds"])["grid"]
            title = f"{workload}\npredicted to be the fastest: {chosen}; the fastest: {predicted[0]['grid']}"
            across[0].set_title(title, loc="left")
        drawn.title = f"Predicted before it was measured, {kind} by {kind}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = f"{what_they_are}, the fastest measured first."
        missing = sum(row.get("measured_milliseconds") is None for row in data["rows"])
        if missing:
            drawn.caption += f" Not drawn: {missing} predicted {kind}s that were not measured (the table says why)."


def _plot_pairs(panel: Axes, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    pairs = [
        (place, row[f"predicted_{key}"], row[f"measured_{key}"])
        for place, row in enumerate(rows)
        if _has_both(row, key)
    ]
    places, predicted, measured = ([pair[index] for pair in pairs] for index in range(3))
    panel.hlines(places, predicted, measured, color=GREY, linewidth=1.5, zorder=1)
    panel.plot(measured, places, linestyle="none", marker="o", markersize=6, color=STRETTO.colour, label="measured")
    panel.plot(
        predicted,
        places,
        linestyle="none",
        marker="D",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=ORANGE,
        markeredgewidth=1.6,
        label="predicted",
    )
    alone = [
        (place, row[f"measured_{key}"])
        for place, row in enumerate(rows)
        if row.get(f"measured_{key}") is not None and row.get(f"predicted_{key}") is None
    ]
    if alone:
        panel.plot(
            *zip(*((value, place) for place, value in alone), strict=True),
            linestyle="none",
            marker="s",
            markersize=6,
            color=PEER.colour,
            label="FSDP2",
        )
    panel.tick_params(axis="y", length=0)
    panel.set_xlim(left=0)


def _has_both(row: Mapping[str, Any], key: str) -> bool:
    return row.get(f"predicted_{key}") is not None and row.get(f"measured_{key}") is not None


def plot_simulated_steps(result: Path, picture: Path) -> None:
    """Draw a panel a workload: of each step the planner's and the simulator's time over the measured one."""
    data = json.loads(result.read_text())
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        rows_of.setdefault(row["workload"], []).append(row)
    series = (("planned_error", "plan --cost full", SERIES[1]), ("simulated_error", "simulated", STRETTO))
    workloads = list(rows_of.items())
    pairs = [workloads[place : place + 2] for place in range(0, len(workloads), 2)]
    heights = [_ROW * max(len(rows) for _, rows in pair) + 1.0 for pair in pairs]
    with drawing(picture, 13, sum(heights) or 1) as drawn:
        panels = drawn.panels(len(pairs), 2, height_ratios=heights or None, sharex=True)
        for across, pair in zip(panels, pairs, strict=True):
            for panel, (workload, rows) in zip(across, pair, strict=False):
                _plot_errors(panel, rows, series)
                panel.set_title(workload, loc="left")
            for panel in across[len(pair) :]:
                panel.set_visible(False)
        for panel in panels[-1] if len(pairs) else ():
            panel.set_xlabel("error of a step's time (%)")
        drawn.title = "Steps that were measured, as the planner and the simulator have them"
        drawn.subtitle = describe_origin(data, simulated="the machines that measured them, in closed form")
        drawn.caption = "Grids are the sizes of data, x, y and z, the fastest measured first."


def _plot_errors(panel: Axes, rows: Sequence[Mapping[str, Any]], series: Sequence[tuple[str, str, Look]]) -> None:
    panel.axvline(0, **GUIDE)
    for key, label, look in series:
        known = [(100 * row[key], place) for place, row in enumerate(rows) if row[key] is not None]
        errors, places = [error for error, _ in known], [place for _, place in known]
        if known:
            panel.plot(errors, places, linestyle="none", marker=look.marker, color=look.colour, label=label)
    panel.set_yticks(range(len(rows)), [row["grid"] for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)


def plot_simulated_pipelines(result: Path, picture: Path) -> None:
    """Draw the pipeline's phase by stages, and each framework's step over AxoNN's and part of the peak by GPUs."""
    data = json.loads(result.read_text())
    with drawing(picture, 12, 3.2) as drawn:
        stages, shares, ratios = drawn.panels(1, 3)[0]
        for key, label, look in (
            ("closed_seconds", "simulated", STRETTO),
            ("planned_seconds", "planner", SERIES[1]),
            ("published_seconds", "published", PEER),
        ):
            known = [(row["stages"], row[key]) for row in data["stages"] if row[key] is not None]
            if known:
                stages.plot(*zip(*known, strict=True), label=label, **look.line)
        stages.set_title("12B parameters, 48 GPUs", loc="left")
        stages.set_xlabel("stages")
        stages.set_ylabel("pipeline (s)")
        stages.set_ylim(bottom=0)
        frameworks = list(dict.fromkeys(row["framework"] for row in data["rows"]))
        for framework, look in zip(frameworks, SERIES[2:], strict=False):
            rows = [row for row in data["rows"] if row["framework"] == framework]
            gpus = [row["gpus"] for row in rows]
            shares.plot(gpus, [100 * row["peak_share"] for row in rows], label=framework, **look.line)
            ratios.plot(gpus, [row["over_axonn"] for row in rows], **look.line)
            known = [(row["gpus"], row["published_over_axonn"]) for row in rows if row["published_over_axonn"]]
            for place, ratio in known:
                ratios.plot([place], [ratio], marker=look.marker, color=look.colour, markerfacecolor="none")
        shares.set_ylabel("of the peak (%)")
        shares.set_ylim(bottom=0)
        ratios.set_ylabel("step over AxoNN's")
        for panel in (shares, ratios):
            panel.set_title("Table 3.1's choices", loc="left")
            panel.set_xlabel("GPUs")
        drawn.title = "Pipelines on Summit, simulated"
        drawn.subtitle = describe_origin(data, simulated="Summit, in closed form")
        drawn.caption = (
            "Hollow: published (figure 3.7, 100B parameters). Published parts of the peak: AxoNN 49 to 54%, "
            "DeepSpeed 39 to 42%, Megatron-LM 21 to 41%."
        )
