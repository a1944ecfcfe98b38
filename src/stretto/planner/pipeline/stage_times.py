# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a pipeline stage per micro-batch, and per step, from the times of its parts.

A stage's parts are its blocks, the embeddings of the first stage, and the head and the loss of the last. A model's
blocks are all alike, or of two kinds, dense and with a mixture of experts: a stage's times are its numbers of blocks
times one block's, and those of what else it has.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from stretto.axes import EXPERT
from stretto.cluster import Cluster
from stretto.planner.architecture import Architecture
from stretto.planner.collective_times import chunked_sums, message_latency
from stretto.planner.communication import Rates, leaves_node, message_numbers, message_rate
from stretto.planner.compute import Device, compute, head_seconds
from stretto.planner.cost import SLOWDOWN_BESIDE_COMMUNICATION, StepCommunication
from stretto.planner.memory import local_parameters
from stretto.planner.optimizer_state import (
    exposed_sums,
    gradient_chunks,
    number_bytes,
    optimizer_seconds,
    steps_in_chunks,
)
from stretto.planner.workload import ScheduleChoice, StepConfig, StepWorkload
from stretto.schedules import partition
from stretto.schedules.generators import V_SHAPED
from stretto.schedules.schedule import place_in_loops, place_in_v


class PartTimes(NamedTuple):
    """Seconds of a part of a stage on one rank, per micro-batch unless described as per step.

    forward, backward_input, backward_weight: computation. x, y, z: how long the forward, and the backward pass waits
    for collectives over an axis. slower: the slowdown of computation by hidden collectives, in each pass. gather,
    scatter, data: of a step, collectives over z and data of the part's weights. room: of the last backward pass, what
    can hide them. sent_gather, sent_scatter, sent_y, sent_x, sent_expert: of a step, all that is sent over these axes.
    expert, host: how long passes wait for experts' all-to-alls, and for counts of rows.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    x_forward: float = 0.0
    x_backward: float = 0.0
    y_forward: float = 0.0
    y_backward: float = 0.0
    z_forward: float = 0.0
    z_backward: float = 0.0
    slower_forward: float = 0.0
    slower_backward: float = 0.0
    gather: float = 0.0
    scatter: float = 0.0
    data: float = 0.0
    room: float = 0.0
    sent_gather: float = 0.0
    sent_scatter: float = 0.0
    sent_y: float = 0.0
    sent_x: float = 0.0
    expert_forward: float = 0.0
    expert_backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    sent_expert: float = 0.0

    def times(self, count: float) -> "PartTimes":
        """Of so many such parts."""
        return PartTimes(*(count * value for value in self))

    def plus(self, other: "PartTimes") -> "PartTimes":
        """Of both together."""
        return PartTimes(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def whole_forward(self) -> float:
        """A forward pass, with its waits."""
        waits = self.x_forward + self.y_forward + self.z_forward + self.expert_forward + self.host_forward
        return self.forward + waits + self.slower_forward

    @property
    def whole_input(self) -> float:
        """A backward pass without the weights' gradients, with its waits."""
        waits = self.x_backward + self.y_backward + self.z_backward + self.expert_backward + self.host_backward
        return self.backward_input + waits + self.slower_backward

    @property
    def whole(self) -> float:
        """All of a micro-batch."""
        return self.whole_forward + self.whole_input + self.backward_weight


class PipelineParts(NamedTuple):
    """The times of a model's parts on one grid, with one micro-batch.

    block: of each kind of blocks, as `Architecture.kinds` has them. pattern: of each block, whether it has a mixture of
    experts.
    """

    kinds: tuple[PartTimes, ...]
    pattern: tuple[bool, ...]
    first: PartTimes
    last: PartTimes

    def block(self, *, has_moe: bool) -> PartTimes:
        """The times of a block."""
        return self.kinds[-1 if has_moe else 0]

    def blocks(self, count: int, moe_blocks: int) -> PartTimes:
        """The times of so many blocks together, so many of them with a mixture of experts."""
        if len(self.kinds) == 1:
            return self.kinds[0].times(count)
        return self.kinds[0].times(count - moe_blocks).plus(self.kinds[1].times(moe_blocks))

    @property
    def all_blocks(self) -> PartTimes:
        """The times of all blocks of the model together."""
        return self.blocks(len(self.pattern), sum(self.pattern))


