# SPDX-License-Identifier: Apache-2.0
"""Worker processes that run one checkout of Stretto: starts them, sends commands, and collects answers in time."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("worker.py")
_AFTER_AN_ERROR = 10.0  # seconds for the other ranks to raise too: they may wait for the one that did
_TO_END = 5.0


class RanksFailed(RuntimeError):
    """Ranks died, timed out or disagreed. These processes cannot be used any further."""


class CheckoutRanks:
    """`ranks` worker processes that import Stretto from `source`. A context manager, which ends them.

    name: of the checkout, for messages. store: a path that does not exist yet, for the ranks' rendezvous. device:
    "cuda" (all on the first GPU) or "cpu". environment: variables that are added to this process's.
    """

    def __init__(
        self, name: str, source: Path, ranks: int, store: Path, device: str, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._source = source
        self._processes: list[subprocess.Popen[bytes]] = []
        self._answers: list[queue.Queue[bytes]] = []
        self._errors = [store.with_name(f"{store.name}-{rank}.txt") for rank in range(ranks)]
        given = os.environ.get("PYTHONPATH")
        variables = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join([str(source), *([given] if given else [])]),
            "OMP_NUM_THREADS": "1",
        }
        try:
            for rank in range(ranks):
                settings = {"rank": rank, "world": ranks, "store": str(store), "device": device}
                self._start([sys.executable, "-P", str(WORKER), json.dumps(settings)], variables, self._errors[rank])
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str], environment: Mapping[str, str], errors: Path) -> None:
        # -P keeps the script's folder off sys.path, before the checkout. In a session of its own, Ctrl-C misses it.
        with errors.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        answers: queue.Queue[bytes] = queue.Queue()
        self._processes.append(process)
        self._answers.append(answers)
        threading.Thread(target=_forward_lines, args=(process, answers), daemon=True).start()

    def wait_for_start(self, limit: float) -> list[dict[str, Any]]:
        """Wait until the ranks have joined; returns their first answers. RanksFailed for the wrong checkout."""
        started = self._read_replies("start", limit)
        for answer in started:
            if "error" not in answer and not Path(answer["stretto"]).resolve().is_relative_to(self._source.resolve()):
                raise RanksFailed(f"{self.name} imported Stretto from {answer['stretto']}, not from {self._source}")
        return started

    def ask(self, command: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
        """Send a command to all ranks and return their answers in rank order: all of them have "error", or none has.

        limit: seconds. Raises RanksFailed if a rank dies, times out, or fails while another succeeds.
        """
        self.send(command)
        return self.receive(command, limit)

    def send(self, command: Mapping[str, Any]) -> None:
        """Send a command to all ranks without waiting for the replies, which `receive` collects."""
        line = (json.dumps(command) + "\n").encode()
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError as error:
                raise self._failure(rank, "has ended") from error

    def receive(self, command: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
        """Wait for the replies to the command that `send` has sent. Raises as `ask` does."""
        return self._read_replies(f"{command['do']} {command.get('case', '')}".strip(), limit)

    def _read_replies(self, what: str, limit: float) -> list[dict[str, Any]]:
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
        lines = self._errors[rank].read_text(errors="replace").strip().splitlines()
        last = f"; its last words: {lines[-1][-300:]}" if lines else ""
        return RanksFailed(f"rank {rank} of {self.name} {what}{last}")

    def close(self) -> None:
        """Stop all processes: request their exit, then kill those that remain."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):  # the process may have ended
                process.stdin.write(b'{"do": "end"}\n')
            with suppress(OSError):
                process.stdin.close()  # ends a rank even in the middle of a case
        end = time.monotonic() + _TO_END
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # do not wait for a process that the driver holds
                process.wait(_TO_END)

    def __enter__(self) -> "CheckoutRanks":
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
