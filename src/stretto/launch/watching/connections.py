# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks of this machine that lost a connection to each other, from outside, by the kernel's tables of TCP.

While ranks train, the connections between their processes are listed now and then. A rank whose error says that it lost
a peer closes that connection: a pair of ranks that had one more connection before than now has lost it. A rank that
fails closes its other connections, too: the pair that lost one first is the cause.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stretto.launch.watching.monitor import list_ranks

_ESTABLISHED = "01"  # a connection's state in /proc/net/tcp


class Connections:
    """Counts the connections between ranks' processes, at most once in PERIOD seconds.

    A connection that was lost before the first count is not noticed.
    """

    PERIOD = 1.0

    def __init__(self) -> None:
        self._most: Counter[tuple[int, int]] = Counter()  # by pair of ranks
        self._lost: dict[tuple[int, int], float] = {}  # when a pair was first seen with fewer
        self._looked = -self.PERIOD

    def look(self, pids: Mapping[int, int], now: float) -> None:
        """Count the connections of each pair of ranks, if it is time. pids: the ranks' processes; now: seconds."""
        if now - self._looked >= self.PERIOD:
            self._looked = now
            counts = count_connections(pids)
            self._most |= counts
            self._lost = {pair: self._lost.get(pair, now) for pair, most in self._most.items() if counts[pair] < most}

    def find_lost(self, pids: Mapping[int, int], failed: Sequence[int]) -> list[tuple[int, int]]:
        """The pairs of ranks, one of which is in `failed`, that were the first to have fewer connections."""
        counts = count_connections(pids)
        pairs = sorted(pair for pair, most in self._most.items() if counts[pair] < most and set(pair) & set(failed))
        since = {pair: self._lost.get(pair, float("inf")) for pair in pairs}
        return [pair for pair in pairs if since[pair] == min(since.values())]


def count_connections(pids: Mapping[int, int]) -> Counter[tuple[int, int]]:
    """The number of established connections between each pair of ranks. Linux; empty elsewhere."""
    ends: dict[tuple[str, str], int] = {}
    for rank, pid in pids.items():
        inodes = set()
        with suppress(OSError):  # the process is gone, or another system than Linux
            for name in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # it has been closed since
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target.startswith("socket:["):
                        inodes.add(target.removeprefix("socket:[").removesuffix("]"))
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == _ESTABLISHED and fields[9] in inodes:
                        ends[fields[1], fields[2]] = rank
    found: Counter[tuple[int, int]] = Counter()
    for (local, remote), rank in ends.items():
        other = ends.get((remote, local))
        if other is not None and rank < other:
            found[rank, other] += 1
    return found


def describe_lost(pairs: Sequence[tuple[int, int]], failed: Sequence[int]) -> tuple[int, str]:
    """Describe lost connections. Returns the rank that all of them have in common, else the lowest, and a sentence.

    pairs: of `Connections.find_lost`; empty if that is not known, and then only that the ranks `failed` lost some.
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
    named = ", ".join(f"{one} and {other}" for one, other in pairs)
    return common, f"pairs of ranks lost their connections, and all processes live: {named}"
