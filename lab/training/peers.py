# SPDX-License-Identifier: Apache-2.0
"""`python -m lab peers`: one model under Stretto, FSDP2, DTensor tensor parallelism, and the latter two together.

All train `stretto.models.GPT` from the same weights on the same tokens with the same optimizer and clipping, as first
and last loss and gradient norm show. FSDP2 is measured with its weights kept and freed, with gradients reduced in
fp32 (its usual setting) and in bf16 (as Stretto's travel), compiled and not. Compiled ones are also measured as one
CUDA graph a step ("captured"): with a small batch the host is the limit otherwise. Tensor parallelism is
also run as torch's async-TP ("async"), which is compiled, and not captured: torch does not support that.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lab.pictures import draw_result
from lab.training.models import parse_grids
from lab.training.steps import captured, whole_gpt
from lab.training.torch_peers import TorchSetup, build_torch
from stretto.bench.harness import Column, print_table, run_ranks, write_result
from stretto.bench.training.runs import Step, TrainingRun, make_grid, measure, stretto_run
from stretto.bench.training.settings import TrainingWorkload, grids_of
from stretto.cluster import name_grid
from stretto.parallel import Grid
from stretto.planner.grids import divisors

COLUMNS = (
    Column("name", "run"),
    Column("tokens_per_second_per_gpu", "tokens/s/GPU", "{:,.0f}"),
    Column("step_milliseconds", "step (ms)", "{:.1f}"),
    Column("peak_memory_gib", "peak memory (GiB)", "{:.1f}"),
    Column("loss", "first loss", "{:.4f}"),
    Column("gradient_norm", "gradient norm", "{:.3f}"),
    Column("last_loss", "last loss", "{:.4f}"),
    Column("error", "error", "{}"),
)


def bench_peers(
    name: str,
    workload: TrainingWorkload,
    batches: Sequence[int],
    ranks: int,
    out: Path,
    *,
    grids: str | None = None,
    only: Sequence[str] = (),
    with_compiled: bool = True,
    tunes_matmuls: bool = False,
) -> dict[int, list[dict[str, Any]]]:
    """Measure each global batch in a job of its own, print its table, and write peers-NAME-BATCH.json and a picture.

    grids: Stretto's ("z=4, x=2 z=2"; default: all that can cut the batch). only: parts of names; a run is measured if
        it has one of them. tunes_matmuls: for Stretto, as in `parallelize`.
    Returns the rows by batch. Raises ValueError if there is nothing to measure.
    """
    if grids is not None:
        parse_grids(grids, ranks)  # refused before anything starts
    results = {}
    for batch in batches:
        this = replace(workload, batch=batch)
        rows = run_ranks(ranks, measure_peers, this, ranks, grids, tuple(only), with_compiled, tunes_matmuls)
        if not rows:
            raise ValueError(f"no run has {' or '.join(map(repr, only))} in its name")
        rows.sort(key=lambda row: -row.get("tokens_per_second_per_gpu", 0.0))
        columns = COLUMNS if any("error" in row for row in rows) else COLUMNS[:-1]
        print_table(f"{name}, global batch {batch} x {workload.seq_len} tokens, {ranks} ranks", columns, rows)
        ratio = speedup(rows)
        if ratio is not None:
            print(f"Stretto's best is {ratio:.3f}x the fastest peer's speed", flush=True)
        path = write_result(
            out, f"peers-{name}-{batch}", columns, rows, model=name, ranks=ranks, workload=asdict(this), speedup=ratio
        )
        draw_result(path)
        results[batch] = rows
    return results


def speedup(rows: Sequence[dict[str, Any]]) -> float | None:
    """The speed of Stretto's fastest run divided by that of the fastest peer; None if either is missing."""
    ours, peers = (
        [row["step_milliseconds"] for row in rows if row["is_peer"] is is_peer and "step_milliseconds" in row]
        for is_peer in (False, True)
    )
    return min(peers) / min(ours) if ours and peers else None


