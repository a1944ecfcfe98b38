# SPDX-License-Identifier: Apache-2.0
"""`stretto bench train`: training throughput of a GPT on every grid, compared with torch's FSDP2 of the same model.

Same model, same global batch, same optimizer (fused AdamW, fp32 parameters, bf16 compute). FSDP2 reduces gradients in
fp32, its usual setting; Stretto's travel in bf16 unless --reduce-fp32. All runs share one job; rounds interleave them.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from stretto.bench.harness import Column, print_table, run_ranks, write_result
from stretto.bench.training.fsdp2 import build_fsdp2
from stretto.bench.training.runs import TrainingRun, build_stretto, measure
from stretto.bench.training.settings import TrainingWorkload, grids_of
from stretto.cluster import name_grid
from stretto.parallel import Grid

COLUMNS = (
    Column("name", "run"),
    Column("tokens_per_second_per_gpu", "tokens/s/GPU", "{:,.0f}"),
    Column("mfu", "MFU", "{:.1%}"),
    Column("step_milliseconds", "step (ms)", "{:.0f}"),
    Column("peak_memory_gib", "peak memory (GiB)", "{:.1f}"),
    Column("loss", "loss", "{:.4f}"),
    Column("error", "error", "{}"),
)
FSDP2 = {
    "FSDP2": {"is_compiled": False, "frees_weights": True},
    "FSDP2, compiled": {"is_compiled": True, "frees_weights": True},
    "FSDP2, compiled, weights kept": {"is_compiled": True, "frees_weights": False},
}


def bench_train(
    workload: TrainingWorkload, ranks: int, out: Path, peak_flops: float | None, with_peers: bool
) -> list[dict[str, Any]]:
    """Measure, print the table, and write train.json to `out`."""
    rows = run_ranks(ranks, _measure_all, workload, ranks, with_peers)
    for row in rows:
        if peak_flops and "step_milliseconds" in row:
            row["mfu"] = workload.flops() / (row["step_milliseconds"] / 1e3) / ranks / peak_flops
    rows.sort(key=lambda row: -row.get("tokens_per_second_per_gpu", 0.0))
    print_table(f"{workload.model.layers} layers of hidden {workload.model.hidden}, {ranks} ranks", COLUMNS, rows)
    formula = "72 B s l h^2 (1 + s/6h + V/12lh) / (step x GPUs x peak)"
    write_result(out, "train", COLUMNS, rows, workload=asdict(workload), mfu_formula=formula, peak_flops=peak_flops)
    return rows


def _measure_all(workload: TrainingWorkload, ranks: int, with_peers: bool) -> list[dict[str, Any]]:
    world = Grid(data=ranks)  # joins the job, so that peers and grids share its process group
    mesh = init_device_mesh(world.device.type, (ranks,))
    runs = [
        TrainingRun(
            name,
            partial(build_fsdp2, workload, mesh, world.device, **options),
            is_peer=True,
            is_compiled=options["is_compiled"],
        )
        for name, options in (FSDP2.items() if with_peers else ())
    ]
    runs += [
        TrainingRun(name_grid(sizes), partial(build_stretto, workload, Grid(**sizes))) for sizes in grids_of(ranks)
    ]
    return measure(runs, workload, world.device)
