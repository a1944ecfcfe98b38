# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-steps`: steps that were measured on GPUs, compared with the simulator's and the planner's.

Nothing is measured here. The machine's parameters are those of its probe alone, in the folder of the measured
grids (`lab/results/plan`); `python -m lab overlap` was measured on the machine of the first of them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.harness import LAB, Bench, Measured, Table, column
from lab.pictures import describe_origin, group
from lab.planning.comparison import judge_order
from stretto.axes import check_sizes
from stretto.cluster import Cluster
from stretto.execution import ExecutionOptions, Overlap
from stretto.models import GPTConfig
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.training import simulate_step
from stretto.simulator.training.simulation import Fidelity

RESULTS = LAB / "results"
PLANS = ("plan", "plan-2-gpus")
"""Folders of measured grids, with the machine's probed.toml; `overlap` was measured on the first one's."""


@dataclass(frozen=True)
class SimulatedStepsSetting:
    """Settings of `python -m lab simulated-steps`, which has none."""


def simulate_steps(setting: SimulatedStepsSetting) -> Measured:
    """Simulate each step that was measured."""
    rows = [row for folder in PLANS for row in compare_plans(RESULTS / folder)]
    rows += _compare_overlaps(RESULTS / "overlap" / "overlap.json", RESULTS / PLANS[0])
    summaries = [_summarize(*each) for each in group(rows, "workload").items()]
    return Measured(rows, tables=(Table("The order of grids", summaries, Summary, "summaries"),))


BEFORE_COPY_ENGINES = "2026-11-21"
"""Runs up to this date had no copy engines, which carry over z between GPUs that NVLink links since."""
FIDELITIES: tuple[Fidelity, ...] = ("closed-form", "event-driven")


@dataclass(frozen=True)
class Row:
    """A step that was measured, beside the planner's and the simulator's."""

    workload: str = column("workload")
    grid: str = column("grid")
    measured_milliseconds: float = column("measured (ms)", "{:.1f}")
    planned_milliseconds: float = column("plan --cost full (ms)", "{:.1f}")
    planned_error: float = column("error", "{:+.1%}")
    simulated_milliseconds: float = column("simulated, closed form (ms)", "{:.1f}")
    simulated_error: float = column("error", "{:+.1%}")
    queued_milliseconds: float = column("simulated, event-driven (ms)", "{:.1f}")
    queued_error: float = column("error", "{:+.1%}")
    measured_exposed_milliseconds: float = column("exposed, measured (ms)", "{:.1f}")
    exposed_milliseconds: float = column("exposed, simulated (ms)", "{:.1f}")


@dataclass(frozen=True)
class Summary:
    """Quality of the order that was found of a workload's steps, and the largest errors."""

    workload: str = column("workload")
    steps: int = column("steps")
    planned_correlation: float = column("rank correlation, plan --cost full", "{:.3f}")
    simulated_correlation: float = column("rank correlation, simulated", "{:.3f}")
    fastest: str = column("truly fastest")
    planned_choice: str = column("planned fastest")
    planned_loss: float = column("slower by", "{:.1%}")
    simulated_choice: str = column("simulated fastest")
    simulated_loss: float = column("slower by", "{:.1%}")
    planned_largest: float = column("largest error, plan", "{:.1%}")
    simulated_largest: float = column("largest error, simulated", "{:.1%}")


def compare_plans(folder: Path) -> Iterator[dict[str, Any]]:
    cluster = Cluster.load(folder / "probed.toml")
    measured = json.loads((folder / "plan.json").read_text())
    models = {
        each["workload"]: each["model"] for each in json.loads((folder / "predictions.json").read_text())["workloads"]
    }
    overlap = Overlap(copy_engines=measured["date"] > BEFORE_COPY_ENGINES)
    for row in measured["rows"]:
        if row.get("measured_milliseconds") is None:
            continue
        batch, seq_len = map(int, re.findall(r"batch (\d+) x (\d+) tokens", row["workload"])[0])
        name, _, sharded = row["grid"].partition(", ")
        options = ExecutionOptions(overlap, shard_sequence=bool(sharded))
        times = row["measured_milliseconds"], row["predicted_milliseconds"]
        found = _compare(models[row["workload"]], batch, seq_len, name, options, cluster, *times)
        yield {"workload": row["workload"], "grid": row["grid"], **found}


