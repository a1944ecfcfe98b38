# SPDX-License-Identifier: Apache-2.0
"""Adds collectives to an execution graph, as messages of ring, direct, recursive and two-level algorithms.

A two-level algorithm has phases inside nodes and phases between nodes, in which each rank meets the ranks with its
place in other nodes (Singh, "Optimizing communication in parallel deep learning on exascale-class machines", chapter
6).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from stretto.simulator.collectives.patterns import ALGORITHMS, COLLECTIVES, MessagePattern, check_messages, find_pattern
from stretto.simulator.graph import GraphBuilder
from stretto.suggestions import name_known

TWO_LEVEL = "two-level-"
ALL_ALGORITHMS = (*ALGORITHMS, *(f"{TWO_LEVEL}{name}" for name in ALGORITHMS))


@dataclass(frozen=True)
class CollectivePhase:
    """One pattern, run concurrently by several groups. num_bytes: of which the pattern's sizes are fractions."""

    pattern: MessagePattern
    groups: tuple[tuple[int, ...], ...]
    num_bytes: float

    @property
    def messages(self) -> int:
        return len(self.groups) * sum(each.repeats * len(each.messages) for each in self.pattern.rounds)


def add_collective(
    builder: GraphBuilder,
    collective: str,
    algorithm: str,
    ranks: Sequence[int],
    num_bytes: float,
    *,
    after: Sequence[Sequence[int]] | None = None,
    ranks_per_node: int | None = None,
    stream: str | None = None,
    splits: int = 1,
    in_node: str = "ring",
    name: str = "",
) -> list[int]:
    """Add a collective's messages. Returns an operation for each of `ranks`, in their order, that ends it there.

    It ends on a rank when the rank has received everything, and all that it sent has arrived.

    collective: all_reduce, all_gather, reduce_scatter, all_to_all, or broadcast (from the first of `ranks`). algorithm:
    ring, direct, recursive, or two-level-ring, two-level-direct, two-level-recursive (between nodes; inside nodes
    `in_node`). num_bytes: the whole buffer of one rank: of all_gather its output, of reduce_scatter its input. after:
    for each rank, the operations for which its first messages wait. ranks_per_node: of the two-level algorithms; ranks
    fill one node after another. stream: the collective runs on this stream of each rank, after and before other
    operations there. splits: equal parts of the buffer, each of which runs as a separate collective, concurrently.

    Raises ValueError for an unknown name, a rank twice, ranks that fill no whole nodes, and a size that is no number.
    """
    if splits < 1:
        raise ValueError(f"a collective in {splits} splits: must be at least 1; 1 would do")
    phases = plan_phases(collective, algorithm, ranks, num_bytes / splits, ranks_per_node, in_node)
    check_messages(f"{collective} ({algorithm})", len(ranks), splits * sum(phase.messages for phase in phases))
    waits = _first_waits(ranks, after)
    label = name or collective
    if stream is not None:
        waits = {rank: [builder.join(waits[rank], rank, stream=stream)] for rank in ranks}
    ended: dict[int, list[int]] = {rank: [] for rank in ranks}
    for _ in range(splits):
        done = waits
        for phase in phases:
            done = add_phase(builder, phase, done, stream=stream, name=label)
        for rank in ranks:
            ended[rank] += done[rank]
    return [builder.join(ended[rank], rank, stream=stream) for rank in ranks]


