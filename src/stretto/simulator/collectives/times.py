# SPDX-License-Identifier: Apache-2.0
"""Times collectives: on a network, and by the formulas of textbooks, rounds of latency and bytes over bandwidth.

n ranks, b bytes, latency a and bandwidth B between neighbours: a ring's all_reduce takes 2 (n - 1) (a + b / n / B), its
all_gather and reduce_scatter half of it; recursive doubling takes log2(n) a + (n - 1) / n b / B; a direct collective
takes the longest latency and the bytes that leave one rank over the bandwidth of its links. What messages wait for one
another inside the network is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from stretto.simulator.collectives.algorithms import CollectivePhase, add_phase, plan_phases
from stretto.simulator.collectives.patterns import MessageRound, check_messages
from stretto.simulator.graph import Execution, GraphBuilder, execute
from stretto.simulator.network.closed_form import NetworkModel
from stretto.simulator.network.topology import NetworkTopology

_FIRST_ROUNDS = 32  # of a ring that are simulated before its rounds may count as steady
_PICOSECONDS = 1e12  # a second
_STEADY = 1e-9  # relative difference of rounds that count as equal


@dataclass(frozen=True)
class CollectiveOptions:
    """Options of a collective, as `add_collective` takes it. uses_symmetry: see `simulate_collective`."""

    ranks_per_node: int | None = None
    in_node: str = "ring"
    splits: int = 1
    uses_symmetry: bool = False


@dataclass(frozen=True)
class CollectiveTime:
    """Result of a simulated collective: seconds until the last rank had ended, and how long it was simulated."""

    seconds: float
    events: int
    execution_seconds: float  # of this process
    fidelity: str
    ends: tuple[float, ...] = field(repr=False)  # seconds, by rank


@dataclass
class _Effort:
    """Cost of simulations so far."""

    events: int = 0
    execution_seconds: float = 0.0

    def add(self, execution: Execution) -> None:
        self.events += execution.events
        self.execution_seconds += execution.execution_seconds


def simulate_collective(
    collective: str,
    algorithm: str,
    network: NetworkModel,
    num_bytes: float,
    options: CollectiveOptions = CollectiveOptions(),
    *,
    ranks: Sequence[int] | None = None,
) -> CollectiveTime:
    """Run one collective among `ranks` (None: all devices) of an otherwise idle network.

    options.uses_symmetry simulates once what is the same: of groups of ranks that share no link and have equal links
    (the nodes of a cluster, say) one, and of a ring's rounds as many as it takes until each lasts as long as the last
    on all ranks; the others are extrapolated. Phases then begin with empty queues. ValueError as `add_collective` says,
    and for symmetry with several splits, which share links.
    """
    chosen = tuple(range(network.topology.devices) if ranks is None else ranks)
    splits = options.splits
    if splits < 1 or (splits > 1 and options.uses_symmetry):
        rule = "at least 1" if splits < 1 else "1 where symmetry is used: splits share links"
        raise ValueError(f"a collective in {splits} splits: must be {rule}; 1 would do")
    phases = plan_phases(collective, algorithm, chosen, num_bytes / splits, options.ranks_per_node, options.in_node)
    if options.uses_symmetry:
        return _simulate_symmetric(phases, chosen, network)
    effort = _Effort()
    ends, _ = _simulate(phases, chosen, network, {}, effort, splits)
    return _as_time(chosen, ends, effort, network)


def _as_time(ranks: Sequence[int], ends: dict[int, float], effort: _Effort, network: NetworkModel) -> CollectiveTime:
    by_rank = tuple(ends[rank] for rank in ranks)
    return CollectiveTime(max(by_rank), effort.events, effort.execution_seconds, network.fidelity, by_rank)


def _simulate(
    phases: Sequence[CollectivePhase],
    ranks: Sequence[int],
    network: NetworkModel,
    begins: dict[int, float],
    effort: _Effort,
    splits: int = 1,
) -> tuple[dict[int, float], list[list[float]]]:
    """Run phases on ranks that begin at given seconds.

    Returns when each rank ended, and for each round of the phases' groups when its messages were received.
    """
    check_messages("a collective", len(ranks), splits * sum(phase.messages for phase in phases))
    builder = GraphBuilder(network.topology.devices)
    first = {rank: [builder.compute(rank, begins[rank])] if begins.get(rank) else [] for rank in ranks}
    receipts: list[dict[int, list[int]]] = []
    ended: dict[int, list[int]] = {rank: [] for rank in ranks}
    for _ in range(splits):
        done = first
        for phase in phases:
            done = add_phase(builder, phase, done, receipts=receipts)
        for rank in ranks:
            ended[rank] += done[rank]
    joins = {rank: builder.join(numbers, rank) for rank, numbers in ended.items()}
    execution = execute(builder.build(), network)
    effort.add(execution)
    ends = execution.ends
    received = [[float(ends[each]) for numbers in found.values() for each in numbers] for found in receipts]
    return {rank: float(ends[each]) for rank, each in joins.items()}, received


def _simulate_symmetric(
    phases: Sequence[CollectivePhase], ranks: Sequence[int], network: NetworkModel
) -> CollectiveTime:
    ends = dict.fromkeys(ranks, 0.0)
    effort = _Effort()
    for phase in phases:
        twins = _find_twins(phase, network.topology, ends)
        together = replace(phase, groups=tuple(group for first, *_ in twins for group in first))
        found = _simulate_rounds(together, network, ends, effort)
        for first, *others in twins:
            mine = [rank for group in first for rank in group]
            for other in others:
                found |= {rank: found[twin] for rank, twin in zip(chain.from_iterable(other), mine, strict=True)}
        ends |= found
    return _as_time(ranks, ends, effort, network)


_Groups = tuple[tuple[int, ...], ...]


def _find_twins(phase: CollectivePhase, topology: NetworkTopology, begins: dict[int, float]) -> list[list[_Groups]]:
    """A phase's groups in sets that share no link with another set, and lists of sets for which all is the same."""
    owner_of: dict[int, int] = {}  # by link
    joined = list(range(len(phase.groups)))  # union-find

    def find(number: int) -> int:
        while joined[number] != number:
            joined[number] = number = joined[joined[number]]
        return number

    links_of: list[list[int]] = []
    for number, group in enumerate(phase.groups):
        pairs = ((group[source], group[target]) for each in phase.pattern.rounds for source, target, _ in each.messages)
        links_of.append([link for pair in pairs for route in topology.routes(*pair) for link in route])
        for link in links_of[-1]:
            joined[find(number)] = find(owner_of.setdefault(link, number))
    sets: dict[int, list[int]] = {}
    for number in range(len(phase.groups)):
        sets.setdefault(find(number), []).append(number)
    twins: dict[object, list[_Groups]] = {}
    for numbers in sets.values():
        groups = tuple(phase.groups[number] for number in numbers)
        used = [link for number in numbers for link in links_of[number]]
        order = {link: place for place, link in enumerate(dict.fromkeys(used))}  # numbered as they come: twins agree
        about = (
            tuple(round(begins[rank] * _PICOSECONDS) for group in groups for rank in group),
            tuple(order[link] for link in used),
            tuple((topology.links[link].bandwidth, topology.links[link].latency) for link in order),
        )
        twins.setdefault(about, []).append(groups)
    return list(twins.values())


