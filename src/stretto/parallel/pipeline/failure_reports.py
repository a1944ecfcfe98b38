# SPDX-License-Identifier: Apache-2.0
"""Reports of failed transports, from which each rank finds the rank that caused the failure.

When one rank stops, its neighbours wait for it, theirs wait for them, and any of them may reach its time limit first.
So a rank that fails writes to the group's store which rank it blames, and what it waits for itself; it then closes its
channels. Ranks that notice do the same. The first report says how the failure was noticed; from the rank that it blames
one follows the waits to a rank that does not wait, or that has written no report: it caused the failure.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from stretto.counters import waiting_for
from stretto.memory import PeerError

GRACE = 1.5
"""Seconds that a rank has to write its report, from the moment that another rank asks for it."""
MAX_PATIENCE = 10.0
"""Seconds that a rank waits at most for the others to notice a failure, beside GRACE."""
_PERIOD = 0.02


@dataclass(frozen=True)
class Report:
    """A rank's report of its failure.

    blamed: the ranks that it was noticed at (none where this rank itself is the cause). waits_for: the ranks that it
    was waiting for at that moment (none: it was computing). awaited: the message, and for how long; or for how long it
    had computed.
    """

    blamed: list[int]
    text: str
    waits_for: list[int]
    awaited: str


class FailureReports:
    """The reports of one transport's ranks, in a store. A store that does not answer causes only a short delay.

    topic: the keys' prefix. name_rank: how errors call a rank.
    """

    def __init__(self, store: dist.Store, topic: str, rank: int, name_rank: Callable[[int], str]) -> None:
        self._store = store
        self._topic = topic
        self._rank = rank
        self._name_rank = name_rank
        self._explanation: str | None = None

    def write(self, report: Report) -> None:
        """Write this rank's report; the first rank to do so is the one whom all follow."""

        def write() -> None:
            self._store.set(f"{self._topic} report {self._rank}", json.dumps(asdict(report)))
            order = self._store.add(f"{self._topic} reports", 1)
            self._store.set(f"{self._topic} order {order}", str(self._rank))

        _within(GRACE, write)

    def has_any(self) -> bool:
        """True if a rank has written a report. False where the store does not answer."""
        found: list[str | None] = []
        _within(GRACE, lambda: found.append(self._text("order 1", 0.0)))
        return bool(found and found[0])

    def explain(self, own: Report) -> str:
        """The error's text: what this rank noticed, and where it began. It takes GRACE at the first call."""
        if self._explanation is None:
            found: list[str] = []
            _within(3 * GRACE, lambda: found.append(self._trace(own)))
            self._explanation = (
                f"rank {self._rank} of the pipe: {own.text}{found[0] if found else '. The store does not answer'}"
            )
        return self._explanation

    def _trace(self, own: Report) -> str:
        """Follow the first report to where the failure began."""
        first = self._text("order 1", GRACE)
        root, report = (self._rank, own) if first is None else (int(first), self._report(int(first)) or own)
        lines = []
        if root != self._rank:
            lines.append(f"noticed first by {self._name_rank(root)}: {report.text}")
        if not report.blamed:
            return self._conclude(lines, [root], "the cause is {}")
        seen: list[int] = []
        ends: list[int] = []
        next_ranks = list(report.blamed)
        deadline = time.monotonic() + GRACE
        while next_ranks:
            rank = next_ranks.pop(0)
            if rank in seen or rank == root:
                continue
            seen.append(rank)
            peer_report = own if rank == self._rank else self._report(rank, deadline)
            if peer_report is None:
                lines.append(f"{self._name_rank(rank)} has not reported anything: it has ended, stopped or hung")
                ends.append(rank)
            elif peer_report.waits_for:
                names = " or ".join(self._name_rank(one) for one in peer_report.waits_for)
                lines.append(f"{self._name_rank(rank)} was waiting for {names}: {peer_report.awaited}")
                next_ranks += peer_report.waits_for
            else:
                lines.append(f"{self._name_rank(rank)} was not waiting for a message: {peer_report.awaited}")
                ends.append(rank)
        if ends:
            return self._conclude(lines, ends, "the cause is {}")
        return self._conclude(lines, sorted({root, *seen}), "{} wait for each other")

    def _conclude(self, lines: list[str], ranks: list[int], end: str) -> str:
        names = " and ".join(self._name_rank(rank) for rank in ranks)
        return "".join(f"; {line}" for line in [*lines, end.format(names)])

    def _report(self, rank: int, deadline: float = 0.0) -> Report | None:
        text = self._text(f"report {rank}", deadline - time.monotonic())
        return None if text is None else Report(**json.loads(text))

    def _text(self, key: str, seconds: float) -> str | None:
        """The store's value under a key, once it is there; None if it is not within so many seconds."""
        deadline = time.monotonic() + seconds
        while not self._store.check([f"{self._topic} {key}"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_PERIOD)
        return self._store.get(f"{self._topic} {key}").decode()


class StepFailures:
    """Finds the rank of a job at which a step has failed, also if a stage's collective failed, which names no rank.

    Every rank that fails reports it in the job's store, with the reason, if it is the cause. The others name that rank;
    or those that say nothing, which have ended, stopped or hung. topic: the keys' prefix, the same on all ranks.
    """

    def __init__(self, topic: str) -> None:
        self._store = dist.PrefixStore(topic, dist.distributed_c10d._get_default_store())

    def explain(self, error: BaseException, limit: float) -> PeerError | None:
        """Say that this rank has failed; returns what to raise instead, where the failure began at another rank.

        limit: seconds after which waits for other ranks fail; others may notice the failure so much later.
        """
        is_own = not isinstance(error, PeerError) and not is_of_collective(error)
        first_line = str(error).strip().partition("\n")[0][:300]
        found: list[str] = []
        patience = min(limit, MAX_PATIENCE) + GRACE

        def ask() -> None:
            own = f"raised {type(error).__name__}: {first_line}" if is_own else ""
            self._store.set(f"failed {dist.get_rank()}", own)
            if not is_own:
                found.append(self._find_others(patience))

        _within(patience + GRACE, ask)
        if is_own:
            return None
        about = (
            str(error) if isinstance(error, PeerError) else f"a collective of this rank's stage failed: {first_line}"
        )
        return PeerError("; ".join([about, *filter(None, found)]))

    def _find_others(self, patience: float) -> str:
        others = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        deadline = time.monotonic() + patience
        reasons: dict[int, str] = {}
        while len(reasons) < len(others):
            for rank in others:
                if rank not in reasons and self._store.check([f"failed {rank}"]):
                    reasons[rank] = self._store.get(f"failed {rank}").decode()
                    if reasons[rank]:
                        return f"rank {rank} of the job (global rank {rank}) {reasons[rank]}"
            if time.monotonic() > deadline:
                silent = [f"rank {rank} of the job (global rank {rank})" for rank in others if rank not in reasons]
                return f"{' and '.join(silent)} did not report a failure: ended, stopped or hung"
            time.sleep(_PERIOD)
        return ""


def is_of_collective(error: BaseException) -> bool:
    """True if torch.distributed has raised this error for a collective."""
    words = ("gloo", "Timed out waiting", "pair closure", "closed by peer")
    is_of_gloo = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return is_of_gloo or isinstance(error, dist.DistError)


def _within(seconds: float, call: Callable[[], object]) -> None:
    """Run a call that may hang or fail (as with a lost store) in a thread, and abandon it after a time limit."""

    def run() -> None:
        try:
            call()
        except RuntimeError:  # the store is lost: use what is known without it
            return

    thread = threading.Thread(target=run, name="stretto-failure-report", daemon=True)
    thread.start()
    with waiting_for((), "the reports of other ranks", has_failed=True):
        thread.join(seconds)
