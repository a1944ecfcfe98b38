# SPDX-License-Identifier: Apache-2.0
"""`stretto bench`: the commands behind every figure in the README and the docs that is measured."""

from __future__ import annotations  # the settings are imported when a command is used

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.bench.command import Needs, app, bench_command, describe_cpu_benches
from stretto.cli.console import Json, print_json, refusing_bad_input

if TYPE_CHECKING:
    from stretto.bench.checkouts.settings import CheckoutsSetting
    from stretto.bench.collectives.settings import AblationsSetting, BackendSetting, CollectivesSetting, CompileSetting
    from stretto.bench.embedding.settings import EmbeddingSetting
    from stretto.bench.experts.settings import ExpertsSetting, MoeLayersSetting
    from stretto.bench.faults.settings import FaultsSetting
    from stretto.bench.flips import FlipsSetting
    from stretto.bench.messages.settings import MessagesSetting
    from stretto.bench.operators.settings import OperatorsSetting
    from stretto.bench.plan.layout_settings import LayoutsSetting
    from stretto.bench.plan.settings import MemorySetting, PlanSetting, SchedulesSetting
    from stretto.bench.saves.settings import SavesSetting
    from stretto.bench.training.settings import (
        BlocksSetting,
        ChunksSetting,
        DdpSetting,
        DlrmSetting,
        MoeDemoSetting,
        OffloadSetting,
        OverlapSetting,
        ParitySetting,
        PeersSetting,
        PipelineSetting,
        RecomputeSetting,
        StagesSetting,
        ThroughputSetting,
    )
    from stretto.bench.two_level.settings import TwoLevelSetting


def _count_ranks(ranks: int | None) -> int:
    """The number of ranks to start: as given, else the machine's GPUs. Raises ValueError if there are none."""
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks is {ranks}, but must be at least 1")
    from stretto.cluster.detection import count_gpus

    count = ranks or count_gpus()
    if not count:
        raise ValueError(f"this machine has no GPU: say how many CPU --ranks to use. {describe_cpu_benches()}")
    return count


def _count_gpus(ranks: int | None) -> int:
    """The number of ranks of a bench that needs a GPU a rank. Raises ValueError for more ranks than GPUs."""
    from stretto.cluster.detection import count_gpus

    there = count_gpus()
    if not there:
        raise ValueError(
            f"this bench takes 2 GPUs or more, one a rank, and this machine has none. {describe_cpu_benches()}"
        )

    from stretto.memory import shared_gpus  # imports torch, as counting GPUs has

    if shared_gpus.is_enabled():
        there = max(there, ranks or 2)
    if there < 2 or (ranks is not None and not 2 <= ranks <= there):
        asked = "" if ranks is None else f", and --ranks is {ranks}"
        raise ValueError(f"this bench takes 2 GPUs or more, one a rank: this machine has {there}{asked}")
    return ranks or there


def _count_ranks_on_gpus(ranks: int | None) -> int:
    """The number of ranks of a bench that needs GPUs, which more ranks may share: as given, or the machine's GPUs."""
    from stretto.cluster.detection import count_gpus

    if not (there := count_gpus()):
        raise ValueError(f"this bench takes GPUs, and this machine has none. {describe_cpu_benches()}")
    if (count := ranks or there) < 2:
        raise ValueError(f"this bench takes 2 ranks or more, not {count}; --ranks 2 would share the GPU")
    return count


@app.command("redraw", rich_help_panel=Needs.NO_GPU.value)
def redraw(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with results, in it or in its subfolders.")
    ],
    as_json: Json = False,
) -> None:
    """Redraw the pictures of results from their JSON, and the losses of runs, without measuring."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.pictures import redraw

        pictures = redraw(folder)
    if as_json:
        print_json({"pictures": pictures})
    else:
        print("\n".join(map(str, pictures)))


@bench_command("train", "stretto.bench.training.settings", needs=Needs.RANKS)
def train(setting: ThroughputSetting, out: Path) -> Any:
    """Training throughput on every grid of the ranks, compared with torch's FSDP2 on the same model."""
    ranks = _count_ranks(setting.ranks)
    workload = setting.workload(ranks)

    from stretto.bench.training.throughput import bench_train
    from stretto.cluster import Cluster

    return bench_train(workload, ranks, out, Cluster.detect().gpu.peak_flops.bf16, setting.has_peers)


