# SPDX-License-Identifier: Apache-2.0
"""A pipeline schedule as data: which actions each rank takes, in which order.

The words and letters are those of torch.distributed.pipelining: F is a forward pass of a stage for one micro-batch, B a
whole backward pass, I the part of it that computes the gradient of the stage's input, W the part that computes the
gradients of its weights. The papers on zero-bubble schedules write B for what is I here.

Messages are not listed. An F sends its output to the next stage, a B or an I sends the input's gradient to the stage
before, and each is received before the action that uses it starts. Stages on one rank need no messages.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from stretto.quantities import require_least


class ScheduleError(ValueError):
    """A pipeline schedule that cannot be built or read, or that breaks a rule."""


class PipelineOperation(StrEnum):
    """Operation of an action. The values are torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of a stage's input and of its weights."""
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    """Gather the weights of a stage."""
    RESHARD = "RESHARD"
    """Free the gathered weights of a stage."""

    @property
    def is_computation(self) -> bool:
        """True if the operation computes something for one micro-batch."""
        return self is not PipelineOperation.UNSHARD and self is not PipelineOperation.RESHARD


class Action(NamedTuple):
    """One action of a rank.

    stage: counted over all ranks, from 0 where the model begins.
    micro_batch: None for UNSHARD and RESHARD alone.
    overlaps_next: this F and the action after it, a B, may be computed together: torch's OVERLAP_F_B. To compute one
        after the other is right, too.
    """

    stage: int
    operation: PipelineOperation
    micro_batch: int | None = None
    overlaps_next: bool = False

    def __str__(self) -> str:
        """The action as torch writes it, such as 2F0 or 1UNSHARD."""
        return f"{self.stage}{self.operation}{'' if self.micro_batch is None else self.micro_batch}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of all ranks of a pipeline, for one step.

    stage_ranks: the rank that has each stage. micro_batches: of the step. ranks: for each rank, its actions in order.
    `verify` checks whether a schedule can be run.
    """

    name: str
    stage_ranks: tuple[int, ...]
    micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def pipe(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """The number of stages of all ranks."""
        return len(self.stage_ranks)

    @cached_property
    def virtual_stages(self) -> int:
        """The most stages that a rank has."""
        return max(Counter(self.stage_ranks).values(), default=0)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some backward pass is computed in two parts, I and W."""
        return any(action.operation is PipelineOperation.BACKWARD_WEIGHT for rank in self.ranks for action in rank)


def place_in_loops(pipe: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Return the rank of each stage where stages go round the ranks, once for each virtual stage."""
    return tuple(stage % pipe for stage in range(pipe * virtual_stages))


def place_in_v(pipe: int) -> tuple[int, ...]:
    """Return the rank of each of 2 * pipe stages: down the ranks and back up, so the first rank also has the last."""
    return (*range(pipe), *reversed(range(pipe)))


def add_unshard_actions(schedule: PipelineSchedule, ahead: int = 1) -> PipelineSchedule:
    """Return the schedule with each stage's weights gathered once a step: UNSHARD before its first use, RESHARD after
    its last.

    ahead: how many of the rank's actions UNSHARD is issued before the first that uses the weights, so that the gather
        runs under these.

    Raises ScheduleError for a schedule that has such actions, and ValueError for a negative `ahead`.
    """
    require_least(0, ahead=ahead)
    if any(not action.operation.is_computation for actions in schedule.ranks for action in actions):
        raise ScheduleError(f"{schedule.name} has UNSHARD or RESHARD actions already")
    ranks = tuple(_gather_once(actions, ahead) for actions in schedule.ranks)
    return PipelineSchedule(schedule.name, schedule.stage_ranks, schedule.micro_batches, ranks)


def _gather_once(actions: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, action in enumerate(actions):
        first.setdefault(action.stage, position)
        last[action.stage] = position
    # Nothing may come between the two actions of an overlapped pair.
    seconds = {position + 1 for position, action in enumerate(actions) if action.overlaps_next}
    made: list[Action] = []
    gathers = {stage: max(0, position - ahead) for stage, position in first.items()}
    for position, action in enumerate(actions):
        if position not in seconds:
            here = (position, position + 1) if action.overlaps_next else (position,)
            made += [Action(stage, PipelineOperation.UNSHARD) for stage, at in gathers.items() if at in here]
        made.append(action)
        made += [Action(stage, PipelineOperation.RESHARD) for stage, at in last.items() if at == position]
    return tuple(made)
