# SPDX-License-Identifier: Apache-2.0
"""A transport that delays its messages, to emulate a link with a long latency."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from stretto.collectives.two_level import Message, MessageWork, Transport


class DelayedTransport:
    """Wraps a transport and passes each message on to it `seconds(peer)` after it was sent.

    A receive takes at least this latency plus the wrapped transport's time for the bytes. Delays of several messages
    overlap, as on a long wire, and messages keep their order; the sender does not block. Receives, and messages without
    delay, are passed to the wrapped transport at once.
    """

    def __init__(self, below: Transport, seconds: Callable[[int], float]) -> None:
        self._below = below
        self._seconds = seconds
        self._waiting: queue.SimpleQueue[_Delayed] = queue.SimpleQueue()
        threading.Thread(target=self._deliver, daemon=True).start()

    def start(
        self, outgoing: Sequence[Message], incoming: Sequence[Message]
    ) -> tuple[Sequence[MessageWork], Sequence[MessageWork]]:
        """Start sends (after their delay) and receives, each message by itself."""
        now = time.monotonic()
        sent: list[MessageWork] = []
        for message in outgoing:
            if seconds := self._seconds(message.peer):
                delayed = _Delayed(message, now + seconds)
                self._waiting.put(delayed)
                sent.append(delayed)
            else:
                sent += self._below.start([message], [])[0]
        return sent, self._below.start([], incoming)[1]

    def _deliver(self) -> None:
        """Pass messages on when they are due. All delays are equal (or zero), so the queue is in order of due time."""
        while True:
            delayed = self._waiting.get()
            time.sleep(max(0.0, delayed.due - time.monotonic()))
            try:
                delayed.transfer = self._below.start([delayed.message], [])[0][0]
            except RuntimeError as error:  # raised where the sender waits
                delayed.error = error
            delayed.left.set()


class _Delayed:
    def __init__(self, message: Message, due: float) -> None:
        self.message = message
        self.due = due
        self.left = threading.Event()
        self.transfer: MessageWork | None = None
        self.error: RuntimeError | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        end = time.monotonic() + timeout.total_seconds()
        if not self.left.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"a delayed message timed out after {timeout.total_seconds():g} s")
        if self.transfer is None:
            raise self.error or RuntimeError("a delayed message was not sent")
        return self.transfer.wait(timedelta(seconds=max(1e-3, end - time.monotonic())) if timeout else timeout)
