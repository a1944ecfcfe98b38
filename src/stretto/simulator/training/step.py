# SPDX-License-Identifier: Apache-2.0
"""Records a training step: a program for each rank of pipe, all ranks of a stage running the same.

Without pipeline stages a rank computes its micro-batches one after another. A pipeline's ranks take the actions of its
schedule in order; a message-driven one is first simulated by the planner's timing model, whose order is then taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.planner.communication import Rates, bandwidths
from stretto.planner.compute import Device, step_seconds
from stretto.planner.optimizer_state import steps_in_chunks
from stretto.planner.pipeline.cost import estimate, simulate_schedule
from stretto.planner.pipeline.stage_times import (
    HopTimes,
    RankStages,
    has_tied_message,
    hop_between,
    message_bytes,
    stage_workload,
    tied_bytes,
)
from stretto.planner.step import (
    AwaitCollective,
    AwaitRoom,
    BlockRecord,
    Computation,
    EndRecord,
    GroupCollective,
    LaunchKernels,
    Pass,
    SendGradient,
    StartCollective,
    StepRecord,
    UseWeight,
)
from stretto.planner.step_recorder import GradientBuckets, chunked_sums, record_step
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.schedules import Action, PipelineOperation
from stretto.simulator.training.program import GradientSums, StageMessage, StepOperation, Tape, WeightGathers

# Of a rank that makes more passes of blocks in a step, computation between collectives is one operation.
MAX_SEPARATE = 2_000

_F, _B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD
_I, _W = PipelineOperation.BACKWARD_INPUT, PipelineOperation.BACKWARD_WEIGHT


@dataclass(frozen=True)
class StepPrograms:
    """The programs of all ranks in a step.

    ranks: a program for each rank of pipe, which all ranks of its stages run. messages: seconds of one from each rank
    of pipe to the next, of message_bytes; the gradient of tied embeddings has tied_bytes.
    """

    workload: StepWorkload
    config: StepConfig
    ranks: tuple[tuple[StepOperation, ...], ...]
    messages: tuple[HopTimes, ...] = ()
    message_bytes: float = 0.0
    tied_bytes: float = 0.0

    def hop(self, message: StageMessage) -> HopTimes:
        """Seconds of a message: the links between two neighbouring ranks of pipe, or the last and the first."""
        return hop_between(self.messages, message.source, message.target)

    @property
    def operations(self) -> int:
        """Number of operations of one rank of each stage, all together."""
        return sum(map(len, self.ranks))


def write_programs(workload: StepWorkload, config: StepConfig, device: Device) -> StepPrograms:
    """Write the programs of a step on a device's cluster. Raises ValueError like the planner."""
    model, pipe, rates = workload.model, config.grid.pipe, bandwidths(device.cluster, config.grid)
    record = record_step(workload, config, device, rates)
    if pipe == 1:
        actions = [Action(0, operation, each) for each in range(record.micro_batches) for operation in (_F, _B)]
        stages = RankStages((model.layers,), True, True, (model.moe_blocks,) if model.moe_blocks else ())
        optimizer = step_seconds(workload, config, device)
        recorder = RankRecorder(record, rates, (0, model.layers), (0,), 0, stages, optimizer)
        return StepPrograms(workload, config, (recorder.record(actions),))
    plan = estimate(workload, config, device, rates)
    ordered, programs = simulate_schedule(plan, plan.micro_batches).schedule.ranks, []
    for rank, (own, stages) in enumerate(zip(ordered, plan.ranks, strict=True)):
        optimizer = plan.edges[stages].optimizer
        recorder = RankRecorder(record, rates, plan.layout.cuts, plan.layout.ranks, rank, stages, optimizer)
        programs.append(recorder.record(own))
    sizes = message_bytes(workload, config), tied_bytes(workload, config)
    return StepPrograms(workload, config, tuple(programs), plan.messages, *sizes)


