# SPDX-License-Identifier: Apache-2.0
"""The timing model of pipelines: `simulate` says when each action of a schedule starts and ends.

A rank computes one action at a time, in its schedule's order, as soon as the message that the action uses has come.
Sending does not occupy the rank that computes: a message leaves when its action ends, waits for the messages before it
in its channel, occupies the channel for its transmission time, and arrives a latency later. Receives are posted early
enough, and channels have enough buffers, so that it has no other delay. Gathering weights takes no time here.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stretto.schedules.schedule import PipelineOperation, PipelineSchedule, ScheduleError
from stretto.schedules.verifier import LiveMicroBatches, live_micro_batches

_F, _B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD
_I, _W = PipelineOperation.BACKWARD_INPUT, PipelineOperation.BACKWARD_WEIGHT


@dataclass(frozen=True)
class StageCosts:
    """Times that each stage computes on a micro-batch, in any unit.

    forward: F of each stage. backward_input, backward_weight: I and W. backward: B, a whole backward pass; None is the
        sum of I and W.
    overlapped: an overlapped pair whose F is of the stage, computed together when both messages have arrived; None
        computes one after the other, each when its message has come.

    Raises ValueError for negative times, or if not all have as many stages.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    overlapped: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        given = {
            "forward": self.forward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }
        optional = {"backward": self.backward, "overlapped": self.overlapped}
        given |= {name: times for name, times in optional.items() if times is not None}
        for name, times in given.items():
            if len(times) != len(self.forward):
                raise ValueError(f"{name} has the times of {len(times)} stages, but forward those of {self.stages}")
            for stage, time in enumerate(times):
                if not 0 <= time < float("inf"):
                    raise ValueError(f"{name} of stage {stage} takes {time}, but must be at least 0 and finite")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        backward: float | None = None,
        overlapped: float | None = None,
    ) -> "StageCosts":
        """Equal times on all stages."""
        optional = (None if time is None else (time,) * stages for time in (backward, overlapped))
        return cls((forward,) * stages, (backward_input,) * stages, (backward_weight,) * stages, *optional)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    def whole_backward(self) -> tuple[float, ...]:
        """The time of B of each stage."""
        if self.backward is not None:
            return self.backward
        return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))


@dataclass(frozen=True)
class StageLinks:
    """The time of messages between stages on different ranks; on one rank they take no time.

    latency: from the end of a message's transmission to its arrival. transmission: the message's bytes divided by the
    bandwidth of its channel, during which the next message of the channel waits. Both are in the unit of StageCosts,
    for all pairs of neighbours or a tuple with one time for each: entry s is between stages s and s + 1.
    """

    latency: float | tuple[float, ...] = 0.0
    transmission: float | tuple[float, ...] = 0.0

    def times(self, stages: int) -> tuple[list[float], list[float]]:
        """Return the latency and the transmission time between each stage and the next. ValueError for others."""
        return _each("latency", self.latency, stages), _each("transmission", self.transmission, stages)


def _each(name: str, value: float | tuple[float, ...], stages: int) -> list[float]:
    times = list(value) if isinstance(value, tuple) else [value] * (stages - 1)
    if len(times) != stages - 1:
        raise ValueError(f"{name} has {len(times)} times, but {stages} stages have {stages - 1} pairs of neighbours")
    if any(not 0 <= time < float("inf") for time in times):
        raise ValueError(f"{name} is {value}, but must be at least 0 and finite")
    return times


