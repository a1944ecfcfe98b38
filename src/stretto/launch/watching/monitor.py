# SPDX-License-Identifier: Apache-2.0
"""Finds the rank that the others wait for, from the states of all ranks.

A rank is stuck when its counters have not changed for a time; whether it is frozen, swapped out, in a loop or in C code
makes no difference. Of the stuck ranks, the culprits are, in this order:

1. ranks of nodes from which nothing comes any more;
2. ranks that others wait for, in a collective that they have not entered or for a message, and that wait for no rank;
3. ranks whose main thread waits for no rank, as far as its counters and its stack show;
4. the same as 2 for threads that write checkpoints, while main threads wait for these;
5. ranks that wait for each other, since they have entered collectives in different orders;
6. where main threads make progress: ranks whose thread that writes a checkpoint makes none, and waits for no rank.

Ranks for which no rank waits and which use a CPU are not blamed: they may all be compiling, for any time.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stretto.counters import Wait
from stretto.launch.watching.ranks import C10D, LocalRanks, RankState
from stretto.launch.watching.slow_ranks import SlowRank, SlowRanks
from stretto.launch.watching.stacks import UNABLE, process_state

IMPORT_LIMIT = 600.0  # seconds in which a rank may import, on a loaded machine or from a cold disk
START_LIMIT = 60.0  # seconds at least in which a rank may start and build, and in which its process may end
COMPUTES = 0.1  # cores: a process that uses more of them computes, and does not wait for a disk or a network
MAX_GAP = 2.0  # seconds, and five looks, without a look: this process was stopped itself

StallKind = Literal["silent", "stalled", "lost connection"]


@dataclass(frozen=True)
class Stall:
    """Ranks that keep others from going on. seconds: for how long. waiting: the ranks that wait. text: the message."""

    kind: StallKind
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float
    text: str


class Monitor:
    """Watches a job's ranks. local: this machine's ranks, None in tests. timeout: `train.timeout`, in seconds.

    A stall is found one or two looks before the time limits of the process groups, which are equally long, end the
    waiting ranks.
    """

    def __init__(
        self, local: LocalRanks | None, ranks: int, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.local, self.timeout = local, timeout
        self.interval = min(1.0, timeout / 20)
        self.states: dict[int, RankState] = {}
        self.pids: dict[int, int] = {}  # processes of ranks on this machine, where they are known without counters
        self.silent: dict[int, float] = {}  # ranks of other nodes -> seconds without a line from there
        self._ranks, self._clock = range(ranks), clock
        self._looked = self._started = clock()
        self._warned: tuple[int, ...] = ()
        self._failed: set[int] = set()
        self._stacks: dict[int, tuple[object, RankState]] = {}
        self._slow = SlowRanks()

    @property
    def limit(self) -> float:
        """Seconds without progress after which a rank is stuck."""
        return self.timeout - 2 * self.interval

    def look(self, others: Mapping[int, RankState] | None = None) -> None:
        """Look at this machine's ranks. others: the states of other machines' ranks. Call it once an interval."""
        now = self._clock()
        if (gap := now - self._looked) > max(MAX_GAP, 5 * self.interval):
            self._started += gap
            if self.local is not None:
                self.local.forgive(gap)
        self._looked = now
        self.states = dict(others or {}) | (self.local.look() if self.local is not None else {})

    def find_stall(
        self, running: Collection[int] | None = None, limit: float | None = None, failed: Collection[int] = ()
    ) -> Stall | None:
        """The ranks that have made no progress for `limit` seconds (default: nearly the timeout), if there are any.

        running: the ranks whose processes run; None: all that are not done. failed: those of them whose wait for
        another rank has failed.
        """
        running = self.watched(running)
        self._failed = {*failed, *(rank for rank in running if rank in self.states and self.states[rank].has_failed)}
        allowed = self.limit if limit is None else limit
        idle = {rank: self.idle(rank) for rank in running}
        if not any(idle[rank] >= (allowed if limit is not None else self._allowed(rank)) for rank in running):
            return self._find_stuck_save(running, allowed)
        # A rank that others wait for may have made its last progress a little later than they did.
        stuck = {rank for rank in running if idle[rank] >= allowed / 2}
        self._read_stacks(stuck)
        found = self._find_culprits(stuck)
        if found is None:
            return self._find_stuck_save(running, allowed)
        kind, culprits = found
        seconds = min(idle[rank] for rank in culprits)
        waiting = tuple(sorted(rank for rank in stuck if rank not in culprits and self._is_waiting(rank)))
        return Stall(kind, culprits, waiting, seconds, self._describe(kind, culprits, waiting, seconds))

    def find_warning(self, running: Collection[int] | None = None) -> Stall | None:
        """A stall that has reached half of the time limit, if it was not returned before."""
        half = self.timeout / 2
        longest = {rank: max(self.idle(rank), self._idle_in_save(rank)) for rank in self.watched(running)}
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
        return self._slow.find({rank: self.states[rank].windows if rank in self.states else () for rank in ranks})

    def watched(self, running: Collection[int] | None) -> list[int]:
        """The ranks whose processes run, or else those whose counters do not say that they are done."""
        if running is not None:
            return list(running)
        return [rank for rank in self._ranks if not (rank in self.states and self.states[rank].is_done)]

    def idle(self, rank: int) -> float:
        if rank in self.silent:
            return self.silent[rank]
        return self.states[rank].idle if rank in self.states else self._clock() - self._started

    def state_of(self, rank: int) -> str | None:
        """The kernel's state of a rank's process, if that does not only run."""
        if rank in self.states:
            return self.states[rank].state
        return process_state(self.pids[rank]) if rank in self.pids else None

    def describe_place(self, rank: int) -> str:
        state = self.states[rank]
        return f"phase {state.phase}" if state.step is None else f"step {state.step}, phase {state.phase}"

    def _idle_in_save(self, rank: int) -> float:
        """Seconds without progress of a rank's checkpoint thread; 0 if none runs."""
        return self.states[rank].save_idle if rank in self.states and self.states[rank].save is not None else 0.0

    def _allowed(self, rank: int) -> float:
        """Seconds for which a rank may make no progress."""
        if self.state_of(rank) in UNABLE or rank in self.silent:
            return self.limit
        if rank not in self.states:
            return max(self.limit, IMPORT_LIMIT)
        if self.states[rank].is_done:  # its process ends, for which nobody waits in a collective
            return max(self.limit, START_LIMIT)
        least = {"import": IMPORT_LIMIT, "start": START_LIMIT, "build": START_LIMIT}
        return max(self.limit, least.get(self.states[rank].phase, 0.0))

    def _read_stacks(self, ranks: Collection[int]) -> None:
        """Add to the states of ranks where they are; each stack is read once as long as its rank makes no progress."""
        for rank in ranks:
            if self.local is None or rank not in self.local.counters or rank not in self.states:
                continue
            counters, state = self.local.counters[rank], self.states[rank]
            key = (counters.pid, counters.progress, counters.save_progress, counters.wait)
            if rank not in self._stacks or self._stacks[rank][0] != key:
                self._stacks[rank] = (key, self.local.with_stack(state))
            known = self._stacks[rank][1]
            self.states[rank] = replace(state, **{name: getattr(known, name) for name in _OF_STACK})

    def _find_culprits(self, stuck: Collection[int]) -> tuple[StallKind, tuple[int, ...]] | None:
        if silent := [rank for rank in stuck if rank in self.silent and rank not in self._failed]:
            return "silent", tuple(sorted(silent))
        if absent := [rank for rank in stuck if rank not in self.states]:
            return "stalled", tuple(sorted(absent))
        awaited = {rank: self._awaited_by(rank) & set(stuck) for rank in stuck}
        targets = set().union(*awaited.values())
        if ends := [rank for rank in targets if not awaited[rank] and not self._is_waiting(rank)]:
            return "stalled", tuple(sorted(ends))
        # Ranks that import have their own time, and nobody waits for them in a group that is not made yet.
        idle = [rank for rank in stuck if not self._is_waiting(rank) and not self._may_import(rank)]
        if idle := self._without_ahead(idle):
            if len(idle) < len(stuck) or not all(self._may_compute(rank) for rank in idle):
                return "stalled", tuple(sorted(idle))
            return None
        writes = [rank for rank in stuck if self.states[rank].save is not None and not self.states[rank].save_waits]
        if writes and len(writes) < len(stuck):
            return "stalled", tuple(sorted(writes))
        if self._failed:
            return None  # what has failed there is the cause, and ends the run
        # Ranks that are in collectives which nobody counts: whether these wait for the others is not known.
        uncounted = {rank for rank in stuck if not self.states[rank].wait and self._is_in_c10d(rank)}
        if targets:
            return "stalled", tuple(sorted(targets.union(*({rank} for rank in stuck if awaited[rank] & uncounted))))
        if len({self.states[rank].where[:1] for rank in uncounted}) > 1:
            return "stalled", tuple(sorted(uncounted))
        entered = [rank for rank in stuck if _number(self.states[rank].wait)]
        return ("lost connection", tuple(sorted(entered))) if len(entered) > 1 else None

    def _without_ahead(self, ranks: list[int]) -> list[int]:
        """Leave out ranks that have entered collectives which others of them have not: their GPUs wait for those."""
        entered = {rank: self.states[rank].entered for rank in ranks}
        ahead = {
            rank
            for rank in ranks
            for other in ranks
            if any(number > entered[other].get(group, number) for group, number in entered[rank].items())
        }
        return [rank for rank in ranks if rank not in ahead] or ranks

    def _find_stuck_save(self, running: Collection[int], allowed: float) -> Stall | None:
        """The ranks whose checkpoint thread makes no progress, and waits for no rank."""
        idle = {rank: seconds for rank in running if (seconds := self._idle_in_save(rank))}
        if not any(seconds >= allowed for seconds in idle.values()):
            return None
        stuck = [rank for rank, seconds in idle.items() if seconds >= allowed / 2]
        self._read_stacks(stuck)
        waiting = tuple(sorted(rank for rank in stuck if self.states[rank].save_waits))
        culprits = tuple(sorted(set(stuck) - set(waiting)))
        if not culprits:
            return None
        seconds = min(idle[rank] for rank in culprits)
        parts = [self._describe_culprit(rank, in_save=True) for rank in culprits]
        return Stall("stalled", culprits, waiting, seconds, self._describe_stall(parts, culprits, waiting, seconds))

    def _may_import(self, rank: int) -> bool:
        """Check whether a rank still imports, and has time for it."""
        return self.states[rank].phase == "import" and self.idle(rank) < self._allowed(rank)

    def _may_compute(self, rank: int) -> bool:
        """Check whether a rank without progress uses a CPU, before the end of training."""
        state = self.states[rank]
        return state.cpu > COMPUTES * state.idle and state.phase != "exit"

    def _is_waiting(self, rank: int) -> bool:
        if rank in self._failed:
            return True
        state = self.states.get(rank)
        if state is None or state.state in UNABLE:
            return False
        return state.waits or (state.waits_for_thread and state.save_waits)

    def _is_in_c10d(self, rank: int) -> bool:
        return any(place.startswith(C10D) for place in self.states[rank].where)

    def _awaited_by(self, rank: int) -> set[int]:
        """The ranks for which a rank's main thread waits: in a collective, or for a message."""
        state = self.states[rank]
        wait = state.wait
        if wait is None or state.state in UNABLE:
            return set()
        if not wait.number:
            return set(wait.ranks)
        return {each for each in wait.ranks if each != rank and self._entered(each, wait) < wait.number}

    def _entered(self, rank: int, wait: Wait) -> int:
        """Count the collectives of a wait's group that a rank has entered."""
        return self.states[rank].entered.get(wait.group_name, 0) if rank in self.states else 0

    def _name(self, rank: int) -> str:
        state = self.states[rank]
        return f"rank {rank} (host {state.host}, pid {state.pid})"

    def _describe(self, kind: str, culprits: tuple[int, ...], waiting: tuple[int, ...], seconds: float) -> str:
        if kind == "lost connection":
            wait = self.states[culprits[0]].wait
            assert wait is not None
            return (
                f"{list_ranks(culprits)} are all in {_describe_collective(wait)}, which has not finished for "
                f"{seconds:.3g} s: a connection between them is lost"
            )
        return self._describe_stall([self._describe_culprit(rank) for rank in culprits], culprits, waiting, seconds)

    def _describe_stall(
        self, parts: list[str], culprits: tuple[int, ...], waiting: tuple[int, ...], seconds: float
    ) -> str:
        message = f"{'; '.join(parts)}: no progress for {seconds:.3g} s (train.timeout is {self.timeout:g} s)"
        return message + self.describe_waiting(waiting, culprits)

    def _describe_culprit(self, rank: int, *, in_save: bool = False) -> str:
        state = self.states.get(rank)
        if state is None:
            named = f"rank {rank} (pid {self.pids[rank]})" if rank in self.pids else f"rank {rank}"
            found = self.state_of(rank)
            return f"{named} has not begun since its process was started{f': {found}' if found else ''}"
        place = self.describe_place(rank)
        if rank in self.silent:
            return f"{self._name(rank)} is silent in {place}: nothing comes from its host any more"
        where = state.where[0] if state.where else ""
        if state.save is not None and (in_save or state.waits_for_thread):
            place, where = f"phase save of step {state.save}, in the thread that writes", state.save_where
        why = f": {state.state}" if state.state else ""
        return f"{self._name(rank)} is stuck in {place}{f', at {where}' if where else ''}{why}"

    def describe_waiting(self, waiting: Collection[int], culprits: Collection[int]) -> str:
        """Say who waits for the culprits, and in what; "" if nobody does."""
        if not waiting:
            return ""
        found = [wait for rank in waiting if (wait := self.states[rank].wait) is not None]
        waits = {wait for wait in found if wait.number and set(culprits) & set(wait.ranks)}
        where = ""
        if waits:
            first = min(waits, key=lambda wait: (wait.group != "data", wait.number))
            where = f" in {_describe_collective(first)}" + (" and others" if len(waits) > 1 else "")
        elif messages := [wait.name for wait in found if not wait.number]:
            where = f" ({messages[0]})"
        elif saves := [self.states[rank].save for rank in waiting if self.states[rank].save_waits]:
            where = f" in the save of step {saves[0]}"
        elif places := [self.states[rank].where[0] for rank in waiting if self.states[rank].where]:
            where = f", at {places[0]}"
        verb, whom = "waits" if len(waiting) == 1 else "wait", "it" if len(culprits) == 1 else "them"
        return f"; {list_ranks(waiting)} {verb} for {whom}{where}"


_OF_STACK = ("where", "waits", "waits_for_thread", "save_where", "save_waits")


def list_ranks(ranks: Collection[int]) -> str:
    """Format numbers of ranks: "rank 3", "ranks 0, 1 and 3", and runs of many as "ranks 0-6 and 9"."""
    parts: list[str] = []
    ordered = sorted(ranks)
    first = 0
    for index, rank in enumerate(ordered):
        if index + 1 < len(ordered) and ordered[index + 1] == rank + 1:
            continue
        if index - first >= 2:
            parts.append(f"{ordered[first]}-{rank}")
        else:
            parts += [str(each) for each in ordered[first : index + 1]]
        first = index + 1
    if len(ordered) == 1:
        return f"rank {parts[0]}"
    return "ranks " + (" and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0])


def _number(wait: Wait | None) -> int:
    return 0 if wait is None else wait.number


def _describe_collective(wait: Wait) -> str:
    return f"{wait.name} number {wait.number} of group {wait.group}"
