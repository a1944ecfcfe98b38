# SPDX-License-Identifier: Apache-2.0
"""Reads the ranks' heartbeats in the launcher: warns of a rank that is late, and names one that is stuck.

When ranks do not stop after Ctrl-C, it also reports which steps are saved and which are not.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from stretto.train.checkpoint import newest_checkpoint
from stretto.train.checkpoint.folders import step_of
from stretto.train.health import evidence, flight_recorder
from stretto.train.health.beat import interval_of, list_ranks, prefix
from stretto.train.health.connections import describe_lost, find_lost_pairs
from stretto.train.health.failures import Failure
from stretto.train.health.heartbeat import BY_LAUNCHER
from stretto.train.health.monitor import Monitor, Stall
from stretto.train.observe.metrics import last_step

logger = logging.getLogger(__name__)

STORE_LIMIT = timedelta(seconds=10)  # the store is in this process: it responds immediately
MOST_SHOWN = 4  # ranks whose phases are shown one by one
LAST_LOOK = 1.0  # seconds, and two heartbeats, until the heartbeats of ranks show what has just happened


class RankWatch:
    """Watches the heartbeats of a job's ranks. out: the run's folder. timeout: `train.timeout`, in seconds."""

    def __init__(self, out: Path, ranks: int, timeout: float) -> None:
        self._out, self._ranks, self._timeout = out, ranks, timeout
        self._interval = interval_of(timeout)
        self._looked = 0.0
        self.monitor: Monitor | None = None

    def connect(self, host: str, port: int, pids: Mapping[int, int]) -> None:
        """Read heartbeats from the ranks' store from now on. pids: their processes."""
        store = dist.TCPStore(host, port, is_master=False, timeout=STORE_LIMIT, wait_for_workers=False)
        self.monitor = Monitor(dist.PrefixStore(prefix(), store), self._ranks, self._timeout)
        self.monitor.pids.update(pids)

    def look(self, running: Collection[int]) -> Stall | None:
        """Read the heartbeats, if it is time. Returns a stall that has reached the time limit; warns at half of it.

        running: the ranks whose processes run.
        """
        if self.monitor is None or time.monotonic() - self._looked < self._interval:
            return None
        self._looked = time.monotonic()
        try:
            self.monitor.read()
        except RuntimeError as error:
            logger.debug("heartbeats cannot be read: %s", error)
            return None
        if (stall := self.monitor.find_stall(running)) is not None:
            return self._with_evidence(stall, running)
        if (stall := self.monitor.find_warning(running)) is not None:
            logger.warning("%s; the run ends when it reaches the limit", stall.text)
        if (slow := self.monitor.find_slow(running)) is not None:
            logger.warning("%s", slow.text)
        return None

    def is_saving(self, running: Collection[int], limit: float) -> bool:
        """Whether a rank writes a checkpoint, and has written some of it in the last `limit` seconds."""
        monitor = self.monitor
        if monitor is None:
            return False
        known = [rank for rank in running if rank in monitor.beats]
        return any(monitor.place_of(rank)[0] == "save" and monitor.idle(rank) < limit for rank in known)

    def find_culprit(self, running: Collection[int], failures: Sequence[Failure]) -> Failure | None:
        """What has caused failures that are all consequences: a rank that is stuck, or a lost connection.

        None where heartbeats do not show it. failures: of the ranks that have failed; others may wait.
        """
        if self.monitor is None:
            return None
        has_waited = any(failure.kind != "lost connection" for failure in failures)
        failed = [failure.rank for failure in failures]
        deadline = time.monotonic() + (LAST_LOOK + 2 * self._interval if has_waited else 0.0)
        try:
            while True:
                self.monitor.read()
                if (stall := self.monitor.find_stall(running, self._timeout / 2, failed)) is not None:
                    return Failure.of_stall(self._with_evidence(stall, running))
                if time.monotonic() > deadline:
                    break
                time.sleep(self._interval / 2)
            lost = {each.rank: each.reason for each in failures if each.kind == "lost connection"}
            if not lost:
                return None
            pairs = find_lost_pairs(self.monitor.store, lost, self._ranks)
        except RuntimeError as error:
            logger.debug("heartbeats cannot be read: %s", error)
            return None
        rank, description = describe_lost(pairs, list(lost))
        own = next((each for each in failures if each.rank == rank), None)
        reason = f"{description}: {(own or failures[0]).reason}"
        order = (0, min(each.order[1] for each in failures))
        return Failure(rank, reason, None if own is None else own.trace, order, "lost connection")

    def describe_unstopped(self, running: Collection[int], seconds: float) -> str:
        """Say which of the ranks that still run did not stop in so many seconds, and which steps are not saved."""
        return describe_unstopped(self._out, self.monitor, running, seconds)

    def _with_evidence(self, stall: Stall, running: Collection[int]) -> Stall:
        assert self.monitor is not None
        try:
            folder = evidence.collect(self._out, self.monitor, stall.text, running)
        except RuntimeError as error:
            logger.debug("no stacks: %s", error)
            folder = None
        return stall if folder is None else replace(stall, text=f"{stall.text}; stacks are in {folder}")


