# SPDX-License-Identifier: Apache-2.0
"""Runs thread blocks as coroutines in one thread, in turn, until all have ended or none can continue."""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from stretto.collectives.executor.rank_run import Awaited, RankRun

_SHOWN = 8
_STEPS_A_TURN = (1, 1, 2, 5, 1 << 30)


class ExecutionError(RuntimeError):
    """A deadlocked run; the message names rank, thread block, step and what it waits for."""


class Coroutine:
    """A thread block that runs until it has to wait. awaited: what it waits for."""

    def __init__(self, run: RankRun, number: int) -> None:
        self.run = run
        self.number = number
        self.awaited: Awaited | None = None
        self.has_ended = False
        self._steps = run.run_thread_block(number)

    def advance(self, steps: int) -> bool:
        """Execute up to so many steps, until one has to wait; returns whether one was executed, or none is left."""
        for done in range(steps):
            try:
                self.awaited = next(self._steps)
            except StopIteration:
                self.has_ended = True
                return True
            if self.awaited is not None:
                return done > 0
        return True

    def __str__(self) -> str:
        return "" if self.awaited is None else self.run.describe(self.number, self.awaited)


class Idle(Protocol):
    """Called while none of the coroutines can continue."""

    def wait(self, waiting: Sequence[Coroutine]) -> None:
        """Wait a little, or raise."""

    def reset(self) -> None:
        """Start over: a coroutine went on."""


def take_turns(runs: Sequence[RankRun], idle: Idle, order: Random | None = None) -> None:
    """Run all thread blocks of these ranks to their end, step by step in turn.

    With `order`, in a random order: some execute many steps in a turn, and some have no turn for a while.
    """
    waiting = [Coroutine(run, number) for run in runs for number, block in enumerate(run.blocks) if block.steps]
    went_on = False
    while waiting:
        everyone = (
            order is None or not went_on
        )  # after a turn without a step, all have one: only then it is certain that none can continue
        went_on = False
        for coroutine in waiting if everyone else _choose(waiting, order):
            went_on |= coroutine.advance(1 if order is None else order.choice(_STEPS_A_TURN))
        if went_on:
            waiting = [coroutine for coroutine in waiting if not coroutine.has_ended]
            idle.reset()
        elif everyone:
            idle.wait(waiting)


def _choose(waiting: list[Coroutine], order: Random | None) -> list[Coroutine]:
    assert order is not None
    return order.sample(waiting, order.randint(1, len(waiting)))


def list_waits(waiting: Sequence[Coroutine]) -> str:
    """List what each coroutine waits for, a line each."""
    lines = [f"  {coroutine}" for coroutine in waiting[:_SHOWN]]
    if len(waiting) > _SHOWN:
        lines.append(f"  and {len(waiting) - _SHOWN} more")
    return "\n".join(lines)