def plan_phases(
    collective: str,
    algorithm: str,
    ranks: Sequence[int],
    num_bytes: float,
    ranks_per_node: int | None = None,
    in_node: str = "ring",
) -> list[CollectivePhase]:
    """The phases of a collective, one after another. ValueError as `add_collective` says."""
    if collective not in COLLECTIVES:
        raise ValueError(f"there is no collective {collective!r}{name_known(collective, COLLECTIVES)}")
    if algorithm not in ALL_ALGORITHMS:
        raise ValueError(f"there is no algorithm {algorithm!r}{name_known(algorithm, ALL_ALGORITHMS)}")
    if not (num_bytes >= 0 and math.isfinite(num_bytes)):
        raise ValueError(f"a collective of {num_bytes} bytes: must be finite and at least 0")
    if len(set(ranks)) != len(ranks) or not ranks:
        raise ValueError(f"a collective's ranks must differ, and there must be one at least; given: {list(ranks)[:16]}")
    if not algorithm.startswith(TWO_LEVEL):
        pattern = find_pattern(collective, algorithm, len(ranks))
        return [CollectivePhase(pattern, (tuple(ranks),), num_bytes)]
    nodes = _cut_into_nodes(ranks, algorithm, ranks_per_node)
    peers = tuple(zip(*nodes, strict=True))  # the ranks of one place in all nodes
    size = len(peers)
    outer = algorithm.removeprefix(TWO_LEVEL)

    def inside(step: str, part: float) -> CollectivePhase:
        return CollectivePhase(find_pattern(step, in_node, size), nodes, num_bytes * part)

    def between(step: str, part: float, groups: tuple[tuple[int, ...], ...] = peers) -> CollectivePhase:
        return CollectivePhase(find_pattern(step, outer, len(nodes)), groups, num_bytes * part)

    match collective:
        case "all_gather":
            return [between("all_gather", 1 / size), inside("all_gather", 1.0)]
        case "reduce_scatter":
            return [inside("reduce_scatter", 1.0), between("reduce_scatter", 1 / size)]
        case "all_reduce":
            return [inside("reduce_scatter", 1.0), between("all_reduce", 1 / size), inside("all_gather", 1.0)]
        case "all_to_all":
            return [inside("all_to_all", 1.0), between("all_to_all", 1.0)]
        case _:
            return [between("broadcast", 1.0, peers[:1]), inside("broadcast", 1.0)]


def _cut_into_nodes(ranks: Sequence[int], algorithm: str, size: int | None) -> tuple[tuple[int, ...], ...]:
    if size is None or size < 1:
        raise ValueError(f"{algorithm} needs ranks_per_node, at least 1, not {size}")
    if len(ranks) % size:
        fewer = len(ranks) // size * size
        raise ValueError(
            f"{len(ranks)} ranks fill no whole nodes of {size}; {fewer or size} ranks would do, or "
            f"{math.gcd(len(ranks), size)} ranks a node"
        )
    return tuple(tuple(ranks[first : first + size]) for first in range(0, len(ranks), size))


def _first_waits(ranks: Sequence[int], after: Sequence[Sequence[int]] | None) -> dict[int, list[int]]:
    if after is None:
        return {rank: [] for rank in ranks}
    if len(after) != len(ranks):
        raise ValueError(f"`after` has operations for {len(after)} ranks, but the collective has {len(ranks)}")
    return {rank: list(each) for rank, each in zip(ranks, after, strict=True)}


def add_phase(
    builder: GraphBuilder,
    phase: CollectivePhase,
    waits: dict[int, list[int]],
    *,
    stream: str | None = None,
    name: str = "",
    receipts: list[dict[int, list[int]]] | None = None,
) -> dict[int, list[int]]:
    """Add a phase's messages. Returns for each rank the operations that end its phase: its receives and its sends.

    waits: operations for which each rank's first messages wait. receipts: gets for each group and round (group by
    group) the messages that each rank receives.
    """
    ended = dict(waits)
    add = builder.message
    for group in phase.groups:
        before = {rank: _joined(builder, waits[rank], rank) for rank in group}
        received: dict[int, list[int]] = {}
        sent: dict[int, list[int]] = {}
        for each in chain.from_iterable([each] * each.repeats for each in phase.pattern.rounds):
            received = {rank: [] for _, place, _ in each.messages for rank in (group[place],)}
            for source, target, part in each.messages:
                one, other = group[source], group[target]
                number = add(
                    one, other, part * phase.num_bytes, after=before[one], stream=stream, name=name, is_ordered=False
                )
                received[other].append(number)
                sent.setdefault(one, []).append(number)
            if receipts is not None:
                receipts.append(received)
            for rank, numbers in received.items():
                kept = numbers if phase.pattern.is_chain else [*before[rank], *numbers]
                before[rank] = _joined(builder, kept, rank)
        for rank in group:
            last = sent.get(rank, [])
            ended[rank] = [*before[rank], *(last[-1:] if phase.pattern.is_chain else last)]
    return ended


def _joined(builder: GraphBuilder, numbers: list[int], rank: int) -> list[int]:
    """At most two operations that end when the given ones have: each message waits for them, and there are many."""
    return numbers if len(numbers) <= 2 else [builder.join(numbers, rank)]
