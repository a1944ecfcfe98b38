"""Instances: every operation of a parallelized fragment becomes several, each on a part of the data (section 5.1).

All chunks are cut as finely as some operation needs it, and no finer: `granularity` parts each. Part p of an operation
on `count` chunks is the p-th of equal, contiguous pieces of them. Where operations carry different numbers of chunks, a
piece of one lies across pieces of several of another; that is why dependencies are found after this pass and not
before it.
"""

from dataclasses import dataclass
from math import gcd, lcm

from stretto.collectives.collective import MAX_CHUNKS, Collective
from stretto.collectives.language import Operation, Program


@dataclass(frozen=True)
class Parts:
    """A program after this pass: its collective in finer chunks, and its operations' instances in program order."""

    collective: Collective
    operations: tuple[Operation, ...]
    scratch_chunks: tuple[int, ...]


def split_into_instances(program: Program, instances: int) -> Parts:
    """`instances` copies of the whole program, times those of its parallelized fragments.

    ValueError for a number of instances that is not positive, or more chunks than a buffer may have.
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
