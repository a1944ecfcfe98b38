# SPDX-License-Identifier: Apache-2.0
"""The lab's commands: what measures, predicts and simulates every figure of the README and the docs."""

from __future__ import annotations  # the settings are imported when a command is used

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.harness import add_commands
from stretto.bench.settings import Needs
from stretto.cli.bench.command import BenchApp
from stretto.cli.console import Json, print_json, refusing_bad_input

if TYPE_CHECKING:
    from tests.faults.flips import FlipsSetting
    from tests.faults.settings import FaultsSetting

    from lab.checkouts.settings import CheckoutsSetting
    from lab.collectives.settings import AblationsSetting, BackendSetting
    from lab.experts.settings import ExpertsSetting, MoeLayersSetting
    from lab.messages.settings import MessagesSetting
    from lab.saves.settings import SavesSetting
    from lab.simulated_schedules.settings import SimulatedCollectivesSetting, SimulatedMscclSetting
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
        from stretto.bench.pictures import redraw

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


@benches.command("saves", "lab.saves.settings", needs=Needs.ONE_GPU)
def saves(setting: SavesSetting, out: Path) -> Any:
    """Cost of asynchronous checkpoints: step time, copies and writes; with --kills N, kill -9 during saves.

    --kills runs on processes of the CPU alone, and needs no GPU.
    """
    from lab.saves.run import bench_saves

    return bench_saves(setting, out)


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