@dataclass(frozen=True)
class PipelineTimeline:
    """The times at which each action of a step starts and ends.

    schedule: the actions in the order in which they were computed. starts, ends: of each rank's actions.
    busy: the time that each rank computes.
    """

    schedule: PipelineSchedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """From the start of the step to the end of the last action."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """The time of the makespan in which each rank does not compute: its bubbles."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def inner_idle(self) -> tuple[float, ...]:
        """The time in which each rank does not compute between its first and its last action."""
        spans = zip(self.starts, self.ends, self.busy, strict=True)
        return tuple(ends[-1] - starts[0] - busy if starts else 0.0 for starts, ends, busy in spans)

    @property
    def period(self) -> float:
        """The time between the starts of consecutive steps if no rank waits for others at the end of a step.

        The makespan also includes waiting for all ranks at the end of the step, which clipping by the norm over all
        stages requires.
        """
        return max(
            (ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True) if starts), default=0.0
        )

    @property
    def live(self) -> LiveMicroBatches:
        """The most live micro-batches of each rank and stage."""
        return live_micro_batches(self.schedule)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle, from 0 to 1."""
        return sum(self.idle) / (self.makespan * len(self.busy)) if self.makespan else 0.0


def simulate(
    schedule: PipelineSchedule,
    costs: StageCosts,
    links: StageLinks | None = None,
    *,
    jitter: float = 0.0,
    seed: int = 0,
) -> PipelineTimeline:
    """Compute when each action of a schedule that `verify` accepts starts and ends.

    links: between stages (default: messages take no time).
    jitter: each action takes its time multiplied by a number that is uniform in [1 - jitter, 1 + jitter]. The number
        depends on `seed`, stage, micro-batch and operation (B has that of I), so different schedules of the same stages
        meet the same delays.

    Raises ScheduleError for a schedule that deadlocks (`verify` says why), and ValueError for costs or links of another
    number of stages.
    """
    if costs.stages != schedule.stages:
        raise ValueError(f"the costs are of {costs.stages} stages, but the schedule has {schedule.stages}")
    run = _Run(schedule, costs, MessageTimes(schedule.stage_ranks, links or StageLinks()))
    run.advance_all(ActionTimes(costs, schedule.micro_batches, jitter, seed))
    return make_timeline(schedule, run.starts, run.ends)


class _Run:
    """The state of a simulation: the times so far, and which messages have come when."""

    def __init__(self, schedule: PipelineSchedule, costs: StageCosts, channels: "MessageTimes") -> None:
        count, last = schedule.micro_batches, schedule.stages - 1
        self.schedule = schedule
        self.costs = costs
        self.channels = channels
        # When the input of F, and the gradient for B or I, is there, by stage and micro-batch; None until it is known.
        self.inputs: list[float | None] = [0.0] * count + [None] * (count * last)
        self.gradients: list[float | None] = [None] * (count * last) + [0.0] * count
        self.starts: list[list[float]] = [[] for _ in schedule.ranks]
        self.ends: list[list[float]] = [[] for _ in schedule.ranks]
        self.waiting: dict[tuple[bool, int], int] = {}  # the rank that waits for a message, activations or gradients
        self.ready = list(range(schedule.pipe))

    def advance_all(self, durations: "ActionTimes") -> None:
        """Run all ranks to their ends. Raises ScheduleError if one does not get there."""
        while self.ready:
            self._advance(self.ready.pop(), durations)
        if self.waiting:
            raise ScheduleError(f"{self.schedule.name} deadlocks; verify() lists the actions that wait for each other")

    def _advance(self, rank: int, durations: "ActionTimes") -> None:
        """Run a rank until it waits for a message that is not there yet."""
        actions, starts, ends = self.schedule.ranks[rank], self.starts[rank], self.ends[rank]
        count = self.schedule.micro_batches
        now = ends[-1] if ends else 0.0
        position = len(ends)
        while position < len(actions):
            stage, operation, micro_batch, overlaps_next = actions[position]
            position += 1
            if micro_batch is None:
                starts.append(now)
                ends.append(now)
                continue
            index = stage * count + micro_batch
            if operation is not _W:
                is_forward = operation is _F
                there = self.inputs[index] if is_forward else self.gradients[index]
                if there is None:
                    self.waiting[is_forward, index] = rank
                    return
                if there > now:
                    now = there
            if overlaps_next and self.costs.overlapped is not None:
                other = actions[position].stage * count + (actions[position].micro_batch or 0)
                later = self.gradients[other]
                if later is None:
                    self.waiting[False, other] = rank
                    return
                now = self._compute_pair(rank, max(now, later), (index, other), durations)
                position += 1
                continue
            starts.append(now)
            now += durations.of(operation)[index]
            ends.append(now)
            if operation is not _W:
                self._send(operation is _F, index, now)

    def _compute_pair(self, rank: int, start: float, pair: tuple[int, int], durations: "ActionTimes") -> float:
        """Compute F and B at once, after which both send. Each counts as busy for its share of the time."""
        forward, backward = durations.of(_F)[pair[0]], durations.of(_B)[pair[1]]
        stage, other = (index // self.schedule.micro_batches for index in pair)
        if self.costs.overlapped is not None and forward + backward:
            gain = self.costs.overlapped[stage] / (self.costs.forward[stage] + self.costs.whole_backward()[other])
            forward, backward = forward * gain, backward * gain
        middle, end = start + forward, start + forward + backward
        self.starts[rank] += [start, middle]
        self.ends[rank] += [middle, end]
        self._send(True, pair[0], end)
        self._send(False, pair[1], end)
        return end

    def _send(self, is_forward: bool, index: int, now: float) -> None:
        """Send what an action on a stage and micro-batch has computed, and wake the rank that waits for it."""
        count = self.schedule.micro_batches
        stage = index // count
        target = stage + 1 if is_forward else stage - 1
        if not 0 <= target < self.schedule.stages:
            return
        at = target * count + index % count
        (self.inputs if is_forward else self.gradients)[at] = self.channels.arrival(now, stage, target)
        if (woken := self.waiting.pop((is_forward, at), None)) is not None:
            self.ready.append(woken)


def make_timeline(
    schedule: PipelineSchedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> PipelineTimeline:
    """Make a timeline of the times of each rank's actions."""
    busy = (sum(e - s for s, e in zip(*of_rank, strict=True)) for of_rank in zip(starts, ends, strict=True))
    return PipelineTimeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(busy))