@bench_command("parity", "stretto.bench.training.settings")
def parity(setting: ParitySetting, out: Path) -> Any:
    """Five steps on every grid of 1, 2, 4 and more ranks, compared with plain PyTorch on one (CPU, fp64 and fp32)."""
    from stretto.bench.training.parity import bench_parity

    return bench_parity(setting.ranks, out)


@bench_command("compile", "stretto.bench.collectives.settings")
def compile_(setting: CompileSetting, out: Path) -> Any:
    """Seconds and memory to compile and verify collectives of up to 512 ranks (needs no GPU)."""
    from stretto.bench.collectives.compile import bench_compile

    return bench_compile(out, setting.largest)


@bench_command("faults", "stretto.bench.faults.settings")
def faults(setting: FaultsSetting, out: Path) -> Any:
    """Kill, stop and disturb ranks at random times of training; check the reports and restarts (on CPUs)."""
    from stretto.bench.faults.run import bench_faults

    return bench_faults(setting, out)


@bench_command("peers", "stretto.bench.training.settings", needs=Needs.RANKS)
def peers(setting: PeersSetting, out: Path) -> Any:
    """One model with Stretto, FSDP2, DTensor tensor parallelism and both, compiled and not: a table per batch."""
    ranks = _count_ranks(setting.ranks)
    workloads_by_name = setting.workloads(ranks)

    from stretto.bench.training.peers import bench_peers

    rows: list[dict[str, Any]] = []
    for name, workloads in workloads_by_name.items():
        measured = bench_peers(
            name,
            workloads[0],
            [workload.batch for workload in workloads],
            ranks,
            out,
            grids=setting.grids,
            only=setting.only,
            with_compiled=setting.with_compiled,
            tunes_matmuls=setting.tunes_matmuls,
        )
        rows += [{"model": name, "batch": batch} | row for batch, found in measured.items() for row in found]
    return rows


@bench_command("overlap", "stretto.bench.training.settings", needs=Needs.RANKS)
def overlap(setting: OverlapSetting, out: Path) -> Any:
    """Step time without overlap, then with all-reduce, reduce-scatter, all-gather, data's buckets, copy engines."""
    ranks = _count_ranks(setting.ranks)
    workload = setting.workload(ranks)

    from stretto.bench.training.overlap import bench_overlap

    return bench_overlap(setting.model, workload, ranks, setting.grids, out)


@bench_command("blocks", "stretto.bench.training.settings", needs=Needs.RANKS)
def blocks(setting: BlocksSetting, out: Path) -> Any:
    """Models without roles, sharded block by block, compared with torch's FSDP2 on the same blocks."""
    ranks = _count_ranks(setting.ranks)

    from stretto.bench.training.blocks import bench_blocks

    return bench_blocks(setting, ranks, out)


@bench_command("chunks", "stretto.bench.training.settings")
def chunks(setting: ChunksSetting, out: Path) -> Any:
    """Overlap of gradients' all-reduces with optimizer steps, by the number of buckets per all-reduce (slow link)."""
    from stretto.bench.training.chunks import bench_chunks

    return bench_chunks(setting, out)


@bench_command("pipeline", "stretto.bench.training.settings")
def pipeline(setting: PipelineSetting, out: Path) -> Any:
    """Pipeline steps with stages that sleep, by schedule, compared with the timing model."""
    from stretto.bench.training.pipeline import bench_pipeline

    return bench_pipeline(setting, out)


@bench_command("stages", "stretto.bench.training.settings")
def stages(setting: StagesSetting, out: Path) -> Any:
    """Several pipeline stages on one rank, compared with gradient accumulation and torch's pipelining."""
    from stretto.bench.training.stages import bench_stages

    return bench_stages(setting, out)


@bench_command("offload", "stretto.bench.training.settings", needs=Needs.ONE_GPU)
def offload(setting: OffloadSetting, out: Path) -> Any:
    """Optimizer state on the host: steps compared with the host link, state on the device, and FSDP2's offload."""
    from stretto.bench.training.offload import bench_offload

    return bench_offload(setting, out)


@bench_command("saves", "stretto.bench.saves.settings", needs=Needs.ONE_GPU)
def saves(setting: SavesSetting, out: Path) -> Any:
    """Cost of asynchronous checkpoints: step time, copies and writes; with --kills N, kill -9 during saves.

    --kills runs on processes of the CPU alone, and needs no GPU.
    """
    from stretto.bench.saves.run import bench_saves

    return bench_saves(setting, out)


