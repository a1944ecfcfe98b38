# SPDX-License-Identifier: Apache-2.0
"""The lab's commands: what measures, predicts and simulates every figure of the README and the docs."""

from __future__ import annotations  # the settings are imported when a command is used

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.harness import add_commands
from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.cli.settings_command import BenchApp, Needs

if TYPE_CHECKING:
    from tests.faults.flips import FlipsSetting
    from tests.faults.settings import FaultsSetting

    from lab.checkouts.settings import CheckoutsSetting
    from lab.collectives.settings import AblationsSetting, BackendSetting
    from lab.experts.settings import ExpertsSetting, MoeLayersSetting
    from lab.messages.settings import MessagesSetting
    from lab.planning.layout_settings import LayoutsSetting
    from lab.planning.settings import (
        MemorySetting,
        PlanSetting,
        PublishedExpertsSetting,
        PublishedPipelinesSetting,
        SimulatedStepsSetting,
    )
    from lab.saves.settings import SavesSetting
    from lab.simulated_schedules.settings import SimulatedCollectivesSetting, SimulatedMscclSetting
    from lab.studies.settings import (
        SimulatedDlrmSetting,
        SimulatedScalingSetting,
        SimulatedTwoLevelSetting,
        SimulatedZero3Setting,
    )
    from lab.training.settings import (
        BlocksSetting,
        DdpSetting,
        DlrmSetting,
        OffloadSetting,
        OverlapSetting,
        PeersSetting,
        PipelineSetting,
        RecomputeSetting,
        StagesSetting,
    )
    from lab.two_level.settings import TwoLevelSetting
    from stretto.bench.operators.settings import OperatorsSetting

benches = BenchApp("Run the benches whose results the README and the documentation report.", "lab/results")
app = benches.app
add_commands(benches)


@app.command("redraw", rich_help_panel=Needs.NO_GPU.value)
def redraw(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with results, in it or in its subfolders.")
    ],
    as_json: Json = False,
) -> None:
    """Redraw the pictures of results from their JSON, and the losses of runs, without measuring."""
    with refusing_bad_input(as_json=as_json):
        from lab.pictures import redraw

        pictures = redraw(folder)
    if as_json:
        print_json({"pictures": pictures})
    else:
        print("\n".join(map(str, pictures)))


@app.command("index", rich_help_panel=Needs.NO_GPU.value)
def index() -> None:
    """Write the list of committed runs, lab/results/README.md."""
    from lab.index import INDEX, write_index

    INDEX.write_text(write_index())
    print(INDEX)


@benches.command("faults", "tests.faults.settings")
def faults(setting: FaultsSetting, out: Path) -> Any:
    """Kill, stop and disturb ranks at random times of training; check the reports and restarts (on CPUs)."""
    from tests.faults.run import bench_faults

    return bench_faults(setting, out)


@benches.command("peers", "lab.training.settings", needs=Needs.RANKS)
def peers(setting: PeersSetting, out: Path) -> Any:
    """One model with Stretto, FSDP2, DTensor tensor parallelism and both, compiled and not: a table per batch."""
    ranks = benches.count_ranks(setting.ranks)
    workloads_by_name = setting.workloads(ranks)

    from lab.training.peers import bench_peers

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


@benches.command("overlap", "lab.training.settings", needs=Needs.RANKS)
def overlap(setting: OverlapSetting, out: Path) -> Any:
    """Step time without overlap, then with all-reduce, reduce-scatter, all-gather, data's buckets, copy engines."""
    ranks = benches.count_ranks(setting.ranks)
    workload = setting.workload(ranks)

    from lab.training.overlap import bench_overlap

    return bench_overlap(setting.model, workload, ranks, setting.grids, out)


@benches.command("blocks", "lab.training.settings", needs=Needs.RANKS)
def blocks(setting: BlocksSetting, out: Path) -> Any:
    """Models without roles, sharded block by block, compared with torch's FSDP2 on the same blocks."""
    ranks = benches.count_ranks(setting.ranks)

    from lab.training.blocks import bench_blocks

    return bench_blocks(setting, ranks, out)


