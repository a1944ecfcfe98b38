# SPDX-License-Identifier: Apache-2.0
"""The options among which `plan` searches: those of execution, and the location of optimizer state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict, Unpack, get_args

from stretto.axes import ExpertTensor, GridSizes
from stretto.cluster import Cluster
from stretto.execution import (
    ExecutionKeywords,
    ExecutionOptions,
    Overlap,
    Recomputation,
    ReshardPolicy,
    StateOptions,
    TwoLevel,
)
from stretto.planner.activations import activations_of_a_block
from stretto.planner.architecture import Architecture
from stretto.planner.documents import PackedDocuments
from stretto.planner.grids import divisors, every_grid, list_expert_grids
from stretto.planner.optimizer_state import LOCATIONS, check_state, host_link
from stretto.planner.workload import StepWorkload
from stretto.quantities import require_whole
from stretto.schedules import ServeFirst
from stretto.suggestions import require_one_of

CostModel = Literal["paper", "full"]
Documents = Sequence[int] | str | Path | PackedDocuments | None


class FixedKeywords(TypedDict, total=False):
    """Options of a search that hold for all choices, as `SearchKeywords` has them."""

    expert: int | None
    expert_tensor: ExpertTensor | None
    drop_duplicates: bool
    two_level: TwoLevel


class SearchKeywords(FixedKeywords, total=False):
    """Search space of `plan`, as keyword arguments.

    recompute, reshard: fixed where given; searched where not or None, recompute among "none" and "full", and reshard
        among "after_backward" and "after_forward" (the paper's model keeps weights gathered: Algorithm 3).
    shard_sequence: of the full model: whether tokens are sharded over x between blocks where x > 1
        (`parallelize(shard_sequence=True)`); searched where not or None, for models that take it.
    overlaps: of the full model: whether collectives are hidden (`parallelize(overlap=...)`; default: True).
    state: where optimizer state is stored (default: `StateOptions()`, with fp32 parameters).
    memory: "auto" searches modes of recomputation where `recompute` is not given ("host" is none of them, since the
        time of its copies is not predicted), and all locations of optimizer state where `state` is not given, for the
        fastest choice that fits GPU and host.
    context: ranks that each sequence is cut among, or "auto" to search them (default: 1; searched for sequences of
        32,768 tokens and more).
    documents: lengths of the documents that sequences pack, which attention keeps apart: some lengths in tokens, the
        path of a file of them (`documents.read_lengths`), "pile" for the long-tailed ones of The Pile, or a sample of
        rows (`documents.PackedDocuments`) (default: one document a sequence).
    expert: ranks that divide a model's experts (default: searched, among all that fold out of data, then z).
    expert_tensor: what ranks of x do to experts, "cut" or "fold" (default: searched).
    imbalance: rows of the busiest rank of experts over the mean (default: `expert_layers.IMBALANCE`).
    drop_duplicates: whether ranks of x that cut experts send each its own part of the tokens (default: True).
    two_level: of the full model: `parallelize(two_level=...)` (default: False).
    clips: whether gradients are clipped (default: True), which prevents steps of separate optimizer state from
    beginning
        before all gradients are summed.
    captured: whether whole steps run as one CUDA graph (`stretto.parallel.CapturedStep`), so that the host has nothing
        to launch (default: False).
    pipe: ranks of the axis of pipeline stages, or "auto" to search them (default: 1).
    schedule, virtual_stages, extra_warm_up, limit, serve_first: with several pipeline stages, as `Pipeline` takes them;
        searched where not given.
    """

    recompute: str | None
    reshard: ReshardPolicy | None
    shard_sequence: bool | None
    overlaps: bool
    state: StateOptions | None
    memory: Literal["auto"] | None
    clips: bool
    imbalance: float | None
    captured: bool
    context: int | Literal["auto"] | None
    documents: Documents
    pipe: int | Literal["auto"] | None
    schedule: str | None
    virtual_stages: int | None
    extra_warm_up: int | None
    limit: int | None
    serve_first: ServeFirst | None


PIPELINE_KEYWORDS = ("pipe", "schedule", "virtual_stages", "extra_warm_up", "limit", "serve_first")


class PredictKeywords(ExecutionKeywords, total=False):
    """Options of `predict` one by one: those of ExecutionOptions, two for parts of its overlap, and a schedule's.

    schedule, virtual_stages, extra_warm_up, limit, serve_first: of a grid with several pipeline stages, as `Pipeline`
        takes them (default: 1f1b).
    imbalance, captured, documents: as of `SearchKeywords`.
    overlaps, copy_engines: `Overlap.copy_engines`, which `parallelize(overlap=False)` leaves on, and all of its others.
    """

    overlaps: bool
    copy_engines: bool
    imbalance: float | None
    captured: bool
    documents: Documents
    schedule: str
    virtual_stages: int
    extra_warm_up: int
    limit: int
    serve_first: ServeFirst


class StepChoice(NamedTuple):
    """A step's execution, and where its optimizer state is stored."""

    options: ExecutionOptions
    state: StateOptions

    def repeats_as_much_as(self, other: "StepChoice") -> bool:
        """True if this one recomputes and resends at least as much as another, and is otherwise equal."""
        mode, of_other = self.options.recomputation, other.options.recomputation
        recomputes_as_much = not of_other.is_on or self.options.recompute == other.options.recompute
        if mode.kind in ("full", "every"):
            recomputes_as_much |= of_other.kind in ("full", "every")
        frees_as_much = other.options.keeps_weights or not self.options.keeps_weights
        is_alike = (self.state, self.options.shard_sequence) == (other.state, other.options.shard_sequence)
        return is_alike and recomputes_as_much and frees_as_much


@dataclass(frozen=True)
class SearchSpace:
    """The choices among which each grid's best is searched.

    recomputes, reshards, shardings, states: the values that are tried of each option; stage_shardings: on grids with
    several pipeline stages. clips, overlaps: of all choices.
    notes: what was not tried, and why. expert, expert_tensor: of all grids; None tries all. drops_duplicates and
    two_level: of all choices. contexts: ranks that sequences are cut among.
    """

    recomputes: Sequence[str]
    reshards: Sequence[ReshardPolicy]
    shardings: Sequence[bool]
    stage_shardings: Sequence[bool]
    states: Sequence[StateOptions]
    overlaps: bool = True
    clips: bool = True
    notes: tuple[str, ...] = ()
    expert: int | None = None
    expert_tensor: ExpertTensor | None = None
    drops_duplicates: bool = True
    two_level: TwoLevel = False
    contexts: Sequence[int] = (1,)

    def every_grid(self, ranks: int, pipe: int = 1) -> Iterator[GridSizes]:
        """Every grid of these ranks; where context cuts sequences, also with weights that it shards."""
        for grid in every_grid(ranks, pipe, self.contexts):
            yield grid
            if grid.context > 1:
                yield GridSizes(**grid.sizes() | {"context_weights": "shard"})

    def list_grids(self, model: Architecture, grid: GridSizes) -> list[GridSizes]:
        """A grid with each way to divide the model's experts that is tried."""
        return list_expert_grids(model, grid, self.expert, self.expert_tensor)

    def list_choices(self, grid: GridSizes) -> Iterator[StepChoice]:
        """All choices on a grid, what computes least first."""
        shardings = self.shardings if grid.pipe == 1 else self.stage_shardings
        for reshard in self.reshards:
            for mode in self.recomputes:
                for shards in shardings if grid.x > 1 else [False]:
                    options = ExecutionOptions(
                        Overlap.parse(self.overlaps),
                        reshard,
                        mode,
                        shards,
                        drop_duplicates=self.drops_duplicates,
                        two_level=self.two_level,
                    )
                    yield from (StepChoice(options, state) for state in self.states)


def make_search_space(
    workload: StepWorkload,
    cluster: Cluster,
    cost: CostModel,
    *,
    recompute: str | None = None,
    reshard: ReshardPolicy | None = None,
    shard_sequence: bool | None = None,
    state: StateOptions | None = None,
    memory: Literal["auto"] | None = None,
    overlaps: bool = True,
    clips: bool = True,
    **fixed: Unpack[FixedKeywords],
) -> SearchSpace:
    """The space that `SearchKeywords` mean. Raises ValueError for those that contradict each other or the model."""
    if memory not in (None, "auto"):
        raise ValueError(f"memory is {memory!r}, but must be 'auto' or None")
    expert, expert_tensor = fixed.get("expert"), fixed.get("expert_tensor")
    expert = None if expert is None else require_whole("expert", expert)
    _check_experts(workload.model, expert, expert_tensor)
    layers = workload.model.layers
    if recompute is not None:
        Recomputation.parse(recompute).check_blocks(layers)
        recomputes = [recompute]
    elif memory == "auto":
        kept, own_input, _ = activations_of_a_block(workload, GridSizes())
        segment = min(range(1, layers + 1), key=lambda length: layers * own_input / length + kept * length)
        lengths = [f"every:{segment}"] if segment > 1 else []
        recomputes = ["none", "full", *lengths, "communication", "products"]  # the time of copies is not predicted
    else:
        recomputes = ["none", "full"]
    reshards: list[ReshardPolicy] = ["after_backward"] if cost == "paper" else ["after_backward", "after_forward"]
    if reshard is not None:
        reshards = [reshard]
    execution = ExecutionOptions(reshard=reshards[0])
    states, notes = [state or StateOptions()], list[str]()
    if memory == "auto" and state is None:
        states, notes = _find_states(workload, cluster, cost, execution)
        if not states:
            raise ValueError(f"memory is 'auto', but optimizer state can lie nowhere: {'; '.join(notes)}")
    for each in states:
        check_state(workload, execution, each)
    both = [False, True] if cost == "full" and workload.model.takes_sharded_sequence else [False]
    shardings = both if shard_sequence is None else [shard_sequence]
    return SearchSpace(
        recomputes,
        reshards,
        shardings,
        [False] if workload.model.shards_tokens_of_blocks else shardings,
        states,
        overlaps,
        clips,
        notes=tuple(notes),
        expert=expert,
        expert_tensor=expert_tensor,
        drops_duplicates=fixed.get("drop_duplicates", True),
        two_level=ExecutionOptions(two_level=fixed.get("two_level", False)).two_level,
    )


LONG_SEQUENCE = 32_768  # tokens of a sequence from which on `plan` searches how many ranks should cut it


def find_contexts(context: object, seq_len: int, ranks: int) -> tuple[int, ...]:
    """The sizes of context that are tried, as `SearchKeywords` says. ValueError for one that cannot be, with one that
    can: it divides the ranks, and twice it the sequence."""
    possible = tuple(size for size in divisors(ranks) if size == 1 or seq_len % (2 * size) == 0)
    if context == "auto" or (context is None and seq_len >= LONG_SEQUENCE):
        return possible
    if context is None:
        return (1,)
    context = require_whole("context", context, rest=", or 'auto'")
    if context not in possible:
        near = min(possible, key=lambda size: (abs(size - context), size))
        raise ValueError(
            f"context is {context}, but must divide the {ranks} GPUs, and 2 x context a sequence of {seq_len} tokens; "
            f"{near} would do"
        )
    return (context,)


def _check_experts(model: Architecture, expert: int | None, expert_tensor: str | None) -> None:
    """Raise ValueError for a number of ranks that cannot divide the model's experts, with one that can."""
    if expert_tensor is not None:
        require_one_of(get_args(ExpertTensor), expert_tensor=expert_tensor)
    if expert is None:
        return
    if model.moe is None and expert > 1:
        raise ValueError(f"expert is {expert}, but {model.name} has no experts that ranks divide; expert=1 would do")
    if model.moe is not None and model.moe.experts % expert:
        near = min(divisors(model.moe.experts), key=lambda n: (abs(n - expert), n))
        raise ValueError(f"expert is {expert}, which does not divide {model.moe.experts} experts; {near} would do")


def set_imbalance(model: Architecture, imbalance: float | None) -> Architecture:
    """The model with this imbalance of experts. ValueError for one below 1, which no mean is below."""
    if imbalance is None:
        return model
    if model.moe is None:
        raise ValueError(f"imbalance is {imbalance!r}, but {model.name} has no experts: leave it out")
    if isinstance(imbalance, bool) or not isinstance(imbalance, int | float) or not 1 <= imbalance <= model.moe.experts:
        raise ValueError(
            f"imbalance is {imbalance!r}, but rows of the busiest rank over the mean are from 1 to the number of "
            f"experts, {model.moe.experts}"
        )
    return replace(model, moe=replace(model.moe, imbalance=float(imbalance)))


def _find_states(
    workload: StepWorkload, cluster: Cluster, cost: CostModel, execution: ExecutionOptions
) -> tuple[list[StateOptions], list[str]]:
    """The locations of optimizer state that can be tried, and notes about those that cannot."""
    states, notes = [], []
    for location in LOCATIONS:
        options, why = StateOptions(location), None
        try:
            check_state(workload, execution, options)
            if location == "fp32" and workload.dtype == "fp16":
                why = "training in fp16 needs fp32 weights apart"
            if location == "host" and cluster.host_memory is None:
                why = f"cluster {cluster.name!r} does not say host_memory"
            elif location == "host" and cost == "full":
                host_link(cluster)
        except ValueError as error:
            why = str(error)
        if why is None:
            states.append(options)
        else:
            notes.append(f"optimizer_state={location} was not tried: {why}")
    return states, notes
