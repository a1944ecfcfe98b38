# SPDX-License-Identifier: Apache-2.0
"""Simulates all ranks of a schedule in this process, with the same coroutines and FIFOs: detects deadlocks."""

from collections.abc import Sequence
from random import Random

from torch import Tensor

from stretto.collectives.executor.layout import Buffers, poisoned
from stretto.collectives.executor.plan import DEFAULT_TILE_BYTES, ExecutionPlan, make_plan
from stretto.collectives.executor.rank_run import RankRun
from stretto.collectives.executor.turns import Coroutine, ExecutionError, list_waits, take_turns
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
    take_turns(runs, _Deadlock(plan), None if seed is None else Random(seed))
    return [buffer.finish() for buffer in buffers]


class _Deadlock:
    """Reports a deadlock as soon as all thread blocks wait: no other process could help."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self._plan = plan

    def reset(self) -> None:
        """Do nothing: there is no state."""

    def wait(self, waiting: Sequence[Coroutine]) -> None:
        """Raise ExecutionError."""
        raise ExecutionError(
            f"{self._plan.schedule.name} deadlocks with {self._plan.slots} slots:\n{list_waits(waiting)}"
        )


def plan_for_inputs(
    schedule: Schedule,
    inputs: Sequence[Tensor],
    reduction: str | None,
    in_place: bool | None,
    tile_bytes: int,
    slots: int | None,
) -> ExecutionPlan:
    """Plan a run on these inputs, one a rank, of one size and dtype. Raises ValueError if it cannot run."""
    collective = schedule.collective
    if len(inputs) != collective.ranks:
        raise ValueError(f"{schedule.name} has {collective.ranks} ranks: {len(inputs)} inputs are not one for each")
    if len({(tensor.dtype, tensor.numel()) for tensor in inputs}) > 1:
        raise ValueError(
            "all ranks' inputs have one dtype and size, not "
            + ", ".join(f"{tensor.numel()} of {str(tensor.dtype)[6:]}" for tensor in inputs)
        )
    in_place = schedule.in_place if in_place is None else in_place
    # Both buffers consist of blocks of one size: the input's elements give the output's, or the whole one's in place.
    return make_plan(
        schedule,
        inputs[0].numel(),
        None,
        in_place=in_place,
        dtype=inputs[0].dtype,
        reduction=reduction,
        tile_bytes=tile_bytes,
        slots=slots,
    )


def place_input(plan: ExecutionPlan, rank: int, input: Tensor) -> tuple[Tensor, Tensor | None]:
    """A rank's tensors for `run_on_host`: its input and a new output, or in place one new tensor for both."""
    layout, collective = plan.layout, plan.collective
    given = input.detach().reshape(-1)
    if not collective.in_place:
        return given, poisoned(layout.elements(collective.output_chunks), plan.dtype)
    whole = poisoned(layout.elements(collective.chunks_per_loop), plan.dtype)
    start = layout.elements(collective.starts(rank)[0])
    whole[start : start + len(given)] = given
    return whole, None
