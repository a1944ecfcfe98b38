# SPDX-License-Identifier: Apache-2.0
"""Searches for the fastest grid: `plan` ranks and explains every grid with its best options. Needs no GPU."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from stretto.axes import GridSizes, check_sizes
from stretto.cluster import Cluster, HostTimes
from stretto.execution import ExecutionKeywords, ExecutionOptions, Overlap, StateOptions
from stretto.planner.architecture import Architecture
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.communication import bandwidths
from stretto.planner.compute import Device
from stretto.planner.documents import read_packed
from stretto.planner.experts.search import BestTimes, best_of_each_grid, choose_expert_grids
from stretto.planner.grid_plan import Candidate, GridPlan, judge, to_plan
from stretto.planner.grids import divisors, why_impossible
from stretto.planner.memory import max_allocated
from stretto.planner.optimizer_state import check_state
from stretto.planner.pipeline.search import PipelineSearch, judge_pipeline, replay_first
from stretto.planner.pipeline.space import PipelineSpace, make_pipeline_space
from stretto.planner.search_space import (
    PIPELINE_KEYWORDS,
    CostModel,
    PredictKeywords,
    SearchKeywords,
    find_contexts,
    make_search_space,
    set_imbalance,
)
from stretto.planner.workload import MESSAGE_DRIVEN, Dtype, OptimizerName, ScheduleChoice, StepConfig, StepWorkload
from stretto.quantities import require_whole
from stretto.schedules.generators import V_SHAPED

MAX_GPUS = 1 << 20
# With more grids of a model with experts than this, grids whose lower bound is slower than the tenth plan are skipped.
MAX_WITH_EXPERTS = 100


def plan(
    model: Any,
    cluster: Cluster | str,
    *,
    gpus: int | None = None,
    batch: int,
    seq_len: int,
    cost: CostModel = "full",
    dtype: Dtype = "bf16",
    optimizer: OptimizerName = "adamw",
    micro_batch: int | None = None,
    **search: Unpack[SearchKeywords],
) -> list[GridPlan]:
    """Rank every grid of `gpus` for training `model` on `cluster`: grids that fit first, in order of step time.

    model: a name (gpt-5b, say), a GPTConfig, a path (TOML, or Hugging Face's config.json), or a model with a config.
    gpus: ranks (default: the whole cluster). batch: global, in sequences of seq_len tokens.
    cost: "full" predicts whole steps: computation and communication, with latency and overlap. "paper" counts only the
        linears' collectives (Singh, equations 5.1 to 5.7): step_time is their total.
    micro_batch: sequences of a rank in one forward pass (default: searched).
    search: recompute, reshard, shard_sequence, overlaps, state, memory, clips, context, documents, experts
        and pipelines (`SearchKeywords`).

    Returns a plan for every factorization; impossible grids come last, with the reason. With more than 200 grids with
    several pipeline stages, grids that cannot be among the first ten are skipped; a note states how many. Raises
    ValueError for invalid input, for a cluster that lacks a required value, and if no grid can divide the model's sizes
    and the batch.
    """
    asked: dict[str, Any] = {**search}
    machine = find_cluster(cluster, captured=asked.pop("captured", False))
    architecture = set_imbalance(read_architecture(model, seq_len), asked.pop("imbalance", None))
    documents = read_packed(asked.pop("documents", None), seq_len)
    workload = StepWorkload(architecture, batch, seq_len, documents, dtype=dtype, optimizer=optimizer)
    _check_cost(cost)
    ranks = _check_gpus(machine, gpus)
    micro_batch = None if micro_batch is None else _check_micro_batch(micro_batch, batch)
    try:
        device = Device(machine, dtype) if cost == "full" else None
    except ValueError as error:
        raise ValueError(f"{error}; --cost paper (cost='paper') ranks grids only by communication") from None
    limit = max_allocated(machine.require("gpu.memory"))
    of_pipelines = {name: asked.pop(name, None) for name in PIPELINE_KEYWORDS}
    pipelines = make_pipeline_space(architecture, ranks, **of_pipelines)
    contexts = find_contexts(asked.pop("context", None), seq_len, ranks)
    space = replace(make_search_space(workload, machine, cost, **asked), contexts=contexts)
    _check_expert(space.expert, ranks)
    _check_sharding(False not in space.shardings, architecture, cost, pipelines.pipes)

    candidates, left_out = list[Candidate](), list[str]()
    searched = PipelineSearch(workload, machine, device, space, pipelines, limit, micro_batch)
    if 1 in pipelines.pipes:
        candidates, left_out = _search_grids(searched, ranks)
    if pipelines.pipes != (1,):
        found, more_left_out = searched.search_all(ranks, candidates)
        candidates, left_out = candidates + found, left_out + more_left_out
    if all(candidate.impossible is not None for candidate in candidates):
        most, shards = machine.gpus or MAX_GPUS, False not in space.shardings
        reasons = [candidate.impossible for candidate in candidates]
        raise ValueError(_nothing_possible(workload, ranks, reasons, most, micro_batch, shards, pipelines))
    candidates.sort(key=lambda candidate: candidate.rank)
    candidates = replay_first(candidates, workload, machine, device, limit)
    notes = _notes(workload, space.states)
    if len(space.shardings) > 1:
        notes += _note_sharding(workload, candidates[0], machine, device, limit)
    notes += (*space.notes, *left_out)
    notes += _note_imbalance(workload, candidates[0].config, machine, device, limit)
    return [to_plan(workload, each, candidates[0], machine, limit, notes) for each in candidates]


def _search_grids(searched: PipelineSearch, ranks: int) -> tuple[list[Candidate], list[str]]:
    """The best candidate of each grid without pipeline stages, and notes on those that were left out: of many grids
    with ways to divide experts, the slow ones."""
    workload, grids = searched.workload, list(searched.space.every_grid(ranks))
    if workload.model.moe is None or len(grids) <= MAX_WITH_EXPERTS:
        found = []
        for grid in grids:
            ways = choose_expert_grids(workload, searched.cluster, searched.space, grid)
            of_grid = [each for way, impossible in ways for each in _judge_choices(searched, way, impossible)]
            found.append(min(of_grid, key=lambda candidate: candidate.rank_on_its_grid))
        return found, []
    possible = [grid for grid in grids if why_impossible(workload.model, grid, workload.batch) is None]
    times, found = BestTimes(searched.listed), []
    for bound, grid in searched.in_order(possible, times):
        if math.isinf(bound) and found:
            break
        best = min(_judge_choices(searched, grid, None), key=lambda candidate: candidate.rank_on_its_grid)
        times.note(best)
        found.append(best)
    found = best_of_each_grid(found)
    if not found:  # none is possible
        return [
            candidate for grid in grids[:1] for candidate in _judge_choices(searched, grid, _why(workload, grids))
        ], []
    left = len(grids) - len(found)
    note = (
        f"{left:,} of {len(grids):,} grids without pipeline stages were left out: they cannot run, do not fit, or take "
        f"longer than plan {searched.listed}"
    )
    return found, [note] if left else []


def _why(workload: StepWorkload, grids: Sequence[GridSizes]) -> str:
    """The reason why none of these grids is possible."""
    reasons = (why_impossible(workload.model, grid, workload.batch) for grid in grids)
    return "; ".join(list(dict.fromkeys(filter(None, reasons)))[:3])


def _judge_choices(searched: PipelineSearch, grid: GridSizes, impossible: str | None) -> list[Candidate]:
    """A candidate for each choice of the search's space on a grid."""
    workload, cluster, space = searched.workload, searched.cluster, searched.space
    rates, judged = bandwidths(cluster, grid), list[Candidate]()
    for choice in space.list_choices(grid):
        if any(candidate.settles(choice, workload.batch // grid.batch_parts) for candidate in judged):
            continue
        config = StepConfig(grid, 1, choice.options, choice.state, space.clips)
        device, limit, size = searched.device, searched.limit, searched.micro_batch
        made = judge(workload, config, cluster, device, rates, limit, size, impossible, judged)
        judged += [made] if made is not None else []
        if impossible is not None:  # what does least is the fastest, and there is nothing to be gained by more
            break
    return judged


def predict(
    model: Any,
    cluster: Cluster | str,
    *,
    grid: Mapping[str, int],
    batch: int,
    seq_len: int,
    micro_batch: int | None = None,
    dtype: Dtype = "bf16",
    optimizer: OptimizerName = "adamw",
    cost: CostModel = "full",
    options: ExecutionOptions | None = None,
    state: StateOptions | None = None,
    clips: bool = True,
    **changes: Unpack[PredictKeywords],
) -> GridPlan:
    """Predict one grid (sizes by axis, 1 where one is absent) that runs with these options.

    options: how the step executes (default: `ExecutionOptions()`). changes: some of them by name (`PredictKeywords`).
    state: where optimizer state is stored (default: `StateOptions()`). clips: whether gradients are clipped.

    Raises ValueError like `plan`, and when the grid cannot run the model.
    """
    _check_cost(cost)
    asked: dict[str, Any] = {**changes}
    cluster = find_cluster(cluster, captured=asked.pop("captured", False))
    if not isinstance(grid, Mapping):
        raise ValueError(f"grid is {grid!r}, but must be a mapping of axes to sizes, such as {{'x': 2, 'z': 4}}")
    architecture = set_imbalance(read_architecture(model, seq_len), asked.pop("imbalance", None))
    documents = read_packed(asked.pop("documents", None), seq_len)
    of_schedule = {name: asked.pop(name, None) for name in PIPELINE_KEYWORDS[1:]}
    options = _change(options or ExecutionOptions(), **asked)
    dtype = dtype if options.fp8 is None else "fp8"
    workload = StepWorkload(architecture, batch, seq_len, documents, dtype=dtype, optimizer=optimizer)
    sizes = check_sizes(grid)
    find_contexts(sizes.context, seq_len, sizes.ranks)
    _check_sharding(options.shard_sequence, workload.model, cost, (sizes.pipe,))
    options.recomputation.check_blocks(workload.model.layers)
    state = state or StateOptions()
    check_state(workload, options, state)
    if impossible := why_impossible(workload.model, sizes, batch):
        raise ValueError(f"the grid {sizes} cannot run {workload.model.name}: {impossible}")
    size = _check_micro_batch(micro_batch or batch // sizes.batch_parts, batch)
    schedule = _choose_schedule(sizes.pipe, options, PipelineSpace(**of_schedule))
    config = StepConfig(sizes, size, options, state, clips, schedule)
    device = Device(cluster, dtype) if cost == "full" else None
    limit = max_allocated(cluster.require("gpu.memory"))
    only = _judge(workload, config, cluster, device, limit)
    if only.impossible is not None:
        raise ValueError(f"the grid {sizes} cannot run {workload.model.name}: {only.impossible}")
    notes = _notes(workload, [state]) + _note_imbalance(workload, config, cluster, device, limit)
    return to_plan(workload, only, only, cluster, limit, notes)


def _judge(
    workload: StepWorkload, config: StepConfig, cluster: Cluster, device: Device | None, limit: float
) -> Candidate:
    if config.schedule is not None:
        return judge_pipeline(workload, config, cluster, device, limit)
    rates = bandwidths(cluster, config.grid)
    only = judge(workload, config, cluster, device, rates, limit, config.micro_batch, None)
    assert only is not None
    return only


def _choose_schedule(pipe: int, options: ExecutionOptions, asked: PipelineSpace) -> ScheduleChoice | None:
    """The schedule of a grid's pipeline, 1f1b by default; None without several stages. ValueError for bad options."""
    if pipe == 1:
        for name in ("schedule", "virtual_stages", "limit"):
            if (value := getattr(asked, name)) is not None:
                raise ValueError(f"{name} is {value!r}, but the grid has one pipeline stage; pipe=2 has two")
        return None
    virtual = asked.virtual_stages or (options.stages.virtual_stages if options.stages.virtual_stages > 1 else None)
    name = asked.schedule or ("1f1b" if virtual in (None, 1) else "interleaved")
    replace(asked, schedule=name, virtual_stages=virtual).check()
    if name == MESSAGE_DRIVEN:
        return ScheduleChoice(name, virtual or 1, 0, asked.limit or pipe, asked.serve_first or "backward")
    fewest = 2 if name in (*V_SHAPED, "interleaved") else 1
    return ScheduleChoice(name, virtual or fewest, asked.extra_warm_up or 0)


def _change(
    options: ExecutionOptions,
    *,
    overlaps: bool | None = None,
    copy_engines: bool | None = None,
    **changes: Unpack[ExecutionKeywords],
) -> ExecutionOptions:
    options = options.replace(**changes)
    if overlaps is not None:
        switches = replace(Overlap.parse(overlaps), copy_engines=options.overlap.copy_engines)
        options = options.replace(overlap=switches)
    if copy_engines is not None:
        options = options.replace(overlap=replace(options.overlap, copy_engines=copy_engines))
    return options


def _notes(workload: StepWorkload, states: Sequence[StateOptions]) -> tuple[str, ...]:
    model, seq_len = workload.model, workload.seq_len
    notes = [*model.notes, *([] if workload.documents is None else [workload.documents.describe()])]
    if model.positions and seq_len > model.positions:
        notes.append(f"{model.name} has {model.positions} positions, fewer than a sequence's {seq_len} tokens")
    if any(state.location == "host" and state.step_on != "device" for state in states):
        notes.append(
            "step_on=host: for an optimizer step on the host, only the time of copies is predicted, and not the time "
            "of computation; step_on=auto is predicted as a step on the device"
        )
    return tuple(notes)


def _note_imbalance(
    workload: StepWorkload, config: StepConfig, cluster: Cluster, device: Device | None, limit: float
) -> tuple[str, ...]:
    """Count what a step on this grid takes longer because the busiest rank of experts has more rows than the others."""
    shape = workload.model.moe
    if shape is None or device is None or config.grid.expert == 1 or shape.imbalance == 1:
        return ()
    even = replace(workload, model=set_imbalance(workload.model, 1.0))
    found, balanced = (_judge(each, config, cluster, device, limit).cost.step_time for each in (workload, even))
    return (
        f"{config.grid}: the busiest rank of experts has {shape.imbalance:g} times the mean's rows (imbalance), which "
        f"makes a step {found - balanced:.3g} s ({found / balanced - 1:.1%}) longer than even loads would",
    )


def _note_sharding(
    workload: StepWorkload, best: Candidate, cluster: Cluster, device: Device | None, limit: float
) -> tuple[str, ...]:
    """Time and memory of the best plan with shard_sequence and without."""
    config, is_whole = best.config, workload.model.shards_tokens_of_blocks and best.config.grid.pipe > 1
    if config.grid.x == 1 or is_whole:
        return ()
    options = config.options.replace(shard_sequence=not config.options.shard_sequence)
    other = _judge(workload, replace(config, options=options), cluster, device, limit)
    if other.impossible is not None:
        return ()
    found, beside = (
        f"{each.cost.step_time:.4g} s and {sum(each.memory.values()) / 1e9:.3g} GB" for each in (best, other)
    )
    with_it, without = ("with", "without") if config.options.shard_sequence else ("without", "with")
    return (f"{config.grid}: a step takes {found} {with_it} shard_sequence, and {beside} {without}",)


def _check_expert(expert: int | None, ranks: int) -> None:
    """Raise ValueError for ranks of experts that no grid of this size has."""
    if expert is not None and ranks % expert:
        near = min(divisors(ranks), key=lambda n: (abs(n - expert), -n))
        raise ValueError(f"expert is {expert}, which does not divide {ranks} GPUs; {near} would do")


def _check_cost(cost: str) -> None:
    if cost not in ("paper", "full"):
        more = "; stretto.simulator.training.plan_simulated simulates the best few" if cost == "simulated" else ""
        raise ValueError(f"cost is {cost!r}, but must be 'paper' or 'full'{more}")


def _check_sharding(shards: bool, model: Architecture, cost: str, pipes: tuple[int, ...]) -> None:
    if shards and cost == "paper":
        raise ValueError("shard_sequence is a choice of cost='full': the paper's model does not know it")
    if shards and not model.takes_sharded_sequence:
        raise ValueError(
            f"{model.name} does not take shard_sequence: its code has not been shown to work on a part of the tokens "
            "between blocks; that of stretto.models.GPT, Llama, Qwen3 and others has"
        )
    if shards and model.shards_tokens_of_blocks and pipes != (1,):
        raise ValueError(
            f"{model.name} does not take shard_sequence in a pipeline, but pipe is {', '.join(map(str, pipes))}; "
            "pipe=1 would do"
        )


def find_cluster(cluster: object, *, captured: bool) -> Cluster:
    """The cluster itself, or that of a preset's name or of a file. Raises ValueError for anything else.

    captured: a graph launches whole steps, which takes the host no time.
    """
    if isinstance(cluster, str):
        cluster = Cluster.find(cluster)
    if isinstance(cluster, Cluster):
        return replace(cluster, host=HostTimes()) if captured else cluster
    raise ValueError(f"cluster is {cluster!r}, but must be a Cluster, the name of a preset, or the path of a file")


def _check_gpus(cluster: Cluster, gpus: int | None) -> int:
    if gpus is None:
        if cluster.gpus is None:
            raise ValueError(f"cluster {cluster.name!r} does not say how many nodes it has: say how many gpus to use")
        return cluster.gpus
    gpus = require_whole("gpus", gpus, 1, MAX_GPUS)
    if cluster.gpus is not None and gpus > cluster.gpus:
        raise ValueError(f"{gpus} GPUs are more than cluster {cluster.name!r} has: {cluster.gpus}")
    return gpus


def _check_micro_batch(micro_batch: int, batch: int) -> int:
    return require_whole("micro_batch", micro_batch, 1, batch, rest=", the batch")


def _nothing_possible(
    workload: StepWorkload,
    ranks: int,
    reasons: Sequence[str | None],
    most: int,
    micro_batch: int | None,
    shards: bool,
    pipelines: PipelineSpace,
) -> str:
    """Say why the model fits on no grid of `ranks`, and the nearest number of GPUs, up to `most`, on which it fits."""
    if 1 not in pipelines.pipes:
        stages = ", ".join(map(str, pipelines.pipes))
        why = "; ".join(list(dict.fromkeys(filter(None, reasons)))[:3]) or "no number of stages can"
        return (
            f"no grid of {ranks} GPUs with pipe={stages} can run {workload.model.name} with a batch of "
            f"{workload.batch}: {why}"
        )
    first = "; ".join(list(dict.fromkeys(filter(None, reasons)))[:3])
    near = [n for n in _possible_numbers(workload, micro_batch, shards) if n <= most]
    nearest = min(near, key=lambda n: (abs(n - ranks), -n), default=None)
    return (
        f"no grid of {ranks} GPUs can hold {workload.model.name} with a batch of {workload.batch}: {first}; "
        f"{'no number of' if nearest is None else nearest} GPUs would do"
    )


def _possible_numbers(workload: StepWorkload, micro_batch: int | None, shards: bool) -> set[int]:
    """Every number of GPUs that some grid can be made of: with z=1, for data parts the batch without further rules."""
    model, batch = workload.model, workload.batch
    parts = [n for n in divisors(batch) if micro_batch is None or batch // n % micro_batch == 0]
    linears = [linear for kind in model.kinds for linear in kind.model.linears if not linear.keeps_outputs_whole]
    linears = [linear for linear in linears if not linear.shared]  # of which x may hold copies
    cut_by_x = math.gcd(*(linear.inputs if linear.is_rowwise else linear.units for linear in linears))
    numbers: set[int] = set()
    for x, y in itertools.product(divisors(cut_by_x), divisors(model.hidden)):
        if why_impossible(model, GridSizes(x=x, y=y), batch) is None:
            tokens = {n: (micro_batch or batch // n) * workload.seq_len for n in parts}
            numbers |= {x * y * n for n in parts if not shards or tokens[n] % x == 0}
    return numbers
