# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-steps`: steps that were measured on GPUs, compared with the simulator's and the planner's.

Nothing is measured here. The machine's parameters are those of its probe alone, in the folder of the measured steps of
`python -m lab plan`; `python -m lab overlap` was measured on the machine of the first of them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.pictures import draw_result
from lab.planning.comparison import rank_correlation
from lab.tables import append_to_table
from stretto.axes import check_sizes
from stretto.bench.harness import Column, markdown_table, print_table, write_result
from stretto.cluster import Cluster
from stretto.execution import ExecutionOptions, Overlap
from stretto.models import GPTConfig
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.training import simulate_step
from stretto.simulator.training.simulation import Fidelity

BEFORE_COPY_ENGINES = "2026-11-21"
"""Runs up to this date had no copy engines, which carry over z between GPUs that NVLink links since."""
FIDELITIES: tuple[Fidelity, ...] = ("closed-form", "event-driven")
COLUMNS = (
    Column("workload", "workload"),
    Column("grid", "grid"),
    Column("measured_milliseconds", "measured (ms)", "{:.1f}"),
    Column("planned_milliseconds", "plan --cost full (ms)", "{:.1f}"),
    Column("planned_error", "error", "{:+.1%}"),
    Column("simulated_milliseconds", "simulated, closed form (ms)", "{:.1f}"),
    Column("simulated_error", "error", "{:+.1%}"),
    Column("queued_milliseconds", "simulated, event-driven (ms)", "{:.1f}"),
    Column("queued_error", "error", "{:+.1%}"),
    Column("measured_exposed_milliseconds", "exposed, measured (ms)", "{:.1f}"),
    Column("exposed_milliseconds", "exposed, simulated (ms)", "{:.1f}"),
)
SUMMARY_COLUMNS = (
    Column("workload", "workload"),
    Column("steps", "steps"),
    Column("planned_correlation", "rank correlation, plan --cost full", "{:.3f}"),
    Column("simulated_correlation", "rank correlation, simulated", "{:.3f}"),
    Column("fastest", "truly fastest"),
    Column("planned_choice", "planned fastest"),
    Column("planned_loss", "slower by", "{:.1%}"),
    Column("simulated_choice", "simulated fastest"),
    Column("simulated_loss", "slower by", "{:.1%}"),
    Column("planned_largest", "largest error, plan", "{:.1%}"),
    Column("simulated_largest", "largest error, simulated", "{:.1%}"),
)


def bench_simulated_steps(plans: Sequence[Path], overlaps: Path, out: Path) -> dict[str, Any]:
    """Simulate each step that was measured, print the tables, and write simulated-steps.json to `out`.

    plans: folders of `python -m lab plan`, each with the machine's probed.toml. overlaps: a file of `stretto bench
    overlap` from the first folder's machine. Raises ValueError where a file is missing.
    """
    rows = [row for folder in plans for row in compare_plans(folder)]
    rows += _compare_overlaps(overlaps, plans[0])
    summaries = [_summarize(workload, own) for workload, own in _by_workload(rows).items()]
    about = {"plans": [str(folder) for folder in plans], "overlaps": str(overlaps), "summaries": summaries}
    path = write_result(out, "simulated-steps", COLUMNS, rows, **about)
    append_to_table(path, markdown_table(SUMMARY_COLUMNS, summaries))
    print_table("Measured and simulated steps", COLUMNS, rows)
    print_table("The order of grids", SUMMARY_COLUMNS, summaries)
    draw_result(path)
    return {"rows": rows, "summaries": summaries}


