# SPDX-License-Identifier: Apache-2.0
"""Routed schedules: an all-to-all's messages when only the device knows how many rows each rank has for each other.

A chunk is a piece of the rows that one rank, its source, has for another one, its target. Its size is read from a table
at run time, so no place has a fixed address. In each area of a rank's memory chunks lie one after another, in an order
that is fixed; a chunk's first row is the sum of the sizes of the chunks before it:

    GIVEN        the rows that a rank sends, by target, then piece, as the operator has them
    FORWARDED    chunks that the rank passes on, in symmetric memory, behind what arrives
    ARRIVED      the rows for a rank, by source, then piece, in symmetric memory, where the operator reads them

A chunk's way is a chain of hops, derived from a verified schedule's steps. The chunks of one piece that a step sends
are a message, which has a signal (a channel) of its own at the receiver: whoever reads one of its chunks, to pass it on
or to multiply it, waits for that. Of the two-step all-to-all of nodes of ranks 0, 1 and 2, 3:

    rank 0   GIVEN: rows for 3  ---> rank 1   FORWARDED: 0's rows for 3   ---+ one message
                                     rank 1   GIVEN: its own rows for 3   ---+------------> rank 3   ARRIVED: 0's, 1's
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from stretto.collectives.executor.cuda.fused.program import (
    LoadChunk,
    ReceiveChunk,
    ReduceChunks,
    ScheduleTrace,
    Value,
    trace_schedule,
)
from stretto.collectives.joint.schedule import NOBODY
from stretto.collectives.schedule import Schedule

GIVEN, FORWARDED, ARRIVED = range(3)
"""Areas of a rank's memory."""


class Hop(NamedTuple):
    """A chunk that goes from the sender's place `number` of `area` to the receiver's place `to`.

    sender, channel: the message that has brought it to the sender; NOBODY for rows that were given.
    """

    chunk: int
    area: int
    number: int
    to: int
    sender: int = NOBODY
    channel: int = NOBODY


class RoutedMessage(NamedTuple):
    """Hops to places of one area of the receiver, which gets the signal `channel` of this sender."""

    hops: tuple[Hop, ...]
    receiver: int
    area: int
    channel: int


class RankRoutes(NamedTuple):
    """A rank's messages, in their order.

    forwarded: the chunks that it passes on, by their places. arrivals: what tiles wait for: (sender, channel) of the
    message that brings each chunk, by its place among those that arrive.
    """

    messages: tuple[RoutedMessage, ...]
    forwarded: tuple[int, ...]
    arrivals: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class RoutedSchedule:
    """An all-to-all of chunks whose sizes are read at run time.

    Chunk (source * ranks + target) * pieces + piece. forwarded_pairs: of a source and a target, whose rows a rank has
    memory for behind those that arrive. channels: of a receiver.
    """

    name: str
    pieces: int
    ranks: tuple[RankRoutes, ...]
    forwarded_pairs: int
    channels: int

    def list_places(self, rank: int, area: int) -> list[int]:
        """The chunks of an area, in the order in which they lie there."""
        world, pieces = len(self.ranks), self.pieces
        if area == GIVEN:
            return list(range(rank * world * pieces, (rank + 1) * world * pieces))
        if area == FORWARDED:
            return list(self.ranks[rank].forwarded)
        return [(source * world + rank) * pieces + piece for source in range(world) for piece in range(pieces)]


