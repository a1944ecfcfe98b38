# SPDX-License-Identifier: Apache-2.0
"""A thread block as a coroutine, which shares one thread with the others of its rank."""

from collections.abc import Sequence

from stretto.collectives.executor.rank_run import Awaited, RankRun

_SHOWN = 8


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

    def advance(self) -> bool:
        """Execute a step, unless it has to wait; returns whether one was executed, or none is left."""
        try:
            self.awaited = next(self._steps)
        except StopIteration:
            self.has_ended = True
            return True
        return self.awaited is None

    def __str__(self) -> str:
        return "" if self.awaited is None else self.run.describe(self.number, self.awaited)


def start_thread_blocks(run: RankRun) -> list[Coroutine]:
    """The thread blocks of a rank that have steps."""
    return [Coroutine(run, number) for number, block in enumerate(run.blocks) if block.steps]


def list_waits(waiting: Sequence[Coroutine]) -> str:
    """List what each coroutine waits for, a line each."""
    lines = [f"  {coroutine}" for coroutine in waiting[:_SHOWN]]
    if len(waiting) > _SHOWN:
        lines.append(f"  and {len(waiting) - _SHOWN} more")
    return "\n".join(lines)