class RankStages(NamedTuple):
    """The stages of one rank: the blocks of each, whether they have the embeddings, or the head, and how many blocks of
    each have a mixture of experts."""

    blocks: tuple[int, ...]
    is_first: bool
    is_last: bool
    moe_blocks: tuple[int, ...] = ()

    @property
    def together(self) -> "RankStages":
        """One stage of all blocks."""
        moe_blocks = (sum(self.moe_blocks),) if self.moe_blocks else ()
        return self._replace(blocks=(sum(self.blocks),), moe_blocks=moe_blocks)


class StageLayout(NamedTuple):
    """Which blocks each stage has, and which rank of pipe has each stage. pattern: as of `PipelineParts`."""

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    pattern: tuple[bool, ...] = ()

    def blocks(self, stage: int) -> int:
        """How many blocks a stage has."""
        return self.cuts[stage + 1] - self.cuts[stage]

    def moe_blocks(self, stage: int) -> int:
        """How many of them have a mixture of experts."""
        return sum(self.pattern[self.cuts[stage] : self.cuts[stage + 1]])

    def stages(self, numbers: Sequence[int], *, is_first: bool, is_last: bool) -> RankStages:
        """Stages of one rank; without `moe_blocks` if the model has no mixture of experts."""
        moe_blocks = tuple(map(self.moe_blocks, numbers)) if any(self.pattern) else ()
        return RankStages(tuple(map(self.blocks, numbers)), is_first, is_last, moe_blocks)


def measure_parts(
    workload: StepWorkload, config: StepConfig, cluster: Cluster, device: Device, rates: Rates
) -> PipelineParts:
    """Predict the times of a block, and of the first and last stages' other modules."""
    model, count = workload.model, config.micro_batches(workload)
    kinds, of_norms = [], 0.0
    for kind in model.kinds:
        has_moe = kind.model.moe_blocks > 0
        inner = workload.stage(1, is_first=False, is_last=False, moe_blocks=int(has_moe))
        work = compute(inner, config, device)
        block = StepCommunication(inner, config, cluster, work, rates)
        kinds.append(_block_times(block, config, cluster))
        of_norms = block.outside_blocks.all_reduce_y
    head = head_seconds(workload, model.splitting_sizes(config.grid), config.micro_batch * workload.seq_len, device)
    # A loss in slices computes its gradients with them, in the forward pass.
    in_forward = 1.0 if model.logits == "sliced" else 1 / 3
    own = PartTimes(forward=in_forward * head, backward_input=(1 - in_forward) * head)
    ends = []
    for is_first in (True, False):
        end = workload.stage(1, is_first=is_first, is_last=not is_first)
        step = StepCommunication(end, config, cluster, work, rates)
        ends.append(_end_times(step, of_norms, count, own if not is_first else PartTimes()))
    return PipelineParts(tuple(kinds), model.has_moe, *ends)


def _block_times(block: StepCommunication, config: StepConfig, cluster: Cluster) -> PartTimes:
    """The times of one block, of which the step consists."""
    work, count = block.work, block.micro_batches
    hides, slowdown = config.options.overlap.hides_any, cluster.gpu.overlap_slowdown or SLOWDOWN_BESIDE_COMMUNICATION
    waits = {f"{axis}_{name}": 0.0 for axis in ("x", "y", "z", EXPERT) for name in ("forward", "backward")}
    sent = {"x": 0.0, "y": 0.0, EXPERT: 0.0}
    hidden = [0.0, 0.0]  # in the forward and in the backward pass
    for each in block.sums:
        of_pass, name = (0, "forward") if each.is_forward else (1, "backward")
        left = each.time - each.hidden if hides else each.time
        waits[f"{each.axis}_{name}"] += left / count
        hidden[of_pass] += (each.time - left) / count
        sent[each.axis] += each.time
    norms = block.outside_blocks
    for name in ("y_forward", "y_backward"):
        waits[name] += norms.all_reduce_y / count / 2
    room = work.backward / count - hidden[1]
    once = config.gathers_once
    gather, again = (0.0, 0.0) if once else (block.all_gather / count, (block.gathers - 1) * block.all_gather / count)
    scatters_each = block.scatters == count
    scattered = block.reduce_scatter / count if scatters_each else 0.0
    left_forward = max(0.0, gather - work.forward / count) if hides else gather
    left_backward = max(0.0, again + scattered - room) if hides else again + scattered
    waits["z_forward"] += left_forward
    waits["z_backward"] += left_backward
    hidden[0] += gather - left_forward
    hidden[1] += again + scattered - left_backward
    weight = (sum(work.weight_gradients) + work.other_weight_gradients) / count
    reads, again_too = block.host_reads / count, block.forward_exchanges > 1
    return PartTimes(
        forward=work.forward / count,
        backward_input=work.backward / count - weight,
        backward_weight=weight,
        **waits,
        slower_forward=slowdown * hidden[0],
        slower_backward=slowdown * hidden[1],
        gather=block.all_gather if once else 0.0,
        scatter=0.0 if scatters_each else block.reduce_scatter,
        data=0.0 if config.state.is_separate else block.data,
        room=max(0.0, room - again - scattered),
        sent_gather=block.all_gather * block.gathers,
        sent_scatter=block.reduce_scatter,
        sent_y=sent["y"] + norms.all_reduce_y,
        sent_x=sent["x"],
        host_forward=reads / 2 if again_too else reads,
        host_backward=reads / 2 if again_too else 0.0,
        sent_expert=sent[EXPERT],
    )


