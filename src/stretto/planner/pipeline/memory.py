# SPDX-License-Identifier: Apache-2.0
"""Predicts the memory of a pipeline's ranks: a stage's for one micro-batch, and the activations of the others.

A rank has the parameters of its stages, the first one the embeddings, the last one the head and the last norm; tied
embeddings are on both. It needs what a rank without a pipeline would need for its blocks (`step_memory`), and beside it
what its blocks keep of every other micro-batch that is live: between its forward pass on a stage and the end of its
backward pass there. With full checkpointing of every `ac` blocks that is N / (G_inter ac) inputs a micro-batch, and
`ac` blocks while they are computed again (Singh, equation 3.1, with its bracket corrected).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.axes import SHARDS, GridSizes
from stretto.cluster import Cluster
from stretto.execution import MESSAGE_RINGS_BYTES, MESSAGE_SLOT_BYTES, MESSAGE_SLOTS
from stretto.planner.activations import recomputed_blocks
from stretto.planner.architecture import Architecture
from stretto.planner.communication import has_nvlink_over, message_numbers
from stretto.planner.grids import divisors
from stretto.planner.memory import local_parameters, peak, step_memory
from stretto.planner.optimizer_state import take_over
from stretto.planner.pipeline.stage_times import RankStages, stage_workload
from stretto.planner.workload import ScheduleChoice, StepConfig, StepWorkload

# Messages in flight in each direction, received ahead and sent.
_MESSAGES_AHEAD = 2


def count_live(schedule: ScheduleChoice, pipe: int, rank: int, micro_batches: int) -> tuple[int, ...]:
    """Return how many micro-batches each stage of a rank keeps at the moment when the rank keeps most.

    As `stretto.schedules.live_micro_batches` counts. Message-driven order keeps at most its limit, on every rank but
    the last.
    """
    count, after, stages = micro_batches, pipe - 1 - rank, schedule.virtual_stages
    match schedule.name:
        case "gpipe":
            return (count,)
        case "1f1b":
            extra = -(-schedule.extra_warm_up * after // (pipe - 1)) if pipe > 1 else schedule.extra_warm_up
            return (min(count, after + extra + 1),)
        case "interleaved":
            size = count // max(1, count // pipe)
            live = min(count * stages, (stages - 1) * size + 2 * after + 1)
            whole, rest = divmod(live, size)
            if whole < stages:
                return (*[size] * whole, rest, *[0] * (stages - whole - 1))
            return (live - size * (stages - 1), *[size] * (stages - 1))
        case "zb-h1":
            return (min(count, pipe),)
        case "zb-v" | "dualpipe-v":
            first = 2 * pipe - rank - (schedule.name == "zb-v")
            return min(count, first), min(count, rank + 1)
        case _:
            return (min(count, schedule.limit or pipe) if rank < pipe - 1 else 1,)


def count_deferred(schedule: ScheduleChoice, rank: int, micro_batches: int) -> int:
    """Count the micro-batches, over all its stages, of which a rank defers the weights' gradients at most.

    They are among the live ones. Schedules that fill bubbles with weights' gradients defer more on later ranks.
    """
    most = {"zb-h1": rank + 1, "zb-v": 2 * rank + 1, "dualpipe-v": rank + 1}.get(schedule.name, 0)
    return min(most, micro_batches * schedule.virtual_stages)


def deferred_numbers(model: Architecture, grid: GridSizes) -> float:
    """Numbers a token that one block keeps for its weights' gradients alone: inputs of linears, and the gradients of
    their outputs. Linears one after another that split their outputs take the same input. Of blocks of several kinds,
    those of the one that keeps most."""
    if model.moe is not None and model.kinds[0].model is not model:
        return max(deferred_numbers(kind.model, grid) for kind in model.kinds)
    kept, takes_same = 0.0, False
    if (layer := model.moe_layer) is not None:
        kept += layer.deferred(grid)
    for linear in model.linears:
        kept += linear.local_outputs(grid)
        if linear.is_rowwise or not takes_same:
            kept += linear.inputs / linear.input_shards(grid)
        takes_same = not linear.is_rowwise
    return kept


def checkpoint_interval(layers: int, pipe: int) -> int:
    """The blocks that full checkpointing computes again together: the factor of a stage's blocks nearest sqrt(N)."""
    root = math.sqrt(layers)
    return min(divisors(max(1, layers // pipe)), key=lambda factor: (abs(factor - root), factor))


def max_local_parameters(model: Architecture, grid: GridSizes) -> float:
    """Parameters that the rank with most of them holds: of a pipeline, of the first stage or the last."""
    if grid.pipe == 1:
        return local_parameters(model, grid)
    blocks = -(-model.layers // grid.pipe)
    moe = model.has_moe
    ends = [
        model.stage(blocks, is_first=True, is_last=False, moe_blocks=sum(moe[:blocks])),
        model.stage(blocks, is_first=False, is_last=True, moe_blocks=sum(moe[-blocks:])),
        model.stage(blocks, is_first=False, is_last=False, moe_blocks=min(blocks, sum(moe))),
    ]
    return max(local_parameters(end, grid) for end in ends)


class RankMemory(NamedTuple):
    """Memory that one rank of a pipeline needs: bytes by component at its peak, and at that of a step;
    which rank it is.

    live: micro-batches that each of its stages keeps. kept: bytes of activations that its blocks keep of all of them,
    in all and on the host.
    """

    rank: int
    stages: RankStages
    parameters: float
    live: tuple[int, ...]
    peak: Mapping[str, float]
    in_step: Mapping[str, float]
    kept: float
    kept_on_host: float


@dataclass(frozen=True)
class StageMemory:
    """Memory that a rank needs for its stages and one micro-batch, whatever its schedule.

    beginning: when fp32 parameters are taken over, by component; None where none are. between, on_host: bytes of
    activations that each stage keeps of a micro-batch, and those of them on the host. deferred: by how much what a
    micro-batch keeps on a stage, on the average, changes once the weights' gradients alone are left to be made.
    of_loss: bytes that the last stage keeps of each micro-batch from its loss to its backward pass.
    """

    parameters: float
    in_step: Mapping[str, float]
    beginning: Mapping[str, float] | None
    between: tuple[float, ...]
    on_host: tuple[float, ...]
    deferred: float
    of_loss: float

    def kept(self, live: tuple[int, ...], deferred: int) -> float:
        """Bytes of activations that all live micro-batches keep.

        The backward pass that runs makes the last of those that are deferred.
        """
        kept = sum(number * each for number, each in zip(live, self.between, strict=True))
        return kept + max(0, deferred - 1) * self.deferred


def stage_memory(
    workload: StepWorkload, config: StepConfig, stages: RankStages, cluster: Cluster | None = None
) -> StageMemory:
    """The memory of one rank's stages. config: any schedule. cluster: None for one without NVLink."""
    own, grid = stage_workload(workload, stages), workload.model.splitting_sizes(config.grid)
    tokens = config.tokens(workload)
    of_stages = [
        recomputed_blocks(
            workload.stage(blocks, is_first=False, is_last=False, moe_blocks=moe_blocks),
            grid,
            config.options.recomputation,
            config.token_parts,
        )
        for blocks, moe_blocks in zip(stages.blocks, stages.moe_blocks or [None] * len(stages.blocks), strict=True)
    ]
    num_bytes = tokens * workload.element
    has_nvlink = cluster is not None and has_nvlink_over(cluster, config.grid, SHARDS)
    joins_context = cluster is not None and has_nvlink_over(cluster, config.grid, "context")
    in_step = dict(step_memory(own, config, has_nvlink=has_nvlink, joins_context=joins_context))
    sides = (not stages.is_first) + (not stages.is_last) if len(stages.blocks) == 1 else 2
    numbers = message_numbers(workload.model, config.grid, tokens, config.token_parts)
    in_step["messages"] = sides * _MESSAGES_AHEAD * numbers * workload.element
    if cluster is not None and cluster.has_nvlink and config.grid.ranks <= cluster.gpus_per_node:
        rings = (config.grid.pipe - 1) * MESSAGE_SLOTS * MESSAGE_SLOT_BYTES
        in_step["messages"] += min(rings, MESSAGE_RINGS_BYTES)
    parameters = local_parameters(own.model, grid)
    beginning = take_over(own, config.state, parameters)
    between = tuple(each.between * num_bytes for each in of_stages)
    of_gradients = deferred_numbers(workload.model, grid) * sum(stages.blocks) * num_bytes
    return StageMemory(
        parameters,
        in_step,
        None if beginning is None else beginning | {"messages": 0.0},
        between,
        tuple(each.on_host * num_bytes for each in of_stages),
        (of_gradients - sum(between)) / len(stages.blocks),
        _kept_of_loss(own, grid, tokens) if stages.is_last else 0.0,
    )


def _kept_of_loss(own: StepWorkload, grid: GridSizes, tokens: int) -> float:
    """Bytes that a micro-batch keeps of its loss. In slices, it makes the head's gradients in the forward pass."""
    model, outputs = own.model, -(-own.model.head_outputs // grid.x)
    hidden = model.hidden / grid.y * own.element
    if model.logits == "sliced":
        return outputs * model.hidden / grid.y * own.element + 2 * hidden * tokens
    return (own.element + own.master) * model.head_outputs * tokens + hidden * tokens


def pipeline_memory(
    workload: StepWorkload,
    config: StepConfig,
    ranks: Sequence[RankStages],
    known: dict[RankStages, StageMemory] | None = None,
    cluster: Cluster | None = None,
) -> list[RankMemory]:
    """Return the memory of one rank of each kind: of the ranks with the same stages, the one that keeps most. The first
    needs most. known: what `stage_memory` has found for this grid, micro-batch and options; it is added to. cluster: as
    in `stage_memory`."""
    assert config.schedule is not None
    known = {} if known is None else known
    pipe, count = config.grid.pipe, config.micro_batches(workload)
    places: dict[RankStages, list[tuple[int, tuple[int, ...], int]]] = {}
    for rank, stages in enumerate(ranks):
        live = count_live(config.schedule, pipe, rank, count)
        places.setdefault(stages, []).append((rank, live, count_deferred(config.schedule, rank, count)))
    memories = []
    for stages, alike in places.items():
        if stages not in known:
            known[stages] = stage_memory(workload, config, stages, cluster)
        memory = known[stages]
        rank, live, deferred = max(alike, key=lambda place: memory.kept(*place[1:]))
        kept, losses = memory.kept(live, deferred), 1
        if config.schedule.name == "gpipe":  # all forward passes come first: all losses are there, and no gradients yet
            losses = live[-1]
            if not config.state.is_separate:
                one = sum(memory.between) + memory.of_loss
                kept -= min(memory.in_step["gradients"], one) if losses > 1 else 0.0
        memories.append(_rank_memory(rank, stages, live, kept, losses, memory))
    return sorted(memories, key=lambda memory: -peak(memory.peak))


def _rank_memory(
    rank: int, stages: RankStages, live: tuple[int, ...], kept: float, losses: int, memory: StageMemory
) -> RankMemory:
    on_host = sum(number * each for number, each in zip(live, memory.on_host, strict=True))
    in_step = dict(memory.in_step)
    in_step["activations"] = max(0.0, in_step["activations"] + kept - sum(memory.between))
    in_step["logits"] += (losses - 1) * memory.of_loss
    worst = in_step if memory.beginning is None else max(in_step, memory.beginning, key=peak)
    return RankMemory(rank, stages, memory.parameters, live, worst, in_step, on_host or kept, on_host)
