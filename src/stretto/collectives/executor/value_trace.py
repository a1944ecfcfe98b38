# SPDX-License-Identifier: Apache-2.0
"""Follows input chunks through a verified schedule: the sums of each step, and the final contents of the buffers.

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
    """Values that a schedule's steps make.

    steps: each step's values, one for each of its chunks. operands: of each step that adds, the pairs that it adds:
    what it received or its destination held, and its source. writes: all writes to input and output buffers, as (rank,
    index of the chunk in its buffer, value).
    """

    steps: dict[StepPlace, list[Sum]]
    operands: dict[StepPlace, list[tuple[Sum, Sum]]]
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
    trace = ValueTrace({}, {}, [])

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
                if step.type.reduces:
                    trace.operands.setdefault(place, []).append((value, source_value))
                value = value | source_value
            values.append(value)
            if step.type.writes_destination:
                write(rank, step.destination_buffer, step.destination + at, value)
        if step.type.sends:
            sent[number] = values
        trace.steps[place] = values
    return trace


class Divisions(NamedTuple):
    """The steps at which an average divides by the number of ranks: the sum that they make, or what they add."""

    of_sums: frozenset[StepPlace] = frozenset()
    of_left: frozenset[StepPlace] = frozenset()
    of_right: frozenset[StepPlace] = frozenset()


def find_divisions(schedule: Schedule, collective: Collective, *, of_inputs: bool) -> Divisions:
    """Where an average divides: each sum over all ranks once, or with `of_inputs` each rank's input before it is added.

    The left operand of a step is the received or the destination's value, the right one its source. Raises ValueError
    for a step that would have to divide only some of its chunks.
    """
    trace = trace_values(schedule, collective)
    if not of_inputs:
        are_whole = {
            place: {len(value) == collective.ranks for value in trace.steps[place]} for place in trace.operands
        }
        return Divisions(of_sums=_find_steps(schedule, are_whole, "completes the sums of"))
    are_inputs = [
        {place: {len(pair[side]) == 1 for pair in pairs} for place, pairs in trace.operands.items()} for side in (0, 1)
    ]
    left, right = (_find_steps(schedule, inputs, "adds one rank's input to") for inputs in are_inputs)
    return Divisions(of_left=left, of_right=right)


def _find_steps(schedule: Schedule, answers: dict[StepPlace, set[bool]], what: str) -> frozenset[StepPlace]:
    """The steps that do something to their chunks. ValueError for one that does it to some of them only."""
    for (rank, block, at), answer in answers.items():
        if len(answer) > 1:
            step = schedule.ranks[rank].thread_blocks[block].steps[at]
            raise ValueError(
                f"{schedule.name} cannot average: rank {rank}, thread block {block}, step {at} ({step.type.value}) "
                f"{what} some chunks only"
            )
    return frozenset(place for place, answer in answers.items() if answer == {True})


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