def _compare_overlaps(file: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """The steps of `python -m lab overlap`, in which overlaps are switched on one after another."""
    cluster, measured = Cluster.load(folder / "probed.toml"), json.loads(file.read_text())
    work = measured["workload"]
    switches: dict[str, bool] = {}
    for row in measured["rows"]:
        if row["overlap"] == "none":
            switches = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "data"), False)
        else:
            switches[row["overlap"].removeprefix("+ ")] = True
        options = ExecutionOptions(Overlap(**switches, copy_engines=measured["date"] > BEFORE_COPY_ENGINES))
        about = {"workload": f"{measured['model']}, overlaps of {row['grid']}", "grid": row["overlap"]}
        step = work["model"], work["batch"], work["seq_len"], row["grid"], options, cluster
        found = _compare(*step, row["step_milliseconds"])
        yield about | found | {"measured_exposed_milliseconds": row["exposed_milliseconds"]}


def _compare(
    model: Mapping[str, Any],
    batch: int,
    seq_len: int,
    grid: str,
    options: ExecutionOptions,
    cluster: Cluster,
    measured: float,
    planned: float | None = None,
) -> dict[str, Any]:
    """Simulate a step in which each rank computes its whole part of the batch at once. measured, planned: ms."""
    sizes = check_sizes({axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", grid)})
    workload = StepWorkload(read_architecture(GPTConfig(**model), seq_len), batch, seq_len)
    config = StepConfig(sizes, batch // sizes.batch_parts, options)
    simulated, queued = (simulate_step(workload, config, cluster, fidelity=fidelity) for fidelity in FIDELITIES)
    times = {"planned": planned, "simulated": simulated.step_time * 1e3, "queued": queued.step_time * 1e3}
    row: dict[str, Any] = {"measured_milliseconds": measured, "exposed_milliseconds": simulated.exposed_total * 1e3}
    for name, time in times.items():
        row |= {f"{name}_milliseconds": time, f"{name}_error": None if time is None else time / measured - 1}
    return row


def _summarize(workload: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how well the order of measured steps was found, and the largest errors."""
    fastest = min(rows, key=lambda row: row["measured_milliseconds"])
    summary = {"workload": workload, "steps": len(rows), "fastest": fastest["grid"]}
    for name in ("planned", "simulated"):
        if rows[0][f"{name}_milliseconds"] is not None:
            judged = judge_order(rows, f"{name}_milliseconds")
            summary |= {f"{name}_{key}": value for key, value in judged.items()}
    return summary


def plot_simulated_steps(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel a workload: of each step the planner's and the simulator's time over the measured one."""
    from lab.style import drawing
    from stretto.report.style import SERIES, STRETTO

    series = (("planned_error", "plan --cost full", SERIES[1]), ("simulated_error", "simulated", STRETTO))
    workloads = list(group(data["rows"], "workload").items())
    pairs = [workloads[place : place + 2] for place in range(0, len(workloads), 2)]
    heights = [0.2 * max(len(rows) for _, rows in pair) + 1.0 for pair in pairs]
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


def _plot_errors(panel: Any, rows: Sequence[Mapping[str, Any]], series: Sequence[tuple[str, str, Any]]) -> None:
    from stretto.report.style import GUIDE

    panel.axvline(0, **GUIDE)
    for key, label, look in series:
        known = [(100 * row[key], place) for place, row in enumerate(rows) if row[key] is not None]
        errors, places = [error for error, _ in known], [place for _, place in known]
        if known:
            panel.plot(errors, places, linestyle="none", marker=look.marker, color=look.colour, label=label)
    panel.set_yticks(range(len(rows)), [row["grid"] for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)


BENCH = Bench(
    "simulated-steps",
    "Steps that were measured on GPUs, compared with the simulator and the planner (needs no GPU).",
    SimulatedStepsSetting,
    simulate_steps,
    Row,
    title="Measured and simulated steps",
    plot=plot_simulated_steps,
    about=lambda setting: {"plans": list(PLANS)},
)
