# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of `python -m tests.stress`, sends them requests, and kills them when they do not answer in time."""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.stress.harness.worker import BatchOutcome, WorkerSetting

START_LIMIT = 240.0  # seconds for all ranks to start
GRACE = 5.0  # seconds for the others to answer once one has raised or died
_END_LIMIT = 20.0
# Not with -m: the worker's module would then be __main__, whose classes differ from the parent's.
_WORKER = "from tests.stress.harness.worker import main; main()"


@dataclass
class Replies:
    """The ranks' answers to a request. missing: ranks that did not answer in time, although none had failed."""

    outcomes: dict[int, BatchOutcome] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()

    @property
    def raised(self) -> dict[int, str]:
        """Why ranks failed, by rank."""
        return {rank: outcome.raised for rank, outcome in self.outcomes.items() if outcome.raised}

    @property
    def is_whole(self) -> bool:
        """True if all ranks answered, and none failed."""
        return not self.missing and not self.raised


class WorkerPool:
    """The ranks' processes. environment: added to this process's. prepare: a module whose `install` ranks call first.

    After a request that failed on a rank, `kill` all of them: the next `ask` starts new ones. Close the pool when done.
    """

    def __init__(
        self,
        ranks: int,
        device: str,
        seed: int,
        catalogues: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        prepare: str = "",
    ) -> None:
        self.ranks = ranks
        self.about = ""
        self.starts = 0
        self._device, self._seed, self._catalogues, self._prepare = device, seed, catalogues, prepare
        self._environment = dict(environment)
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-stress-")

    def ask(self, request: object, limit: float) -> Replies:
        """Send a request to every rank, and wait for the answers for up to `limit` seconds.

        RuntimeError where the ranks cannot be started.
        """
        if not self._workers:
            self._start()
        for _, pipe in self._workers:
            try:
                pipe.send(request)
            except OSError:
                continue  # the rank died, which `_collect` finds
        return self._collect(limit)

    def kill(self) -> None:
        """End all ranks at once."""
        for process, _ in self._workers:
            process.kill()
        for process, pipe in self._workers:
            process.wait(_END_LIMIT)
            pipe.close()
        self._workers = []

    def close(self) -> None:
        """End all ranks, and remove the folder of their stores."""
        self.kill()
        self._folder.cleanup()

    def _start(self) -> None:
        self.starts += 1
        store = Path(self._folder.name) / f"store-{self.starts}"
        for rank in range(self.ranks):
            ours, theirs = Pipe()
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _WORKER, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | self._environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
            theirs.close()
            self._workers.append((process, ours))
            own = rank, self.ranks, str(store), self._device, self._seed, self._catalogues, self._prepare
            ours.send(WorkerSetting(*own))
        replies = self._collect(START_LIMIT)
        if not replies.is_whole:
            self.kill()
            why = next(iter(replies.raised.values()), f"ranks {sorted(replies.missing)} did not start in time")
            raise RuntimeError(f"the {self.ranks} ranks cannot be started: {why}")
        self.about = replies.outcomes[0].about

    def _collect(self, limit: float) -> Replies:
        deadline = time.monotonic() + limit
        outcomes: dict[int, BatchOutcome] = {}
        has_failed = False
        while len(outcomes) < self.ranks:
            pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers) if rank not in outcomes}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes[pipe]
                try:
                    outcomes[rank] = pipe.recv()
                except (EOFError, OSError, pickle.UnpicklingError):
                    process = self._workers[rank][0]
                    process.kill()
                    outcomes[rank] = BatchOutcome(raised=f"rank {rank} died with exit code {process.wait(_END_LIMIT)}")
                if outcomes[rank].raised and not has_failed:
                    has_failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
        missing = frozenset() if has_failed else frozenset(range(self.ranks)) - frozenset(outcomes)
        return Replies(outcomes, missing)
