# SPDX-License-Identifier: Apache-2.0
"""Searches for the fastest grid: `plan` ranks and explains every grid with its best options. Needs no GPU."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Unpack

from stretto.axes import INNER_TO_OUTER, GridSizes
from stretto.cluster import Cluster
from stretto.execution import ExecutionKeywords, ExecutionOptions, Overlap, StateLocation, StateOptions
from stretto.planner.architecture import Architecture
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.communication import Rates, bandwidths, has_nvlink_over_z
from stretto.planner.compute import Device
from stretto.planner.cost import Cost, full_cost, paper_cost
from stretto.planner.explanation import explain, list_formulas
from stretto.planner.grids import divisors, every_grid, why_impossible
from stretto.planner.memory import (
    kept_activations,
    largest_micro_batch,
    local_parameters,
    memory,
    most_allocated,
    peak,
    reserved,
    step_memory,
)
from stretto.planner.optimizer_state import LOCATIONS, Formula, PinnedMemory, check_state, host_memory, host_traffic
from stretto.planner.search_space import (
    CostModel,
    PredictKeywords,
    SearchKeywords,
    StepChoice,
    make_search_space,
)
from stretto.planner.workload import Dtype, StepConfig, StepWorkload

MAX_GPUS = 1 << 20


@dataclass(frozen=True)
class GridPlan:
    """One grid, how to run it, and what that is predicted to take.

    `terms` are the step's parts by name, in seconds: their sum is `step_time`. `bandwidth` is bytes/s by axis,
    `communication` and `exposed` seconds a step, `memory` bytes on the rank that needs most, by component at the peak:
    their sum, `peak_memory`, is what is allocated, and torch's allocator reserves `reserved_memory` for it. With
    optimizer state apart the peak may come before the first step; `step_memory` has the components of a step.

    `kept_activations` is bytes of what all blocks keep between the passes, `activations_on_host` those of it that are
    in pinned host memory (recompute="host"); `host_memory` is that and optimizer state, of a rank, and
    `host_memory_of_node` of all ranks of a node. `host_traffic` is bytes to the device and to the host in a step, of
    optimizer state. `formulas` say what memory is made of.

    `why` says why it is not the first, or not possible. `notes`, the same for every plan, say what `parallelize` has
    against the model, what is taken for granted, and what was not tried.
    """

    grid: Mapping[str, int]
    micro_batch: int
    checkpoint_activations: bool
    keep_gathered: bool
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
class _Candidate:
    config: StepConfig
    cost: Cost
    memory: Mapping[str, float]
    host: PinnedMemory
    fits: bool
    impossible: str | None
    copies: int

    @property
    def rank(self) -> tuple[Any, ...]:
        """What can run comes first, then what fits, then no ranks that compute the same, then the fastest; then who
        computes nothing twice."""
        config, sizes = self.config, self.config.grid
        order = (
            config.options.recomputation.is_on,
            not config.options.keep_gathered,
            config.options.shard_sequence,
            LOCATIONS.index(config.state.location),
            -config.micro_batch,
        )
        layout = tuple(sizes[axis] for axis in INNER_TO_OUTER)
        return (
            self.impossible is not None,
            not self.fits,
            self.copies > 1,
            _rounded(self.cost.step_time),
            order,
            peak(self.memory),
            layout,
        )

    @property
    def rank_on_its_grid(self) -> tuple[Any, ...]:
        """Where nothing fits, what comes nearest to it: a plan must not advise what was tried and is not enough."""
        is_too_large = self.impossible is None and not self.fits
        return (not self.fits, peak(self.memory) if is_too_large else 0.0, self.rank)

    def settles(self, choice: StepChoice, workload: StepWorkload) -> bool:
        """Whether another choice cannot be faster: this one takes all of a rank's part of the batch at once, and
        computes or sends no more often."""
        takes_all = self.fits and self.config.micro_batch == workload.batch // self.config.grid.batch_parts
        return takes_all and choice.repeats_as_much_as(StepChoice(self.config.options, self.config.state))


def plan(
    model: Any,
    cluster: Cluster | str,
    *,
    gpus: int | None = None,
    batch: int,
    seq_len: int,
    cost: CostModel = "full",
    dtype: Dtype = "bf16",
    optimizer: Literal["adamw", "sgd"] = "adamw",
    micro_batch: int | None = None,
    **search: Unpack[SearchKeywords],
) -> list[GridPlan]:
    """Rank every grid of `gpus` for training `model` on `cluster`: those that fit first, the fastest of them first.

    model: a name (gpt-5b, say), a GPTConfig, a path (TOML, or Hugging Face's config.json), or a model with a config.
    gpus: ranks (default: the whole cluster). batch: global, in sequences of seq_len tokens.
    cost: "full" predicts whole steps: computation and communication, with latency and what overlap hides. "paper"
        counts the linears' collectives alone (Singh, equations 5.1 to 5.7): step_time is their total.
    micro_batch: fixed where given, otherwise searched.
    search: recompute, keep_gathered, shard_sequence, overlaps, state, memory and clips (`SearchKeywords`).

    Returns a plan for every factorization; the impossible ones, last, say why. Raises ValueError for bad input, a
    cluster without a figure that is needed, or when no grid at all can hold the model's sizes and the batch.
    """
    machine = Cluster.find(cluster) if isinstance(cluster, str) else cluster
    architecture = read_architecture(model, seq_len)
    workload = StepWorkload(architecture, batch, seq_len, dtype=dtype, optimizer=optimizer)
    _check_cost(cost)
    ranks = _check_gpus(machine, gpus)
    micro_batch = None if micro_batch is None else _check_micro_batch(micro_batch, batch)
    try:
        device = Device(machine, dtype) if cost == "full" else None
    except ValueError as error:
        raise ValueError(f"{error}; --cost paper (cost='paper') ranks grids by communication alone") from None
    limit = most_allocated(machine.require("gpu.memory"))
    space = make_search_space(workload, machine, cost, **search)
    _check_sharding(True in space.shardings, architecture, cost)

    grids = [(grid, why_impossible(architecture, grid, batch)) for grid in every_grid(ranks)]
    most, shards = machine.gpus or MAX_GPUS, False not in space.shardings
    if all(impossible for _, impossible in grids):
        reasons = [impossible for _, impossible in grids]
        raise ValueError(_nothing_possible(workload, ranks, reasons, most, micro_batch, shards))
    candidates = []
    for grid, impossible in grids:
        rates = bandwidths(machine, grid)
        judged: list[_Candidate] = []
        for choice in space.list_choices(grid):
            if space.skips_slower and any(candidate.settles(choice, workload) for candidate in judged):
                continue
            config = StepConfig(grid, 1, choice.options, choice.state, space.clips)
            judged.append(_judge(workload, config, machine, device, rates, limit, micro_batch, impossible))
            if impossible is not None:  # what does least is the fastest, and there is nothing to be gained by more
                break
        candidates.append(min(judged, key=lambda candidate: candidate.rank_on_its_grid))
    candidates.sort(key=lambda candidate: candidate.rank)
    if candidates[0].impossible is not None:
        reasons = [candidate.impossible for candidate in candidates]
        raise ValueError(_nothing_possible(workload, ranks, reasons, most, micro_batch, shards))
    notes = (*_notes(workload, space.states), *space.notes)
    return [_to_plan(workload, each, candidates[0], machine, limit, notes) for each in candidates]


def predict(
    model: Any,
    cluster: Cluster,
    *,
    grid: Mapping[str, int],
    batch: int,
    seq_len: int,
    micro_batch: int | None = None,
    dtype: Dtype = "bf16",
    optimizer: Literal["adamw", "sgd"] = "adamw",
    cost: CostModel = "full",
    options: ExecutionOptions | None = None,
    state: StateOptions | None = None,
    clips: bool = True,
    **changes: Unpack[PredictKeywords],
) -> GridPlan:
    """Predict one grid (sizes by axis, 1 where one is absent) that runs with these options.

    options: how the step executes (default: `ExecutionOptions()`). changes: some of them by name (`PredictKeywords`).
    state: where optimizer state lies (default: `StateOptions()`). clips: whether gradients are clipped.

    Raises ValueError like `plan`, and when the grid cannot run the model.
    """
    _check_cost(cost)
    workload = StepWorkload(read_architecture(model, seq_len), batch, seq_len, dtype=dtype, optimizer=optimizer)
    options = _change(options or ExecutionOptions(), **changes)
    _check_sharding(options.shard_sequence, workload.model, cost)
    options.recomputation.check_blocks(workload.model.layers)
    state = state or StateOptions()
    check_state(workload, options, state)
    sizes = GridSizes(**grid)
    if impossible := why_impossible(workload.model, sizes, batch):
        raise ValueError(f"the grid {sizes} cannot run {workload.model.name}: {impossible}")
    size = _check_micro_batch(micro_batch or batch // sizes.batch_parts, batch)
    config = StepConfig(sizes, size, options, state, clips)
    device = Device(cluster, dtype) if cost == "full" else None
    limit = most_allocated(cluster.require("gpu.memory"))
    only = _judge(workload, config, cluster, device, bandwidths(cluster, sizes), limit, size, None)
    if only.impossible is not None:
        raise ValueError(f"the grid {sizes} cannot run {workload.model.name}: {only.impossible}")
    return _to_plan(workload, only, only, cluster, limit, _notes(workload, [state]))


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


def _judge(
    workload: StepWorkload,
    config: StepConfig,
    cluster: Cluster,
    device: Device | None,
    rates: Rates,
    limit: float,
    micro_batch: int | None,
    impossible: str | None,
) -> _Candidate:
    """The config with its best micro-batch: the largest that fits, since fewer are never slower."""
    local = workload.batch // config.grid.batch_parts
    if impossible is None and micro_batch is not None and local % micro_batch:
        impossible = f"a micro-batch of {micro_batch} does not divide the {local} sequences of a rank"
    tokens = (micro_batch or local) * workload.seq_len
    if impossible is None and tokens % config.token_parts:
        impossible = f"with shard_sequence, x={config.grid.x} does not divide a rank's {tokens} tokens at once"
    has_nvlink = has_nvlink_over_z(cluster, config.grid)
    size = micro_batch
    if size is None and impossible is None:
        size = largest_micro_batch(workload, config, limit, has_nvlink=has_nvlink)
    config = replace(config, micro_batch=size or 1)
    components = memory(workload, config, has_nvlink=has_nvlink)
    parameters = local_parameters(workload.model, workload.model.splitting_sizes(config.grid))
    host = host_memory(workload, config, cluster, parameters, kept_activations(workload, config)[1])
    fits = impossible is None and peak(components) <= limit and host.fits
    cost = (
        paper_cost(workload, config, rates) if device is None else full_cost(workload, config, cluster, device, rates)
    )
    if not math.isfinite(cost.step_time):
        raise ValueError(
            f"the time predicted for cluster {cluster.name!r} is larger than any number: one of its figures is far too "
            "small"
        )
    return _Candidate(config, cost, components, host, fits, impossible, workload.model.copies(config.grid))


def _rounded(time: float) -> float:
    """Twelve digits of a time: sums of the same terms in another order are the same time."""
    return float(f"{time:.12g}")


def _notes(workload: StepWorkload, states: Sequence[StateOptions]) -> tuple[str, ...]:
    model, seq_len = workload.model, workload.seq_len
    notes = list(model.notes)
    if model.positions and seq_len > model.positions:
        notes.append(f"{model.name} has {model.positions} positions, fewer than a sequence's {seq_len} tokens")
    if any(state.location == "host" and state.step_on != "device" for state in states):
        notes.append(
            "step_on=host: of a step on the host, the time of what travels is predicted, and none for what it computes "
            "there; step_on=auto is predicted as a step on the device"
        )
    return tuple(notes)


def _to_plan(
    workload: StepWorkload,
    candidate: _Candidate,
    best: _Candidate,
    cluster: Cluster,
    limit: float,
    notes: tuple[str, ...],
) -> GridPlan:
    model = workload.model
    config, cost, host = candidate.config, candidate.cost, candidate.host
    parameters = local_parameters(model, model.splitting_sizes(config.grid))
    in_step = step_memory(workload, config, has_nvlink=has_nvlink_over_z(cluster, config.grid))
    return GridPlan(
        grid=config.grid.sizes(),
        micro_batch=config.micro_batch,
        checkpoint_activations=config.options.checkpoint_activations,
        recompute=config.options.recompute,
        kept_activations=kept_activations(workload, config)[0],
        activations_on_host=host.activations,
        host_memory=host.of_rank,
        host_memory_of_node=host.of_node,
        optimizer_state=config.state.location,
        step_memory=in_step,
        host_traffic=host_traffic(workload, config.state).times(parameters)._asdict(),
        formulas=list_formulas(workload, config, parameters, in_step, host),
        keep_gathered=config.options.keep_gathered,
        shard_sequence=config.options.shard_sequence,
        bandwidth=cost.bandwidth,
        communication={kind: _rounded(time) for kind, time in cost.communication.by_name().items()},
        exposed=cost.exposed,
        compute_time=None if cost.compute is None else _rounded(cost.compute.total),
        step_time=_rounded(cost.step_time),
        terms=cost.terms,
        memory=candidate.memory,
        fits=candidate.fits,
        is_possible=candidate.impossible is None,
        why=candidate.impossible
        or explain(model, config, cost, candidate.memory, best.config, best.cost, limit, cluster, host),
        notes=notes,
    )


def _check_cost(cost: str) -> None:
    if cost not in ("paper", "full"):
        raise ValueError(f"cost is {cost!r}, but must be 'paper' or 'full'")


def _check_sharding(shards: bool, model: Architecture, cost: str) -> None:
    if shards and cost == "paper":
        raise ValueError("shard_sequence is a choice of cost='full': the paper's model does not know it")
    if shards and not model.takes_sharded_sequence:
        raise ValueError(
            f"{model.name} does not take shard_sequence: inside attention its code takes batch size and sequence "
            "length from the input; stretto.models.GPT does"
        )


def _check_gpus(cluster: Cluster, gpus: int | None) -> int:
    if gpus is None:
        if cluster.gpus is None:
            raise ValueError(f"cluster {cluster.name!r} does not say how many nodes it has: say how many gpus to use")
        return cluster.gpus
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= MAX_GPUS:
        raise ValueError(f"gpus is {gpus!r}, but must be a whole number from 1 to {MAX_GPUS}")
    if cluster.gpus is not None and gpus > cluster.gpus:
        raise ValueError(f"{gpus} GPUs are more than cluster {cluster.name!r} has: {cluster.gpus}")
    return gpus


def _check_micro_batch(micro_batch: int, batch: int) -> int:
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or not 1 <= micro_batch <= batch:
        raise ValueError(f"micro_batch is {micro_batch!r}, but must be a whole number from 1 to the batch, {batch}")
    return micro_batch


def _nothing_possible(
    workload: StepWorkload,
    ranks: int,
    reasons: Sequence[str | None],
    most: int,
    micro_batch: int | None,
    shards: bool,
) -> str:
    """Why no grid of `ranks` can hold the model, and the nearest number of GPUs, up to `most`, that would do."""
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
    cut_by_x = math.gcd(*(linear.inputs if linear.is_rowwise else linear.units for linear in model.linears))
    numbers: set[int] = set()
    for x, y in itertools.product(divisors(cut_by_x), divisors(model.hidden)):
        if why_impossible(model, GridSizes(x=x, y=y), batch) is None:
            tokens = {n: (micro_batch or batch // n) * workload.seq_len for n in parts}
            numbers |= {x * y * n for n in parts if not shards or tokens[n] % x == 0}
    return numbers
