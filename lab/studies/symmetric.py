# SPDX-License-Identifier: Apache-2.0
"""Collectives over many equal nodes, event-driven: one node is simulated, and represents all.

In these collectives all nodes act identically at the same time: what node n sends to node n - d, node n + d sends to n.
So one node sends to a second, whose links only receive, and its own sent messages serve as its received ones. The
queues equal those of the whole system as long as nodes only share one non-blocking switch. Tests compare this with a
simulation of all nodes (`NodeRows` with whole=True).

A rank sends to the next of its node over one link, and to other nodes through the network interface of its place; these
are one hop each to the switch. The latency of a message between nodes is counted on its first link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.studies.machines import RingProtocol, StudiedMachine
from stretto.collectives.two_level import Links
from stretto.collectives.two_level.inter_node import InterNodeAlgorithm, InterNodeStep, all_gather_steps
from stretto.collectives.two_level.model import Collective
from stretto.simulator import EventDrivenNetwork, GraphBuilder, NetworkTopology, execute
from stretto.simulator.network.topology import DirectedLink

_INSIDE = 1e15  # bytes/s between a GPU and its network interface, which shall not be the bottleneck


@dataclass(frozen=True)
class NodeShape:
    """A node: its ranks, its network interfaces, and the costs of its links as in `Links`."""

    ranks: int
    nics: int
    links: Links


class NodeRows:
    """The ranks of the nodes that are simulated, and their numbers in a topology.

    Unless all nodes are simulated, there are two: one acts, and a second one receives its messages.
    """

    def __init__(self, shape: NodeShape, nodes: int, *, whole: bool) -> None:
        self.shape, self.nodes, self.whole = shape, nodes, whole
        self.simulated = range(nodes if whole else 1)

    def rank(self, node: int, place: int) -> int:
        return node * self.shape.ranks + place

    def receiver(self, node: int, distance: int) -> int:
        """The simulated receiver of a message to the node `distance` before this one."""
        return (node - distance) % self.nodes if self.whole else 1

    def sender(self, node: int, distance: int) -> int:
        """The simulated node whose message represents that of the node `distance` after this one."""
        return (node + distance) % self.nodes if self.whole else 0

    def topology(self) -> NetworkTopology:
        """Rings of the nodes' ranks, and their network interfaces on one switch."""
        shape, links = self.shape, self.shape.links
        count = self.nodes if self.whole else 2
        devices = count * shape.ranks
        switch = devices + count * shape.nics
        made = []
        for node in range(count):
            for place in range(shape.ranks):
                rank, after = self.rank(node, place), self.rank(node, (place + 1) % shape.ranks)
                made.append(DirectedLink(rank, after, links.in_node_bandwidth, links.in_node_latency))
                nic = devices + node * shape.nics + place * shape.nics // shape.ranks
                made += [DirectedLink(rank, nic, _INSIDE, links.latency), DirectedLink(nic, rank, _INSIDE, 0.0)]
            for nic in range(devices + node * shape.nics, devices + (node + 1) * shape.nics):
                each = links.node_bandwidth / shape.nics
                made += [DirectedLink(nic, switch, each, 0.0), DirectedLink(switch, nic, each, 0.0)]
        return NetworkTopology("nodes on a switch", devices, made, vertices=switch + 1)