def compare_plans(folder: Path) -> Iterator[dict[str, Any]]:
    """The steps of a folder of `python -m lab plan`."""
    cluster = Cluster.load(folder / "probed.toml")
    measured = _read(folder / "plan.json")
    models = {each["workload"]: each["model"] for each in _read(folder / "predictions.json")["workloads"]}
    overlap = Overlap(copy_engines=measured["date"] > BEFORE_COPY_ENGINES)
    for row in measured["rows"]:
        if row.get("measured_milliseconds") is None:
            continue
        batch, seq_len = map(int, re.findall(r"batch (\d+) x (\d+) tokens", row["workload"])[0])
        name, _, sharded = row["grid"].partition(", ")
        options = ExecutionOptions(overlap, shard_sequence=bool(sharded))
        about = {"workload": row["workload"], "grid": row["grid"]}
        yield _compare(about, models[row["workload"]], batch, seq_len, name, options, cluster) | _errors(
            row["measured_milliseconds"], planned=row["predicted_milliseconds"]
        )


def _compare_overlaps(file: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """The steps of `python -m lab overlap`, in which overlaps are switched on one after another."""
    cluster, measured = Cluster.load(folder / "probed.toml"), _read(file)
    work = measured["workload"]
    switches: dict[str, bool] = {}
    for row in measured["rows"]:
        if row["overlap"] == "none":
            switches = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "data"), False)
        else:
            switches[row["overlap"].removeprefix("+ ")] = True
        options = ExecutionOptions(Overlap(**switches, copy_engines=measured["date"] > BEFORE_COPY_ENGINES))
        about = {"workload": f"{measured['model']}, overlaps of {row['grid']}", "grid": row["overlap"]}
        found = _compare(about, work["model"], work["batch"], work["seq_len"], row["grid"], options, cluster)
        yield found | _errors(row["step_milliseconds"]) | {"measured_exposed_milliseconds": row["exposed_milliseconds"]}


def _compare(
    about: dict[str, Any],
    model: Mapping[str, Any],
    batch: int,
    seq_len: int,
    grid: str,
    options: ExecutionOptions,
    cluster: Cluster,
) -> dict[str, Any]:
    """Simulate a step in which each rank computes its whole part of the batch at once."""
    sizes = check_sizes({axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", grid)})
    workload = StepWorkload(read_architecture(GPTConfig(**model), seq_len), batch, seq_len)
    config = StepConfig(sizes, batch // sizes.batch_parts, options)
    simulated, queued = (simulate_step(workload, config, cluster, fidelity=fidelity) for fidelity in FIDELITIES)
    return about | {
        "simulated_milliseconds": simulated.step_time * 1e3,
        "queued_milliseconds": queued.step_time * 1e3,
        "exposed_milliseconds": simulated.exposed_total * 1e3,
    }


def _errors(measured: float, planned: float | None = None) -> dict[str, Any]:
    return {"measured_milliseconds": measured, "planned_milliseconds": planned}


def _by_workload(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by workload, each with its errors."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for name in ("planned", "simulated", "queued"):
            time = row[f"{name}_milliseconds"]
            row[f"{name}_error"] = None if time is None else time / row["measured_milliseconds"] - 1
        found.setdefault(row["workload"], []).append(row)
    return found


def _summarize(workload: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How well the order of measured steps was found, and the largest errors."""
    measured = [row["measured_milliseconds"] for row in rows]
    fastest = min(rows, key=lambda row: row["measured_milliseconds"])
    summary = {"workload": workload, "steps": len(rows), "fastest": fastest["grid"]}
    for name in ("planned", "simulated"):
        if rows[0][f"{name}_milliseconds"] is None:
            continue
        chosen = min(rows, key=lambda row: row[f"{name}_milliseconds"])
        summary |= {
            f"{name}_correlation": rank_correlation([row[f"{name}_milliseconds"] for row in rows], measured),
            f"{name}_choice": chosen["grid"],
            f"{name}_loss": chosen["measured_milliseconds"] / fastest["measured_milliseconds"] - 1,
            f"{name}_largest": max(abs(row[f"{name}_error"]) for row in rows),
        }
    return summary


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(
            f"there is no file {file}: `python -m lab plan` and `python -m lab overlap` write such results"
        )
    found: dict[str, Any] = json.loads(file.read_text())
    return found
