"""The chunk DAG: which operations must come before which, and why (section 4.1).

A true dependency: an operation reads what another wrote. A false one: it writes where another read or wrote before.
Both hold on one rank, the one whose chunks they are about.
"""

from dataclasses import dataclass
from typing import NamedTuple

from stretto.collectives.collective import Buffer
from stretto.collectives.compiler.instances import Parts
from stretto.collectives.language import Chunks, OperationKind


class Dependency(NamedTuple):
    """The operation that comes before, and the rank on which it must have ended."""

    operation: int
    rank: int


@dataclass(frozen=True)
class ChunkDag:
    """The operations, and for each of them what it truly and what it falsely depends on.

    read_by_others[i]: how many operations read what operation i wrote; survives[i]: whether the collective's
    postcondition speaks of a chunk that it wrote last.
    """

    parts: Parts
    true: tuple[tuple[Dependency, ...], ...]
    false: tuple[tuple[Dependency, ...], ...]
    read_by_others: tuple[int, ...]
    survives: tuple[bool, ...]


def find_dependencies(parts: Parts) -> ChunkDag:
    """The chunk DAG of these operations, which are in an order in which they may run one after another."""
    ranks = range(parts.collective.ranks)
    # By rank and buffer, for each chunk: who wrote it last, and who read it since.
    writers: list[dict[Buffer, dict[int, int]]] = [{buffer: {} for buffer in Buffer} for _ in ranks]
    readers: list[dict[Buffer, dict[int, list[int]]]] = [{buffer: {} for buffer in Buffer} for _ in ranks]
    true, false = [], []
    read_by_others = [0] * len(parts.operations)

    def read(chunks: Chunks, operation: int) -> set[int]:
        rank, buffer, start, size = chunks
        written, reading = writers[rank][buffer], readers[rank][buffer]
        before = set()
        for at in range(start, start + size):
            writer = written.get(at)
            if writer is not None:
                before.add(writer)
            reading.setdefault(at, []).append(operation)
        return before

    def write(chunks: Chunks, operation: int) -> set[int]:
        rank, buffer, start, size = chunks
        written, reading = writers[rank][buffer], readers[rank][buffer]
        before = set()
        for at in range(start, start + size):
            others = reading.pop(at, None)
            if others is not None:
                before.update(others)
            else:
                writer = written.get(at)
                if writer is not None:
                    before.add(writer)
            written[at] = operation
        before.discard(operation)
        return before

    for number, (kind, source, destination, *_) in enumerate(parts.operations):
        from_source = read(source, number)
        truly = [Dependency(before, source.rank) for before in from_source]
        if kind is OperationKind.REDUCE:
            from_destination = read(destination, number)
            if source.rank == destination.rank:
                from_destination -= from_source
            truly += [Dependency(before, destination.rank) for before in from_destination]
        falsely = write(destination, number)
        on_rank = {dependency.operation for dependency in truly if dependency.rank == destination.rank}
        for dependency in truly:
            read_by_others[dependency.operation] += 1
        true.append(tuple(truly))
        false.append(tuple(Dependency(before, destination.rank) for before in falsely - on_rank))

    return ChunkDag(parts, tuple(true), tuple(false), tuple(read_by_others), _surviving(parts, writers))


def _surviving(parts: Parts, writers: list[dict[Buffer, dict[int, int]]]) -> tuple[bool, ...]:
    survives = [False] * len(parts.operations)
    collective = parts.collective
    for rank in range(collective.ranks):
        for index in range(collective.output_chunks):
            if collective.expected(rank, index) is not None:
                buffer, at = collective.place(rank, Buffer.OUT, index)
                writer = writers[rank][buffer].get(at)
                if writer is not None:
                    survives[writer] = True
    return tuple(survives)
