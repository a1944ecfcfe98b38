# SPDX-License-Identifier: Apache-2.0
"""The proxy in Python: a thread that reads descriptors, sends and receives puts, and counts signals in order.

`native.NativeProxy` does the same in C++ without the GIL, with the same frames and methods; this one serves where there
is no compiler. Neither makes a CUDA call: kernels that wait for a put could wait for such a call, too.

Synchronization. The sender numbers the puts to a peer, and keeps each until the peer acknowledges it. The receiver
writes a payload into its place when it comes, in any order, once: it drops those that it already has. A signal counts
up only when all bytes of lower numbers are in their places. After a broken connection the greeting says what has
arrived, and the rest is sent again. A source may change once the receiver's signal has answered it, since every frame
also acknowledges.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from stretto.memory.network.descriptors import Fifo, Put, unpack
from stretto.memory.network.frames import MAX_PUT_BYTES, NO_SIGNAL, FrameError, FrameKind, PutFrame
from stretto.memory.network.sockets import SocketTransport
from stretto.memory.network.transport import (
    LOCAL_REGIONS,
    HostTransport,
    PutRegion,
    PutTransport,
    count_signal,
    require_inside,
    view_bytes,
)
from stretto.memory.symmetric import Backoff, find_fence

T = TypeVar("T")
WINDOW = 1 << 16
"""The most puts to a peer that are not acknowledged; the FIFO waits for more."""
_BATCH = 256  # descriptors that are read before frames have their turn
_CHECK_SECONDS = 0.02
_LONGEST_SLEEP = 0.5
_MAX_SILENCE = 5.0
"""Seconds, or a quarter of the limit, after which a frame finds out whether the peer still hears."""
_FIRST_POLL, _LONGEST_POLL = 0.0005, 0.01  # seconds between looks at the FIFOs that kernels write to
ENDED = "it has closed the group"


@dataclass
class _Link:
    """This rank's puts to a peer, and the peer's to this rank."""

    transport: PutTransport
    sent: int = 0  # number of the last put
    unacknowledged: deque[tuple[PutFrame, memoryview | None, int]] = field(default_factory=deque)
    received: int = 0  # of the peer's puts, without a gap
    answered: int = 0  # what the peer knows of `received`
    early: dict[int, PutFrame] = field(default_factory=dict)  # puts that have arrived before others
    is_up: bool = False
    why: str = "it has not connected"
    since: float = field(default_factory=time.monotonic)  # the last progress: an acknowledgement, or a connection
    spoke: float = 0.0  # when the last frame went to the peer
    failure: str | None = None


class _ProxyEnded(RuntimeError):
    """The thread has ended, or is the parent's, in a forked process."""


