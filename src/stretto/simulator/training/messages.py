# SPDX-License-Identifier: Apache-2.0
"""Lowers a step's collectives to messages of every rank on a cluster's links, where they meet and queue.

A group inside one node is measured, or has the planner's latency and bandwidth: its messages are as large as makes the
collective take the planner's time when nothing else is on its links (so start-up counts as bytes, and what protocols
do not reach of a link's bandwidth does too). Groups across nodes send their bytes, and nothing of equation 5.7 is
assumed: how the ranks of a node share its NICs follows from the network.
"""

from collections.abc import Sequence
from dataclasses import replace

from stretto.cluster import Cluster
from stretto.planner.collective_times import message_latency
from stretto.planner.step import GroupCollective
from stretto.simulator.collectives import add_collective
from stretto.simulator.network import EventDrivenNetwork, NetworkTopology, of_cluster
from stretto.simulator.training.lowering import RankFactors, StepLowering, stream_of
from stretto.simulator.training.program import StageMessage, StepOperation
from stretto.simulator.training.step import StepPrograms

PACKET_BYTES = 4096
"""Links forward messages in packets, as NVLink's and networks' switches do."""
NO_LATENCY = 1e-15
"""Seconds: a cluster's latencies are more than 0."""
MAX_MESSAGES = 3_000_000
"""The most messages of a step that is simulated message by message: about a minute."""


def network_of(
    cluster: Cluster, gpus: int, link_factors: Sequence[float] = (), *, loses_link: bool = False
) -> EventDrivenNetwork:
    """The network of a step's ranks. link_factors: how much slower all links of each rank, and of its NICs, are.

    loses_link: the first node's first NIC is missing, or, in one node, the link between its first two GPUs. Latency in
    a node is part of messages' sizes. Raises ValueError like `of_cluster`.
    """
    changed = replace(
        cluster,
        in_node=replace(cluster.in_node, latency=NO_LATENCY),
        between_nodes=replace(cluster.between_nodes, latency=message_latency(cluster, leaves=True)),
    )
    topology = of_cluster(changed, gpus)
    nodes = max(1, gpus // cluster.gpus_per_node)
    nics = range(gpus + nodes, topology.vertices)  # numbered after a switch a node
    if loses_link:
        lost = {nics[0]} if nodes > 1 else {0, 1}
        topology = topology.without_links(
            [number for number, each in enumerate(topology.links) if lost <= {each.source, each.target}]
        )
    if link_factors:
        slow = dict(enumerate(link_factors))
        for each in topology.links:
            if each.source < gpus and each.target in nics:
                slow[each.target] = max(slow.get(each.target, 1.0), slow[each.source])
        links = [
            replace(each, bandwidth=each.bandwidth / max(slow.get(each.source, 1.0), slow.get(each.target, 1.0)))
            for each in topology.links
        ]
        topology = NetworkTopology(topology.name, gpus, links, vertices=topology.vertices)
    return EventDrivenNetwork(topology, PACKET_BYTES)


class MessageLowering(StepLowering):
    """Adds programs of all ranks to a graph whose communication is messages."""

    def __init__(self, programs: StepPrograms, cluster: Cluster, factors: RankFactors | None = None) -> None:
        super().__init__(programs, range(programs.config.grid.stage_ranks), factors)
        self.cluster = cluster
        self.topology = network_of(cluster, programs.config.grid.ranks).topology
        self._check_size()

    def _collective(
        self, rank: int, operation: StepOperation, collective: GroupCollective, after: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        numbers = [-1] * len(self.represented)
        for members in self._groups_of(collective.group):
            ranks = [self.graph_rank(rank, place) for place in members]
            ended = add_collective(
                self.builder,
                collective.kind,
                "direct" if collective.kind == "all_to_all" else "ring",
                ranks,
                self._whole_bytes(collective, ranks),
                after=[after[place] for place in members],
                stream=stream_of(collective),
                name=operation.name,
            )
            for place, number in zip(members, ended, strict=True):
                numbers[place] = number
        return numbers

    def _whole_bytes(self, collective: GroupCollective, ranks: Sequence[int]) -> float:
        """The buffer of a collective: as large as makes it take its time in a node, and between nodes its own size."""
        size = len(ranks)
        rounds = (size - 1) * (2 if collective.kind == "all_reduce" else 1)
        if not self._is_in_node(ranks[0], ranks[-1]):
            return collective.num_bytes * size / rounds
        route = self.topology.routes(ranks[0], ranks[1])[0]
        if collective.kind == "all_to_all" and len(route) == 1:
            rounds = 1  # each peer has its own link
        return collective.seconds * self.topology.links[route[0]].bandwidth * size / rounds

    def _message_bytes(self, message: StageMessage, source: int, target: int) -> float:
        if message.micro_batch is None:
            return self.programs.tied_bytes
        if not self._is_in_node(source, target):
            return self.programs.message_bytes
        hop = self.programs.hop(message)
        return hop.whole * self.topology.links[self.topology.routes(source, target)[0][0]].bandwidth

    def _is_in_node(self, first: int, last: int) -> bool:
        return first // self.cluster.gpus_per_node == last // self.cluster.gpus_per_node

    def _check_size(self) -> None:
        """Raise ValueError for a step of too many messages."""
        sizes: dict[str, int] = {}
        messages = 0.0
        for program in self.programs.ranks:
            for operation in program:
                collective = operation.collective
                if collective is None:
                    messages += operation.sent is not None
                    continue
                if collective.group not in sizes:
                    groups = self._groups_of(collective.group)
                    sizes[collective.group] = len(groups[0]) if groups else 1
                messages += (sizes[collective.group] - 1) * (2 if collective.kind == "all_reduce" else 1)
        messages *= self.stage_ranks
        if messages > MAX_MESSAGES:
            raise ValueError(
                f"this step has about {messages:,.0f} messages, and {MAX_MESSAGES:,} are simulated at most; fewer "
                "GPUs, layers or micro-batches, or --fidelity closed-form would do"
            )
