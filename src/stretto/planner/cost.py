# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a step by one of two cost models.

`paper`: the assumptions of Singh's dissertation. Only the linears' collectives count, at the bandwidths of section
5.1.2, with no start-up, nothing hidden and no computation: good for ranking grids, not for telling the time.

`full` adds what they omit: computation, embedding, head and norms, a start-up latency per message, and overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from stretto.cluster import Cluster
from stretto.planner.communication import MEANINGS, Rates, Volume, blocks_volume, seconds, sum_by_axis
from stretto.planner.compute import Compute, Device, step_seconds
from stretto.planner.experts.cost import expert_seconds, expert_volume
from stretto.planner.optimizer_state import exposed_sums, steps_in_chunks
from stretto.planner.step import (
    HOST,
    AwaitCollective,
    BlockRecord,
    Computation,
    EndRecord,
    GroupCollective,
    LaunchKernels,
    Pass,
    StartCollective,
    StepRecord,
    UseWeight,
    WeightCollectives,
    overlap_slowdown,
)
from stretto.planner.step_recorder import GradientBuckets, chunked_sums, record_step
from stretto.planner.workload import StepConfig, StepWorkload

PAPER_ELEMENT = 2  # bytes: the paper trains in bf16
# Copy engines use no multiprocessors: concurrently with their all-gather of 256 MB, of 0.59 ms, products took
# 0.19 ms longer, and with NCCL's, of 0.67 ms, 0.29 ms (`python -m lab backend`, 4x H200, 2026-11-26).
SLOWDOWN_BESIDE_COPIES = 0.3
LAUNCH_WAITS = "waits for the host to launch kernels"


@dataclass(frozen=True)
class PipelineCost:
    """The time that a step takes because its model is cut into stages, in seconds on the rank that computes most.

    cuts: stage s has the blocks cuts[s]:cuts[s + 1]. bubble: how long the rank would wait if messages took no time.
    messages: all messages that an inner rank sends in a step, hidden or not. is_replayed: whether the whole schedule
    was simulated, in place of a closed form. phase: all forward and backward passes, from the first to the last.
    """

    cuts: tuple[int, ...]
    bubble: float
    messages: float
    phase: float
    is_replayed: bool = False


@dataclass(frozen=True)
class Cost:
    """A step's predicted seconds. `communication` is all of it; `exposed`, by axis, what computation does not hide.

    `terms` are the parts of the step by name: their sum is its time, and explanations compare them one by one.
    `launches`: of the busiest rank's host, to launch all passes of blocks; None where the cluster does not say it.
    """

    terms: Mapping[str, float]
    bandwidth: Mapping[str, float | None]
    communication: Volume
    exposed: Mapping[str, float]
    compute: Compute | None = field(default=None)
    pipeline: "PipelineCost | None" = None
    launches: float | None = None

    @property
    def step_time(self) -> float:
        return sum(self.terms.values())

    @property
    def is_host_bound(self) -> bool:
        """True if the GPU waits for the host to launch kernels."""
        return LAUNCH_WAITS in self.terms


def paper_cost(workload: StepWorkload, config: StepConfig, cluster: Cluster, rates: Rates) -> Cost:
    """Only equations 5.1 to 5.7, with 2 bytes per element and m = batch x seq_len / G_data; and what experts
    send (section 7.3), at the same bandwidths.

    rates: the grid's `bandwidths`.
    """
    grid = config.grid
    gathers = 1 if config.options.keeps_weights else 2
    volume = blocks_volume(
        workload.model,
        grid,
        workload.tokens / grid.replicas,
        PAPER_ELEMENT,
        gathers=gathers,
        documents=workload.documents,
    )
    times = seconds(volume, rates, grid) + paper_expert_seconds(workload, config, cluster, gathers)
    return Cost(paper_terms(times), rates, times, sum_by_axis(times.by_name()))


def paper_terms(times: Volume) -> dict[str, float]:
    """The parts of a step of the paper's model, by name; all-to-alls only where there are any."""
    return {name: times.by_name()[kind] for kind, name in MEANINGS.items() if kind in times.by_name()}


