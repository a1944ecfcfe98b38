# SPDX-License-Identifier: Apache-2.0
"""This machine's memory: how much its processes may use, how much is left, and whether a run fits. No torch.

The tightest limit counts: the memory limits of the process's cgroup and of those around it (a container's, a Slurm
job's), version 2 or 1, and the machine's memory. Pinned memory counts towards a cgroup's limit as any other does.

RLIMIT_MEMLOCK (`ulimit -l`) is not used, since it does not bound memory that cudaHostRegister pins: NVIDIA's driver
takes the pages by get_user_pages and does not charge them to the process's locked memory (os_lock_user_pages in
kernel-open/nvidia/os-mlock.c of its open kernel modules). It bounds mlock, and what RDMA drivers register.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from stretto.cluster.local_ranks import count_ranks_here

_ROOT = Path("/")


class HostMemoryLimit(NamedTuple):
    """Bytes of host memory, of all processes on this machine together, and in words what limits them to that."""

    bytes: int
    source: str


def host_memory_limit(given: float | None = None, *, root: Path = _ROOT) -> HostMemoryLimit:
    """Return what may be used of this machine's memory in all: `given` bytes, else its cgroup's limit, else all of it.

    root: the folder that has /proc and /sys. Raises ValueError for a number that is none of bytes, OSError where the
    system does not report its memory.
    """
    if given is not None:
        return HostMemoryLimit(_check_bytes(given), "the number given")
    limits = [HostMemoryLimit(group.limit, f"the cgroup limit {group.file}") for group in _cgroups(root)]
    return min([*limits, _machine_memory(root)], key=lambda limit: limit.bytes)


def host_memory_available(given: float | None = None, *, root: Path = _ROOT) -> HostMemoryLimit:
    """Return what is left of this machine's memory now: the least of `given`, what its cgroups leave, and MemAvailable.

    A cgroup's cached files do not count as used, since the kernel drops them when memory is needed. Raises as
    `host_memory_limit`.
    """
    limits = [
        HostMemoryLimit(max(0, group.limit - group.used), f"what is left of the cgroup limit {group.file}")
        for group in _cgroups(root)
    ]
    if (left := _meminfo(root).get("MemAvailable")) is not None:
        limits.append(HostMemoryLimit(left, "the machine's available memory"))
    else:
        limits.append(_machine_memory(root))
    if given is not None:
        limits.append(host_memory_limit(given))
    return min(limits, key=lambda limit: limit.bytes)


def check_room(bytes_of_rank: float, ranks: int, what: str, kind: str) -> None:
    """Raise ValueError if the ranks on this machine need more memory than it has, swap included.

    For runs on CPUs, before anything is allocated. what, kind: words for the message: what needs the memory, and what
    to make smaller.
    """
    ranks_here = count_ranks_here(ranks)
    needed = round(ranks_here * bytes_of_rank)
    try:
        limit = host_memory_limit()
    except OSError:
        return
    there = limit.bytes + _meminfo(_ROOT).get("SwapTotal", 0)
    if needed <= there:
        return
    raise ValueError(
        f"{what} needs at least {_gigabytes(needed / ranks_here)} on each rank, {_gigabytes(needed)} for the "
        f"{ranks_here} here, but this machine has {_gigabytes(there)} ({limit.source}); a {kind} of "
        f"1/{-(-needed // there)} of that might do"
    )


class _CgroupMemory(NamedTuple):
    """The memory limit of a cgroup: the file that states it, its bytes, and the bytes in use."""

    file: str
    limit: int
    used: int


class _CgroupFiles(NamedTuple):
    """Names of a version of cgroups for its files, and the counters of cached files in memory.stat."""

    limit: str
    used: str
    cached: tuple[str, ...]


_VERSIONS = {
    "cgroup2": _CgroupFiles("memory.max", "memory.current", ("inactive_file", "active_file")),
    "cgroup": _CgroupFiles(
        "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
}


def _cgroups(root: Path) -> Iterator[_CgroupMemory]:
    """The memory limits of the process's cgroup and of all around it. Version 1 calls no limit a huge number."""
    for version, mount, folder in _cgroup_folders(root):
        files = _VERSIONS[version]
        for group in (folder, *folder.parents):
            where = root / group.relative_to("/")
            if (limit := _number(_read(where / files.limit))) is not None:
                counters = dict(line.split(maxsplit=1) for line in _read(where / "memory.stat").splitlines() if line)
                cached = sum(_number(counters.get(name, "")) or 0 for name in files.cached)
                used = (_number(_read(where / files.used)) or 0) - cached
                yield _CgroupMemory(str(group / files.limit), limit, max(0, used))
            if group == mount:
                break


def _cgroup_folders(root: Path) -> Iterator[tuple[str, PurePosixPath, PurePosixPath]]:
    """Version, mount point and folder of the process's cgroup, for each mounted hierarchy that may limit memory.

    A container may have only its own cgroup mounted: the path in /proc/self/cgroup is then relative to a folder outside
    the mount, and the mount point is the cgroup.
    """
    paths: dict[str, PurePosixPath] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            paths["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, about = line.partition(" - ")
        version, *_, options = about.split()
        if version in paths and (version == "cgroup2" or "memory" in options.split(",")):
            top, mount = (PurePosixPath(field) for field in fields.split()[3:5])
            own = paths[version]
            yield version, mount, mount / own.relative_to(top) if own.is_relative_to(top) else mount


def _machine_memory(root: Path) -> HostMemoryLimit:
    """All of the machine's memory; outside Linux, what sysconf reports."""
    total = _meminfo(root).get("MemTotal", 0)
    if not total:
        try:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):  # no sysconf on Windows, no such name elsewhere
            total = 0
    if total <= 0:
        raise OSError("this system does not report how much memory it has")
    return HostMemoryLimit(total, "the machine's memory")


def _meminfo(root: Path) -> dict[str, int]:
    """The sizes in /proc/meminfo, in bytes; empty where there is none."""
    lines = (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())
    return {name: int(value.split()[0]) << 10 for name, _, value in lines if value.endswith(" kB")}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """The whole number that a text is; None for another text, such as "max", which stands for no limit."""
    return int(text) if text.strip().isdecimal() else None


def _check_bytes(given: float) -> int:
    if isinstance(given, bool) or not math.isfinite(given) or given < 1:
        raise ValueError(f"host memory of {given} bytes: must be a finite number of at least 1, such as 64e9 for 64 GB")
    return int(given)


def _gigabytes(count: float) -> str:
    return f"{float(f'{count / 1e9:.3g}'):,g} GB"  # "1,510 GB", and not "1.51e+03 GB"
