# SPDX-License-Identifier: Apache-2.0
"""Supervises the processes of a run's ranks: forwards signals to them, and ends all of them when one fails."""

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

from stretto.launch.failures import Failure, describe_signal, read_error, seen_file
from stretto.launch.watch import RankWatch
from stretto.launch.watching.stacks import process_state

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_REQUEST = 1.0  # seconds; signals closer together count as one request (`timeout` sends its signal twice)
POLL = 0.05  # seconds


@dataclass(frozen=True)
class StopTimeouts:
    """Time limits in seconds.

    stop: for ranks that were asked to stop, while none of them writes a checkpoint. After a rank has failed, report:
    for the others to write their own errors; end: for them to exit when they are asked to. kill: for processes that
    were killed to end; one that has much memory takes seconds, and one that waits in a driver may never end.
    """

    stop: float = 60.0
    report: float = 1.0
    end: float = 5.0
    kill: float = 60.0


class UnkillableError(RuntimeError):
    """Processes of ranks have not ended although they were killed: they wait in the kernel, and nothing ends them."""


@dataclass(frozen=True)
class _RankProcess:
    process: subprocess.Popen[bytes]
    error_file: Path  # is there, and whole, once the rank has raised an exception

    def is_running(self) -> bool:
        return self.process.poll() is None

    def has_ended(self) -> bool:
        return not self.is_running() or self.has_failed()

    def has_failed(self) -> bool:
        """Check whether the rank exited with an error, or has written its error and hangs while it exits."""
        return self.process.poll() not in (None, 0) or self.error_file.exists()


