# SPDX-License-Identifier: Apache-2.0
"""Starts a run's ranks again after one has failed: `run_with_restarts`, the loop around the launcher's attempts.

Each attempt trains from the newest checkpoint that the run has written, on the largest grid that the slots allow. The
loop ends when an attempt has trained all steps or was stopped by a signal, when a failure would recur immediately
(diverged, refused by a check), or after `train.max_restarts` restarts in a row without a new checkpoint.
"""

import platform
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from stretto.axes import shown_sizes
from stretto.launch.elastic import ATTEMPT, own_checkpoint, step_of_start
from stretto.launch.failures import RankFailure
from stretto.launch.job import LaunchJob
from stretto.launch.journal import Journal, StepWatch
from stretto.launch.slots import Slot, Slots, environment_of
from stretto.launch.supervisor import StopTimeouts, Supervisor
from stretto.quantities import counted

MAX_PAUSE = 60.0  # seconds
PAUSE_POLL = 0.05
WATCH = 0.5  # seconds between polls of the run's folder and of slots that may be retried


# Starts the ranks once and waits for them. Takes the job, the run's id, more environment for the ranks, and a function
# that is asked several times a second whether they are to stop. Returns the signal that stopped them, if any; raises
# RankFailure.
RunAttempt = Callable[[LaunchJob, str, dict[str, str], Callable[[], bool]], Signals | None]


def would_recur(failure: RankFailure, newest: Path | None) -> bool:
    """Check whether a restart would immediately fail in the same way, so that it is not attempted.

    A damaged checkpoint is no such failure, if the one before it can be resumed. newest: the newest checkpoint.
    """
    has_older = failure.checkpoint is not None and failure.checkpoint != newest
    return failure.kind == "diverged" or (failure.failure.would_recur and not has_older)


@dataclass
class _Attempt:
    """One start of the ranks. resumed: the step after which it trains; None of a run that has no checkpoint yet."""

    job: LaunchJob
    slots: list[Slot]
    resumed: int | None


