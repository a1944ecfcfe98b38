# SPDX-License-Identifier: Apache-2.0
"""`GridPlan`, and the candidates that plans are made of: one grid with its options, time and memory."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from stretto.axes import INNER_TO_OUTER, SHARDS, GridSizes
from stretto.cluster import Cluster
from stretto.execution import ReshardPolicy, StateLocation
from stretto.planner.activations import kept_activations
from stretto.planner.communication import Rates, has_nvlink_over, keys_numbers, nic_bytes, sends_latents
from stretto.planner.compute import BACKWARD_ATTENTION, Device, block_seconds
from stretto.planner.cost import Cost, full_cost, paper_cost
from stretto.planner.experts.cost import explain_messages
from stretto.planner.experts.ted import explain_memory, list_memory
from stretto.planner.explanation import explain, list_formulas
from stretto.planner.grids import divisors
from stretto.planner.memory import RING_BYTES, local_parameters, memory, peak, reserved, step_memory
from stretto.planner.optimizer_state import LOCATIONS, Formula, PinnedMemory, host_memory, host_traffic
from stretto.planner.pipeline.memory import RankMemory
from stretto.planner.search_space import StepChoice
from stretto.planner.workload import AttentionWay, StepConfig, StepWorkload
from stretto.schedules import ServeFirst

# With less than this part of its time another way replaces the default (`stretto.ops.attention.choice`).
CLEARLY_FASTER = 0.9

NAMES: dict[AttentionWay, str] = {
    "all_gather": "gathers keys",
    "ring": "passes keys around a ring",
    "ulysses": "exchanges heads (Ulysses)",
}


@dataclass(frozen=True)
class GridPlan:
    """One grid, how to run it, and what that is predicted to take.

    `terms` are the step's parts by name, in seconds: their sum is `step_time`. `bandwidth` is bytes/s by axis,
    `communication` and `exposed` seconds a step, `memory` bytes on the rank that needs most, by component at the peak:
    their sum, `peak_memory`, is what is allocated, and torch's allocator reserves `reserved_memory` for it. With
    separate optimizer state the peak may come before the first step; `step_memory` has the components of a step.

    `kept_activations` is bytes of what all blocks keep between the passes, `activations_on_host` those of it that are
    in pinned host memory (recompute="host"); `host_memory` is that and optimizer state, of a rank, and
    `host_memory_of_node` of all ranks of a node. `host_traffic` is bytes to the device and to the host in a step, of
    optimizer state. `formulas` say what memory is made of.

    With several pipeline stages, schedule and the fields after it say how they run. `stages` are the cuts: stage s has
    the blocks stages[s]:stages[s + 1]. `bubble` is how long the rank that computes most waits in a step although
    messages took no time, `message_time` the time of a rank's messages, hidden or not, and `exposed["pipe"]` how much
    they lengthen the step by. `live_micro_batches` are those that each stage of the rank that needs most keeps.
    `is_replayed` says that the whole schedule was simulated, in place of a closed form. `attention_way`: of attention
    over context (`choose_way`).

    `host_time` is the host's seconds a step to launch all blocks (None: the cluster does not say it). `is_host_bound`
    says that the GPU waits for that.

    `nic_bytes` is what each network interface of a node sends in a step, in bytes by kind of collective, for kinds that
    reach other nodes.

    `documents`, of packed ones: `share`, of a whole row's products of attention; and over context `balance`, `own`,
    `busiest`, `held` and `held_of_step` (`documents.ContextShare`).

    `why` says why it is not the first, or not possible. `notes`, the same for every plan, say what `parallelize` has
    against the model, what is taken for granted, and what was not tried.
    """

    grid: Mapping[str, int]
    micro_batch: int
    reshard: ReshardPolicy
    shard_sequence: bool
    bandwidth: Mapping[str, float | None]
    communication: Mapping[str, float]
    exposed: Mapping[str, float]
    compute_time: float | None
    step_time: float
    terms: Mapping[str, float]
    memory: Mapping[str, float]
    fits: bool
    is_possible: bool
    why: str
    notes: tuple[str, ...] = ()
    recompute: str = "none"
    kept_activations: float = 0.0
    activations_on_host: float = 0.0
    host_memory: float = 0.0
    host_memory_of_node: float = 0.0
    optimizer_state: StateLocation = "fp32"
    step_memory: Mapping[str, float] = field(default_factory=dict)
    host_traffic: Mapping[str, float] = field(default_factory=dict)
    formulas: tuple[Formula, ...] = ()
    schedule: str | None = None
    virtual_stages: int = 1
    extra_warm_up: int = 0
    limit: int | None = None
    serve_first: ServeFirst | None = None
    stages: tuple[int, ...] = ()
    bubble: float = 0.0
    message_time: float = 0.0
    live_micro_batches: tuple[int, ...] = ()
    is_replayed: bool = False
    host_time: float | None = None
    is_host_bound: bool = False
    nic_bytes: Mapping[str, float] = field(default_factory=dict)
    attention_way: AttentionWay | None = None
    documents: Mapping[str, float] = field(default_factory=dict)

    @property
    def peak_memory(self) -> float:
        """Bytes that are allocated at the peak."""
        return peak(self.memory)

    @property
    def reserved_memory(self) -> float:
        """Bytes that torch's allocator takes from the device: what is allocated at the peak, and fragmentation."""
        return reserved(self.peak_memory)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        formulas = [formula._asdict() for formula in self.formulas]
        return vars(self) | {
            "peak_memory": self.peak_memory,
            "reserved_memory": self.reserved_memory,
            "formulas": formulas,
        }