def _end_times(step: StepCommunication, of_norms: float, count: int, own: PartTimes) -> PartTimes:
    """The times of the other modules of the first or last stage, which are not hidden."""
    outside, once = step.outside_blocks, step.config.gathers_once
    scatters_each = step.scatters == count
    over_y = max(0.0, outside.all_reduce_y - of_norms)
    return own.plus(
        PartTimes(
            x_forward=outside.all_reduce_x / count / 2,
            x_backward=outside.all_reduce_x / count / 2,
            y_forward=over_y / count / 2,
            y_backward=over_y / count / 2,
            z_forward=0.0 if once else outside.all_gather_z / count,
            z_backward=outside.reduce_scatter_z / count if scatters_each else 0.0,
            gather=outside.all_gather_z if once else 0.0,
            scatter=0.0 if scatters_each else outside.reduce_scatter_z,
            data=outside.all_reduce_data,
            sent_gather=outside.all_gather_z,
            sent_scatter=outside.reduce_scatter_z,
            sent_y=over_y,
            sent_x=outside.all_reduce_x,
        )
    )


def stage_workload(workload: StepWorkload, stages: RankStages) -> StepWorkload:
    """The workload of one rank's stages, all of them together."""
    together = stages.together
    moe_blocks = together.moe_blocks[0] if stages.moe_blocks else None
    return workload.stage(together.blocks[0], is_first=stages.is_first, is_last=stages.is_last, moe_blocks=moe_blocks)


# Which blocks each stage has.


@lru_cache(maxsize=1024)
def place_stages(schedule: ScheduleChoice, pipe: int) -> tuple[int, ...]:
    """The rank of each stage."""
    return place_in_v(pipe) if schedule.name in V_SHAPED else place_in_loops(pipe, schedule.virtual_stages)


def cut_blocks(parts: PipelineParts, stages: int) -> tuple[int, ...]:
    """Cut a model's blocks into stages by the predicted time of forward and backward passes."""
    block = parts.kinds[-1].whole
    if not block:
        return _cut(parts.pattern, stages, 1.0, 0.0, 0.0)
    # In twentieths of a block, so that most cuts of a search are known already.
    dense, first, last = (round(20 * part.whole / block) / 20 for part in (parts.kinds[0], parts.first, parts.last))
    return _cut(parts.pattern, stages, dense, first, last)


def cut_by_weights(model: Architecture, stages: int) -> tuple[int, ...]:
    """Cut a model's blocks into stages by the weights that a token is multiplied with, as `parallelize` does without
    `cuts`. Raises ValueError for fewer blocks than stages."""
    weights = [kind.model.active_weights / kind.model.layers for kind in model.kinds]
    if len(weights) == 1:
        weights *= 2
    return partition([weights[has_moe] for has_moe in model.has_moe], stages, last=model.head_outputs * model.hidden)


@lru_cache(maxsize=4096)
def _cut(pattern: tuple[bool, ...], stages: int, dense: float, first: float, last: float) -> tuple[int, ...]:
    """dense: a dense block's time over that of one with experts; 1 where blocks are alike."""
    return partition([1.0 if has_moe else dense for has_moe in pattern], stages, first, last)


def stages_of_ranks(layout: StageLayout, pipe: int) -> list[RankStages]:
    """The stages of each rank."""
    of_ranks: list[list[int]] = [[] for _ in range(pipe)]
    for stage, rank in enumerate(layout.ranks):
        of_ranks[rank].append(stage)
    ends = layout.ranks[0], layout.ranks[-1]
    return [
        layout.stages(stages, is_first=rank == ends[0], is_last=rank == ends[1]) for rank, stages in enumerate(of_ranks)
    ]


