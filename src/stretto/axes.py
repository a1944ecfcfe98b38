# SPDX-License-Identifier: Apache-2.0
"""The axes of a grid of ranks: their names, their order, and the groups and meshes derived from them. No torch.

`AXES` is the one place where axes are listed. From it follow the names and their order; the process groups and device
mesh of `Grid`; the sums of gradients and of the loss; the planner's enumeration of grids; the options of a run's file;
the rows of the timeline; the axes that layouts and checkpoints know; and the checks of all of these.

To add an axis, add it to `AXES` at its place from the outermost (whose neighbours are furthest apart) to the
innermost: pipe, data, context, z, y, x. Write these by hand:

- What it does to layers: which dims of weights it splits (parallel/roles/plan.py, and parallel/roles/validation.py for
  what must be divisible), the layers that communicate over it (parallel/layers, put in place by parallel/builder.py),
  and, if it splits sequences, tokens, positions and attention (parallel/layers/token_shards.py and embedding.py there,
  models/gpt.py) and the place of a token in dropout's mask (parallel/layers/dropout.py).
- Which data its ranks are fed, if it is not whole rows of the batch: train/gpt/task.py, and for tables
  recommendation/training/task.py, which cut the batch by train/data/sampler.py.
- What it costs, in bytes, time and memory, unless it only makes more ranks sum gradients: planner/communication.py,
  planner/step_recorder.py (which collectives a layer issues over it), planner/experts/cost.py, planner/cost.py,
  planner/compute.py, planner/activations.py and planner/memory.py; the grids that a model cannot run on:
  planner/grids.py.
- Type hints: the keywords of `GridSizes` here, of `Grid` (parallel/grid.py), and of `GridConfig`
  (train/config/options.py) for type checkers. At run time all three take the axes of `AXES`.
- Docs: docs/configuration.md is written anew by `python docs/configuration.py`; docs/parallelize.md and
  docs/planning.md by hand.

expert multiplies nothing and so is none of AXES: for the parameters of experts alone it takes ranks of data, then of z,
never of context (`fold_experts`). What is left of data and z for these parameters are the axes expert_data and expert_z
(Singh, section 7.1, where z has one rank).

context_weights="shard" has ranks of context shard weights as those of z do: layouts call both together z.

The ranks of context have parts of the same sequences. Gradients and the loss are summed over it (`sums_gradients`), but
the loader does not count it (not `splits_batch`).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, log, prod
from typing import Any, Literal, get_args

from stretto.quantities import require_whole, to_whole


@dataclass(frozen=True)
class Axis:
    """One axis of a grid. `description`: what an option's documentation says of it.

    splits_batch: its ranks are fed other sequences, as the data loader has to know.
    sums_gradients: its ranks see other tokens, so gradients and the loss are summed over it.
    splits_weights: it cuts weights; the other axes hold copies of them, or other layers.
    splits_layers: its ranks hold other layers, so it is a dim of no parameter's mesh.
    cuts_last: it cuts what all other axes have left of a weight's dim 0, so it is the last dim of a DeviceMesh.
    """

    name: str
    description: str
    splits_batch: bool = False
    sums_gradients: bool = False
    splits_weights: bool = False
    splits_layers: bool = False
    cuts_last: bool = False


AXES = (
    Axis(
        "pipe",
        "pipeline stages: contiguous blocks of the model, between which activations and their gradients are sent; "
        "the outermost axis",
        splits_layers=True,
    ),
    Axis(
        "data",
        "replicas of the model, each of which trains on its part of the batch",
        splits_batch=True,
        sums_gradients=True,
    ),
    Axis(
        "context",
        "parts of each sequence, for sequences that are too long for one rank: attention exchanges keys and values",
        sums_gradients=True,
    ),
    Axis(
        "z",
        "shards each weight further than x and y, and all-gathers it before use; splits the batch too",
        splits_batch=True,
        sums_gradients=True,
        splits_weights=True,
        cuts_last=True,
    ),
    Axis(
        "y", "shards the inputs of linears (the outputs of every second one) and the hidden size", splits_weights=True
    ),
    Axis(
        "x",
        "shards the outputs of linears (the inputs of every second one), the attention heads and the vocabulary; "
        "the innermost axis",
        splits_weights=True,
    ),
)
"""All axes, from the outermost to the innermost: the order of ranks."""

OUTER_TO_INNER = tuple(axis.name for axis in AXES)
INNER_TO_OUTER = OUTER_TO_INNER[::-1]
WEIGHT_AXES = tuple(axis.name for axis in reversed(AXES) if axis.splits_weights)
NAMES = (*(axis.name for axis in AXES if not axis.splits_weights), *WEIGHT_AXES)
"""Axes in the order in which people read and write them: pipe, data, context, x, y, z."""
STAGE_AXES = tuple(axis.name for axis in AXES if not axis.splits_layers)
"""The axes over whose ranks one pipeline stage is laid out, from the outermost to the innermost."""
STAGE = "stage"
"""The group of all ranks of a pipeline stage; with one stage, that of all ranks."""
MESH_ORDER = tuple(axis.name for axis in sorted(AXES, key=lambda axis: axis.cuts_last))
"""The dims of a grid's DeviceMesh. DTensor applies placements in this order (docs/decisions/001)."""

