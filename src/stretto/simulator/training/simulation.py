# SPDX-License-Identifier: Apache-2.0
"""Simulates a training step: when each rank computes, communicates and waits (`simulate_step`)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from stretto.axes import EXPERT, NAMES
from stretto.cluster import Cluster
from stretto.planner.compute import Device
from stretto.planner.step import AXIS_OF_GROUP, COMPUTE, HOST, overlap_slowdown
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.events import NANOSECONDS
from stretto.simulator.graph import Execution, OperationType, covered
from stretto.simulator.network.closed_form import NetworkModel
from stretto.simulator.network.event_driven import EventDrivenNetwork
from stretto.simulator.network.shapes import switch
from stretto.simulator.training.execution import StageNetwork, execute_step, sample_links
from stretto.simulator.training.lowering import BY_COPY_ENGINES, LoweredStep, RankFactors, StepLowering
from stretto.simulator.training.messages import MessageLowering, network_of
from stretto.simulator.training.program import PIPE
from stretto.simulator.training.step import StepPrograms, write_programs

Fidelity = Literal["closed-form", "event-driven"]
COPY_ENGINE_SLOWDOWN = 0.5
"""The part of what computation loses beside kernels that it loses beside copy engines. Fitted to the steps
of 2 H200 with z=2 and batch 4 (lab/results/plan-2-gpus)."""
MAX_OPERATIONS = 6_000_000
"""The most operations of a graph: it takes about a minute, and 4 GB."""
MAX_AVERAGED = 64


class StepSpan(NamedTuple):
    """Span of an operation that runs on a rank: its row (COMPUTE, HOST or an axis), name,
    and start and end in seconds.
    """

    row: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class StepSimulation:
    """A simulated step. `rank` is the graph's rank that computes most, of which all times by axis are.

    Times are seconds. fidelity: "closed-form", in which each collective takes the planner's time, or "event-driven", in
    which its messages queue on the cluster's links.
    """

    programs: StepPrograms
    lowered: LoweredStep
    execution: Execution
    network: NetworkModel
    slowdowns: Mapping[str, float]

    @property
    def fidelity(self) -> str:
        return self.execution.fidelity

    @property
    def step_time(self) -> float:
        """From the beginning of the step to the end of the last rank's optimizer."""
        return self.execution.makespan

    @cached_property
    def rank(self) -> int:
        """The rank of the graph that computes most."""
        graph = self.lowered.graph
        is_compute = self._rows == COMPUTE
        times = np.bincount(
            graph.ranks[is_compute], (self.execution.ends - self.execution.starts)[is_compute], graph.world
        )
        return int(np.argmax(times > times.max() * (1 - 1e-9)))

    @property
    def device(self) -> int:
        """The global rank that `rank` is."""
        return self.lowered.devices[self.rank]

    @cached_property
    def computation(self) -> float:
        """Seconds of the rank's computation, slowed down by communication."""
        return self._covered(self._of_rank(COMPUTE))

    @cached_property
    def undisturbed(self) -> float:
        """Seconds that the rank's computation would take without concurrent communication."""
        return float(self.lowered.graph.sizes[self._of_rank(COMPUTE)].sum())

    @cached_property
    def optimizer(self) -> float:
        """Seconds of the optimizer's step, which are part of `computation`."""
        chosen = self._of_rank(COMPUTE)
        places = [number for number in np.flatnonzero(chosen) if self.lowered.graph.names[number] == "optimizer"]
        return float((self.execution.ends - self.execution.starts)[places].sum())

    @cached_property
    def communication(self) -> dict[str, float]:
        """Seconds in which the rank communicates over each axis, hidden or not."""
        return {axis: self._covered(self._of_rank(axis)) for axis in self._axes}

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds in which it communicates over each axis and computes nothing. Two concurrent axes both count."""
        computes = self._of_rank(COMPUTE)
        return {axis: self._covered(computes | self._of_rank(axis)) - self.computation for axis in self._axes}

    @cached_property
    def exposed_total(self) -> float:
        """Seconds in which it communicates and computes nothing. Two concurrent axes count once."""
        chosen = self._of_rank(COMPUTE)
        for axis in self._axes:
            chosen = chosen | self._of_rank(axis)
        return self._covered(chosen) - self.computation

    @property
    def idle(self) -> float:
        """Seconds in which it does neither: bubbles, waits for slower ranks, and the host's."""
        left = self.step_time - self.computation - self.exposed_total
        return left if left > 1e-12 * self.step_time else 0.0  # else it is what rounding leaves

    def spans(self, rank: int | None = None) -> Iterator[StepSpan]:
        """Return what runs on a rank of the graph (default: `rank`), in the order in which it was issued."""
        rank = self.rank if rank is None else rank
        rows, execution = self._rows, self.execution
        chosen = np.zeros(len(rows), bool)
        for row in (COMPUTE, HOST, *self._axes):
            chosen |= self._of_rank(row, rank)
        for number in np.flatnonzero(chosen):
            start, end = float(execution.starts[number]), float(execution.ends[number])
            if end > start:
                yield StepSpan(str(rows[number]), self.lowered.graph.names[number], start, end)

    def use_over_time(self, bins: int = 100) -> dict[str, list[float]]:
        """The part of each of so many equal parts of the step in which an average rank computes, and communicates over
        each axis: of the first MAX_AVERAGED ranks that are simulated."""
        edges, ranks = np.linspace(0.0, self.step_time, bins + 1), min(self.lowered.graph.world, MAX_AVERAGED)
        found = {}
        for axis in (COMPUTE, *self._axes):
            total = np.zeros(bins)
            for rank in range(ranks):
                places = np.flatnonzero(self._of_rank(axis, rank))
                total += np.diff([self._covered(places, until) for until in edges])
            found[axis] = (total / ranks / max(self.step_time / bins, 1e-300)).tolist()
        return found

    @property
    def link_use(self) -> NDArray[np.float64] | None:
        """The part of the step in which each link of the network sends; None in closed form."""
        busy = self.execution.link_busy
        return None if busy is None or self.fidelity == "closed-form" else busy / max(self.step_time, 1e-300)

    def link_use_over_time(self, bins: int = 100) -> NDArray[np.float64] | None:
        """The part of each of so many equal parts of the step in which each link sends: [bins, links]; None in closed
        form. The step is simulated a second time."""
        if not isinstance(self.network, EventDrivenNetwork):
            return None
        edges = np.linspace(0.0, self.step_time, bins + 1)[1:]
        sampled = sample_links(self.lowered.graph, self.network, self.slowdowns, edges.tolist())
        return np.diff(np.array([[0.0] * len(sampled[0]), *sampled]), axis=0) / (self.step_time / bins)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: times as whole nanoseconds."""
        config = self.programs.config
        use = self.link_use
        return {
            "fidelity": self.fidelity,
            "grid": config.grid.sizes(),
            "micro_batch": config.micro_batch,
            "step_ns": _nanoseconds(self.step_time),
            "computation_ns": _nanoseconds(self.computation),
            "slowed_by_communication_ns": _nanoseconds(max(0.0, self.computation - self.undisturbed)),
            "optimizer_ns": _nanoseconds(self.optimizer),
            "communication_ns": {axis: _nanoseconds(time) for axis, time in self.communication.items()},
            "exposed_ns": {axis: _nanoseconds(time) for axis, time in self.exposed.items()},
            "exposed_total_ns": _nanoseconds(self.exposed_total),
            "idle_ns": _nanoseconds(self.idle),
            "rank": self.device,
            "simulated_ranks": self.lowered.graph.world,
            "operations": len(self.lowered.graph),
            "events": self.execution.events,
        } | ({} if use is None else {"busiest_link": float(use.max()), "mean_link": float(use.mean())})

    @cached_property
    def _axes(self) -> tuple[str, ...]:
        there = set(np.unique(self._rows))
        return tuple(axis for axis in (*NAMES, EXPERT) if axis in there)

    @cached_property
    def _rows(self) -> NDArray[np.str_]:
        """The row of each operation; "" of joins."""
        graph = self.lowered.graph
        of_stream = [_row(name) for name in graph.stream_names]
        rows = np.array([*of_stream, PIPE])[graph.streams]  # messages between stages are on no stream
        rows[graph.kinds == OperationType.JOIN] = ""
        return rows

    def _of_rank(self, row: str, rank: int | None = None) -> NDArray[np.bool_]:
        """The operations of a row and a rank; of messages between stages, those that it receives."""
        graph = self.lowered.graph
        return (self._rows == row) & (
            (graph.targets if row == PIPE else graph.ranks) == (self.rank if rank is None else rank)
        )

    def _covered(self, chosen: NDArray[Any], until: float | None = None) -> float:
        starts, ends = self.execution.starts[chosen], self.execution.ends[chosen]
        if until is not None:
            starts, ends = np.minimum(starts, until), np.minimum(ends, until)
        return covered(starts, ends)


def simulate_step(
    workload: StepWorkload,
    config: StepConfig,
    cluster: Cluster,
    *,
    fidelity: Fidelity = "closed-form",
    factors: RankFactors | None = None,
    all_ranks: bool = False,
    loses_link: bool = False,
) -> StepSimulation:
    """Simulate a training step on a cluster.

    fidelity: "closed-form" or "event-driven". factors: by which each rank computes, and sends, more slowly; every rank
    is simulated then. all_ranks: simulate every rank although all do the same. loses_link: event-driven, the first
    node's first NIC is missing, or, in one node, the link between its first two GPUs.

    Raises ValueError like the planner, for a batch that cannot be cut, and for a step that is too large to be
    simulated.
    """
    if fidelity not in get_args(Fidelity):
        raise ValueError(f"fidelity is {fidelity!r}, but must be closed-form or event-driven")
    _check_batch(workload, config)
    programs = write_programs(workload, config, Device(cluster, workload.dtype))
    network: NetworkModel
    if fidelity == "event-driven":
        lowered = MessageLowering(programs, cluster, factors).lower()
        network = network_of(cluster, config.grid.ranks, factors.links if factors else (), loses_link=loses_link)
    else:
        is_alike = factors is None or factors.is_first_slowest
        represented = range(1 if is_alike and not all_ranks else config.grid.stage_ranks)
        _check_operations(programs, len(represented))
        lowered = StepLowering(programs, represented, factors).lower()
        network = _stage_network(programs, lowered, factors)
    slowdown = overlap_slowdown(cluster)
    slowdowns = {
        name: slowdown * (COPY_ENGINE_SLOWDOWN if name.endswith(BY_COPY_ENGINES) else 1.0)
        for name in lowered.graph.stream_names
        if name not in (COMPUTE, HOST, PIPE)
    }
    return StepSimulation(programs, lowered, execute_step(lowered.graph, network, slowdowns), network, slowdowns)


def _stage_network(programs: StepPrograms, lowered: LoweredStep, factors: RankFactors | None) -> StageNetwork:
    costs: dict[tuple[int, int], tuple[float, float]] = {}
    sent = {operation.sent for program in programs.ranks for operation in program if operation.sent is not None}
    places = len(lowered.devices) // len(programs.ranks)
    for message in sent:
        hop = programs.hop(message)
        each = hop.transmission / programs.message_bytes if programs.message_bytes else 0.0
        for place in range(places):
            pair = message.source * places + place, message.target * places + place
            slow = factors.of_communication(*(lowered.devices[end] for end in pair)) if factors else 1.0
            costs[pair] = hop.latency, each * slow
    return StageNetwork(switch(max(2, lowered.graph.world), 1.0, 0.0), costs)


def _check_batch(workload: StepWorkload, config: StepConfig) -> None:
    parts, size = config.grid.batch_parts, config.micro_batch
    if workload.batch % parts:
        near = max(1, round(workload.batch / parts)) * parts
        raise ValueError(f"data x z = {parts} does not divide the batch of {workload.batch} sequences; {near} would do")
    local = workload.batch // parts
    if size < 1 or local % size:
        near = max(each for each in range(1, min(max(1, size), local) + 1) if local % each == 0)
        raise ValueError(f"a micro-batch of {size} does not divide the {local} sequences of a rank; {near} would do")
    if (passes := 2 * config.micro_batches(workload) * workload.model.layers) > MAX_OPERATIONS:
        raise ValueError(
            f"this step has {passes:,} passes of blocks, and {MAX_OPERATIONS:,} are simulated at most; fewer "
            "micro-batches would do"
        )


def _check_operations(programs: StepPrograms, represented: int) -> None:
    count = programs.operations * represented
    if count > MAX_OPERATIONS:
        raise ValueError(
            f"this step has {count:,} operations on the ranks to simulate, and {MAX_OPERATIONS:,} are simulated at "
            "most; fewer micro-batches, layers or GPUs would do, or no stragglers and slow links, with which one rank "
            "of each stage stands for all"
        )


def _row(stream: str) -> str:
    group = stream.removesuffix(BY_COPY_ENGINES)
    return AXIS_OF_GROUP.get(group, group)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