def measure_peers(
    workload: TrainingWorkload,
    ranks: int,
    grids: str | None,
    only: Sequence[str],
    with_compiled: bool,
    tunes_matmuls: bool,
) -> list[dict[str, Any]]:
    """The job of each rank; returns the rows."""
    world = Grid(data=ranks)  # joins the job
    runs = _torch_runs(workload, ranks, world.device)
    runs += _stretto_runs(workload, ranks, grids, world.device, tunes_matmuls)
    runs = [
        run
        for run in runs
        if (with_compiled or not run.is_compiled) and (not only or any(part in run.name for part in only))
    ]
    return measure(runs, workload, world.device)


def _stretto_runs(
    workload: TrainingWorkload, ranks: int, grids: str | None, device: torch.device, tunes_matmuls: bool
) -> list[TrainingRun]:
    make_model = partial(whole_gpt, workload.model, device)
    runs = []
    for sizes in grids_of(ranks) if grids is None else parse_grids(grids, ranks):
        if grids is None and workload.batch % (sizes["data"] * sizes["z"]):
            continue
        grid = make_grid(sizes)
        shardings = [{}, {"shards_sequence": True}] if sizes["x"] > 1 else [{}]
        for sharding, is_compiled in itertools.product(shardings, (False, True)):
            name = f"Stretto {name_grid(sizes)}" + (", sequence sharded" if sharding else "")
            name += ", compiled" if is_compiled else ""
            options = {"make_model": make_model, "is_compiled": is_compiled, "tunes_matmuls": tunes_matmuls} | sharding
            run = stretto_run(workload, grid, name, writes_copies=True, **options)
            runs += [run, captured(run)] if is_compiled and device.type == "cuda" else [run]
    return runs


def _torch_runs(workload: TrainingWorkload, ranks: int, device: torch.device) -> list[TrainingRun]:
    """FSDP2 over all ranks, tensor parallelism over all, and every mesh between; compiled runs follow eager ones."""
    runs = []
    for tp in divisors(ranks):
        dp = ranks // tp
        mesh = init_device_mesh(device.type, (dp, tp), mesh_dim_names=("dp", "tp"))
        for label, setup in _setups(dp, tp).items():
            if setup.is_async and device.type != "cuda":
                continue
            for is_compiled in (True,) if setup.is_async else (False, True):
                name = label + (", compiled" if is_compiled else "")
                build = partial(_build, workload, mesh, device, replace(setup, is_compiled=is_compiled))
                run = TrainingRun(name, build, is_peer=True, is_compiled=is_compiled)
                is_captured = is_compiled and device.type == "cuda" and not setup.is_async  # torch cannot capture async
                runs += [run, captured(run)] if is_captured else [run]
    return runs


def _setups(dp: int, tp: int) -> dict[str, TorchSetup]:
    if dp == 1 and tp > 1:
        return {
            f"TP={tp}": TorchSetup(),
            f"TP={tp}, autocast": TorchSetup(precision="autocast"),
            f"TP={tp}, bf16 weights": TorchSetup(precision="masters"),
            f"TP={tp}, async": TorchSetup(is_async=True),
            f"TP={tp}, bf16 weights, async": TorchSetup(precision="masters", is_async=True),
        }
    name = f"FSDP2={dp}" if tp == 1 else f"FSDP2={dp} TP={tp}"
    kept = {
        f"{name}, weights kept": TorchSetup(),
        f"{name}, weights kept, bf16 reduction": TorchSetup(reduce_dtype=torch.bfloat16),
    }
    if tp > 1:  # weights are small, and freeing them can only cost time
        return kept | {
            f"{name}, weights kept, bf16 reduction, async": TorchSetup(reduce_dtype=torch.bfloat16, is_async=True)
        }
    return kept | {
        name: TorchSetup(frees_weights=True),
        f"{name}, bf16 reduction": TorchSetup(frees_weights=True, reduce_dtype=torch.bfloat16),
    }


def _build(workload: TrainingWorkload, mesh: DeviceMesh, device: torch.device, setup: TorchSetup) -> Step:
    dp = mesh["dp"].size()
    if workload.batch % dp:  # refused before the model is made
        raise ValueError(f"a batch of {workload.batch} cannot be cut into {dp} parts")
    return build_torch(workload, whole_gpt(workload.model, device), mesh, device, setup)
