# SPDX-License-Identifier: Apache-2.0
"""Executes a step's graph: computation slows while its rank communicates, and stages' messages keep their channels.

Kernels of collectives take multiprocessors, memory bandwidth and power. `Cluster.gpu.overlap_slowdown` is how many
seconds computation loses for each second of a concurrent collective, as a probe measures it: computation continues at
1 - overlap_slowdown of its speed while its rank communicates. Copy engines leave the multiprocessors alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.planner.step import COMPUTE
from stretto.simulator.events import NANOSECONDS, EventQueue
from stretto.simulator.graph import Execution, ExecutionGraph, GraphRun
from stretto.simulator.network import EventDrivenNetwork, NetworkModel, NetworkTopology

MIN_SPEED = 0.05
"""The least speed of computation beside communication: a slowdown of a second a second would never end."""


class StageNetwork:
    """Messages between pipeline stages in closed form: a channel is busy for a message's transmission, then its latency
    passes. Channels do not meet: there is one for each pair of ranks.

    costs: seconds of latency, and seconds a byte, by source and target.
    """

    fidelity = "closed-form"

    def __init__(self, topology: NetworkTopology, costs: Mapping[tuple[int, int], tuple[float, float]]) -> None:
        self.topology, self._costs = topology, costs
        self._free: dict[tuple[int, int], float] = {}

    def send(
        self,
        queue: EventQueue,
        source: int,
        target: int,
        num_bytes: float,
        arrived: Callable[..., object],
        *arguments: Any,
    ) -> None:
        channel = source, target
        latency, each = self._costs[channel]
        end = max(queue.now, self._free.get(channel, 0.0)) + num_bytes * each * NANOSECONDS
        self._free[channel] = end
        queue.at(end + latency * NANOSECONDS, arrived, *arguments)

    def reset(self) -> None:
        self._free.clear()


def execute_step(graph: ExecutionGraph, network: NetworkModel, slowdowns: Mapping[str, float]) -> Execution:
    """Execute a graph. slowdowns: by stream of communication, what computation of its rank loses a second."""
    return _SlowedRun(graph, network, slowdowns).run()


def sample_links(
    graph: ExecutionGraph, network: EventDrivenNetwork, slowdowns: Mapping[str, float], times: Sequence[float]
) -> list[list[float]]:
    """Execute a graph again, and return how long each link has been sending at each of these times, in seconds."""
    run, sampled = _SlowedRun(graph, network, slowdowns), list[list[float]]()
    for time in times:
        run.queue.at(time * NANOSECONDS, lambda at: sampled.append(network.busy_until(at)), time * NANOSECONDS)
    run.run()
    return sampled


class _SlowedRun(GraphRun):
    """An execution in which concurrent communication slows a rank's computation. Times are nanoseconds."""

    def __init__(self, graph: ExecutionGraph, network: NetworkModel, slowdowns: Mapping[str, float]) -> None:
        super().__init__(graph, network)
        streams = [*graph.stream_names, ""]  # the last for operations on none
        lost = [slowdowns.get(name, 0.0) for name in streams]
        # By how much an operation slows down concurrent computation per second, and whether it is computation itself.
        self._lost = [lost[each] for each in graph.streams.tolist()]
        self._computes = [streams[each] == COMPUTE for each in graph.streams.tolist()]
        self._beside: list[list[float]] = [[] for _ in range(graph.world)]  # what each rank sends now
        self._running = [-1] * graph.world  # the operation that each rank computes
        self._left = [0.0] * graph.world  # of it, at full speed, at the time `_since`
        self._since = [0.0] * graph.world
        self._version = [0] * graph.world

    def _start(self, number: int) -> None:
        rank = self._ranks[number]
        if self._computes[number]:
            self.starts[number] = self.queue.now
            self._running[rank], self._left[rank] = number, self._sizes[number] * NANOSECONDS
            self._resume(rank)
            return
        if lost := self._lost[number]:
            self._change(rank, self._beside[rank].append, lost)
        super()._start(number)

    def _end(self, number: int) -> None:
        if lost := self._lost[number]:
            rank = self._ranks[number]
            self._change(rank, self._beside[rank].remove, lost)
        super()._end(number)

    def _speed(self, rank: int) -> float:
        beside = self._beside[rank]
        return max(MIN_SPEED, 1.0 - max(beside)) if beside else 1.0

    def _change(self, rank: int, change: Callable[[float], None], lost: float) -> None:
        """Begin or end communication, and let the rank compute on at its new speed, if that is another."""
        before = self._speed(rank)
        change(lost)
        if self._running[rank] >= 0 and self._speed(rank) != before:
            self._left[rank] = max(0.0, self._left[rank] - (self.queue.now - self._since[rank]) * before)
            self._resume(rank)

    def _resume(self, rank: int) -> None:
        """Continue to compute at the current speed; an end that was planned before becomes invalid."""
        self._since[rank] = self.queue.now
        self._version[rank] += 1
        self.queue.at(self.queue.now + self._left[rank] / self._speed(rank), self._finish, rank, self._version[rank])

    def _finish(self, rank: int, version: int) -> None:
        if version == self._version[rank]:
            number, self._running[rank] = self._running[rank], -1
            self._end(number)
