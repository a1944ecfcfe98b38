# SPDX-License-Identifier: Apache-2.0
"""Predicts a step of a pipeline: stages that compute micro-batches, bubbles, messages, and what each stage sums.

A step's forward and backward passes take the computation time of the rank with most work, and its bubbles. `phase_time`
has a closed form for each schedule, which ranks many; `replay` simulates the whole schedule with each stage's predicted
times (`stretto.schedules`). The closed forms are exact for equal stages and messages that take no time, if F = I = W
where the schedule splits backward passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from stretto.axes import EXPERT, NAMES
from stretto.cluster import Cluster
from stretto.planner.communication import Rates, Volume, blocks_volume, message_numbers, seconds, sum_by_axis
from stretto.planner.compute import MATMUL_EFFICIENCY, Compute, Device
from stretto.planner.cost import (
    LAUNCH_WAITS,
    PAPER_ELEMENT,
    Cost,
    PartTotals,
    PipelineCost,
    paper_expert_seconds,
    paper_terms,
)
from stretto.planner.pipeline.stage_times import (
    HopTimes,
    PipelineParts,
    RankStages,
    StageLayout,
    StepEdges,
    cut_blocks,
    edges_of_rank,
    hop_between,
    measure_parts,
    message_times,
    place_stages,
    stages_of_ranks,
    times_of_rank,
)
from stretto.planner.workload import ScheduleChoice, StepConfig, StepWorkload
from stretto.schedules import (
    PipelineSchedule,
    PipelineTimeline,
    StageCosts,
    StageLinks,
    build_schedule,
    simulate,
    simulate_message_driven,
)

# Of a schedule with more actions, a part is simulated, and the rest extrapolated from its last micro-batches.
MAX_REPLAYED = 5_000


class StagePasses(NamedTuple):
    """Seconds of the passes of each stage for one micro-batch, with its waits for collectives: F, I and W."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def of_ranks(self, ranks: Sequence[int], pipe: int) -> tuple[list[float], list[float], list[float]]:
        sums = [[0.0] * pipe for _ in self]
        for total, each in zip(sums, self, strict=True):
            for stage, rank in enumerate(ranks):
                total[rank] += each[stage]
        return sums[0], sums[1], sums[2]


@dataclass(frozen=True)
class PipelineEstimate:
    """All that the time of a step follows from, for any schedule of one grid, micro-batch and number of stages.

    edges: of each kind of ranks, by its stages. messages: from each rank of pipe to the next.
    """

    config: StepConfig
    micro_batches: int
    parts: PipelineParts
    layout: StageLayout
    ranks: tuple[RankStages, ...]
    passes: StagePasses
    edges: dict[RankStages, StepEdges]
    messages: tuple[HopTimes, ...]

    @property
    def schedule(self) -> ScheduleChoice:
        assert self.config.schedule is not None
        return self.config.schedule


def estimate(
    workload: StepWorkload,
    config: StepConfig,
    device: Device,
    rates: Rates,
    parts: PipelineParts | None = None,
    known_edges: dict[RankStages, StepEdges] | None = None,
) -> PipelineEstimate:
    """Predict the times of a config's stages.

    parts, known_edges: of the same grid, micro-batch and options, where they are known already; edges are added to.
    """
    assert config.schedule is not None
    schedule, pipe = config.schedule, config.grid.pipe
    parts = parts or measure_parts(workload, config, device, rates)
    placed = place_stages(schedule, pipe)
    cuts = config.options.stages.cuts
    whole = (0, *cuts, workload.model.layers) if cuts is not None else cut_blocks(parts, len(placed))
    layout = StageLayout(whole, placed, workload.model.has_moe)
    ranks = tuple(stages_of_ranks(layout, pipe))
    last = len(placed) - 1
    kinds = [layout.stages((stage,), is_first=stage == 0, is_last=stage == last) for stage in range(len(placed))]
    known = {kind: times_of_rank(parts, kind) for kind in set(kinds)}
    stages = [known[kind] for kind in kinds]
    passes = StagePasses(
        tuple(each.forward.whole for each in stages),
        tuple(each.backward.whole - each.weight_gradients for each in stages),
        tuple(each.weight_gradients for each in stages),
    )
    known_edges = {} if known_edges is None else known_edges
    edges = {}
    for kind in dict.fromkeys(ranks):
        together = kind.together
        if together not in known_edges:
            known_edges[together] = edges_of_rank(workload, config, device, rates, parts, together)
        edges[kind] = known_edges[together]
    messages = message_times(workload, config, device.cluster)
    return PipelineEstimate(config, config.micro_batches(workload), parts, layout, ranks, passes, edges, messages)


