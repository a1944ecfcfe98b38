# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks that lost a connection to each other, by the addresses in gloo's errors.

Each rank writes the local addresses of its TCP connections to the job's store when it has made new groups. gloo's
errors have the remote address of the connection that was lost, which is the local one of the rank at its other end.
"""

import json
import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from stretto.train.health.beat import list_ranks

_LISTENS = "0A"  # the state of a socket that waits for connections, in /proc/net/tcp
ADDRESS = re.compile(r"\[([0-9a-fA-F.:%]+)\]:(\d+)")  # as gloo writes it: [127.0.0.1]:17293


def _key(rank: int) -> str:
    return f"connections {rank}"


def write_addresses(store: dist.Store, rank: int, known: set[str]) -> None:
    """Write the local addresses of this process's connections to the store. Linux.

    known: those that were found before, which are written too, since they may have been lost since; updated.
    """
    known |= _local_addresses()
    store.set(_key(rank), json.dumps(sorted(known)))


def find_lost_pairs(store: dist.Store, reasons: Mapping[int, str], ranks: int) -> list[tuple[int, int]]:
    """Find the pairs of ranks that lost their connection, by the errors of ranks (`reasons`)."""
    owners: dict[str, int] = {}
    for rank in range(ranks):
        if store.check([_key(rank)]):
            owners |= dict.fromkeys(json.loads(store.get(_key(rank))), rank)
    pairs = set()
    for rank, reason in reasons.items():
        # What follows a semicolon is another rank's error, which ranks of a pipeline quote.
        for host, port in ADDRESS.findall(reason.partition("; ")[0]):
            # gloo (as of torch 2.13) prints the port's two bytes in network order, that is, swapped.
            swapped = int(port) % 256 * 256 + int(port) // 256
            peer = owners.get(f"{host} {swapped}", owners.get(f"{host} {port}"))
            if peer is not None and peer != rank:
                pairs.add((min(rank, peer), max(rank, peer)))
    return sorted(pairs)


def describe_lost(pairs: Sequence[tuple[int, int]], failed: Sequence[int]) -> tuple[int, str]:
    """Describe lost connections. Returns the rank that all of them have in common, else the lowest, and a sentence.

    pairs: of `find_lost_pairs`; empty if that is not known, and then only that the ranks `failed` lost some connection.
    """
    if not pairs:
        whose = "its connection to another rank" if len(failed) == 1 else "connections to other ranks"
        return min(failed), f"{list_ranks(tuple(failed))} lost {whose}, and all processes live"
    counts = Counter(rank for pair in pairs for rank in pair)
    common = min(rank for rank, count in counts.items() if count == max(counts.values()))
    if len(pairs) == 1:
        return common, f"{list_ranks(pairs[0])} lost their connection to each other, and all processes live"
    if counts[common] == len(pairs):
        peers = [rank for pair in pairs for rank in pair if rank != common]
        return common, f"rank {common} lost its connections to {list_ranks(peers)}, and all processes live"
    shown = ", ".join(f"{one} and {other}" for one, other in pairs)
    return common, f"pairs of ranks lost their connections, and all processes live: {shown}"


def _local_addresses() -> set[str]:
    """The local addresses of this process's TCP connections, as "HOST PORT", by /proc.

    A Python socket object of a connection's descriptor would set it to non-blocking if the program has called
    `socket.setdefaulttimeout`, and gloo's and NCCL's calls would fail.
    """
    inodes = set()
    with suppress(OSError):  # another system than Linux
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it has been closed since
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:["):
                    inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):  # a system without IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] != _LISTENS and fields[9] in inodes:
                    found.add(_read_address(fields[1], family))
    return found


def _read_address(text: str, family: int) -> str:
    """Convert an address as the kernel lists it: 0100007F:1F90, in words of the machine's byte order."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    return f"{socket.inet_ntop(family, struct.pack(f'={len(words)}I', *words))} {int(port, 16)}"
