# SPDX-License-Identifier: Apache-2.0
"""`Pipeline`: runs the steps of a model that is cut into pipeline stages, by a schedule or by the messages that come.

A step is a list of actions for each rank (`stretto.schedules`): a forward pass F of a stage for a micro-batch, its
backward pass B, or the two parts of that, I for the input's gradient and W for the weights'. The list is that of a
schedule, or comes about as messages arrive (Singh, section 3.1.3). Each rank takes its actions one after another, and
waits in each for the message that the action needs.

Collectives within a stage (over x, y, z and context) run in the order of the actions, so the ranks that share a
micro-batch must take the same ones. In message-driven order the first of them decides, and notifies the others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.axes import EXPERT, LOSS, STAGE, STAGE_AXES, WEIGHT_AXES, check_sizes
from stretto.huggingface.pretrained_model import is_pretrained_model
from stretto.memory import next_number
from stretto.parallel.comm.agreement import JointRefusal
from stretto.parallel.comm.collectives import all_reduce
from stretto.parallel.comm.gradient_buckets import accumulate
from stretto.parallel.comm.weight_gathering import StepGatherer
from stretto.parallel.grid import Grid
from stretto.parallel.layers.linear import ParallelLinear
from stretto.parallel.pipeline.actions import ActionRunner, ComputedAction, PipelineStep, StageRank
from stretto.parallel.pipeline.failure_reports import StepFailures
from stretto.parallel.pipeline.messages import MessageKey, MessageTransport
from stretto.parallel.pipeline.micro_batches import BatchCutter
from stretto.parallel.pipeline.stages import ModelStages, whole_model
from stretto.parallel.pipeline.transports import make_transport
from stretto.parallel.state import require_state
from stretto.quantities import require_whole
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


class Pipeline:
    """Runs training steps of a model that `parallelize` has split into pipeline stages (Singh, chapter 3).

    Every rank of the grid creates a Pipeline, and calls `step` with the rows of its data and z coordinates, which are
    the same on all ranks of pipe.

        model = parallelize(model, grid)                       # grid = Grid(pipe=4, data=2)
        pipeline = Pipeline(model, grid, schedule="1f1b", micro_batch_size=2)
        loss = pipeline.step(input_ids=ids, labels=labels)     # gradients are final
        optimizer.step()

    model: with any number of stages, including one.
    schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v" or "message-driven", or a PipelineSchedule,
        whose number of micro-batches each step must have then.
    micro_batch_size: rows of a micro-batch, which must divide the rows of each step.
    limit: for "message-driven": micro-batches in flight (default: the number of stages).
    serve_first: for "message-driven": what is computed first if an activation and a gradient are both waiting.
    extra_warm_up: for "1f1b": additional forward passes before the first backward pass.
    transport: of messages between ranks: a name in `stretto.parallel.pipeline.transports.TRANSPORTS`, or a transport
        object (default: the fastest one that connects these ranks).

    A failure on any rank raises an error on all ranks, which names the rank that caused it, within the grid's timeout.

    Raises ValueError for a schedule that does not match the model's stages, and for options of another schedule.
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
        transport: str | MessageTransport | None = None,
    ) -> None:
        state = require_state(model, "Pipeline")
        reducer = state.gradient_reducer
        self.model = model
        self.grid = grid
        self.micro_batch_size = micro_batch_size
        self.stages: ModelStages = state.stages or ModelStages.whole(type(model).__name__)
        self.computed: list[ComputedAction] = []
        self._failure: str | None = None
        self._reducer = reducer
        self._averages = reducer.loss_covers_own_rows and not is_pretrained_model(model)
        self._batches = BatchCutter(model, grid, micro_batch_size, averages=self._averages, parts=state.sequence_parts)
        self._schedule = schedule
        self._extra_warm_up = extra_warm_up
        self._limit = self.stages.count if limit is None else limit
        self._serve_first: ServeFirst = serve_first or "backward"
        self._schedules: dict[int, PipelineSchedule] = {}
        refusal = JointRefusal(grid, "the pipeline")
        try:
            self._check_options(limit, serve_first)
        except Exception as error:
            refusal.exchange(error)
            raise
        refusal.exchange()
        self._leaders: dist.ProcessGroup | None = None
        if self.is_message_driven and grid.size(STAGE) > 1:
            # Experts exchange tokens over data, too, and routers sum their choices.
            modules = whole_model(model).modules()  # of all stages: ranks make one group
            over_data = grid.size(EXPERT) > 1 or any(hasattr(module, "sum_over_ranks") for module in modules)
            over = STAGE_AXES if over_data else (*WEIGHT_AXES, "context")
            if check_sizes(grid.sizes).over(over) > 1:
                self._leaders = grid.shared_group(grid.partition(over), "leaders", backend="gloo")
        self._number = next_number(grid.group("world"), "pipelines")
        self._refused = 0  # steps
        self._failures = StepFailures(f"stretto pipeline {self._number}")
        self._transport = (
            transport
            if isinstance(transport, MessageTransport)
            else make_transport(grid.group("pipe"), grid.device, transport)
        )
        gatherer = state.weight_gatherer if self.stages.count > 1 else None
        gatherer = gatherer if isinstance(gatherer, StepGatherer) else None  # it keeps a stage's weights for a step
        self._rank = StageRank(model, self.stages, self._transport, reducer, gatherer)
        self._with_losses = [module for module in model.modules() if hasattr(module, "loss_scale")]

    @property
    def is_message_driven(self) -> bool:
        """True if messages decide what is computed next."""
        return self._schedule == MESSAGE_DRIVEN

    def step(
        self, *args: Any, seed: int | None = None, scale_loss: Callable[[Tensor], Tensor] | None = None, **kwargs: Any
    ) -> Tensor:
        """Run the forward and backward passes of a step, in micro-batches. Collective.

        args, kwargs: the arguments of the model's forward, for this rank's rows of the global batch. Tensors whose dim
            0 is as long as the first tensor's are split into micro-batches; every micro-batch gets all other arguments.
        seed: seeds torch before each micro-batch, for dropout; the same on all ranks.
        scale_loss: multiplies the loss of a micro-batch before its backward pass, as a loss scaler does.

        Modules that add their own losses as gradients (`stretto.models.moe.Router`) have an attribute `loss_scale`,
        which is set to a micro-batch's share of the batch, times `scale_loss`.

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
        self._transport.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def schedule_of(self, micro_batches: int, *, with_backward: bool = True) -> PipelineSchedule:
        """The schedule of a step of so many micro-batches. ValueError in message-driven order, which has none."""
        if self.is_message_driven and with_backward:
            raise ValueError("message-driven order has no schedule: the order of messages determines the actions")
        key = micro_batches if with_backward else -micro_batches
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(micro_batches, with_backward)
        return self._schedules[key]

    def _build_schedule(self, micro_batches: int, with_backward: bool) -> PipelineSchedule:
        pipe = self.grid.size("pipe")
        if not with_backward:
            ranks = [
                tuple(
                    Action(stage, PipelineOperation.FORWARD, number)
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
        self.micro_batch_size = require_whole("micro_batch_size", self.micro_batch_size)
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
        has_roles = stages.has_roles or any(isinstance(module, ParallelLinear) for module in self.model.modules())
        if splits and not has_roles:
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
                "a pipeline's step cannot be captured in a CUDA graph, because the host receives its messages; run it "
                "without CapturedStep"
            )
        if self._failure is not None:
            raise RuntimeError(f"an earlier step of this pipeline has failed here ({self._failure}): make another one")
        trains = torch.is_grad_enabled()
        schedule = None
        try:
            step = self._batches.cut(args, kwargs)
            if not (self.is_message_driven and trains):
                schedule = self.schedule_of(step.micro_batches, with_backward=trains)
        except Exception as error:
            self._refuse_step(error)
            raise
        runner = ActionRunner(self._rank, step, seed, scale_loss)
        self.computed = runner.computed
        if trains and self._with_losses:
            share = torch.full((), 1 / step.micro_batches, dtype=torch.float64, device=self.grid.device)
            for module in self._with_losses:
                module.loss_scale = share if scale_loss is None else scale_loss(share)
        earlier = self._set_gradients_aside() if trains else []
        self._reducer.has_synced = False
        try:
            if self._rank.gatherer is not None:
                self._rank.gatherer.begin_step()
            self._transport.begin_step(self._expected(step.micro_batches, trains))
            if self.stages.count - 1 in self.stages.mine:
                self._batches.weigh(step)
            if schedule is not None:
                runner.run_schedule(schedule)
            else:
                runner.run_by_messages(self._limit, self._serve_first, self._leaders)
            if trains and not self._reducer.has_synced:
                self._reducer.run_pass()
            loss = self._share_loss(step)
            self._transport.end_step()
        except BaseException as error:
            self._reducer.deferred = None
            self._failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            self._transport.fail(f"raised {self._failure}")
            self._transport.close()
            if (named := self._failures.explain(error, self.grid.timeout.total_seconds())) is not None:
                raise named from error
            raise
        finally:
            if self._rank.gatherer is not None:
                self._rank.gatherer.end_step()
        for parameter, gradient in earlier:
            made, parameter.grad = parameter.grad, gradient
            if made is not None:
                assert isinstance(made, DTensor)
                accumulate(parameter, made.to_local())
        return loss

    def _refuse_step(self, error: Exception) -> None:
        """Tell ranks that began the step that this one does not. If all refuse it, they may take another."""
        if self.grid.size("pipe") == 1:
            return
        self._transport.refuse_step(f"refused the step: {str(error).partition(chr(10))[0][:300]}")
        self._failures.explain(error, self.grid.timeout.total_seconds())
        self._refused += 1
        self._failures = StepFailures(f"stretto pipeline {self._number} after {self._refused} refusals")

    def _set_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Take the gradients that are there: the first micro-batch's are not yet summed over ranks, and these are."""
        earlier = [(parameter, parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        return earlier

    def _share_loss(self, step: PipelineStep) -> Tensor:
        """The step's loss, which the last stage sends to the other ranks of pipe once all have ended the step.

        So no rank continues to a collective over all ranks that another will never reach.
        """
        last, count = self.stages.stage_ranks[-1], self.stages.count
        key = MessageKey("F", count, 0)
        others = [rank for rank in range(self.grid.size("pipe")) if rank != last]
        if self.stages.rank != last:
            self._transport.send(last, MessageKey("B", count, self.stages.rank), [])
            (loss,) = self._transport.take(key, last)
            assert loss is not None
            return loss
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for part in step.losses:
            total += part
        if self._averages:
            total = all_reduce(total, self.grid.communicator(LOSS)) / self.grid.size(LOSS)
        for rank in others:
            self._transport.take(MessageKey("B", count, rank), rank)
        for rank in others:
            self._transport.send(rank, key, [total])
        return total

    def _expected(self, micro_batches: int, trains: bool) -> dict[int, int]:
        """The number of messages from each rank of pipe."""
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
