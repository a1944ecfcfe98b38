# SPDX-License-Identifier: Apache-2.0
"""`verify`: proves a pipeline schedule complete, well ordered and free of deadlock before it runs.

A schedule fixes the order of each rank's actions, so whether it deadlocks does not depend on how long actions and
messages take: a rank that could continue can still do so after any other rank has. Running the ranks in any order until
none can go on is therefore a proof.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from stretto.schedules.schedule import Action, PipelineOperation, PipelineSchedule, ScheduleError
from stretto.suggestions import require_one_of

Delivery = Literal["in_order", "matched"]

_F, _B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD
_I, _W = PipelineOperation.BACKWARD_INPUT, PipelineOperation.BACKWARD_WEIGHT


@dataclass(frozen=True)
class LiveMicroBatches:
    """The peak number of micro-batches whose activations are kept, on each rank (of all its stages) and on each stage.

    A micro-batch is live on a stage from the start of its F to the end of its B, or of its W where B is split.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]


def live_micro_batches(schedule: PipelineSchedule) -> LiveMicroBatches:
    """Count the micro-batches that each rank and stage keeps. They follow from the order of actions alone."""
    live, most = [0] * schedule.stages, [0] * schedule.stages
    for actions in schedule.ranks:
        for stage, operation, _, _ in actions:
            if operation is _F:
                live[stage] += 1
                most[stage] = max(most[stage], live[stage])
            elif operation is _B or operation is _W:
                live[stage] -= 1
    ranks = peak_activations(schedule, [1] * schedule.stages)
    return LiveMicroBatches(tuple(map(round, ranks)), tuple(most))