class RankRecorder:
    """Records the program of one rank of pipe: cuts and placed say which blocks each stage has, and which rank."""

    def __init__(
        self,
        step: StepRecord,
        rates: Rates,
        cuts: Sequence[int],
        placed: Sequence[int],
        rank: int,
        stages: RankStages,
        optimizer: float,
    ) -> None:
        self.step, self.workload, self.config = step, step.workload, step.config
        self.cuts, self.placed, self.rank, self.optimizer = cuts, placed, rank, optimizer
        self.blocks, self.stages, self.own = step.blocks, stages, stage_workload(self.workload, stages)
        options = self.config.options
        self.overlap, self.recomputation = options.overlap, options.recomputation
        self.gradients = GradientSums(
            self.overlap, GradientBuckets(self.config, step.cluster, rates), step.scatters_in_flight
        )
        # Weights that were gathered once for all micro-batches, by stage.
        self._gathered: set[int] = set()
        self._chunks, self._chunk = 0, None
        if self.config.state.is_separate:
            self._chunks, self._chunk = chunked_sums(self.own, self.config, step.cluster, rates)
        self.tape = Tape()

    def record(self, actions: Sequence[Action]) -> tuple[StepOperation, ...]:
        """Record a step: all actions, then the optimizer's waits, and its step."""
        passes = sum(len(self._blocks_of(action.stage)) for action in actions)
        self.tape = Tape(merges=passes > MAX_SEPARATE)
        last = {action.stage: place for place, action in enumerate(actions) if action.operation in (_B, _W)}
        self._done, self._in_all = 0, sum(len(self._blocks_of(stage)) for stage in last)
        options = self.config.options
        for place, action in enumerate(actions):
            if action.micro_batch is None:
                continue
            self.gradients.is_last = last.get(action.stage) == place
            self.gradients.scatters = not options.scatters_once or self.gradients.is_last
            match action.operation:
                case PipelineOperation.FORWARD:
                    self._forward(action.stage, action.micro_batch)
                case PipelineOperation.BACKWARD_WEIGHT:
                    self._weights(action.stage)
                case operation:
                    self._backward(action.stage, action.micro_batch, computes_weight=operation is _B)
        self._finish()
        return tuple(self.tape.operations)

    # Passes.

    def _forward(self, stage: int, micro_batch: int) -> None:
        self._receive(stage, stage - 1, True, micro_batch)
        first, last = self._ends_of(stage)
        passes = [first.forward] if first else []
        passes += [block.forward for block in self._blocks_of(stage)]
        passes += [last.forward] if last else []
        weights = None
        if not self.config.gathers_once or stage not in self._gathered:
            weights = WeightGathers(self.tape, _gathers(passes), self.step.prefetch)
            self._gathered.add(stage)
        for each in passes:
            self._play(each, weights)
        self._send(stage, stage + 1, True, micro_batch)

    def _backward(self, stage: int, micro_batch: int, *, computes_weight: bool) -> None:
        self._receive(stage, stage + 1, False, micro_batch)
        first, last = self._ends_of(stage)
        if last is not None:
            self._play(last.backward)
        passes, blocks = list[tuple[Pass, bool]](), self._blocks_of(stage)  # and whether a block's gradients are there
        length = self.recomputation.blocks if self.recomputation.is_on else 1
        for segment in [blocks[start : start + length] for start in range(0, len(blocks), length)][::-1]:
            passes += [(block.again, False) for block in segment[:-1]] + [(segment[-1].again_last, False)]
            passes += [
                (block.backward if computes_weight else block.backward_inputs, computes_weight)
                for block in reversed(segment)
            ]
        weights = None
        if not self.config.gathers_once:
            gathers = _gathers([each for each, _ in passes])
            weights = WeightGathers(self.tape, gathers, "next" if self.overlap.all_gather else "none")
        for each, has_gradients in passes:
            self._play(each, weights)
            if has_gradients:
                self._count_block()
        if first is not None:
            self._play(first.backward)
        self._send(stage, stage - 1, False, micro_batch)

    def _weights(self, stage: int) -> None:
        for block in reversed(self._blocks_of(stage)):
            self._play(block.backward_weights)
            self._count_block()

    def _play(self, recorded: Pass, weights: WeightGathers | None = None) -> None:
        tape, started = self.tape, dict[int, int | None]()
        for place, step in enumerate(recorded):
            match step:
                case Computation(name, seconds, stream):
                    tape.compute(name, seconds, stream)
                case StartCollective(name, collective):
                    started[place] = tape.start(name, collective)
                case AwaitCollective(start):
                    tape.wait(started[start])
                case LaunchKernels(seconds):
                    tape.launch(seconds)
                case UseWeight() if weights is not None:
                    weights.use()
                case AwaitRoom():
                    self.gradients.throttle(tape)
                case SendGradient(weight):
                    self.gradients.add(tape, weight)

    def _count_block(self) -> None:
        """With separate optimizer state, send the chunks of gradients that the last backward pass has filled."""
        if self.gradients.is_last and self._chunk is not None:
            before = self._done * self._chunks // self._in_all
            self._done += 1
            for _ in range(self._done * self._chunks // self._in_all - before):
                self.gradients.sum_over_data(self.tape, self._chunk, self.gradients.on_the_way)

    # The ends of a step.

    def _finish(self) -> None:
        tape, config = self.tape, self.config
        sums = self.gradients.finish(tape)
        if has_tied_message(self.workload, self.stages):
            other = self.placed[-1] if self.stages.is_first else self.placed[0]
            tape.send(StageMessage(self.rank, other, None, self.stages.is_first, None))
            tape.receive(StageMessage(other, self.rank, None, not self.stages.is_first, None))
        if steps_in_chunks(self.workload, config) and sums:
            for each in sums:
                tape.wait(each)
                tape.compute("optimizer", self.optimizer / len(sums))
            return
        tape.wait(*sums)
        if config.grid.pipe > 1 and (config.clips or not config.state.is_separate):
            tape.barrier()
        tape.compute("optimizer", self.optimizer)

    # Stages.

    def _blocks_of(self, stage: int) -> list[BlockRecord]:
        return self.blocks[self.cuts[stage] : self.cuts[stage + 1]]

    def _ends_of(self, stage: int) -> tuple[EndRecord | None, EndRecord | None]:
        """The embeddings of the first stage, and the head of the last."""
        is_last = stage == len(self.placed) - 1
        return self.step.first if stage == 0 else None, self.step.last if is_last else None

    def _receive(self, stage: int, source: int, is_forward: bool, micro_batch: int) -> None:
        if 0 <= source < len(self.placed) and self.placed[source] != self.rank:
            self.tape.receive(StageMessage(self.placed[source], self.rank, stage, is_forward, micro_batch))

    def _send(self, stage: int, target: int, is_forward: bool, micro_batch: int) -> None:
        if 0 <= target < len(self.placed) and self.placed[target] != self.rank:
            self.tape.send(StageMessage(self.rank, self.placed[target], target, is_forward, micro_batch))


def _gathers(passes: Sequence[Pass]) -> list[GroupCollective | None]:
    """The all-gathers of the weights that passes use, in order."""
    return [step.gather for each in passes for step in each if isinstance(step, UseWeight)]
