# SPDX-License-Identifier: Apache-2.0
"""`python -m lab overlap`: step time with no overlap, then with all-reduce, reduce-scatter, all-gather, ... added.

One job measures all stages on one grid, then on the next. The results have the same bits, only their time differs. With
copy engines, the last stage, gradients over more than two ranks of z are added in another order.
"""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.pictures import draw_result
from lab.training.exposed import profile_exposed
from lab.training.models import parse_grids
from stretto.bench.harness import Column, print_table, run_ranks, write_result
from stretto.bench.training.runs import TrainingRun, build_stretto, make_grid, measure
from stretto.bench.training.settings import TrainingWorkload
from stretto.cluster import name_grid
from stretto.parallel import Grid, Overlap

# In the order of Singh's dissertation (section 5.1.4: OAR, ORS, OAG); then the buckets of data parallelism.
STAGES = {
    "none": (none := replace(Overlap.parse(False), copy_engines=False)),
    "+ all_reduce": replace(none, all_reduce=True),
    "+ reduce_scatter": replace(none, all_reduce=True, reduce_scatter=True),
    "+ all_gather": replace(none, all_reduce=True, reduce_scatter=True, all_gather=True),
    "+ data": replace(Overlap(), copy_engines=False),
    "+ copy_engines": Overlap(),
}
COLUMNS = (
    Column("grid", "grid"),
    Column("overlap", "overlap"),
    Column("step_milliseconds", "step (ms)", "{:.1f}"),
    Column("faster", "over none", "{:+.1%}"),
    Column("tokens_per_second_per_gpu", "tokens/s/GPU", "{:,.0f}"),
    Column("exposed_milliseconds", "exposed (ms)", "{:.1f}"),
    Column("communication_milliseconds", "communication (ms)", "{:.1f}"),
    Column("peak_memory_gib", "peak memory (GiB)", "{:.1f}"),
    Column("loss", "loss", "{:.4f}"),
    Column("error", "error", "{}"),
)


def bench_overlap(name: str, workload: TrainingWorkload, ranks: int, grids: str, out: Path) -> list[dict[str, Any]]:
    """Measure, print the table, and write overlap.json and overlap.png to `out`.

    Raises ValueError, before anything starts, for an invalid grid.
    """
    parse_grids(grids, ranks)
    rows = run_ranks(ranks, measure_overlap, workload, ranks, grids)
    columns = COLUMNS if any("error" in row for row in rows) else COLUMNS[:-1]
    print_table(f"{name}, global batch {workload.batch} x {workload.seq_len} tokens, {ranks} ranks", columns, rows)
    path = write_result(out, "overlap", columns, rows, model=name, ranks=ranks, workload=asdict(workload))
    draw_result(path)
    return rows


def measure_overlap(workload: TrainingWorkload, ranks: int, grids: str) -> list[dict[str, Any]]:
    """The job of each rank; returns the rows, grid by grid in the order of `STAGES`."""
    world = Grid(data=ranks)  # joins the job
    rows: list[dict[str, Any]] = []
    for sizes in parse_grids(grids, ranks):
        grid, label = make_grid(sizes), name_grid(sizes)
        runs = [
            TrainingRun(f"{label}: {stage}", partial(build_stretto, workload, grid, overlap=overlap))
            for stage, overlap in STAGES.items()
        ]
        measured = measure(runs, workload, world.device, extra=profile_exposed)
        first = measured[0].get("step_milliseconds")
        for stage, row in zip(STAGES, measured, strict=True):
            if first is not None and "step_milliseconds" in row:
                row["faster"] = first / row["step_milliseconds"] - 1
            rows.append({"grid": label, "overlap": stage} | row)
    return rows
