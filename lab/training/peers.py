# SPDX-License-Identifier: Apache-2.0
"""`python -m lab peers`: one model under Stretto, FSDP2, DTensor tensor parallelism, and the latter two together.

All train `stretto.models.GPT` from the same weights on the same tokens with the same optimizer and clipping, as first
and last loss and gradient norm show. FSDP2 is measured with its weights kept and freed, with gradients reduced in
fp32 (its usual setting) and in bf16 (as Stretto's travel), compiled and not. Compiled ones are also measured as one
CUDA graph a step ("captured"): with a small batch the host is the limit otherwise. Tensor parallelism is
also run as torch's async-TP ("async"), which is compiled, and not captured: torch does not support that.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lab.harness import Bench, Measured, column, keep_rows
from lab.peers import TorchSetup, build_torch
from lab.training.models import model_config, parse_grids
from lab.training.steps import captured, whole_gpt
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Layers, Needs, Option, Ranks, Repeats, Rounds, SeqLen, WarmUp
from stretto.bench.training.runs import Step, TrainingRun, make_grid, measure, stretto_run
from stretto.bench.training.settings import TrainingWorkload, grids_of
from stretto.cluster import name_grid
from stretto.parallel import Grid
from stretto.planner.grids import divisors


@dataclass(frozen=True)
class PeersSetting:
    """Settings of `python -m lab peers`."""

    models: Annotated[tuple[str, ...], Option("llama-7b, or gpt-5b to gpt-640b, with spaces between.")] = ("llama-7b",)
    layers: Layers = None
    ranks: Ranks = None
    batches: Annotated[tuple[int, ...], Option("Global batches in sequences (default: 1, 2, and 1 and 2 a rank).")] = ()
    seq_len: SeqLen = 4096
    grids: Annotated[
        str | None, Option("Stretto's grids, as 'z=4, x=2 z=2' (default: all that can cut the batch).")
    ] = None
    only: Annotated[
        tuple[str, ...], Option("Only runs with this in their name; may be given several times.", is_repeated=True)
    ] = ()
    with_compiled: Annotated[bool, Option("Measure compiled blocks too.", "--compiled/--no-compiled")] = True
    tunes_matmuls: Annotated[
        bool, Option("Let Stretto choose each product's layout by timing it.", "--tune-matmuls/--no-tune-matmuls")
    ] = False
    warm_up: WarmUp = 3
    repeats: Repeats = 5
    rounds: Rounds = 2

    def __post_init__(self) -> None:
        if self.ranks is not None:
            if self.grids is not None:
                parse_grids(self.grids, self.ranks)
            self.workloads()

    def workloads(self) -> list[tuple[str, TrainingWorkload]]:
        """Each model's name with one workload a batch size. Raises ValueError for unknown models."""
        ranks = self.ranks or 1
        sizes = self.batches or tuple(sorted({1, 2, ranks, 2 * ranks}))
        configs = {name: model_config(name, self.layers, self.seq_len) for name in self.models}
        timing = (self.seq_len, self.warm_up, self.repeats, self.rounds)
        return [(name, TrainingWorkload(config, size, *timing)) for name, config in configs.items() for size in sizes]


def compare_peers(setting: PeersSetting, out: Path) -> Iterator[Measured]:
    """Measure each model and global batch in a job of its own; rows are written as they come."""
    assert setting.ranks is not None
    options = (setting.ranks, setting.grids, setting.only, setting.with_compiled, setting.tunes_matmuls)
    for name, workload in setting.workloads():
        file = f"peers-{name}-{workload.batch}"
        about = {"model": name, "ranks": setting.ranks, "workload": asdict(workload)}
        rows = run_ranks(setting.ranks, measure_peers, workload, *options, partial(keep_rows, out, file, Row, about))
        if not rows:
            raise ValueError(f"no run has {' or '.join(map(repr, setting.only))} in its name")
        rows.sort(key=lambda row: -row.get("tokens_per_second_per_gpu", 0.0))
        ratio = speedup(rows)
        yield Measured(
            rows,
            about | {"speedup": ratio},
            () if ratio is None else (f"Stretto's best is {ratio:.3f}x the fastest peer's speed",),
            name=file,
            title=f"{name}, global batch {workload.batch} x {workload.seq_len} tokens, {setting.ranks} ranks",
        )


@dataclass(frozen=True)
class Row:
    """A run of Stretto or of a peer: its speed, memory and losses."""

    name: str = column("run")
    tokens_per_second_per_gpu: float = column("tokens/s/GPU", "{:,.0f}")
    step_milliseconds: float = column("step (ms)", "{:.1f}")
    peak_memory_gib: float = column("peak memory (GiB)", "{:.1f}")
    loss: float = column("first loss", "{:.4f}")
    gradient_norm: float = column("gradient norm", "{:.3f}")
    last_loss: float = column("last loss", "{:.4f}")


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
    keep: Callable[[list[dict[str, Any]]], None] | None = None,
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
    return measure(runs, workload, world.device, keep=keep)


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


def plot_peers(data: dict[str, Any], picture: Path) -> None:
    """Draw tokens/s a GPU and peak memory of each run as bars, peers in another colour."""
    from lab.training.throughput_plot import plot_runs

    work = data["workload"]
    what = (
        f"Training {data['model']}, {work['model']['layers']} layers, "
        f"with a global batch of {work['batch']} x {work['seq_len']} tokens"
    )
    plot_runs(data, lambda row: row["is_peer"], what, picture)


BENCH = Bench(
    "peers",
    "One model with Stretto, FSDP2, DTensor tensor parallelism and both, compiled and not: a table per batch.",
    PeersSetting,
    compare_peers,
    Row,
    title="",
    plot={"peers-*": plot_peers},
    needs=Needs.RANKS,
    about=lambda setting: {},
)
