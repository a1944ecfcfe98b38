# SPDX-License-Identifier: Apache-2.0
"""Follows input chunks through a verified schedule: where averages divide, and which writes are longer than a place."""

from typing import NamedTuple

from stretto.collectives.collective import Collective
from stretto.collectives.executor.cuda.fused.program import ReduceChunks, StepPlace, sum_inputs, trace_schedule
from stretto.collectives.schedule import Schedule


class Divisions(NamedTuple):
    """The steps at which an average divides by the number of ranks: the sum that they make, or what they add."""

    of_sums: frozenset[StepPlace] = frozenset()
    of_left: frozenset[StepPlace] = frozenset()
    of_right: frozenset[StepPlace] = frozenset()


def find_divisions(schedule: Schedule, collective: Collective, *, of_inputs: bool) -> Divisions:
    """Find where an average divides: each sum over all ranks once, or with `of_inputs` each input before it is added.

    The left operand of a step is the received or the destination's value, the right one its source. Raises ValueError
    for a step that would have to divide only some of its chunks.
    """
    trace = trace_schedule(schedule, collective)
    inputs = sum_inputs(trace)
    made = {(rank, what.value): what for rank, what in trace.operations if isinstance(what, ReduceChunks)}
    sums = {
        place: [made[place[0], value] for value in values]
        for place, values in trace.steps.items()
        if schedule.ranks[place[0]].thread_blocks[place[1]].steps[place[2]].type.reduces
    }

    def find_steps(side: str, count: int, what: str) -> frozenset[StepPlace]:
        """The steps whose sums, or operands, all consist of so many inputs."""
        answers = {
            place: {len(inputs[place[0], getattr(each, side)]) == count for each in of_step}
            for place, of_step in sums.items()
        }
        for (rank, block, at), answer in answers.items():
            if len(answer) > 1:
                step = schedule.ranks[rank].thread_blocks[block].steps[at]
                raise ValueError(
                    f"{schedule.name} cannot average: rank {rank}, thread block {block}, step {at} "
                    f"({step.type.value}) {what} some chunks only"
                )
        return frozenset(place for place, answer in answers.items() if answer == {True})

    if not of_inputs:
        return Divisions(of_sums=find_steps("value", collective.ranks, "completes the sums of"))
    left, right = (find_steps(side, 1, "adds one rank's input to") for side in ("left", "right"))
    return Divisions(of_left=left, of_right=right)


def find_narrowing_writes(
    schedule: Schedule, collective: Collective, rank: int, block_chunks: int
) -> frozenset[tuple[int, int]]:
    """The writes of a rank that may put a longer value into a shorter place of its input or output.

    Each is a pair of chunks of a block: the value is as long as the first, the place as long as the second. Chunks do
    not get longer along a block, so the first comes before the second.
    """
    trace = trace_schedule(schedule, collective)
    inputs, found = sum_inputs(trace), set()
    for (writer, value), index in trace.writes:
        if writer == rank and inputs[rank, value]:
            longest = min(given % block_chunks for _, given in inputs[rank, value])
            if longest < index % block_chunks:
                found.add((longest, index % block_chunks))
    return frozenset(found)
