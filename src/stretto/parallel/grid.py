# SPDX-License-Identifier: Apache-2.0
"""The grid: ranks laid out over pipe x data x X x Y x Z (Singh, sections 3.1 and 5.1.1), as a named DeviceMesh."""

from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from stretto.axes import (
    DERIVED_GROUPS,
    EXPERT,
    EXPERT_AXES,
    EXPERT_DATA,
    EXPERT_Z,
    MESH_ORDER,
    NAMES,
    OUTER_TO_INNER,
    STAGE,
    STAGE_AXES,
    ExpertTensor,
    GridSizes,
    check_sizes,
    expert_parameter_axes,
    layout_sizes,
    parameter_axes,
    shown_sizes,
)
from stretto.cluster.local_ranks import agree_on_local_rank, find_local_rank, is_rank
from stretto.memory import group_timeout, shared_gpus
from stretto.memory.groups import check_timeout, set_timeout

GradientReduction = Literal["sum", "mean"]
"""What becomes of the gradients of ranks that have other rows of the batch."""


class Grid:
    """Arranges the ranks of a job along the axes of `stretto.axes`; x is innermost and pipe outermost:
    rank = (((pipe * Data + data) * Z + z) * Y + y) * X + x.

    `data` and `z` split the batch; `x`, `y` and `z` split the weights; `pipe` splits the layers. Start the job with
    torchrun (or `stretto train`); a grid of one rank needs no launcher. Collective: every rank of the job must create
    the same grid.

    `expert` is the size of the expert-parallel axis of a mixture-of-experts model. It adds no ranks: for experts'
    parameters it reuses the innermost ranks of data, then ranks of z (`stretto.axes.fold_experts`). The remaining ranks
    of data and z form the axes "expert_data", whose ranks hold the same experts, and "expert_z", whose ranks shard
    these further. expert_tensor: "cut", x splits each expert's inner features (TED; Singh, section 7.1); "fold", the
    ranks of x are part of expert.

    Attributes: `mesh`, the DeviceMesh with dims named pipe, data, y, x, z; `parameter_mesh`, its part without
    pipe and without dims of size 1, on which this stage's parameters are; `expert_mesh`, the mesh of experts'
    parameters, without expert; `device`, this rank's torch.device; `sizes`, a mapping from axis to size, for files and
    `Grid(**sizes)`; `timeout`, the timeout of the groups, a timedelta.

    device: this rank's device (default: that of an existing process group, else a GPU if there is one, else the CPU).
    timeout: the timeout of all of the grid's groups, in seconds or as a timedelta, for their collectives and for
    kernels that wait for a peer (default: the timeout of an existing process group, else torch's). It must be longer
    than a rank may be late, for example because it compiles or saves.

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
        expert: int = 1,
        expert_tensor: ExpertTensor = "cut",
        device: torch.device | str | None = None,
        timeout: timedelta | float | None = None,
        **others: int,
    ) -> None:
        of_experts = {EXPERT: expert, "expert_tensor": expert_tensor}
        sizes = check_sizes({"pipe": pipe, "data": data, "x": x, "y": y, "z": z} | of_experts | others)
        self.sizes: Mapping[str, Any] = sizes.sizes()
        ranks = sizes.ranks
        limit = None if timeout is None else check_timeout(timeout)
        self.device = _initialize(ranks, None if device is None else torch.device(device), limit)
        if dist.get_world_size() != ranks:
            raise ValueError(mismatch(self.sizes, dist.get_world_size()))
        # The mesh's order is not the ranks' order. x and y may each split dim 0 of a weight, and z splits the result:
        # with z last in the mesh, plain `Shard` placements say just that. In the order of ranks x is innermost.
        places = torch.arange(ranks).view([sizes[axis] for axis in OUTER_TO_INNER])
        order = places.permute([OUTER_TO_INNER.index(axis) for axis in MESH_ORDER])
        # Flattened and reshaped: torch 2.11 derives the mesh's order from its strides, including dims of size 1.
        order = order.reshape(-1).view([sizes[axis] for axis in MESH_ORDER])
        self.mesh = DeviceMesh(self.device.type, order, mesh_dim_names=MESH_ORDER)
        # torch's rules for operators on DTensors take time exponential in the mesh's dims (seconds for four, at an
        # operator's first use), so parameters live on the part of the mesh that does split something.
        self.parameter_axes = parameter_axes(sizes)
        self.parameter_mesh = self.mesh[self.parameter_axes]
        self._groups: dict[str, dist.ProcessGroup] = {axis: self.mesh.get_group(axis) for axis in NAMES}
        for name, over in DERIVED_GROUPS.items():
            self._groups[name] = self.mesh[over]._flatten(name).get_group()
        self.gradients: set[GradientReduction] = set()  # of the models on this grid; noted by `parallelize`
        self.other_groups: dict[str, str] = {}  # the axis of groups that were made later, by their names
        world = dist.group.WORLD
        assert world is not None
        self._groups["world"] = world
        is_one_stage = sizes.stage_ranks == sizes.ranks
        in_stage = tuple(axis for axis in MESH_ORDER if axis in STAGE_AXES)
        self._groups[STAGE] = world if is_one_stage else self.mesh[in_stage]._flatten(STAGE).get_group()
        self._mesh_groups = {self.parameter_mesh: self._groups[STAGE]}
        self.expert_tensor = sizes.expert_tensor
        self.expert_mesh, self.expert_axes = self.parameter_mesh, self.parameter_axes
        if sizes.expert > 1:
            self._divide_experts(sizes, places)
        self.timeout = timedelta(seconds=group_timeout(world)) if limit is None else limit
        for each in self._groups.values():  # DeviceMesh makes groups with torch's default limit
            if group_timeout(each) != self.timeout.total_seconds():
                set_timeout(each, self.timeout)

    def _divide_experts(self, sizes: GridSizes, places: torch.Tensor) -> None:
        """Make the groups of experts' axes, and the mesh of experts' parameters of this stage.

        places: the ranks, by their coordinates in the order of OUTER_TO_INNER. Groups that would have the ranks of data
        or z are theirs; but expert has its own, so that its messages do not wait for sums of gradients.
        """
        left = {"data": EXPERT_DATA, "z": EXPERT_Z}  # what an axis is called without the innermost ranks that are taken
        shape, names = [], []
        for axis in OUTER_TO_INNER:
            inner = sizes.expert_taken.get(axis, 1)
            shape += [sizes[axis] // inner, inner]
            names += [left.get(axis, axis), f"taken of {axis}"]
        taken = [name for name in names if name.startswith("taken")]
        axes = [name for name in names if name not in taken]
        order = [names.index(name) for name in (*axes, *taken)]
        whole = places.reshape(shape).permute(order).reshape(*(shape[dim] for dim in order[: len(axes)]), sizes.expert)
        axes.append(EXPERT)
        alike = {EXPERT_DATA: "data", EXPERT_Z: "z"}
        for axis in EXPERT_AXES:
            size = whole.shape[axes.index(axis)]
            if axis in alike and size == sizes[alike[axis]]:
                self._groups[axis] = self._groups[alike[axis]]
            elif size > 1:
                members = whole.movedim(axes.index(axis), -1).reshape(-1, size).tolist()
                self._groups[axis], _ = dist.new_subgroups_by_enumeration(members, group_desc=axis)
        self.expert_axes = expert_parameter_axes(sizes)
        (at,) = (whole == dist.get_rank()).nonzero().tolist()
        mine = whole[tuple(slice(None) if axis in self.expert_axes else at[dim] for dim, axis in enumerate(axes))]
        dims = [axis for axis in axes if axis in self.expert_axes]
        self.expert_mesh = DeviceMesh.from_group(
            [self._groups[axis] for axis in self.expert_axes],
            self.device.type,
            mine.permute([dims.index(axis) for axis in self.expert_axes]).contiguous(),
            mesh_dim_names=self.expert_axes,
        )
        self._mesh_groups[self.expert_mesh] = self._groups[STAGE]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this rank only in `axis`.

        For "batch" they differ in data and z, for "stage" in all axes except pipe, for "world" in any axis.

        axis: one of `stretto.axes.NAMES`, of its `EXPERT_AXES` or `DERIVED_GROUPS`, "stage" or "world".

        Raises ValueError for an unknown axis; so do `size` and `coordinate`.
        """
        if axis not in self._groups:
            if axis not in EXPERT_AXES:
                known = dict.fromkeys((*self._groups, *EXPERT_AXES))
                raise ValueError(f"{axis!r} is not an axis of a grid; there are {', '.join(known)}")
            self._groups[axis] = self._group_of_experts(axis)
        return self._groups[axis]

    def _group_of_experts(self, axis: str) -> dist.ProcessGroup:
        """The group of an axis of experts that has no separate one: data's or z's without expert, else this rank."""
        if axis != EXPERT and self.sizes.get(EXPERT, 1) == 1:
            return self._groups["data" if axis == EXPERT_DATA else "z"]
        alone = next((group for group in self._groups.values() if group.size() == 1), None)
        if alone is None:
            alone = dist.new_group([dist.get_rank()], timeout=self.timeout, use_local_synchronization=True)
        return alone

    def group_names(self) -> dict[str, str]:
        """Map torch's names of this rank's process groups to their axes."""
        named = {self._groups[axis].group_name: axis for axis in reversed(self._groups)}
        return named | self.other_groups

    def group_of_mesh(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """Return the process group of all ranks of a mesh of parameters: of their shards and replicas."""
        return self._mesh_groups[mesh]

    def size(self, axis: str) -> int:
        """Return the size of `axis`: pipe, data, x, y, z, "batch" (data x z), "stage" (all except pipe) or "world"."""
        return self.layout_sizes[axis] if axis in EXPERT_AXES else self.group(axis).size()

    def coordinate(self, axis: str) -> int:
        """Return this rank's index along `axis`; along "batch", the index of its part of the global batch."""
        return 0 if self.size(axis) == 1 else self.group(axis).rank()

    @cached_property
    def layout_sizes(self) -> Mapping[str, int]:
        """The sizes of all axes that a parameter's layout may name (`stretto.axes.layout_sizes`)."""
        return layout_sizes(self.sizes)

    @cached_property
    def layout_coordinates(self) -> Mapping[str, int]:
        """This rank's places along these axes."""
        return {axis: self.coordinate(axis) for axis in self.layout_sizes}

    def __repr__(self) -> str:
        return "Grid(" + ", ".join(f"{axis}={size!r}" for axis, size in shown_sizes(self.sizes).items()) + ")"


def mismatch(sizes: Mapping[str, Any], ranks: int) -> str:
    """The error message for a grid that is not the size of the job."""
    product = check_sizes(sizes).ranks
    shape = " x ".join(f"{axis}={size}" for axis, size in shown_sizes(sizes).items() if axis in NAMES)
    rest = product // sizes["data"]
    hint = f"; with data={ranks // rest} it would" if ranks % rest == 0 and ranks >= rest else ""
    return f"the grid {shape} has {product} ranks, but the job has {ranks}: they must be equal{hint}"


def _initialize(ranks: int, device: torch.device | None, timeout: timedelta | None) -> torch.device:
    """Join the job's process group, unless the caller has, and pick this rank's device.

    A GPU without an index is the one with this rank's number among its machine's ranks.
    """
    joining: dict[str, Any] = {}  # the store, rank and size, if they were needed before the group exists
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
            store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout or default_pg_timeout))
            joining = {"store": dist.PrefixStore("stretto", store), "rank": rank, "world_size": world_size}
            local_rank = agree_on_local_rank(store, rank, world_size)
        device = torch.device("cuda", shared_gpus.choose_gpu(local_rank or 0))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    backend = shared_gpus.default_backend(device.type)
    if is_rank():
        device_id = device if "nccl" in backend else None
        dist.init_process_group(backend, timeout=timeout, device_id=device_id, **joining)
    elif ranks == 1:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    else:
        raise ValueError(
            f"a grid of {ranks} ranks needs {ranks} processes, and this is one alone: "
            f"start the script with `torchrun --nproc-per-node {ranks}`"
        )
    return device
