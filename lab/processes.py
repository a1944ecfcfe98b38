# SPDX-License-Identifier: Apache-2.0
"""Ranks of a bench as processes of their own, which take commands: a line of JSON on stdin, answered by one on stdout.

They are for ranks that `stretto.bench.harness.run_ranks` cannot start: of another checkout, or in a network namespace.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

_AFTER_AN_ERROR = 10.0  # seconds for the other ranks to fail too: they may wait for the one that did
_TO_END = 5.0


class RanksFailed(ValueError):
    """Ranks died, timed out or disagreed. These processes cannot be used any further."""


class Processes:
    """One process a rank. A context manager, which ends them; they end too where this process does.

    name: of all of them, for messages. commands: the command of each rank. environment: variables that are added to
    this process's. errors: a path; the ranks' stderr goes to files of this name and their number (None: to ours).
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str] | None = None,
        errors: Path | None = None,
    ) -> None:
        self.name = name
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[queue.Queue[bytes]] = []
        self._errors = [errors and errors.with_name(f"{errors.name}-{rank}.txt") for rank in range(len(commands))]
        try:
            for command, errors in zip(commands, self._errors, strict=True):
                self._start(command, {**os.environ, **(environment or {})}, errors)
        except BaseException:
            self.close()
            raise

    def _start(self, command: Sequence[str], environment: Mapping[str, str], errors: Path | None) -> None:
        with (Path(os.devnull) if errors is None else errors).open("wb") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if errors is None else file,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        self._processes.append(process)
        self._answers.append(queue.Queue())
        threading.Thread(target=_forward_lines, args=(process, self._answers[-1]), daemon=True).start()

    def ask(self, command: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
        """Send a command to all ranks and return their answers in rank order: all of them have "error", or none has.

        limit: seconds. Raises RanksFailed if a rank dies, times out, or fails while another succeeds.
        """
        self.send(command)
        return self.receive(f"{command['do']} {command.get('case', '')}".strip(), limit)

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command to all ranks without waiting for the answers, which `receive` collects."""
        line = (json.dumps(command) + "\n").encode()
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError as error:
                raise self._failure(rank, "has ended") from error

    def receive(self, what: str, limit: float) -> list[dict[str, Any]]:
        """Wait for each rank's next answer, as `ask` does. what: of what they are, for messages."""
        end = time.monotonic() + limit
        answered: dict[int, dict[str, Any]] = {}
        while len(answered) < len(self._processes):
            for rank, answers in enumerate(self._answers):
                if rank in answered:
                    continue
                try:
                    # Waits a moment for each rank that has not answered yet, in turn.
                    line = answers.get(timeout=max(0.0, min(0.05, end - time.monotonic())))
                except queue.Empty:
                    continue
                if not line:
                    raise self._failure(rank, f"died at: {what}")
                answered[rank] = json.loads(line)
                if "error" in answered[rank]:
                    end = min(end, time.monotonic() + _AFTER_AN_ERROR)
            if time.monotonic() >= end and len(answered) < len(self._processes):
                failed_ranks = {rank: answer["error"] for rank, answer in answered.items() if "error" in answer}
                errors = "".join(f"; rank {rank}: {error}" for rank, error in failed_ranks.items())
                missing = next(rank for rank in range(len(self._processes)) if rank not in answered)
                raise self._failure(missing, f"did not answer within {limit:.0f} s: {what}{errors}")
        failed = [rank for rank in answered if "error" in answered[rank]]
        if failed and len(failed) < len(answered):
            raise self._failure(failed[0], f"failed alone at: {what}: {answered[failed[0]]['error']}")
        return [answered[rank] for rank in range(len(self._processes))]

    def _failure(self, rank: int, what: str) -> RanksFailed:
        errors = self._errors[rank]
        lines = [] if errors is None else errors.read_text(errors="replace").strip().splitlines()
        last = f"; its last words: {lines[-1][-300:]}" if lines else ""
        return RanksFailed(f"rank {rank} of {self.name} {what}{last}")

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