@benches.command("pipeline", "lab.training.settings")
def pipeline(setting: PipelineSetting, out: Path) -> Any:
    """Pipeline steps with stages that sleep, by schedule, compared with the timing model."""
    from lab.training.pipeline import bench_pipeline

    return bench_pipeline(setting, out)


@benches.command("stages", "lab.training.settings")
def stages(setting: StagesSetting, out: Path) -> Any:
    """Several pipeline stages on one rank, compared with gradient accumulation and torch's pipelining."""
    from lab.training.stages import bench_stages

    return bench_stages(setting, out)


@benches.command("offload", "lab.training.settings", needs=Needs.ONE_GPU)
def offload(setting: OffloadSetting, out: Path) -> Any:
    """Optimizer state on the host: steps compared with the host link, state on the device, and FSDP2's offload."""
    from lab.training.offload import bench_offload

    return bench_offload(setting, out)


@benches.command("saves", "lab.saves.settings", needs=Needs.ONE_GPU)
def saves(setting: SavesSetting, out: Path) -> Any:
    """Cost of asynchronous checkpoints: step time, copies and writes; with --kills N, kill -9 during saves.

    --kills runs on processes of the CPU alone, and needs no GPU.
    """
    from lab.saves.run import bench_saves

    return bench_saves(setting, out)


@benches.command("recompute", "lab.training.settings")
def recompute(setting: RecomputeSetting, out: Path) -> Any:
    """Activation checkpointing with and without repeated communication, over slow links between CPU processes."""
    from lab.training.recompute import bench_recompute

    return bench_recompute(setting, out)


@benches.command("experts", "lab.experts.settings")
def experts(setting: ExpertsSetting, out: Path) -> Any:
    """Savings by duplicate token dropping and communication-aware checkpointing, over slow links between processes."""
    from lab.experts.communication import bench_experts

    return bench_experts(setting, out)


@benches.command("moe-layers", "lab.experts.settings", needs=Needs.ONE_GPU)
def moe_layers(setting: MoeLayersSetting, out: Path) -> Any:
    """Layers of Qwen3-30B-A3B on one GPU, compared with transformers: tokens/s, memory, host synchronizations."""
    from lab.experts.layers import bench_moe_layers

    return bench_moe_layers(setting, out)


@benches.command("ddp", "lab.training.settings", needs=Needs.ONE_GPU)
def ddp(setting: DdpSetting, out: Path) -> Any:
    """The timeline of DistributedDataParallel with two checkouts' backends: overlap of buckets."""
    from lab.training.ddp import bench_ddp

    return bench_ddp(setting, out)


@benches.command("plan", "lab.planning.settings", needs=Needs.RANKS)
def plan(setting: PlanSetting, out: Path) -> Any:
    """Every grid of the ranks, measured and compared with the planner's predictions: step times, memory, order.

    Predict first (this needs no GPU): python -m lab plan --predict FILE --cluster CLUSTER.toml --ranks 4
    """
    from stretto.cluster import Cluster

    planned = setting.workloads(benches.count_ranks(setting.ranks))
    if setting.predict is None or setting.cluster is None:
        from lab.planning.settings import read_predictions

        read_predictions(setting.predictions, planned)  # refused before torch is imported

        from lab.planning.run import bench_plan

        return bench_plan(planned, setting.predictions, out, again=setting.again)
    cluster = Cluster.find(setting.cluster)

    from lab.planning.run import write_predictions

    written = write_predictions(planned, cluster, setting.predict, shards_sequence=setting.shards_sequence)
    print(f"predictions written to {setting.predict}", file=sys.stderr)
    return written


