# SPDX-License-Identifier: Apache-2.0
"""`Pipeline`: runs the steps of a model that is cut into pipeline stages, by a schedule or by the messages that come.

A step is a list of actions for each rank (`stretto.schedules`): a forward pass F of a stage for a micro-batch, its
backward pass B, or the two parts of that, I for the input's gradient and W for the weights'. The list is that of a
schedule, or comes about as messages arrive (Singh, section 3.1.3). Each rank takes its actions one after another, and
waits in each for the message that the action needs.

Collectives within a stage (over x, y and z) run in the order of the actions, so the ranks that share a micro-batch must
take the same ones. In message-driven order the first of them decides, and tells the others.
"""

import inspect
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from torch.utils._pytree import tree_map

from stretto.axes import LOSS, WEIGHT_AXES
from stretto.parallel.comm.collectives import all_reduce
from stretto.parallel.comm.counting import count_message
from stretto.parallel.comm.gradient_buckets import accumulate
from stretto.parallel.comm.gradient_reducer import GradientReducer, no_sync
from stretto.parallel.comm.weight_gathering import StepGatherer
from stretto.parallel.grid import Grid
from stretto.parallel.layers.dropout import micro_batch_of
from stretto.parallel.layers.linear import ParallelLinear
from stretto.parallel.layers.loss import IGNORED_TARGET
from stretto.parallel.pipeline.activations import Activations, tensors_of
from stretto.parallel.pipeline.carriers import make_carrier
from stretto.parallel.pipeline.failure_reports import StepFailures
from stretto.parallel.pipeline.messages import Carrier, MessageKey
from stretto.parallel.pipeline.stages import ModelStages, StagePass, make_group
from stretto.parallel.roles.huggingface import calls_loss_function, compares_with_next, is_pretrained_model
from stretto.schedules import (
    SCHEDULES,
    Action,
    MessageDrivenPolicy,
    PipelineOperation,
    PipelineSchedule,
    ServeFirst,
    build_schedule,
    verify,
)
from stretto.suggestions import name_known

MESSAGE_DRIVEN = "message-driven"

WAIT_MARK = "stretto waited "
"""In a trace, the name of what marks the end of a wait: the seconds before the message was sent, and those after."""
LEAST_MARKED = 5e-5
"""Waits of fewer seconds are not marked."""

# The numbers of pipelines, the same on all ranks, by process group: one process may be in several jobs in turn.
_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]]" = weakref.WeakKeyDictionary()