class Restarts:
    """The loop's state. `run` is called once."""

    def __init__(self, run_attempt: RunAttempt, job: LaunchJob, timeouts: StopTimeouts, slots: Slots) -> None:
        self._run_attempt, self._job, self._slots = run_attempt, job, slots
        self._id = uuid.uuid4().hex
        self._between = Supervisor(timeouts)  # without ranks: it records signals between two attempts
        self._journal = Journal(job.out)
        self._failures = 0  # in a row, without a new checkpoint
        self._is_growing = False  # the ranks were asked to stop, to continue with more of them
        self._pending: _BackgroundProbe | None = None
        self._last_look = 0.0
        self._reached = 0  # the last step of the attempt that has ended
        # Chosen while all GPUs answer, which may be asked for their memory.
        self._grids = {ranks: job.on_slots(ranks) for ranks in range(1, job.ranks)}

    def run(self) -> Signals | None:
        """Run attempts until one ends the run. Raises the last attempt's failure."""
        attempt, number = _Attempt(self._job, self._slots.take(self._job.ranks), None), 0
        with self._between.handling_signals():
            while True:
                try:
                    # A signal that arrived before the attempt's own handlers were installed has stopped it, too.
                    stopped_by = self._run_once(attempt, number) or self._between.stop_signal
                except RankFailure as failure:
                    attempt = self._plan_after(failure, attempt)
                    if self._between.stop_signal is not None:  # it arrived during the pause
                        self._journal.cancel_restart()
                else:
                    if stopped_by is not None or not self._is_growing or self._is_finished():
                        return stopped_by
                    attempt = self._plan_growth(attempt)
                if (stopped_by := self._between.stop_signal) is not None:
                    return stopped_by
                number += 1

    def _run_once(self, attempt: _Attempt, number: int) -> Signals | None:
        self._is_growing, self._pending = False, None
        start = step_of_start(self._job.out, self._id)
        steps = StepWatch(self._job, attempt.resumed or start or 0)
        environment = environment_of(attempt.slots) | {ATTEMPT: str(number)}
        try:
            return self._run_attempt(attempt.job, self._id, environment, lambda: self._wants_stop(attempt, steps))
        finally:
            self._poll_steps(steps)
            self._reached = steps.reached()

    # --- while the ranks run

    def _wants_stop(self, attempt: _Attempt, steps: StepWatch) -> bool:
        """Decide whether the attempt is to stop; report the first step after a failure.

        It stops after a signal that arrived before its own handlers were installed, and when more ranks may be tried.
        """
        if self._between.stop_signal is not None:
            return True
        now = time.monotonic()
        if self._is_growing or now - self._last_look < min(WATCH, max(self._job.retry_after / 4, 0.05)):
            return self._is_growing
        self._last_look = now
        self._poll_steps(steps)
        if attempt.job.ranks < self._job.ranks:
            self._is_growing = self._can_grow(attempt, steps)
        return self._is_growing

    def _poll_steps(self, steps: StepWatch) -> None:
        if self._journal.awaits_training and steps.has_trained():
            seconds = self._journal.note_training()
            self._job.report(f"training again {seconds:.1f} s after the failure")

    def _can_grow(self, attempt: _Attempt, steps: StepWatch) -> bool:
        """Check whether slots set aside for long enough answer, and allow a larger grid. Does not wait for them."""
        if not steps.has_trained():
            return False  # first the smaller grid must be seen to work
        if self._pending is None:
            due = self._slots.due()
            if due and self._allows_more(attempt, len(due)):
                self._pending = _BackgroundProbe(self._slots, due)
            return False
        if self._pending.is_alive():
            return False
        due, silent, self._pending = self._pending.due, self._pending.silent, None
        self._slots.postpone(silent)
        answering = [slot for slot in due if slot not in silent]
        if not self._allows_more(attempt, len(answering)):
            return False
        self._slots.readmit(answering)
        return True

    def _allows_more(self, attempt: _Attempt, slots: int) -> bool:
        """Check whether there is a larger grid than the attempt's if so many slots come back."""
        chosen = self._choose(len(self._slots.usable()) + slots)
        return chosen is not None and chosen[0].ranks > attempt.job.ranks

    # --- between two attempts

    def _is_finished(self) -> bool:
        """Check whether the ranks had trained all steps when they were asked to stop."""
        newest = self._job.newest_checkpoint()
        return newest is not None and self._job.step_of(newest) >= self._job.steps

    def _plan_growth(self, attempt: _Attempt) -> _Attempt:
        """The next attempt after the ranks have stopped so that more can train."""
        following, why = self._next(own_checkpoint(self._job, self._job.newest_checkpoint(), self._id))
        self._job.report(
            f"grid: from {_named(attempt)} to {_named(following)} after step {following.resumed or 0} ({why}), to try "
            "all ranks again"
        )
        return following

    def _plan_after(self, failure: RankFailure, attempt: _Attempt) -> _Attempt:
        """The next attempt after a failure, once the pause before it is over. Raises the failure if there is none."""
        checkpoint = own_checkpoint(self._job, failure.checkpoint, self._id)
        if checkpoint is not None and (attempt.resumed is None or self._job.step_of(checkpoint) > attempt.resumed):
            self._failures = 0
            self._slots.forget_failures()
        self._failures += 1
        slot = attempt.slots[failure.rank] if failure.rank < len(attempt.slots) else None
        start = step_of_start(self._job.out, self._id)
        reached = None if start is None else max(start, self._reached)
        known: dict[str, Any] = {
            "kind": failure.kind,
            "rank": failure.rank,
            "slot": None if slot is None else slot.number,
            "host": platform.node(),
            "reason": failure.reason,
            "step_reached": reached,
        }
        aside: list[Slot] = []
        if (why_not := self._why_final(failure)) is None:
            aside = self._set_aside(failure, slot, attempt)
            if self._choose(len(self._slots.usable())) is None:
                why_not = f"{_listed(aside)} does not answer, and train.grids has no grid for fewer ranks"
        if why_not is not None:
            self._journal.add(failure.failure.order[1], known, restarted=False)
            self._job.report(f"no restart: {why_not}")
            raise failure
        following, why = self._next(checkpoint)
        resumed = following.resumed or start or 0
        lost = None if reached is None else max(0, reached - resumed)
        known |= {"step_resumed": resumed, "steps_lost": lost, "grid": dict(following.job.grid)}
        self._journal.add(failure.failure.order[1], known, restarted=True)
        pause = 0.0 if self._failures == 1 else min(2.0 ** min(self._failures - 2, 10), MAX_PAUSE)
        self._job.report(
            f"restart {self._journal.restarts}: {str(failure).splitlines()[0]}"
            + ("; " if lost is None else f"; step {reached} was reached, {_steps(lost)} to repeat; ")
            + f"it goes on {_from(following, start)} on {_named(following)}"
            + (f" ({why})" if following.job.ranks != attempt.job.ranks else "")
            + (f"; {_listed(aside)} is set aside" if aside else "")
            + (f"; in {pause:g} s" if pause else "")
        )
        self._wait(pause)
        return following

    def _why_final(self, failure: RankFailure) -> str | None:
        """Say why no restart follows a failure; None if one does."""
        if failure.stopped_by is not None:
            return f"{failure.stopped_by.name} has asked the run to stop"
        if would_recur(failure, self._job.newest_checkpoint()):
            return "the same run would fail again"
        if self._failures > (most := self._job.max_restarts):
            times = f"{self._failures} failures" if self._failures > 1 else "1 failure"
            return f"{times} in a row without a new checkpoint, and train.max_restarts is {most}"
        return None

    def _set_aside(self, failure: RankFailure, slot: Slot | None, attempt: _Attempt) -> list[Slot]:
        """Set aside slots that fail again and again or whose GPU does not answer. Returns them.

        A lost connection may be either end's fault, so that no slot is blamed. Where no grid is left, slots whose GPU
        answers are not set aside: the whole grid is tried again.
        """
        aside = self._slots.probe(attempt.slots)
        if slot is not None and slot not in aside and failure.failure.blames_rank and self._slots.blame(slot):
            aside.append(slot)
        if self._choose(len(self._slots.usable())) is None:
            self._slots.readmit_all()
        return [slot for slot in aside if slot.set_aside_at is not None]

    def _next(self, checkpoint: Path | None) -> tuple[_Attempt, str]:
        """The attempt from a checkpoint that this run has written (None: as it began), on the slots that are left."""
        chosen = self._choose(len(self._slots.usable()))
        assert chosen is not None  # the callers have looked
        (job, why), resumed = chosen, None
        if checkpoint is not None:
            # From the newest, the ranks may agree on an older one, if they find that it is damaged.
            job = job.resuming(None if checkpoint == self._job.newest_checkpoint() else checkpoint)
            resumed = self._job.step_of(checkpoint)
        return _Attempt(job, self._slots.take(job.ranks), resumed), why

    def _choose(self, slots: int) -> tuple[LaunchJob, str] | None:
        """The job on the largest grid for so many slots."""
        return self._grids.get(slots) if slots < self._job.ranks else self._job.on_slots(slots)

    def _wait(self, seconds: float) -> None:
        """Wait, or until a signal comes."""
        deadline = time.monotonic() + seconds
        while self._between.stop_signal is None and time.monotonic() < deadline:
            time.sleep(PAUSE_POLL)


