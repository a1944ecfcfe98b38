# SPDX-License-Identifier: Apache-2.0
"""`Lockstep`: ranks that step together compare their steps, and find out who has failed."""

import secrets
import socket
import sys
import zlib
from contextlib import suppress

import torch
import torch.distributed as dist

from stretto.inference.runner import HostStep
from stretto.memory import PeerError, find_missing
from stretto.memory.plain_data import all_gather_data
from stretto.parallel.comm.collectives import NO_GROUP, gather_rows
from stretto.parallel.grid import Grid

_ANSWER_SECONDS = 2.0  # in which ranks that a failure has not hit raise, too


class Lockstep:
    """The ranks that step together: those of x, and, where experts are divided over data, all. Collective.

    While a rank's process lives, it has a socket on its host, which nobody reads: others see by it at once that a rank
    was killed. So each error names who failed first, also where gloo tells only its neighbours.
    """

    def __init__(self, grid: Grid) -> None:
        self._x = grid.size("x")
        axes = ("data", "x") if grid.size("expert") > 1 else ("x",)
        partition = grid.partition(axes)
        self._ranks = len(partition[0])
        self._group: dist.ProcessGroup = NO_GROUP
        self._socket: socket.socket | None = None
        self._seen: dict[int, str] = {}  # names of sockets by rank of the group, of this host
        if self._ranks > 1:
            made = grid.shared_group(partition, "inference", backend="gloo")
            assert made is not None
            self._group = made
            self._show_life()

    def _show_life(self) -> None:
        name = f"stretto {secrets.token_hex(8)}"
        if sys.platform == "linux":
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(f"\0{name}")  # no file: the name ends with the process
        names = all_gather_data(name, self._group, str)
        self._seen = {rank: each for rank, each in enumerate(names) if _lives(each)}

    def agree(self, step: HostStep, *, has_work: bool) -> int:
        """The most tokens of a rank; 0 if none has work. ValueError on all ranks if ranks of x have different steps."""
        if self._ranks == 1:
            return len(step.ids) * has_work
        digest = zlib.crc32(repr(step).encode())
        told = gather_rows(
            torch.tensor([[int(has_work), digest, len(step.ids)]], device="cpu"), self._ranks, self._group
        )
        digests = told[:, 1].view(-1, self._x)
        if (digests != digests[:, :1]).any():
            raise ValueError(
                "ranks that differ only in x were given different requests, or the same ones in another order, but "
                "compute parts of the same ones: make the same calls on each of them. All requests were dropped"
            )
        return int(told[:, 2].max()) if told[:, 0].any() else 0

    def name_failed(self, error: RuntimeError) -> None:
        """Raise PeerError that names the ranks for which a step has failed; return if all have raised an error."""
        if self._ranks == 1 or not (type(error) is RuntimeError or isinstance(error, dist.DistError)):
            return
        gone = [rank for rank, name in self._seen.items() if not _lives(name)]
        try:
            missing = find_missing(self._group, "stretto failed steps", _ANSWER_SECONDS, known=gone)
        except RuntimeError:
            what = "the job's store has failed, which rank 0 or its launcher serves"
        else:
            ranks = " and ".join(f"rank {dist.get_global_rank(self._group, each)}" for each in missing)
            what = f"{ranks} ended" if gone else f"{ranks} did not answer within {_ANSWER_SECONDS:g} s more"
            if not missing:
                return
        raise PeerError(f"a step of the engine has failed, as {what}: {error}") from error

    def close(self) -> None:
        """Stop showing that this rank lives."""
        if self._socket is not None:
            self._socket.close()


def _lives(name: str) -> bool:
    """True if a process of this host has the socket of this name."""
    if sys.platform != "linux":
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.connect(f"\0{name}")
        return True
    return False