def paper_expert_seconds(workload: StepWorkload, config: StepConfig, cluster: Cluster, gathers: int) -> Volume:
    """Seconds of what experts send: two all-to-alls in the forward pass and two in the backward pass, and two again
    where activations are checkpointed without keeping what collectives bring (section 7.3.2)."""
    model, grid, options = workload.model, config.grid, config.options
    if model.moe is None:
        return Volume()
    volume = expert_volume(
        model,
        grid,
        workload.tokens / grid.token_parts,
        PAPER_ELEMENT,
        options=options,
        forward_passes=2 if options.recomputation.exchanges_again else 1,
        gathers=gathers,
    )
    return expert_seconds(volume, grid, cluster)


class PassTotals(NamedTuple):
    """Seconds of a pass, or of several: computation, waits of the host, and collectives.

    x, y, context, expert: all that is sent over an axis; hidden_x, hidden_y, hidden_context: what computation hides of
    it. gathered: weights over z; gathered_by_copies: by copy engines. z: rows of a table, or, of a pipeline's passes,
    all that each sends over z, of which hidden_z is hidden. slowed: what computation loses beside what it hides.
    launches: the host's, while the GPU computes.
    """

    computation: float = 0.0
    host: float = 0.0
    x: float = 0.0
    y: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    hidden_x: float = 0.0
    hidden_y: float = 0.0
    hidden_context: float = 0.0
    gathered: float = 0.0
    gathered_by_copies: float = 0.0
    z: float = 0.0
    hidden_z: float = 0.0
    slowed: float = 0.0
    launches: float = 0.0

    def times(self, count: float) -> "PassTotals":
        return PassTotals(*[count * value for value in self])

    def plus(self, other: "PassTotals") -> "PassTotals":
        """The sum of both."""
        return PassTotals(*map(add, self, other))

    @property
    def hidden(self) -> float:
        """Seconds of communication that computation hides."""
        return self.hidden_x + self.hidden_y + self.hidden_z + self.hidden_context

    @property
    def whole(self) -> float:
        """The pass with its waits."""
        return max(self._on_device, self.launches)

    @property
    def launch_waits(self) -> float:
        """Seconds in which nothing runs, since the host has not launched it."""
        return max(0.0, self.launches - self._on_device)

    @property
    def _on_device(self) -> float:
        waits = self.host + self.x + self.y + self.z + self.context + self.expert - self.hidden
        return self.computation + waits + self.slowed


def total_pass(recorded: Pass) -> PassTotals:
    """Add up a pass: computation between a collective's start and its wait hides as much of it as it takes."""
    total = dict.fromkeys(PassTotals._fields, 0.0)
    running: dict[int, tuple[GroupCollective, float]] = {}  # and the computation since their start
    for place, step in enumerate(recorded):
        match step:
            case Computation():
                total["host" if step.stream == HOST else "computation"] += step.seconds
                if running:
                    running = {start: (each, beside + step.seconds) for start, (each, beside) in running.items()}
            case StartCollective():
                total[step.collective.axis] += step.collective.seconds
                running[place] = step.collective, 0.0
            case AwaitCollective():
                collective, beside = running.pop(step.start)
                if beside:
                    total[f"hidden_{collective.axis}"] += min(collective.seconds, beside)
            case LaunchKernels():
                total["launches"] += step.seconds
            case UseWeight() if step.gather is not None:
                total["gathered"] += step.gather.seconds
                total["gathered_by_copies"] += step.gather.seconds * step.gather.by_copy_engine
    return PassTotals(**total)


