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
- Which data its ranks are fed, if it is not whole rows of the batch: train/gpt/task.py and train/dlrm/task.py, which
  cut the batch by train/data/sampler.py.
- What it costs, in bytes, time and memory, unless it only makes more ranks sum gradients: planner/communication.py,
  planner/cost.py, planner/compute.py and planner/memory.py; the grids that a model cannot run on: planner/grids.py.
- Type hints: the keywords of `GridSizes` here, of `Grid` (parallel/grid.py), and of `GridConfig`
  (train/config/options.py) for type checkers. At run time all three take the axes of `AXES`.
- Docs: docs/configuration.md is written anew by `python -m stretto.train.config.reference docs/configuration.md`;
  docs/parallelize.md and docs/planning.md by hand.

Today pipe, data, z, y and x exist. What the others will be:

- context: parts of a sequence. Gradients and the loss are summed over it (`sums_gradients`), but all of its ranks are
  fed from the same sequences, so the loader does not count it (not `splits_batch`).
- expert multiplies nothing: for the parameters of experts alone it takes ranks of data, then of z, never of context
  (`fold_experts`).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod


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
        "z",
        "shards what x and y leave of each weight, which is all-gathered before use; shards the batch too",
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
"""Axes in the order in which people read and write them: pipe, data, x, y, z."""
STAGE_AXES = tuple(axis.name for axis in AXES if not axis.splits_layers)
"""The axes over whose ranks one pipeline stage is laid out, from the outermost to the innermost."""
STAGE = "stage"
"""The group of all ranks of a pipeline stage; with one stage, that of all ranks."""
MESH_ORDER = tuple(axis.name for axis in sorted(AXES, key=lambda axis: axis.cuts_last))
"""The dims of a grid's DeviceMesh. DTensor applies placements in this order (docs/decisions/001)."""

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


class GridSizes(Mapping[str, int]):
    """The sizes of a grid's axes: a mapping in the order of NAMES, each size an attribute too. Immutable.

    Raises ValueError for an unknown axis.
    """

    pipe: int
    data: int
    x: int
    y: int
    z: int

    def __init__(self, data: int = 1, x: int = 1, y: int = 1, z: int = 1, pipe: int = 1, **others: int) -> None:
        given = {"pipe": pipe, "data": data, "x": x, "y": y, "z": z} | others
        _require_axes(given)
        self.__dict__.update({axis: given.get(axis, 1) for axis in NAMES})

    def __getitem__(self, axis: str) -> int:
        if axis not in NAMES:
            raise KeyError(axis)
        size: int = self.__dict__[axis]
        return size

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set: GridSizes is immutable")

    def __hash__(self) -> int:
        return hash(tuple(self.values()))

    def __str__(self) -> str:
        return name_grid(self)

    def __repr__(self) -> str:
        return "GridSizes(" + ", ".join(f"{axis}={size}" for axis, size in shown_sizes(self).items()) + ")"

    def sizes(self) -> dict[str, int]:
        """Plain data, for files."""
        return dict(self)

    @cached_property
    def stage_ranks(self) -> int:
        """How many ranks a pipeline stage has."""
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
    def replicas(self) -> int:
        """How many ranks hold each number of a weight, and sum its gradient: data's."""
        return self.over(_REPLICAS)

    @cached_property
    def weight_parts(self) -> int:
        """Into how many parts a weight is cut: x, y and z all cut it."""
        return self.over(WEIGHT_AXES)

    def preceding(self, axis: str) -> int:
        """The product of the sizes of the axes inside this one: how far apart its ranks lie (Singh, section 5.1.2)."""
        _require_axes((axis,))
        return self.over(OUTER_TO_INNER[OUTER_TO_INNER.index(axis) + 1 :])


def name_grid(sizes: Mapping[str, int]) -> str:
    """A grid's short name, "x=2 z=2": axes in the order given, those of size 1 left out; "one rank" if all are."""
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one rank"


def shown_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a message or a repr lists: all, but those of axes that split layers where they are 1."""
    return {axis: size for axis, size in sizes.items() if size > 1 or axis in STAGE_AXES}


def check_sizes(sizes: Mapping[str, int]) -> GridSizes:
    """The sizes of all axes, 1 where one is absent. ValueError for an unknown axis or a size that is not positive."""
    _require_axes(sizes)
    for axis, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"grid.{axis} is {size!r}, but must be a whole number, at least 1")
    return GridSizes(**sizes)


def group_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """How many ranks every axis and every derived group has."""
    return dict(sizes) | {name: prod(sizes[axis] for axis in over) for name, over in DERIVED_GROUPS.items()}


def axes_of(group: str) -> tuple[str, ...]:
    """The axes, from outer to inner, in which the ranks of an axis or of a derived group differ."""
    return DERIVED_GROUPS.get(group, (group,))


def parameter_axes(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The dims of the mesh that parameters live on, in MESH_ORDER: the axes of several ranks (docs/decisions/002).

    One dim at least, also on one rank. The ranks of pipe hold other parameters.
    """
    return tuple(axis for axis in MESH_ORDER if axis in STAGE_AXES and sizes[axis] > 1) or MESH_ORDER[-1:]


def fold_experts(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """How many ranks of data and of z make up a group of `ranks` that divide the experts among them.

    It takes from data first, and what is left from z. ValueError where the two do not have so many.
    """
    taken, rest = {}, ranks
    for axis in ("data", "z"):
        taken[axis] = gcd(rest, sizes[axis])
        rest //= taken[axis]
    if rest > 1:
        raise ValueError(f"data={sizes['data']} and z={sizes['z']} do not hold a group of {ranks} ranks for experts")
    return taken


def _require_axes(names: Collection[str]) -> None:
    for name in names:
        if name not in NAMES:
            raise ValueError(f"{name!r} is not an axis of a grid; the axes are {', '.join(NAMES)}")
