# SPDX-License-Identifier: Apache-2.0
"""Follows input chunks through a verified schedule: which sums each step makes, and what the buffers are made to hold.

A value is a set of input chunks (rank, index): the sum of them, whatever its order.
"""

from typing import NamedTuple

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.schedule import Schedule, StepType
from stretto.collectives.verifier.graph import build_graph, linear_order

StepPlace = tuple[int, int, int]
"""A step: its rank, its thread block and its number there."""
Sum = frozenset[tuple[int, int]]
"""A value, by the input chunks (rank, index) that it is the sum of."""


class ValueTrace(NamedTuple):
    """What a schedule's steps make.

    steps: each step's values, one for each of its chunks. writes: all writes to input and output buffers, as (rank,
    index of the chunk in its buffer, value).
    """

    steps: dict[StepPlace, list[Sum]]
    writes: list[tuple[int, int, Sum]]


def trace_values(schedule: Schedule, collective: Collective) -> ValueTrace:
    """Run a verified schedule on sets of input chunks instead of numbers."""
    graph = build_graph(schedule, [])
    order, _ = linear_order(graph)
    held: dict[tuple[int, Buffer, int], Sum] = {
        (rank, *collective.place(rank, Buffer.IN, index)): frozenset(((rank, index),))
        for rank in range(collective.ranks)
        for index in range(collective.input_chunks)
    }
    sent: dict[int, list[Sum]] = {}
    trace = ValueTrace({}, [])

    def read(rank: int, buffer: Buffer, index: int) -> Sum:
        return held.get((rank, *collective.place(rank, buffer, index)), frozenset())

    def write(rank: int, buffer: Buffer, index: int, value: Sum) -> None:
        held[rank, *collective.place(rank, buffer, index)] = value
        if buffer is not Buffer.SCRATCH:
            trace.writes.append((rank, index, value))

    for rank, program in enumerate(schedule.ranks):
        for source, destination in program.copies:
            write(rank, Buffer.OUT, destination, read(rank, Buffer.IN, source))
    for number in order:
        step, place = graph.steps[number], graph.places[number]
        if step.type is StepType.NOP:
            continue
        rank = place[0]
        received = sent.pop(graph.sender[number], []) if step.type.receives else []
        values = []
        for at in range(step.size):
            value = received[at] if step.type.receives else frozenset()
            if step.type.reads_source:
                source_value = read(rank, step.source_buffer, step.source + at)
                if step.type is StepType.REDUCE:
                    value = read(rank, step.destination_buffer, step.destination + at)
                value = value | source_value
            values.append(value)
            if step.type.writes_destination:
                write(rank, step.destination_buffer, step.destination + at, value)
        if step.type.sends:
            sent[number] = values
        trace.steps[place] = values
    return trace


def find_completing_steps(schedule: Schedule, collective: Collective) -> frozenset[StepPlace]:
    """The steps that complete a sum over all ranks, so that an average divides there.

    Raises ValueError for a step that completes the sums of only some of its chunks.
    """
    found: set[StepPlace] = set()
    for place, values in trace_values(schedule, collective).steps.items():
        rank, block, at = place
        step = schedule.ranks[rank].thread_blocks[block].steps[at]
        if not step.type.reduces:
            continue
        are_whole = {len(value) == collective.ranks for value in values}
        if len(are_whole) > 1:
            raise ValueError(
                f"{schedule.name} cannot average: rank {rank}, thread block {block}, step {at} ({step.type.value}) "
                "completes the sums of some chunks only"
            )
        if are_whole == {True}:
            found.add(place)
    return frozenset(found)


def find_narrowing_writes(
    schedule: Schedule, collective: Collective, rank: int, block_chunks: int
) -> frozenset[tuple[int, int]]:
    """The writes of a rank that may put a longer value into a shorter place of its input or output.

    Each is a pair of chunks of a block: the value is as long as the first, the place as long as the second. Chunks do
    not get longer along a block, so the first comes before the second.
    """
    found = set()
    for writer, index, value in trace_values(schedule, collective).writes:
        if writer == rank and value:
            longest = min(given % block_chunks for _, given in value)
            if longest < index % block_chunks:
                found.add((longest, index % block_chunks))
    return frozenset(found)
