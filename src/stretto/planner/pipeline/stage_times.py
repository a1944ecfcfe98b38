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

from stretto.cluster import Cluster
from stretto.planner.architecture import Architecture
from stretto.planner.collective_times import message_latency
from stretto.planner.communication import Rates, leaves_node, message_numbers, message_rate
from stretto.planner.compute import Device, muon_seconds
from stretto.planner.cost import PartTotals, left_over, total_block, total_end
from stretto.planner.memory import local_parameters
from stretto.planner.optimizer_state import exposed_sums, number_bytes, optimizer_seconds, steps_in_chunks
from stretto.planner.step import StepRecord, overlap_slowdown
from stretto.planner.step_recorder import GradientBuckets, chunked_sums, record_step
from stretto.planner.workload import ScheduleChoice, StepConfig, StepWorkload
from stretto.schedules import partition
from stretto.schedules.generators import V_SHAPED
from stretto.schedules.schedule import place_in_loops, place_in_v


class PipelineParts(NamedTuple):
    """The times of a model's parts on one grid, with one micro-batch.

    block: of each kind of blocks, as `Architecture.kinds` has them. pattern: of each block, whether it has a mixture of
    experts.
    """

    kinds: tuple[PartTotals, ...]
    pattern: tuple[bool, ...]
    first: PartTotals
    last: PartTotals

    def block(self, *, has_moe: bool) -> PartTotals:
        return self.kinds[-1 if has_moe else 0]

    def blocks(self, count: int, moe_blocks: int) -> PartTotals:
        """Add up the times of `count` blocks, `moe_blocks` of them with a mixture of experts."""
        if len(self.kinds) == 1:
            return PartTotals().plus(self.kinds[0], count)
        return PartTotals().plus(self.kinds[0], count - moe_blocks).plus(self.kinds[1], moe_blocks)

    @property
    def all_blocks(self) -> PartTotals:
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
    """Assignment of blocks to stages, and of stages to ranks of pipe. pattern: as of `PipelineParts`."""

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    pattern: tuple[bool, ...] = ()

    def blocks(self, stage: int) -> int:
        return self.cuts[stage + 1] - self.cuts[stage]

    def moe_blocks(self, stage: int) -> int:
        """Return how many of them have a mixture of experts."""
        return sum(self.pattern[self.cuts[stage] : self.cuts[stage + 1]])

    def stages(self, numbers: Sequence[int], *, is_first: bool, is_last: bool) -> RankStages:
        """Stages of one rank; without `moe_blocks` if the model has no mixture of experts."""
        moe_blocks = tuple(map(self.moe_blocks, numbers)) if any(self.pattern) else ()
        return RankStages(tuple(map(self.blocks, numbers)), is_first, is_last, moe_blocks)


def measure_parts(workload: StepWorkload, config: StepConfig, device: Device, rates: Rates) -> PipelineParts:
    """Predict the times of a block, and of the first and last stages' other modules."""
    record = record_step(workload, config, device, rates)
    kinds = (_time_part(record, total_block(block), hides=1) for _, block in record.kinds)
    ends = (_time_part(record, total_end(end), hides=0) for end in (record.first, record.last))
    return PipelineParts(tuple(kinds), workload.model.has_moe, *ends)


def _time_part(record: StepRecord, total: PartTotals, *, hides: int) -> PartTotals:
    """A part with what its passes send over z. hides: 1 if they hide some of that, 0 if not."""
    config, count, slowdown = record.config, record.micro_batches, overlap_slowdown(record.cluster)
    forward, backward, overlap = total.forward, total.backward, config.options.overlap
    room = hides * (backward.computation - backward.hidden)
    gather, again = (0.0, 0.0) if config.gathers_once else (forward.gathered, backward.gathered)
    scatter = total.scatter if config.gradient_scatters(count) == count else 0.0
    hidden = min(gather * overlap.all_gather, hides * forward.computation)
    forward = forward._replace(z=gather, hidden_z=hidden)
    hidden = min(again * overlap.all_gather + scatter * overlap.reduce_scatter, room)
    backward = backward._replace(z=again + scatter, hidden_z=hidden)
    return total._replace(
        forward=forward._replace(slowed=slowdown * forward.hidden),
        backward=backward._replace(slowed=slowdown * backward.hidden),
        room=max(0.0, room - backward.z),
    )


def stage_workload(workload: StepWorkload, stages: RankStages) -> StepWorkload:
    """The workload of one rank's stages, all of them together."""
    together = stages.together
    moe_blocks = together.moe_blocks[0] if stages.moe_blocks else None
    return workload.stage(together.blocks[0], is_first=stages.is_first, is_last=stages.is_last, moe_blocks=moe_blocks)


# Which blocks each stage has.