_ALWAYS_SHOWN = tuple(axis.name for axis in AXES if axis.splits_batch or axis.splits_weights)
_LISTED = (*_ALWAYS_SHOWN, *(axis.name for axis in AXES if axis.splits_layers))
_BATCH = tuple(axis.name for axis in AXES if axis.splits_batch)
_LOSS = tuple(axis.name for axis in AXES if axis.sums_gradients)
_REPLICAS = tuple(axis for axis in _LOSS if axis not in WEIGHT_AXES)


def _derive_groups() -> dict[str, tuple[str, ...]]:
    """The groups over several axes, by name. Two that would have the same ranks are one."""
    groups = {"batch": _BATCH}
    for name, over in (("loss", _LOSS), ("replicas", _REPLICAS)):
        if len(over) > 1 and over not in groups.values():
            groups[name] = over
    return groups


def _name_group(over: tuple[str, ...]) -> str:
    return over[0] if len(over) == 1 else next(name for name, axes in DERIVED_GROUPS.items() if axes == over)


DERIVED_GROUPS: Mapping[str, tuple[str, ...]] = _derive_groups()
"""Groups of ranks that differ in several axes, besides "world", by name: the axes, from outer to inner."""
BATCH = "batch"
"""The group whose ranks are fed different sequences."""
LOSS = _name_group(_LOSS)
"""The group over which the loss is summed, and gradients of parameters that no axis of it cuts."""
REPLICAS = _name_group(_REPLICAS)
"""The group over which gradients of weights are summed: those of LOSS that cut no weight."""
SHARDS = "shards"
"""The group whose ranks shard what x and y leave of a weight, and gather it: z, and context where that shards, too."""

EXPERT, EXPERT_DATA, EXPERT_Z = "expert", "expert_data", "expert_z"
"""The axes of experts' parameters alone: the ranks that divide the experts among them; those that hold the same experts
and sum their gradients (what is left of data); and those that shard these further (what is left of z)."""
EXPERT_AXES = (EXPERT_DATA, EXPERT, EXPERT_Z)
X_PARTS, X_COPIES = "x_parts", "x_copies"
"""The dims in place of x on the mesh of parameters of which several successive ranks of x hold the same part: KV heads
that are fewer than x."""
EXPERT_DESCRIPTION = (
    "expert-parallel ranks of a mixture-of-experts model; the axis adds no ranks, but reuses ranks of data, then of z"
)
ExpertTensor = Literal["cut", "fold"]
"""The use of x for experts: "cut", its ranks cut each expert's inner features (TED; Singh, chapter 7); "fold", they
divide the experts among them, as ranks of data do."""
EXPERT_TENSOR_DESCRIPTION = (
    "how experts use the ranks of x: `cut`: x splits each expert's inner features; `fold`: the ranks of x are part of "
    "grid.expert, which must then be a multiple of x"
)

