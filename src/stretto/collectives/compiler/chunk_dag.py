# SPDX-License-Identifier: Apache-2.0
"""Splits a program into instances, and finds its dependencies: the chunk DAG (MSCCLang, sections 4.1 and 5.1).

A true dependency: an operation reads what another wrote. A false one: it writes where another read or wrote before.
Both hold on one rank, the one whose chunks they concern.
"""

from dataclasses import dataclass
from math import gcd, lcm
from typing import NamedTuple

from stretto.collectives.collective import MAX_CHUNKS, Buffer, Collective
from stretto.collectives.language import Chunks, Operation, OperationKind, Program


@dataclass(frozen=True)
class Parts:
    """A program in instances: its collective in finer chunks, and the instances of its operations in program order."""

    collective: Collective
    operations: tuple[Operation, ...]
    scratch_chunks: tuple[int, ...]


def split_into_instances(program: Program, instances: int) -> Parts:
    """Split each operation into `instances`, times those of its parallelized fragment, each on a part of the data.

    All chunks are divided as finely as some operation needs it, and no finer: into `granularity` parts each. Part p of
    an operation on `count` chunks is the p-th of equal, contiguous pieces of them. Where operations carry different
    numbers of chunks, a piece of one may overlap pieces of several instances of another: so dependencies are found
    after this pass.

    Raises ValueError for a number of instances that is not positive, or more chunks than a buffer may have.
    """
    if instances < 1:
        raise ValueError(f"a program has at least 1 instance, not {instances}")
    pieces_and_sizes = {(instances * operation.instances, operation.source.size) for operation in program.operations}
    granularity = lcm(1, *(pieces // gcd(pieces, size) for pieces, size in pieces_and_sizes))
    stride = max((operation.instances for operation in program.operations), default=1)
    largest = max(program.collective.chunks_per_loop, *program.scratch_chunks)
    if largest * granularity > MAX_CHUNKS:
        raise ValueError(
            f"{instances} instances cut {largest} chunks into {granularity} parts each: more than {MAX_CHUNKS} chunks"
        )
    operations = []
    for operation in program.operations:
        source, destination, parallel = operation.source, operation.destination, operation.instances
        pieces = instances * parallel
        size = source.size * granularity // pieces
        for piece in range(pieces):
            shift = piece * size
            operations.append(
                operation._replace(
                    source=source._replace(start=source.start * granularity + shift, size=size),
                    destination=destination._replace(start=destination.start * granularity + shift, size=size),
                    part=piece // parallel * stride + piece % parallel,
                )
            )
    return Parts(
        program.collective.refined(granularity),
        tuple(operations),
        tuple(chunks * granularity for chunks in program.scratch_chunks),
    )


class Dependency(NamedTuple):
    """The operation that comes before, and the rank on which it must have ended."""

    operation: int
    rank: int


@dataclass(frozen=True)
class ChunkDag:
    """The operations, and the true and false dependencies of each.

    read_by_others[i]: how many operations read what operation i wrote; survives[i]: whether the collective's
    postcondition concerns a chunk that it wrote last.
    """

    parts: Parts
    true: tuple[tuple[Dependency, ...], ...]
    false: tuple[tuple[Dependency, ...], ...]
    read_by_others: tuple[int, ...]
    survives: tuple[bool, ...]


def find_dependencies(parts: Parts) -> ChunkDag:
    """Find the dependencies of these operations, which are in an order in which they can be executed."""
    ranks = range(parts.collective.ranks)
    # By rank and buffer, for each chunk: the operation that wrote it last, and those that have read it since.
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
