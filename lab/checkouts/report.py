# SPDX-License-Identifier: Apache-2.0
"""Reports `python -m lab checkouts`: ratios with their confidence intervals, verdicts and tables."""

import hashlib
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lab.checkouts.cases import CheckoutCase
from lab.checkouts.settings import CheckoutsSetting
from lab.pictures import draw_result
from lab.tables import append_to_table
from stretto.bench.harness import Column, print_table, write_result

BOUND = 0.02
"""Medians of ratios that differ from 1 by less count as equal."""

_NORMAL_QUANTILE = 1.96  # for 95% confidence
_MIN_RATIOS = 6  # the fewest whose smallest and largest enclose the median with that confidence

COLUMNS = (
    Column("case", "case"),
    Column("rounds", "rounds"),
    Column("before", "before (us)", "{:.1f}"),
    Column("after", "after (us)", "{:.1f}"),
    Column("ratio", "after / before", "{:.3f}"),
    Column("low", "from", "{:.3f}"),
    Column("high", "to", "{:.3f}"),
    Column("verdict", "verdict"),
    Column("host_before", "host before (us)", "{:.1f}"),
    Column("host_after", "host after (us)", "{:.1f}"),
)


class RatioEstimate(NamedTuple):
    """The ratio after / before of a case and its 95% confidence interval. rounds: the fewest of any placement."""

    ratio: float
    low: float
    high: float
    rounds: int

    def judge(self) -> str:
        """The verdict on a case: "same", "slower" or "faster" by more than the bound, or "unclear".

        A case is slower or faster if its whole confidence interval lies beyond the bound, and the same if its ratio
        lies within. Fewer than six rounds have no such interval.
        """
        if abs(self.ratio - 1) <= BOUND:
            return "same"
        if self.rounds < _MIN_RATIOS or (self.low <= 1 + BOUND and self.high >= 1 - BOUND):
            return "unclear"
        return "slower" if self.low > 1 + BOUND else "faster"


@dataclass
class MeasuredCase:
    """Seconds a call, (before, after) of each round: on the device, and for the host to issue it.

    placements: which of the placements of the ranks on the GPU each round was measured with.
    """

    device: list[tuple[float, float]] = field(default_factory=list)
    host: list[tuple[float, float]] = field(default_factory=list)
    placements: list[int] = field(default_factory=list)

    def estimate(self) -> RatioEstimate:
        """The geometric mean of the placements' medians, which cancels the effect of a set's place on the GPU."""
        ratios: dict[int, list[float]] = {}
        for (before, after), placement in zip(self.device, self.placements, strict=True):
            ratios.setdefault(placement, []).append(after / before)
        intervals = [find_interval(found) for found in ratios.values()]
        return RatioEstimate(
            statistics.geometric_mean(statistics.median(found) for found in ratios.values()),
            statistics.geometric_mean(low for low, _ in intervals),
            statistics.geometric_mean(high for _, high in intervals),
            min(map(len, ratios.values())),
        )

    def is_decided(self) -> bool:
        """Whether the confidence interval of the ratio lies inside the bounds, or outside of them."""
        _, low, high, _ = self.estimate()
        return (low >= 1 - BOUND and high <= 1 + BOUND) or low > 1 + BOUND or high < 1 - BOUND


@dataclass
class Comparison:
    """All results so far: measurements by case, and why other cases have none.

    failure: why measuring stopped early, or None. processors: the multiprocessors that a rank has.
    """

    measured: dict[str, MeasuredCase] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    processors: int = 0


def find_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% confidence interval of the median, from order statistics, which assume no distribution."""
    ordered = sorted(values)
    below = max(0, math.floor((len(ordered) - _NORMAL_QUANTILE * math.sqrt(len(ordered))) / 2))
    return ordered[below], ordered[len(ordered) - 1 - below]


def write_comparison(setting: CheckoutsSetting, outcome: Comparison, out: Path) -> dict[str, Any]:
    rows = [_row(case, outcome.measured[case.name]) for case in setting.cases() if case.name in outcome.measured]
    summary = {name: _summarize(part) for name, part in _split(rows).items()}
    for name, part in _split(rows).items():
        print_table(f"{name}: {setting.ranks} ranks on one device", COLUMNS, part)
        print(f"{name}: {describe(summary[name])}")
    for name, reason in outcome.refused.items():
        log(f"not measured: {name}: {reason}")
    if outcome.failure is not None:
        log(f"broken off: {outcome.failure}")
    about = {
        "ranks": setting.ranks,
        "percentage": setting.share,
        "processors": outcome.processors,
        "rounds": setting.rounds,
        "placements": len(setting.orders),
        "seed": setting.seed,
        "bound": BOUND,
        "checkouts": {name: _digest(source) for name, source in setting.sources.items()},
        "summary": summary,
        "refused": outcome.refused,
        "failure": outcome.failure,
    }
    path = write_result(out, "checkouts", COLUMNS, rows, **about)
    lines = [f"{name}: {describe(found)}" for name, found in summary.items()]
    append_to_table(path, ["\n\n".join(lines)])
    draw_result(path)
    return {"rows": rows, "refused": outcome.refused, "failure": outcome.failure, "summary": summary}


def _split(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Separate the rows of kernels that fill the GPU and wait, whose programs may be bounded, from all others."""
    parts = {
        "cases": [row for row in rows if not row["is_bounded"]],
        "cases whose kernels fill the GPU and wait": [row for row in rows if row["is_bounded"]],
    }
    return {name: part for name, part in parts.items() if part}


def _row(case: CheckoutCase, found: MeasuredCase) -> dict[str, Any]:
    estimate = found.estimate()
    row = {
        "case": case.name,
        "kind": case.kind,
        "mode": case.mode,
        "is_bounded": case.is_bounded,
        "rounds": len(found.device),
        "placements": len(set(found.placements)),
        "before": 1e6 * statistics.median(before for before, _ in found.device),
        "after": 1e6 * statistics.median(after for _, after in found.device),
        "ratio": estimate.ratio,
        "low": estimate.low,
        "high": estimate.high,
        "verdict": estimate.judge(),
    }
    if case.mode == "eager":
        row |= {
            "host_before": 1e6 * statistics.median(before for before, _ in found.host),
            "host_after": 1e6 * statistics.median(after for _, after in found.host),
        }
    return row


def _summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    verdicts = {
        name: [row["case"] for row in rows if row["verdict"] == name]
        for name in ("same", "slower", "faster", "unclear")
    }
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    return {"cases": len(rows), "mean_ratio": mean, **verdicts}


def describe(summary: Mapping[str, Any]) -> str:
    """A summary in words. summary: "cases", "mean_ratio" and the cases of each verdict."""
    text = (
        f"{len(summary['same'])} of {summary['cases']} medians within {BOUND:.0%}, geometric mean of the ratios "
        f"{summary['mean_ratio']:.3f}"
    )
    for name in ("slower", "faster", "unclear"):
        if summary[name]:
            text += f"; {name}: {', '.join(summary[name])}"
    return text


def _digest(source: Path) -> str:
    """Identify a checkout by a hash of its package's files: results name neither paths nor commits."""
    found = hashlib.sha256()
    for path in sorted((source / "stretto").rglob("*")):
        if path.suffix in (".py", ".cu", ".cpp", ".hpp"):
            found.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def log(text: str) -> None:
    """Print a line of progress to stderr: stdout is for tables and JSON."""
    print(text, file=sys.stderr, flush=True)