@dataclass(frozen=True)
class ChosenWay:
    """The way that attention over context takes, and the predicted seconds of a step by each that calls may take.

    Calls choose by themselves (`implementation="auto"` of `stretto.ops.context_attention`): this predicts it by their
    rules, the first of the ways that fit, unless another one is clearly faster.
    """

    way: AttentionWay
    seconds: Mapping[AttentionWay, float]

    def explain(self) -> str:
        reasons = [
            f"{round(1e3 * (seconds - self.seconds[self.way]), 3):+.3g} ms a step if it {NAMES[way]}"
            for way, seconds in self.seconds.items()
            if way != self.way
        ]
        if "all_gather" not in self.seconds:
            reasons.append(f"gathered keys would take more than {RING_BYTES >> 30} GiB a layer")
        return f"attention over context {NAMES[self.way]}" + (f" ({', '.join(reasons)})" if reasons else "")


@dataclass(frozen=True)
class Candidate:
    """A grid with its options, and what that is predicted to take. worst: of a pipeline, the rank that needs most.
    attention: the way of attention over context."""

    config: StepConfig
    cost: Cost
    memory: Mapping[str, float]
    host: PinnedMemory
    fits: bool
    impossible: str | None
    copies: int
    worst: RankMemory | None = None
    attention: ChosenWay | None = None

    @property
    def rank(self) -> tuple[Any, ...]:
        """Sort key: what can run comes first, then what fits, then no ranks that compute the same,
        then the fastest; then who
        computes nothing twice."""
        config, sizes = self.config, self.config.grid
        order = (
            config.options.recomputation.is_on,
            not config.options.keeps_weights,
            config.options.shard_sequence,
            LOCATIONS.index(config.state.location),
            -config.micro_batch,
        )
        layout = tuple(sizes[axis] for axis in INNER_TO_OUTER)
        return (
            self.impossible is not None,
            not self.fits,
            self.copies > 1,
            rounded(self.cost.step_time),
            order,
            peak(self.memory),
            layout,
        )

    @property
    def rank_on_its_grid(self) -> tuple[Any, ...]:
        """If nothing fits, the nearest candidate: a plan must not recommend options that were found insufficient."""
        return (self.impossible is not None, not self.fits, 0.0 if self.fits else peak(self.memory), self.rank)

    def settles(self, choice: StepChoice, micro_batch: int) -> bool:
        """True if a choice with micro-batches of at most this size cannot be faster: this one's are as large, and it
        computes or sends no more often."""
        is_as_large = self.fits and micro_batch <= self.config.micro_batch
        return is_as_large and choice.repeats_as_much_as(StepChoice(self.config.options, self.config.state))


def list_ways(workload: StepWorkload, config: StepConfig) -> tuple[AttentionWay, ...]:
    """The ways that all layers may take, the default first; none without context."""
    model, ranks = workload.model, config.grid.context
    if ranks == 1:
        return ()
    grid, tokens = model.splitting_sizes(config.grid), config.tokens(workload)
    whole = max(keys_numbers(kind.model, grid, tokens) for kind in model.kinds) * ranks / (ranks - 1)
    layers = [layer for kind in model.kinds for layer in kind.model.block if layer.exchanged_keys(grid)]
    ways: list[AttentionWay] = ["all_gather"] if whole * workload.element <= RING_BYTES else []
    ways.append("ring")
    if layers and all(layer.exchanged_heads(grid) for layer in layers):
        ways.append("ulysses")
    return tuple(ways) if workload.documents is None else tuple(ways[:1])  # as calls with documents choose


