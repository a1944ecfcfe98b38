# SPDX-License-Identifier: Apache-2.0
"""The grid: ranks laid out over pipe x data x X x Y x Z (Singh, sections 3.1 and 5.1.1), as a named DeviceMesh."""

from collections.abc import Mapping
from datetime import timedelta
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from stretto.axes import (
    DERIVED_GROUPS,
    MESH_ORDER,
    NAMES,
    OUTER_TO_INNER,
    STAGE,
    STAGE_AXES,
    check_sizes,
    parameter_axes,
    shown_sizes,
)
from stretto.cluster.local_ranks import agree_on_local_rank, find_local_rank, is_rank
from stretto.memory import group_timeout, shared_gpus
from stretto.memory.groups import check_timeout, set_timeout

GradientReduction = Literal["sum", "mean"]
"""What becomes of the gradients of ranks that have other rows of the batch."""


class Grid:
    """The ranks of a job over the axes of `stretto.axes`; x is innermost and pipe outermost:
    rank = (((pipe * Data + data) * Z + z) * Y + y) * X + x.

    `data` and `z` split the batch; `x`, `y` and `z` split the weights; `pipe` splits the layers. Start the job with
    torchrun (or `stretto train`); a grid of one rank needs no launcher. Collective: every rank of the job makes the
    same grid.

    Attributes: `mesh`, the DeviceMesh with dims named pipe, data, y, x, z; `parameter_mesh`, its part without
    pipe and without dims of size 1, on which this stage's parameters are; `device`, this rank's torch.device; `sizes`,
    a mapping from axis to size; `timeout`, the groups' time limit, a timedelta.

    device: this rank's (default: of the process group that is there, else a GPU where torch sees one, else the CPU).
    timeout: the time limit of all of the grid's groups, in seconds or as a timedelta, for their collectives and for
    kernels that wait for a peer (default: the limit of the process group that is there, else torch's own). A rank may
    be so much later than the others, to compile or to save, before they give it up.

    Raises ValueError when the sizes do not multiply to the number of ranks, and for a timeout that is not positive.
    """

    def __init__(
        self,
        data: int = 1,
        x: int = 1,
        y: int = 1,
        z: int = 1,
        pipe: int = 1,
        *,
        device: torch.device | str | None = None,
        timeout: timedelta | float | None = None,
        **others: int,
    ) -> None:
        sizes = check_sizes({"pipe": pipe, "data": data, "x": x, "y": y, "z": z} | others)
        self.sizes: Mapping[str, int] = sizes.sizes()
        ranks = sizes.ranks
        limit = None if timeout is None else check_timeout(timeout)
        self.device = _initialize(ranks, None if device is None else torch.device(device), limit)
        if dist.get_world_size() != ranks:
            raise ValueError(mismatch(self.sizes, dist.get_world_size()))
        # The mesh's order is not the ranks' order. x and y may each split dim 0 of a weight, and z splits what is left:
        # with z last in the mesh, plain `Shard` placements say just that. In the order of ranks x is innermost.
        places = torch.arange(ranks).view([sizes[axis] for axis in OUTER_TO_INNER])
        order = places.permute([OUTER_TO_INNER.index(axis) for axis in MESH_ORDER])
        # Flattened and shaped anew: torch 2.11 reads the mesh's order off its strides, those of dims of size 1 too.
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
        self.timeout = timedelta(seconds=group_timeout(world)) if limit is None else limit
        for each in self._groups.values():  # DeviceMesh makes groups with torch's default limit
            if group_timeout(each) != self.timeout.total_seconds():
                set_timeout(each, self.timeout)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in `axis` only.

        In data and z for "batch", in all axes but pipe for "stage", in any for "world".

        axis: one of `stretto.axes.NAMES`, of its `DERIVED_GROUPS`, "stage" or "world".

        Raises ValueError for an unknown axis; so do `size` and `coordinate`.
        """
        if axis not in self._groups:
            raise ValueError(f"{axis!r} is not an axis of a grid; there are {', '.join(self._groups)}")
        return self._groups[axis]

    def group_of_mesh(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """All ranks of a mesh that parameters live on: those that must agree on these parameters' gradients."""
        return self._mesh_groups[mesh]

    def size(self, axis: str) -> int:
        """How many ranks `axis` has: pipe, data, x, y, z, "batch" (data x z), "stage" (all but pipe) or "world"."""
        return self.group(axis).size()

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`; along "batch", which shard of the global batch it is fed."""
        return self.group(axis).rank()

    def __repr__(self) -> str:
        return "Grid(" + ", ".join(f"{axis}={size}" for axis, size in shown_sizes(self.sizes).items()) + ")"


def mismatch(sizes: Mapping[str, int], ranks: int) -> str:
    """What to tell a user whose grid is not the size of the job."""
    product = prod(sizes.values())
    shape = " x ".join(f"{axis}={size}" for axis, size in shown_sizes(sizes).items())
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
