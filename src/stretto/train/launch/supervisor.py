# SPDX-License-Identifier: Apache-2.0
"""Supervises the processes of a run's ranks: forwards signals to them, and ends all of them when one fails."""

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST = 1.0  # seconds; signals closer together count as one request (`timeout` sends its signal twice)
POLL = 0.05  # seconds
# Errors of ranks that lost their connection to a peer: they are consequences of a failure and do not explain it.
LOST_PEER = (
    "closed by peer", "reset by peer", "broken pipe",  # gloo
    "remote process exited", "communicator was aborted",  # NCCL
    "distnetworkerror",  # the store
)  # fmt: skip


@dataclass(frozen=True)
class StopTimeouts:
    """Time limits in seconds.

    stop: for ranks that were asked to stop. After a rank has failed, report: for the others to write their own errors;
    end: for them to exit when they are asked to.
    """

    stop: float = 60.0
    report: float = 1.0
    end: float = 5.0


@dataclass(frozen=True)
class Failure:
    """Why a rank failed: `reason` in a line, `trace` if it wrote one. The failure of the lowest `order` came first."""

    rank: int
    reason: str
    trace: str | None
    order: tuple[int, float]


@dataclass(frozen=True)
class _RankProcess:
    process: subprocess.Popen[bytes]
    error_file: Path  # of torch.distributed.elastic's `record`

    def is_running(self) -> bool:
        return self.process.poll() is None

    def has_failed(self) -> bool:
        """Check whether the rank exited with an error, or has written its error and hangs while it exits."""
        return self.process.poll() not in (None, 0) or self.error_file.exists()


class Supervisor:
    """The processes of one job's ranks, each the leader of its own session. Call `check` several times a second."""

    def __init__(self, timeouts: StopTimeouts) -> None:
        self._timeouts = timeouts
        self._ranks: dict[int, _RankProcess] = {}
        self._stop_signal: signal.Signals | None = None
        self._stop_requested = 0.0
        self._is_second_request = False
        self._has_forwarded = False
        self.failures: list[Failure] = []

    @property
    def stop_signal(self) -> signal.Signals | None:
        """The first signal that asked this process to stop."""
        return self._stop_signal

    def add(self, rank: int, process: subprocess.Popen[bytes], error_file: Path) -> None:
        self._ranks[rank] = _RankProcess(process, error_file)

    def check(self) -> None:
        """Forward a signal that was received; end all ranks if one has failed or if they take too long to stop."""
        if any(rank.has_failed() for rank in self._ranks.values()):
            self._wait(self._timeouts.report)
            self.failures = sorted(self._find_failures(), key=lambda failure: failure.order)
            self._signal_all(signal.SIGTERM)
            self._wait(self._timeouts.end)
            self.kill()
        elif self._stop_signal is not None and not self._has_forwarded:
            self._has_forwarded = True
            self._signal_all(signal.SIGTERM)
        elif self._is_second_request:
            self._stop_at_once()
        elif self._stop_signal is not None and time.monotonic() - self._stop_requested > self._timeouts.stop:
            logger.warning("the ranks did not stop within %g s and were killed", self._timeouts.stop)
            self._stop_at_once()

    def _stop_at_once(self) -> None:
        self.kill()
        self._ranks = {}  # ranks killed on request have not failed

    def has_running_ranks(self) -> bool:
        """Check whether any rank's process is still running."""
        return any(rank.is_running() for rank in self._ranks.values())

    def kill(self) -> None:
        """Kill the remaining processes of every rank, those that it has started too, and wait until they are gone."""
        for rank in self._ranks.values():
            if rank.is_running() or rank.process.returncode != 0:
                with suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
        self._wait(self._timeouts.end)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Record signals in the block, so that `check` forwards them. Does nothing outside Python's main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGQUIT)}
        for number in STOP_SIGNALS:
            if number is not signal.SIGHUP or before[number] is not signal.SIG_IGN:  # nohup ignores it
                signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._stop_signal is None:
            self._stop_signal, self._stop_requested = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._stop_requested > ONE_REQUEST:
            self._is_second_request = True

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks.values():
            if rank.is_running():
                rank.process.send_signal(number)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.has_running_ranks() and time.monotonic() < deadline:
            time.sleep(POLL)

    def _find_failures(self) -> Iterator[Failure]:
        for number, rank in self._ranks.items():
            if not rank.has_failed():
                continue
            status = rank.process.poll()
            if status == -signal.SIGTERM and self._has_forwarded:
                continue  # it was asked to stop before it had installed its signal handler
            if rank.error_file.exists():
                reason, trace = _read_error(rank.error_file)
                is_lost_peer = any(words in reason.lower() for words in LOST_PEER)
                if is_lost_peer and self._has_forwarded:
                    continue  # its peer was asked to stop before it had installed its signal handler
                yield Failure(number, reason, trace, (1 + is_lost_peer, rank.error_file.stat().st_mtime))
            elif status is not None and status < 0:
                # A signal is always a cause: it is ordered before the errors of ranks that lost their peer.
                yield Failure(number, _describe_signal(-status), None, (0, time.time()))
            else:
                yield Failure(number, f"it exited with status {status}", None, (1, time.time()))


def _read_error(error_file: Path) -> tuple[str, str | None]:
    """Read the type and first line of a rank's exception, and its traceback."""
    try:
        content = json.loads(error_file.read_text())["message"]
        lines = str(content["message"]).strip().splitlines()
        return lines[0], str(content["extraInfo"]["py_callstack"])
    except (ValueError, KeyError, TypeError, IndexError):  # the rank was killed while it wrote the file
        return "an exception", None


def _describe_signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hints = {signal.SIGKILL: ", as when memory runs out", signal.SIGBUS: ", as when a mapped file is cut short"}
    hint = hints.get(number, "")
    return f"it was killed by {name}{hint}"
