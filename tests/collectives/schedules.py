# SPDX-License-Identifier: Apache-2.0
"""Schedules written by hand."""

from stretto.collectives import Collective, RankProgram, Schedule, Step, StepType, ThreadBlock


def step(type: str, source=None, destination=None, size: int = 1, waits_for=None, awaited: bool = False) -> Step:
    """A step; its chunks as (buffer, index)."""
    source_buffer, source_index = source or ("in", -1)
    destination_buffer, destination_index = destination or ("out", -1)
    from stretto.collectives import Buffer

    return Step(
        StepType(type),
        Buffer(source_buffer),
        source_index,
        Buffer(destination_buffer),
        destination_index,
        size,
        waits_for,
        awaited,
    )


def block(*steps: Step, send: int | None = None, receive: int | None = None, channel: int = 0) -> ThreadBlock:
    """A thread block."""
    return ThreadBlock(send, receive, channel, steps)


def schedule(collective: Collective, *ranks: list[ThreadBlock], scratch: int = 8, **options) -> Schedule:
    options = {"in_place": collective.in_place, "out_of_place": not collective.in_place} | options
    programs = tuple(
        RankProgram(collective.input_chunks, collective.output_chunks, scratch, tuple(blocks)) for blocks in ranks
    )
    return Schedule("by hand", collective, "Simple", programs, **options)