@benches.command("layouts", "lab.planning.layout_settings", needs=Needs.TWO_GPUS)
def layouts(setting: LayoutsSetting, out: Path) -> Any:
    """Grids with pipelines, experts and state on the host: measured, compared with predictions and with FSDP2.

    Predict first (this needs no GPU): python -m lab layouts --file FILE --cluster CLUSTER.toml
    """
    from lab.planning.layout_settings import read_layout_predictions, read_layouts, shrink

    file = read_layouts(setting.file).choose(setting.only)
    file = shrink(file) if setting.small else file
    if setting.cluster is not None:
        from stretto.cluster import Cluster

        cluster = Cluster.find(setting.cluster)

        from lab.planning.layouts import predict_layouts

        return predict_layouts(file, cluster, out)
    predicted = read_layout_predictions(out, file)

    from stretto.cluster.detection import count_gpus

    if not count_gpus() and not setting.small:
        raise ValueError("this bench takes GPUs, and torch sees none here; --small tries the command without one")

    from lab.planning.layouts import bench_layouts

    return bench_layouts(file, predicted, setting, out)


@benches.command("memory", "lab.planning.settings", needs=Needs.ONE_GPU)
def memory(setting: MemorySetting, out: Path) -> Any:
    """Memory of training runs that nearly fill one GPU, compared with the planner's predictions."""
    from lab.planning.memory import bench_memory

    return bench_memory(setting, out)


@benches.command("backend", "lab.collectives.settings", needs=Needs.TWO_GPUS, count=benches.count_ranks_on_gpus)
def backend(ranks: int, setting: BackendSetting, out: Path) -> Any:
    """torch.distributed calls with the backend `stretto` and with NCCL: alone, during matrix products, in DDP steps."""
    from lab.collectives.backend import bench_backend

    return bench_backend(ranks, out, setting)


@benches.command("ablations", "lab.collectives.settings", needs=Needs.TWO_GPUS, count=benches.count_gpus)
def ablations(ranks: int, setting: AblationsSetting, out: Path) -> Any:
    """MSCCLang's ablations: pipelining over tiles on and off; one kernel compared with the same algorithm in NCCL
    calls."""
    from lab.collectives.ablations import bench_ablations

    return bench_ablations(ranks, out, setting)


@benches.command(
    "operator-ablations",
    "stretto.bench.operators.settings",
    needs=Needs.TWO_GPUS,
    out="operators",
    count=benches.count_gpus,
)
def operator_ablations(ranks: int, setting: OperatorsSetting, out: Path) -> Any:
    """Overlapped operators with one field of a configuration varied at a time (cases: flux by default)."""
    from lab.operators.ablations import bench_operator_ablations

    return bench_operator_ablations(ranks, out, setting if setting.cases else replace(setting, cases=("flux",)))


@benches.command("two-level", "lab.two_level.settings")
def two_level(setting: TwoLevelSetting, out: Path) -> Any:
    """Two-level collectives between network namespaces: recursive, ring and flat, compared with the model (needs
    root)."""
    from lab.two_level.run import bench_two_level

    return bench_two_level(setting, out)


@benches.command("dlrm", "lab.training.settings", needs=Needs.RANKS)
def dlrm(setting: DlrmSetting, out: Path) -> Any:
    """A DLRM's training step with look-up and all-to-all fused, compared with PyTorch's functions."""
    workload, ranks = setting.workload(), benches.count_ranks(setting.ranks)

    from lab.training.dlrm import bench_dlrm

    return bench_dlrm(workload, ranks, out)


@benches.command("checkouts", "lab.checkouts.settings", needs=Needs.ONE_GPU)
def checkouts(setting: CheckoutsSetting, out: Path) -> Any:
    """Collectives, tiles, embeddings and operators of two checkouts, interleaved, all ranks on one GPU under MPS.

    A case that loses ranks is left out. Ends with 1 where that happened four times; what was measured until then is
    written.
    """
    from lab.checkouts.run import bench_checkouts

    return bench_checkouts(setting, out)


@benches.command("messages", "lab.messages.settings", needs=Needs.RANKS, count=benches.count_ranks)
def messages(ranks: int, setting: MessagesSetting, out: Path) -> Any:
    """Messages between pipeline stages by transport, compared with torch's send and recv; all-reduces by backend."""
    from lab.messages.settings import require_two_ranks

    require_two_ranks(ranks)

    from lab.messages.run import bench_messages

    return bench_messages(ranks, setting, out)


