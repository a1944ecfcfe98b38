# SPDX-License-Identifier: Apache-2.0
"""Message-driven order: a stage computes whichever message has come (Singh, section 3.1.3, algorithm 2).

`MessageDrivenPolicy` chooses the next action of a stage. The executor of pipelines and the timing model here ask the
same policy, so that what is predicted is the program that runs.
"""

import heapq
from collections import deque
from typing import Literal, get_args

from stretto.quantities import require_whole
from stretto.schedules.generators import MAX_ACTIONS
from stretto.schedules.schedule import Action, PipelineOperation, PipelineSchedule, ScheduleError
from stretto.schedules.timing import ActionTimes, MessageTimes, PipelineTimeline, StageCosts, StageLinks, make_timeline

ServeFirst = Literal["arrival", "backward", "forward"]

_F, _B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD


class MessageDrivenPolicy:
    """Chooses the next action of a stage by the messages that have arrived. Each rank has one stage.

    stage, stages: index of the stage, and number of stages.
    micro_batches: of the step; any number, fewer than `limit` too.
    limit: most micro-batches in flight. The paper uses the number of stages; a larger limit hides the latency of
        messages, at the cost of as many more live micro-batches.
    serve_first: what to compute if both an activation and a gradient are waiting. "arrival": the message that arrived
        first, as in the paper; "backward": the gradient; "forward": the activation. On the first stage a new
        micro-batch counts as an activation: with "arrival" it has priority over any gradient, as in line 24 of
        algorithm 2.

    The last stage computes a micro-batch's backward pass right after its forward pass. Gradients and activations of
    one kind are served in the order of arrival.

        policy = MessageDrivenPolicy(stage=1, stages=4, micro_batches=8, limit=4)
        policy.arrive(PipelineOperation.FORWARD, 0)  # stage 0 has sent micro-batch 0
        policy.next()                         # 1F0; then None until another message has come

    Raises ScheduleError for numbers below 1, a stage that does not exist, or an unknown order.
    """

    def __init__(
        self, stage: int, stages: int, micro_batches: int, limit: int, serve_first: ServeFirst = "arrival"
    ) -> None:
        for name, value in (("stages", stages), ("micro_batches", micro_batches), ("limit", limit)):
            if value < 1:
                raise ScheduleError(f"{name} is {value}, but must be at least 1")
        if not 0 <= stage < stages:
            raise ScheduleError(f"stage is {stage}, but stages are 0 to {stages - 1}")
        if serve_first not in get_args(ServeFirst):
            raise ScheduleError(f"serve_first is {serve_first!r}, but must be one of {', '.join(get_args(ServeFirst))}")
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == stages - 1
        self.micro_batches = micro_batches
        self.limit = limit
        self.serve_first = serve_first
        self._waiting: deque[Action] = deque()  # in the order of arrival
        self._arrived: set[tuple[PipelineOperation, int]] = set()
        self._own_backward: Action | None = None  # of the last stage, after its forward pass
        self._forwards = 0
        self._backwards = 0

    @property
    def is_done(self) -> bool:
        """True if the stage has been given all its actions."""
        return self._backwards == self.micro_batches

    @property
    def live(self) -> int:
        """The micro-batches whose forward pass was given out, and their backward pass not yet."""
        return self._forwards - self._backwards

    def arrive(self, operation: PipelineOperation, micro_batch: int) -> None:
        """Note a message: FORWARD, the activations of a micro-batch from the stage before; BACKWARD, its gradient.

        Raises ScheduleError for a message that this stage does not get, or gets a second time.
        """
        has_sender = not self.is_first if operation is _F else operation is _B and not self.is_last
        if not has_sender or not 0 <= micro_batch < self.micro_batches:
            raise ScheduleError(f"stage {self.stage} gets no message {operation}{micro_batch}")
        if (operation, micro_batch) in self._arrived:
            raise ScheduleError(f"stage {self.stage} gets message {operation}{micro_batch} a second time")
        self._arrived.add((operation, micro_batch))
        self._waiting.append(Action(self.stage, operation, micro_batch))

    def next(self) -> Action | None:
        """Return the action to compute now, or None while nothing is ready."""
        action = self._choose()
        if action is None:
            return None
        assert action.micro_batch is not None
        if action.operation is _B:
            self._backwards += 1
        else:
            self._forwards += 1
            if self.is_last:
                self._own_backward = Action(self.stage, _B, action.micro_batch)
        return action

    def _choose(self) -> Action | None:
        if self._own_backward is not None:
            action, self._own_backward = self._own_backward, None
            return action
        if self.is_first:
            may_inject = self._forwards < self.micro_batches and self.live < self.limit
            if may_inject and not (self._waiting and self.serve_first == "backward"):
                return Action(self.stage, _F, self._forwards)
        if not self._waiting:
            return None
        if self.serve_first != "arrival":
            wanted = _B if self.serve_first == "backward" else _F
            for place, action in enumerate(self._waiting):
                if action.operation is wanted:
                    del self._waiting[place]
                    return action
        return self._waiting.popleft()


