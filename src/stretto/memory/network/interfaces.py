# SPDX-License-Identifier: Apache-2.0
"""Finds the network interface that a rank's proxy listens on: the job's, never all. And why NCCL takes no puts."""

import fcntl
import importlib.util
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from stretto.cluster.local_ranks import count_local_ranks, find_local_rank
from stretto.cluster.nics import VARIABLE as NICS_VARIABLE
from stretto.cluster.nics import choose_nics

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""The job's interface: what it names for gloo between nodes serves puts, too."""
_SIOCGIFADDR = 0x8915
_LONGEST_NAME = 15  # bytes; the call takes so many of a longer one
_FIRST_GIN = (2, 28)  # the first NCCL whose device API (GPU-initiated networking) puts, over RDMA,
_GIN_OVER_SOCKETS = (2, 32)  # and over sockets
_GIN_HEADER = "nccl_device.h"
_RDMA_DEVICES = Path("/sys/class/infiniband")


class NetworkInterface(NamedTuple):
    """An interface of this machine: its name and address."""

    name: str
    address: str


def find_interface(*, is_one_machine: bool) -> NetworkInterface:
    """This rank's interface: its nearest of STRETTO_NICS, else GLOO_SOCKET_IFNAME, else by where the ranks are.

    These are loopback on one machine, and on several the interface that leads to MASTER_ADDR. ValueError where none is
    known, or the named one has no IPv4 address.
    """
    named = os.environ.get(INTERFACE_VARIABLE, "").partition(",")[0]
    if os.environ.get(NICS_VARIABLE):
        local = find_local_rank() or 0
        nearest = choose_nics(max(count_local_ranks() or 1, local + 1))[local]
        named = nearest.interface or named  # an RDMA device need not have an interface for sockets
    if named:
        address = _find_address(named)
        if address is None:
            having = [name for _, name in socket.if_nameindex() if _find_address(name)]
            raise ValueError(
                f"{INTERFACE_VARIABLE}, or {NICS_VARIABLE}, names {named!r}, which is no interface with an IPv4 "
                f"address: {', '.join(having)} have one"
            )
        return NetworkInterface(named, address)
    if is_one_machine:
        return NetworkInterface("lo", "127.0.0.1")
    master = os.environ.get("MASTER_ADDR", "")
    if not master:
        raise ValueError(
            f"ranks of several machines put to each other, and neither {INTERFACE_VARIABLE} nor MASTER_ADDR says over "
            f"which interface: set {INTERFACE_VARIABLE}, to eth0 for example"
        )
    try:
        address, problem = _find_route(master), None
    except OSError as error:
        address, problem = "", error
    if problem is not None or address.startswith("127.") or address == "::1":
        # Rank 0's machine reaches its own name over loopback, where the other machines do not.
        found = "reaches over loopback" if problem is None else f"finds no way to ({problem})"
        raise ValueError(
            f"MASTER_ADDR is {master!r}, which this machine {found}: set {INTERFACE_VARIABLE} to the interface that "
            "leads to the other machines"
        ) from problem
    names = [name for _, name in socket.if_nameindex() if _find_address(name) == address]
    return NetworkInterface(names[0] if names else address, address)


def _find_route(host: str) -> str:
    """This machine's address on the way to a host, by the first of the host's addresses that there is a route to."""
    failure = OSError(f"{host!r} has no address")
    for family, _, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing: the kernel only chooses the route
                return str(probe.getsockname()[0])
        except OSError as error:  # of a family that is not in use here
            failure = error
    raise failure


def _find_address(interface: str) -> str | None:
    """The interface's IPv4 address; None if it has none, or there is no such interface."""
    name = interface.encode()
    if len(name) > _LONGEST_NAME:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name))
        except OSError:
            return None
    return socket.inet_ntoa(packed[20:24])


def find_gin_obstacle() -> str:
    """The first thing that a transport by NCCL's device API lacks on this machine, for messages."""
    if not torch.cuda.is_available():
        return "this torch has no NCCL, or finds no GPU"
    version = torch.cuda.nccl.version()
    nccl = f"NCCL {'.'.join(map(str, version))}"
    if version < _FIRST_GIN:
        return f"{nccl} has no device API for networks: {'.'.join(map(str, _FIRST_GIN))} is the first that has"
    folders = _list_nccl_includes()
    if not any((folder / _GIN_HEADER).is_file() for folder in folders):
        return f"{nccl} has its device API, and its header {_GIN_HEADER} is in none of {', '.join(map(str, folders))}"
    has_rdma = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
    if version < _GIN_OVER_SOCKETS and not has_rdma:
        needed = ".".join(map(str, _GIN_OVER_SOCKETS))
        return f"{nccl} puts from GPUs over RDMA alone (over sockets from {needed} on), and there is no RDMA device"
    return f"{nccl} could, and Stretto has no transport by it: none could be tried yet"


def _list_nccl_includes() -> list[Path]:
    """List where NCCL's headers may be: NCCL_HOME, torch's wheel of NCCL, the system's."""
    homes = [Path(os.environ["NCCL_HOME"])] if os.environ.get("NCCL_HOME") else []
    spec = importlib.util.find_spec("nvidia")
    homes += [Path(place) / "nccl" for place in (spec.submodule_search_locations or () if spec else ())]
    return [*(home / "include" for home in homes), Path("/usr/include")]
