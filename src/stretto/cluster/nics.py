# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of this machine, and which of them each rank uses: its nearest, shared evenly (Singh, 6.2.1).

Reads sysfs: where GPUs and interfaces are on the PCI bus, their NUMA nodes. STRETTO_NICS names the interfaces
that may be used. Needs no torch.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from stretto.cluster.schema import suggest

VARIABLE = "STRETTO_NICS"
SYSFS = Path("/sys")
_RDMA = ("infiniband", "cxi")  # classes of devices in sysfs: InfiniBand and RoCE, and Slingshot
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_GPU_VENDORS = ("0x10de", "0x1002")
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D and display controllers, processing accelerators
_MUCH_SLOWER = (
    4  # interfaces that are so many times slower than the fastest, such as those for management, are left out
)


@dataclass(frozen=True)
class PciDevice:
    """A device: its PCI bridges from the root on, its own address, and its NUMA node (None: unknown)."""

    path: tuple[str, ...] = ()
    numa: int | None = None

    @property
    def address(self) -> str:
        """Its PCI address; "" where it is on no PCI bus."""
        return self.path[-1] if self.path else ""

    def distance(self, other: "PciDevice") -> tuple[int, bool]:
        """Sort key: the more bridges both are behind, the nearer; then whether they are on one NUMA node."""
        bridges = zip(self.path[:-1], other.path[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], bridges))
        return -shared, self.numa is None or self.numa != other.numa


@dataclass(frozen=True)
class Nic:
    """A network interface. name: of its RDMA device, such as "mlx5_0", or else `interface`, the one for sockets ("" for
    none). gbits: Gbit/s (None: unknown)."""

    name: str
    interface: str
    device: PciDevice
    is_up: bool
    is_rdma: bool
    gbits: float | None

    def describe(self) -> str:
        speed = [] if self.gbits is None else [f"{self.gbits:g} Gbit/s"]
        numa = [] if self.device.numa is None else [f"NUMA node {self.device.numa}"]
        interface = [self.interface] if self.interface not in ("", self.name) else []
        about = ", ".join([*interface, *speed, *([self.device.address] if self.device.address else []), *numa])
        return f"{self.name} ({about})" if about else self.name


def list_nics(sysfs: Path = SYSFS, *, adds_virtual: bool = False) -> list[Nic]:
    """All interfaces with hardware, also those that are down; if there are none, or to be added, virtual ones, such as
    bonds. By name, 2 before 10."""
    found: dict[tuple[str, ...] | str, Nic] = {}
    for kind in _RDMA:
        for entry in _entries(sysfs / "class" / kind):
            port = entry / "ports" / "1"
            device, state = _read_device(entry / "device"), _read(port / "state")
            rate = re.match(r"([\d.]+) Gb", _read(port / "rate"))
            is_up = state.endswith("ACTIVE") or not state
            found[device.path or entry.name] = Nic(
                entry.name, "", device, is_up, True, float(rate[1]) if rate else None
            )
    virtual = []
    for entry in _entries(sysfs / "class" / "net"):
        if entry.name == "lo":
            continue
        is_up = _read(entry / "operstate") in ("up", "unknown")
        device = _read_device(entry / "device")
        speed = _read(entry / "speed")
        gbits = int(speed) / 1000 if speed.isdecimal() and int(speed) else None
        own = Nic(entry.name, entry.name, device, is_up, False, gbits)
        if not (entry / "device").exists():
            virtual.append(own)
        elif (rdma := found.get(device.path)) is not None and not rdma.interface:
            found[device.path] = Nic(rdma.name, entry.name, device, rdma.is_up and is_up, True, rdma.gbits or gbits)
        else:
            found[(*device.path, entry.name)] = own
    nics = [*found.values(), *(virtual if adds_virtual or not found else ())]
    return sorted(nics, key=lambda nic: natural_order(nic.name))


def list_gpus(sysfs: Path = SYSFS) -> list[PciDevice]:
    """The GPUs by PCI address, as CUDA and ROCm number those of one kind."""
    gpus = [
        _read_device(entry)
        for entry in _entries(sysfs / "bus" / "pci" / "devices")
        if _read(entry / "vendor") in _GPU_VENDORS and _read(entry / "class")[:6] in _GPU_CLASSES
    ]
    return sorted(gpus, key=lambda gpu: gpu.address)