def rank_environment() -> dict[str, str]:
    """The environment of ranks whose heartbeats the launcher reads, with torch's flight recorder.

    Whether NCCL's kernels are timed, each rank decides before it makes its process group.
    """
    return {BY_LAUNCHER: "1"} | flight_recorder.environment(times_nccl=False)


def describe_unstopped(out: Path, monitor: Monitor | None, running: Collection[int], seconds: float) -> str:
    """Describe in one line which ranks did not stop, where they are, and which steps of the run in `out` are not saved.

    monitor: reads the ranks' heartbeats, which distinguish a stuck rank from those that wait for it; None before
    there are any. running: the ranks whose processes still run. seconds: since they were asked to stop.
    """
    who, places = sorted(running), ""
    if monitor is not None:
        stall = monitor.find_stall(running, max(seconds / 2, 2 * monitor.interval))
        who = sorted(running if stall is None else stall.culprits)
        places = _places(monitor, who)
        if stall is not None and stall.waiting:
            wait = "wait" if len(stall.waiting) > 1 else "waits"
            places += f"; {list_ranks(stall.waiting)} {wait} for {'it' if len(who) == 1 else 'them'}"
    where = f" ({places.removeprefix('; ')})" if places else ""
    return (
        f"{list_ranks(who)} did not stop within {seconds:.0f} s{where} and all ranks are killed; {describe_saved(out)}"
    )


def _places(monitor: Monitor, ranks: Collection[int]) -> str:
    """The phases and steps of ranks, as far as heartbeats show them."""
    known = {rank: monitor.beats[rank] for rank in ranks if rank in monitor.beats}
    places = {
        rank: f"phase {beat.phase}" + ("" if beat.step is None else f" of step {beat.step}")
        for rank, beat in known.items()
    }
    if len(set(places.values())) == 1 and len(known) == len(ranks):
        return next(iter(places.values()))
    shown = [f"rank {rank}: {place}" for rank, place in list(places.items())[:MOST_SHOWN]]
    return ", ".join(shown) + (", ..." if len(places) > MOST_SHOWN else "")


def describe_saved(out: Path) -> str:
    """Say which checkpoint is the newest of the run in `out`, and which finished steps it does not have."""
    newest, reached = newest_checkpoint(out), last_step(out)
    saved = 0 if newest is None else step_of(newest)
    checkpoint = "there is no checkpoint" if newest is None else f"the last checkpoint is step {saved}"
    if reached is None or reached <= saved:
        return f"{checkpoint}: no finished step is lost"
    lost = f"step {reached} is" if reached == saved + 1 else f"steps {saved + 1} to {reached} are"
    return f"{checkpoint}: {lost} not saved"
