# SPDX-License-Identifier: Apache-2.0
"""Reports of `python -m lab faults`: a line for each fault, a table by kind, and a picture drawn from its JSON."""

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.pictures import describe_origin
from stretto.bench.harness import Column
from tests.faults.settings import KINDS

_SECONDS = "{:.1f}"
COLUMNS = (
    Column("kind", "fault"),
    Column("faults", "faults"),
    Column("right", "passed"),
    Column("named_median", "until named (s), median", _SECONDS),
    Column("named_largest", "largest", _SECONDS),
    Column("again_median", "until training again (s), median", _SECONDS),
    Column("again_largest", "largest", _SECONDS),
    Column("lost_largest", "steps lost, largest"),
    Column("loss_difference", "loss, largest difference", "{:.1g}"),
)


_PANELS = {"seconds_named": "until it was named", "seconds_again": "until the first step after it"}
_MARKERS = {True: ("o", 0), False: ("x", 1)}  # whether a fault has passed
_SPREAD = 0.6  # of a kind's row: the height over which its points lie


def print_job(rows: Sequence[Mapping[str, Any]], end: Mapping[str, Any]) -> None:
    """Print the outcome of a job's faults, a line each."""
    for row in rows:
        named, again = (
            "-" if row.get(name) is None else f"{row[name]:.1f} s" for name in ("seconds_named", "seconds_again")
        )
        what = f"{row['kind']} {row['variant']}".strip()
        verdict = "; ".join(row["problems"]) or "right"
        print(
            f"job {row['job']} ({row['grid']}), fault {row['fault']}: {what} of rank {row['rank']} in step "
            f"{row.get('step', '-')}, {row['place']}: named {named}, again {again}: {verdict}",
            file=sys.stderr,
        )
    for problem in end["problems"]:
        print(f"job {end['job']}: {problem}", file=sys.stderr, flush=True)


def summarize(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table's row for one kind of fault."""
    summary: dict[str, Any] = {"kind": kind, "faults": len(rows), "right": sum(not row["problems"] for row in rows)}
    for name in ("named", "again"):
        seconds = [row[f"seconds_{name}"] for row in rows if row.get(f"seconds_{name}") is not None]
        if seconds:
            summary |= {f"{name}_median": statistics.median(seconds), f"{name}_largest": max(seconds)}
    for key, source in (("lost_largest", "steps_lost"), ("loss_difference", "loss_difference")):
        values = [row[source] for row in rows if row.get(source) is not None]
        summary[key] = max(values, default=None)
    return summary


def plot_faults(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel for each of the two times, with a row for each kind of fault and a point for each fault."""
    from lab.style import PEER, drawing

    kinds = [kind for kind in KINDS.values() if any(row["kind"] == kind for row in data["faults"])]
    with drawing(picture, 9.0, 1.4 + 0.45 * len(kinds)) as drawn:
        for panel, (key, title) in zip(drawn.panels(1, 2)[0], _PANELS.items(), strict=True):
            for place, kind in enumerate(reversed(kinds)):
                rows = [row for row in data["faults"] if row["kind"] == kind and row.get(key) is not None]
                _draw_points(panel, place, rows, key)
            if key == "seconds_named":
                panel.axvline(data["limit"], color=PEER.colour, linestyle="--", linewidth=1.2, label="limit")
            panel.set_yticks(range(len(kinds)), [*reversed(kinds)] if key == "seconds_named" else [""] * len(kinds))
            panel.set_ylim(-0.6, len(kinds) - 0.4)
            panel.set_xlim(left=0)
            panel.set_xlabel("s")
            panel.set_title(title)
        right = sum(not row["problems"] for row in data["faults"])
        of = f"{len(data['faults'])} faults in training on {data['ranks']} ranks"
        drawn.title = f"{of}, of which {right} passed"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            f"A point for each fault, and a line for the median; train.timeout is {data['timeout']:g} s, and the "
            "dashed line is the limit within which a failure must have been named. Faults that strike before a step "
            "was trained have no point on the right. A cross is a fault that did not pass."
        )


def _draw_points(panel: Any, place: int, rows: list[dict[str, Any]], key: str) -> None:
    """Draw a kind's faults, those that did not pass as crosses, and the median as a line."""
    if not rows:
        return
    from stretto.report.style import INK, SERIES

    for is_right, (marker, colour) in _MARKERS.items():
        chosen = [(number, row) for number, row in enumerate(rows) if (not row["problems"]) == is_right]
        times = [row[key] for _, row in chosen]
        heights = [place + _SPREAD * ((number + 0.5) / len(rows) - 0.5) for number, _ in chosen]
        panel.plot(times, heights, marker=marker, linestyle="", markersize=3.5, color=SERIES[colour].colour)
    median = statistics.median(row[key] for row in rows)
    panel.vlines(median, place - _SPREAD * 0.6, place + _SPREAD * 0.6, color=INK, linewidth=1.2)