@lru_cache(maxsize=1024)
def place_stages(schedule: ScheduleChoice, pipe: int) -> tuple[int, ...]:
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
    of_ranks: list[list[int]] = [[] for _ in range(pipe)]
    for stage, rank in enumerate(layout.ranks):
        of_ranks[rank].append(stage)
    ends = layout.ranks[0], layout.ranks[-1]
    return [
        layout.stages(stages, is_first=rank == ends[0], is_last=rank == ends[1]) for rank, stages in enumerate(of_ranks)
    ]


def times_of_rank(parts: PipelineParts, stages: RankStages) -> PartTotals:
    times = parts.last if stages.is_last else PartTotals()  # in the backward pass's order
    times = times.plus(parts.blocks(sum(stages.blocks), sum(stages.moe_blocks)))
    return times.plus(parts.first) if stages.is_first else times


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
        """Operations that follow the last backward pass, before the optimizer."""
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
    optimizer += muon_seconds(own, config.grid, device)
    blocks, overlap, count = sum(stages.blocks), config.options.overlap, config.micro_batches(workload)
    ends = times_of_rank(parts, stages._replace(blocks=(0,), moe_blocks=(0,)))
    sums, data, data_of_ends = times.sums_of(ends, GradientBuckets(config, cluster, rates))
    if config.state.is_separate:
        sums, chunk = chunked_sums(own, config, cluster, rates)
        data = sums * chunk.seconds if chunk is not None else 0.0
    sent = data + data_of_ends
    # What is sent once a step.
    once, scatters_once = config.gathers_once, config.gradient_scatters(count) < count
    gather, scatter = once * times.forward.gathered, scatters_once * times.scatter
    left, room = sent, times.room
    # Gradients of embeddings that both ends have are summed last, and all of a rank's with them.
    is_tied = has_tied_message(workload, stages)
    if overlap.all_gather:
        of_blocks = parts.blocks(blocks, sum(stages.moe_blocks))
        gathered = once * of_blocks.forward.gathered
        gather = once * ends.forward.gathered + max(gathered / blocks, gathered - of_blocks.forward.whole)
    if overlap.reduce_scatter and not is_tied:
        of_ends = scatters_once * ends.scatter
        scattered = scatter - of_ends
        if scattered:
            scatter = of_ends + max(scattered - room, scattered / blocks)
            room = max(0.0, room - scattered)
    if overlap.data and not is_tied:
        left = data_of_ends + left_over(data, room, sums)
    if steps_in_chunks(workload, config):
        left = exposed_sums(left, sent, sums, optimizer)
    tie = 0.0
    if is_tied:
        leaves = config.grid.pipe * config.grid.stage_ranks > cluster.gpus_per_node
        tie = 2 * message_latency(cluster, leaves=leaves) + tied_bytes(workload, config) / message_rate(
            cluster, config.grid, leaves=leaves
        )
    return StepEdges(gather, scatter, left, tie, optimizer, sent)


def has_tied_message(workload: StepWorkload, stages: RankStages) -> bool:
    """True if a rank exchanges the gradient of tied embeddings, which the first and the last stage both have."""
    return workload.model.is_tied and workload.model.labels is None and stages.is_first != stages.is_last


def tied_bytes(workload: StepWorkload, config: StepConfig) -> float:
    """Bytes of that gradient on a rank."""
    grid = workload.model.splitting_sizes(config.grid)
    rows = -(-workload.model.vocab // grid.x) / grid.shards
    dense = replace(config.state, sparsity=0.0)  # embeddings are not pruned
    return rows * workload.model.hidden / grid.y * number_bytes(workload, dense).gradient


# Messages.


class HopTimes(NamedTuple):
    """Seconds of a message between the ranks of neighbouring stages: its latency, and its bytes over the bandwidth."""

    latency: float
    transmission: float

    @property
    def whole(self) -> float:
        """From the end of the action that made it to its arrival."""
        return self.latency + self.transmission


def message_bytes(workload: StepWorkload, config: StepConfig) -> float:
    """Bytes of a micro-batch's activations, or of their gradient, that a rank sends to a neighbouring stage."""
    tokens = config.tokens(workload)
    return message_numbers(workload.model, config.grid, tokens, config.token_parts) * workload.element


def message_times(workload: StepWorkload, config: StepConfig, cluster: Cluster) -> tuple[HopTimes, ...]:
    """The times of messages from each rank of pipe to the next, and from the last to the first."""
    grid, num_bytes = config.grid, message_bytes(workload, config)
    known = {
        leaves: HopTimes(
            message_latency(cluster, leaves=leaves), num_bytes / message_rate(cluster, grid, leaves=leaves)
        )
        for leaves in {leaves_node(cluster, grid, rank) for rank in range(grid.pipe)}
    }
    return tuple(known[leaves_node(cluster, grid, rank)] for rank in range(grid.pipe))


def hop_between(messages: Sequence[HopTimes], first: int, second: int) -> HopTimes:
    """The times of a message between two neighbouring ranks of pipe, or the last and the first, in either direction."""
    last = len(messages) - 1
    return messages[last if {first, second} == {0, last} and last > 1 else min(first, second)]
