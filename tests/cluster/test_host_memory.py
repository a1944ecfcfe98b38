# SPDX-License-Identifier: Apache-2.0
"""Tests of how much host memory may be used: what cgroups of both versions say, in folders made for it,
and the machine.
"""

import os
from pathlib import Path

import pytest

from stretto.cluster import host_memory
from stretto.cluster.host_memory import check_room, host_memory_available, host_memory_limit

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {40 * GIB >> 10} kB\nSwapTotal: 0 kB\nHuge: 0\n"
NO_LIMIT = str((1 << 63) - 4096)  # what version 1 calls none


class Machine:
    """A folder with /proc and /sys of a machine of 64 GiB, 40 of them available."""

    def __init__(self, root: Path, meminfo: str = MEMINFO) -> None:
        self.root = root
        self.write("proc/meminfo", meminfo)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def mount(self, *mounts: str, cgroup: str) -> None:
        """mounts: "root mount-point type options" of each."""
        lines = []
        for mount in mounts:
            top, point, kind, options = mount.split()
            lines.append(f"35 24 0:30 {top} {point} rw,nosuid shared:9 - {kind} {kind} rw,{options}\n")
        self.write("proc/self/mountinfo", "22 1 0:1 / / rw - ext4 /dev/vda rw\n" + "".join(lines))
        self.write("proc/self/cgroup", cgroup)

    def group(self, folder: str, limit: str, used: int = 0, **cached: int) -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", "".join(f"{name} {size}\n" for name, size in cached.items()))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_it_is_the_machines_memory(machine: Machine) -> None:
    assert host_memory_limit(root=machine.root) == (64 * GIB, "the machine's memory")
    assert host_memory_available(root=machine.root) == (40 * GIB, "the machine's available memory")
    machine.mount("/ /sys/fs/cgroup cgroup2 nsdelegate", cgroup="0::/\n")  # the root cgroup has no limit
    assert host_memory_limit(root=machine.root).bytes == 64 * GIB


def test_a_container_has_the_limit_of_its_own_cgroup(machine: Machine) -> None:
    machine.mount("/ /sys/fs/cgroup cgroup2 nsdelegate", cgroup="0::/\n")
    machine.group("sys/fs", "1")  # above the mount, where there are no cgroups
    machine.group("sys/fs/cgroup", str(16 * GIB), 10 * GIB, inactive_file=3 * GIB, active_file=2 * GIB, anon=5 * GIB)
    assert host_memory_limit(root=machine.root) == (16 * GIB, "the cgroup limit /sys/fs/cgroup/memory.max")
    # Cached files, 5 of the 10 GiB in use, are dropped when memory is needed.
    left = "what is left of the cgroup limit /sys/fs/cgroup/memory.max"
    assert host_memory_available(root=machine.root) == (11 * GIB, left)


def test_the_least_of_the_limits_around_the_process_counts(machine: Machine) -> None:
    machine.mount("/ /sys/fs/cgroup cgroup2 nsdelegate", cgroup="0::/slurm/job_7/step_0\n")
    machine.group("sys/fs/cgroup/slurm/job_7/step_0", "max", GIB)
    machine.group("sys/fs/cgroup/slurm/job_7", str(20 * GIB), 4 * GIB)
    machine.group("sys/fs/cgroup/slurm", str(30 * GIB), 28 * GIB)
    assert host_memory_limit(root=machine.root).source.endswith("/sys/fs/cgroup/slurm/job_7/memory.max")
    assert host_memory_limit(root=machine.root).bytes == 20 * GIB
    assert host_memory_available(root=machine.root).bytes == 2 * GIB  # another job of the group has used the rest
    assert host_memory_available(root=machine.root).source.endswith("/sys/fs/cgroup/slurm/memory.max")


def test_a_limit_beyond_the_machines_memory_limits_nothing(machine: Machine) -> None:
    machine.mount("/ /sys/fs/cgroup cgroup2 nsdelegate", cgroup="0::/\n")
    machine.group("sys/fs/cgroup", str(100 * GIB))
    assert host_memory_limit(root=machine.root) == (64 * GIB, "the machine's memory")
    assert host_memory_available(root=machine.root).bytes == 40 * GIB


