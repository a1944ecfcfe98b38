# SPDX-License-Identifier: Apache-2.0
"""Compares predictions with measurements: ratios a grid, rank correlation and the planner's choice."""

from collections.abc import Mapping, Sequence
from typing import Any

# A predicted fastest grid that is slower than the truly fastest by less than this is within a run's noise.
NEAR = 0.03


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
    return sorted(rows, key=lambda row: (_time(row) is None, _time(row) or 0.0))


def summarize(workload: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank correlation, the planner's choice and the largest relative errors, over grids with both times."""
    both = [row for row in rows if row["time_ratio"] is not None]
    summary: dict[str, Any] = {"workload": workload, "grids": len(both)}
    if not both:
        return summary
    chosen = min(both, key=lambda row: row["predicted_milliseconds"])
    fastest = min(both, key=lambda row: row["measured_milliseconds"])
    loss = chosen["measured_milliseconds"] / fastest["measured_milliseconds"] - 1
    return summary | {
        "rank_correlation": rank_correlation(
            [row["predicted_milliseconds"] for row in both], [row["measured_milliseconds"] for row in both]
        ),
        "predicted_fastest": chosen["grid"],
        "measured_fastest": fastest["grid"],
        "loss_by_choice": loss,
        "is_within_3_percent": loss <= NEAR,
        "largest_time_error": max(abs(row["time_ratio"] - 1) for row in both),
        "largest_memory_error": max(
            (abs(row["memory_ratio"] - 1) for row in both if row["memory_ratio"] is not None), default=None
        ),
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


def _time(row: Mapping[str, Any]) -> float | None:
    return row.get("measured_milliseconds")