def times_of_rank(parts: PipelineParts, stages: RankStages) -> PartTimes:
    """The times of all stages of a rank together."""
    times = parts.blocks(sum(stages.blocks), sum(stages.moe_blocks))
    times = times.plus(parts.first) if stages.is_first else times
    return times.plus(parts.last) if stages.is_last else times


# What a step takes before the first forward pass, and after the last backward pass.


class StepEdges(NamedTuple):
    """Seconds of one rank before its first forward pass, and after its last backward pass: collectives, by axis, and
    the optimizer. data_sent: all of its collectives over data."""

    gather: float
    scatter: float
    data: float
    tie: float
    optimizer: float
    data_sent: float

    @property
    def sums(self) -> float:
        """What follows the last backward pass, before the optimizer."""
        return self.scatter + self.data + self.tie


def edges_of_rank(
    workload: StepWorkload, config: StepConfig, device: Device, rates: Rates, parts: PipelineParts, stages: RankStages
) -> StepEdges:
    """Predict what of a rank's weights and gradients is sent at the ends of a step, with nothing to hide it."""
    cluster, times = device.cluster, times_of_rank(parts, stages)
    own = stage_workload(workload, stages)
    grid = workload.model.splitting_sizes(config.grid)
    parameters = local_parameters(own.model, grid)
    optimizer = optimizer_seconds(workload, config.state, cluster, parameters, device.traffic)
    blocks, hides = sum(stages.blocks), config.options.overlap.hides_any
    ends = times_of_rank(parts, stages._replace(blocks=(0,), moe_blocks=(0,)))
    reductions, data = blocks, times.data
    if config.state.is_separate:
        reductions = gradient_chunks(config.state, parameters)
        sizes = replace(config, grid=grid)
        data = chunked_sums(own, sizes, cluster, rates, parameters, reductions)
    gather, scatter, left = times.gather, times.scatter, data
    # Gradients of embeddings that both ends have are summed last, and all of a rank's with them.
    is_tied = _is_tied(workload) and (stages.is_first != stages.is_last)
    if hides:
        of_blocks = parts.blocks(blocks, sum(stages.moe_blocks))
        gather = ends.gather + max(of_blocks.gather / blocks, of_blocks.gather - of_blocks.whole_forward)
    if hides and not is_tied:
        scattered = scatter - ends.scatter
        room = times.room
        if scattered:
            scatter = ends.scatter + max(scattered - room, scattered / blocks)
            room = max(0.0, room - scattered)
        of_ends = ends.data if not config.state.is_separate else 0.0
        left = of_ends + (max(data - of_ends - room, data / reductions) if data else 0.0)
    if steps_in_chunks(workload, config):
        left = exposed_sums(left, data, reductions, optimizer)
    tie = 0.0
    if is_tied:
        rows = -(-workload.model.vocab // grid.x) / grid.z
        num_bytes = rows * workload.model.hidden / grid.y * number_bytes(workload, config.state).gradient
        leaves = config.grid.pipe * config.grid.stage_ranks > cluster.gpus_per_node
        tie = 2 * message_latency(cluster, leaves=leaves) + num_bytes / message_rate(
            cluster, config.grid, leaves=leaves
        )
    return StepEdges(gather, scatter, left, tie, optimizer, data)


def _is_tied(workload: StepWorkload) -> bool:
    model = workload.model
    return model.is_tied and model.labels is None


# Messages.


class HopTimes(NamedTuple):
    """Seconds of a message between the ranks of neighbouring stages: its latency, and its bytes over the bandwidth."""

    latency: float
    transmission: float

    @property
    def whole(self) -> float:
        """From the end of the action that made it to its arrival."""
        return self.latency + self.transmission


def message_times(workload: StepWorkload, config: StepConfig, cluster: Cluster) -> tuple[HopTimes, ...]:
    """The times of messages from each rank of pipe to the next, and from the last to the first."""
    grid = config.grid
    tokens = config.micro_batch * workload.seq_len
    numbers = message_numbers(workload.model, grid, tokens, config.token_parts)
    known = {
        leaves: HopTimes(
            message_latency(cluster, leaves=leaves),
            numbers * workload.element / message_rate(cluster, grid, leaves=leaves),
        )
        for leaves in {leaves_node(cluster, grid, rank) for rank in range(grid.pipe)}
    }
    return tuple(known[leaves_node(cluster, grid, rank)] for rank in range(grid.pipe))