def simulate_message_driven(
    micro_batches: int,
    costs: StageCosts,
    links: StageLinks | None = None,
    *,
    limit: int | None = None,
    serve_first: ServeFirst = "arrival",
    ties: Literal["backward", "forward"] = "backward",
    jitter: float = 0.0,
    seed: int = 0,
) -> PipelineTimeline:
    """Compute when each action starts and ends, if every stage is on a separate rank and follows its messages.

    limit, serve_first: of MessageDrivenPolicy (default of limit: the number of stages).
    ties: which of an activation and a gradient that arrive at the same moment counts as the earlier.
    links, jitter, seed: as of `simulate`. The timeline's schedule has the resulting order, which `verify` accepts.

    Raises ValueError for numbers that make no sense.
    """
    stages = costs.stages
    if stages < 1:
        raise ValueError("the costs are of no stage")
    require_whole("micro_batches", micro_batches, 1, MAX_ACTIONS // (3 * stages))
    limit = stages if limit is None else limit
    policies = [MessageDrivenPolicy(stage, stages, micro_batches, limit, serve_first) for stage in range(stages)]
    channels = MessageTimes(range(stages), links or StageLinks())
    durations = ActionTimes(costs, micro_batches, jitter, seed)
    actions: list[list[Action]] = [[] for _ in range(stages)]
    starts: list[list[float]] = [[] for _ in range(stages)]
    ends: list[list[float]] = [[] for _ in range(stages)]
    # A time, an order within it, a stage, and the message that arrives there; None: the stage's action ends.
    events: list[tuple[float, int, int, int]] = []
    computing = [False] * stages
    turned = 1 if ties == "backward" else -1
    now, touched = 0.0, set(range(stages))
    while True:
        for stage in touched:
            if computing[stage] or (action := policies[stage].next()) is None:
                continue
            micro_batch = action.micro_batch or 0
            end = now + durations.of(action.operation)[stage * micro_batches + micro_batch]
            actions[stage].append(action)
            starts[stage].append(now)
            ends[stage].append(end)
            computing[stage] = True
            heapq.heappush(events, (end, _END, stage, 0))
            target, order = (stage + 1, turned) if action.operation is _F else (stage - 1, -turned)
            if 0 <= target < stages:
                heapq.heappush(events, (channels.arrival(end, stage, target), order, target, micro_batch))
        if not events:
            break
        now, touched = events[0][0], set()
        while events and events[0][0] == now:
            _, order, stage, micro_batch = heapq.heappop(events)
            touched.add(stage)
            if order == _END:
                computing[stage] = False
            else:
                policies[stage].arrive(_F if order == turned else _B, micro_batch)
    schedule = PipelineSchedule("message-driven", tuple(range(stages)), micro_batches, tuple(map(tuple, actions)))
    return make_timeline(schedule, starts, ends)


_END = -2  # the end of an action, before all messages of its moment
