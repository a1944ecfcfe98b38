# SPDX-License-Identifier: Apache-2.0
"""Processes of a job and their TCP connections, as /proc of Linux shows them."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def descriptors_to_peer(process: int, peer: int) -> list[int]:
    """The descriptors of a process's TCP connections whose other end belongs to the process `peer`."""
    addresses = _read_addresses(process)
    ends_of_peer = {addresses[inode][0] for _, inode in _sockets(peer) if inode in addresses}
    return [
        descriptor
        for descriptor, inode in _sockets(process)
        if inode in addresses and addresses[inode][1] in ends_of_peer
    ]


def _sockets(process: int) -> Iterator[tuple[int, str]]:
    """The descriptors of a process's sockets, with their inodes."""
    for link in (PROC / str(process) / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            target = os.readlink(link)
            if target.startswith("socket:["):
                yield int(link.name), target.removeprefix("socket:[").removesuffix("]")


def _read_addresses(process: int) -> dict[str, tuple[str, str]]:
    """Local and remote address of each established connection in the process's network, by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        path = PROC / str(process) / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            _, local, remote, state = fields[:4]
            if state == "01":  # established
                found[fields[9]] = (local, remote)
    return found


def processes_of(variable: str, value: str) -> dict[int, dict[str, str]]:
    """The processes whose environment has this variable with this value, but this one: their environments by id."""
    found = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            environment = read_environment(int(folder.name))
            if environment.get(variable) == value:
                found[int(folder.name)] = environment
    return found


def read_environment(process: int) -> dict[str, str]:
    """The environment that a process was started with; empty if it has exited, or is another user's."""
    try:
        content = (PROC / str(process) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry)


def children_of(process: int) -> list[int]:
    """The ids of a process's running children."""
    try:
        return [int(word) for word in (PROC / str(process) / "task" / str(process) / "children").read_text().split()]
    except OSError:
        return []