def _simulate_rounds(
    phase: CollectivePhase, network: NetworkModel, begins: dict[int, float], effort: _Effort
) -> dict[int, float]:
    """Find when each rank ends a phase. A single round that repeats is extrapolated once it is steady."""
    ranks = [rank for group in phase.groups for rank in group]
    rounds = phase.pattern.rounds
    count = _FIRST_ROUNDS
    while len(rounds) == 1 and 2 * count <= rounds[0].repeats:
        shorter = replace(phase, pattern=replace(phase.pattern, rounds=(replace(rounds[0], repeats=count),)))
        ends, received = _simulate([shorter], ranks, network, begins, effort)
        steps = [
            now - before
            for group in range(len(phase.groups))
            for k in range(count * 3 // 4, count)
            for now, before in zip(received[group * count + k], received[group * count + k - 1], strict=True)
        ]
        if max(steps) - min(steps) <= _STEADY * max(steps):
            left = rounds[0].repeats - count
            return {rank: end + left * steps[-1] for rank, end in ends.items()}
        count *= 2
    return _simulate([phase], ranks, network, begins, effort)[0]


def closed_form_seconds(
    collective: str,
    algorithm: str,
    topology: NetworkTopology,
    num_bytes: float,
    *,
    ranks_per_node: int | None = None,
    in_node: str = "ring",
) -> float:
    """Seconds of a collective among all devices without contention.

    The other parameters, and what raises ValueError, are those of `add_collective`.
    """
    phases = plan_phases(collective, algorithm, range(topology.devices), num_bytes, ranks_per_node, in_node)
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