class PartTotals(NamedTuple):
    """Seconds of a block, of several, or of the modules before or after all blocks, for one micro-batch.

    backward: with recomputation. gradients: that are summed over data, in its order. weight_gradients: the computation
    of weights' gradients, a part of it. scatter: of these over z; scatter_by_copies: by copy engines. weights: in how
    many messages weights are sent. room: of a pipeline's last backward pass, what can hide sums of gradients.
    """

    forward: PassTotals = PassTotals()
    backward: PassTotals = PassTotals()
    gradients: tuple[WeightCollectives, ...] = ()
    weight_gradients: float = 0.0
    scatter: float = 0.0
    scatter_by_copies: float = 0.0
    weights: float = 0
    room: float = 0.0

    @property
    def whole(self) -> float:
        return self.forward.whole + self.backward.whole

    def plus(self, other: "PartTotals", count: int = 1) -> "PartTotals":
        """With so many of another part."""
        forward, backward = (a.plus(b.times(count)) for a, b in zip(self[:2], other[:2], strict=True))
        gradients = self.gradients + count * other.gradients
        return PartTotals(
            forward, backward, gradients, *(a + count * b for a, b in zip(self[3:], other[3:], strict=True))
        )

    def sums_of(self, ends: "PartTotals", buckets: GradientBuckets) -> tuple[int, float, float]:
        """Return how many messages sum gradients over data, and seconds of those of blocks and of those of `ends`."""
        messages, seconds = buckets.total(self.gradients)
        mine, outside = (sum([each.gradient_bytes for each in of]) for of in (self.gradients, ends.gradients))
        of_ends = seconds * outside / mine if mine else 0.0
        return messages, seconds - of_ends, of_ends


def total_block(block: BlockRecord) -> PartTotals:
    """Add up a block. Of blocks that are recomputed together, the mean."""
    backward = total_pass(block.backward)
    if block.again:
        last = 1 / block.options.recomputation.blocks if block.leaves_out_last else 0.0
        for again, part in ((block.again, 1 - last), (block.again_last, last)):
            backward = backward.plus(total_pass(again).times(part)) if part else backward
    return _total_part(total_pass(block.forward), backward, block.weight_seconds, list(block.all_weights))


def total_end(end: EndRecord) -> PartTotals:
    """Add up the modules before or after all blocks."""
    weights = [end.weight] if end.weight is not None else []
    return _total_part(total_pass(end.forward), total_pass(end.backward), 0.0, weights)


def _total_part(
    forward: PassTotals, backward: PassTotals, weight_gradients: float, weights: Sequence[WeightCollectives]
) -> PartTotals:
    scatters = [each.scatter for each in weights if each.scatter is not None]
    return PartTotals(
        forward,
        backward,
        tuple(each for each in reversed(weights) if each.sums),
        weight_gradients,
        sum(each.seconds for each in scatters),
        sum(each.seconds for each in scatters if each.by_copy_engine),
        len(weights),
    )