def phase_time(plan: PipelineEstimate, *, has_messages: bool = True) -> float:
    """Seconds from the first forward pass to the last backward pass, by the schedule's closed form.

    Where messages take time, micro-batches go round more slowly the fewer are in flight: a stage waits for as many as
    it may have, whose forward and backward passes and messages follow one another.
    """
    schedule, count, pipe = plan.schedule, plan.micro_batches, plan.config.grid.pipe
    forward, inputs, weights = plan.passes.of_ranks(plan.layout.ranks, pipe)
    backward = [i + w for i, w in zip(inputs, weights, strict=True)]
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    total, most = sum(work), max(work)
    mean_f, mean_i, mean_w = sum(forward) / pipe, sum(inputs) / pipe, sum(weights) / pipe
    hops = 2 * sum(message.whole for message in plan.messages[:-1]) if has_messages else 0.0
    busiest = max((message.transmission for message in plan.messages), default=0.0) if has_messages else 0.0
    missing, stages = max(0, pipe - count), schedule.virtual_stages
    match schedule.name:
        case "gpipe":
            passes = sum(forward) + sum(backward) + hops
            return passes + (count - 1) * (max(*forward, busiest) + max(*backward, busiest))
        case "interleaved":
            wrapped = 2 * plan.messages[-1].whole * (stages - 1) if has_messages else 0.0
            bubble = ((pipe - 1) / stages + (stages - 1) / stages * missing) * (total / pipe)
            return count * max(most, stages * busiest) + bubble + stages * hops + wrapped
        case "zb-h1":
            bubble = (pipe - 1) * max(mean_f + mean_i - mean_w, mean_f, mean_i)
            return count * max(most, busiest) + bubble + missing * min(mean_f, mean_i, mean_w) + 2 * hops
        case "zb-v":
            bubble = (pipe - 1) * max(mean_i - mean_w, mean_i / 2, mean_f / 2)
            fill = max(0, 2 * pipe - 1 - count) * mean_f
            return count * max(most, 2 * busiest) + max(bubble, fill) + 2 * hops
        case "dualpipe-v":
            bubble = (pipe - 1) * max(mean_f + mean_i - mean_w, mean_f, mean_i) / 2
            uneven = max(0.0, mean_i - mean_f) * max(0.0, pipe / 2 - 1)
            return count * max(most, 2 * busiest) + bubble + uneven + 3 * hops
        case _:  # 1f1b, and message-driven order
            flying = min(count, schedule.limit or pipe + schedule.extra_warm_up)
            once = total + hops
            period = max(most, busiest, once / flying if flying < count else 0.0)
            return once + (count - 1) * period


@lru_cache(maxsize=64)
def _built(name: str, pipe: int, micro_batches: int, virtual_stages: int, extra_warm_up: int) -> PipelineSchedule:
    return build_schedule(name, pipe, micro_batches, virtual_stages, extra_warm_up)


class ReplayedPhase(NamedTuple):
    """Seconds of a simulated phase, and how long before its end each rank has ended its own last action."""

    time: float
    slack: tuple[float, ...]


