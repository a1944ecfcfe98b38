# SPDX-License-Identifier: Apache-2.0
"""The actions of a pipeline's step on one rank: forward and backward passes of its stages, each after its message."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.profiler import record_function

from stretto.memory import PeerError
from stretto.parallel.comm.counting import count_message
from stretto.parallel.comm.gradient_reducer import GradientReducer, no_sync
from stretto.parallel.comm.weight_gathering import StepGatherer
from stretto.parallel.layers.dropout import micro_batch_of
from stretto.parallel.pipeline.activations import Activations
from stretto.parallel.pipeline.messages import MessageKey, MessageTransport
from stretto.parallel.pipeline.stages import ModelStages, StagePass
from stretto.schedules import Action, MessageDrivenPolicy, PipelineOperation, PipelineSchedule, ServeFirst

WAIT_MARK = "stretto waited "
"""The name, in a trace, of what marks the end of a wait: the seconds before the message was sent, and those after."""
MIN_MARKED = 5e-5
"""Waits of fewer seconds are not marked."""

_F, _B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD
_I, _W = PipelineOperation.BACKWARD_INPUT, PipelineOperation.BACKWARD_WEIGHT


class ComputedAction(NamedTuple):
    """An action of the last step, and when it began and ended, in seconds of `time.perf_counter`.

    waited: seconds of it in which the rank waited for the action's message. message: those of them in which the message
    was on its way; before, it had not been sent (by the clocks of both ranks' machines).
    """

    action: Action
    start: float
    end: float
    waited: float
    message: float


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward pass in one stage.

    ends: what the backward pass begins with, the loss on the last stage, the autograd edges of sent activations on
    others (None: it needs no gradient).
    """

    stage_pass: StagePass
    ends: list[Tensor | GradientEdge | None]


@dataclass
class PipelineStep:
    """Input of a step: the arguments of each micro-batch, and the parts of its loss.

    targets: of each micro-batch. has_divisor: the caller has given the divisor of losses. weights: the factor of
    each micro-batch's loss in that of the batch.
    """

    calls: Sequence[dict[str, Any]]
    rows: int
    size: int
    targets: Sequence[Tensor] | None
    has_divisor: bool
    weights: Sequence[Any]
    losses: list[Tensor] = field(default_factory=list)
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list[Callable[[], None]]] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        return len(self.calls)


@dataclass(frozen=True)
class StageRank:
    """Everything that a rank's actions work on. gatherer: keeps weights for a step; None where they are not kept."""

    model: nn.Module
    stages: ModelStages
    transport: MessageTransport
    reducer: GradientReducer
    gatherer: StepGatherer | None