@bench_command("recompute", "stretto.bench.training.settings")
def recompute(setting: RecomputeSetting, out: Path) -> Any:
    """Activation checkpointing with and without repeated communication, over slow links between CPU processes."""
    from stretto.bench.training.recompute import bench_recompute

    return bench_recompute(setting, out)


@bench_command("moe-demo", "stretto.bench.training.settings")
def moe_demo(setting: MoeDemoSetting, out: Path) -> Any:
    """A mixture of experts on 4 CPU processes, compared with a dense model of its active size: losses and load."""
    from stretto.bench.training.moe_demo import bench_moe_demo

    return bench_moe_demo(setting, out)


@bench_command("experts", "stretto.bench.experts.settings")
def experts(setting: ExpertsSetting, out: Path) -> Any:
    """Savings by duplicate token dropping and communication-aware checkpointing, over slow links between processes."""
    from stretto.bench.experts.communication import bench_experts

    return bench_experts(setting, out)


@bench_command("moe-layers", "stretto.bench.experts.settings", needs=Needs.ONE_GPU)
def moe_layers(setting: MoeLayersSetting, out: Path) -> Any:
    """Layers of Qwen3-30B-A3B on one GPU, compared with transformers: tokens/s, memory, host synchronizations."""
    from stretto.bench.experts.layers import bench_moe_layers

    return bench_moe_layers(setting, out)


@bench_command("ddp", "stretto.bench.training.settings", needs=Needs.ONE_GPU)
def ddp(setting: DdpSetting, out: Path) -> Any:
    """The timeline of DistributedDataParallel with two checkouts' backends: overlap of buckets."""
    from stretto.bench.training.ddp import bench_ddp

    return bench_ddp(setting, out)


@bench_command("plan", "stretto.bench.plan.settings", needs=Needs.RANKS)
def plan(setting: PlanSetting, out: Path) -> Any:
    """Every grid of the ranks, measured and compared with the planner's predictions: step times, memory, order.

    Predict first (this needs no GPU): stretto bench plan --predict FILE --cluster CLUSTER.toml --ranks 4
    """
    from stretto.cluster import Cluster

    planned = setting.workloads(_count_ranks(setting.ranks))
    if setting.predict is None or setting.cluster is None:
        from stretto.bench.plan.settings import read_predictions

        read_predictions(setting.predictions, planned)  # refused before torch is imported

        from stretto.bench.plan.run import bench_plan

        return bench_plan(planned, setting.predictions, out, again=setting.again)
    cluster = Cluster.find(setting.cluster)

    from stretto.bench.plan.run import write_predictions

    written = write_predictions(planned, cluster, setting.predict, shards_sequence=setting.shards_sequence)
    print(f"predictions written to {setting.predict}", file=sys.stderr)
    return written


@bench_command("layouts", "stretto.bench.plan.layout_settings", needs=Needs.TWO_GPUS)
def layouts(setting: LayoutsSetting, out: Path) -> Any:
    """Grids with pipelines, experts and state on the host: measured, compared with predictions and with FSDP2.

    Predict first (this needs no GPU): stretto bench layouts --file FILE --cluster CLUSTER.toml
    """
    from stretto.bench.plan.layout_settings import read_layout_predictions, read_layouts, shrink

    file = read_layouts(setting.file).choose(setting.only)
    file = shrink(file) if setting.small else file
    if setting.cluster is not None:
        from stretto.cluster import Cluster

        cluster = Cluster.find(setting.cluster)

        from stretto.bench.plan.layouts import predict_layouts

        return predict_layouts(file, cluster, out)
    predicted = read_layout_predictions(out, file)

    from stretto.cluster.detection import count_gpus

    if not count_gpus() and not setting.small:
        raise ValueError("this bench takes GPUs, and torch sees none here; --small tries the command without one")

    from stretto.bench.plan.layouts import bench_layouts

    return bench_layouts(file, predicted, setting, out)


@bench_command("schedules", "stretto.bench.plan.settings")
def schedules(setting: SchedulesSetting, out: Path) -> Any:
    """Message-driven order compared with 1F1B for actions of unequal times, by the timing model of pipelines."""
    from stretto.bench.plan.schedules import bench_schedules

    return bench_schedules(setting, out)


@bench_command("memory", "stretto.bench.plan.settings", needs=Needs.ONE_GPU)
def memory(setting: MemorySetting, out: Path) -> Any:
    """Memory of training runs that nearly fill one GPU, compared with the planner's predictions."""
    from stretto.bench.plan.memory import bench_memory

    return bench_memory(setting, out)


