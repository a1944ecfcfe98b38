# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory between processes: anonymous POSIX shared memory within a node, puts between nodes.

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
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.cluster.host_memory import host_memory_available
from stretto.cluster.local_ranks import count_local_ranks, name_node, require_declared
from stretto.memory.groups import exchange, find_own_rank, require_same, timed_barrier
from stretto.memory.network.descriptors import Put
from stretto.memory.network.endpoint import Endpoint, find_endpoint
from stretto.memory.symmetric import MASK, Backoff, PeerError, Reach, SymmetricMemory, find_fence, has_reached

_ALIGNMENT = 64
_SECONDS_UNNOTED = 0.02  # of a wait that watchers do not hear of
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
    node: str


class HostMemory(SymmetricMemory):
    """Symmetric memory over regions that this process has mapped, its own among them.

    Only one thread may use it: a second one would be a second writer. `processes` are the ranks' processes, None where
    all ranks are in this one. Regions of other nodes are None; `endpoint` puts into them. always_puts: whether regions
    of this node are put into as well, as `allocate` describes it.
    """

    def __init__(
        self,
        rank: int,
        regions: Sequence[Tensor | None],
        size: int,
        signals: int,
        processes: list[Process] | None,
        endpoint: Endpoint | None = None,
        *,
        always_puts: bool = False,
    ) -> None:
        self.rank = rank
        self.world_size = len(regions)
        self.size = size
        self.signals = signals
        start = _pad_bytes(len(regions), signals)
        self._whole = regions[rank]
        self._buffers = [None if region is None else region[start : start + size] for region in regions]
        self._pads = [
            None if region is None else memoryview(region[:start].numpy()).cast("I")  # type: ignore[arg-type]
            for region in regions
        ]
        self._processes = processes
        self._fence = find_fence()
        self.endpoint = endpoint
        self._reach = tuple(
            Reach.PUTS if region is None or (always_puts and peer != rank) else Reach.LOADS_AND_STORES
            for peer, region in enumerate(regions)
        )
        self.region = 0
        self._sources: dict[Hashable, tuple[int, Tensor]] = {}
        if endpoint is not None:
            near = {peer: region for peer, region in enumerate(regions) if region is not None and peer != rank}
            self.region = endpoint.add_region(self.whole(), start, signals, near)
            self._counters = self.whole().data_ptr()

    @classmethod
    def allocate(
        cls,
        size: int,
        signals: int,
        group: dist.ProcessGroup | None,
        timeout: float,
        what: str = "",
        *,
        always_puts: bool = False,
    ) -> "HostMemory":
        """Allocate on all ranks, as `stretto.memory.allocate`; what: a description, the same on all ranks.

        always_puts: put to the other ranks of this node, too, as GPUs without peer access do.
        """
        if platform.system() != "Linux":
            raise OSError(f"shared memory between processes needs Linux, not {platform.system()}")
        find_fence()
        rank, world_size = find_own_rank(group)
        total = _pad_bytes(world_size, signals) + size
        name = f"stretto-{secrets.token_hex(8)}"
        descriptor = os.memfd_create(name)
        try:
            error = _reserve(descriptor, total, world_size)  # raised once the others know, or they would wait
            node = name_node(dist.get_rank(), dist.get_world_size())
            process, refusal = Process(os.getpid(), _started(os.getpid())), "" if error is None else str(error)
            own = _Offer(process, descriptor, name, size, signals, what, refusal, node)
            offers = exchange(own, group, timeout, _Offer)
            if error is not None:
                raise error
            _require_offered(offers)
            _require_same(offers, rank)
            nodes = [offer.node for offer in offers]
            require_declared(nodes)
            regions = [
                _map(offer, total, rank, peer) if offer.node == node else None for peer, offer in enumerate(offers)
            ]
            endpoint = None
            if always_puts or len(set(nodes)) > 1:
                endpoint = find_endpoint(group, nodes, timeout)
            processes = [offer.process for offer in offers]
            memory = cls(rank, regions, size, signals, processes, endpoint, always_puts=always_puts)
            # All have mapped it, so that the descriptor can be closed, and registered it, so that puts may come.
            try:
                timed_barrier(group, timeout)
            except BaseException:
                memory.close()  # or the proxy would keep it
                raise
        finally:
            os.close(descriptor)
        return memory

    @property
    def reach(self) -> tuple[Reach, ...]:
        """The way in which this rank gets data into each rank's buffer: `put` where it is not mapped."""
        return self._reach

    def buffer(self, rank: int | None = None) -> Tensor:
        """A rank's buffer (default: this rank's) as uint8 [size]. ValueError for one on another node."""
        found = self._buffers[self.rank if rank is None else rank]
        if found is None:
            raise ValueError(f"rank {rank} is on another node: reach[{rank}] is {self.reach[rank or 0]}, by put")
        return found

    def whole(self) -> Tensor:
        """This rank's region: the counters, uint32 [world, signals], then, aligned to 64 bytes, the buffer."""
        assert self._whole is not None
        return self._whole

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return bool(self._pads)

    def find_source(self, key: Hashable, size: int) -> tuple[int, Tensor]:
        """Memory of this rank that `put` may read, too: its number, for `source_region`, and uint8 [size].

        The same key has the same memory, until this is closed.
        """
        assert self.endpoint is not None, "no rank is on another node"
        if key not in self._sources:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._sources[key] = self.endpoint.add_source(memory), memory
        return self._sources[key]

    def put(
        self,
        peer: int,
        source: int,
        offset: int,
        size: int,
        index: int | None = None,
        *,
        source_region: int | None = None,
    ) -> None:
        """Put `size` bytes at `source` of this rank's buffer to `offset` of the peer's; then count up `index` there.

        source_region: of `add_source`, None for this rank's buffer. It returns at once: the bytes must not change until
        a signal of the peer has answered, or all of this rank's puts from it have arrived (`close` waits for that).
        ValueError for bytes outside of either buffer, PeerError for a peer that is lost.
        """
        if not 0 <= peer < self.world_size:
            raise ValueError(f"the group has ranks 0 to {self.world_size - 1}, not {peer}")
        if self.endpoint is None or self._reach[peer] is not Reach.PUTS:
            raise ValueError(f"rank {peer} is reached by loads and stores, and not by put")
        if size < 0 or not 0 <= offset <= self.size - size:
            raise ValueError(f"{size} bytes at {offset} do not fit into a buffer of {self.size} bytes")
        if index is not None and not 0 <= index < self.signals:
            raise ValueError(f"a pair of ranks has signals 0 to {self.signals - 1}, not {index}")
        if source_region is None and not 0 <= source <= self.size - size:
            raise ValueError(f"{size} bytes at {source} are not in a buffer of {self.size} bytes")
        own = self.region if source_region is None else source_region
        self.endpoint.put(Put(peer, own, source, self.region, offset, size, index))

    def check(self, peer: int) -> None:
        """PeerError if a peer on another node cannot be reached any more."""
        if self.endpoint is not None and self._reach[peer] is Reach.PUTS:
            self.endpoint.check(peer)

    def signal(self, peer: int, index: int) -> None:
        """Increment this rank's counter `index` at `peer`, after everything written so far."""
        if self._reach[peer] is Reach.PUTS:
            self.put(peer, 0, 0, 0, index)
            return
        if self._fence is not None:
            self._fence()
        pad = self._pads[peer]
        assert pad is not None
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
        pad = self._pads[self.rank]
        assert pad is not None
        return pad[peer * self.signals + index]

    def has_ended(self, peer: int) -> bool:
        """Check whether the peer's process has ended, or is lost. What it wrote and signalled before remains valid."""
        if self._pads[peer] is None:
            assert self.endpoint is not None
            return self.endpoint.failure(peer) is not None
        return self._processes is not None and self._processes[peer].has_ended()

    def wait(self, peer: int, index: int, target: int, timeout: float) -> None:
        """Poll until `peer`'s counter `index` has reached `target`. PeerError on a time-out or if the peer died."""
        if self._reach[peer] is Reach.PUTS and self.endpoint is not None:
            counter = self._counters + 4 * (peer * self.signals + index)
            if self.endpoint.proxy.await_counter(counter, target, _SECONDS_UNNOTED):
                return
        backoff = self._make_backoff(peer)
        while not self.has_reached(peer, index, target):
            waited = backoff.pause()
            ended = waited > _SECONDS_BEFORE_ASKING and self.has_ended(peer)
            if self.has_reached(peer, index, target):
                return
            if ended or waited > timeout:
                self.check(peer)
                why = "its process has ended" if ended else f"it did not come within {timeout:g} s"
                raise PeerError(
                    f"rank {self.rank} of {self.world_size} waits for signal {index} of rank {peer} to reach "
                    f"{target & MASK}: it is at {self.seen(peer, index)}, and {why}"
                )

    def _make_backoff(self, peer: int) -> Backoff:
        """Pauses of a wait for a peer: for one that puts as long as a native proxy's, which a put ends."""
        constant = None
        if self.endpoint is not None and self._reach[peer] is Reach.PUTS:
            constant = self.endpoint.proxy.LONGEST_PAUSE
        return Backoff(self.pause, constant)

    def pause(self, seconds: float) -> None:
        """Wait at most so many seconds, with a native proxy until a put has come, which this thread then receives."""
        (time.sleep if self.endpoint is None else self.endpoint.proxy.pause)(seconds)

    def close(self) -> None:
        """Release the memory, once what was put from it has arrived."""
        if self.endpoint is not None and self._pads:
            for number, _ in (*self._sources.values(), (self.region, None)):
                self.endpoint.remove_region(number)
            self._sources = {}
        for pad in self._pads:
            if pad is not None:
                pad.release()
        self._pads = []
        self._buffers = []
        self._whole = None


def allocate_in_process(world_size: int, size: int, signals: int = 0) -> tuple[HostMemory, ...]:
    """Allocate the memories of `world_size` ranks that all live in this process, in one thread."""
    regions = [
        torch.zeros(_pad_bytes(world_size, signals) + size, dtype=torch.uint8, device="cpu") for _ in range(world_size)
    ]
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
    world_size = min(world_size, count_local_ranks() or world_size)  # those of other machines have memory of their own
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
    """Read when a process started, in clock ticks since boot; -1 for one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()  # a name may contain anything
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])
