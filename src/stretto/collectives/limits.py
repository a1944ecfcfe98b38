"""What a runtime can hold of a schedule."""

from dataclasses import dataclass

from stretto.collectives.schedule import Schedule


@dataclass(frozen=True)
class Limits:
    """A runtime's limits: steps a thread block, thread blocks a rank, channels, chunks a step, and its collectives."""

    name: str
    steps: int
    thread_blocks: int
    channels: int
    chunks: int
    collectives: frozenset[str]


LIMITS = {
    # ROCm's RCCL: msccl_struct.h (MSCCL_MAX_NUM_STEPS, MSCCL_MAX_NUM_THREAD_BLOCKS, MSCCL_MAX_COUNT) and its parser.
    "rccl": Limits(
        "rccl",
        64,
        64,
        32,
        71,
        frozenset({"allreduce", "allgather", "reducescatter", "alltoall", "alltoallv", "broadcast", "reduce"})
        | {"gather", "scatter", "send", "recv"},
    )
}


def exceeded_limits(schedule: Schedule, limits: Limits) -> list[str]:
    """What of this schedule is over the limits, for people; none: the runtime takes it."""
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
    return found
