# SPDX-License-Identifier: Apache-2.0
"""The seam between a proxy and what carries its puts: `PutTransport`, what it calls, and the one within a machine.

A transport moves frames and may lose those that it holds when a connection breaks, and deliver them in another order.
The proxy above it numbers puts, sends again what was lost, and counts signals in order; it needs no fence and no remote
atomic operation of a transport.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from stretto.memory.network.frames import NO_SIGNAL, FrameError, PutFrame
from stretto.memory.symmetric import MASK, find_fence

if TYPE_CHECKING:
    from stretto.memory.network.proxy import Proxy

LOCAL_REGIONS = 1 << 22
"""Regions with numbers from here on are memory of one rank alone: sources of puts, never destinations."""


class PutRegion(NamedTuple):
    """Memory that puts read and write: a pad of uint32 counters [world, signals], then the buffer.

    number: the same on all ranks of the group; ranks count regions up from 0, and use no number twice. whole: uint8.
    near: of the peers whose region of this number this process maps, that region.
    """

    number: int
    whole: Tensor
    pad_bytes: int
    signals: int
    near: Mapping[int, Tensor]

    @property
    def size(self) -> int:
        """The bytes of the buffer."""
        return self.whole.numel() - self.pad_bytes


class PutTransport(ABC):
    """Carries frames between this rank and some peers; used by one thread, which calls `progress` in a loop.

    is_reliable: a put has arrived, with its signal, when `put` returns: nothing is acknowledged.
    """

    is_reliable = False

    @abstractmethod
    def connect(self, receiver: Proxy, peers: Mapping[int, tuple[str, int]]) -> None:
        """Begin to connect to these peers, by their addresses; `receiver` hears of connections and frames."""

    def register(self, region: PutRegion) -> None:  # noqa: B027  (sockets need nothing)
        """Prepare a region's memory for puts."""

    @abstractmethod
    def put(self, peer: int, frame: PutFrame, payload: memoryview | None) -> None:
        """Send a frame; dropped if there is no connection. The payload's memory must not change until acknowledged."""

    @abstractmethod
    def progress(self, seconds: float) -> bool:
        """Send and receive what can be now; wait up to so many seconds for something. Returns whether anything was."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""


def require_inside(region: PutRegion, frame: PutFrame, world: int) -> None:
    """FrameError for a put that would write outside of a region's buffer, or count another counter than one of it."""
    if frame.size > region.size or frame.offset > region.size - frame.size:
        raise FrameError(
            f"rank {frame.source} puts {frame.size} bytes at {frame.offset} of region {frame.region}, which has "
            f"{region.size}"
        )
    if frame.signal != NO_SIGNAL and frame.signal >= region.signals:
        raise FrameError(
            f"rank {frame.source} counts up signal {frame.signal} of region {frame.region}, which has {region.signals}"
        )
    if not 0 <= frame.source < world:
        raise FrameError(f"a frame of rank {frame.source}, and there are {world}")


class HostTransport(PutTransport):
    """Puts between processes of one machine that map each other's regions: a copy, then the counter.

    For GPUs of a node without peer access: their kernels store into pinned slots of their own, and load from them.
    """

    is_reliable = True

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._regions: dict[int, PutRegion] = {}
        self._fence = find_fence()

    def connect(self, receiver: Proxy, peers: Mapping[int, tuple[str, int]]) -> None:
        """Do nothing: the regions are mapped."""

    def register(self, region: PutRegion) -> None:
        """Note the peers' regions."""
        self._regions[region.number] = region

    def unregister(self, number: int) -> None:
        self._regions.pop(number, None)

    def put(self, peer: int, frame: PutFrame, payload: memoryview | None) -> None:
        """Copy to the peer's region, and count up. FrameError for a place outside of it."""
        region = self._regions.get(frame.region)
        if region is None or peer not in region.near:
            raise FrameError(f"region {frame.region} of rank {peer} is not mapped here")
        require_inside(region, frame, self._world)
        whole = view_bytes(region.near[peer])
        if payload is not None and len(payload):
            start = region.pad_bytes + frame.offset
            whole[start : start + len(payload)] = payload
        count_signal(whole, region, frame, self._fence)

    def progress(self, seconds: float) -> bool:
        """Wait: nothing is ever left to do."""
        time.sleep(seconds)
        return False

    def close(self) -> None:
        self._regions.clear()


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a uint8 tensor; the view keeps its memory alive."""
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]


def count_signal(whole: memoryview, region: PutRegion, frame: PutFrame, fence: Callable[[], None] | None) -> None:
    """Count up the signal of a put's source in a region, after the put's bytes."""
    if frame.signal == NO_SIGNAL:
        return
    if fence is not None:
        fence()
    counters = whole[: region.pad_bytes].cast("I")
    at = frame.source * region.signals + frame.signal
    counters[at] = counters[at] + 1 & MASK
