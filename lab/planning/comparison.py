# SPDX-License-Identifier: Apache-2.0
"""Compares predictions with measurements: ratios a grid, rank correlation and the planner's choice."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.harness import column
from lab.pictures import describe_origin, group

# A predicted fastest grid that is slower than the truly fastest by less than this is within a run's noise.
NEAR = 0.03


@dataclass(frozen=True)
class Row:
    """A grid or layout: predicted and measured, or why it was not measured."""

    workload: str = column("workload")
    grid: str = column("grid")
    predicted_milliseconds: float = column("predicted (ms)", "{:.1f}")
    measured_milliseconds: float = column("measured (ms)", "{:.1f}")
    time_ratio: float = column("predicted / measured", "{:.2f}")
    predicted_gib: float = column("predicted (GiB)", "{:.1f}")
    measured_gib: float = column("measured (GiB)", "{:.1f}")
    memory_ratio: float = column("predicted / measured", "{:.2f}")
    tokens_per_second_per_gpu: float = column("tokens/s/GPU", "{:,.0f}")
    loss: float = column("first loss", "{:.3f}")
    fits: str = column("predicted to fit")
    reason: str = column("why not")


@dataclass(frozen=True)
class Summary:
    """Quality of the order of a workload's grids, and the largest errors."""

    workload: str = column("workload")
    grids: int = column("measured")
    rank_correlation: float = column("rank correlation", "{:.3f}")
    predicted_fastest: str = column("predicted fastest")
    measured_fastest: str = column("truly fastest")
    loss_by_choice: float = column("slower by", "{:.1%}")
    is_within_3_percent: bool = column("within 3%")
    largest_time_error: float = column("largest time error", "{:.1%}")
    largest_memory_error: float = column("largest memory error", "{:.1%}")
    failed: int = column("predicted to fit, but failed")


def compare(
    workload: str, predicted: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each predicted grid, the fastest measured first, grids without a measurement last."""
    found = {row["grid"]: row for row in measured}
    rows = []
    for prediction in predicted:
        grid = prediction["grid"]
        row = dict(found.get(grid, {"reason": "not measured"})) | {"workload": workload, "grid": grid}
        row["predicted_milliseconds"] = prediction["predicted_milliseconds"]
        row["predicted_gib"] = prediction["predicted_gib"]
        row["time_ratio"] = _ratio(row["predicted_milliseconds"], row.get("measured_milliseconds"))
        row["memory_ratio"] = _ratio(row["predicted_gib"], row.get("measured_gib"))
        rows.append(row)
    return sorted(rows, key=_time)


def summarize(workload: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank correlation, the planner's choice and the largest relative errors, over grids with both times."""
    both = [row for row in rows if row["time_ratio"] is not None]
    summary: dict[str, Any] = {"workload": workload, "grids": len(both)}
    if not both:
        return summary
    judged = judge_order(both, "predicted_milliseconds")
    return summary | {
        "rank_correlation": judged["correlation"],
        "predicted_fastest": judged["choice"],
        "measured_fastest": min(both, key=_time)["grid"],
        "loss_by_choice": judged["loss"],
        "is_within_3_percent": judged["loss"] <= NEAR,
        "largest_time_error": judged["largest"],
        "largest_memory_error": max(
            (abs(row["memory_ratio"] - 1) for row in both if row["memory_ratio"] is not None), default=None
        ),
    }


def judge_order(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Compares the times in `key` with the measured ones: rank correlation, choice, its loss, and largest error."""
    times, measured = [row[key] for row in rows], [row["measured_milliseconds"] for row in rows]
    chosen = min(rows, key=lambda row: row[key])
    return {
        "correlation": rank_correlation(times, measured),
        "choice": chosen["grid"],
        "loss": chosen["measured_milliseconds"] / min(measured) - 1,
        "largest": max(abs(time / true - 1) for time, true in zip(times, measured, strict=True)),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's correlation of the ranks, where equal numbers share their mean rank.

    None for fewer than two pairs, and where all of one side are equal: there is no order to compare.
    """
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return covariance / spread if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value; 1 for the smallest."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def _ratio(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured if predicted and measured else None


def _time(row: Mapping[str, Any]) -> float:
    """Orders rows: the fastest measured first, those without a measurement last."""
    time: float | None = row.get("measured_milliseconds")
    return math.inf if time is None else time


def plot_predicted(data: Mapping[str, Any], picture: Path, kind: str, what_they_are: str) -> None:
    """Draw a row of panels a workload: a line a grid, from its predicted to its measured time, and memory."""
    from lab.style import drawing

    quantities_known = (("step time", "milliseconds", "ms"), ("peak memory", "gib", "GiB"))
    rows_of = group((row for row in data["rows"] if row.get("measured_milliseconds") is not None), "workload")
    quantities = [
        each for each in quantities_known if any(_has_both(row, each[1]) for rows in rows_of.values() for row in rows)
    ]
    heights = [0.2 * len(rows) + 1.0 for rows in rows_of.values()]
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


def _plot_pairs(panel: Any, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    from lab.style import PEER
    from stretto.report.style import GREY, ORANGE, STRETTO

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
        (row[f"measured_{key}"], place)
        for place, row in enumerate(rows)
        if row.get(f"measured_{key}") is not None and row.get(f"predicted_{key}") is None
    ]
    if alone:
        peers: dict[str, Any] = {"color": PEER.colour, "label": "FSDP2"}
        panel.plot(*zip(*alone, strict=True), linestyle="none", marker="s", markersize=6, **peers)
    panel.tick_params(axis="y", length=0)
    panel.set_xlim(left=0)


def _has_both(row: Mapping[str, Any], key: str) -> bool:
    return row.get(f"predicted_{key}") is not None and row.get(f"measured_{key}") is not None
