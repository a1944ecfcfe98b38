# SPDX-License-Identifier: Apache-2.0
"""Ranks of a bench as processes of their own, which answer by lines of JSON on stdout.

They are for ranks that `stretto.bench.harness.run_ranks` cannot start: in a network namespace.
"""

import json
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

_TO_END = 5.0


class Processes:
    """One process a rank, of the command given for it. A context manager, which ends them; they end with this one too.

    What a rank writes to stderr goes to this process's.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[queue.Queue[bytes]] = []
        try:
            for command in commands:
                self._start(command)
        except BaseException:
            self.close()
            raise

    def _start(self, command: Sequence[str]) -> None:
        # In a session of its own: Ctrl-C reaches this process alone.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._processes.append(process)
        self._answers.append(queue.Queue())
        threading.Thread(target=_forward_lines, args=(process, self._answers[-1]), daemon=True).start()

    def receive(self, what: str, limit: float) -> list[dict[str, Any]]:
        """Wait for each rank's next answer, and return them in rank order. what: they are, for messages.

        limit: seconds. Raises ValueError if a rank dies or times out; these processes cannot be used any further then.
        """
        end = time.monotonic() + limit
        answered: dict[int, dict[str, Any]] = {}
        while missing := [rank for rank in range(len(self._processes)) if rank not in answered]:
            if time.monotonic() >= end:
                raise ValueError(f"rank {missing[0]} of the bench did not answer within {limit:.0f} s: {what}")
            for rank in missing:  # a moment for each rank, in turn
                with suppress(queue.Empty):
                    line = self._answers[rank].get(timeout=0.05)
                    if not line:
                        raise ValueError(f"rank {rank} of the bench died at: {what}")
                    answered[rank] = json.loads(line)
        return [answered[rank] for rank in range(len(self._processes))]

    def close(self) -> None:
        """Close the ranks' stdin, at which they exit even in the middle of a command, and kill those that remain."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):  # the process may have ended
                process.stdin.close()
        end = time.monotonic() + _TO_END
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # do not wait for a process that the driver holds
                process.wait(_TO_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _forward_lines(process: "subprocess.Popen[bytes]", answers: "queue.Queue[bytes]") -> None:
    """Put each line of a process's stdout into a queue, then an empty line when it ends."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put(b"")


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind as Ctrl-C does, so that what was made is removed. Does nothing outside the main thread."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
