# SPDX-License-Identifier: Apache-2.0
"""Transport over TCP sockets: one connection a pair of ranks, which the lower rank opens, and again when it broke.

The first frame of each side is a greeting (HELLO), with the job's token. The listener is bound to one address. A
connection that has not greeted gets no memory but a header's and is closed after GREETING_SECONDS. A new connection
of a peer, with the token, replaces the old one, which that peer has given up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stretto.memory.network.frames import HEADER_BYTES, FrameError, FrameKind, PutFrame, pack_frame, unpack_frame
from stretto.memory.network.transport import PutTransport

if TYPE_CHECKING:
    from stretto.memory.network.proxy import Proxy


GREETING_SECONDS = 5.0
MAX_STRANGERS = 64
"""Connections at once that have not greeted."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between attempts to connect
_DISCARD_BYTES = 1 << 16
_BUFFERS_AT_ONCE = 64


class _PeerConnection:
    """A socket, what it is to send, and the frame that it is receiving. peer: None until it has greeted."""

    def __init__(self, socket: socket.socket, peer: int | None) -> None:
        self.socket = socket
        self.peer = peer
        self.is_open = False  # connected at all
        self.has_greeted = False
        self.began = time.monotonic()
        self.outgoing: deque[memoryview] = deque()
        self.header = bytearray(HEADER_BYTES)
        self.filled = 0  # bytes of the header, then of the payload
        self.frame: PutFrame | None = None  # whose payload is coming
        self.target: memoryview | None = None


