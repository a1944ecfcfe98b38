# SPDX-License-Identifier: Apache-2.0
"""The grid: ranks over pipe x data x context x X x Y x Z (Singh, sections 3.1 and 5.1.1), as a named DeviceMesh."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from stretto.axes import (
    BATCH,
    DERIVED_GROUPS,
    EXPERT,
    EXPERT_AXES,
    EXPERT_DATA,
    EXPERT_Z,
    LOSS,
    MESH_ORDER,
    NAMES,
    OUTER_TO_INNER,
    REPLICAS,
    SHARDS,
    STAGE,
    STAGE_AXES,
    X_COPIES,
    X_PARTS,
    ContextWeights,
    ExpertTensor,
    GridSizes,
    axes_of,
    check_sizes,
    expert_parameter_axes,
    group_sizes,
    layout_sizes,
    parameter_axes,
    shown_sizes,
)
from stretto.cluster.local_ranks import agree_on_local_rank, find_local_rank, is_rank
from stretto.counters import waiting_for
from stretto.execution import TwoLevel
from stretto.memory import group_timeout, shared_gpus
from stretto.memory.groups import check_timeout, set_timeout
from stretto.memory.shared_groups import SharedGroups
from stretto.parallel.comm.collectives import NO_GROUP

if TYPE_CHECKING:
    from stretto.parallel.comm.two_level import TwoLevels

START_LIMIT = timedelta(minutes=10)  # for ranks to import and to find each other, on a loaded machine or a cold disk

GradientReduction = Literal["sum", "mean"]
"""Reduction of the gradients of ranks that have other rows of the batch."""

_NARROWER = {LOSS: BATCH, REPLICAS: "data", SHARDS: "z"}
"""The groups of the same ranks where sequences are whole."""

_LEFT_OF = {"data": EXPERT_DATA, "z": EXPERT_Z}
"""Names of axes without the innermost ranks that expert takes."""


class Grid:
    """Arranges the ranks of a job along the axes of `stretto.axes`; x is innermost and pipe outermost:
    rank = ((((pipe * Data + data) * Context + context) * Z + z) * Y + y) * X + x.

    `data` and `z` split the batch; `context` splits each sequence; `x`, `y` and `z` split the weights; `pipe` splits
    the layers. context_weights: "copy", each rank of `context` has what x, y and z leave of a weight; "shard", it
    shards them as z does, together with z. Start the job with torchrun (or `stretto train`); a grid of one rank needs
    no launcher. Collective: every rank of the job must create the same grid.

    `expert` is the size of the expert-parallel axis of a mixture-of-experts model. It adds no ranks: for experts'
    parameters it reuses the innermost ranks of data, then ranks of z (`stretto.axes.fold_experts`). The remaining ranks
    of data and z form the axes "expert_data", whose ranks hold the same experts, and "expert_z", whose ranks shard
    these further. expert_tensor: "cut", x splits each expert's inner features (TED; Singh, section 7.1); "fold", the
    ranks of x are part of expert.

    Attributes: `mesh`, the DeviceMesh with dims named pipe, data, context, y, x, z; `parameter_mesh`, its part without
    pipe and without dims of size 1, on which this stage's parameters are; `expert_mesh`, the mesh of experts'
    parameters, without expert; `device`, this rank's torch.device; `sizes`, a mapping from axis to size, for files and
    `Grid(**sizes)`; `timeout`, the timeout of the groups, a timedelta.

    device: this rank's device (default: that of an existing process group, else a GPU if there is one, else the CPU).
    timeout: the timeout of all of the grid's groups, in seconds or as a timedelta, for their collectives and for
    kernels that wait for a peer (default: the timeout of an existing process group, else torch's). It must be longer
    than a rank may be late, for example because it compiles or saves.

    Grids share process groups: a set of ranks has one for all axes, one for sums over the batch and one for experts. An
    axis of one rank has none unless `group` is asked for it. `close` destroys those that no other grid uses. A grid
    that is garbage collected instead leaves its groups, with their threads and connections, to the next grid that needs
    the same ones: ranks collect at different times, and must destroy together.

    Raises ValueError if the product of the sizes is not the number of ranks, if `expert` does not divide data x z (or,
    with "fold", x x data x z), and for a timeout that is not positive.
    """

    def __init__(
        self,
        data: int = 1,
        x: int = 1,
        y: int = 1,
        z: int = 1,
        pipe: int = 1,
        *,
        context: int = 1,
        expert: int = 1,
        expert_tensor: ExpertTensor = "cut",
        context_weights: ContextWeights = "copy",
        device: torch.device | str | None = None,
        timeout: timedelta | float | None = None,
        **others: int,
    ) -> None:
        of_experts = {EXPERT: expert, "expert_tensor": expert_tensor, "context_weights": context_weights}
        given = {"pipe": pipe, "data": data, "context": context, "x": x, "y": y, "z": z}
        sizes = check_sizes(given | of_experts | others)
        self.sizes: Mapping[str, Any] = sizes.sizes()
        ranks = sizes.ranks
        limit = None if timeout is None else check_timeout(timeout)
        self.device = _initialize(ranks, None if device is None else torch.device(device), limit)
        if dist.get_world_size() != ranks:
            raise ValueError(mismatch(self.sizes, dist.get_world_size()))
        self._places = torch.arange(ranks, device="cpu").view([sizes[axis] for axis in OUTER_TO_INNER])
        world = dist.group.WORLD
        assert world is not None
        self.timeout = timedelta(seconds=group_timeout(world)) if limit is None else limit
        if group_timeout(world) != self.timeout.total_seconds():
            set_timeout(world, self.timeout)
        self.gradients: set[GradientReduction] = set()  # of the models on this grid; noted by `parallelize`
        self.context_layouts: set[Literal["contiguous", "zigzag", "balanced"]] = set()  # the same
        self.other_groups: dict[str, str] = {}  # the axis of groups that were made later, by their names
        self._shared: SharedGroups | None = SharedGroups()
        self.two_levels: dict[TwoLevel, TwoLevels] = {}
        self._copies_meshes: dict[int, DeviceMesh] = {}
        # Of several ranks only: layers that communicate with nobody need no group (`communicator`).
        self._groups: dict[str, dist.ProcessGroup] = {}
        single = {axis: (axis,) for axis in NAMES}
        derived = {name: sizes.axes_of(name) for name in (*DERIVED_GROUPS, SHARDS)}
        for name, over in {**single, **derived, "world": NAMES, STAGE: STAGE_AXES}.items():
            narrower = _NARROWER.get(name, name)
            if narrower != name and sizes.over(over) == sizes.over(axes_of(narrower)):
                if narrower in self._groups:
                    self._groups[name] = self._groups[narrower]
                continue
            if sizes.over(over) == 1:
                continue
            purpose = name if name in derived else "grid"
            self._groups[name] = self._make_group(name, self.partition(over), purpose)
        # torch's rules for operators on DTensors take time exponential in the mesh's dims (seconds for four, at an
        # operator's first use), so parameters live on the part of the mesh that does split something.
        self.parameter_axes = parameter_axes(sizes)
        self._parameter_places = self._places
        if sizes.context_weights == "shard":  # neighbours in the order of ranks, which are one dim, z
            at = OUTER_TO_INNER.index("context")
            self._parameter_places = self._places.flatten(at, at + 1).unsqueeze(at)
        self.parameter_mesh = self._mesh_over(
            self._parameter_places, OUTER_TO_INNER, self.parameter_axes, self._layout_groups(self.parameter_axes)
        )
        self.expert_tensor = sizes.expert_tensor
        self.expert_mesh, self.expert_axes = self.parameter_mesh, self.parameter_axes
        if sizes.expert > 1:
            self._divide_experts(sizes)
        else:
            held = {"data": EXPERT_DATA, SHARDS: EXPERT_Z}
            self._groups |= {of: self._groups[axis] for axis, of in held.items() if axis in self._groups}

    def _make_group(self, name: str, partition: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup:
        """This rank's group of a partition: the job's own where that is it, else one that grids share.

        Sums over the batch have their own purpose, so that they do not wait for weights that z gathers over the same
        ranks, and are counted apart; and so have expert and SHARDS, whose messages do not wait for others.
        """
        world = dist.group.WORLD
        assert world is not None
        if len(partition) == 1 and purpose not in (EXPERT, SHARDS):
            return world
        group = self.shared_group(partition, purpose, description=name)
        assert group is not None
        group._set_group_desc(name)  # another grid may have made it for another axis
        return group

    def partition(self, axes: Collection[str]) -> list[list[int]]:
        """The ranks that differ in these axes only, in order, for each place along all others."""
        return _rows(self._places, [OUTER_TO_INNER.index(axis) for axis in OUTER_TO_INNER if axis in axes])

    def shared_group(
        self, partition: Iterable[Sequence[int]], purpose: str, backend: str | None = None, description: str = ""
    ) -> dist.ProcessGroup | None:
        """This rank's group of a partition, for a purpose (`stretto.memory.shared_groups`), until the grid is closed.

        Collective.
        """
        shared = self.require_open()
        description = description or purpose
        return shared.get(partition, purpose, timeout=self.timeout, backend=backend, description=description)

    def _mesh_over(
        self,
        places: torch.Tensor,
        dims: Sequence[str],
        axes: Sequence[str],
        groups: list[dist.ProcessGroup] | None = None,
    ) -> DeviceMesh:
        """The mesh of these axes, in this order, over the ranks that differ from this one in them alone.

        places: the ranks, by their coordinates along `dims`. groups: those of the axes (None: the grid's).
        """
        (at,) = (places == dist.get_rank()).nonzero().tolist()
        here = places[tuple(slice(None) if axis in axes else at[dim] for dim, axis in enumerate(dims))]
        kept = [axis for axis in dims if axis in axes]
        # Contiguous: torch 2.11 derives the mesh's order from its strides, including dims of size 1.
        mesh = here.permute([kept.index(axis) for axis in axes]).contiguous()
        groups = [self.group(axis) for axis in axes] if groups is None else groups
        return DeviceMesh.from_group(groups, self.device.type, mesh, mesh_dim_names=tuple(axes))

    @cached_property
    def mesh(self) -> DeviceMesh:
        # The mesh's order is not the ranks' order. x and y may each split dim 0 of a weight, and z splits the result:
        # with z last in the mesh, plain `Shard` placements say just that. In the order of ranks x is innermost.
        return self._mesh_over(self._places, OUTER_TO_INNER, MESH_ORDER)

    def _layout_groups(self, axes: Sequence[str]) -> list[dist.ProcessGroup]:
        """The groups of the axes that layouts name, whose z are all ranks that shard weights."""
        return [self.group(SHARDS if axis == "z" else axis) for axis in axes]

    def copies_mesh(self, copies: int) -> DeviceMesh:
        """Return the mesh of parameters of which each `copies` successive ranks of x hold the same part.

        It is `parameter_mesh` with "x_parts" (left out if it is 1) and "x_copies" in place of x. Collective over all
        ranks of the job at the first call for this number.
        """
        if copies not in self._copies_meshes:
            dims = (*OUTER_TO_INNER[:-1], X_PARTS, X_COPIES)
            places = self._parameter_places.unflatten(-1, (-1, copies))
            at = self.parameter_axes.index("x")
            parts = [axis for axis in (X_PARTS, X_COPIES) if places.shape[dims.index(axis)] > 1]
            made = [self._make_group("x", _rows(places, [dims.index(axis)]), "grid") for axis in parts]
            self.other_groups |= {group.group_name: "x" for group in made}
            others = self.parameter_axes[:at], self.parameter_axes[at + 1 :]
            before, after = map(self._layout_groups, others)
            axes = (*others[0], *parts, *others[1])
            self._copies_meshes[copies] = self._mesh_over(places, dims, axes, [*before, *made, *after])
        return self._copies_meshes[copies]

    def _divide_experts(self, sizes: GridSizes) -> None:
        """Make the groups of experts' axes, and the mesh of experts' parameters of this stage."""
        shape, names = [], []
        for axis in OUTER_TO_INNER:
            inner = sizes.expert_taken.get(axis, 1)
            shape += [sizes[axis] // inner, inner]
            names += [_LEFT_OF.get(axis, axis), f"taken of {axis}"]
        taken = [name for name in names if name.startswith("taken")]
        axes = [name for name in names if name not in taken]
        order = [names.index(name) for name in (*axes, *taken)]
        whole = self._places.reshape(shape).permute(order)
        whole = whole.reshape(*(shape[dim] for dim in order[: len(axes)]), sizes.expert)
        axes.append(EXPERT)
        for axis in EXPERT_AXES:
            if whole.shape[axes.index(axis)] > 1:
                purpose = EXPERT if axis == EXPERT else "grid"
                self._groups[axis] = self._make_group(axis, _rows(whole, [axes.index(axis)]), purpose)
        self.expert_axes = expert_parameter_axes(sizes)
        self.expert_mesh = self._mesh_over(whole, axes, self.expert_axes)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this rank only in `axis`.

        For "batch" they differ in data and z, for "loss" in context too, for "stage" in all axes except pipe, for
        "world" in any axis. All axes of one rank have one group, which is made at the first call for one of them.

        axis: one of `stretto.axes.NAMES`, of its `EXPERT_AXES` or `DERIVED_GROUPS`, "stage" or "world".

        Raises ValueError for an unknown axis, and on a closed grid; so do `size` and `coordinate`.
        """
        if self.size(axis) > 1:
            return self._groups[axis]
        alone = dist.group.WORLD if self.size("world") == 1 else self.shared_group([[dist.get_rank()]], "one rank")
        assert alone is not None
        return alone

    def communicator(self, axis: str) -> dist.ProcessGroup:
        """Return `group(axis)`, for callers that send nothing where it has one rank: none is made for these."""
        return self._groups[axis] if self.size(axis) > 1 else NO_GROUP

    def group_names(self) -> dict[str, str]:
        """Map torch's names of this rank's process groups to their axes."""
        named = {self._groups[axis].group_name: axis for axis in reversed(self._groups)}
        return named | self.other_groups

    def size(self, axis: str) -> int:
        """Return the size of `axis`: pipe, data, context, x, y, z, "batch" (data x z), "loss" (data x context x z),
        "replicas" and "shards" (data x context, and z; context is with the latter where it shards weights), "stage"
        (all except pipe) or "world"."""
        self.require_open()
        if axis not in self._all_sizes:
            raise ValueError(f"{axis!r} is not an axis of a grid; there are {', '.join(self._all_sizes)}")
        return self._all_sizes[axis]

    @cached_property
    def _all_sizes(self) -> Mapping[str, int]:
        sizes = check_sizes(self.sizes)
        groups = {**group_sizes(self.sizes), STAGE: sizes.stage_ranks, "world": sizes.ranks}
        return {**self.layout_sizes, **groups}

    def coordinate(self, axis: str) -> int:
        """Return this rank's index along `axis`; along "batch", the index of its part of the global batch."""
        return self.communicator(axis).rank()

    def close(self) -> None:
        """Give back the process groups that no other grid uses. Collective: every rank must close the same grids.

        Close what uses the grid first (pipelines, say). Models on it can then neither compute nor be saved.
        """
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        if self._shared is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for levels in self.two_levels.values():
            levels.close()
        self.two_levels.clear()
        self._shared.close()
        self._shared = None
        # Until these are freed, so are not the groups' threads. torch caches meshes in many places.
        meshes = self.parameter_mesh, self.expert_mesh, self.__dict__.pop("mesh", None), *self._copies_meshes.values()
        for mesh in meshes:
            if mesh is not None:
                getattr(mesh, "_pg_registry", {}).clear()
        # A later grid of this shape has an equal mesh, for which DTensor would find what it knows of this one.
        _clear_sharding_prop_cache()
        self._groups.clear()

    def require_open(self) -> SharedGroups:
        """Raise ValueError on a closed grid; the groups that this one shares."""
        if self._shared is None:
            raise ValueError(f"{self!r} was closed, and has no process groups: make another Grid")
        return self._shared

    def __deepcopy__(self, memo: object) -> "Grid":
        return self  # a copy of a module that holds a grid is on the same one

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            f"a grid cannot be pickled (it holds process groups): keep its sizes, {self.sizes}, and make Grid(**sizes) "
            "on every rank"
        )

    @cached_property
    def layout_sizes(self) -> Mapping[str, int]:
        """The sizes of all axes that a parameter's layout may name (`stretto.axes.layout_sizes`)."""
        return layout_sizes(self.sizes)

    @cached_property
    def layout_coordinates(self) -> Mapping[str, int]:
        """This rank's places along these axes."""
        return {
            axis: self.coordinate(SHARDS if axis == "z" else axis) % size for axis, size in self.layout_sizes.items()
        }

    def __repr__(self) -> str:
        return "Grid(" + ", ".join(f"{axis}={size!r}" for axis, size in shown_sizes(self.sizes).items()) + ")"


def _rows(places: torch.Tensor, dims: Sequence[int]) -> list[list[int]]:
    """The ranks that differ in these dims only, for each place along all others."""
    last = range(places.ndim - len(dims), places.ndim)
    size = prod(places.shape[dim] for dim in dims)
    return places.movedim(list(dims), list(last)).reshape(-1, size).tolist()


def mismatch(sizes: Mapping[str, Any], ranks: int) -> str:
    """The error message for a grid that is not the size of the job."""
    product = check_sizes(sizes).ranks
    shape = " x ".join(f"{axis}={size}" for axis, size in shown_sizes(sizes).items() if axis in NAMES)
    rest = product // sizes["data"]
    hint = f"; data={ranks // rest} would do" if ranks % rest == 0 and ranks >= rest else ""
    if ranks == 1:
        hint += f"; torchrun --nproc-per-node {product} starts that many"
    return f"the grid {shape} has {product} ranks, but the job has {ranks}: they must be equal{hint}"


_joined = 0  # how often this process has made its job's process group


def _open_store(timeout: timedelta | None) -> dict[str, Any]:
    """The store, rank and size of the job, for `init_process_group`; no two groups of a job use the same keys."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=max(timeout or default_pg_timeout, START_LIMIT)))
    return {"store": dist.PrefixStore(f"stretto/{_joined}", store), "rank": rank, "world_size": world_size}


def _initialize(ranks: int, device: torch.device | None, timeout: timedelta | None) -> torch.device:
    """Join the job's process group, unless the caller has, and pick this rank's device.

    A GPU without an index is the one with this rank's number among its machine's ranks.
    """
    global _joined
    joining: dict[str, Any] = {}  # the store, rank and size, if torch's own would not do
    if is_rank() and not dist.is_initialized() and _joined:
        # The job's store keeps the addresses of the group that was destroyed, which torch would use again.
        joining = _open_store(timeout)
    if device is not None and device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device}, but a grid's ranks are on devices of type cpu or cuda")
    if device is None:
        if dist.is_initialized():
            device = torch.device("cuda" if shared_gpus.runs_on_gpus() else "cpu")
        else:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and device.index is None:
        local_rank = find_local_rank()
        if local_rank is None and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
            local_rank = agree_on_local_rank(store, dist.get_rank(), dist.get_world_size())
        elif local_rank is None and is_rank():
            joining = joining or _open_store(timeout)  # it is needed before the group exists
            local_rank = agree_on_local_rank(**joining)
        device = torch.device("cuda", shared_gpus.choose_gpu(local_rank or 0))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    backend = shared_gpus.default_backend(device.type)
    if is_rank():
        device_id = device if "nccl" in backend else None
        # Other ranks may still import what this one has imported. The grid sets the group's own limit afterwards.
        longer = None if timeout is None else max(timeout, START_LIMIT)
        with waiting_for((), "all ranks to start"):
            dist.init_process_group(backend, timeout=longer, device_id=device_id, **joining)
        _joined += 1
    elif ranks == 1:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    else:
        raise ValueError(
            f"a grid of {ranks} ranks needs {ranks} processes, and this is one alone: "
            f"start the script with `torchrun --nproc-per-node {ranks}`"
        )
    return device