def flat_seconds(
    machine: StudiedMachine, protocol: RingProtocol, num_bytes: float, ranks: int, packet: int, *, whole: bool = False
) -> float:
    """Seconds of the vendor's ring over all ranks, in as many channels as a node has network interfaces.

    Each channel leaves a node by another interface. whole: simulate all nodes.
    """
    shape = NodeShape(machine.gpus_per_node, machine.nics, machine.flat_links(protocol))
    rows = NodeRows(shape, ranks // shape.ranks, whole=whole)
    builder = GraphBuilder()
    part = num_bytes / ranks / shape.nics
    for channel in range(shape.nics):
        first = channel * shape.ranks // shape.nics + 1  # the place at which this channel enters a node
        _add_ring(builder, rows, first, part, ranks - 1)
    return protocol.start + _run(builder, rows, packet)


def _add_ring(builder: GraphBuilder, rows: NodeRows, first: int, part: float, steps: int) -> None:
    """One channel: every rank sends its part and then each received part to the next rank, `steps` times in all.

    The last place before `first` sends to the place `first` of the node before.
    """
    size = rows.shape.ranks
    arrived: dict[tuple[int, int], int] = {}  # what a rank received in the step before
    for _ in range(steps):
        sent = {}
        for node in rows.simulated:
            for order in range(size):
                place, after = (first + order) % size, (first + order + 1) % size
                leaves = order == size - 1
                target = rows.rank(rows.receiver(node, 1) if leaves else node, after)
                waits = [arrived[node, place]] if arrived else []
                sent[node, place] = builder.message(rows.rank(node, place), target, part, after=waits)
        arrived = {
            (node, (first + order) % size): sent[
                (rows.sender(node, 1), (first - 1) % size) if order == 0 else (node, (first + order - 1) % size)
            ]
            for node in rows.simulated
            for order in range(size)
        }


def two_level_seconds(
    machine: StudiedMachine,
    collective: Collective,
    algorithm: InterNodeAlgorithm,
    num_bytes: float,
    ranks: int,
    packet: int,
    *,
    links: Links | None = None,
    whole: bool = False,
) -> float:
    """Seconds of two levels, with the shuffle and the additions. whole: simulate all nodes."""
    shape = NodeShape(machine.gpus_per_node, machine.nics, links or machine.two_level_links())
    nodes = ranks // shape.ranks
    rows = NodeRows(shape, nodes, whole=whole)
    builder = GraphBuilder()
    steps = all_gather_steps(algorithm, nodes)
    shard = num_bytes / ranks
    start, shuffle = machine.simple.start, machine.shuffle_seconds(num_bytes)
    ready: dict[tuple[int, int], int] = {}
    if collective == "all_gather":
        ready = _add_between(builder, rows, steps, shard, ready)
        ready = _add_compute(builder, rows, start, ready)
        ready = _add_inside(builder, rows, shard * nodes, ready)
        _add_compute(builder, rows, shuffle, ready)
    else:
        ready = _add_compute(builder, rows, shuffle + start, ready)
        ready = _add_inside(builder, rows, shard * nodes, ready)
        _add_between(builder, rows, steps[::-1], shard, ready, machine)
    return _run(builder, rows, packet)


def _add_between(
    builder: GraphBuilder,
    rows: NodeRows,
    steps: Sequence[InterNodeStep],
    shard: float,
    ready: dict[tuple[int, int], int],
    adds: StudiedMachine | None = None,
) -> dict[tuple[int, int], int]:
    """The phase between nodes; a step begins when that before it has been received (and added)."""
    for step in steps:
        num_bytes = step.blocks * shard
        sent = {
            (node, place): builder.message(
                rows.rank(node, place),
                rows.rank(rows.receiver(node, step.distance), place),
                num_bytes,
                after=[ready[node, place]] if ready else [],
            )
            for node in rows.simulated
            for place in range(rows.shape.ranks)
        }
        ready = {(node, place): sent[rows.sender(node, step.distance), place] for node, place in sent}
        if adds is not None:
            ready = _add_compute(builder, rows, adds.addition_seconds(num_bytes), ready)
    return ready


def _add_inside(
    builder: GraphBuilder, rows: NodeRows, block: float, ready: dict[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """A ring inside each node: every rank sends a block to the next, as often as there are others."""
    size = rows.shape.ranks
    for _ in range(size - 1):
        sent = {
            (node, place): builder.message(
                rows.rank(node, place), rows.rank(node, (place + 1) % size), block, after=[ready[node, place]]
            )
            for node in rows.simulated
            for place in range(size)
        }
        ready = {(node, place): sent[node, (place - 1) % size] for node, place in sent}
    return ready


def _add_compute(
    builder: GraphBuilder, rows: NodeRows, seconds: float, ready: dict[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    return {
        (node, place): builder.compute(
            rows.rank(node, place), seconds, after=[ready[node, place]] if (node, place) in ready else []
        )
        for node in rows.simulated
        for place in range(rows.shape.ranks)
    }


def _run(builder: GraphBuilder, rows: NodeRows, packet: int) -> float:
    return execute(builder.build(), EventDrivenNetwork(rows.topology(), packet_bytes=packet)).makespan