def peak_activations(
    schedule: PipelineSchedule, whole: Sequence[float], for_weights: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return the peak of each rank's kept activations, in the unit of `whole`, such as bytes.

    whole: what each stage keeps of a micro-batch from the start of its F to the end of its B, or of its I.
    for_weights: what of it is left from the end of I to that of W (default: all).

    Raises ValueError for lists of another length than the number of stages.
    """
    rest = whole if for_weights is None else for_weights
    for name, sizes in (("whole", whole), ("for_weights", rest)):
        if len(sizes) != schedule.stages:
            raise ValueError(f"{name} has the sizes of {len(sizes)} stages, but the schedule has {schedule.stages}")
    peaks = []
    for actions in schedule.ranks:
        kept = peak = 0.0
        for stage, operation, _, _ in actions:
            if operation is _F:
                kept += whole[stage]
                peak = max(peak, kept)
            elif operation is _B:
                kept -= whole[stage]
            elif operation is _I:
                kept += rest[stage] - whole[stage]
            elif operation is _W:
                kept -= rest[stage]
        peaks.append(peak)
    return tuple(peaks)


def verify(
    schedule: PipelineSchedule,
    *,
    buffers: int | None = None,
    delivery: Delivery = "in_order",
    max_live: int | Sequence[int] | None = None,
) -> None:
    """Raise ScheduleError, with the rank, the action and the rule, unless the schedule can be run.

    buffers: messages that a channel holds, sent and not yet used; None is any number. A channel goes from one rank to
        another and contains activations or gradients. A rank whose message finds no buffer waits until one is free; a
        buffer is free again when the action that uses its message starts.
    delivery: "in_order", a channel delivers its messages in the order sent, so a rank must use them in that order.
        "matched", a rank can take any message that has come, by stage and micro-batch.
    max_live: the most live micro-batches (`live_micro_batches`) that fit on a rank, for all ranks or for each.

    Checked: the numbers of stages and micro-batches, that actions are on the rank of their stage; that every stage
    computes F and either B or I and W once for every micro-batch, in that order, so that each message is sent once and
    used once; that weights are gathered where UNSHARD and RESHARD are given; deadlock; the order of messages; memory.
    Raises ValueError for limits that make no sense.
    """
    if buffers is not None and buffers < 1:
        raise ValueError(f"buffers is {buffers}, but a channel needs at least 1")
    require_one_of(get_args(Delivery), delivery=delivery)
    _check_placement(schedule)
    for rank in range(schedule.pipe):
        _check_rank(schedule, rank)
    _check_complete(schedule)
    if delivery == "in_order":
        _check_message_order(schedule)
    _check_deadlock(schedule, buffers)
    if max_live is not None:
        _check_memory(schedule, max_live)


def buffers_needed(schedule: PipelineSchedule, delivery: Delivery = "in_order") -> int:
    """Return the fewest buffers a channel with which a schedule does not deadlock.

    Raises ScheduleError if it breaks a rule with any number of buffers.
    """
    verify(schedule, delivery=delivery)
    least, most = 1, max(1, schedule.micro_batches * schedule.virtual_stages)
    while least < most:
        middle = (least + most) // 2
        try:
            _check_deadlock(schedule, middle)
            most = middle
        except ScheduleError:
            least = middle + 1
    return least


def _at(rank: int, position: int, action: Action) -> str:
    return f"rank {rank}, action {position} ({action})"


def _check_placement(schedule: PipelineSchedule) -> None:
    """Raise ScheduleError unless every action names a stage of its rank and a micro-batch that exists."""
    if schedule.pipe < 1 or schedule.stages < 1 or schedule.micro_batches < 1:
        raise ScheduleError(
            f"{schedule.name} has {schedule.pipe} ranks, {schedule.stages} stages and {schedule.micro_batches} "
            f"micro-batches, but must have at least 1 of each"
        )
    for stage, rank in enumerate(schedule.stage_ranks):
        if not 0 <= rank < schedule.pipe:
            raise ScheduleError(f"stage {stage} is on rank {rank}, but ranks are 0 to {schedule.pipe - 1}")
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            stage, operation, micro_batch, overlaps_next = action
            if not 0 <= stage < schedule.stages:
                raise ScheduleError(f"{_at(rank, position, action)}: stages are 0 to {schedule.stages - 1}")
            if schedule.stage_ranks[stage] != rank:
                raise ScheduleError(
                    f"{_at(rank, position, action)}: stage {stage} is on rank {schedule.stage_ranks[stage]}"
                )
            if not operation.is_computation:
                if micro_batch is not None:
                    raise ScheduleError(f"{_at(rank, position, action)}: {operation} is for all micro-batches")
            elif micro_batch is None or not 0 <= micro_batch < schedule.micro_batches:
                raise ScheduleError(
                    f"{_at(rank, position, action)}: micro-batches are 0 to {schedule.micro_batches - 1}"
                )
            if overlaps_next:
                following = actions[position + 1 : position + 2]
                if operation is not _F or not following or following[0].operation is not _B:
                    raise ScheduleError(f"{_at(rank, position, action)}: an overlapped pair is an F and then a B")


def _check_rank(schedule: PipelineSchedule, rank: int) -> None:
    """Raise ScheduleError unless a rank's actions follow each other by the rules, and none comes twice."""
    done: set[tuple[int, str, int | None]] = set()
    gathering = {action.stage for action in schedule.ranks[rank] if not action.operation.is_computation}
    gathered: set[int] = set()
    for position, action in enumerate(schedule.ranks[rank]):
        stage, operation, micro_batch, _ = action
        where = _at(rank, position, action)
        if operation is PipelineOperation.UNSHARD:
            if stage in gathered:
                raise ScheduleError(f"{where}: the weights of stage {stage} are gathered already")
            gathered.add(stage)
            continue
        if operation is PipelineOperation.RESHARD:
            if stage not in gathered:
                raise ScheduleError(f"{where}: the weights of stage {stage} are not gathered")
            gathered.remove(stage)
            continue
        if stage in gathering and stage not in gathered:
            raise ScheduleError(f"{where}: the weights of stage {stage} are not gathered here: it needs UNSHARD before")
        if (stage, operation, micro_batch) in done:
            raise ScheduleError(f"{where}: it comes a second time")
        other = {_B: _I, _I: _B}.get(operation)
        if other is not None and (stage, other, micro_batch) in done:
            before = f"{stage}{other}{micro_batch}"
            raise ScheduleError(f"{where}: the input's gradient is computed a second time, after {before}")
        if operation is _W and (stage, _B, micro_batch) in done:
            raise ScheduleError(f"{where}: {stage}B{micro_batch} has computed the weights' gradients already")
        needed = {_B: _F, _I: _F, _W: _I}.get(operation)
        if needed is not None and (stage, needed, micro_batch) not in done:
            raise ScheduleError(f"{where}: it comes before {stage}{needed}{micro_batch}, which it needs")
        done.add((stage, operation, micro_batch))
    if gathered:
        raise ScheduleError(f"rank {rank}: the weights of stage {min(gathered)} are not freed: it needs RESHARD")


def _check_complete(schedule: PipelineSchedule) -> None:
    """Raise ScheduleError unless every stage computes everything for every micro-batch."""
    done = {(stage, operation, n) for actions in schedule.ranks for stage, operation, n, _ in actions}
    for stage, rank in enumerate(schedule.stage_ranks):
        for n in range(schedule.micro_batches):
            if (stage, _F, n) not in done:
                waits = f", and {stage + 1}F{n} waits for its output" if (stage + 1, _F, n) in done else ""
                raise ScheduleError(f"rank {rank}: {stage}F{n} is missing{waits}")
            if (stage, _B, n) in done:
                continue
            if (stage, _I, n) not in done:
                waits = f", and stage {stage - 1} waits for its gradient of micro-batch {n}" if stage else ""
                raise ScheduleError(f"rank {rank}: {stage}B{n}, or {stage}I{n} and {stage}W{n}, is missing{waits}")
            if (stage, _W, n) not in done:
                raise ScheduleError(f"rank {rank}: {stage}W{n} is missing after {stage}I{n}")


def _check_message_order(schedule: PipelineSchedule) -> None:
    """Raise ScheduleError if a rank uses the messages of a channel in another order than they are sent in.

    Which rank sends and uses what, and in which order, is the same in every run.
    """
    sent: dict[tuple[int, int, str], list[tuple[int, int | None]]] = defaultdict(list)
    used: dict[tuple[int, int, str], list[tuple[int, int, Action]]] = defaultdict(list)
    owners = schedule.stage_ranks
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            source, target = _neighbours(action, schedule.stages)
            kind = "activations" if action.operation is _F else "gradients"
            if target is not None and owners[target] != rank:
                sent[rank, owners[target], kind].append((target, action.micro_batch))
            if source is not None and owners[source] != rank:
                used[owners[source], rank, kind].append((rank, position, action))
    for channel, uses in used.items():
        source, rank, what = channel
        for message, (_, position, action) in zip(sent[channel], uses, strict=True):
            if message != (action.stage, action.micro_batch):
                raise ScheduleError(
                    f"{_at(rank, position, action)}: the next {what} from rank {source} are for stage {message[0]}, "
                    f'micro-batch {message[1]}, since messages come in the order sent; delivery="matched" would do'
                )


def _check_deadlock(schedule: PipelineSchedule, buffers: int | None) -> None:
    """Raise ScheduleError if ranks can wait for each other for ever, whichever way overlapped pairs are computed."""
    _Execution(schedule, buffers, at_once=False).run()
    if any(action.overlaps_next for actions in schedule.ranks for action in actions):
        _Execution(schedule, buffers, at_once=True).run()


class _Execution:
    """Runs all ranks until none can continue, without times.

    buffers: messages that a channel holds; None is any number. at_once: an overlapped pair starts once both its
    messages are there, and sends once both its actions have ended; otherwise its actions follow each other.
    """

    def __init__(self, schedule: PipelineSchedule, buffers: int | None, at_once: bool) -> None:
        self.schedule = schedule
        self.buffers = buffers
        self.at_once = at_once
        self.position = [0] * schedule.pipe
        # Messages that a rank has computed and no channel has yet: the stage they are for, "F" or "B", micro-batch.
        self.unsent: list[list[tuple[int, str, int]]] = [[] for _ in schedule.ranks]
        self.arrived: set[tuple[int, str, int]] = set()
        self.held: dict[tuple[int, int, str], int] = defaultdict(int)

    def run(self) -> None:
        """Raise ScheduleError if some rank cannot reach its end."""
        ready = list(range(self.schedule.pipe))
        while ready:
            self._advance(ready.pop(), ready)
        for rank, actions in enumerate(self.schedule.ranks):
            if self.position[rank] < len(actions) or self.unsent[rank]:
                raise ScheduleError(self._explain(rank))

    def _advance(self, rank: int, ready: list[int]) -> None:
        """Run a rank until it must wait, and add the ranks that it unblocks to `ready`."""
        owners, actions = self.schedule.stage_ranks, self.schedule.ranks[rank]
        unsent = self.unsent[rank]
        while True:
            while unsent:
                target = owners[unsent[0][0]]
                if target != rank:
                    channel = rank, target, unsent[0][1]
                    if self.held[channel] == self.buffers:
                        return
                    self.held[channel] += 1
                    ready.append(target)
                self.arrived.add(unsent.pop(0))
            position = self.position[rank]
            if position == len(actions):
                return
            size = 2 if self.at_once and actions[position].overlaps_next else 1
            unit = actions[position : position + size]
            if any(self._lacks_message(action) for action in unit):
                return
            self.position[rank] += len(unit)
            for action in unit:
                source, receiver = _neighbours(action, len(owners))
                kind = "F" if action.operation is _F else "B"
                if source is not None and owners[source] != rank:
                    self.held[owners[source], rank, kind] -= 1
                    ready.append(owners[source])
                if receiver is not None and action.micro_batch is not None:
                    unsent.append((receiver, kind, action.micro_batch))

    def _lacks_message(self, action: Action) -> bool:
        """Check whether an action uses a message that has not come."""
        source, _ = _neighbours(action, self.schedule.stages)
        kind = "F" if action.operation is _F else "B"
        return source is not None and (action.stage, kind, action.micro_batch) not in self.arrived

    def _explain(self, rank: int) -> str:
        """Say which ranks wait for each other, from a rank that is stuck until one comes again."""
        seen: list[int] = []
        reasons: dict[int, str] = {}
        while rank not in seen:
            seen.append(rank)
            rank, reasons[rank] = self._waits_for(rank)
        circle = seen[seen.index(rank) :]
        shown = [reasons[each] for each in circle]
        more = f"; and {len(shown) - 4} more ranks wait so" if len(shown) > 4 else ""
        return f"deadlock: {'; '.join(shown[:4])}{more}"

    def _waits_for(self, rank: int) -> tuple[int, str]:
        """Return the rank that a stuck rank waits for, and the reason in words."""
        owners, actions = self.schedule.stage_ranks, self.schedule.ranks[rank]
        position = self.position[rank]
        if self.unsent[rank]:
            stage, kind, _ = self.unsent[rank][0]
            what = "activations" if kind == "F" else "gradients"
            count = f"{self.buffers} buffer{'s' * (self.buffers != 1)}"
            place = _at(rank, position - 1, actions[position - 1])
            return owners[stage], f"{place} waits for one of {count} for {what} to rank {owners[stage]}"
        action = actions[position]
        if not self._lacks_message(action):  # the second of an overlapped pair does
            position, action = position + 1, actions[position + 1]
        source, _ = _neighbours(action, self.schedule.stages)
        assert source is not None
        what = f"{source}F{action.micro_batch}" if action.operation is _F else f"the gradient of stage {source}"
        return owners[source], f"{_at(rank, position, action)} waits for {what} on rank {owners[source]}"


def _neighbours(action: Action, stages: int) -> tuple[int | None, int | None]:
    """The stages from which an action's message comes and to which its result goes, where there are such."""
    if action.operation is _F:
        source, target = action.stage - 1, action.stage + 1
    elif action.operation is _B or action.operation is _I:
        source, target = action.stage + 1, action.stage - 1
    else:
        return None, None
    return source if 0 <= source < stages else None, target if 0 <= target < stages else None


def _check_memory(schedule: PipelineSchedule, max_live: int | Sequence[int]) -> None:
    limits = [max_live] * schedule.pipe if isinstance(max_live, int) else list(max_live)
    if len(limits) != schedule.pipe:
        raise ValueError(f"max_live has {len(limits)} limits, but the schedule has {schedule.pipe} ranks")
    for rank, (limit, needed) in enumerate(zip(limits, live_micro_batches(schedule).ranks, strict=True)):
        if needed > limit:
            live = 0
            for position, action in enumerate(schedule.ranks[rank]):
                live += {_F: 1, _B: -1, _W: -1}.get(action.operation, 0)
                if live > limit:
                    raise ScheduleError(
                        f"{_at(rank, position, action)}: {live} micro-batches would be live, but max_live is {limit}; "
                        f"the schedule needs {needed} on this rank"
                    )