def usable_nics(sysfs: Path = SYSFS, environment: Mapping[str, str] = os.environ) -> list[Nic]:
    """The interfaces that ranks use: those that STRETTO_NICS names, or else all that are up and about the fastest, of
    RDMA if there are any.

    Raises ValueError for a name that the machine does not have.
    """
    if named := environment.get(VARIABLE, ""):
        nics = list_nics(sysfs, adds_virtual=True)
        by_name = {name: nic for nic in nics for name in (nic.interface, nic.name) if name}
        for name in (names := named.split(",")):
            if name not in by_name:
                known = f"; {suggest(name, tuple(by_name))}" if by_name else ": this machine has none"
                raise ValueError(f"the environment variable {VARIABLE} names {name!r}, no network interface{known}")
        return list(dict.fromkeys(by_name[name] for name in names))
    nics = [nic for nic in list_nics(sysfs) if nic.is_up]
    nics = [nic for nic in nics if nic.is_rdma] or nics
    fastest = max((nic.gbits for nic in nics if nic.gbits is not None), default=0.0)
    return [nic for nic in nics if nic.gbits is None or nic.gbits * _MUCH_SLOWER > fastest]


def choose_nics(
    ranks: int, *, gpus: Sequence[str] | None = None, sysfs: Path = SYSFS, environment: Mapping[str, str] = os.environ
) -> tuple[Nic, ...]:
    """The interface of each of a machine's ranks, by local rank; () where the machine has none.

    It is near the rank's GPU, and no interface serves more of the machine's GPUs than evenly sharing them takes. gpus:
    PCI addresses in the order of local ranks (None: all GPUs of the machine); with fewer GPUs than ranks these take
    turns. Without GPUs, ranks take turns with interfaces. Raises ValueError as `usable_nics`, and for a GPU that the
    machine does not have.
    """
    nics, there = usable_nics(sysfs, environment), list_gpus(sysfs)
    if not nics:
        return ()
    if not there:
        return tuple(nics[rank % len(nics)] for rank in range(ranks))
    near = dict(zip((gpu.address for gpu in there), _share(there, nics), strict=True))
    for address in gpus or ():
        if address not in near:
            raise ValueError(f"there is no GPU at the PCI address {address!r}; {suggest(address, tuple(near))}")
    own = list(gpus or near)
    return tuple(near[own[rank % len(own)]] for rank in range(ranks))


@contextmanager
def pinned_near(interface: str, sysfs: Path = SYSFS) -> Iterator[None]:
    """Pin the calling thread, and so those that it starts meanwhile, to the CPUs near a network interface.

    Nothing happens where these are unknown, and in a process that is pinned already, by a launcher for example.
    """
    text = _read(sysfs / "class" / "net" / interface / "device" / "local_cpulist")
    ends = [[int(end) for end in part.split("-")] for part in text.split(",") if re.fullmatch(r"\d+(-\d+)?", part)]
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    near = allowed & {cpu for part in ends for cpu in range(part[0], part[-1] + 1)}
    if not near or len(allowed) != os.cpu_count():
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _share(gpus: Sequence[PciDevice], nics: Sequence[Nic]) -> list[Nic]:
    """An interface for each GPU: pairs that are nearest first, and of equally near ones that with the fewest GPUs."""
    most, load = math.ceil(len(gpus) / len(nics)), Counter[str]()
    chosen: dict[int, Nic] = {}
    for distance in sorted({gpu.distance(nic.device) for gpu in gpus for nic in nics}):
        for place, gpu in enumerate(gpus):
            near = [nic for nic in nics if gpu.distance(nic.device) == distance and load[nic.name] < most]
            if place not in chosen and near:
                chosen[place] = min(near, key=lambda nic: load[nic.name])
                load[chosen[place].name] += 1
    return [chosen[place] for place in range(len(gpus))]


def _entries(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(folder.iterdir())


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:  # absent, or the speed of an interface that is down
        return ""


def _read_device(link: Path) -> PciDevice:
    """The device that a link of sysfs names. A virtual function's NUMA node may be that of the bridge above it."""
    if not link.exists():
        return PciDevice()
    folder = link.resolve()
    numa = next(filter(None, (_read(place / "numa_node") for place in (folder, *folder.parents[:4]))), "")
    path = tuple(part for part in folder.parts if _PCI_ADDRESS.fullmatch(part))
    return PciDevice(path, int(numa) if numa.isdecimal() else None)


def natural_order(name: object) -> list[tuple[int, str]]:
    """Return a sort key by which numbers within names count as numbers: "mlx5_2" comes before "mlx5_10"."""
    parts = re.split(r"0*([0-9]+)", str(name))
    return [(len(part) if place % 2 else 0, part) for place, part in enumerate(parts)]
