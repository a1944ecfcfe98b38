"""What each rank tells all others, within a time limit."""

import os
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store, default_pg_timeout

from stretto.memory.symmetric import PeerError

T = TypeVar("T")


MAX_SECONDS = 30 * 24 * 3600.0
"""The longest time limit, a month: c10d and kernels count in units in which a year would overflow."""


def find_own_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group (None: all), and the group's size. ValueError where it has none."""
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group, or launch with torchrun"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"this process (rank {dist.get_rank()}) is not in the group")
    return rank, dist.get_world_size(group)


def require_same(own: tuple[int, int, str], other: tuple[int, int, str], rank: int, peer: int) -> None:
    """ValueError where two ranks allocate other things: (bytes, signals, what it is for people)."""
    if own == other:
        return
    asked = [what or f"{size} bytes and {signals} signals" for size, signals, what in (own, other)]
    raise ValueError(f"all ranks must allocate the same: rank {rank} asks for {asked[0]}, rank {peer} for {asked[1]}")


def meet(group: dist.ProcessGroup | None, timeout: float) -> None:
    """Wait for all ranks of the group, which all call it, for so many seconds; raises as `exchange`."""
    rank, size = find_own_rank(group)
    try:
        (dist.group.WORLD if group is None else group).monitored_barrier(timedelta(seconds=timeout))  # type: ignore[union-attr]
    except RuntimeError as error:
        raise PeerError(f"rank {rank} of {size} did not meet all ranks within {timeout:g} s: {error}") from error


def exchange(value: T, group: dist.ProcessGroup | None, timeout: float) -> list[T]:
    """Every rank's `value`, in rank order. All ranks of the group call it.

    `timeout` is in seconds. PeerError names a rank that did not come in time; the group is not to be used after it.
    ValueError on a process that is not in the group.
    """
    # Gathering has no time limit of its own and names nobody: only those go there who know that all will.
    meet(group, timeout)
    values: list[T | None] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise PeerError(f"rank {dist.get_rank(group)} of {len(values)} lost another rank: {error}") from error
    return values  # type: ignore[return-value]


def is_debugging() -> bool:
    """Whether ranks compare each of their calls before they make it: STRETTO_DEBUG is set, and not to 0."""
    return os.environ.get("STRETTO_DEBUG", "") not in ("", "0")


def store_all_gather(said: str, group: dist.ProcessGroup, topic: str, number: int, timeout: float) -> list[str]:
    """What every rank says as the number-th of a topic, from 1 on, in rank order. All ranks of the group call it.

    It goes through the store, from host to host: nothing is done on a device. `timeout` is in seconds. PeerError names
    a rank that did not say anything in time; what this rank has said is taken back then, and its number is free.
    """
    rank, size = find_own_rank(group)
    store = _get_process_group_store(group)
    store.set(f"{topic} {number} {rank}", said)
    heard = []
    for peer in range(size):
        key = f"{topic} {number} {peer}"
        try:
            store.wait([key], timedelta(seconds=timeout))
        except RuntimeError as error:
            with suppress(RuntimeError):  # of a store that is gone
                store.delete_key(f"{topic} {number} {rank}")  # who comes now is not to go on alone
            raise PeerError(
                f"rank {rank} of {size} calls {said}, and rank {peer} has called nothing like it within {timeout:g} s"
            ) from error
        heard.append(store.get(key).decode())
    # Who says this has heard all of the one before, which nobody will read again.
    if number > 1:
        store.delete_key(f"{topic} {number - 1} {rank}")
    return heard


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """The time limit of a group (None: the default group) in seconds.

    This is `timeout` of `init_process_group` or `new_group`, or what `set_timeout` has made of it since: the shortest
    limit among the group's backends where these differ, and torch's default where no backend tells its own. ValueError
    where there is no process group.
    """
    if group is None:
        find_own_rank(None)
        group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    limits = []
    for device in group._device_types:
        with suppress(RuntimeError, AttributeError):  # no backend for this device, or one without options
            backend = group._get_backend(device)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper without options around each backend.
            limit: timedelta = getattr(backend, "wrapped_pg", backend).options._timeout
            limits.append(limit)
    return min(limits, default=default_pg_timeout).total_seconds()


def check_timeout(timeout: timedelta | float) -> timedelta:
    """The time limit, given in seconds or as a timedelta. ValueError unless it is more than 0 and at most 30 days."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ValueError(f"timeout is {timeout!r}, but must be a number of seconds or a timedelta, such as 600")
    if not 0.001 <= seconds <= MAX_SECONDS:  # c10d counts in milliseconds, and 0 would mean none given
        nearest = min(max(seconds, 0.001), MAX_SECONDS) if seconds == seconds else 600
        raise ValueError(
            f"timeout is {seconds:g} s, but must be at least 0.001 s and at most {MAX_SECONDS:g} s; "
            f"the nearest that would do is {nearest:g}"
        )
    return timedelta(seconds=seconds)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the time limit of the calls of the group that are made from now on; `group_timeout` tells it."""
    for device in group._device_types:
        backend = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around each backend.
        getattr(backend, "wrapped_pg", backend).set_timeout(timeout)
