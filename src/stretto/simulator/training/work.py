# SPDX-License-Identifier: Apache-2.0
"""What all parts of a model compute and send for one micro-batch: its kinds of blocks, embeddings, head and loss.

What stands before the first block and after the last is waited for where it stands, as the planner has it
(`StepCommunication.outside_blocks`).
"""

from dataclasses import dataclass, replace

from stretto.execution import SCATTERS_IN_FLIGHT
from stretto.planner.communication import WeightTraffic, bandwidths
from stretto.planner.compute import Device, compute, head_seconds
from stretto.planner.cost import StepCommunication
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.training.block_work import BlockWorkBuilder, WeightCollectives
from stretto.simulator.training.blocks import BlockRecorder, GradientSums
from stretto.simulator.training.program import GroupCollective, Tape, WeightGathers


class StepWork:
    """The parts of a step on one grid, with one micro-batch. Raises ValueError like the planner.

    optimizer: seconds of its step, without pipeline stages.
    """

    def __init__(self, workload: StepWorkload, config: StepConfig, device: Device) -> None:
        self.workload, self.config, self.device, self.cluster = workload, config, device, device.cluster
        self.rates = bandwidths(device.cluster, config.grid)
        work = compute(workload, config, device)
        step = StepCommunication(workload, config, device.cluster, work, self.rates)
        builder = BlockWorkBuilder(workload, config, device, step)
        self.optimizer, self.count, self.tokens = work.optimizer, step.micro_batches, builder.tokens
        self.prefetch = builder.prefetch
        model, is_whole = workload.model, config.grid.pipe == 1
        self.scatters_in_flight = 1 if model.is_sharded_by_blocks else SCATTERS_IN_FLIGHT
        recorders = {}
        for kind in model.kinds:
            has_moe = kind.model.moe_blocks > 0
            inner = workload.stage(1, is_first=False, is_last=False, moe_blocks=int(has_moe))
            recorders[has_moe] = BlockRecorder(builder.block(kind.model, inner), config.options)
        self.blocks = [recorders[has_moe] for has_moe in model.has_moe]
        first, last = (workload.stage(1, is_first=is_first, is_last=not is_first) for is_first in (True, False))
        self.embedding = embedding_work(builder, workload if is_whole else first)
        if is_whole:  # the planner counts no casts at the ends of pipelines
            forward = sum(each.work.forward_seconds for each in self.blocks)
            backward = sum(each.work.backward_seconds for each in self.blocks)
            self.embedding = replace(
                self.embedding,
                casts_forward=max(0.0, work.forward / self.count - forward),
                casts_backward=max(0.0, work.backward / self.count - backward),
            )
        self.head = head_work(builder, workload if is_whole else last)


@dataclass(frozen=True)
class EndWork:
    """The embeddings, or the final norm, head and loss, for one micro-batch.

    forward, backward: collectives, the head's before and after its products. head: seconds of these, in the forward and
    in the backward pass. weight: of the table, or of all that is in no block. casts_forward, casts_backward: seconds
    in which what is in no block is turned into the dtype of the computation, and its gradients back.
    """

    forward: tuple[GroupCollective, ...] = ()
    backward: tuple[GroupCollective, ...] = ()
    head_forward: float = 0.0
    head_backward: float = 0.0
    weight: WeightCollectives | None = None
    casts_forward: float = 0.0
    casts_backward: float = 0.0

    def record_forward(self, tape: Tape, weights: WeightGathers | None) -> None:
        """Record a forward pass."""
        if weights is not None and self.weight is not None:
            weights.use()
        tape.compute("casts", self.casts_forward)
        tape.compute("head and loss", self.head_forward)
        for collective in self.forward:
            tape.run(f"{collective.kind} outside blocks", collective)

    def record_backward(self, tape: Tape, gradients: GradientSums) -> None:
        """Record a backward pass."""
        for collective in self.backward:
            tape.run(f"{collective.kind} outside blocks, backward", collective)
        tape.compute("head and loss, backward", self.head_backward)
        tape.compute("casts, backward", self.casts_backward)
        if self.weight is not None:
            gradients.add(tape, self.weight)


