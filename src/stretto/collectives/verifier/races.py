# SPDX-License-Identifier: Apache-2.0
"""Finds data races: two steps that touch one chunk, one of them writing it, with nothing that orders them.

Steps are ordered by their thread block, by waits and by messages, along any path. The search visits the steps in one
order in which they can run; if every two conflicting neighbours at a chunk are ordered there, then all are, in any run.
FIFO slots order nothing here: a schedule must not depend on how many there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.schedule import StepType
from stretto.collectives.verifier.graph import Graph

MAX_LOOKED_AT = 20_000_000
"""The most steps that one search visits, repeatedly, for paths that lead over other ranks: some ten seconds."""
MAX_KNOWN = 128
"""The number of other thread blocks whose progress a step remembers; what it has forgotten is searched for again."""


@dataclass(frozen=True)
class Race:
    """Two steps of a rank that may touch a chunk in either order. kind: "read-write" or "write-write"."""

    kind: str
    rank: int
    buffer: Buffer
    index: int
    one: str
    other: str

    def __str__(self) -> str:
        return (
            f"{self.kind} race on {self.buffer}[{self.index}] of rank {self.rank}: {self.one} and {self.other} are in "
            "no order: make the later one wait for the other"
        )


def find_races(graph: Graph, order: list[int], collective: Collective) -> tuple[list[Race], str | None]:
    """The races of a schedule whose steps can run in this order, one for each pair of steps.

    Also returns why there may be more, None if the search was complete within MAX_LOOKED_AT.
    """
    search = _Search(graph, order, collective)
    try:
        search.run()
    except _TooManyError:
        return search.races, (
            f"data races: {MAX_LOOKED_AT:,} steps were looked at for paths that order others, and not all were found: "
            "wait for steps of the same rank, or make fewer steps"
        )
    return search.races, None


class _TooManyError(Exception):
    """The search has visited MAX_LOOKED_AT steps."""


class _Search:
    def __init__(self, graph: Graph, order: list[int], collective: Collective) -> None:
        self._graph = graph
        self._order = order
        self._collective = collective
        self._time = [0] * len(order)
        for time, number in enumerate(order):
            self._time[number] = time
        # A vector clock for each step: of each other thread block of its rank, the last step that ended before it.
        self._known: list[dict[int, int]] = [{}] * len(order)
        # How many later steps inherit it: the next one of its thread block, and those that wait for it.
        self._heirs = [0] * len(order)
        for number in range(len(order)):
            for source in self._sources(number):
                self._heirs[source] += 1
        self._races: dict[tuple[int, int], Race] = {}
        self._looked_at = 0

    @property
    def races(self) -> list[Race]:
        return list(self._races.values())

    def run(self) -> None:
        """Visit all steps. Raises _TooManyError if that takes too long."""
        graph = self._graph
        ranks = range(self._collective.ranks)
        # By rank and buffer, for each chunk: the step that wrote it last, and the last reader of each thread block.
        writers: list[dict[Buffer, dict[int, int]]] = [{buffer: {} for buffer in Buffer} for _ in ranks]
        readers: list[dict[Buffer, dict[int, dict[int, int]]]] = [{buffer: {} for buffer in Buffer} for _ in ranks]
        for number in self._order:
            self._learn(number)
            step = graph.steps[number]
            if step.type is StepType.NOP:
                continue
            rank, block, _ = graph.places[number]
            if step.type.reads_source:
                buffer, start = self._collective.place(rank, step.source_buffer, step.source)
                written, reading = writers[rank][buffer], readers[rank][buffer]
                for at in range(start, start + step.size):
                    writer = written.get(at)
                    if writer is not None:
                        self._require(writer, number, "read-write", buffer, at)
                    reading.setdefault(at, {})[block] = number
            if step.type.writes_destination:
                buffer, start = self._collective.place(rank, step.destination_buffer, step.destination)
                written, reading = writers[rank][buffer], readers[rank][buffer]
                for at in range(start, start + step.size):
                    writer = written.get(at)
                    if writer is not None:
                        self._require(writer, number, "write-write", buffer, at)
                    for reader in reading.pop(at, {}).values():
                        self._require(reader, number, "read-write", buffer, at)
                    written[at] = number

    def _sources(self, number: int) -> Iterator[int]:
        """The steps whose vector clocks this one inherits."""
        if not self._graph.first[number]:
            yield number - 1
        if self._graph.waits_for[number] >= 0:
            yield self._graph.waits_for[number]

    def _learn(self, number: int) -> None:
        graph = self._graph
        known: dict[int, int] = {} if graph.first[number] else self._known[number - 1]
        other = graph.waits_for[number]
        if other >= 0:
            known = _merged(known, self._known[other], graph.places[other])
        self._known[number] = known
        for source in self._sources(number):
            self._heirs[source] -= 1
            if self._heirs[source] == 0:
                self._known[source] = {}

    def _require(self, before: int, after: int, kind: str, buffer: Buffer, index: int) -> None:
        if before == after:
            return
        rank, block, step = self._graph.places[before]
        if self._graph.places[after][1] == block or self._known[after].get(block, -1) >= step:
            return
        if (before, after) in self._races or self._reaches(before, after):
            return
        names = self._graph.name(before), self._graph.name(after)
        self._races[before, after] = Race(kind, rank, buffer, index, *names)

    def _reaches(self, before: int, after: int) -> bool:
        """Search a path from one step to the other, perhaps over other ranks; the later one remembers it."""
        graph = self._graph
        target = graph.places[before][:2]
        since = self._time[before]
        # Of each thread block, the latest step that is known to lead to `after`: all before it do, too.
        latest: dict[tuple[int, int], int] = {}
        stack = [after]
        while stack:
            number = stack.pop()
            rank, block, step = graph.places[number]
            if (rank, block) == target and number >= before:
                self._known[after] = _merged(self._known[after], {}, graph.places[number])
                return True
            seen = latest.get((rank, block), -1)
            if step <= seen:
                continue
            latest[rank, block] = step
            for at in range(number, number - (step - seen), -1):
                if self._time[at] < since:
                    break
                self._looked_at += 1
                if self._looked_at > MAX_LOOKED_AT:
                    raise _TooManyError
                for other in (graph.waits_for[at], graph.sender[at]):
                    if other >= 0 and self._time[other] >= since:
                        stack.append(other)
        return False


def _merged(one: dict[int, int], other: dict[int, int], place: tuple[int, int, int]) -> dict[int, int]:
    """Merge two vector clocks and the step at this place, the newest last; keeps MAX_KNOWN entries."""
    known = dict(one)
    for third, ended in other.items():
        if known.get(third, -1) < ended:
            known.pop(third, None)
            known[third] = ended
    _, block, step = place
    step = max(known.pop(block, -1), step)
    if len(known) >= MAX_KNOWN:
        known = dict(list(known.items())[1 - MAX_KNOWN :])
    known[block] = step
    return known
