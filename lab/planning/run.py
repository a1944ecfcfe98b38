# SPDX-License-Identifier: Apache-2.0
"""`python -m lab plan`: writes the planner's predictions first, then measures every grid.

`write_predictions` needs no GPU, so that its file can be committed before anything is measured; `bench_plan` only reads
it. Both take whole local batches (no accumulation), no checkpointing, weights kept gathered, and overlap.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lab.pictures import draw_result
from lab.planning.comparison import compare, summarize
from lab.planning.settings import Planned, read_predictions
from lab.tables import append_to_table
from stretto.atomic_files import write_atomically
from stretto.bench.harness import Column, markdown_table, print_table, run_ranks, write_result
from stretto.bench.training.runs import make_grid, measure, stretto_run
from stretto.bench.training.settings import TrainingWorkload, grids_of
from stretto.cluster import Cluster, name_grid
from stretto.parallel import Grid
from stretto.planner import predict

ASSUMED: dict[str, Any] = {"cost": "full", "recompute": "none", "reshard": "after_backward"}
COLUMNS = (
    Column("grid", "grid"),
    Column("predicted_milliseconds", "predicted (ms)", "{:.1f}"),
    Column("measured_milliseconds", "measured (ms)", "{:.1f}"),
    Column("time_ratio", "predicted / measured", "{:.2f}"),
    Column("predicted_gib", "predicted (GiB)", "{:.1f}"),
    Column("measured_gib", "measured (GiB)", "{:.1f}"),
    Column("memory_ratio", "predicted / measured", "{:.2f}"),
    Column("reason", "why not"),
)
SUMMARY_COLUMNS = (
    Column("workload", "workload"),
    Column("grids", "grids measured"),
    Column("rank_correlation", "rank correlation", "{:.3f}"),
    Column("predicted_fastest", "predicted fastest"),
    Column("measured_fastest", "truly fastest"),
    Column("loss_by_choice", "slower by", "{:.1%}"),
    Column("is_within_3_percent", "within 3%"),
    Column("largest_time_error", "largest time error", "{:.1%}"),
    Column("largest_memory_error", "largest memory error", "{:.1%}"),
)


@dataclass(frozen=True)
class GridVariant:
    """A grid, with or without sequence sharding over its x axis."""

    sizes: Mapping[str, int]
    shards_sequence: bool = False

    @property
    def name(self) -> str:
        """The key that joins predictions and measurements of one workload."""
        return name_grid(self.sizes) + (", sequence sharded" if self.shards_sequence else "")


def list_variants(ranks: int, *, shards_sequence: bool = True) -> list[GridVariant]:
    """Every grid of the ranks; with `shards_sequence`, grids with x > 1 also with sharded tokens."""
    shardings = (False, True) if shards_sequence else (False,)
    return [
        GridVariant(sizes, shards)
        for sizes in grids_of(ranks)
        for shards in (shardings if sizes["x"] > 1 else (False,))
    ]


def write_predictions(
    planned: Sequence[Planned], cluster: Cluster, file: Path, *, shards_sequence: bool = False
) -> dict[str, Any]:
    """Predict every grid of each workload, and write `file`. Returns the file's content.

    shards_sequence: predict grids with x > 1 twice, also with sharded tokens. `bench_plan` measures these grids.

    Raises ValueError for a cluster that lacks a figure that is needed.
    """
    cluster.require("gpu.memory")
    written = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cluster": cluster.name,
        "assumed": ASSUMED | {"dtype": ", ".join(dict.fromkeys(one.workload.dtype for one in planned))},
        "workloads": [
            {
                "workload": one.key,
                "model": asdict(one.workload.model),
                "grids": [
                    _predict(one, variant, cluster)
                    for variant in list_variants(one.ranks, shards_sequence=shards_sequence)
                ],
            }
            for one in planned
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(written, indent=1) + "\n")
    return written


def _predict(planned: Planned, variant: GridVariant, cluster: Cluster) -> dict[str, Any]:
    work = planned.workload
    row: dict[str, Any] = {"grid": variant.name}
    options = ASSUMED | {"dtype": work.dtype, "shard_sequence": variant.shards_sequence}
    try:
        plan = predict(work.model, cluster, grid=variant.sizes, batch=work.batch, seq_len=work.seq_len, **options)
    except ValueError as error:
        return row | {"predicted_milliseconds": None, "predicted_gib": None, "reason": str(error)}
    return row | {"predicted_milliseconds": plan.step_time * 1e3, "predicted_gib": plan.peak_memory / 2**30}


def bench_plan(planned: Sequence[Planned], predictions: Path, out: Path, *, again: bool = False) -> dict[str, Any]:
    """Measure each workload that `out`/plan.json lacks, compare all with their predictions, and rewrite the file.

    Every workload is a job of its own, whose grids are interleaved; the file is written after each. Returns rows and
    summaries. Raises ValueError, before anything is measured, if `predictions` lacks one of the workloads.
    """
    predicted = read_predictions(predictions, planned)
    kept: dict[str, list[dict[str, Any]]] = {}
    file = out / "plan.json"
    if file.is_file():
        for row in json.loads(file.read_text())["rows"]:
            kept.setdefault(row["workload"], []).append(row)
    result: dict[str, Any] = {}
    for one in planned:
        if again or one.key not in kept:
            measured = run_ranks(one.ranks, measure_grids, one.workload, one.ranks, predicted[one.key])
        else:
            measured = kept[one.key]
        kept[one.key] = compare(one.key, predicted[one.key], measured)
        result = _write(kept, predictions, out)
        print_table(one.key, COLUMNS, kept[one.key])
    if result:
        print_table("The planner's choice", SUMMARY_COLUMNS, result["summaries"])
    return result


def _write(kept: dict[str, list[dict[str, Any]]], predictions: Path, out: Path) -> dict[str, Any]:
    rows = [row for rows in kept.values() for row in rows]
    summaries = [summarize(workload, rows) for workload, rows in kept.items()]
    about = json.loads(predictions.read_text())
    path = write_result(
        out,
        "plan",
        (Column("workload", "workload"), *COLUMNS),
        rows,
        predictions={key: about[key] for key in ("date", "cluster", "assumed")},
        summaries=summaries,
    )
    append_to_table(path, markdown_table(SUMMARY_COLUMNS, summaries))
    draw_result(path)
    return {"rows": rows, "summaries": summaries}


def measure_grids(workload: TrainingWorkload, ranks: int, predicted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The job of each rank; returns a row a grid: measured_milliseconds and measured_gib, or the reason why not.

    A grid that is predicted to need more than the GPU's whole memory is not tried: ranks that run out of memory at
    different moments would wait for each other.
    """
    world = Grid(data=ranks)  # joins the job
    reasons = {row["grid"]: _why_not(row, world.device) for row in predicted}
    runs = [
        stretto_run(workload, make_grid(variant.sizes), variant.name, shards_sequence=variant.shards_sequence)
        for variant in list_variants(ranks)
        if reasons.get(variant.name, "not predicted") is None
    ]
    rows = [{"grid": grid, "reason": reason} for grid, reason in reasons.items() if reason is not None]
    for row in measure(runs, workload, world.device):
        rows.append(
            {
                "grid": row["name"],
                "measured_milliseconds": row.get("step_milliseconds"),
                "measured_gib": row.get("peak_memory_gib"),
                "loss": row.get("loss"),
                "seconds": row.get("seconds"),
                "reason": row.get("error"),
            }
        )
    return rows


def _why_not(row: dict[str, Any], device: torch.device) -> str | None:
    if row.get("reason") is not None:
        return str(row["reason"])
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory / 2**30
        if row["predicted_gib"] > has:
            return f"not tried: it would need {row['predicted_gib']:.0f} GiB of the {has:.0f} that there are"
    return None