@bench_command("collectives", "stretto.bench.collectives.settings", needs=Needs.TWO_GPUS, count=_count_gpus)
def collectives(ranks: int, setting: CollectivesSetting, out: Path) -> Any:
    """Collectives by Stretto's kernels, NCCL and torch's symmetric-memory operators, size by size."""
    from stretto.bench.collectives.run import bench_collectives

    return bench_collectives(ranks, out, setting)


@bench_command("backend", "stretto.bench.collectives.settings", needs=Needs.TWO_GPUS, count=_count_ranks_on_gpus)
def backend(ranks: int, setting: BackendSetting, out: Path) -> Any:
    """torch.distributed calls with the backend `stretto` and with NCCL: alone, during matrix products, in DDP steps."""
    from stretto.bench.collectives.backend import bench_backend

    return bench_backend(ranks, out, setting)


@bench_command("ablations", "stretto.bench.collectives.settings", needs=Needs.TWO_GPUS, count=_count_gpus)
def ablations(ranks: int, setting: AblationsSetting, out: Path) -> Any:
    """MSCCLang's ablations: pipelining over tiles on and off; one kernel compared with the same algorithm in NCCL
    calls."""
    from stretto.bench.collectives.ablations import bench_ablations

    return bench_ablations(ranks, out, setting)


@bench_command("embedding", "stretto.bench.embedding.settings", needs=Needs.RANKS, count=_count_ranks)
def embedding(ranks: int, setting: EmbeddingSetting, out: Path) -> Any:
    """Embedding look-ups fused with their all-to-all, compared with EmbeddingBag and with one batched kernel."""
    from stretto.bench.embedding.run import bench_embedding

    return bench_embedding(ranks, out, setting)


@bench_command(
    "ops", "stretto.bench.operators.settings", needs=Needs.TWO_GPUS, out="results/operators", count=_count_gpus
)
def ops(ranks: int, setting: OperatorsSetting, out: Path) -> Any:
    """Overlapped operators, compared with the GEMM, GEMM and NCCL, and torch's async tensor parallelism.

    Rows are added to those that the folder has, and written as they come.
    """
    from stretto.bench.operators.ablations import bench_operator_ablations
    from stretto.bench.operators.run import bench_operators

    return (bench_operator_ablations if setting.is_ablation else bench_operators)(ranks, out, setting)


@bench_command("two-level", "stretto.bench.two_level.settings")
def two_level(setting: TwoLevelSetting, out: Path) -> Any:
    """Two-level collectives between network namespaces: recursive, ring and flat, compared with the model (needs
    root)."""
    from stretto.bench.two_level.run import bench_two_level

    return bench_two_level(setting, out)


@bench_command("dlrm", "stretto.bench.training.settings", needs=Needs.RANKS)
def dlrm(setting: DlrmSetting, out: Path) -> Any:
    """A DLRM's training step with look-up and all-to-all fused, compared with PyTorch's functions."""
    workload, ranks = setting.workload(), _count_ranks(setting.ranks)

    from stretto.bench.training.dlrm import bench_dlrm

    return bench_dlrm(workload, ranks, out)


@bench_command("checkouts", "stretto.bench.checkouts.settings", needs=Needs.ONE_GPU)
def checkouts(setting: CheckoutsSetting, out: Path) -> Any:
    """Collectives, tiles, embeddings and operators of two checkouts, interleaved, all ranks on one GPU under MPS.

    A case that loses ranks is left out. Ends with 1 where that happened four times; what was measured until then is
    written.
    """
    from stretto.bench.checkouts.run import bench_checkouts

    return bench_checkouts(setting, out)


@bench_command("messages", "stretto.bench.messages.settings", needs=Needs.RANKS, count=_count_ranks)
def messages(ranks: int, setting: MessagesSetting, out: Path) -> Any:
    """Messages between pipeline stages by transport, compared with torch's send and recv; all-reduces by backend."""
    from stretto.bench.messages.settings import require_two_ranks

    require_two_ranks(ranks)

    from stretto.bench.messages.run import bench_messages

    return bench_messages(ranks, setting, out)


@bench_command("flips", "stretto.bench.flips")
def flips(setting: FlipsSetting, out: Path) -> Any:
    """Flip random bits of checkpoints and exported weights, one at a time, and check that each is detected (no GPU)."""
    from stretto.bench.flips import bench_flips

    return bench_flips(setting, out)
