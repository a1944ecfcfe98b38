# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between the processes of one machine: anonymous POSIX shared memory.

Each rank creates its region with memfd_create and sends its peers (process, descriptor), which map it through
/proc/PROCESS/fd/DESCRIPTOR; once all have, the rank closes the descriptor. The region never has a name in /dev/shm: the
kernel frees it when the last process that maps it ends, in whatever way and at any moment, and a container's small
/dev/shm does not limit it. It needs Linux, and processes of one user that see each other in /proc.

A region is the rank's signal pad, then its buffer. Counter (writer, index) of a reader is in the reader's pad at
writer * signals + index: only that writer stores to it, only that reader loads it. With one writer, an increment is a
load of its own last value and an aligned store of 4 bytes (one instruction in CPython's memoryview), which no reader
sees half done; it needs no atomic addition, which Python does not have. `find_fence` orders the counter after the data.
Kernels that do have atomic additions may use these counters too, with their own rules on who writes.
"""

import os
import platform
import secrets
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.cluster.host_memory import host_memory_available
from stretto.memory.fences import find_fence
from stretto.memory.groups import exchange, find_own_rank, require_same, timed_barrier
from stretto.memory.symmetric import MASK, Backoff, PeerError, SymmetricMemory, has_reached

_ALIGNMENT = 64
_SECONDS_BEFORE_ASKING = 0.1  # a longer wait checks whether the peer is still alive


class Process(NamedTuple):
    """A process of this machine; `started`, in clock ticks, distinguishes it from a later one with the same number."""

    number: int
    started: int

    def has_ended(self) -> bool:
        """Check whether it has ended. A zombie, which its parent has not waited for yet, counts as ended."""
        return _started(self.number) != self.started


class _Offer(NamedTuple):
    """A rank's description of its region for peers: its location, the requested sizes, or why it has none."""

    process: Process
    descriptor: int
    name: str
    size: int
    signals: int
    what: str
    refusal: str


class HostMemory(SymmetricMemory):
    """Symmetric memory over regions that this process has mapped, its own among them.

    Only one thread may use it: a second one would be a second writer. `processes` are the ranks' processes, None where
    all ranks are in this one.
    """

    def __init__(
        self, rank: int, regions: list[Tensor], size: int, signals: int, processes: list[Process] | None
    ) -> None:
        self.rank = rank
        self.world_size = len(regions)
        self.size = size
        self.signals = signals
        start = _pad_bytes(len(regions), signals)
        self._buffers = [region[start : start + size] for region in regions]
        self._pads = [memoryview(region[:start].numpy()).cast("I") for region in regions]  # type: ignore[arg-type]
        self._processes = processes
        self._fence = find_fence()

    @classmethod
    def allocate(
        cls, size: int, signals: int, group: dist.ProcessGroup | None, timeout: float, what: str = ""
    ) -> "HostMemory":
        """Allocate on all ranks, as `stretto.memory.allocate`; what: a description, the same on all ranks."""
        if platform.system() != "Linux":
            raise OSError(f"shared memory between processes needs Linux, not {platform.system()}")
        find_fence()
        rank, world_size = find_own_rank(group)
        total = _pad_bytes(world_size, signals) + size
        name = f"stretto-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name)
        try:
            error = _reserve(descriptor, total, world_size)  # raised once the others know, or they would wait
            process, refusal = Process(os.getpid(), _started(os.getpid())), "" if error is None else str(error)
            offers = exchange(_Offer(process, descriptor, name, size, signals, what, refusal), group, timeout, _Offer)
            if error is not None:
                raise error
            _require_offered(offers)
            _require_same(offers, rank)
            regions = [_map(offer, total, rank, peer) for peer, offer in enumerate(offers)]
            timed_barrier(group, timeout)  # all have mapped it: the descriptor can be closed
        finally:
            os.close(descriptor)
        return cls(rank, regions, size, signals, [offer.process for offer in offers])

    def buffer(self, rank: int | None = None) -> Tensor:
        """A rank's buffer (default: this rank's) as uint8 [size]."""
        return self._buffers[self.rank if rank is None else rank]

    def signal(self, peer: int, index: int) -> None:
        """Increment this rank's counter `index` at `peer`, after everything written so far."""
        if self._fence is not None:
            self._fence()
        pad = self._pads[peer]
        at = self.rank * self.signals + index
        pad[at] = (pad[at] + 1) & MASK

    def has_reached(self, peer: int, index: int, target: int) -> bool:
        """Check whether a wait would return now. If so, all that the peer wrote before is visible from now on."""
        if not has_reached(self.seen(peer, index), target):
            return False
        if self._fence is not None:
            self._fence()
        return True

    def seen(self, peer: int, index: int) -> int:
        """The value of `peer`'s counter `index` here."""
        return self._pads[self.rank][peer * self.signals + index]

    def has_ended(self, peer: int) -> bool:
        """Check whether the peer's process has ended. What it wrote and signalled before remains valid."""
        return self._processes is not None and self._processes[peer].has_ended()

    def wait(self, peer: int, index: int, target: int, timeout: float) -> None:
        """Poll until `peer`'s counter `index` has reached `target`. PeerError on a time-out or if the peer died."""
        backoff = Backoff()
        while not self.has_reached(peer, index, target):
            waited = backoff.pause()
            ended = waited > _SECONDS_BEFORE_ASKING and self.has_ended(peer)
            if self.has_reached(peer, index, target):
                return
            if ended or waited > timeout:
                why = "its process has ended" if ended else f"it did not come within {timeout:g} s"
                raise PeerError(
                    f"rank {self.rank} of {self.world_size} waits for signal {index} of rank {peer} to reach "
                    f"{target & MASK}: it is at {self.seen(peer, index)}, and {why}"
                )

    def close(self) -> None:
        """Release the memory."""
        for pad in self._pads:
            pad.release()
        self._pads = []
        self._buffers = []


def allocate_in_process(world_size: int, size: int, signals: int = 0) -> tuple[HostMemory, ...]:
    """Allocate the memories of `world_size` ranks that all live in this process, in one thread."""
    regions = [torch.zeros(_pad_bytes(world_size, signals) + size, dtype=torch.uint8) for _ in range(world_size)]
    return tuple(HostMemory(rank, regions, size, signals, None) for rank in range(world_size))


def _pad_bytes(world_size: int, signals: int) -> int:
    """The bytes of the signal pad, rounded up so that the buffer is aligned; at least one unit, as mmap needs."""
    return max(-(-4 * world_size * signals // _ALIGNMENT), 1) * _ALIGNMENT


def _reserve(descriptor: int, total: int, world_size: int) -> Exception | None:
    """Allocate the region's pages now, so that no later store raises SIGBUS; return the error if they do not fit."""
    try:
        _require_available(total, world_size)
        os.posix_fallocate(descriptor, 0, total)
    except (ValueError, OSError) as error:
        return error
    return None


def _require_available(total: int, world_size: int) -> None:
    available = host_memory_available()
    if total * world_size > available.bytes:
        raise ValueError(
            f"{world_size} ranks of {total} bytes of shared memory each need {total * world_size} bytes, and "
            f"this machine has {available.bytes} left ({available.source})"
        )


def _require_offered(offers: list[_Offer]) -> None:
    for peer, offer in enumerate(offers):
        if offer.refusal:
            raise ValueError(f"rank {peer} has no shared memory to give: {offer.refusal}")


def _require_same(offers: list[_Offer], rank: int) -> None:
    own = offers[rank]
    for peer, offer in enumerate(offers):
        require_same((own.size, own.signals, own.what), (offer.size, offer.signals, offer.what), rank, peer)


def _map(offer: _Offer, total: int, rank: int, peer: int) -> Tensor:
    """Map a peer's region as uint8 [total]; it is unmapped when its last tensor is freed."""
    path = f"/proc/{offer.process.number}/fd/{offer.descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{offer.name}"):
            raise OSError("it is something else")
        return torch.from_file(path, shared=True, size=total, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise PeerError(
            f"rank {rank} cannot map the memory of rank {peer} ({path}: {error}): host memory reaches processes of one "
            "user on one machine, in one container"
        ) from error


def _started(process: int) -> int:
    """When a process started, in clock ticks since boot; -1 for one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()  # a name may contain anything
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
