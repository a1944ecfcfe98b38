"""Data races: two steps that touch one chunk, one of them to write it, and nothing that orders them.

Ordered is what the thread block, waits and messages order, along any path. The steps are looked at in one order in
which they can run; if every two conflicting neighbours at a chunk are ordered there, then all are, in any run. FIFO
slots order nothing here: a schedule must not depend on how many there are.
"""

from dataclasses import dataclass

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.schedule import StepType
from stretto.collectives.verifier.graph import Graph


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


def find_races(graph: Graph, order: list[int], collective: Collective) -> list[Race]:
    """The races of a schedule whose steps can run in this order; one for each pair of steps."""
    return _Search(graph, order, collective).run()


class _Search:
    def __init__(self, graph: Graph, order: list[int], collective: Collective) -> None:
        self._graph = graph
        self._order = order
        self._collective = collective
        self._time = [0] * len(order)
        for time, number in enumerate(order):
            self._time[number] = time
        # What a step knows of its rank's other thread blocks: the last step of each that ended before it.
        self._known: list[dict[int, int]] = [{}] * len(order)
        self._races: dict[tuple[int, int], Race] = {}

    def run(self) -> list[Race]:
        """See `find_races`."""
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
        return list(self._races.values())

    def _learn(self, number: int) -> None:
        graph = self._graph
        known: dict[int, int] = {} if graph.first[number] else self._known[number - 1]
        other = graph.waits_for[number]
        if other >= 0:
            _, block, step = graph.places[other]
            known = dict(known)
            for third, ended in self._known[other].items():
                if known.get(third, -1) < ended:
                    known[third] = ended
            if known.get(block, -1) < step:
                known[block] = step
        self._known[number] = known

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
        """Whether a path leads from one to the other, perhaps over other ranks."""
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
                return True
            seen = latest.get((rank, block), -1)
            if step <= seen:
                continue
            latest[rank, block] = step
            for at in range(number, number - (step - seen), -1):
                if self._time[at] < since:
                    break
                for other in (graph.waits_for[at], graph.sender[at]):
                    if other >= 0 and self._time[other] >= since:
                        stack.append(other)
        return False
