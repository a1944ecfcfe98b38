# SPDX-License-Identifier: Apache-2.0
"""One process group for a set of ranks and a purpose, shared by all in this process that need the same.

A group costs threads and open files (gloo), or a communicator and GPU memory (NCCL), and torch frees neither before
`destroy_process_group`. So groups are kept under what they are for, and the next holder gets the same one.

`torch.distributed.new_group` is a collective of all ranks of the job. So whether a group exists must be known alike on
all of them: it is kept under the whole partition of the ranks, not this rank's part; and a holder that is garbage
collected (when, differs from rank to rank) leaves its groups to the next one. Only `SharedGroups.close`, which all
ranks call, destroys them.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from stretto.memory.groups import group_timeout, make_local_group, next_group_number, set_timeout, store_all_gather

Partition = tuple[tuple[int, ...], ...]
_Key = tuple[Partition, str, str | None, timedelta]


@dataclass
class _Shared:
    """A group, None on ranks outside of it, and how many holders it has. torch keeps the group alive."""

    group: "weakref.ref[dist.ProcessGroup] | None"
    holders: int = 0

    def is_usable(self) -> bool:
        return self.group is None or self.group() in dist.distributed_c10d._world.pg_map


@dataclass
class _Job:
    """The groups of one default process group. destroyed: partitions of groups that were."""

    world: "weakref.ref[dist.ProcessGroup]"
    shared: dict[_Key, _Shared]
    destroyed: set[Partition]


_job: _Job | None = None


class SharedGroups:
    """The shared groups that one holder uses."""

    def __init__(self) -> None:
        self._held: dict[_Key, _Shared] = {}

    def get(
        self,
        partition: Iterable[Iterable[int]],
        purpose: str,
        *,
        timeout: timedelta,
        backend: str | None = None,
        description: str | None = None,
    ) -> dist.ProcessGroup | None:
        """Return this rank's group of a partition, which is made for its first holder; None if the rank is in none.

        partition: the ranks of each group, by their numbers in the job. purpose: groups of the same ranks are shared
        for one purpose only: calls from another thread, or calls that others may not delay, need their own.
        backend: None for the job's. description: what torch calls the group, by default the purpose.

        Collective over all ranks of the job, with the same arguments. But with a partition of just this rank, which
        needs no other.
        """
        groups: Partition = tuple(sorted(tuple(sorted(ranks)) for ranks in partition))
        key, shared = (groups, purpose, backend, timeout), _find_job().shared
        if key not in shared or not shared[key].is_usable():
            made = _make(groups, backend, timeout, description or purpose)
            shared[key] = _Shared(None if made is None else weakref.ref(made))
        if self._held.get(key) is not shared[key]:
            self._held[key] = shared[key]
            shared[key].holders += 1
        group = shared[key].group
        return None if group is None else group()

    def get_for_all(self, purpose: str, *, timeout: timedelta) -> dist.ProcessGroup:
        """Return a gloo group of all ranks of the job for a purpose, as `get`. Collective."""
        group = self.get([range(dist.get_world_size())], purpose, timeout=timeout, backend="gloo")
        assert group is not None
        return group

    def close(self) -> None:
        """Give the groups back; those that nobody else holds are destroyed. Collective over all ranks of the job.

        PeerError, and nothing is destroyed, if a rank does not come within the job's time limit.
        """
        if dist.group.WORLD is None:  # and with it all groups
            self._held.clear()
            return
        job = _find_job()
        last = [key for key, shared in self._held.items() if job.shared.get(key) is shared and shared.holders == 1]
        world = job.world()
        if any(len(ranks) > 1 for (partition, *_) in last for ranks in partition):
            assert world is not None
            # Closing a connection from which a peer still reads would take the last bytes from it.
            store_all_gather("close", world, "stretto shared groups")
        for shared in self._held.values():
            shared.holders -= 1
        for key in last:
            shared = job.shared.pop(key)
            job.destroyed.add(key[0])
            if shared.group is not None and shared.is_usable():
                dist.destroy_process_group(shared.group())
        self._held.clear()


def _find_job() -> _Job:
    """The record of the default process group, which begins anew when that does."""
    global _job
    world = dist.group.WORLD
    assert world is not None
    if _job is None or _job.world() is not world:
        _job = _Job(weakref.ref(world), {}, set())
    return _job


def _make(partition: Partition, backend: str | None, timeout: timedelta, description: str) -> dist.ProcessGroup | None:
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    made: dist.ProcessGroup | None = None
    if partition == ((rank,),):
        made = make_local_group([rank], backend, timeout, next_group_number(), description)
    elif _can_split(partition, backend, world):
        made = dist.split_group(world, list(map(list, partition)), timeout=timeout, group_desc=description)
    else:
        for ranks in partition:
            group = dist.new_group(list(ranks), timeout, backend, group_desc=description)
            if rank in ranks:
                made = group
    if made is not None and group_timeout(made) != timeout.total_seconds():
        set_timeout(made, timeout)
    return made


def _can_split(partition: Partition, backend: str | None, world: dist.ProcessGroup) -> bool:
    """Check whether one call makes all groups of a partition: NCCL's communicator is connected, and can be split.

    torch names a split by its ranks, and one that was destroyed has left its addresses in the store under this name.
    """
    return (
        backend is None
        and getattr(world, "bound_device_id", None) is not None
        and torch.accelerator.is_available()
        and sorted(chain(*partition)) == list(range(world.size()))
        and partition not in _find_job().destroyed
    )
