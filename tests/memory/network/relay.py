# SPDX-License-Identifier: Apache-2.0
"""A network that misbehaves: a relay between two proxies that reorders and delays frames and cuts connections."""

import contextlib
import random
import socket
import struct
import threading

from stretto.memory.network.frames import HEADER_BYTES, FrameKind

SIZE_AT, KIND_AT = 56, 5


class Relay:
    """Listens at `address` and passes frames on to `target`, both ways.

    cut_every: on average a connection is cut after so many frames, in the middle of one; 0: never. window: frames of
    puts that it holds back, to pass them on in another order. is_down: it accepts nothing and cuts what there is.
    cuts_next: the next frame is cut in its middle. hides_ends: of a connection's end the other side hears only once it
    sends something. accepted: the connections so far.
    """

    def __init__(self, target, seed, *, window=1, cut_every=0):
        self._target, self._rng = target, random.Random(seed)
        self._window, self._cut_every = window, cut_every
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._open = set()
        self._lock = threading.Lock()
        self.is_down = self.cuts_next = self.hides_ends = False
        self.cuts = self.reordered = self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.is_down:
                    near.close()
                    continue
                try:
                    far = socket.create_connection(self._target)
                except OSError:  # it has died
                    near.close()
                    continue
                with self._lock:
                    self.accepted += 1
                    self._open |= {near, far}
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def take_down(self):
        """Cut all connections, and accept none until `bring_up`."""
        self.is_down = True
        self._cut(*self._open)

    def reset(self):
        """Have both ends of all connections hear of a reset, in place of an end."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with self._lock:
            ends, self._open = self._open, set()
        for end in ends:
            with contextlib.suppress(OSError):
                end.close()

    def bring_up(self):
        self.is_down = False

    def _cut(self, *ends):
        with self._lock:
            for end in ends:
                self._open.discard(end)
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _pass_on(self, source, target):
        held = []
        with contextlib.suppress(OSError):
            while True:
                source.settimeout(0.002 if held else None)
                try:
                    first = source.recv(1)
                except TimeoutError:
                    self._release(held, target)
                    continue
                source.settimeout(None)
                if not first:
                    break
                header = first + self._read(source, HEADER_BYTES - 1)
                frame = header + self._read(source, int.from_bytes(header[SIZE_AT : SIZE_AT + 4], "little"))
                if self.cuts_next or (self._cut_every and self._rng.randrange(self._cut_every) == 0):
                    self.cuts_next = False
                    target.sendall(frame[: self._rng.randrange(len(frame))])
                    self.cuts += 1
                    break
                if header[KIND_AT] != FrameKind.PUT:
                    target.sendall(frame)
                    continue
                held.append(frame)
                if len(held) >= self._window:
                    self._release(held, target)
        self._cut(source, *([] if self.hides_ends else [target]))

    def _release(self, held, target):
        order = list(held)
        self._rng.shuffle(order)
        self.reordered += order != held
        held.clear()
        for frame in order:
            target.sendall(frame)

    @staticmethod
    def _read(source, size):
        data = bytearray()
        while len(data) < size:
            part = source.recv(size - len(data))
            if not part:
                raise OSError("closed")
            data += part
        return bytes(data)

    def close(self):
        self._listener.close()
        self._cut(*self._open)
