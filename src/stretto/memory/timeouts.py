"""Time limits of process groups, which are those of their collectives and of kernels that wait for a peer."""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from stretto.memory.exchange import find_own_rank

MAX_SECONDS = 30 * 24 * 3600.0
"""The longest time limit, a month: c10d and kernels count in units in which a year would overflow."""


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