class SocketTransport(PutTransport):
    """TCP from this rank to peers on other nodes. address: of the interface that the listener is bound to."""

    def __init__(self, rank: int, world: int, token: bytes, address: str) -> None:
        self._rank, self._world, self._token = rank, world, token
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind((address, 0))
        self._listener.listen(max(128, 2 * world))
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wakes, self._waker = socket.socketpair()
        for end in (self._wakes, self._waker):
            end.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._receiver: Proxy
        self._peers: dict[int, tuple[str, int]] = {}
        self._connections: dict[int, _PeerConnection] = {}  # by peer, ready or about to be
        self._strangers: set[_PeerConnection] = set()
        self._retries: dict[int, tuple[float, float]] = {}  # by peer: when, and the pause after it
        self._accepts_from = 0.0  # when connections are accepted again; 0: they are
        self._discarded = memoryview(bytearray(_DISCARD_BYTES))

    def connect(self, receiver: Proxy, peers: Mapping[int, tuple[str, int]]) -> None:
        """Begin to connect to the peers with higher ranks, and to accept those with lower ones."""
        self._receiver = receiver
        self._peers = dict(peers)
        self._retries = {peer: (0.0, _FIRST_PAUSE) for peer in peers if peer > self._rank}

    def wake(self) -> None:
        """End a `progress` that waits, from any thread."""
        with contextlib.suppress(OSError):  # its buffer is full: it wakes anyway
            self._waker.send(b"\0")

    def put(self, peer: int, frame: PutFrame, payload: memoryview | None) -> None:
        connection = self._connections.get(peer)
        if connection is not None and connection.has_greeted:
            self._queue(connection, frame, payload)

    def _queue(self, connection: _PeerConnection, frame: PutFrame, payload: memoryview | None = None) -> None:
        connection.outgoing.append(memoryview(pack_frame(frame, self._token)))
        if payload is not None and len(payload):
            connection.outgoing.append(payload)

    def progress(self, seconds: float) -> bool:
        """Send, receive, accept and connect whatever can be now, after waiting up to so many seconds for something."""
        if self._accepts_from and self._accepts_from < time.monotonic():
            self._accepts_from = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        self._open_due()
        self._close_silent()
        for connection in [*self._connections.values(), *self._strangers]:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wants_to_write(connection) else 0)
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, connection)
        was_busy = False
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wakes:
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(4096)
            elif key.data in self._strangers or self._connections.get(key.data.peer) is key.data:
                was_busy |= self._serve(key.data, events)
        return was_busy

    @staticmethod
    def _wants_to_write(connection: _PeerConnection) -> bool:
        return not connection.is_open or bool(connection.outgoing)

    def _open_due(self) -> None:
        now = time.monotonic()
        for peer, (due, pause) in list(self._retries.items()):
            if now < due:
                continue
            self._retries[peer] = now + pause, min(2 * pause, _LONGEST_PAUSE)
            if peer in self._connections:
                continue
            host, port = self._peers[peer]
            try:
                opened = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            except OSError as error:
                self._receiver.lost(peer, str(error))
                continue
            opened.setblocking(False)
            with contextlib.suppress(OSError):  # a loopback listener is connected from its own address
                opened.bind((self.address[0], 0))
            if (problem := opened.connect_ex((host, port))) in (0, errno.EINPROGRESS):
                self._add(_PeerConnection(opened, peer))
            else:
                opened.close()
                self._receiver.lost(peer, os.strerror(problem))

    def _add(self, connection: _PeerConnection) -> None:
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        if connection.peer is None:
            self._strangers.add(connection)
        else:
            self._connections[connection.peer] = connection

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # too many open files, for example: the connection stays, and would end every sleep
            self._accepts_from = time.monotonic() + _FIRST_PAUSE
            self._selector.unregister(self._listener)
            for peer in self._peers.keys() - self._connections.keys():
                if peer < self._rank:
                    self._receiver.lost(peer, f"none can be accepted: {error}")
            return
        accepted.setblocking(False)
        connection = _PeerConnection(accepted, None)
        connection.is_open = True
        self._add(connection)
        if len(self._strangers) > MAX_STRANGERS:
            self._close(min(self._strangers, key=lambda stranger: stranger.began), "too many have not greeted")

    def _close_silent(self) -> None:
        limit = time.monotonic() - GREETING_SECONDS
        for connection in [*self._strangers, *self._connections.values()]:
            if not connection.has_greeted and connection.began < limit:
                self._close(connection, "it did not greet")

    def _serve(self, connection: _PeerConnection, events: int) -> bool:
        try:
            if not connection.is_open:
                error = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, "it cannot be reached")
                connection.is_open = True
                self._greet(connection)
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            return bool(events & selectors.EVENT_READ) and self._receive(connection)
        except (OSError, FrameError) as error:
            self._close(connection, str(error))
            return True

    def _greet(self, connection: _PeerConnection) -> None:
        assert connection.peer is not None
        received = self._receiver.received_from(connection.peer)
        self._queue(connection, PutFrame(FrameKind.HELLO, self._rank, received=received))

    @staticmethod
    def _send(connection: _PeerConnection) -> None:
        outgoing = connection.outgoing
        while outgoing:
            parts = [outgoing[index] for index in range(min(len(outgoing), _BUFFERS_AT_ONCE))]
            try:
                sent = connection.socket.sendmsg(parts)
            except BlockingIOError:
                return
            for part in parts:
                if sent < len(part):
                    outgoing[0] = part[sent:]
                    break
                sent -= len(part)
                outgoing.popleft()

    def _receive(self, connection: _PeerConnection) -> bool:
        """Receive what has come, up to a few frames, so that others have their turn."""
        for _ in range(_BUFFERS_AT_ONCE):
            frame = connection.frame
            if frame is None:
                into = memoryview(connection.header)[connection.filled :]
            elif connection.target is None:
                into = self._discarded[: frame.size - connection.filled]
            else:
                into = connection.target[connection.filled :]
            try:
                count = connection.socket.recv_into(into)
            except BlockingIOError:
                return True
            if count == 0:
                raise OSError("the peer has closed it")
            connection.filled += count
            if frame is None and connection.filled == HEADER_BYTES:
                frame = self._read_header(connection)
            if frame is not None and connection.filled == frame.size:
                connection.frame = connection.target = None
                connection.filled = 0
                if frame.kind is not FrameKind.HELLO:
                    self._receiver.arrived(frame)
                    if connection.socket.fileno() < 0:  # it said goodbye
                        return True
        return True

    def _read_header(self, connection: _PeerConnection) -> PutFrame:
        frame = unpack_frame(memoryview(connection.header), self._token)
        connection.filled = 0
        if not connection.has_greeted:
            self._read_greeting(connection, frame)
        elif frame.kind is FrameKind.HELLO or frame.source != connection.peer:
            raise FrameError(f"a frame of rank {frame.source} on the connection of rank {connection.peer}")
        elif frame.kind is FrameKind.PUT:
            connection.target = self._receiver.place(frame)
        connection.frame = frame
        return frame

    def _read_greeting(self, connection: _PeerConnection, frame: PutFrame) -> None:
        if frame.kind is not FrameKind.HELLO:
            raise FrameError("its first frame is no greeting")
        if frame.source not in self._peers or connection.peer not in (None, frame.source):
            raise FrameError(f"rank {frame.source} greets, and is no peer here")
        if connection.peer is None:
            if frame.source > self._rank:
                raise FrameError(f"rank {frame.source} connects, and is to be connected to")
            if frame.source in self._connections:
                self._close(self._connections[frame.source], "the peer has connected anew")
            self._strangers.discard(connection)
            connection.peer = frame.source
            self._connections[frame.source] = connection
            self._greet(connection)
        connection.has_greeted = True
        self._retries.pop(frame.source, None)
        self._receiver.connected(frame.source, frame.received)

    def drop(self, peer: int, why: str) -> None:
        if peer in self._connections:
            self._close(self._connections[peer], why)

    def _close(self, connection: _PeerConnection, why: str) -> None:
        if connection.socket.fileno() < 0:
            return
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._strangers.discard(connection)
        peer = connection.peer
        if peer is None or self._connections.get(peer) is not connection:
            return
        del self._connections[peer]
        if peer > self._rank and peer not in self._retries:
            self._retries[peer] = time.monotonic() + _FIRST_PAUSE, _FIRST_PAUSE
        self._receiver.lost(peer, why)

    def forget(self, peer: int) -> None:
        """Close the connection to a peer and open none again."""
        self._peers.pop(peer, None)
        if peer in self._connections:
            self._close(self._connections[peer], "it was given up")
        self._retries.pop(peer, None)

    @property
    def has_outgoing(self) -> bool:
        return any(connection.outgoing for connection in self._connections.values())

    def close(self) -> None:
        for connection in [*self._connections.values(), *self._strangers]:
            connection.socket.close()
        self._connections, self._strangers = {}, set()
        self._selector.close()
        for end in (self._listener, self._wakes, self._waker):
            end.close()
