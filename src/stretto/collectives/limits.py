# SPDX-License-Identifier: Apache-2.0
"""Checks a schedule against the limits of a runtime that loads schedule files (RCCL)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from stretto.collectives.collective import Buffer
from stretto.collectives.schedule import RankProgram, Schedule, Step, StepType


@dataclass(frozen=True)
class Limits:
    """A runtime's limits: steps a thread block, thread blocks a rank, channels, chunks a step, and its collectives.

    peers: thread blocks of a rank that send, or receive, over one channel.
    """

    name: str
    steps: int
    thread_blocks: int
    channels: int
    peers: int
    chunks: int
    collectives: frozenset[str]


LIMITS = {
    # ROCm's RCCL: msccl_struct.h (MSCCL_MAX_NUM_STEPS, MSCCL_MAX_NUM_THREAD_BLOCKS, MSCCL_MAX_COUNT,
    # MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL) and its parser.
    "rccl": Limits(
        "rccl",
        steps=64,
        thread_blocks=64,
        channels=32,
        peers=32,
        chunks=71,
        collectives=frozenset({"allreduce", "allgather", "reducescatter", "alltoall", "alltoallv", "broadcast"})
        | {"reduce", "gather", "scatter", "send", "recv"},
    )
}


def exceeded_limits(schedule: Schedule, limits: Limits) -> list[str]:
    """Describe how a schedule exceeds the limits; an empty list if the runtime can load it."""
    found = []
    if schedule.collective.name not in limits.collectives:
        found.append(f"{limits.name} knows no collective {schedule.collective.name!r}")
    if schedule.channels > limits.channels:
        found.append(f"{schedule.channels} channels; {limits.name} has at most {limits.channels}")
    for rank, program in enumerate(schedule.ranks):
        blocks = program.thread_blocks
        if len(blocks) > limits.thread_blocks:
            found.append(
                f"rank {rank} has {len(blocks)} thread blocks; {limits.name} has at most {limits.thread_blocks}"
            )
        for number, block in enumerate(blocks):
            if len(block.steps) > limits.steps:
                found.append(
                    f"rank {rank}, thread block {number} has {len(block.steps)} steps; {limits.name} has at most "
                    f"{limits.steps}"
                )
            largest = max((step.size for step in block.steps), default=0)
            if largest > limits.chunks:
                found.append(
                    f"rank {rank}, thread block {number} handles {largest} chunks at once; {limits.name} at most "
                    f"{limits.chunks}"
                )
        found += _crowded_channels(rank, program, limits)
        if _copies_first(schedule, rank):
            found.append(f"rank {rank}, copies before the first step; {limits.name} does not do them")
        found += [f"rank {rank}, {problem}" for problem in _misread(program, limits.name)]
    return found


def _crowded_channels(rank: int, program: RankProgram, limits: Limits) -> Iterator[str]:
    for what, peers in (
        ("send", [block.channel for block in program.thread_blocks if block.send_peer is not None]),
        ("receive", [block.channel for block in program.thread_blocks if block.receive_peer is not None]),
    ):
        for channel, count in Counter(peers).items():
            if count > limits.peers:
                yield (
                    f"rank {rank}: {count} thread blocks {what} on channel {channel}; {limits.name} has at most "
                    f"{limits.peers}"
                )


def _copies_first(schedule: Schedule, rank: int) -> bool:
    """Check whether its copies before the first step do anything: RCCL's parser reads only <tb>."""
    copies, in_place = schedule.ranks[rank].copies, schedule.collective.aliased()
    return any(
        schedule.out_of_place
        or in_place.place(rank, Buffer.IN, source) != in_place.place(rank, Buffer.OUT, destination)
        for source, destination in copies
    )


def _misread(program: RankProgram, name: str) -> Iterator[str]:
    """The steps that RCCL's parser changes: it drops nops and merges reductions."""
    for number, block in enumerate(program.thread_blocks):
        for at, (step, following) in enumerate(zip_longest(block.steps, block.steps[1:])):
            here = f"thread block {number}, step {at}"
            if step.type is StepType.NOP:
                if step.awaited:
                    yield f"{here}: other steps wait for a nop, whose end {name} never publishes"
                if following is None or following.waits_for is None:
                    yield f"{here}: {name} takes a nop only before a step that waits itself"
            elif following is not None and merges(step, following) and step.size != following.size:
                yield f"{here}: {name} takes it and the next reduction for one of {following.size} chunks"


def merges(one: Step, following: Step) -> bool:
    """Check whether RCCL merges two reductions in a row: into the same chunks, from one buffer, without a wait."""
    return (
        one.type is following.type is StepType.REDUCE
        and following.waits_for is None
        and not one.awaited
        and (one.source_buffer, one.destination_buffer, one.destination)
        == (following.source_buffer, following.destination_buffer, following.destination)
    )