def choose_way(
    workload: StepWorkload, config: StepConfig, device: Device, find_cost: Callable[[StepConfig], Cost]
) -> tuple[StepConfig, ChosenWay | None]:
    """The config with the way that calls will take, and why; None where there is no choice: without context, and of
    latents that travel. find_cost: of a config with a way."""
    has_nvlink, model = has_nvlink_over(device.cluster, config.grid, "context"), workload.model
    ways = list_ways(workload, config)
    if not ways or sends_latents(workload, config, has_nvlink=has_nvlink):
        return config, None
    costs = {way: find_cost(replace(config, attention_way=way)) for way in ways}
    seconds = {way: cost.step_time for way, cost in costs.items()}
    # Calls compare what they take themselves: their products, and what these do not hide.
    scores = sum(count * block_seconds(workload, kind, config, device).attention for count, kind in model.kinds)
    scores *= (1 + BACKWARD_ATTENTION) * config.micro_batches(workload) / config.grid.pipe
    best, default, least = min(ways, key=seconds.__getitem__), ways[0], min(seconds.values())
    is_clearly_faster = scores < CLEARLY_FASTER * (scores + seconds[default] - least)
    way = best if is_clearly_faster else default
    return replace(config, attention_way=way), ChosenWay(way, seconds)


def judge(
    workload: StepWorkload,
    config: StepConfig,
    cluster: Cluster,
    device: Device | None,
    rates: Rates,
    limit: float,
    micro_batch: int | None,
    impossible: str | None,
    others: Sequence[Candidate] = (),
) -> Candidate | None:
    """Judge a config with its best micro-batch: the largest that fits, since fewer are never slower.

    None if another candidate of the same grid shows that this one is slower.
    """
    local = workload.batch // config.grid.batch_parts
    if impossible is None and micro_batch is not None and local % micro_batch:
        impossible = f"a micro-batch of {micro_batch} does not divide the {local} sequences of a rank"
    tokens = replace(config, micro_batch=micro_batch or local).tokens(workload)
    if impossible is None and tokens % config.token_parts:
        impossible = f"with shard_sequence, x={config.grid.x} does not divide a rank's {tokens} tokens at once"
    needed = cache(partial(_memory_at, workload, config, **_find_nvlink(cluster, config.grid)))
    size = micro_batch
    if size is None and impossible is None and device is None and workload.model.moe is not None:
        size = local  # the paper's model of memory has no activations
    elif size is None and impossible is None:
        size = largest_micro_batch(workload, config, limit, needed)
    config, attention = replace(config, micro_batch=size or 1), None
    choice = StepChoice(config.options, config.state)
    if any(other.settles(choice, config.micro_batch) for other in others):
        return None
    find_cost = cache(
        partial(paper_cost, workload, cluster=cluster, rates=rates)
        if device is None
        else partial(full_cost, workload, device=device, rates=rates)
    )
    if device is not None and impossible is None:  # what is held is of the default; the way itself is judged again
        config, attention = choose_way(workload, config, device, find_cost)
        needed = cache(partial(_memory_at, workload, config, **_find_nvlink(cluster, config.grid)))
    components: Mapping[str, float]
    if device is None and workload.model.moe is not None:
        components = list_memory(workload.model, config.grid)
    else:
        components = needed(config.micro_batch)
    parameters = local_parameters(workload.model, workload.model.splitting_sizes(config.grid))
    host = host_memory(workload, config, cluster, parameters, kept_activations(workload, config)[1])
    fits = impossible is None and peak(components) <= limit and host.fits
    if not fits and any(
        other.fits or (other.impossible is None and peak(other.memory) < peak(components)) for other in others
    ):
        return None
    cost = find_cost(config)
    check_finite(cost, cluster)
    copies = workload.model.copies(config.grid)
    return Candidate(config, cost, components, host, fits, impossible, copies, attention=attention)


def _memory_at(workload: StepWorkload, config: StepConfig, micro_batch: int, **nvlink: bool) -> Mapping[str, float]:
    return memory(workload, replace(config, micro_batch=micro_batch), **nvlink)


def _find_nvlink(cluster: Cluster, grid: GridSizes) -> dict[str, bool]:
    """Find what `memory` needs to know of NVLink."""
    reaches = partial(has_nvlink_over, cluster, grid)
    return {"has_nvlink": reaches(SHARDS), "joins_context": reaches("context")}


