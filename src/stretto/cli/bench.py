# SPDX-License-Identifier: Apache-2.0
"""`stretto bench`: what users measure on a machine of their own; see `command` for what makes a command of a bench."""

from __future__ import annotations  # the settings are imported when a command is used

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.bench.settings import Needs, NetworkSetting
from stretto.cli.settings_command import BenchApp

if TYPE_CHECKING:
    from stretto.bench.collectives.settings import CollectivesSetting
    from stretto.bench.embedding.settings import EmbeddingSetting
    from stretto.bench.operators.settings import OperatorsSetting
    from stretto.bench.training.settings import ThroughputSetting

benches = BenchApp(
    "Measure this machine: collectives, operators, look-ups, training and puts, with their peers.", "results"
)
app = benches.app


@benches.command("train", "stretto.bench.training.settings", needs=Needs.RANKS)
def train(setting: ThroughputSetting, out: Path) -> Any:
    """Training throughput on every grid of the ranks, compared with torch's FSDP2 on the same model."""
    ranks = benches.count_ranks(setting.ranks)
    workload = setting.workload(ranks)

    from stretto.cluster import Cluster
    from stretto.cluster.detection import count_gpus

    if not count_gpus():
        workload.check_room(ranks)
    from stretto.bench.training.throughput import bench_train

    return bench_train(workload, ranks, out, Cluster.detect().gpu.peak_flops.bf16, setting.has_peers)


@benches.command("collectives", "stretto.bench.collectives.settings", needs=Needs.TWO_GPUS, count=benches.count_gpus)
def collectives(ranks: int, setting: CollectivesSetting, out: Path) -> Any:
    """Collectives by Stretto's kernels, NCCL and torch's symmetric-memory operators, size by size."""
    from stretto.bench.collectives.run import bench_collectives

    return bench_collectives(ranks, out, setting)


@benches.command("embedding", "stretto.bench.embedding.settings", needs=Needs.RANKS, count=benches.count_ranks)
def embedding(ranks: int, setting: EmbeddingSetting, out: Path) -> Any:
    """Embedding look-ups fused with their all-to-all, compared with EmbeddingBag and with one batched kernel."""
    from stretto.cluster.detection import count_gpus

    if not count_gpus():
        setting.check_room(ranks)
    from stretto.bench.embedding.run import bench_embedding

    return bench_embedding(ranks, out, setting)


@benches.command(
    "ops", "stretto.bench.operators.settings", needs=Needs.TWO_GPUS, out="operators", count=benches.count_gpus
)
def ops(ranks: int, setting: OperatorsSetting, out: Path) -> Any:
    """Overlapped operators, compared with the GEMM, GEMM and NCCL, and torch's async tensor parallelism.

    Rows are added to those that the folder has, and written as they come.
    """
    from stretto.bench.operators.run import bench_operators

    return bench_operators(ranks, out, setting)


@benches.command("network", "stretto.bench.settings")
def network(setting: NetworkSetting, out: Path) -> Any:
    """Puts between two declared nodes of this machine, compared with plain sockets: rates, latency, an idle proxy."""
    from stretto.bench.network import bench_network

    return bench_network(out, setting)