@benches.command("flips", "tests.faults.flips")
def flips(setting: FlipsSetting, out: Path) -> Any:
    """Flip random bits of checkpoints and exported weights, one at a time, and check that each is detected (no GPU)."""
    from tests.faults.flips import bench_flips

    return bench_flips(setting, out)


@benches.command("published-pipelines", "lab.planning.settings")
def published_pipelines(setting: PublishedPipelinesSetting, out: Path) -> Any:
    """Plans for the pipelines of Singh's chapter 3 on Summit, compared with the published times (needs no GPU)."""
    from lab.planning.published_pipelines import bench_published_pipelines

    return bench_published_pipelines(out, setting.batch)


@benches.command("published-experts", "lab.planning.settings")
def published_experts(setting: PublishedExpertsSetting, out: Path) -> Any:
    """Plans for the mixtures of experts of Singh's chapter 7 on Summit, and the published figures (needs no GPU)."""
    from lab.planning.published_experts import bench_published_experts

    return bench_published_experts(out, setting.micro_batch)


@benches.command("simulated-steps", "lab.planning.settings")
def simulated_steps(setting: SimulatedStepsSetting, out: Path) -> Any:
    """Steps that were measured on GPUs, compared with the simulator and the planner (needs no GPU)."""
    from lab.planning.simulated_steps import bench_simulated_steps

    return bench_simulated_steps([Path(folder) for folder in setting.plans], setting.overlaps, out)


@benches.command("simulated-pipelines", "lab.planning.settings")
def simulated_pipelines(setting: PublishedPipelinesSetting, out: Path) -> Any:
    """The pipelines of Singh's chapter 3 on Summit, simulated, compared with the published times (needs no GPU)."""
    from lab.planning.simulated_pipelines import bench_simulated_pipelines

    return bench_simulated_pipelines(out, setting.batch)


@benches.command("simulated-collectives", "lab.simulated_schedules.settings")
def simulated_collectives(setting: SimulatedCollectivesSetting, out: Path) -> Any:
    """Simulated and measured schedules, on H200 and on 8 processes over shaped links (measuring needs root)."""
    setting.require_results()

    from lab.simulated_schedules.run import bench_simulated_collectives

    return bench_simulated_collectives(setting, out)


@benches.command("simulated-msccl", "lab.simulated_schedules.settings")
def simulated_msccl(setting: SimulatedMscclSetting, out: Path) -> Any:
    """MSCCLang's figures 8 and 11 simulated: hierarchical, two-step and AllToNext on clusters (needs no GPU)."""
    from lab.simulated_schedules.msccl import bench_simulated_msccl

    return bench_simulated_msccl(setting, out)


@benches.command("simulated-two-level", "lab.studies.settings")
def simulated_two_level(setting: SimulatedTwoLevelSetting, out: Path) -> Any:
    """Two-level collectives on Frontier and Perlmutter, compared with Singh's chapter 6 (needs no GPU)."""
    from lab.studies.two_level import bench_simulated_two_level

    return bench_simulated_two_level(setting, out)


@benches.command("simulated-zero3", "lab.studies.settings")
def simulated_zero3(setting: SimulatedZero3Setting, out: Path) -> Any:
    """ZeRO-3 over flat and two-level collectives, simulated and compared with Singh's figure 6.12 (needs no GPU)."""
    from lab.studies.zero3 import bench_simulated_zero3

    return bench_simulated_zero3(setting, out)


@benches.command("simulated-scaling", "lab.studies.settings")
def simulated_scaling(setting: SimulatedScalingSetting, out: Path) -> Any:
    """Weak and strong scaling against Singh's figures 5.4, 5.5 and 5.7, and why Table 5.2 is slower (needs no GPU)."""
    from lab.studies.scaling import bench_simulated_scaling

    return bench_simulated_scaling(setting, out)


@benches.command("simulated-dlrm", "lab.studies.settings")
def simulated_dlrm(setting: SimulatedDlrmSetting, out: Path) -> Any:
    """A DLRM's step on a torus of 128+ nodes, compared with section 4.4 of Punniyamurthy et al. (needs no GPU)."""
    from lab.studies.recommendation import bench_simulated_dlrm

    return bench_simulated_dlrm(setting, out)