def largest_micro_batch(
    workload: StepWorkload, config: StepConfig, limit: float, needed: Callable[[int], Mapping[str, float]]
) -> int | None:
    """The largest micro-batch at which the config stays within `limit` bytes; None if none does.

    needed: `memory` of a micro-batch.
    """
    candidates = [
        size
        for size in divisors(workload.batch // config.grid.batch_parts)
        if replace(config, micro_batch=size).tokens(workload) % config.token_parts == 0
    ]

    def is_too_large(micro_batch: int) -> bool:
        return peak(needed(micro_batch)) > limit

    # Alone among them, a rank's whole part is no accumulation, which may keep more than it saves.
    if candidates and not is_too_large(candidates[-1]):
        return candidates[-1]
    fitting = bisect_left(candidates[:-1], True, key=is_too_large)
    return candidates[fitting - 1] if fitting else None


def check_finite(cost: Cost, cluster: Cluster) -> None:
    """Raise ValueError for a time that no number can be."""
    if not math.isfinite(cost.step_time):
        raise ValueError(
            f"the time predicted for cluster {cluster.name!r} is larger than any number: one of its figures is far too "
            "small"
        )


def rounded(time: float) -> float:
    """Twelve digits of a time: sums of the same terms in another order are the same time."""
    return float(f"{time:.12g}")


def to_plan(
    workload: StepWorkload,
    candidate: Candidate,
    best: Candidate,
    cluster: Cluster,
    limit: float,
    notes: tuple[str, ...],
) -> GridPlan:
    model = workload.model
    config, cost, host, worst = candidate.config, candidate.cost, candidate.host, candidate.worst
    if worst is None:
        parameters = local_parameters(model, model.splitting_sizes(config.grid))
        in_step: Mapping[str, float] = step_memory(workload, config, **_find_nvlink(cluster, config.grid))
        kept = kept_activations(workload, config)[0]
    else:
        parameters, in_step, kept = worst.parameters, worst.in_step, worst.kept
    communication = cost.communication.by_name()
    if cost.pipeline is not None:
        communication = communication | {"messages_pipe": cost.pipeline.messages}
        communication["total"] += cost.pipeline.messages
    return GridPlan(
        grid=config.grid.sizes(),
        micro_batch=config.micro_batch,
        recompute=config.options.recompute,
        kept_activations=kept,
        activations_on_host=host.activations,
        host_memory=host.of_rank,
        host_memory_of_node=host.of_node,
        optimizer_state=config.state.location,
        step_memory=in_step,
        host_traffic=host_traffic(workload, config.state).times(parameters)._asdict(),
        formulas=list_formulas(workload, config, parameters, in_step, host) + _list_expert_formulas(workload, config),
        reshard=config.options.reshard,
        shard_sequence=config.options.shard_sequence,
        bandwidth=cost.bandwidth,
        communication={kind: rounded(time) for kind, time in communication.items()},
        exposed=cost.exposed,
        compute_time=None if cost.compute is None else rounded(cost.compute.total),
        step_time=rounded(cost.step_time),
        terms=cost.terms,
        memory=candidate.memory,
        fits=candidate.fits,
        is_possible=candidate.impossible is None,
        why=candidate.impossible
        or explain(model, config, cost, candidate.memory, best.config, best.cost, limit, cluster, host)
        + (f"; {candidate.attention.explain()}" if candidate.attention is not None else "")
        + _explain_documents(workload, config),
        notes=notes,
        host_time=None if cost.launches is None else rounded(cost.launches),
        is_host_bound=cost.is_host_bound,
        nic_bytes=nic_bytes(workload, config, cluster),
        attention_way=config.attention_way,
        documents=_describe_documents(workload, config),
        **_describe_pipeline(candidate),
    )


def _describe_documents(workload: StepWorkload, config: StepConfig) -> dict[str, float]:
    packed, ranks = workload.documents, config.grid.context
    if packed is None:
        return {}
    return {"share": packed.share} | (packed.over_context(ranks)._asdict() if ranks > 1 else {})


def _explain_documents(workload: StepWorkload, config: StepConfig) -> str:
    found = _describe_documents(workload, config)
    if len(found) < 2:
        return ""
    return (
        f"; documents are cut by work: the largest of a rank of context is {found['balance']:.3f} of the mean, and "
        f"{found['busiest'] / (config.grid.context - 1):.1%} of whole rows' keys travel"
    )


def _list_expert_formulas(workload: StepWorkload, config: StepConfig) -> tuple[Formula, ...]:
    """Experts' communication, and a lower bound of their memory; empty for a dense model."""
    if workload.model.moe is None:
        return ()
    return (*explain_messages(workload, config), explain_memory(workload.model, config.grid))


def _describe_pipeline(candidate: Candidate) -> dict[str, Any]:
    """The fields of a plan that say how a pipeline runs."""
    schedule, of_pipeline, worst = candidate.config.schedule, candidate.cost.pipeline, candidate.worst
    if schedule is None or of_pipeline is None:
        return {}
    return {
        "schedule": schedule.name,
        "virtual_stages": schedule.virtual_stages,
        "extra_warm_up": schedule.extra_warm_up,
        "limit": schedule.limit,
        "serve_first": schedule.serve_first,
        "stages": of_pipeline.cuts,
        "bubble": rounded(of_pipeline.bubble),
        "message_time": rounded(of_pipeline.messages),
        "live_micro_batches": () if worst is None else worst.live,
        "is_replayed": of_pipeline.is_replayed,
    }
