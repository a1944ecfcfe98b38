# SPDX-License-Identifier: Apache-2.0
"""Watches the ranks' counters in the launcher: warns of a rank that is late, and names one that is stuck.

When ranks do not stop after Ctrl-C, it also reports which steps are saved and which are not.
"""

import logging
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from stretto.launch.failures import Failure
from stretto.launch.job import LaunchJob
from stretto.launch.watching import evidence
from stretto.launch.watching.connections import Connections, describe_lost
from stretto.launch.watching.monitor import Monitor, Stall, list_ranks
from stretto.launch.watching.ranks import LocalRanks, is_saving, write_json
from stretto.launch.watching.slow_ranks import SLOW_RANK_FILE

logger = logging.getLogger(__name__)

COUNTER_DELAY = 1.0  # seconds, and two looks, until the counters of ranks show what has just happened


class RankWatch:
    """Watches a job's ranks. folder: of their counters."""

    def __init__(self, folder: Path, job: LaunchJob) -> None:
        self._folder, self._job = folder, job
        self.monitor = Monitor(LocalRanks(folder), job.ranks, job.timeout)
        self._connections = Connections()
        self._looked = 0.0

    def add(self, rank: int, pid: int) -> None:
        self.monitor.pids[rank] = pid

    def look(self, running: Collection[int]) -> Stall | None:
        """Look at the ranks, if it is time. Returns a stall that has reached the time limit; warns at half of it.

        running: the ranks whose processes run.
        """
        monitor, now = self.monitor, time.monotonic()
        if now - self._looked < monitor.interval:
            return None
        self._looked = now
        monitor.look()
        if (stall := monitor.find_stall(running)) is not None:
            return self._with_evidence(stall, running)
        if (stall := monitor.find_warning(running)) is not None:
            logger.warning("%s; the run ends when it reaches the limit", stall.text)
        if (slow := monitor.find_slow(running)) is not None:
            logger.warning("%s", slow.text)
            write_json(self._folder / SLOW_RANK_FILE, asdict(slow))
        self._connections.look(self._pids(), now)
        return None

    def is_saving(self, running: Collection[int], limit: float) -> bool:
        """Check whether a rank writes a checkpoint, and has written some of it in the last `limit` seconds."""
        return is_saving([self.monitor.states[rank] for rank in running if rank in self.monitor.states], limit)

    def stopped_by(self) -> signal.Signals | None:
        """The signal for which the ranks have agreed to stop; None if they have not."""
        self.monitor.look()
        assert self.monitor.local is not None
        found = [counters.stopped for counters in self.monitor.local.counters.values() if counters.stopped]
        return signal.Signals(found[0]) if found else None

    def find_culprit(self, running: Collection[int], failures: Sequence[Failure]) -> Failure | None:
        """Find the cause of failures that are all consequences: a rank that is stuck, or a lost connection.

        None where counters do not show it. failures: of the ranks that have failed; others may wait.
        """
        monitor = self.monitor
        has_waited = any(failure.kind != "lost connection" for failure in failures)
        failed = [failure.rank for failure in failures]
        deadline = time.monotonic() + (COUNTER_DELAY + 2 * monitor.interval if has_waited else 0.0)
        while True:
            monitor.look()
            if (stall := monitor.find_stall(running, self._job.timeout / 2, failed)) is not None:
                return Failure.of_stall(self._with_evidence(stall, running))
            if time.monotonic() > deadline:
                break
            time.sleep(monitor.interval / 2)
        lost = {each.rank: each.reason for each in failures if each.kind == "lost connection"}
        if not lost:
            return None
        rank, description = describe_lost(self._connections.find_lost(self._pids(), list(lost)), list(lost))
        own = next((each for each in failures if each.rank == rank), None)
        reason = f"{description}: {(own or failures[0]).reason}"
        order = (0, min(each.order[1] for each in failures))
        trace = None if own is None else own.trace
        return Failure(rank, reason, trace, order, "lost connection", blames_rank=False, is_whole=True)

    def describe_unstopped(self, running: Collection[int], seconds: float) -> str:
        """Say in a line which of the ranks that still run did not stop in so many seconds, and what is not saved."""
        monitor = self.monitor
        stall = monitor.find_stall(running, max(seconds / 2, 2 * monitor.interval))  # others wait for those of a stall
        who = sorted(running if stall is None else stall.culprits)
        where = "; ".join(dict.fromkeys(monitor.describe_place(rank) for rank in who if rank in monitor.states))
        if stall is not None:
            where += monitor.describe_waiting(stall.waiting, who)
        return (
            f"{list_ranks(who)} did not stop within {seconds:.0f} s{f' ({where})' if where else ''} and all ranks are "
            f"killed; {describe_saved(self._job)}"
        )

    def _pids(self) -> dict[int, int]:
        """The processes of ranks, by their counters: what was started may stand before the rank itself."""
        return self.monitor.pids | {rank: state.pid for rank, state in self.monitor.states.items()}

    def _with_evidence(self, stall: Stall, running: Collection[int]) -> Stall:
        folder = evidence.collect(self._job.out, self.monitor, stall.text, running)
        return stall if folder is None else replace(stall, text=f"{stall.text}; stacks are in {folder}")


def describe_saved(job: LaunchJob) -> str:
    """Say which checkpoint is a job's newest, and which finished steps it does not have."""
    newest, reached = job.newest_checkpoint(), job.last_step()
    saved = 0 if newest is None else job.step_of(newest)
    checkpoint = "there is no checkpoint" if newest is None else f"the last checkpoint is step {saved}"
    if reached is None or reached <= saved:
        return f"{checkpoint}: no finished step is lost"
    lost = f"step {reached} is" if reached == saved + 1 else f"steps {saved + 1} to {reached} are"
    return f"{checkpoint}: {lost} not saved"
