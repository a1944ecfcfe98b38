"""The time limit of a process group: what its collectives, and waits of Stretto's kernels, may take."""

from datetime import timedelta

import torch
import torch.distributed as dist

MAX_SECONDS = 30 * 24 * 3600.0
"""The longest time limit, a month: c10d and kernels count in units in which a year would overflow."""


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


def find_timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    """The time limit of the group (None: all ranks): of `init_process_group`, `new_group` or `set_timeout`."""
    known = dist.group.WORLD if group is None else group
    if known is None:
        raise ValueError("there is no process group: call torch.distributed.init_process_group first")
    devices = sorted((device.type for device in known._device_types), reverse=True)
    options = [getattr(known._get_backend(torch.device(device)), "options", None) for device in devices]
    found = [limit for one in options if (limit := getattr(one, "_timeout", None)) is not None]
    return found[0] if found else dist.distributed_c10d._get_default_timeout(dist.get_backend(known))


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Change the time limit of the calls of the group that are made from now on."""
    for device in group._device_types:
        group._get_backend(device).set_timeout(timeout)
