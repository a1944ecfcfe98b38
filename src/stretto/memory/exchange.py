"""What each rank tells all others, within a time limit."""

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from stretto.memory.waiting import PeerError

T = TypeVar("T")


def exchange(value: T, group: dist.ProcessGroup | None, timeout: float) -> list[T]:
    """Every rank's `value`, in rank order. All ranks of the group call it.

    `timeout` is in seconds. PeerError names a rank that did not come in time; the group is not to be used after it.
    ValueError on a process that is not in the group.
    """
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group, or launch with torchrun"
        )
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError(f"this process (rank {dist.get_rank()}) is not in the group")
    values: list[T | None] = [None] * size
    try:
        # Gathering has no time limit of its own and names nobody: only those go there who know that all will.
        (dist.group.WORLD if group is None else group).monitored_barrier(timedelta(seconds=timeout))  # type: ignore[union-attr]
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise PeerError(f"rank {rank} of {size} did not hear from all ranks within {timeout:g} s: {error}") from error
    return values  # type: ignore[return-value]