class _BackgroundProbe(threading.Thread):
    """Probes slots, as a GPU that does not answer takes a minute. May outlast the attempt; changes no slot.

    due: the slots that are probed; silent: those of them that did not answer, all until it is known.
    """

    def __init__(self, slots: Slots, due: list[Slot]) -> None:
        super().__init__(daemon=True)
        self._slots, self.due, self.silent = slots, due, due
        self.start()

    def run(self) -> None:
        self.silent = self._slots.find_silent(self.due)


def run_with_restarts(run_attempt: RunAttempt, job: LaunchJob, timeouts: StopTimeouts) -> Signals | None:
    """Run attempts until the run has ended. Returns the signal that stopped it, if one did.

    Raises the last attempt's failure. Appends a line to `out/restarts.jsonl` for each failure.
    """
    slots = Slots.of_run(job.ranks, job.retry_after, on_gpus=job.uses_gpus())
    return Restarts(run_attempt, job, timeouts, slots).run()


def _named(attempt: _Attempt) -> str:
    ranks = attempt.job.ranks
    grid = " ".join(f"{axis}={size}" for axis, size in shown_sizes(attempt.job.grid).items())
    on = "" if attempt.slots[0].gpu is None else f", GPUs {', '.join(str(slot.gpu) for slot in attempt.slots)}"
    return f"{counted(ranks, 'rank')} ({grid}{on})"


def _from(attempt: _Attempt, start: int | None) -> str:
    if attempt.resumed is not None:
        return f"after step {attempt.resumed}"
    return f"after step {start}, as it began," if start else "from the start"


def _listed(slots: list[Slot]) -> str:
    return " and ".join(map(str, slots))


def _steps(number: int) -> str:
    return f"{number} step{' is' if number == 1 else 's are'}"