class Proxy:
    """The proxy of one rank of a group. address: to listen on; limit: seconds without a connection or acknowledgement.

    `failure(peer)` says why a peer cannot be reached any more.
    """

    LONGEST_PAUSE: float | None = None
    """Seconds for which a caller may `pause` who waits for a put; None: short ones, since none ends them."""

    @staticmethod
    def count_lanes(ranks_here: int) -> int:
        """One proxy: several would only take turns in the interpreter."""
        return 1

    def __init__(self, rank: int, world: int, token: bytes, address: str, limit: float) -> None:
        self._rank, self._world, self._limit = rank, world, limit
        self._sockets = SocketTransport(rank, world, token, address)
        self._host = HostTransport(rank, world)
        self.address = self._sockets.address
        self._links: dict[int, _Link] = {}
        self._regions: dict[int, PutRegion] = {}
        self._views: dict[int, memoryview] = {}
        self._known = 0  # regions with lower numbers are, or were, registered
        self._fifos: dict[Fifo, bool] = {}
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._fence = find_fence()
        self._broken: str | None = None
        self._is_closing = False
        self._checked = 0.0
        self._thread = threading.Thread(target=self._run, name="stretto-proxy", daemon=True)

    # Called by other threads.

    def connect(self, far: Mapping[int, tuple[str, int]]) -> None:
        """Start the thread, and connect to the peers with these addresses; the others' regions are mapped here."""
        for peer in range(self._world):
            self._links[peer] = _Link(self._sockets if peer in far else self._host)
        self._sockets.connect(self, far)
        self._thread.start()

    def add_region(self, region: PutRegion) -> None:
        """Let puts read and write a region."""
        self._call(lambda: self._add_region(region))

    def remove_region(self, number: int, seconds: float) -> None:
        """Forget a region, once what was put from it has arrived, or after so many seconds."""
        with contextlib.suppress(_ProxyEnded):
            self._wait(lambda: self._reads(number), seconds)
            self._call(lambda: self._remove_region(number))

    def add_fifo(self, fifo: Fifo, is_polled: bool) -> None:
        """Read a FIFO. is_polled: kernels write to it, which wake nobody."""
        self._call(lambda: self._fifos.update({fifo: is_polled}))

    def remove_fifo(self, fifo: Fifo) -> None:
        """Read a FIFO no more, after what it has: peers may wait for that."""
        with contextlib.suppress(_ProxyEnded):
            self._call(self._drain_fifos)
            self._call(lambda: self._fifos.pop(fifo, None))

    def put(self, fifo: Fifo, put: Put, timeout: float) -> bool:
        """Post a put of the host, as `Fifo.post`, and wake the thread. Returns what `wake` does."""
        fifo.post(put, timeout)
        return self.wake()

    def await_counter(self, counter: int, target: int, seconds: float) -> bool:
        """Return False: its callers look themselves."""
        return False

    def wake(self) -> bool:
        """Have the thread look at the FIFOs now. Returns True: `failure` says whether a peer is lost."""
        self._sockets.wake()
        return True

    def pause(self, seconds: float) -> None:
        """Sleep: the thread does what there is to do."""
        time.sleep(seconds)

    def failure(self, peer: int) -> str | None:
        """Say why the peer cannot be reached, or this proxy is broken; None as long as neither is known."""
        ended = None if self._thread.is_alive() else "the group's proxy has ended"
        return self._broken or self._links[peer].failure or ended

    def break_connection(self, peer: int) -> None:
        """Break the connection to a peer, for tests: it is opened again."""
        self._call(lambda: self._sockets.drop(peer, "a test broke it"))

    def close(self, seconds: float) -> None:
        """End the thread once all puts have arrived, or after so many seconds; tells the peers."""
        if self._is_closing:
            return
        if self._thread.ident is None:  # it was never started
            self._sockets.close()
        if not self._thread.is_alive():
            return
        with contextlib.suppress(_ProxyEnded):
            self._call(self._drain_fifos)
        self._wait(lambda: any(link.unacknowledged for link in self._links.values()), seconds)
        self._is_closing = True
        self.wake()
        self._thread.join(seconds + 1.0)

    def _call(self, function: Callable[[], T]) -> T:
        results: SimpleQueue[T] = SimpleQueue()
        self._commands.put(lambda: results.put(function()))
        self.wake()
        while self._thread.is_alive():
            with contextlib.suppress(Empty):
                return results.get(timeout=_LONGEST_SLEEP)
        raise _ProxyEnded(f"the proxy has ended: {self._broken or 'it was closed'}")

    def _wait(self, goes_on: Callable[[], bool], seconds: float) -> None:
        backoff = Backoff()
        while self._thread.is_alive() and self._call(goes_on) and backoff.pause() < seconds:
            pass

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._broken = f"its thread ended: {error!r}"
            raise
        finally:
            self._sockets.close()
            self._host.close()

    def _serve(self) -> None:
        pause = _FIRST_POLL
        while not self._is_closing:
            was_busy = self._read_fifos()
            was_busy |= self._sockets.progress(0.0 if was_busy else self._choose_sleep(pause))
            while not self._commands.empty():
                self._commands.get()()
            self._acknowledge()
            self._check_limits()
            pause = _FIRST_POLL if was_busy else min(2 * pause, _LONGEST_POLL)
        for peer, link in self._links.items():
            if link.is_up:
                self._sockets.put(peer, PutFrame(FrameKind.BYE, self._rank, received=link.received), None)
        deadline = time.monotonic() + 1.0
        while self._sockets.has_outgoing and time.monotonic() < deadline:
            self._sockets.progress(0.01)

    def _choose_sleep(self, pause: float) -> float:
        if any(self._fifos.values()):
            return pause
        outstanding = any(link.unacknowledged or not link.is_up for link in self._links.values())
        return _CHECK_SECONDS if outstanding else _LONGEST_SLEEP

    def _add_region(self, region: PutRegion) -> None:
        self._regions[region.number] = region
        self._views[region.number] = view_bytes(region.whole)
        if region.number < LOCAL_REGIONS:
            self._known = max(self._known, region.number + 1)
        self._host.register(region)

    def _remove_region(self, number: int) -> None:
        self._regions.pop(number, None)
        self._views.pop(number, None)
        self._host.unregister(number)

    def _reads(self, number: int) -> bool:
        return any(source == number for link in self._links.values() for _, _, source in link.unacknowledged)

    def _read_fifos(self) -> bool:
        was_busy = False
        for fifo in self._fifos:
            for _ in range(_BATCH):
                if any(len(link.unacknowledged) >= WINDOW for link in self._links.values()):
                    break
                words = fifo.take()
                if words is None:
                    break
                was_busy = True
                try:
                    self._send(unpack(words))
                except (ValueError, FrameError) as error:
                    self._broken = self._broken or f"a descriptor is invalid: {error}"
        return was_busy

    def _drain_fifos(self) -> None:
        while self._read_fifos():
            pass

    def _send(self, put: Put) -> None:
        payload = self._find_payload(put)
        link = self._links[put.peer]
        if link.failure is not None:
            return
        signal = NO_SIGNAL if put.signal is None else put.signal
        number = link.sent + 1
        frame = PutFrame(FrameKind.PUT, self._rank, number, link.received, put.region, put.offset, put.size, signal)
        link.transport.put(put.peer, frame, payload)
        link.spoke = time.monotonic()
        link.sent = number
        if not link.transport.is_reliable:
            if not link.unacknowledged:
                link.since = time.monotonic()
            link.unacknowledged.append((frame, payload, put.source_region))
            link.answered = link.received

    def _find_payload(self, put: Put) -> memoryview | None:
        """The bytes to send. ValueError or FrameError for a put that reads or writes outside of its regions."""
        if not 0 <= put.peer < self._world or put.peer == self._rank:
            raise ValueError(f"a put to rank {put.peer}: the peers of rank {self._rank} are those of {self._world}")
        if put.size > MAX_PUT_BYTES:
            raise ValueError(f"a put of {put.size} bytes: the limit is {MAX_PUT_BYTES}")
        destination = self._regions.get(put.region)
        if destination is None or put.region >= LOCAL_REGIONS:
            raise ValueError(f"a put into region {put.region}, which is none of the group's")
        signal = NO_SIGNAL if put.signal is None else put.signal
        frame = PutFrame(FrameKind.PUT, self._rank, 0, 0, put.region, put.offset, put.size, signal)
        require_inside(destination, frame, self._world)
        if not put.size:
            return None
        source = self._regions.get(put.source_region)
        if source is None or put.source + put.size > source.size:
            raise ValueError(f"a put of {put.size} bytes from {put.source} of region {put.source_region}")
        start = source.pad_bytes + put.source
        return self._views[put.source_region][start : start + put.size]

    def _acknowledge(self) -> None:
        for peer, link in self._links.items():
            if link.is_up and link.answered < link.received:
                self._answer(peer, link)

    def _answer(self, peer: int, link: _Link) -> None:
        link.answered, link.spoke = link.received, time.monotonic()
        self._sockets.put(peer, PutFrame(FrameKind.ACK, self._rank, received=link.received), None)

    def _check_limits(self) -> None:
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return
        self._checked = now
        for peer, link in self._links.items():
            if link.transport.is_reliable or link.failure is not None:
                continue
            if link.is_up and now - link.spoke > min(self._limit / 4, _MAX_SILENCE):
                self._answer(peer, link)  # of a connection that the peer has lost unknown to this side, an answer tells
            waited = now - link.since
            if not link.is_up and waited > self._limit:
                self._fail(peer, f"there was no connection for {waited:.3g} s: {link.why}")
            elif link.is_up and link.unacknowledged and waited > self._limit:
                self._fail(peer, f"it has acknowledged nothing for {waited:.3g} s")

    def _fail(self, peer: int, why: str) -> None:
        link = self._links[peer]
        link.failure = link.failure or why
        link.is_up = False
        link.unacknowledged.clear()
        link.early.clear()
        self._sockets.forget(peer)

    # Called by transports, in the thread.

    def place(self, frame: PutFrame) -> memoryview | None:
        """Find where a put's payload goes; None if it came before, or its region is closed."""
        link = self._links[frame.source]
        if frame.number <= link.received or frame.number in link.early:
            return None
        if frame.number > link.received + 2 * WINDOW:
            raise self._refuse(frame, f"it is put {frame.number}, and {link.received} have come")
        region = self._regions.get(frame.region)
        if region is None or frame.region >= LOCAL_REGIONS:
            if frame.region < self._known:
                return None
            raise self._refuse(frame, f"there is no region {frame.region}")
        try:
            require_inside(region, frame, self._world)
        except FrameError as error:
            raise self._refuse(frame, str(error)) from error
        start = region.pad_bytes + frame.offset
        return self._views[frame.region][start : start + frame.size]

    def _refuse(self, frame: PutFrame, why: str) -> FrameError:
        """Give up a peer that has the token and sends what no proxy would."""
        link = self._links[frame.source]
        link.failure = link.failure or f"a frame of it is invalid: {why}"
        return FrameError(why)

    def arrived(self, frame: PutFrame) -> None:
        """Note what a frame acknowledges; count the signals of puts that have no gap before them any more."""
        link = self._links[frame.source]
        if frame.received > link.sent:
            raise self._refuse(frame, f"it acknowledges put {frame.received} of {link.sent}")
        while link.unacknowledged and link.unacknowledged[0][0].number <= frame.received:
            link.unacknowledged.popleft()
            link.since = time.monotonic()
        if frame.kind is FrameKind.BYE:
            self._fail(frame.source, ENDED)
        if frame.kind is not FrameKind.PUT or frame.number <= link.received:
            return
        link.early[frame.number] = frame
        while (ready := link.early.pop(link.received + 1, None)) is not None:
            link.received += 1
            region = self._regions.get(ready.region)
            if region is not None:
                count_signal(self._views[ready.region], region, ready, self._fence)

    def received_from(self, peer: int) -> int:
        """The number of the peer's puts that have arrived without a gap."""
        return self._links[peer].received

    def connected(self, peer: int, received: int) -> None:
        """Send again what the peer has not received."""
        link = self._links[peer]
        if received > link.sent:
            raise FrameError(f"rank {peer} greets with put {received} of {link.sent}")
        while link.unacknowledged and link.unacknowledged[0][0].number <= received:
            link.unacknowledged.popleft()
        link.is_up, link.since, link.answered = True, time.monotonic(), link.received
        for frame, payload, _ in link.unacknowledged:
            self._sockets.put(peer, frame._replace(received=link.received), payload)

    def lost(self, peer: int, why: str) -> None:
        """Note since when and why a peer is not connected; after a refused frame, give it up."""
        link = self._links[peer]
        if link.is_up:
            link.since = time.monotonic()
        link.is_up, link.why = False, why
        if link.failure is not None:
            self._fail(peer, link.failure)
