# SPDX-License-Identifier: Apache-2.0
"""Queries of a process group: this process's rank, the time limit, and exchanges that end in time; and its end."""

import atexit
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store, default_pg_timeout

from stretto.cluster.local_ranks import name_node, require_declared
from stretto.memory.compilation import limit_of_meeting
from stretto.memory.plain_data import all_gather_data
from stretto.memory.symmetric import PeerError
from stretto.quantities import read_switch

T = TypeVar("T")
MAX_SECONDS = 30 * 24 * 3600.0
"""The longest time limit, 30 days: c10d and kernels count in units in which a year would overflow."""
_numbers: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
_next_number = 1000  # more than the groups that a program makes by itself
MAX_PREPARATION = 3600.0
"""Seconds after which ranks no longer wait for one that prepares itself: it may have died."""


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


def group_timeout(group: dist.ProcessGroup | None) -> float:
    """The time limit of a group (None: the default group) in seconds.

    This is `timeout` of `init_process_group` or `new_group`, or the last `set_timeout`: the shortest limit of the
    group's backends where they differ, and torch's default where no backend reports one. ValueError where there is no
    process group.
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
    """Convert a time limit in seconds to a timedelta. ValueError unless it is more than 0 and at most 30 days."""
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
    """Set the time limit of all later calls of the group; `group_timeout` returns it."""
    for device in group._device_types:
        backend = group._get_backend(device)
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around each backend.
        getattr(backend, "wrapped_pg", backend).set_timeout(timeout)


def exchange(value: T, group: dist.ProcessGroup | None, timeout: float, kind: Any = Any) -> list[T]:
    """`all_gather_data` with a time limit: returns every rank's `value`, in rank order. All ranks of the group call it.

    `timeout` is in seconds. PeerError names a rank that did not arrive in time; do not use the group after it.
    ValueError on a process that is not in the group.
    """
    # all_gather has no time limit of its own and names no rank: enter it only once all ranks are known to come.
    timed_barrier(group, timeout)
    try:
        return all_gather_data(value, group, kind)
    except PeerError:
        raise
    except RuntimeError as error:
        rank, size = find_own_rank(group)
        raise PeerError(f"rank {rank} of {size} lost another rank: {error}") from error


def timed_barrier(group: dist.ProcessGroup | None, timeout: float) -> None:
    """Wait until all ranks of the group have called it; raises as `exchange` does after `timeout` seconds.

    The first one after this process has loaded a kernel also has the time to compile it (`stretto.memory.compilation`).
    """
    rank, size = find_own_rank(group)
    timeout = limit_of_meeting(group, timeout)
    try:
        (dist.group.WORLD if group is None else group).monitored_barrier(timedelta(seconds=timeout))  # type: ignore[union-attr]
    except RuntimeError as error:
        raise PeerError(f"rank {rank} of {size} did not meet all ranks within {timeout:g} s: {error}") from error


def require_same(own: tuple[int, int, str], other: tuple[int, int, str], rank: int, peer: int) -> None:
    """ValueError where two ranks allocate different things: (bytes, signals, description)."""
    if own == other:
        return
    asked = [what or f"{size} bytes and {signals} signals" for size, signals, what in (own, other)]
    raise ValueError(f"all ranks must allocate the same: rank {rank} asks for {asked[0]}, rank {peer} for {asked[1]}")


def next_group_number() -> int:
    """The least number that `make_local_group` may give a group here: more than it has given, and than torch counts."""
    return max(_next_number, len(dist.distributed_c10d._world.pg_names))


def make_local_group(
    members: list[int], backend: str | None, limit: timedelta, number: int, description: str | None = None
) -> dist.ProcessGroup:
    """Make a group of these ranks, by their numbers in the job; only they call it.

    number: the greatest `next_group_number` of them. torch names such a group by its ranks and by how many groups this
    rank has (from 2.15 on, has made). Ranks differ in that; and a number that comes again, once groups were destroyed,
    gives a name that is in use, or whose addresses in the store are those of a group that is gone. So torch counts
    `number` groups meanwhile, and as many as before afterwards, as it names groups of all ranks by that too.
    """
    global _next_number
    world = dist.distributed_c10d._world
    names: dict[Any, Any] = world.pg_names
    others, made_before = [object() for _ in range(number - len(names))], world.group_count
    names.update(dict.fromkeys(others, ""))
    world.group_count = number
    try:
        made: dist.ProcessGroup = dist.new_group(
            members, limit, backend, use_local_synchronization=True, group_desc=description
        )
    finally:
        world.group_count = made_before
        for other in others:
            del names[other]
    _next_number = number + 1
    return made


def find_nodes(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The number of each rank's node; empty if all ranks are on one. Collective."""
    names = all_gather_data(name_node(dist.get_rank(), dist.get_world_size()), group, str)
    require_declared(names)
    order = list(dict.fromkeys(names))
    return tuple(map(order.index, names)) if len(order) > 1 else ()


def make_node_group(
    group: dist.ProcessGroup, nodes: Sequence[int], backend: str | None, number: int
) -> dist.ProcessGroup:
    """Make a group of those ranks that are on this one's node. nodes: each rank's; number: as of `make_local_group`."""
    here = nodes[group.rank()]
    near = [dist.get_global_rank(group, rank) for rank, node in enumerate(nodes) if node == here]
    return make_local_group(near, backend, timedelta(seconds=group_timeout(group)), number)