class ActionRunner:
    """Takes this rank's actions of one step. `computed` has those that were taken, and when."""

    def __init__(
        self, rank: StageRank, step: PipelineStep, seed: int | None, scale_loss: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.step = step
        self.seed = seed
        self.scale_loss = scale_loss
        self.model = rank.model
        self.stages = rank.stages
        self.transport = rank.transport
        self.reducer = rank.reducer
        self.gatherer = rank.gatherer
        self.computed: list[ComputedAction] = []
        self.waited = self.message = 0.0

    def run_schedule(self, schedule: PipelineSchedule) -> None:
        actions = schedule.ranks[self.stages.rank]
        last = max((place for place, action in enumerate(actions) if action.operation in (_B, _W)), default=-1)
        for place, action in enumerate(actions):
            self.take(action, is_last=place == last)

    def run_by_messages(self, limit: int, serve_first: ServeFirst, group: dist.ProcessGroup | None) -> None:
        """Take an action whenever its message has come (algorithm 2).

        limit, serve_first: of the policy. group: the ranks that communicate within a micro-batch; the first decides.
        """
        stage, count = self.stages.mine[0], self.step.micro_batches
        policy = MessageDrivenPolicy(stage, self.stages.count, count, limit, serve_first)
        backwards = 0
        while backwards < count:
            if group is None or group.rank() == 0:
                action = self._choose(policy)
                if group is not None:
                    _announce(group, action)
            else:
                with self._waiting():
                    action = _receive_action(group, stage)
            backwards += action.operation is _B
            self.take(action, is_last=backwards == count)

    def _choose(self, policy: MessageDrivenPolicy) -> Action:
        """The next action; waits for a message where none is ready."""
        for key in self.transport.poll():
            policy.arrive(PipelineOperation(key.operation), key.micro_batch)
        while (action := policy.next()) is None:
            with self._waiting():
                key = self.transport.wait_any()
            policy.arrive(PipelineOperation(key.operation), key.micro_batch)
        return action

    def take(self, action: Action, *, is_last: bool) -> None:
        """Compute one action. is_last: it is this rank's last backward pass of the step."""
        start = time.perf_counter() - self.waited  # which a message-driven rank has done already
        syncs = is_last and not self.stages.is_tied
        stage, number = action.stage, action.micro_batch
        with self._of_stage(stage, number):
            match action.operation:
                case PipelineOperation.FORWARD:
                    self._forward(stage, _number(action))
                case PipelineOperation.BACKWARD | PipelineOperation.BACKWARD_INPUT:
                    splits = action.operation is _I
                    with nullcontext() if syncs and not splits else no_sync(self.model):
                        self._backward(stage, _number(action), splits=splits)
                case PipelineOperation.BACKWARD_WEIGHT:
                    work = self.step.deferred.pop((stage, _number(action)))
                    with nullcontext() if syncs else no_sync(self.model):
                        self.reducer.run_pass(work)
                case PipelineOperation.RESHARD:
                    if self.gatherer is not None:
                        self.gatherer.release(stage)
                case PipelineOperation.UNSHARD:
                    if self.gatherer is not None:
                        self.gatherer.gather_all(stage)
        self.computed.append(ComputedAction(action, start, time.perf_counter(), self.waited, self.message))
        self.waited = self.message = 0.0

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def _of_stage(self, stage: int, micro_batch: int | None) -> AbstractContextManager[None]:
        """Note whose weights are gathered, and which rows of the batch dropout sees."""
        if self.gatherer is not None:
            self.gatherer.stage = stage
        first = 0 if micro_batch is None else micro_batch * self.step.size
        return nullcontext() if micro_batch is None else micro_batch_of(self.model, self.step.rows, first)

    def _take_message(self, operation: Literal["F", "B"], stage: int, number: int, source: int) -> list[Tensor | None]:
        with self._waiting():
            sent, *message = self.transport.take(MessageKey(operation, stage, number), self.stages.stage_ranks[source])
        assert sent is not None
        self.message = min(self.waited, max(0.0, time.time() - float(sent)))
        if self.waited > MIN_MARKED:
            with record_function(f"{WAIT_MARK}{self.waited - self.message:.6f} {self.message:.6f}"):
                pass
        return message

    def _send(self, operation: Literal["F", "B"], stage: int, number: int, tensors: Sequence[Tensor | None]) -> None:
        """Send a message with the time at which it leaves."""
        sent = torch.tensor(time.time(), dtype=torch.float64, device="cpu")
        if self.stages.stage_ranks[stage] != self.stages.rank:
            count_message(tensors)
        self.transport.send(self.stages.stage_ranks[stage], MessageKey(operation, stage, number), [sent, *tensors])

    def _forward(self, stage: int, number: int) -> None:
        step, stages, received = self.step, self.stages, None
        if stage > 0:
            message = self._take_message("F", stage, number, stage - 1)
            try:
                received = Activations.from_message(message)
            except ValueError as error:
                sender = stages.stage_ranks[stage - 1]
                raise PeerError(f"pipe rank {sender} has sent activations that are damaged: {error}") from error
            if received.micro_batches != step.micro_batches:
                raise ValueError(
                    f"stage {stage - 1} has {received.micro_batches} micro-batches in this step, and stage {stage} has "
                    f"{step.micro_batches}: all ranks of pipe are given the same rows"
                )
        elif self.seed is not None:
            torch.manual_seed(self.seed)
        with torch.enable_grad() if stages.must_learn(stage) else nullcontext():
            stage_pass = stages.begin(stage, received)
            output = stages.run(self.model, stage_pass, (), dict(step.calls[number]))
        if isinstance(output, Activations):
            ends: list[Tensor | GradientEdge | None] = [
                get_gradient_edge(tensor) if tensor.requires_grad and torch.is_grad_enabled() else None
                for tensor in output.tensors
            ]
            output.micro_batches = step.micro_batches
            self._send("F", stage + 1, number, output.as_message())
        else:
            loss, weight = _loss_of(output, self.model), step.weights[number]
            loss = loss * weight
            if isinstance(weight, Tensor):  # the mean over no targets is NaN
                loss = torch.where(weight == 0, torch.zeros_like(loss), loss)
            step.losses.append(loss.detach())
            ends = [loss if self.scale_loss is None else self.scale_loss(loss)]
        if torch.is_grad_enabled():
            step.in_flight[stage, number] = _InFlight(stage_pass, ends)

    def _backward(self, stage: int, number: int, *, splits: bool) -> None:
        stages, flight = self.stages, self.step.in_flight.pop((stage, number))
        gradients: list[Tensor | None] = [None]
        if stage < stages.count - 1:
            gradients = self._take_message("B", stage, number, stage + 1)
        roots, given = [], []
        for end, gradient in zip(flight.ends, gradients, strict=True):
            if end is not None and (gradient is not None or stage == stages.count - 1):
                roots.append(end)
                given.append(gradient)
        work: list[Callable[[], None]] = []
        self.reducer.deferred = work if splits else None
        try:
            with stages.running(flight.stage_pass):
                if roots:
                    torch.autograd.backward(roots, given)  # type: ignore[arg-type]
        finally:
            self.reducer.deferred = None
        if splits:
            self.step.deferred[stage, number] = work
        if stage > 0:
            self._send("B", stage - 1, number, flight.stage_pass.gradients)


def _number(action: Action) -> int:
    assert action.micro_batch is not None
    return action.micro_batch


def _announce(group: dist.ProcessGroup, action: Action) -> None:
    """Tell the ranks that share this rank's micro-batches what to compute."""
    words = torch.tensor([action.operation is _B, _number(action)], dtype=torch.int64, device="cpu")
    dist.broadcast(words, group=group, group_src=0)


def _receive_action(group: dist.ProcessGroup, stage: int) -> Action:
    words = torch.empty(2, dtype=torch.int64, device="cpu")
    dist.broadcast(words, group=group, group_src=0)
    is_backward, number = words.tolist()
    return Action(stage, _B if is_backward else _F, number)


def _loss_of(output: Any, model: nn.Module) -> Tensor:
    """The loss that a model's forward has returned: a 0-dim tensor, `output.loss`, or the first of a tuple."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        loss = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(loss, Tensor) or loss.dim():
        raise ValueError(
            f"the forward of {type(model).__name__} has returned no loss, a 0-dim tensor: give it labels or targets"
        )
    return loss
