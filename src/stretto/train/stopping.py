# SPDX-License-Identifier: Apache-2.0
"""Stops training on Ctrl-C, SIGTERM or SIGHUP: the ranks agree to end after the same step."""

import signal
import threading
import time
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from stretto import counters
from stretto.memory import group_timeout
from stretto.memory.shared_groups import SharedGroups
from stretto.parallel.comm.collectives import Pending, start_all_reduce

# Seconds; signals closer together count as one request: a launcher may forward a signal that the terminal has already
# sent to every process.
ONE_REQUEST = 1.0


class StopRequest:
    """Context manager that records SIGINT, SIGTERM and SIGHUP, and lets the ranks agree to stop.

    The first signal requests a stop: after the current step, or with several ranks after the next one, since the ranks
    exchange requests while they work on a step. A second signal, at least a second later, has its default effect: it
    ends this process immediately.
    """

    def __init__(self) -> None:
        self._received_at: float | None = None
        self._is_requested = False
        self._before: dict[signal.Signals, Any] = {}
        # Signals reach single ranks at any time. The ranks agree on the host (gloo), without waiting for a GPU.
        self._group: dist.ProcessGroup | None = None
        if dist.get_world_size() > 1:
            limit = timedelta(seconds=group_timeout(None))
            self._group = SharedGroups().get_for_all("stop requests", timeout=limit)
        self._exchange: Pending | None = None
        self._asked = torch.zeros(1, dtype=torch.int32, device="cpu")

    def request(self) -> None:
        """Ask all ranks to stop after the same step, as a signal to this process would."""
        self._is_requested = True

    def is_agreed(self) -> bool:
        """Check whether any rank had been asked to stop by the previous call; all ranks get the same answer.

        Collective. It starts an exchange, whose result the next call returns, so that no rank waits for one that works
        on the same step.
        """
        is_asked = self._is_requested or self._received_at is not None
        if self._group is None:
            return is_asked
        if self._finish_exchange():
            counters.mark_stopped(signal.SIGTERM if not self._is_requested else 0)
            return True
        self._asked.fill_(int(is_asked))
        self._exchange = start_all_reduce(self._asked, self._group)
        return False

    def _finish_exchange(self) -> bool:
        """Wait for the exchange that was started last, if any; returns whether a rank was asked to stop."""
        if self._exchange is None:
            return False
        self._exchange.wait()
        self._exchange = None
        return bool(self._asked.item())

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup, or in the background
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None:  # after an error, other ranks may never have joined the exchange
            self._finish_exchange()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received_at is None:
            self._received_at = now
        elif now - self._received_at > ONE_REQUEST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
