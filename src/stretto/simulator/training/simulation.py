# SPDX-License-Identifier: Apache-2.0
"""Simulates a training step: `simulate_step`, and what it finds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stretto.cluster import Cluster
from stretto.planner.compute import Device
from stretto.planner.cost import SLOWDOWN_BESIDE_COMMUNICATION
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.network.shapes import switch
from stretto.simulator.training.execution import StageNetwork, execute_step
from stretto.simulator.training.lowering import BY_COPY_ENGINES, LoweredStep, RankFactors, StepLowering
from stretto.simulator.training.step import StepPrograms, record_step

Fidelity = Literal["closed-form", "event-driven"]
COPY_ENGINE_SLOWDOWN = 0.5
"""Of what computation loses beside a kernel's communication, what it loses beside copy engines'."""


def simulate_step(workload: StepWorkload, config: StepConfig, cluster: Cluster):
    programs = record_step(workload, config, Device(cluster, workload.dtype))
    lowered = StepLowering(programs, (0,)).lower()
    graph = lowered.graph
    slow = cluster.gpu.overlap_slowdown or SLOWDOWN_BESIDE_COMMUNICATION
    if not config.options.overlap.hides_any: slow = 0.0
    slows = {}
    for s in graph.stream_names:
        if s not in ("compute","host","pipe"):
            slows[s] = slow * (COPY_ENGINE_SLOWDOWN if s.endswith(BY_COPY_ENGINES) else 1.0)
    network = StageNetwork(switch(max(2,graph.world), 1.0, 0.0), {})
    return execute_step(graph, network, slows), lowered
