"""The ranks of one checkout of Stretto: processes that obey commands, each within a time limit."""

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
_AFTER_AN_ERROR = 10.0  # seconds that the other ranks have to raise too: they may wait for the one that did
_TO_END = 5.0


class RanksFailed(RuntimeError):
    """Ranks died, did not answer in time or disagree: these processes are of no use any more."""


class CheckoutRanks:
    """`ranks` worker processes that import Stretto from `source`. Use it as a context manager: it ends them.

    name: of the checkout, for messages; store: a path that does not exist yet, where the ranks find each other;
    device: "cuda" (all on the first GPU) or "cpu"; environment: variables added to this process's.
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
        # -P: no folder of scripts comes before the checkout. A session of its own: Ctrl-C is for this process alone.
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
        """What the ranks say once they have joined, within so many seconds. RanksFailed for the wrong checkout."""
        started = self._hear("start", limit)
        for said in started:
            if "error" not in said and not Path(said["stretto"]).resolve().is_relative_to(self._source.resolve()):
                raise RanksFailed(f"{self.name} imported Stretto from {said['stretto']}, not from {self._source}")
        return started

    def ask(self, command: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
        """Have all ranks obey; their answers in rank order. Either none of them has "error", or all have.

        limit: seconds. RanksFailed where a rank dies, does not answer in time, or fails while another does not.
        """
        self.tell(command)
        return self.hear(command, limit)

    def tell(self, command: Mapping[str, Any]) -> None:
        """Send a command to all ranks, whose answers `hear` takes."""
        line = (json.dumps(command) + "\n").encode()
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError as error:
                raise self._failure(rank, "has ended") from error

    def hear(self, command: Mapping[str, Any], limit: float) -> list[dict[str, Any]]:
        """The answers to what `tell` has sent; see `ask`."""
        return self._hear(f"{command['do']} {command.get('case', '')}".strip(), limit)

    def _hear(self, what: str, limit: float) -> list[dict[str, Any]]:
        end = time.monotonic() + limit
        heard: dict[int, dict[str, Any]] = {}
        while len(heard) < len(self._processes):
            for rank, answers in enumerate(self._answers):
                if rank in heard:
                    continue
                try:
                    # The first rank that is still to answer is waited for; the others are looked at in turn.
                    line = answers.get(timeout=max(0.0, min(0.05, end - time.monotonic())))
                except queue.Empty:
                    continue
                if not line:
                    raise self._failure(rank, f"died at: {what}")
                heard[rank] = json.loads(line)
                if "error" in heard[rank]:
                    end = min(end, time.monotonic() + _AFTER_AN_ERROR)
            if time.monotonic() >= end and len(heard) < len(self._processes):
                errors = "".join(f"; rank {rank}: {said['error']}" for rank, said in heard.items() if "error" in said)
                missing = next(rank for rank in range(len(self._processes)) if rank not in heard)
                raise self._failure(missing, f"did not answer within {limit:.0f} s: {what}{errors}")
        failed = [rank for rank in heard if "error" in heard[rank]]
        if failed and len(failed) < len(heard):
            raise self._failure(failed[0], f"failed alone at: {what}: {heard[failed[0]]['error']}")
        return [heard[rank] for rank in range(len(self._processes))]

    def _failure(self, rank: int, what: str) -> RanksFailed:
        lines = self._errors[rank].read_text(errors="replace").strip().splitlines()
        said = f"; its last words: {lines[-1][-300:]}" if lines else ""
        return RanksFailed(f"rank {rank} of {self.name} {what}{said}")

    def close(self) -> None:
        """End all processes: by word, then by signal."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(OSError):  # of one that has ended
                process.stdin.write(b'{"do": "end"}\n')
            with suppress(OSError):
                process.stdin.close()  # which ends a rank that is in the middle of something, too
        end = time.monotonic() + _TO_END
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # a driver that holds it is not waited for
                process.wait(_TO_END)

    def __enter__(self) -> "CheckoutRanks":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _forward_lines(process: "subprocess.Popen[bytes]", answers: "queue.Queue[bytes]") -> None:
    """Put each line of a process's stdout into a queue, and an empty one at its end."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put(b"")
