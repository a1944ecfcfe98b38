# SPDX-License-Identifier: Apache-2.0
"""Which network interface each rank uses, on trees of sysfs that are modelled on four machines."""

import os
from pathlib import Path

import pytest

from stretto.cluster.nics import choose_nics, list_gpus, list_nics, pinned_near, usable_nics


class Tree:
    """A sysfs with some PCI devices. path: bridges and the device's own address, below the root complex's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)

    def add(self, path: str, numa: int, **files: str) -> Path:
        folder = self.root / "devices" / path
        folder.mkdir(parents=True)
        cpus = f"{16 * numa}-{16 * numa + 15}" if numa >= 0 else ""
        for name, text in {"numa_node": str(numa), "local_cpulist": cpus, **files}.items():
            (folder / name).write_text(f"{text}\n")
        (self.root / "bus/pci/devices" / folder.name).symlink_to(folder)
        return folder

    def gpu(self, path: str, numa: int, vendor: str = "0x10de", kind: str = "0x030200") -> None:
        self.add(path, numa, vendor=vendor, **{"class": kind})

    def nic(
        self, path: str, numa: int, kind: str, name: str, interface: str = "", *, rate: str = "", state: str = ""
    ) -> None:
        device = self.add(path, numa, vendor="0x15b3", **{"class": "0x020700"})
        entry = self._entry(kind, name, device)
        (entry / "ports/1").mkdir(parents=True)
        (entry / "ports/1/rate").write_text(rate)
        (entry / "ports/1/state").write_text(state)
        if interface:
            self._entry("net", interface, device)

    def ethernet(self, path: str, numa: int, name: str, speed: str = "", operstate: str = "up") -> None:
        entry = self._entry("net", name, self.add(path, numa, vendor="0x8086", **{"class": "0x020000"}))
        (entry / "speed").write_text(speed)
        (entry / "operstate").write_text(operstate)

    def _entry(self, kind: str, name: str, device: Path) -> Path:
        entry = self.root / "class" / kind / name
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(device)
        (entry / "operstate").write_text("up")
        return entry


NDR = {"rate": "400 Gb/sec (4X NDR)", "state": "4: ACTIVE"}
HDR = {"rate": "200 Gb/sec (4X HDR)", "state": "4: ACTIVE"}


def dgx_h100(tree: Tree) -> None:
    """A GPU and an interface behind each of eight switches; four more interfaces for storage, and one to manage it."""
    buses = ["15", "3d", "4c", "5d", "95", "bd", "cc", "dd"]
    for place, (bus, nic) in enumerate(zip(buses, (0, 3, 4, 5, 6, 9, 10, 11), strict=True)):
        numa, number = place // 4, int(bus, 16)
        switch = f"pci0000:{bus}/0000:{bus}:01.0/0000:{number + 1:02x}:00.0/0000:{number + 2:02x}"
        tree.gpu(f"{switch}:00.0/0000:{number + 6:02x}:00.0", numa)
        tree.nic(f"{switch}:01.0/0000:{number + 3:02x}:00.0", numa, "infiniband", f"mlx5_{nic}", **NDR)
    for place, nic in enumerate((1, 2, 7, 8)):
        bus, number = (("29", "2a"), ("a9", "aa"))[place // 2]
        path = f"pci0000:{bus}/0000:{bus}:01.0/0000:{number}:00.{place % 2}"
        tree.nic(path, place // 2, "infiniband", f"mlx5_{nic}", **NDR)
    tree.ethernet("pci0000:00/0000:00:1c.0/0000:0b:00.0", 0, "eno3", "10000")


def ndv4(tree: Tree) -> None:
    """A virtual machine: no switches are seen, each device is a bus of its own, and NUMA nodes tell what is near."""
    for place in range(8):
        numa = (1, 1, 0, 0, 3, 3, 2, 2)[place]
        root = "LNXSYSTM:00/LNXSYBUS:00/ACPI0004:00/VMBUS:00"
        tree.gpu(f"{root}/gpu-{place}/pci000{place + 1}:00/000{place + 1}:00:00.0", numa)
        nic = f"{root}/nic-{place}/pci010{place + 1}:00/010{place + 1}:00:00.0"
        tree.nic(nic, numa, "infiniband", f"mlx5_ib{place}", f"ib{place}", **HDR)
    tree.nic("vmbus/pci0c00:00/0c00:00:02.0", 0, "infiniband", "mlx5_an0", rate="40 Gb/sec (4X QDR)", state="4: ACTIVE")


def frontier(tree: Tree) -> None:
    """Eight dies of four GPUs, and an interface at each GPU, numbered otherwise than the dies and NUMA nodes."""
    for place, bus in enumerate(("c1", "c6", "c9", "ce", "d1", "d6", "d9", "de")):
        numa = (3, 1, 0, 2)[place // 2]
        tree.gpu(f"pci0000:{bus}/0000:{bus}:00.0", numa, vendor="0x1002", kind="0x038000")
        if place % 2 == 0:
            nic = f"pci0000:{place}0/0000:{place}0:01.1/0000:{place}1:00.0"
            tree.nic(nic, numa, "cxi", f"cxi{place // 2}", f"hsn{place // 2}")


def perlmutter(tree: Tree) -> None:
    """A GPU and an interface at each of four NUMA nodes."""
    for place, bus in enumerate(("03", "41", "82", "c1")):
        tree.gpu(f"pci0000:{bus}/0000:{bus}:00.0", 3 - place)
        tree.nic(f"pci0000:{place}1/0000:{place}1:01.1/0000:{place}2:00.0", place, "cxi", f"cxi{place}", f"hsn{place}")


MACHINES = {
    dgx_h100: ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"],
    ndv4: [f"mlx5_ib{place}" for place in range(8)],
    frontier: ["cxi0", "cxi0", "cxi1", "cxi1", "cxi2", "cxi2", "cxi3", "cxi3"],
    perlmutter: ["cxi3", "cxi2", "cxi1", "cxi0"],
}


def names(root: Path, ranks: int, nics: str = "", **options: list[str]) -> list[str]:
    return [nic.name for nic in choose_nics(ranks, sysfs=root, environment={"STRETTO_NICS": nics}, **options)]


@pytest.mark.parametrize(("machine", "expected"), MACHINES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_each_rank_uses_the_interface_nearest_to_its_gpu(tmp_path, machine, expected):
    machine(Tree(tmp_path))
    assert len(list_gpus(tmp_path)) == len(expected)
    assert names(tmp_path, len(expected)) == expected
    assert names(tmp_path, 2 * len(expected)) == 2 * expected  # two ranks a GPU
    last = list_gpus(tmp_path)[-1].address  # one rank, which sees the last GPU alone
    assert names(tmp_path, 1, gpus=[last]) == expected[-1:]


def test_the_variable_says_which_interfaces_there_are(tmp_path):
    frontier(Tree(tmp_path))
    assert sorted(names(tmp_path, 8, "hsn2,cxi3")) == ["cxi2"] * 4 + ["cxi3"] * 4
    assert names(tmp_path, 8, "hsn2,cxi3")[4:] == ["cxi2", "cxi2", "cxi3", "cxi3"]  # the dies beside them
    for wrong in ("hsn9", "hsn0,", "hsn0, hsn1"):
        with pytest.raises(ValueError, match=r"STRETTO_NICS names '.*', no network interface.*hsn0"):
            usable_nics(tmp_path, {"STRETTO_NICS": wrong})
    with pytest.raises(ValueError, match=r"no GPU at the PCI address '0000:01:00.0'"):
        names(tmp_path, 1, gpus=["0000:01:00.0"])


def test_interfaces_that_are_down_slow_or_without_hardware_are_left_out(tmp_path):
    tree = Tree(tmp_path)
    for place, (speed, state) in enumerate((("100000", "up"), ("1000", "up"), ("100000", "down"), ("", "up"))):
        tree.ethernet(f"pci0000:00/0000:00:0{place}.0", 0, f"eth{place}", speed, state)
    (tmp_path / "class/net/docker0").mkdir()
    assert [nic.name for nic in list_nics(tmp_path)] == ["eth0", "eth1", "eth2", "eth3"]
    assert names(tmp_path, 3) == ["eth0", "eth3", "eth0"]  # without GPUs: shared evenly
    assert names(tmp_path, 2, "eth2") == ["eth2", "eth2"]  # who names it has it, a bond of others too
    assert names(tmp_path, 2, "docker0,eth2") == ["docker0", "eth2"]
    tree.nic("pci0000:10/0000:10:00.0", -1, "infiniband", "mlx5_2", rate="400 Gb/sec (4X NDR)", state="1: DOWN")
    assert names(tmp_path, 1) == ["eth0"]
    tree.nic("pci0000:11/0000:11:00.0", -1, "infiniband", "mlx5_10", **NDR)
    assert names(tmp_path, 1) == ["mlx5_10"]
    assert choose_nics(4, sysfs=tmp_path / "none", environment={}) == ()
    with pytest.raises(ValueError, match="names 'eth0', no network interface: this machine has none"):
        usable_nics(tmp_path / "none", {"STRETTO_NICS": "eth0"})


def test_no_interface_has_more_ranks_than_an_even_share(tmp_path):
    tree = Tree(tmp_path)
    for place in range(4):  # all of them beside the first interface
        tree.gpu(f"pci0000:00/0000:00:01.0/0000:01:0{place}.0", 0)
    tree.nic("pci0000:00/0000:00:01.0/0000:02:00.0", 0, "infiniband", "mlx5_0", **NDR)
    tree.nic("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "infiniband", "mlx5_1", **NDR)
    assert names(tmp_path, 4) == ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"]


def test_threads_are_pinned_near_an_interface_unless_the_process_is(tmp_path, monkeypatch):
    tree = Tree(tmp_path)
    tree.ethernet("pci0000:00/0000:00:01.0", 1, "eth1")
    tree.ethernet("pci0000:00/0000:00:02.0", -1, "eth2")  # of which no CPU is known
    allowed, calls = set(range(40)), []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: calls.append(cpus), raising=False)
    for pinned, cpus, expected in (
        ("eth1", 40, [set(range(16, 32)), allowed]),
        ("eth2", 40, []),
        ("lo", 40, []),
        ("eth1", 64, []),  # pinned by a launcher
    ):
        monkeypatch.setattr(os, "cpu_count", lambda cpus=cpus: cpus)
        calls.clear()
        with pytest.raises(KeyError), pinned_near(pinned, tmp_path):
            raise KeyError
        assert calls == expected, pinned
