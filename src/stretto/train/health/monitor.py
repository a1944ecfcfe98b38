# SPDX-License-Identifier: Apache-2.0
"""Reads the heartbeats of all ranks, and finds the rank that the others wait for.

A rank makes no progress while its heartbeat reports so (`since`), and while no heartbeat arrives. Of the ranks without
progress, the culprits are, in this order:

1. silent ranks: no heartbeat arrives;
2. stalled ranks: others wait for them, in a collective that they have not entered or for a message, and they wait for
   no other rank;
3. stalled ranks: ranks whose main thread is in no call that waits, as far as Python's frames and the recorder show;
4. the same as 2 for threads that write checkpoints, while main threads wait for these;
5. ranks that wait for each other, since they have entered collectives in different orders;
6. where main threads make progress: ranks whose thread that writes a checkpoint makes none, and waits for no rank.

Ranks for which no rank waits and which use a CPU are no culprits: they may all be compiling, for any time.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import torch.distributed as dist

from stretto.train.health.beat import MISSED, Beat, interval_of, list_ranks
from stretto.train.health.flight_recorder import OpenCollective
from stretto.train.health.progress import STARTING, read_place
from stretto.train.health.slow_ranks import SLOW_RANK, SlowRank, SlowRanks
from stretto.train.health.stacks import UNABLE, process_state

START_LIMIT = 60.0  # seconds in which a starting rank may import and compile; the others' groups have the time limit
COMPUTES = 0.1  # cores: a process that uses more of them computes, and does not wait for a disk or a network
MISSED_AT_LEAST = 2.0  # seconds without a heartbeat before a rank is silent: a loaded machine delays threads


@dataclass(frozen=True)
class Stall:
    """Ranks that keep others from going on. seconds: for how long. waiting: the ranks that wait. text: the message."""

    kind: Literal["silent", "stalled", "lost connection"]
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float
    text: str


class Monitor:
    """Watches the ranks of a job through the store to which they write their heartbeats.

    timeout: `train.timeout`, in seconds. A stall is found one or two heartbeats earlier, before the time limits of the
    process groups, which are equally long, end the waiting ranks.
    """

    def __init__(
        self, store: dist.Store, ranks: int, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store, self.timeout = store, timeout
        self.interval = interval_of(timeout)
        self.beats: dict[int, Beat] = {}
        self._ranks, self._clock = range(ranks), clock
        self._read = self._started = clock()
        self._arrived: dict[int, float] = {}
        self.pids: dict[int, int] = {}  # processes of ranks on this machine, where that is known without a heartbeat
        self._warned: tuple[int, ...] = ()
        self._failed: set[int] = set()
        self._slow = SlowRanks()

    @property
    def limit(self) -> float:
        """Seconds without progress after which a rank is stuck."""
        return self.timeout - 2 * self.interval

    def read(self) -> None:
        """Read all heartbeats. Call it about once an interval. Raises RuntimeError if the store does not answer."""
        now = self._clock()
        if (gap := now - self._read) > max(MISSED_AT_LEAST, MISSED * self.interval):
            # This process was stopped itself: it knows nothing of the heartbeats in between.
            self._started += gap
            self._arrived = {rank: at + gap for rank, at in self._arrived.items()}
        self._read = now
        known = [rank for rank in self._ranks if rank in self.beats or self.store.check([str(rank)])]
        if not known:
            return
        for text in self.store.multi_get([str(rank) for rank in known]):
            beat = Beat.of_json(text)
            before = self.beats.get(beat.rank)
            if before is None or before.number != beat.number or before.pid != beat.pid:
                self.beats[beat.rank], self._arrived[beat.rank] = beat, now

    def find_stall(
        self, running: Collection[int] | None = None, limit: float | None = None, failed: Collection[int] = ()
    ) -> Stall | None:
        """The ranks that have made no progress for `limit` seconds (default: nearly the timeout), if there are any.

        running: the ranks whose processes run; None: all that are not done. failed: those of them whose wait for
        another rank has failed.
        """
        running = self.watched(running)
        self._failed = {*failed, *(rank for rank in running if rank in self.beats and self.beats[rank].has_failed)}
        allowed = self.limit if limit is None else limit
        idle = {rank: self.idle(rank) for rank in running}
        if not any(idle[rank] >= (allowed if limit is not None else self._allowed(rank)) for rank in running):
            return self._find_stuck_save(running, allowed)
        # A rank that others wait for may have made its last progress a little later than they did.
        stuck = {rank for rank in running if idle[rank] >= allowed / 2}
        found = self._find_culprits(stuck)
        if found is None:
            return self._find_stuck_save(running, allowed)
        kind, culprits = found
        seconds = min(idle[rank] for rank in culprits)
        waiting = tuple(sorted(rank for rank in stuck if rank not in culprits and self._is_waiting(rank)))
        return Stall(kind, culprits, waiting, seconds, self._describe(kind, culprits, waiting, seconds))

    def _find_stuck_save(self, running: Collection[int], allowed: float) -> Stall | None:
        """The ranks whose checkpoint thread makes no progress, and waits for no rank."""
        idle = {rank: seconds for rank in running if (seconds := self.idle_in_save(rank)) is not None}
        if not any(seconds >= allowed for seconds in idle.values()):
            return None
        stuck = [rank for rank, seconds in idle.items() if seconds >= allowed / 2]
        waiting = tuple(sorted(rank for rank in stuck if any(wait.is_background for wait in self.beats[rank].waits)))
        culprits = tuple(sorted(set(stuck) - set(waiting)))
        if not culprits:
            return None
        seconds = min(idle[rank] for rank in culprits)
        parts = [self._describe_culprit(rank, in_save=True) for rank in culprits]
        return Stall("stalled", culprits, waiting, seconds, self._describe_stall(parts, culprits, waiting, seconds))

    def find_warning(self, running: Collection[int] | None = None) -> Stall | None:
        """A stall that has reached half of the time limit, if it was not returned before."""
        half = self.timeout / 2
        longest = {rank: max(self.idle(rank), self.idle_in_save(rank) or 0.0) for rank in self.watched(running)}
        if all(seconds < half for seconds in longest.values()):
            self._warned = ()
            return None
        stall = self.find_stall(running, half)
        if stall is None or stall.culprits == self._warned:
            return None
        if any(longest[rank] < max(half, self._allowed(rank) / 2) for rank in stall.culprits):
            return None  # they may be slow, or start, and still have time
        self._warned = stall.culprits
        return stall

    def find_slow(self, running: Collection[int] | None = None) -> SlowRank | None:
        """The slowest rank of the last steps, if it is much slower than the others and was not returned before."""
        ranks = self.watched(running)
        found = self._slow.find({rank: self.beats[rank].busy if rank in self.beats else () for rank in ranks})
        if found is not None:
            self.store.set(SLOW_RANK, json.dumps(asdict(found)))
        return found

    def watched(self, running: Collection[int] | None) -> list[int]:
        """The ranks whose processes run, or else those whose heartbeats do not report that they are done."""
        if running is not None:
            return list(running)
        return [rank for rank in self._ranks if not (rank in self.beats and self.beats[rank].is_done)]

    def idle(self, rank: int) -> float:
        """Seconds for which a rank has made no progress."""
        if rank not in self.beats:
            return self._clock() - self._started
        return self._clock() - self._arrived[rank] + self.beats[rank].since

    def idle_in_save(self, rank: int) -> float | None:
        """Seconds without progress of a rank's checkpoint thread, if one runs."""
        saves = self.beats[rank].saves if rank in self.beats else None
        return None if saves is None else self._clock() - self._arrived[rank] + saves.since

    def is_silent(self, rank: int) -> bool:
        """Whether heartbeats of a rank have stopped to arrive, or have never arrived."""
        silence = self._clock() - self._arrived.get(rank, self._started)
        if silence > max(MISSED_AT_LEAST, MISSED * self.interval):
            return True
        return silence > 2 * self.interval and self.state_of(rank) in UNABLE

    def state_of(self, rank: int) -> str | None:
        """What the kernel says of the process of a rank on this machine, if it does not only run."""
        beat = self.beats.get(rank)
        pid = self.pids.get(rank) if beat is None else beat.pid if beat.is_here else None
        return None if pid is None else process_state(pid)

    def name(self, rank: int) -> str:
        """Name a rank with its host and process."""
        beat = self.beats.get(rank)
        return f"rank {rank}" if beat is None else f"rank {rank} (host {beat.host}, pid {beat.pid})"

    def place_of(self, rank: int) -> tuple[str, int | None]:
        """The phase and step of a rank that has sent a heartbeat: current ones on this machine, else the last."""
        beat = self.beats[rank]
        found = read_place(beat.pid, beat.place_file) if beat.is_here else None
        return (beat.phase, beat.step) if found is None else (found.phase, found.step)

    def describe_place(self, rank: int) -> str:
        """Say in which step and phase a rank is."""
        phase, step = self.place_of(rank)
        return f"phase {phase}" if step is None else f"step {step}, phase {phase}"

    def _allowed(self, rank: int) -> float:
        """Seconds for which a rank may make no progress."""
        beat = self.beats.get(rank)
        is_starting = beat is None or self.place_of(rank)[0] in STARTING
        return max(self.limit, START_LIMIT) if is_starting and self.state_of(rank) is None else self.limit

    def _find_culprits(
        self, stuck: Collection[int]
    ) -> tuple[Literal["silent", "stalled", "lost connection"], tuple[int, ...]] | None:
        if silent := [rank for rank in stuck if self.is_silent(rank) and rank not in self._failed]:
            return "silent", tuple(sorted(silent))
        stuck = [rank for rank in stuck if rank in self.beats]
        awaited = {rank: self._awaited_by_main(self.beats[rank]) & set(stuck) for rank in stuck}
        targets = set().union(*awaited.values())
        if ends := [rank for rank in targets if not awaited[rank] and rank not in self._failed]:
            return "stalled", tuple(sorted(ends))
        if idle := [rank for rank in stuck if not self._is_waiting(rank)]:
            if len(idle) < len(stuck) or not all(self._may_compute(rank) for rank in idle):
                return "stalled", tuple(sorted(idle))
            return None
        in_threads = set().union(*(self._awaited_by(self.beats[rank].waits) & set(stuck) for rank in stuck))
        if ends := [rank for rank in in_threads - self._failed if not self._awaited_by(self.beats[rank].waits)]:
            return "stalled", tuple(sorted(ends))
        if self._failed:
            return None  # what has failed there is the cause, and ends the run
        if targets:
            return "stalled", tuple(sorted(targets))
        entered = [rank for rank in stuck if self.beats[rank].own_waits]
        return ("lost connection", tuple(sorted(entered))) if len(entered) > 1 else None

    def _may_compute(self, rank: int) -> bool:
        """Whether a rank without progress uses a CPU, before the end of training."""
        beat = self.beats[rank]
        return beat.cpu > COMPUTES * beat.since and beat.phase != "exit"

    def _is_waiting(self, rank: int) -> bool:
        if rank in self._failed:
            return True
        beat = self.beats.get(rank)
        return beat is not None and not self.is_silent(rank) and (beat.seems_to_wait() or beat.waits_for_thread())

    def _awaited_by_main(self, beat: Beat) -> set[int]:
        """The ranks for which a rank's main thread waits: in collectives, or for messages."""
        return self._awaited_by(beat.own_waits) | set(beat.peers or ())

    def _awaited_by(self, waits: Iterable[OpenCollective]) -> set[int]:
        """The ranks that have not entered one of these collectives."""
        return {rank for wait in waits for rank in self._missing(wait)}

    def _missing(self, wait: OpenCollective) -> Iterable[int]:
        for rank in wait.ranks:
            beat = self.beats.get(rank)
            if beat is None or dict(beat.entered).get(wait.group_name, 0) < wait.number:
                yield rank

    def _describe(self, kind: str, culprits: tuple[int, ...], waiting: tuple[int, ...], seconds: float) -> str:
        if kind == "lost connection":
            wait = self.beats[culprits[0]].waits[-1]
            return (
                f"{list_ranks(culprits)} are all in {_describe_collective(wait)}, which has not finished for "
                f"{seconds:.3g} s: a connection between them is lost"
            )
        return self._describe_stall([self._describe_culprit(rank) for rank in culprits], culprits, waiting, seconds)

    def _describe_stall(
        self, parts: list[str], culprits: tuple[int, ...], waiting: tuple[int, ...], seconds: float
    ) -> str:
        message = f"{'; '.join(parts)}: no progress for {seconds:.3g} s (train.timeout is {self.timeout:g} s)"
        return message + self._describe_waiting(waiting, culprits)

    def _describe_culprit(self, rank: int, *, in_save: bool = False) -> str:
        beat = self.beats.get(rank)
        if beat is None:
            named = f"rank {rank} (pid {self.pids[rank]})" if rank in self.pids else f"rank {rank}"
            state = self.state_of(rank)
            return f"{named} has not sent a heartbeat since its process was started{f': {state}' if state else ''}"
        place = self.describe_place(rank)
        if self.is_silent(rank):
            state = self.state_of(rank) or "its heartbeats have stopped"
            if state.startswith("its heartbeats") and beat.is_here:
                state += (
                    ", while its process runs: C code holds Python's interpreter lock, or the machine is overloaded"
                )
            return f"{self.name(rank)} is silent in {place}: {state}"
        where = beat.where[0] if beat.where else ""
        if beat.saves is not None and (in_save or beat.waits_for_own_thread()):
            place, where = f"phase save of step {beat.saves.step}, in the thread that writes", beat.saves.where
        return f"{self.name(rank)} is stuck in {place}{f', at {where}' if where else ''}"

    def _describe_waiting(self, waiting: tuple[int, ...], culprits: tuple[int, ...]) -> str:
        if not waiting:
            return ""
        waits = {wait for rank in waiting for wait in self.beats[rank].waits if set(culprits) & set(wait.ranks)}
        where = ""
        if waits:
            first = min(waits, key=lambda wait: (wait.group != "data", wait.number))
            where = f" in {_describe_collective(first)}" + (" and others" if len(waits) > 1 else "")
        elif messages := [self.beats[rank].message for rank in waiting if self.beats[rank].message]:
            where = f" ({messages[0]})"
        verb, whom = "waits" if len(waiting) == 1 else "wait", "it" if len(culprits) == 1 else "them"
        return f"; {list_ranks(waiting)} {verb} for {whom}{where}"


def _describe_collective(wait: OpenCollective) -> str:
    return f"{wait.name} number {wait.number} of group {wait.group}"