def is_debugging() -> bool:
    """Check whether ranks compare all calls before they make them: STRETTO_DEBUG is 1."""
    return read_switch("STRETTO_DEBUG")


def prepare_together(prepare: Callable[[], object], store: dist.Store, size: int, timeout: timedelta) -> None:
    """Run what may take a rank minutes, such as a compilation, and return once all ranks of a new group have run it.

    store: the group's, which has no backend yet; size: of the group. `timeout` is for ranks that do not come: it does
    not run while one prepares itself. PeerError after it. Raises what `prepare` raises here; the others go on.
    """
    store.add("begun", 1)
    try:
        prepare()
    finally:
        if store.add("ended", 1) >= size:
            store.set("all have", "")
    started = time.monotonic()
    while True:
        try:
            return store.wait(["all have"], timeout)
        except RuntimeError as error:
            begun, ended, waited = store.add("begun", 0), store.add("ended", 0), time.monotonic() - started
            if begun == ended or waited > MAX_PREPARATION:
                raise PeerError(f"{ended} of a new group's {size} ranks came within {waited:.0f} s: {error}") from error


def next_number(group: dist.ProcessGroup, topic: str) -> int:
    """Count the calls for this group and topic: 1, 2, and so on. By the group itself, since names come again."""
    counts = _numbers.setdefault(group, Counter())
    counts[topic] += 1
    return counts[topic]


def store_all_gather(text: str, group: dist.ProcessGroup, topic: str, timeout: float | None = None) -> list[str]:
    """All-gather a string through the group's store; returns the strings of all ranks, in rank order.

    All ranks of the group call it, once for each string of a topic. It uses the host only, no device. `timeout` is in
    seconds (None: the group's), and longer as in `timed_barrier`. PeerError names a rank that did not write in time;
    this rank's string is then withdrawn, and the next call takes its place.
    """
    rank, size = find_own_rank(group)
    store = _get_process_group_store(group)
    timeout = limit_of_meeting(group, group_timeout(group) if timeout is None else timeout)
    counts = _numbers.setdefault(group, Counter())
    topic = f"strings of {topic}"
    number = counts[topic] + 1
    store.set(f"{topic} {number} {rank}", text)
    texts = []
    for peer in range(size):
        key = f"{topic} {number} {peer}"
        try:
            store.wait([key], timedelta(seconds=timeout))
        except RuntimeError as error:
            with suppress(RuntimeError):  # the store may be lost
                store.delete_key(f"{topic} {number} {rank}")  # a rank that arrives now must not continue alone
            raise PeerError(
                f"rank {rank} of {size} calls {text}, and rank {peer} has called nothing like it within {timeout:g} s"
            ) from error
        texts.append(store.get(key).decode())
    # A rank that writes this number has read all strings of the previous one: no rank reads ours again.
    if number > 1:
        store.delete_key(f"{topic} {number - 1} {rank}")
    counts[topic] = number
    return texts


def find_missing(group: dist.ProcessGroup, topic: str, timeout: float, *, known: Sequence[int] = ()) -> list[int]:
    """Wait until all ranks of the group have called it as often as this one; returns the ranks that have not.

    topic: each counts its own calls. known: ranks that will not call it, and are returned at once. It uses the group's
    store alone, no device. The first rank whose `timeout` seconds have passed, or that knows some, decides for all,
    those that call it later included: all ranks return the same ([]: all have come).
    """
    rank, size = find_own_rank(group)
    store = _get_process_group_store(group)
    number = store.add(f"{topic} calls {rank}", 1)
    found = f"{topic} {number}"
    if store.add(f"{found} arrived", 1) == size:
        store.compare_set(found, "", "all")
        if number > 1:  # a rank that has arrived here has read what was found before
            for key in (f"{topic} {number - 1}", f"{topic} {number - 1} arrived"):
                store.delete_key(key)
    if known:
        store.compare_set(found, "", " ".join(map(str, known)))
    try:
        store.wait([found], timedelta(seconds=timeout))
    except RuntimeError:
        missing = [peer for peer in range(size) if store.add(f"{topic} calls {peer}", 0) < number]
        store.compare_set(found, "", " ".join(map(str, missing)) or "all")
    decided = store.get(found).decode()
    return [] if decided == "all" else [int(peer) for peer in decided.split()]


@atexit.register
def _outlive_gloo() -> None:
    """At exit, let gloo's threads drop the tensors of collectives that have just ended, for which they take the GIL.

    Before Python 3.14, a thread that asks for the GIL once the interpreter has ended is ended within a destructor of
    torch's, which aborts the process: about one in ten scripts whose last collective is just over.
    """
    calm, deadline = 0, time.monotonic() + 1.0
    while sys.version_info < (3, 14) and calm < 2 and time.monotonic() < deadline:
        states = _states_of_gloo()
        if not states:
            return
        time.sleep(0.002)  # without the GIL
        calm = 0 if "R" in states else calm + 1


def _states_of_gloo() -> str:
    """The kernel's letters for what gloo's threads of this process do: R for one that runs, or would."""
    states = ""
    for file in Path("/proc/self/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            _, _, rest = file.read_text().partition("(pt_gloo_runloop) ")
            states += rest[:1]
    return states