def test_version_1_has_its_own_files_and_calls_no_limit_a_huge_number(machine: Machine) -> None:
    machine.mount(
        "/ /sys/fs/cgroup/cpu cgroup cpu",
        "/ /sys/fs/cgroup/memory cgroup memory",
        "/ /sys/fs/cgroup/unified cgroup2 nsdelegate",
        cgroup="9:cpu,cpuacct:/other\n4:memory:/job\n0::/\n",
    )
    folder = "sys/fs/cgroup/memory"
    machine.write(f"{folder}/memory.limit_in_bytes", NO_LIMIT)
    machine.write(f"{folder}/job/memory.limit_in_bytes", NO_LIMIT)
    assert host_memory_limit(root=machine.root).bytes == 64 * GIB
    machine.write(f"{folder}/job/memory.limit_in_bytes", str(8 * GIB))
    machine.write(f"{folder}/job/memory.usage_in_bytes", str(5 * GIB))
    machine.write(f"{folder}/job/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n")
    assert host_memory_limit(root=machine.root) == (
        8 * GIB,
        "the cgroup limit /sys/fs/cgroup/memory/job/memory.limit_in_bytes",
    )
    assert host_memory_available(root=machine.root).bytes == 5 * GIB


@pytest.mark.parametrize(
    ("top", "path", "folder"),
    [
        ("/docker/abc", "/docker/abc", "sys/fs/cgroup"),
        ("/docker/abc", "/docker/abc/inner", "sys/fs/cgroup/inner"),
        ("/docker/abc", "/", "sys/fs/cgroup"),
        ("/", "/../other", "sys/fs/cgroup"),  # outside the namespace's root
    ],
)
def test_a_container_that_has_only_its_part_of_the_hierarchy_mounted_finds_its_limit(
    machine: Machine, top: str, path: str, folder: str
) -> None:
    machine.mount(f"{top} /sys/fs/cgroup cgroup2 nsdelegate", cgroup=f"0::{path}\n")
    machine.group(folder, str(5 * GIB))
    assert host_memory_limit(root=machine.root).bytes == 5 * GIB


def test_a_given_number_counts_in_place_of_the_limits_but_more_than_is_left_is_never_available(
    machine: Machine,
) -> None:
    assert host_memory_limit(100e9, root=machine.root) == (100_000_000_000, "the number given")
    assert host_memory_available(10e9, root=machine.root) == (10_000_000_000, "the number given")
    assert host_memory_available(100e9, root=machine.root) == (40 * GIB, "the machine's available memory")


@pytest.mark.parametrize("given", [0, -5e9, float("nan"), float("inf"), True])
def test_a_number_that_is_none_of_bytes_is_refused(machine: Machine, given: float) -> None:
    for ask in (host_memory_limit, host_memory_available):
        with pytest.raises(ValueError, match="must be a finite number of at least 1, such as 64e9"):
            ask(given, root=machine.root)


def test_without_proc_the_system_is_asked_and_one_that_does_not_answer_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    assert host_memory_limit(root=tmp_path).bytes == host_memory_available(root=tmp_path).bytes == 4_096_000
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(OSError, match="does not report how much memory"):
        host_memory_limit(root=tmp_path)


def test_a_run_that_does_not_fit_raises_with_the_available_memory_and_its_limit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.mount("/ /sys/fs/cgroup cgroup2 nsdelegate", cgroup="0::/\n")
    machine.group("sys/fs/cgroup", str(10 * 10**9))
    monkeypatch.setattr(host_memory, "_ROOT", machine.root)
    monkeypatch.setattr(host_memory, "host_memory_limit", lambda: host_memory_limit(root=machine.root))
    monkeypatch.delenv("RANK", raising=False)
    check_room(5e9, 2, "a model", "model")
    with pytest.raises(ValueError, match=r"10 GB \(the cgroup limit /sys/fs/cgroup/memory.max\); a model of 1/3 "):
        check_room(15e9, 2, "a model", "model")
    machine.write("proc/meminfo", MEMINFO.replace("SwapTotal: 0", f"SwapTotal: {20 * GIB >> 10}"))
    check_room(15e9, 2, "a model", "model")