_TARGETS = ("labels", "targets")
_DIVISORS = ("num_items_in_batch", "num_targets")
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

    ends: what the backward pass begins with, the loss on the last stage, the edges of what was sent on others (None:
    it needs no gradient).
    """

    stage_pass: StagePass
    ends: list[Tensor | GradientEdge | None]


class _Step:
    """What a step is made of: the arguments of each micro-batch, and the parts of its loss.

    targets: of each micro-batch. has_divisor: the caller has said what losses are divided by. weights: the factor of
    each micro-batch's loss in that of the batch.
    """

    def __init__(
        self,
        calls: Sequence[dict[str, Any]],
        rows: int,
        size: int,
        *,
        targets: Sequence[Tensor] | None,
        has_divisor: bool,
    ) -> None:
        self.targets = targets
        self.has_divisor = has_divisor
        self.calls = calls
        self.rows = rows
        self.size = size
        self.weights: Sequence[Any] = [1 / len(calls)] * len(calls)
        self.losses: list[Tensor] = []
        self.in_flight: dict[tuple[int, int], _InFlight] = {}
        self.deferred: dict[tuple[int, int], list[Callable[[], None]]] = {}

    @property
    def micro_batches(self) -> int:
        return len(self.calls)


class Pipeline:
    """Runs forward and backward passes of a model that `parallelize` has cut into stages (Singh, chapter 3).

    Every rank of the grid makes it, and calls `step` with its rows of the batch: those of its data and z coordinate,
    the same on all ranks of pipe.

        model = parallelize(model, grid)                       # grid = Grid(pipe=4, data=2)
        pipeline = Pipeline(model, grid, schedule="1f1b", micro_batch_size=2)
        loss = pipeline.step(input_ids=ids, labels=labels)     # gradients are final
        optimizer.step()

    model: of any number of stages, one too.
    schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v" or "message-driven", or a PipelineSchedule,
        whose number of micro-batches each step must have then.
    micro_batch_size: rows of a micro-batch, which must divide the rows of each step.
    limit: of "message-driven", micro-batches in flight (default: the number of stages).
    serve_first: of "message-driven", what is computed where an activation and a gradient both wait.
    extra_warm_up: of "1f1b", further forward passes before the first backward pass.
    carrier: of messages between ranks: a name of `stretto.parallel.pipeline.carriers.CARRIERS`, or one that was made
        (default: the one that was measured to be the fastest between these ranks).

    A failure on any rank is raised on all, with the rank that caused it, within the grid's time limit.

    Raises ValueError for a schedule that does not suit the model's stages, and for options of another schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        *,
        schedule: str | PipelineSchedule = "1f1b",
        micro_batch_size: int,
        limit: int | None = None,
        serve_first: ServeFirst | None = None,
        extra_warm_up: int = 0,
        carrier: str | Carrier | None = None,
    ) -> None:
        reducer = getattr(model, "gradient_reducer", None)
        if not isinstance(reducer, GradientReducer):
            raise ValueError("Pipeline takes a model that stretto.parallelize has returned")
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}, but must be at least 1")
        self.model = model
        self.grid = grid
        self.micro_batch_size = micro_batch_size
        self.stages: ModelStages = getattr(model, "pipeline_stages", None) or ModelStages.whole(type(model).__name__)
        self.computed: list[ComputedAction] = []
        self._failure: str | None = None
        self._reducer = reducer
        self._averages = reducer.averages and not is_pretrained_model(model)
        self._gatherer = _find_gatherer(model)
        self._signature = inspect.signature(model.forward)
        self._schedule = schedule
        self._extra_warm_up = extra_warm_up
        self._limit = self.stages.count if limit is None else limit
        self._serve_first: ServeFirst = serve_first or "backward"
        self._schedules: dict[int, PipelineSchedule] = {}
        self._check_options(limit, serve_first)
        self._leaders: dist.ProcessGroup | None = None
        if self.is_message_driven and grid.sizes["x"] * grid.sizes["y"] * grid.sizes["z"] > 1:
            self._leaders = make_group(_ranks_over(grid, WEIGHT_AXES), grid, backend="gloo")
        number = next(_numbers.setdefault(grid.group("world"), itertools.count()))
        self._failures = StepFailures(f"stretto pipeline {number}")
        self._carrier = (
            carrier if isinstance(carrier, Carrier) else make_carrier(grid.group("pipe"), grid.device, carrier)
        )

    @property
    def is_message_driven(self) -> bool:
        """Whether messages decide what is computed next."""
        return self._schedule == MESSAGE_DRIVEN

    def step(
        self, *args: Any, seed: int | None = None, scale_loss: Callable[[Tensor], Tensor] | None = None, **kwargs: Any
    ) -> Tensor:
        """Run the forward and backward passes of a step, in micro-batches. Collective.

        args, kwargs: of the model's forward, for this rank's rows of the global batch. Tensors whose dim 0 has as many
            rows as the first one are cut into micro-batches; others, and other values, go to each.
        seed: seeds torch before each micro-batch, for dropout; the same on all ranks.
        scale_loss: multiplies the loss of a micro-batch before its backward pass, as a loss scaler does.

        Returns the loss of the global batch, 0-dim fp64, on every rank: the mean over its valid targets, if the model
        has an argument `labels` or `targets`, or else over the micro-batches. Gradients are final, and added to those
        that were there.

        Raises ValueError for rows that micro-batches do not divide, and PeerError if a rank fails or is stuck.
        """
        return self._run(args, kwargs, seed, scale_loss)

    def evaluate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward passes of a batch alone, as `step` does, and return its loss. Collective."""
        with torch.no_grad():
            return self._run(args, kwargs, None, None)

    def breakdown(self) -> dict[str, float]:
        """This rank's time in the last step by the host's clock, in seconds (Singh, figure 4.8).

        compute: in actions, collectives within them included. messages: waiting for messages that were on their way.
        bubble: waiting for messages that had not been sent.
        """
        waited = sum(action.waited for action in self.computed)
        messages = sum(action.message for action in self.computed)
        busy = sum(action.end - action.start for action in self.computed)
        return {"compute": busy - waited, "messages": messages, "bubble": waited - messages}

    def close(self) -> None:
        """Give back the connections to other ranks. Collective after a step that succeeded."""
        self._carrier.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def schedule_of(self, micro_batches: int, *, with_backward: bool = True) -> PipelineSchedule:
        """The schedule of a step of so many micro-batches. ValueError in message-driven order, which has none."""
        if self.is_message_driven and with_backward:
            raise ValueError("in message-driven order messages decide what is computed, and no schedule does")
        key = micro_batches if with_backward else -micro_batches
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(micro_batches, with_backward)
        return self._schedules[key]

    def _build_schedule(self, micro_batches: int, with_backward: bool) -> PipelineSchedule:
        pipe = self.grid.size("pipe")
        if not with_backward:
            ranks = [
                tuple(
                    Action(stage, _F, number)
                    for stage, owner in enumerate(self.stages.stage_ranks)
                    if owner == rank
                    for number in range(micro_batches)
                )
                for rank in range(pipe)
            ]
            return PipelineSchedule("forward", self.stages.stage_ranks, micro_batches, tuple(ranks))
        if isinstance(self._schedule, PipelineSchedule):
            if self._schedule.micro_batches != micro_batches:
                rows = self._schedule.micro_batches * self.micro_batch_size
                raise ValueError(
                    f"the schedule {self._schedule.name} is of {self._schedule.micro_batches} micro-batches, and this "
                    f"step has {micro_batches}; {rows} rows would do"
                )
            return self._schedule
        return build_schedule(
            self._schedule,
            pipe,
            micro_batches,
            virtual_stages=self.stages.virtual_stages,
            extra_warm_up=self._extra_warm_up,
        )

    def _check_options(self, limit: int | None, serve_first: ServeFirst | None) -> None:
        schedule, stages = self._schedule, self.stages
        if isinstance(schedule, PipelineSchedule):
            verify(schedule)
            if schedule.stage_ranks != stages.stage_ranks:
                raise ValueError(
                    f"the schedule {schedule.name} has stages on ranks {list(schedule.stage_ranks)}, and the model on "
                    f"{list(stages.stage_ranks)}: parallelize(..., stages=StageOptions(virtual_stages=..., "
                    "placement=...)) says where they are"
                )
        elif schedule != MESSAGE_DRIVEN and schedule not in SCHEDULES:
            known = (*SCHEDULES, MESSAGE_DRIVEN)
            raise ValueError(f"schedule is {schedule!r}{name_known(schedule, known, 'but must be one of')}")
        if not self.is_message_driven and (limit is not None or serve_first is not None):
            raise ValueError("limit and serve_first are options of schedule='message-driven'")
        if self._extra_warm_up and schedule != "1f1b":
            raise ValueError("extra_warm_up is an option of schedule='1f1b'")
        if self.is_message_driven:
            if stages.count != self.grid.size("pipe"):
                raise ValueError(
                    f"message-driven order takes one stage a rank, and the model has {stages.count} stages on "
                    f"{self.grid.size('pipe')} ranks"
                )
            MessageDrivenPolicy(0, stages.count, 1, self._limit, self._serve_first)
        elif isinstance(schedule, str):
            sample = self._sample_schedule(schedule)
            if sample.stage_ranks != stages.stage_ranks:
                placement = "v" if sample.stage_ranks[-1] == 0 and len(sample.stage_ranks) > 1 else "loops"
                raise ValueError(
                    f"schedule {schedule!r} places stages on ranks {list(sample.stage_ranks)}, and the model has them "
                    f"on {list(stages.stage_ranks)}: parallelize(..., stages=StageOptions(virtual_stages="
                    f"{sample.virtual_stages}, placement={placement!r})) would do"
                )
        splits = isinstance(schedule, PipelineSchedule) and schedule.splits_backward
        if isinstance(schedule, str) and schedule != MESSAGE_DRIVEN:
            splits = self._sample_schedule(schedule).splits_backward
        if splits and not any(isinstance(module, ParallelLinear) for module in self.model.modules()):
            raise ValueError(
                "this schedule computes weights' gradients by themselves, which needs a model with roles: one that is "
                "sharded block by block takes 'gpipe', '1f1b', 'interleaved' or 'message-driven'"
            )

    def _sample_schedule(self, name: str) -> PipelineSchedule:
        """The schedule with as many micro-batches as every schedule takes."""
        pipe = self.grid.size("pipe")
        virtual = self.stages.virtual_stages if name == "interleaved" else None
        return build_schedule(name, pipe, 4 * pipe, virtual_stages=virtual)

    # A step.

    def _run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        seed: int | None,
        scale_loss: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a CUDA graph cannot hold a pipeline's step: the host takes its messages, and in message-driven order "
                "they decide what it computes; run it without CapturedStep"
            )
        if self._failure is not None:
            raise RuntimeError(f"an earlier step of this pipeline has failed here ({self._failure}): make another one")
        step = self._cut_batch(args, kwargs)
        trains = torch.is_grad_enabled()
        schedule = None
        if not (self.is_message_driven and trains):
            schedule = self.schedule_of(step.micro_batches, with_backward=trains)
        self.computed = []
        worker = _ActionRunner(self, step, seed, scale_loss)
        earlier = self._set_gradients_aside() if trains else []
        self._reducer.has_synced = False
        try:
            if isinstance(self._gatherer, StepGatherer):
                self._gatherer.begin_step()
            self._carrier.begin_step(self._expected(step.micro_batches, trains))
            if self.stages.count - 1 in self.stages.mine:
                self._weigh(step)
            if schedule is not None:
                worker.run_schedule(schedule)
            else:
                worker.run_by_messages()
            if trains and not self._reducer.has_synced:
                self._reducer.run_pass()
            loss = self._share_loss(step)
            self._carrier.end_step()
        except BaseException as error:
            self._reducer.deferred = None
            self._failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            self._carrier.fail(f"raised {self._failure}")
            self._carrier.close()
            if (named := self._failures.explain(error, self.grid.timeout.total_seconds())) is not None:
                raise named from error
            raise
        finally:
            if isinstance(self._gatherer, StepGatherer):
                self._gatherer.end_step()
        for parameter, gradient in earlier:
            made, parameter.grad = parameter.grad, gradient
            if made is not None:
                assert isinstance(made, DTensor)
                accumulate(parameter, made.to_local())
        return loss

    def _set_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take the gradients that are there: the first micro-batch's are not yet summed over ranks, and these are."""
        earlier = [(parameter, parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        return earlier

    def _share_loss(self, step: _Step) -> Tensor:
        """The step's loss, which the last stage sends to the other ranks of pipe once all have ended the step.

        So no rank goes on to a collective over all ranks that one will never come to.
        """
        last, count = self.stages.stage_ranks[-1], self.stages.count
        key = MessageKey("F", count, 0)
        others = [rank for rank in range(self.grid.size("pipe")) if rank != last]
        if self.stages.rank != last:
            self._carrier.send(last, MessageKey("B", count, self.stages.rank), [])
            (loss,) = self._carrier.take(key, last)
            assert loss is not None
            return loss
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for part in step.losses:
            total += part
        if self._averages:
            total = all_reduce(total, self.grid.group(LOSS)) / self.grid.size(LOSS)
        for rank in others:
            self._carrier.take(MessageKey("B", count, rank), rank)
        for rank in others:
            self._carrier.send(rank, key, [total])
        return total

    def _expected(self, micro_batches: int, trains: bool) -> dict[int, int]:
        """How many messages come from each rank of pipe."""
        ranks, expected = self.stages.stage_ranks, dict[int, int]()
        if self.stages.rank != ranks[-1]:
            expected[ranks[-1]] = 1  # the loss
        else:
            expected |= dict.fromkeys(set(ranks) - {ranks[-1]}, 1)  # that they have ended the step
        for stage in self.stages.mine:
            sources = [stage - 1] if stage > 0 else []
            if trains and stage < self.stages.count - 1:
                sources.append(stage + 1)
            for source in sources:
                if ranks[source] != self.stages.rank:
                    expected[ranks[source]] = expected.get(ranks[source], 0) + micro_batches
        return expected

    def _cut_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Step:
        given = self._bind(args, kwargs)
        rows = next((tensor.shape[0] for tensor in tensors_of(given) if tensor.dim()), None)
        if rows is None:
            raise ValueError("step takes the arguments of the model's forward, and none of them is a tensor with rows")
        size = self.micro_batch_size
        if rows == 0 or rows % size:
            near = max(size, round(rows / size) * size)
            raise ValueError(
                f"micro-batches of {size} rows do not divide the {rows} rows of this rank's batch; {near} would do"
            )

        def cut(first: int) -> Any:
            return tree_map(lambda leaf: leaf[first : first + size] if _has_rows(leaf, rows) else leaf, given)

        calls = [cut(first) for first in range(0, rows, size)]
        name = next((name for name in _TARGETS if _has_rows(given.get(name), rows)), None)
        targets = None if name is None else [call[name] for call in calls]
        has_divisor = any(given.get(name) is not None for name in _DIVISORS)
        return _Step(calls, rows, size, targets=targets, has_divisor=has_divisor)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name."""
        bound = self._signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL and given.pop(name, None):
                raise ValueError(f"give the arguments of the model's forward by name: it collects others in *{name}")
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return given

    def _weigh(self, step: _Step) -> None:
        """Find the factor of each micro-batch's loss in that of the batch.

        Where the model's loss can be told its divisor, that is the whole batch's number of valid targets, and factors
        are 1. Otherwise a micro-batch's loss is the mean over its own valid targets.
        """
        self._check_counts(step.micro_batches)
        if step.targets is None:
            return
        if step.has_divisor:
            step.weights = [1.0] * step.micro_batches
            return
        is_shifted = is_pretrained_model(self.model) and compares_with_next(self.model)
        found = [_count_valid(part, is_shifted=is_shifted) for part in step.targets]
        mine = torch.stack(found).to(self.grid.device)
        counts = all_reduce(mine.clone(), self.grid.group(LOSS))
        total = counts.sum()
        if self._averages:  # a rank's loss is of its own rows, and the mean over ranks is that of the batch
            counts, total = mine, total / self.grid.size(LOSS)
        if (name := self._divisor()) is not None:
            for call in step.calls:
                call[name] = total
            step.weights = [1.0] * step.micro_batches
        else:
            step.weights = list((counts.double() / total).unbind())

    def _check_counts(self, micro_batches: int) -> None:
        """Raise ValueError (on CUDA: fail the kernel that asserts it, later) unless ranks have as many micro-batches.

        With other rows on the ranks that share the loss they would wait for each other.
        """
        ranks = self.grid.size(LOSS)
        if ranks == 1:
            return
        sums = torch.tensor([micro_batches, micro_batches**2], dtype=torch.int64, device=self.grid.device)
        total, squares = all_reduce(sums, self.grid.group(LOSS)).unbind()
        differ = total * total != squares * ranks
        text = "all ranks of data and z have as many rows in a step"
        if sums.is_cuda:
            torch._assert_async(~differ, text)  # no .item() here: the host would wait for the device
        elif differ:
            raise ValueError(
                f"this rank has {micro_batches} micro-batches in this step, and others have {int(total) / ranks:g} in "
                f"the mean: {text}"
            )

    def _divisor(self) -> str | None:
        """The argument of the model's forward that divides a sum of losses; None if it has none."""
        parameters = self._signature.parameters
        if "num_targets" in parameters:
            return "num_targets"
        takes_others = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        knows = hasattr(getattr(self.model, "loss_function", None), "is_shifted") and calls_loss_function(self.model)
        return "num_items_in_batch" if "num_items_in_batch" in parameters or (takes_others and knows) else None


class _ActionRunner:
    """Takes this rank's actions of one step."""

    def __init__(
        self, pipeline: Pipeline, step: _Step, seed: int | None, scale_loss: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.pipeline = pipeline
        self.step = step
        self.seed = seed
        self.scale_loss = scale_loss
        self.stages = pipeline.stages
        self.carrier = pipeline._carrier
        self.reducer = pipeline._reducer
        self.waited = self.message = 0.0

    def run_schedule(self, schedule: PipelineSchedule) -> None:
        """Take the actions of a schedule in its order."""
        actions = schedule.ranks[self.stages.rank]
        last = max((place for place, action in enumerate(actions) if action.operation in (_B, _W)), default=-1)
        for place, action in enumerate(actions):
            self.take(action, is_last=place == last)

    def run_by_messages(self) -> None:
        """Take an action whenever its message has come (algorithm 2)."""
        stage, count = self.stages.mine[0], self.step.micro_batches
        policy = MessageDrivenPolicy(stage, self.stages.count, count, self.pipeline._limit, self.pipeline._serve_first)
        group = self.pipeline._leaders
        backwards = 0
        while backwards < count:
            if group is None or group.rank() == 0:
                action = self._choose(policy)
                if group is not None:
                    _announce(group, action)
            else:
                with self._waiting():
                    action = _hear(group, stage)
            backwards += action.operation is _B
            self.take(action, is_last=backwards == count)

    def _choose(self, policy: MessageDrivenPolicy) -> Action:
        """The next action; waits for a message where none is ready."""
        for key in self.carrier.poll():
            policy.arrive(PipelineOperation(key.operation), key.micro_batch)
        while (action := policy.next()) is None:
            with self._waiting():
                key = self.carrier.wait_any()
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
                    with nullcontext() if syncs and not splits else no_sync(self.pipeline.model):
                        self._backward(stage, _number(action), splits=splits)
                case PipelineOperation.BACKWARD_WEIGHT:
                    work = self.step.deferred.pop((stage, _number(action)))
                    with nullcontext() if syncs else no_sync(self.pipeline.model):
                        self.reducer.run_pass(work)
                case PipelineOperation.RESHARD:
                    if isinstance(self.pipeline._gatherer, StepGatherer):
                        self.pipeline._gatherer.release(stage)
                case PipelineOperation.UNSHARD:
                    if isinstance(self.pipeline._gatherer, StepGatherer):
                        self.pipeline._gatherer.gather_all(stage)
        self.pipeline.computed.append(ComputedAction(action, start, time.perf_counter(), self.waited, self.message))
        self.waited = self.message = 0.0

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    @contextmanager
    def _of_stage(self, stage: int, micro_batch: int | None) -> Iterator[None]:
        """Note whose weights are gathered, and which rows of the batch dropout sees."""
        if isinstance(self.pipeline._gatherer, StepGatherer):
            self.pipeline._gatherer.stage = stage
        if micro_batch is None:
            yield
            return
        with micro_batch_of(self.pipeline.model, self.step.rows, micro_batch * self.step.size):
            yield

    def _take_message(self, operation: Literal["F", "B"], stage: int, number: int, source: int) -> list[Tensor | None]:
        with self._waiting():
            sent, *message = self.carrier.take(MessageKey(operation, stage, number), self.stages.stage_ranks[source])
        assert sent is not None
        self.message = min(self.waited, max(0.0, time.time() - float(sent)))
        if self.waited > LEAST_MARKED:
            with record_function(f"{WAIT_MARK}{self.waited - self.message:.6f} {self.message:.6f}"):
                pass
        return message

    def _send(self, operation: Literal["F", "B"], stage: int, number: int, tensors: Sequence[Tensor | None]) -> None:
        """Send a message with the time at which it leaves."""
        sent = torch.tensor(time.time(), dtype=torch.float64)
        if self.stages.stage_ranks[stage] != self.stages.rank:
            count_message(tensors)
        self.carrier.send(self.stages.stage_ranks[stage], MessageKey(operation, stage, number), [sent, *tensors])

    def _forward(self, stage: int, number: int) -> None:
        step, stages, received = self.step, self.stages, None
        if stage > 0:
            message = self._take_message("F", stage, number, stage - 1)
            received = Activations.from_message(message)
            if received.micro_batches != step.micro_batches:
                raise ValueError(
                    f"stage {stage - 1} has {received.micro_batches} micro-batches in this step, and stage {stage} has "
                    f"{step.micro_batches}: all ranks of pipe are given the same rows"
                )
        elif self.seed is not None:
            torch.manual_seed(self.seed)
        with torch.enable_grad() if stages.must_learn(stage) else nullcontext():
            stage_pass = stages.begin(stage, received)
            output = stages.run(self.pipeline.model, stage_pass, (), dict(step.calls[number]))
        if isinstance(output, Activations):
            ends: list[Tensor | GradientEdge | None] = [
                get_gradient_edge(tensor) if tensor.requires_grad and torch.is_grad_enabled() else None
                for tensor in output.tensors
            ]
            output.micro_batches = step.micro_batches
            self._send("F", stage + 1, number, output.as_message())
        else:
            loss = _loss_of(output, self.pipeline.model) * step.weights[number]
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
    words = torch.tensor([action.operation is _B, _number(action)], dtype=torch.int64)
    dist.broadcast(words, group=group, group_src=0)


def _hear(group: dist.ProcessGroup, stage: int) -> Action:
    words = torch.empty(2, dtype=torch.int64)
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


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _count_valid(targets: Tensor, *, is_shifted: bool) -> Tensor:
    return ((targets[..., 1:] if is_shifted else targets) != IGNORED_TARGET).sum()


def _find_gatherer(model: nn.Module) -> Any:
    """What gathers the model's weights over z; None where nothing tells."""
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            return module.plan.shard.gatherer
        shard = getattr(vars(module).get("forward"), "block_shard", None)
        if shard is not None:
            return shard.gatherer
    return None


def _ranks_over(grid: Grid, axes: Sequence[str]) -> list[int]:
    """The ranks that differ from this one in these axes only."""
    mesh, names = grid.mesh.mesh, list(grid.mesh.mesh_dim_names or ())
    place = [slice(None) if name in axes else grid.coordinate(name) for name in names]
    return sorted(int(rank) for rank in mesh[tuple(place)].flatten())
