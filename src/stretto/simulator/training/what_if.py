# SPDX-License-Identifier: Apache-2.0
"""Predicts what a change of the machine does to a step: one more NIC, GPUs twice as fast, a lost link."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stretto.cluster import Cluster
from stretto.cluster.model import FlopRates
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.network.clusters import is_switched
from stretto.simulator.training.lowering import RankFactors
from stretto.simulator.training.simulation import Fidelity, StepSimulation, simulate_step

CHANGES = {"nic": "one more NIC on each node", "gpu": "GPUs that compute twice as fast", "link": "a lost link"}


@dataclass(frozen=True)
class ChangedStep:
    """A step on a machine with one change. before: the step's seconds without it."""

    name: str
    description: str
    step: StepSimulation
    before: float

    @property
    def speed_up(self) -> float:
        """The step's speedup; less than 1 where the change costs time."""
        return self.before / self.step.step_time

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        about = {"name": self.name, "description": self.description, "speed_up": self.speed_up}
        return about | self.step.as_dict()


def check_changes(names: Sequence[str]) -> tuple[str, ...]:
    """The changes that these names mean; "all" is each of them. ValueError for others."""
    for name in names:
        if name not in (*CHANGES, "all"):
            raise ValueError(f"--what-if is {name!r}, but must be one of {', '.join(CHANGES)}, or all")
    return tuple(CHANGES) if "all" in names else tuple(dict.fromkeys(names))


def simulate_change(
    name: str, base: StepSimulation, workload: StepWorkload, config: StepConfig, cluster: Cluster, fidelity: Fidelity
) -> ChangedStep:
    """Simulate a step of `base` on a changed machine. Raises ValueError where the cluster cannot be changed so."""
    factors: RankFactors | None = None
    description, is_lost = CHANGES[name], False
    match name:
        case "nic":
            nics = int(cluster.require("nics_per_node"))
            cluster = replace(cluster, nics_per_node=nics + 1)
            description = f"{nics + 1} NICs on each node, not {nics}"
        case "gpu":
            matmuls = tuple(replace(row, seconds=row.seconds / 2) for row in cluster.matmuls)
            cluster = replace(cluster, gpu=_double_rates(cluster.gpu), matmuls=matmuls)
        case _:
            lost, description = _lose_link(cluster, config.grid.ranks)
            is_lost = fidelity == "event-driven"
            factors = None if is_lost else lost
    step = simulate_step(workload, config, cluster, fidelity=fidelity, factors=factors, loses_link=is_lost)
    return ChangedStep(name, description, step, base.step_time)


def _double_rates(gpu: Any) -> Any:
    """The GPU with twice its rates, those that are known."""

    def faster(rate: float | None) -> float | None:
        return None if rate is None else 2 * rate

    def all_faster(rates: FlopRates) -> FlopRates:
        return FlopRates(**{name: faster(rate) for name, rate in vars(rates).items()})

    return replace(
        gpu,
        memory_bandwidth=faster(gpu.memory_bandwidth),
        measured_memory_bandwidth=faster(gpu.measured_memory_bandwidth),
        attention_flops=faster(gpu.attention_flops),
        long_attention_flops=faster(gpu.long_attention_flops),
        peak_flops=all_faster(gpu.peak_flops),
        empirical_flops=all_faster(gpu.empirical_flops),
    )


def _lose_link(cluster: Cluster, ranks: int) -> tuple[RankFactors, str]:
    """Return how much slower the first node's NICs are without one, or the first GPU's links are, and which that is."""
    size = cluster.gpus_per_node
    if ranks > size:
        nics = int(cluster.require("nics_per_node"))
        if nics == 1:
            raise ValueError(f"a node of cluster {cluster.name!r} has one NIC: without it, nothing reaches the node")
        slow = (nics / (nics - 1),) * size + (1.0,) * (ranks - size)
        factors = RankFactors(nics=slow, gpus_per_node=size, is_first_slowest=True)
        return factors, f"the first node without one of its {nics} NICs"
    whole, pair = cluster.in_node.bandwidth, cluster.in_node.pair_bandwidth
    if whole is None or pair is None or is_switched(cluster):
        raise ValueError(
            f"a node of cluster {cluster.name!r} has a switch, or does not say in_node.pair_bandwidth: no link between "
            f"two GPUs can be lost; more than {size} GPUs would do, of which a node loses a NIC"
        )
    factors = RankFactors(links=(whole / (whole - pair),) + (1.0,) * (ranks - 1), is_first_slowest=True)
    return factors, "the first GPU without its link to one peer"