def replay(plan: PipelineEstimate, *, has_messages: bool = True) -> ReplayedPhase:
    """Simulate the schedule with the predicted times of each stage."""
    schedule, pipe, count = plan.schedule, plan.config.grid.pipe, plan.micro_batches
    actions = (3 if plan.schedule.name.startswith(("zb", "dual")) else 2) * len(plan.layout.ranks)
    least = 8 * pipe + 2 * (schedule.limit or schedule.extra_warm_up)
    part = max(least, MAX_REPLAYED // actions) // pipe * pipe
    if count <= part + pipe:
        return _simulate(plan, count, has_messages)
    before, last = _simulate(plan, part - pipe, has_messages), _simulate(plan, part, has_messages)
    return ReplayedPhase(last.time + (count - part) / pipe * (last.time - before.time), last.slack)


def _simulate(plan: PipelineEstimate, count: int, has_messages: bool) -> ReplayedPhase:
    timeline = simulate_schedule(plan, count, has_messages=has_messages)
    makespan = timeline.makespan
    return ReplayedPhase(makespan, tuple(makespan - ends[-1] for ends in timeline.ends))


def simulate_schedule(plan: PipelineEstimate, count: int, *, has_messages: bool = True) -> PipelineTimeline:
    """Simulate the schedule of so many micro-batches with the predicted times of each stage."""
    schedule, pipe = plan.schedule, plan.config.grid.pipe
    links = None
    if has_messages:
        between = [hop_between(plan.messages, *pair) for pair in pairwise(plan.layout.ranks)]
        links = StageLinks(tuple(each.latency for each in between), tuple(each.transmission for each in between))
    costs = StageCosts(*plan.passes)
    if schedule.is_message_driven:
        return simulate_message_driven(
            count, costs, links, limit=schedule.limit, serve_first=schedule.serve_first or "backward"
        )
    return simulate(_built(schedule.name, pipe, count, schedule.virtual_stages, schedule.extra_warm_up), costs, links)


def pipeline_cost(plan: PipelineEstimate, rates: Rates, *, replays: bool = False) -> Cost:
    """The predicted time of a step, and its parts. replays: simulate the schedule, in place of its closed form."""
    config, count, pipe = plan.config, plan.micro_batches, plan.config.grid.pipe
    slack = (0.0,) * pipe
    if replays:
        replayed, alone = replay(plan), replay(plan, has_messages=False).time
        phase, slack = replayed.time, replayed.slack
    else:
        phase, alone = phase_time(plan), phase_time(plan, has_messages=False)
    alone = min(alone, phase)
    times = {kind: times_of_rank(plan.parts, kind) for kind in plan.edges}
    busiest = max(times, key=lambda kind: times[kind].whole)
    most = times[busiest]
    clips = config.clips or not config.state.is_separate
    ends = [plan.edges[kind] for kind in plan.ranks]
    # The optimizer waits for the norm of all stages' gradients, if they are clipped.
    last = max(range(pipe), key=lambda rank: ends[rank].sums - slack[rank] + (0.0 if clips else ends[rank].optimizer))
    optimizer = max(each.optimizer for each in ends) if clips else ends[last].optimizer
    sums = max(0.0, ends[last].sums - slack[last])
    share = sums / ends[last].sums if ends[last].sums else 0.0
    gather = max(each.gather for each in plan.edges.values())
    passes = most.forward.plus(most.backward)
    exposed = dict.fromkeys(NAMES, 0.0)
    exposed["x"] = count * (passes.x - passes.hidden_x)
    exposed["y"] = count * (passes.y - passes.hidden_y)
    exposed["context"] = count * (passes.context - passes.hidden_context)
    exposed["z"] = count * (passes.z - passes.hidden_z) + gather + share * ends[last].scatter
    exposed["data"] = share * ends[last].data
    exposed["pipe"] = phase - alone + share * ends[last].tie
    if passes.expert:
        exposed[EXPERT] = count * passes.expert
    bubble = alone - count * most.whole
    sent_messages = (2 if pipe > 2 else 1) * len(busiest.blocks) * count
    hop = max((each.whole for each in plan.messages[: max(1, pipe - 1)]), default=0.0)
    terms = {"computation": count * passes.computation, "the optimizer": optimizer, "pipeline bubbles": bubble}
    terms |= {f"exposed communication over {axis}": time for axis, time in exposed.items()}
    terms["slower computation beside communication"] = count * passes.slowed
    if passes.host:
        terms["waits of the host for counts of rows"] = count * passes.host
    if waits := most.forward.launch_waits + most.backward.launch_waits:
        terms[LAUNCH_WAITS] = count * waits
    gathers, again = config.weight_gathers(count)
    sent = Volume(
        gathers * most.forward.gathered + again * most.backward.gathered,
        config.gradient_scatters(count) * most.scatter,
        count * passes.y,
        count * passes.x,
        plan.edges[busiest].data_sent,
        count * passes.expert,
        count * passes.context,
    )
    work = Compute(count * most.forward.computation, count * most.backward.computation, 0.0, optimizer)
    return Cost(
        terms,
        rates,
        sent,
        exposed,
        work,
        PipelineCost(plan.layout.cuts, bubble, sent_messages * hop, phase, replays),
        count * passes.launches or None,
    )


def estimate_evenly(workload: StepWorkload, config: StepConfig, cluster: Cluster) -> PipelineEstimate:
    """Stages of equally many blocks, of which no time is predicted, as the paper has them."""
    assert config.schedule is not None
    pattern, pipe = workload.model.has_moe, config.grid.pipe
    nothing = PipelineParts((PartTotals(),), pattern, PartTotals(), PartTotals())
    placed = place_stages(config.schedule, pipe)
    cuts = config.options.stages.cuts
    layers = workload.model.layers
    whole = (0, *cuts, layers) if cuts is not None else cut_blocks(nothing, len(placed))
    layout = StageLayout(whole, placed, pattern)
    ranks = tuple(stages_of_ranks(layout, pipe))
    zeros = (0.0,) * len(placed)
    edges = dict.fromkeys(ranks, StepEdges(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    messages = message_times(workload, config, cluster)
    count = config.micro_batches(workload)
    return PipelineEstimate(config, count, nothing, layout, ranks, StagePasses(zeros, zeros, zeros), edges, messages)


# Seconds of a message, over those that its bytes take at a node's whole network bandwidth. Fitted to section 3.3.2:
# 46.08 and 34.05 s of the pipeline phase with 24 and 6 stages, of 12B parameters on 48 GPUs of Summit, give 3.9 ms for
# each message of 4.6 MB. All that lengthens the phase in proportion to the number of stages is in it.
PAPER_MESSAGE_FACTOR = 21.0


def paper_pipeline_cost(workload: StepWorkload, plan: PipelineEstimate, cluster: Cluster, rates: Rates) -> Cost:
    """Equations 5.1 to 5.7 for a stage's blocks, and equations 4.7 and 4.10 for bubbles and messages.

    t_f + t_b of equation 4.7 are the FLOPs of one micro-batch in all stages, at the rate of large products. Raises
    ValueError for a cluster that does not say that rate.
    """
    config, pipe = plan.config, plan.config.grid.pipe
    grid, model = config.grid, workload.model
    blocks, moe_blocks = max((sum(stages.blocks), sum(stages.moe_blocks)) for stages in plan.ranks)
    gathers = 1 if config.options.keeps_weights else 2
    stage = workload.stage(blocks, is_first=False, is_last=False, moe_blocks=moe_blocks)
    volume = blocks_volume(
        stage.model, grid, workload.tokens / grid.replicas, PAPER_ELEMENT, gathers=gathers, documents=workload.documents
    )
    times = seconds(volume, rates, grid) + paper_expert_seconds(stage, config, cluster, gathers)
    terms = paper_terms(times)
    rate = getattr(cluster.gpu.empirical_flops, workload.dtype) or MATMUL_EFFICIENCY * cluster.require(
        f"gpu.peak_flops.{workload.dtype}"
    )
    tokens = config.tokens(workload)
    products = model.active_weights + model.head_outputs * model.hidden
    sizes = model.splitting_sizes(grid)
    passes = 4 if config.options.recomputation.is_on else 3
    whole = passes * 2 * products * tokens / (sizes.x * sizes.y) / rate
    network = cluster.inter_node_bandwidth or cluster.require("in_node.bandwidth")
    num_bytes = message_numbers(model, grid, tokens, config.token_parts) * PAPER_ELEMENT
    messages = 4 * plan.micro_batches * PAPER_MESSAGE_FACTOR * num_bytes / network
    bubble = whole * (1 - 1 / pipe)
    terms |= {"pipeline bubbles": bubble, "messages between stages": messages}
    exposed = sum_by_axis(times.by_name()) | {"pipe": messages}
    return Cost(terms, rates, times, exposed, None, PipelineCost(plan.layout.cuts, bubble, messages, 0.0))