def count_pairs(chunks: tuple[int, ...], pieces: int) -> int:
    """Count the pairs of ranks whose rows, if each has the most that any pair has, need the memory of these chunks."""
    times: dict[int, int] = {}
    for chunk, count in Counter(chunks).items():  # of a pair that comes by twice each piece may, too
        times[chunk // pieces] = max(times.get(chunk // pieces, 0), count)
    return sum(times.values())


class _Hop(NamedTuple):
    """A hop while it is derived: the value that a rank sends, and the one that it is at the receiver.

    rest: hops that the chunk still has before it, after this one.
    """

    sent: Value
    received: Value
    rest: int


class _Group(NamedTuple):
    """The hops of one message while it is derived. level: messages of lower levels bring what it passes on."""

    level: int
    sender: int
    receiver: int
    area: int
    hops: list[_Hop]

    def urgency(self, world: int) -> tuple[int, ...]:
        """Rows for the rank itself first; then those with the longest way before them, the nearest rank's first."""
        distance = (self.receiver - self.sender) % world
        return self.level, distance != 0, -max(hop.rest for hop in self.hops), distance, self.area


@lru_cache(maxsize=64)
def route(schedule: Schedule) -> RoutedSchedule:
    """Derive the messages of a verified all-to-all. ValueError for one that adds up chunks."""
    collective = schedule.collective
    world, pieces = collective.ranks, collective.input_chunks // collective.ranks
    trace = trace_schedule(schedule, collective.aliased() if schedule.in_place else collective.out_of_place())
    chunks, came = _name_values(schedule.name, trace, world, pieces)
    outputs: dict[Value, int] = {}
    for target, values in enumerate(trace.outputs):
        for number, found in enumerate(values):
            value = found if found >= 0 else -1 - number  # in place, a rank's rows for itself that no step touches
            chunks.setdefault((target, value), (target * world + target) * pieces + number % pieces)
            outputs[target, value] = number
    groups = _group_hops(schedule, trace, _list_hops(outputs, came), outputs, lambda value: chunks[value] % pieces)
    passed_on = [hop.received for group in groups if group.area == FORWARDED for hop in group.hops]
    passed_on.sort(key=lambda value: value[0])  # of each rank, in the order in which they come
    forwarded = [[value for value in passed_on if value[0] == rank] for rank in range(world)]
    numbers = {value: number for values in forwarded for number, value in enumerate(values)}

    messages: list[list[RoutedMessage]] = [[] for _ in range(world)]
    brought: dict[Value, tuple[int, int]] = {}
    used = [0] * world
    for _, sender, receiver, area, of_group in groups:
        channel, hops = used[receiver], []
        used[receiver] += 1
        for hop in of_group:
            chunk = chunks[hop.sent]
            place = (GIVEN, chunk % (world * pieces))
            if hop.sent in brought:
                place = (ARRIVED, outputs[hop.sent]) if hop.sent in outputs else (FORWARDED, numbers[hop.sent])
            to = outputs[hop.received] if area == ARRIVED else numbers[hop.received]
            hops.append(Hop(chunk, *place, to, *brought.get(hop.sent, ())))
        brought.update((hop.received, (sender, channel)) for hop in of_group)
        messages[sender].append(RoutedMessage(tuple(hops), receiver, area, channel))
    arrivals = [[(NOBODY, NOBODY)] * (world * pieces) for _ in range(world)]
    for (target, value), number in outputs.items():
        arrivals[target][number] = brought[target, value]
    lists = [tuple(chunks[value] for value in values) for values in forwarded]
    routes = map(RankRoutes, map(tuple, messages), lists, map(tuple, arrivals))
    most = max(count_pairs(one, pieces) for one in lists)
    return RoutedSchedule(schedule.name, pieces, tuple(routes), most, max(used))


def _group_hops(
    schedule: Schedule,
    trace: ScheduleTrace,
    hops: dict[tuple[Value, int], _Hop],
    outputs: dict[Value, int],
    find_piece: Callable[[Value], int],
) -> list[_Group]:
    """The hops of each step's message, by pieces and areas, in an order in which all ranks can send them."""
    groups, levels = [], dict[Value, int]()
    for rank in range(len(schedule.ranks)):
        for hop in (hop for (value, peer), hop in hops.items() if value[0] == peer == rank):
            groups.append(_Group(0, rank, rank, ARRIVED, [hop]))
    for (rank, block, _), values in trace.steps.items():
        peer = schedule.ranks[rank].thread_blocks[block].send_peer
        if peer is None:
            continue
        found: dict[tuple[int, int], list[_Hop]] = defaultdict(list)
        for value in values:
            if ((rank, value), peer) in hops:  # else it is one that no output needs
                hop = hops.pop(((rank, value), peer))
                found[find_piece(hop.sent), ARRIVED if hop.received in outputs else FORWARDED].append(hop)
        for (_, area), of_message in found.items():
            level = max(levels.get(hop.sent, 0) for hop in of_message)
            levels.update((hop.received, level + 1) for hop in of_message)
            groups.append(_Group(level, rank, peer, area, of_message))
    return sorted(groups, key=lambda group: group.urgency(len(schedule.ranks)))


def _name_values(
    name: str, trace: ScheduleTrace, world: int, pieces: int
) -> tuple[dict[Value, int], dict[Value, Value]]:
    """(the chunk that each value is, the value of another rank that each one came as)."""
    chunks: dict[Value, int] = {}
    came: dict[Value, Value] = {}
    for operation in trace.operations:
        rank, what = operation
        match what:
            case LoadChunk(value, place):
                given = trace.names[rank, value]
                if given != (rank, place):  # memory of which the collective says nothing
                    chunks[rank, value] = rank * world * pieces + given[1]
            case ReceiveChunk(value, message):
                sent = came[rank, value] = trace.senders[rank, message]
                if sent in chunks:
                    chunks[rank, value] = chunks[sent]
            case ReduceChunks():
                raise ValueError(f"{name}: rank {rank} adds up chunks, of rows that nobody is to add")
    return chunks, came


def _list_hops(outputs: dict[Value, int], came: dict[Value, Value]) -> dict[tuple[Value, int], _Hop]:
    """All hops of the values that outputs hold, by the value that is sent and its receiver; what else is sent is not.

    A rank's rows for itself are a hop to itself.
    """
    hops = {}
    for value in outputs:
        way = [value]
        while way[-1] in came:
            way.append(came[way[-1]])
        way.reverse()
        pairs = list(pairwise(way)) or [(value, value)]
        for number, (sent, received) in enumerate(pairs):
            hops[sent, received[0]] = _Hop(sent, received, len(pairs) - 1 - number)
    return hops
