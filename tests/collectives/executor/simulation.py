# SPDX-License-Identifier: Apache-2.0
"""Simulates all ranks of a schedule in this process, with the same coroutines and FIFOs: detects deadlocks."""

from collections.abc import Sequence
from random import Random

from torch import Tensor

from stretto.collectives.executor.layout import Buffers
from stretto.collectives.executor.plan import DEFAULT_TILE_BYTES, ExecutionPlan
from stretto.collectives.executor.processes import place_input, plan_for_inputs
from stretto.collectives.executor.rank_run import RankRun
from stretto.collectives.executor.turns import ExecutionError, list_waits, start_thread_blocks
from stretto.collectives.schedule import Schedule
from stretto.memory import allocate_in_process


def simulate(
    schedule: Schedule,
    inputs: Sequence[Tensor],
    *,
    reduction: str | None = None,
    in_place: bool | None = None,
    tile_bytes: int = DEFAULT_TILE_BYTES,
    slots: int | None = None,
    seed: int | None = None,
) -> list[Tensor]:
    """Every rank's output, flat, for every rank's input, which is not modified; options as in `run_on_host`.

    in_place: None for the schedule's own setting. seed: None runs thread blocks in turn, one after another, a
    number a random order, which shows races. Memory that no step has written is NaN (0x5A in integers). Raises
    ValueError if it cannot run, ExecutionError if it deadlocks.
    """
    plan = plan_for_inputs(schedule, inputs, reduction, in_place, tile_bytes, slots)
    ranks = range(plan.collective.ranks)
    buffers = [
        Buffers(schedule, plan.collective, plan.layout, rank, *place_input(plan, rank, inputs[rank])) for rank in ranks
    ]
    memories = allocate_in_process(plan.collective.ranks, plan.buffer_bytes, plan.signals)
    runs = [RankRun(plan, rank, memories[rank], buffers[rank]) for rank in ranks]
    _take_turns(runs, plan, None if seed is None else Random(seed))
    return [buffer.finish() for buffer in buffers]


_STEPS_A_TURN = (1, 1, 2, 5, 1 << 30)


def _take_turns(runs: Sequence[RankRun], plan: ExecutionPlan, order: Random | None) -> None:
    """Run all thread blocks to their end, step by step in turn.

    With `order`, in a random order: some execute many steps in a turn, and some have no turn for a while. After a turn
    without a step all have one, so that it is certain that none can continue.
    """
    waiting = [coroutine for run in runs for coroutine in start_thread_blocks(run)]
    went_on = False
    while waiting:
        everyone = order is None or not went_on
        went_on = False
        for coroutine in waiting if everyone else order.sample(waiting, order.randint(1, len(waiting))):
            for _ in range(1 if order is None else order.choice(_STEPS_A_TURN)):
                if coroutine.has_ended or not coroutine.advance():
                    break
                went_on = True
        waiting = [coroutine for coroutine in waiting if not coroutine.has_ended]
        if everyone and not went_on:
            raise ExecutionError(f"{plan.schedule.name} deadlocks with {plan.slots} slots:\n{list_waits(waiting)}")