ContextWeights = Literal["copy", "shard"]
"""The use of context for weights: "copy", each rank has all that x, y and z leave of them; "shard", its ranks shard
them further, as those of z do (FSDP over context and z)."""
CONTEXT_WEIGHTS_DESCRIPTION = (
    "how ranks of context hold weights: `copy`: each has all that x, y and z leave; `shard`: they shard them further, "
    "with gradients and optimizer state, and gather them before use, as z does"
)
_DEFAULTS = {"expert_tensor": "cut", "context_weights": "copy"}
"""A grid's options other than sizes, with the values at which files and names leave them out."""
_UNSHOWN = (1, *_DEFAULTS.values())


class GridSizes(Mapping[str, int]):
    """The sizes of a grid's axes: a mapping in the order of NAMES, each size an attribute too. Immutable.

    context is among its items where it has several ranks, and so is, as the last, expert: how many ranks divide the
    experts among them.
    expert_tensor: what x is to experts. "fold" is the same as "cut" where x has one rank, and is kept as "cut" there.
    context_weights: what context is to weights; "copy" where it has one rank.

    Raises ValueError for an unknown axis. `check_sizes` checks the values.
    """

    pipe: int
    data: int
    context: int
    x: int
    y: int
    z: int
    expert: int
    expert_tensor: ExpertTensor
    context_weights: ContextWeights

    def __init__(
        self,
        data: int = 1,
        x: int = 1,
        y: int = 1,
        z: int = 1,
        pipe: int = 1,
        context: int = 1,
        expert: int = 1,
        expert_tensor: Any = "cut",  # an ExpertTensor; Any for type checkers that see GridSizes(**{axis: size})
        context_weights: Any = "copy",
        **others: int,
    ) -> None:
        given = {"pipe": pipe, "data": data, "context": context, "x": x, "y": y, "z": z} | others
        _require_axes(given)
        self.__dict__.update({axis: given.get(axis, 1) for axis in NAMES})
        self.__dict__.update({EXPERT: expert, "expert_tensor": expert_tensor if x > 1 else "cut"})
        self.__dict__["context_weights"] = context_weights if context > 1 else "copy"

    def __getitem__(self, axis: str) -> int:
        if axis not in NAMES and axis != EXPERT:
            raise KeyError(axis)
        return self.__dict__[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set: GridSizes is immutable")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GridSizes):
            return self._key == other._key
        return isinstance(other, Mapping) and self.sizes() == dict(other)

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _listed(self) -> tuple[str, ...]:
        return tuple(axis for axis in (*NAMES, EXPERT) if axis in _LISTED or self.__dict__[axis] > 1)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return *(self.__dict__[axis] for axis in NAMES), self.expert, self.expert_tensor, self.context_weights

    def __str__(self) -> str:
        return name_grid(self.sizes())

    def __repr__(self) -> str:
        shown = shown_sizes(self.sizes())
        return "GridSizes(" + ", ".join(f"{axis}={size!r}" for axis, size in shown.items()) + ")"

    def sizes(self) -> dict[str, Any]:
        """Plain data, for files and for `Grid(**sizes)`: context and expert where they are not 1, expert_tensor where
        it folds, and context_weights where context shards."""
        words = {word: self.__dict__[word] for word in _DEFAULTS}
        return dict(self) | {word: value for word, value in words.items() if value != _DEFAULTS[word]}

    @cached_property
    def stage_ranks(self) -> int:
        return self.over(STAGE_AXES)

    def over(self, axes: Collection[str]) -> int:
        """The product of these axes' sizes."""
        return prod(self[axis] for axis in axes)

    @cached_property
    def ranks(self) -> int:
        return self.over(NAMES)

    @cached_property
    def batch_parts(self) -> int:
        """Into how many parts the global batch is cut: data and z both split it."""
        return self.over(_BATCH)

    @cached_property
    def token_parts(self) -> int:
        """Into how many parts the tokens of the global batch are cut: context cuts each sequence, too."""
        return self.over(_LOSS)

    def axes_of(self, group: str) -> tuple[str, ...]:
        """The axes, from outer to inner, in which the ranks of an axis or of a derived group differ."""
        if group == SHARDS:
            return ("context", "z") if self.context_weights == "shard" else ("z",)
        over = axes_of(group)
        is_left = group == REPLICAS and self.context_weights == "shard"
        return tuple(axis for axis in over if axis != "context") if is_left else over

    @cached_property
    def replicas(self) -> int:
        """Number of ranks that hold each number of a weight, and sum its gradient: those of data, and of context unless
        it shards weights."""
        return self.over(self.axes_of(REPLICAS))

    @cached_property
    def shards(self) -> int:
        """Into how many parts SHARDS cuts what x and y leave of a weight."""
        return self.over(self.axes_of(SHARDS))

    @cached_property
    def expert_taken(self) -> dict[str, int]:
        """Numbers of ranks of data, z and x that make up a group of expert's (`fold_experts`)."""
        return fold_experts(self, self.expert, self.expert_tensor)

    @cached_property
    def expert_data(self) -> int:
        """Number of ranks that hold an expert's weight, and sum its gradient: what expert leaves of data."""
        return self.data // self.expert_taken["data"]

    @cached_property
    def expert_z(self) -> int:
        """Number of ranks that shard what expert, x and y leave of experts' weights: what expert leaves of z. Where no
        ranks divide the experts, they are weights as all others."""
        return self.shards if self.expert == 1 else self.z // self.expert_taken["z"]

    @cached_property
    def expert_x(self) -> int:
        """Into how many parts x cuts each expert: x, or 1 where x folds into expert."""
        return self.x // self.expert_taken["x"]

    @cached_property
    def weight_parts(self) -> int:
        """Into how many parts a weight is cut: x, y and SHARDS all cut it."""
        return self.x * self.y * self.shards

    def preceding(self, axis: str) -> int:
        """The product of the sizes of the axes inside this one: how far apart its ranks lie (Singh, section 5.1.2)."""
        if axis not in self._preceding:
            _require_axes((axis,))
        return self._preceding[axis]

    @cached_property
    def _preceding(self) -> dict[str, int]:
        return {axis: self.over(OUTER_TO_INNER[place + 1 :]) for place, axis in enumerate(OUTER_TO_INNER)}


def name_grid(sizes: Mapping[str, Any]) -> str:
    """A grid's short name, "x=2 z=2": axes in the order given, those of size 1 left out; "one rank" if all are."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in _UNSHOWN) or "one rank"


def shown_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a message or a repr lists: all, but those of axes that split layers, sequences or experts, where
    they are 1; and words that are not the usual ones."""
    return {axis: size for axis, size in sizes.items() if axis in _ALWAYS_SHOWN or size not in _UNSHOWN}


def check_sizes(sizes: Mapping[str, Any]) -> GridSizes:
    """The sizes of all axes, 1 where one is absent; expert, expert_tensor and context_weights may be among them.

    Raises ValueError for an unknown axis, a size that is not positive, and an expert for which data, z (and x, where it
    folds) do not have the ranks.
    """
    sizes = {axis: to_whole(size) for axis, size in sizes.items()}
    numbers = {axis: size for axis, size in sizes.items() if axis not in _DEFAULTS}
    _require_axes([axis for axis in numbers if axis != EXPERT])
    for axis, size in numbers.items():
        require_whole(f"grid.{axis}", size)
    for word, choices in (("expert_tensor", get_args(ExpertTensor)), ("context_weights", get_args(ContextWeights))):
        if sizes.get(word, choices[0]) not in choices:
            raise ValueError(f"grid.{word} is {sizes[word]!r}, but must be {' or '.join(map(repr, choices))}")
    checked = GridSizes(**sizes)
    _ = checked.expert_taken
    return checked


def group_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes in ranks of every axis and every derived group; expert too, where there is any."""
    own = sizes if isinstance(sizes, GridSizes) else GridSizes(**sizes)
    groups = {name: own.over(own.axes_of(name)) for name in (*DERIVED_GROUPS, SHARDS)}
    return {axis: own[axis] for axis in (*NAMES, EXPERT)} | groups


def layout_sizes(sizes: Mapping[str, Any]) -> dict[str, int]:
    """Sizes in ranks of the axes that a parameter's layout may name: all axes, and those of experts. z are SHARDS."""
    own = sizes if isinstance(sizes, GridSizes) else check_sizes(sizes)
    of_experts = {EXPERT_DATA: own.expert_data, EXPERT: own.expert, EXPERT_Z: own.expert_z}
    shards = {"context": own.context * own.z // own.shards, "z": own.shards}
    return {axis: own[axis] for axis in NAMES} | shards | of_experts


def axes_of(group: str) -> tuple[str, ...]:
    """The axes, from outer to inner, in which the ranks of an axis or of a derived group differ."""
    return DERIVED_GROUPS.get(group, (group,))


def parameter_axes(sizes: GridSizes) -> tuple[str, ...]:
    """The dims of the mesh that parameters live on, in MESH_ORDER: the axes of several ranks (docs/decisions/002).

    One dim at least, also on one rank. The ranks of pipe hold other parameters. z are SHARDS.
    """
    known = layout_sizes(sizes)
    return tuple(axis for axis in MESH_ORDER if axis in STAGE_AXES and known[axis] > 1) or MESH_ORDER[-1:]


def expert_parameter_axes(sizes: GridSizes) -> tuple[str, ...]:
    """The dims of the mesh that experts' parameters live on, where several ranks divide the experts.

    expert_z cuts what all others have left, and so is the last. x is a dim unless it folds into expert.
    """
    folds = sizes.expert_tensor == "fold"
    others = [
        axis for axis in MESH_ORDER if axis in STAGE_AXES and axis not in ("data", "z") and (axis, folds) != ("x", True)
    ]
    known = layout_sizes(sizes) | {"context": sizes.context}  # which holds copies of experts that ranks divide
    return tuple(axis for axis in (EXPERT_DATA, *others, EXPERT, EXPERT_Z) if known[axis] > 1)


def fold_experts(sizes: Mapping[str, int], ranks: int, expert_tensor: ExpertTensor = "cut") -> dict[str, int]:
    """Find how many ranks of data, of z and of x make up a group of `ranks` that divide the experts among them.

    It takes all of x first, if that folds; then from data; and what is left from z: the innermost ranks of each. Raises
    ValueError, with the nearest number that would do, where these do not have so many.
    """
    folds = expert_tensor == "fold"
    taken, rest = {"x": sizes["x"] if folds else 1}, ranks
    if rest % taken["x"]:
        near = _nearest_expert(sizes, ranks, taken["x"])
        raise ValueError(
            f"expert is {ranks}, but x={sizes['x']} folds into it (expert_tensor='fold'), so it must be a multiple of "
            f"x; expert={near} would do, or expert_tensor='cut'"
        )
    rest //= taken["x"]
    for axis in ("data", "z"):
        taken[axis] = gcd(rest, sizes[axis])
        rest //= taken[axis]
    if rest > 1:
        near = _nearest_expert(sizes, ranks, taken["x"])
        held = " and ".join(f"{axis}={sizes[axis]}" for axis in ("data", "z", *["x"] * folds))
        raise ValueError(
            f"{held} do not hold a group of {ranks} ranks for experts: expert must divide their product; "
            f"expert={near} would do"
        )
    return taken


def _nearest_expert(sizes: Mapping[str, int], wanted: int, of_x: int) -> int:
    """Find the size of expert closest to this one among those that data and z can hold beside `of_x` ranks of x."""
    ranks = sizes["data"] * sizes["z"]
    fitting = (of_x * each for each in range(1, ranks + 1) if ranks % each == 0)
    return min(fitting, key=lambda size: (abs(log(size / wanted)), size))


def _require_axes(names: Collection[str]) -> None:
    for name in names:
        if name not in NAMES:
            raise ValueError(f"{name!r} is not an axis of a grid; the axes are {', '.join(NAMES)}")
