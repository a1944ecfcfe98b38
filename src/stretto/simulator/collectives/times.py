# SPDX-License-Identifier: Apache-2.0
"""Times collectives: on a network, and by the formulas of textbooks, rounds of latency and bytes over bandwidth.

n ranks, b bytes, latency a and bandwidth B between neighbours: a ring's all_reduce takes 2 (n - 1) (a + b / n / B), its
all_gather and reduce_scatter half of it; recursive doubling takes log2(n) a + (n - 1) / n b / B; a direct collective
takes the longest latency and the bytes that leave one rank over the bandwidth of its links. What messages wait for one
another inside the network is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.simulator.collectives.algorithms import CollectivePhase, add_collective, plan_phases
from stretto.simulator.collectives.patterns import MessageRound
from stretto.simulator.graph import Execution, GraphBuilder, execute
from stretto.simulator.network.closed_form import NetworkModel
from stretto.simulator.network.topology import NetworkTopology


@dataclass(frozen=True)
class CollectiveOptions:
    """How a collective runs, as `add_collective` takes it."""

    ranks_per_node: int | None = None
    in_node: str = "ring"
    splits: int = 1


def simulate_collective(
    collective: str,
    algorithm: str,
    network: NetworkModel,
    num_bytes: float,
    options: CollectiveOptions = CollectiveOptions(),
) -> Execution:
    """Run one collective among all devices of a network. ValueError as `add_collective` says."""
    ranks = range(network.topology.devices)
    builder = GraphBuilder(len(ranks))
    add_collective(
        builder,
        collective,
        algorithm,
        ranks,
        num_bytes,
        ranks_per_node=options.ranks_per_node,
        in_node=options.in_node,
        splits=options.splits,
    )
    return execute(builder.build(), network)


def closed_form_seconds(
    collective: str,
    algorithm: str,
    topology: NetworkTopology,
    num_bytes: float,
    *,
    ranks: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
    in_node: str = "ring",
) -> float:
    """Seconds of a collective among `ranks` (None: all devices) without contention.

    The other parameters, and what raises ValueError, are those of `add_collective`.
    """
    chosen = range(topology.devices) if ranks is None else ranks
    phases = plan_phases(collective, algorithm, chosen, num_bytes, ranks_per_node, in_node)
    leaving = [0.0] * topology.vertices
    for link in topology.links:
        leaving[link.source] += link.bandwidth
    return sum(
        each.repeats * max(_round_seconds(each, group, phase, topology, leaving) for group in phase.groups)
        for phase in phases
        for each in phase.pattern.rounds
    )


def _round_seconds(
    each: MessageRound,
    group: Sequence[int],
    phase: CollectivePhase,
    topology: NetworkTopology,
    leaving: Sequence[float],
) -> float:
    """The longest of a round's messages; where a rank sends several, not less than all of them over its own links."""
    latencies: dict[int, float] = {}
    longest: dict[int, float] = {}
    sizes: dict[int, float] = {}
    for place, peer, part in each.messages:
        source = group[place]
        links = [topology.links[number] for number in topology.routes(source, group[peer])[0]]
        size = part * phase.num_bytes
        latencies[source] = max(latencies.get(source, 0.0), sum(link.latency for link in links))
        longest[source] = max(longest.get(source, 0.0), size / min(link.bandwidth for link in links))
        sizes[source] = sizes.get(source, 0.0) + size
    return max(latencies[source] + max(longest[source], sizes[source] / leaving[source]) for source in sizes)