class Supervisor:
    """The processes of one job's ranks, each the leader of its own session. Call `check` several times a second.

    watch: reads the ranks' counters, to end a run in which a rank is stuck.
    """

    def __init__(self, timeouts: StopTimeouts, watch: RankWatch | None = None) -> None:
        self._timeouts = timeouts
        self.watch = watch
        self._ranks: dict[int, _RankProcess] = {}
        self.stop_signal: signal.Signals | None = None  # the first that asked this process to stop
        self._stop_requested = 0.0
        self._is_second_request = False
        self.was_asked = False  # by `request_stop`
        self._has_forwarded = False
        self._is_over = False  # all ranks were killed: those that end from now on have not failed
        self._killed: float | None = None  # time.monotonic() of the first kill
        self._killed_groups: set[int] = set()  # of ranks that had ended
        self.failures: list[Failure] = []

    def request_stop(self) -> None:
        """Stop the ranks at the next `check`, as after a signal; `stop_signal` does not report it."""
        if not self.was_asked and self.stop_signal is None:
            self.was_asked, self._stop_requested = True, time.monotonic()

    def add(self, rank: int, process: subprocess.Popen[bytes], error_file: Path) -> None:
        self._ranks[rank] = _RankProcess(process, error_file)
        if self.watch is not None:
            self.watch.add(rank, process.pid)

    def check(self) -> None:
        """Forward a signal that was received; end all ranks if one has failed or if they take too long to stop.

        Raises UnkillableError if ranks that were killed do not end.
        """
        if self._is_over:
            self.kill()
            self._require_end()
        elif any(rank.has_failed() for rank in self._ranks.values()):
            self._wait_for_errors()
            self.failures = self._find_cause(sorted(self._find_failures(), key=lambda failure: failure.order))
            for rank in self._ranks.values():
                with suppress(OSError):  # the folder may have been removed; the failure comes first
                    seen_file(rank.error_file).touch()
            self._signal_all(signal.SIGTERM)
            self._wait(self._timeouts.end)
            self._is_over = True
            self.kill()
        elif self._is_stopping and not self._has_forwarded:
            self._has_forwarded = True
            self._signal_all(signal.SIGTERM)
        elif self._is_second_request or self._stops_too_slowly():
            self._stop_at_once()
        elif self.watch is not None and (stall := self.watch.look(self._running_ranks())) is not None:
            self.failures = [Failure.of_stall(stall)]
            self._is_over = True
            self.kill()

    def _find_cause(self, failures: list[Failure]) -> list[Failure]:
        """Put the cause first, if all failures are consequences: a stuck rank or a lost connection."""
        if not failures or not failures[0].is_consequence:
            return failures
        cause = None if self.watch is None else self.watch.find_culprit(self._running_ranks(), failures)
        return failures if cause is None else [cause, *failures]

    def _running_ranks(self) -> list[int]:
        return [number for number, rank in self._ranks.items() if rank.is_running()]

    @property
    def _is_stopping(self) -> bool:
        return self.was_asked or self.stop_signal is not None

    def _seconds_of_stop(self) -> float:
        """Seconds since the ranks were asked to stop."""
        return time.monotonic() - self._stop_requested

    def _stops_too_slowly(self) -> bool:
        """Check whether ranks have not stopped in time. A large checkpoint may take longer, while it progresses."""
        limit = self._timeouts.stop
        if not self._is_stopping or self._seconds_of_stop() <= limit:
            return False
        return self.watch is None or not self.watch.is_saving(self._running_ranks(), limit)

    def _stop_at_once(self) -> None:
        running = self._running_ranks()
        if running and self.watch is not None:
            logger.warning("%s", self.watch.describe_unstopped(running, self._seconds_of_stop()))
        self._is_over = True
        self.kill()

    def _require_end(self) -> None:
        assert self._killed is not None
        running = self._running_ranks()
        if running and time.monotonic() - self._killed > self._timeouts.kill:
            found = [(rank, self._ranks[rank].process.pid) for rank in running]
            named = ", ".join(f"rank {rank} (pid {pid}): {process_state(pid) or 'it runs'}" for rank, pid in found)
            raise UnkillableError(f"processes have not ended within {self._timeouts.kill:g} s after SIGKILL: {named}")

    def has_running_ranks(self) -> bool:
        """Check whether any rank's process is still running."""
        return any(rank.is_running() for rank in self._ranks.values())

    def kill(self) -> None:
        """Kill the remaining processes of every rank, including their children, and wait until they have exited."""
        if self._killed is None:
            self._killed = time.monotonic()
        for number, rank in self._ranks.items():
            if rank.is_running():
                is_due = True
            else:  # once: another process may get the number of one that has ended
                is_due = rank.process.returncode != 0 and number not in self._killed_groups
                self._killed_groups.add(number)
            if is_due:
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
        if self.stop_signal is None:
            self.stop_signal, self._stop_requested = signal.Signals(number), time.monotonic()
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

    def _wait_for_errors(self) -> None:
        """Give the other ranks time to write their own errors. A rank that has failed keeps its process for a while."""
        deadline = time.monotonic() + self._timeouts.report
        ranks = self._ranks.values()
        while not all(rank.has_ended() for rank in ranks) and time.monotonic() < deadline:
            time.sleep(POLL)

    def _find_failures(self) -> Iterator[Failure]:
        for number, rank in self._ranks.items():
            if not rank.has_failed():
                continue
            status = rank.process.poll()
            # A scheduler may signal the ranks, too, when it signals this process.
            was_asked = self._has_forwarded or self.stop_signal is not None
            if was_asked and status is not None and -status in (signal.SIGTERM, self.stop_signal):
                continue  # it was asked to stop before it had installed its signal handler
            if rank.error_file.exists():
                found = read_error(rank.error_file)
                if found.kind == "lost connection" and was_asked:
                    continue  # its peer was asked to stop before it had installed its signal handler
                yield found
            elif status is not None and status < 0:
                # A signal is a cause, ordered before the errors of ranks that lost their peer; but NCCL's watchdog
                # aborts a process whose collective has reached its time limit.
                is_abort = status == -signal.SIGABRT
                order = (2 if is_abort else 0, time.time())
                yield Failure(number, describe_signal(-status), None, order, "killed", is_consequence=is_abort)
            else:
                yield Failure(number, f"it exited with status {status}", None, (1, time.time()), "exited")