def full_cost(workload: StepWorkload, config: StepConfig, device: Device, rates: Rates) -> Cost:
    """Computation and communication of a step on one rank, and how much of the latter is exposed.

    rates: the grid's `bandwidths`.
    """
    record = record_step(workload, config, device, rates)
    count = record.micro_batches
    blocks, first, last = PartTotals(), total_end(record.first), total_end(record.last)
    for number, kind in record.kinds:
        blocks = blocks.plus(total_block(kind), number)
    ends = first.plus(last)  # all of what these send is waited for
    work = Compute(
        count * (blocks.forward.computation + first.forward.computation),
        count * (blocks.backward.computation + first.backward.computation),
        count * (last.forward.computation + last.backward.computation),
        step_seconds(workload, config, device),
    )
    sums, data, data_of_ends = (
        last.plus(blocks).plus(first).sums_of(ends, GradientBuckets(config, device.cluster, rates))
    )
    if config.state.is_separate:
        sums, chunk = chunked_sums(workload, config, device.cluster, rates)
        data = sums * chunk.seconds if chunk is not None else 0.0
    (gathers, again), scatters = config.weight_gathers(count), config.gradient_scatters(count)
    sent, of_ends = blocks.forward.plus(blocks.backward), ends.forward.plus(ends.backward)
    all_gather = gathers * of_ends.gathered + count * of_ends.z  # of weights, and of the rows of a table
    outside = Volume(all_gather, scatters * ends.scatter, count * of_ends.y, count * of_ends.x, data_of_ends)
    gathered = gathers * blocks.forward.gathered, again * blocks.backward.gathered
    scattered, rows = scatters * blocks.scatter, count * sent.expert
    over_x, over_y, keys = count * sent.x, count * sent.y, count * sent.context
    communication = outside + Volume(sum(gathered), scattered, over_y, over_x, data, rows, keys)
    left_gather, left_scatter, left_data = _exposed_over_z_and_data(
        record, blocks, work, gathered, scattered, data, sums
    )
    left_y, left_x = over_y - count * sent.hidden_y, over_x - count * sent.hidden_x
    left_keys = keys - count * sent.hidden_context
    left = outside + Volume(left_gather, left_scatter, left_y, left_x, left_data, rows, left_keys)
    exposed = sum_by_axis(left.by_name())
    terms = {"computation": work.total - work.optimizer, "the optimizer": work.optimizer}
    terms |= {f"exposed communication over {axis}": time for axis, time in exposed.items()}
    hidden, slowdown = communication.total - sum(exposed.values()), overlap_slowdown(record.cluster)
    by_copies = gathers * blocks.forward.gathered_by_copies + again * blocks.backward.gathered_by_copies
    by_copies = min(by_copies + scatters * blocks.scatter_by_copies, hidden)
    terms["slower computation beside communication"] = (
        slowdown * (hidden - by_copies) + min(slowdown, SLOWDOWN_BESIDE_COPIES) * by_copies
    )
    if sent.host:
        terms["waits of the host for counts of rows"] = count * sent.host
    # The host is at most as far ahead of the GPU as a step's beginning: then it has read the step before's loss.
    launches = count * sent.launches
    if (waits := launches - (sum(terms.values()) - work.optimizer)) > 0:
        terms[LAUNCH_WAITS] = waits
    return Cost(terms, rates, communication, exposed, work, launches=launches or None)


def _exposed_over_z_and_data(
    record: StepRecord,
    blocks: PartTotals,
    work: Compute,
    gathered: tuple[float, float],
    scattered: float,
    data: float,
    sums: int,
) -> tuple[float, float, float]:
    """Exposed seconds of blocks' gathered weights, of scattered gradients, and of their sums over data.

    The next weight is gathered under this linear, and weights' gradients are sent during the rest of the backward pass,
    which sums over x and y have not taken. gathered: in forward and in backward passes. sums: all-reduces of `data`.
    """
    count, overlap = record.micro_batches, record.config.options.overlap
    weights = count * blocks.weights
    room = work.backward - count * blocks.backward.hidden
    left_forward = left_over(gathered[0], work.forward * overlap.all_gather, weights)
    again, scatter = gathered[1] * overlap.all_gather, scattered * overlap.reduce_scatter
    in_last = room / count  # of which the last micro-batch's backward pass has this
    if record.config.gradient_scatters(count) == count:
        left = left_over(again + scatter, room, weights)
        share = scatter / (again + scatter) if scatter else 0.0
        left_again, left_scatter = left * (1 - share), left * share
        in_last -= (again + scatter) / count
    else:  # what is gathered again comes first, and only the last micro-batch scatters
        left_again = left_over(again, room, weights)
        in_last = max(0.0, in_last - again / count)
        left_scatter = left_over(scatter, in_last, blocks.weights)
        in_last -= scatter
    # Only the last micro-batch's backward pass can hide the sum over data, and what z sends comes first.
    left_data = left_over(data, max(0.0, in_last) * overlap.data, sums)
    if steps_in_chunks(record.workload, record.config):
        left_data = exposed_sums(left_data, data, sums, work.optimizer)
    return left_forward + left_again + gathered[1] - again, left_scatter + scattered - scatter, left_data


def left_over(time: float, room: float, parts: float) -> float:
    """The seconds that `room` does not hide: at least those of one part, the first gather or the last scatter."""
    return max(time - room, time / parts) if time else 0.0