def embedding_work(builder: BlockWorkBuilder, end: StepWorkload) -> EndWork:
    """The embeddings: looked up where x has the rows, and summed over x, or scattered where tokens are sharded.

    end: the workload of the first stage. Of a model that is sharded by blocks, all of it that is in no block is one.
    """
    config, model = builder.config, end.model
    if model.is_sharded_by_blocks:
        return EndWork(weight=builder.weight(WeightTraffic.of(model.outside_parameters, config.grid)))
    half = _half_over_x(builder)
    table = _table(builder, model.vocab / config.grid.x * model.hidden / config.grid.y, is_own=True)
    if config.token_parts > 1:
        forward, backward = (builder.over(kind, "x", half) for kind in ("reduce_scatter", "all_gather"))
    else:
        forward, backward = builder.over("all_reduce", "x", 2 * half), None
    return EndWork(_some(forward), _some(backward), weight=table)


def head_work(builder: BlockWorkBuilder, end: StepWorkload) -> EndWork:
    """The final norm, the head and the loss. end: the workload of the last stage."""
    model, config, grid = end.model, builder.config, builder.config.grid
    tokens = builder.tokens
    seconds = head_seconds(end, model.splitting_sizes(grid), tokens, builder.device)
    in_forward = 1.0 if model.logits == "sliced" else 1 / 3  # a loss in slices computes its gradients with them
    times = (in_forward * seconds, (1 - in_forward) * seconds)
    if model.is_sharded_by_blocks:
        has_own = not model.is_first  # else the embeddings' message has it
        traffic = WeightTraffic.of(model.outside_parameters, grid)
        return EndWork((), (), *times, weight=builder.weight(traffic) if has_own else None)
    element, x, y = end.element, grid.x, grid.y
    outputs, hidden = model.head_outputs / x, model.hidden / y
    forward: list[GroupCollective | None] = []
    backward: list[GroupCollective | None] = []
    again = builder.step.forward_exchanges
    statistics = builder.over("all_reduce", "y", 2 * (y - 1) / y * tokens / config.token_parts * 8)
    forward.append(statistics)
    backward += [statistics] * again
    table = None
    if outputs:
        half = _half_over_x(builder)
        if config.token_parts > 1:
            forward.append(builder.over("all_gather", "x", half))
        backward.append(builder.over("all_reduce", "x", 2 * half))
        forward.append(builder.over("all_reduce", "y", 2 * (y - 1) / y * tokens * outputs * element))
        table = _table(builder, outputs * hidden, is_own=model.has_own_head)
    if model.logits == "sliced":
        forward += [builder.over("all_reduce", "x", 2 * (x - 1) / x * tokens * 8)] * 2
    elif outputs:
        forward.append(builder.over("all_gather", "x", (x - 1) * tokens * outputs * element))
    return EndWork(_some(*forward), _some(*backward), *times, table)


def _half_over_x(builder: BlockWorkBuilder) -> float:
    """Bytes that a rank sends to gather, or to scatter, hidden activations over x."""
    grid, workload = builder.config.grid, builder.workload
    return (grid.x - 1) / grid.x * builder.tokens * workload.model.hidden / grid.y * workload.element


def _table(builder: BlockWorkBuilder, numbers: float, *, is_own: bool) -> WeightCollectives:
    """Of an embedding or a head. is_own: it has its own gradient, which is summed over data."""
    table = builder.weight(WeightTraffic.of(numbers, builder.config.grid))
    return table if is_own else replace(table, data=None)


def _some(*collectives: GroupCollective | None) -> tuple[GroupCollective, ...]:
    return tuple(each for each in collectives if each is not None)