class MessageTimes:
    """Computes when messages arrive: a channel between two ranks carries one activation or gradient at a time."""

    def __init__(self, stage_ranks: Sequence[int], links: StageLinks) -> None:
        self._latency, self._transmission = links.times(len(stage_ranks))
        # By stage, of activations to the next stage and of gradients to the one before; None: on the same rank.
        pairs = [None if a == b else (a, b) for a, b in pairwise(stage_ranks)]
        self._channels = {(s, s + 1): ("F", *pair) if pair else None for s, pair in enumerate(pairs)}
        self._channels |= {(s + 1, s): ("B", *pair[::-1]) if pair else None for s, pair in enumerate(pairs)}
        self._free: dict[tuple[str, int, int], float] = {}
        self._is_instant = not any(self._transmission)

    def arrival(self, sent: float, source: int, target: int) -> float:
        """Return when a message from one stage to a neighbour arrives. Calls are in the order of each sender's time."""
        channel = self._channels[source, target]
        if channel is None:
            return sent
        link = min(source, target)
        if not self._is_instant:
            sent = max(sent, self._free.get(channel, 0.0)) + self._transmission[link]
            self._free[channel] = sent
        return sent + self._latency[link]


class ActionTimes:
    """Times of all actions, with jitter: lists with an entry for each stage and micro-batch."""

    def __init__(self, costs: StageCosts, micro_batches: int, jitter: float, seed: int) -> None:
        if not 0 <= jitter <= 1:
            raise ValueError(f"jitter is {jitter}, but must be from 0 to 1")
        count = costs.stages * micro_batches
        uniform = random.Random(seed).uniform
        factors = {
            operation: [uniform(1 - jitter, 1 + jitter) for _ in range(count)] if jitter else None
            for operation in (_F, _I, _W)
        }

        def spread(times: Sequence[float], factor: list[float] | None) -> list[float]:
            each = [time for time in times for _ in range(micro_batches)]
            return each if factor is None else [time * one for time, one in zip(each, factor, strict=True)]

        self._times = {
            _F: spread(costs.forward, factors[_F]),
            _B: spread(costs.whole_backward(), factors[_I]),
            _I: spread(costs.backward_input, factors[_I]),
            _W: spread(costs.backward_weight, factors[_W]),
        }

    def of(self, operation: PipelineOperation) -> list[float]:
        """The times of an operation; stage s and micro-batch n are at s * micro_batches + n."""
        return self._times[operation]
