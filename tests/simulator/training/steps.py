# SPDX-License-Identifier: Apache-2.0
"""A made-up cluster and models for tests of simulated steps."""

from typing import Any

from stretto.axes import GridSizes
from stretto.cluster import GPU, Cluster, FlopRates, NetworkLink, NodeLink
from stretto.execution import ExecutionOptions, StateOptions
from stretto.models import GPTConfig
from stretto.planner import read_architecture
from stretto.planner.workload import ScheduleChoice, StepConfig, StepWorkload

SIZES = {"hidden": 1024, "heads": 8, "vocab": 1024, "bias": False, "norm": "rmsnorm", "positions": "rotary"}
SEQ_LEN = 1024
ALL_RECOMPUTED = ("none", "full", "every:2", "products", "communication")


def made_up(**options: Any) -> Cluster:
    """Two nodes of four GPUs of 100 TFLOP/s, joined by a switch of 100 GB/s in a node, and by 4 NICs of 25 GB/s."""
    gpu = GPU(name="made up", memory=80e9, memory_bandwidth=1e12, peak_flops=FlopRates(bf16=100e12))
    made: dict[str, Any] = {
        "name": "made up",
        "nodes": 2,
        "gpus_per_node": 4,
        "nics_per_node": 4,
        "gpu": gpu,
        "in_node": NodeLink(bandwidth=100e9, latency=2e-6),
        "between_nodes": NetworkLink(bandwidth=25e9, latency=5e-6),
    }
    return Cluster(**made | options)


def workload(layers: int = 4, batch: int = 16, **model: Any) -> StepWorkload:
    """A small GPT."""
    config = GPTConfig(layers=layers, **SIZES | model)
    return StepWorkload(read_architecture(config, SEQ_LEN), batch, SEQ_LEN)


def configure(grid: dict[str, Any], micro_batch: int = 2, **options: Any) -> StepConfig:
    """Describe how a step runs. schedule, state: of StepConfig; other options: of execution."""
    schedule, state = options.pop("schedule", None), options.pop("state", StateOptions())
    execution = ExecutionOptions().replace(**options)
    chosen = ScheduleChoice(schedule) if isinstance(schedule, str) else schedule
    return StepConfig(GridSizes(**grid), micro_batch, execution, state, True, chosen)
