# SPDX-License-Identifier: Apache-2.0
"""Collectives over many equal nodes, event-driven: one node is simulated, and represents all.

In these collectives all nodes act identically at the same time: what node n sends to node n - d, node n + d sends to n.
So one node sends to a second, whose links only receive, and its own sent messages serve as its received ones. The
queues equal those of the whole system as long as nodes only share one non-blocking switch. Tests compare this with a
simulation of all nodes (`whole`).

A rank sends to the next of its node over one link, and to other nodes through the network interface of its place; these
are one hop each to the switch. The latency of a message between nodes is counted on its first link.
"""

from collections.abc import Sequence

from lab.papers.machines import RingProtocol, StudiedMachine
from stretto.cluster.two_level import Collective
from stretto.collectives.two_level import Links
from stretto.collectives.two_level.inter_node import InterNodeAlgorithm, all_gather_steps
from stretto.simulator import EventDrivenNetwork, GraphBuilder, NetworkTopology, execute
from stretto.simulator.network.topology import DirectedLink

_INSIDE = 1e15  # bytes/s between a GPU and its network interface, which shall not be the bottleneck
Ready = dict[tuple[int, int], list[int]]
"""The operations that the next one of a rank (its node, and its place there) waits for."""


class Nodes:
    """A graph of messages and computations of all ranks, with the topology of the nodes that are simulated.

    Unless all nodes are simulated (`whole`), there are two: one acts, and a second one receives its messages. links:
    the costs of a node's.
    """

    def __init__(self, machine: StudiedMachine, links: Links, ranks: int, *, whole: bool) -> None:
        self.size, self._nics, self._links, self._whole = machine.gpus_per_node, machine.nics, links, whole
        self.count = ranks // self.size
        self._builder = GraphBuilder()

    def start(self) -> Ready:
        """Nothing to wait for, at every rank that acts."""
        return {(node, place): [] for node in range(self.count if self._whole else 1) for place in range(self.size)}

    def send(self, ready: Ready, num_bytes: float, targets: Sequence[tuple[int, int]]) -> Ready:
        """Every rank sends a message; what it receives is then ready.

        targets: of each place, how many nodes before this one the receiver is, and its place there.
        """
        received: Ready = {}
        for (node, place), after in ready.items():
            distance, at = targets[place]
            receiver = (node - distance) % self.count if self._whole else int(distance > 0)
            sent = self._builder.message(self._rank(node, place), self._rank(receiver, at), num_bytes, after=after)
            received[receiver if self._whole else 0, at] = [sent]
        return {key: received[key] for key in ready}

    def compute(self, ready: Ready, seconds: float) -> Ready:
        """Every rank computes for so long."""
        return {key: [self._builder.compute(self._rank(*key), seconds, after=after)] for key, after in ready.items()}

    def run(self, packet: int) -> float:
        """Seconds of all that was added."""
        return execute(self._builder.build(), EventDrivenNetwork(self.topology(), packet_bytes=packet)).makespan

    def topology(self) -> NetworkTopology:
        """Rings of the nodes' ranks, and their network interfaces on one switch."""
        links, count = self._links, self.count if self._whole else 2
        devices = count * self.size
        switch = devices + count * self._nics
        made = []
        for node in range(count):
            for place in range(self.size):
                rank, after = self._rank(node, place), self._rank(node, (place + 1) % self.size)
                made.append(DirectedLink(rank, after, links.in_node_bandwidth, links.in_node_latency))
                nic = devices + node * self._nics + place * self._nics // self.size
                made += [DirectedLink(rank, nic, _INSIDE, links.latency), DirectedLink(nic, rank, _INSIDE, 0.0)]
            for nic in range(devices + node * self._nics, devices + (node + 1) * self._nics):
                each = links.node_bandwidth / self._nics
                made += [DirectedLink(nic, switch, each, 0.0), DirectedLink(switch, nic, each, 0.0)]
        return NetworkTopology("nodes on a switch", devices, made, vertices=switch + 1)

    def _rank(self, node: int, place: int) -> int:
        return node * self.size + place


def flat_seconds(
    machine: StudiedMachine, protocol: RingProtocol, num_bytes: float, ranks: int, packet: int, *, whole: bool = False
) -> float:
    """Seconds of the vendor's ring over all ranks, in as many channels as a node has network interfaces.

    Each channel leaves a node by another interface. whole: simulate all nodes.
    """
    nodes = Nodes(machine, machine.flat_links(protocol), ranks, whole=whole)
    for channel in range(machine.nics):
        last = channel * nodes.size // machine.nics  # the place from which this channel goes to the node before
        ring = [(int(place == last), (place + 1) % nodes.size) for place in range(nodes.size)]
        ready = nodes.start()
        for _ in range(ranks - 1):
            ready = nodes.send(ready, num_bytes / ranks / machine.nics, ring)
    return protocol.start + nodes.run(packet)


def two_level_seconds(
    machine: StudiedMachine,
    collective: Collective,
    algorithm: InterNodeAlgorithm,
    num_bytes: float,
    ranks: int,
    packet: int,
    *,
    whole: bool = False,
) -> float:
    """Seconds of two levels, with the shuffle and the additions. whole: simulate all nodes."""
    nodes = Nodes(machine, machine.two_level_links(), ranks, whole=whole)
    shard, places = num_bytes / ranks, range(nodes.size)
    ring = [(0, (place + 1) % nodes.size) for place in places]
    steps = all_gather_steps(algorithm, nodes.count)
    start, shuffle = machine.simple.start, machine.shuffle_seconds(num_bytes)

    def send_inside(ready: Ready) -> Ready:
        """A ring inside each node: every rank sends a block to the next, as often as there are others."""
        for _ in range(nodes.size - 1):
            ready = nodes.send(ready, shard * nodes.count, ring)
        return ready

    # Between nodes, a step begins when that before it has been received (and added).
    ready = nodes.start()
    if collective == "all_gather":
        for step in steps:
            ready = nodes.send(ready, step.blocks * shard, [(step.distance, place) for place in places])
        nodes.compute(send_inside(nodes.compute(ready, start)), shuffle)
    else:
        ready = send_inside(nodes.compute(ready, shuffle + start))
        for step in steps[::-1]:
            ready = nodes.send(ready, step.blocks * shard, [(step.distance, place) for place in places])
            ready = nodes.compute(ready, machine.addition_seconds(step.blocks * shard))
    return nodes.run(packet)
