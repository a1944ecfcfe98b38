# SPDX-License-Identifier: Apache-2.0
"""Layouts of parameters on a grid: the splits of their dims over axes, shards, and gathering them again."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, repeat
from math import prod
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard

from stretto.axes import EXPERT_AXES, NAMES, STAGE_AXES, X_COPIES, X_PARTS
from stretto.parallel.grid import Grid
from stretto.suggestions import require_type


@dataclass(frozen=True)
class Split:
    """One cut: `dim` of a tensor over a grid `axis`.

    The dim is cut as torch.chunk does: equal parts, the last ones shorter or empty. With `segments` > 1 it holds that
    many equal fused parts (GPT-2's queries, keys and values) and each of them is cut on its own. `copies`: how many
    successive ranks of x hold each part (of a KV head, where there are fewer than ranks).
    """

    dim: int
    axis: str
    segments: int = 1
    copies: int = 1

    @property
    def mesh_axis(self) -> str:
        """The dim of the parameter's mesh that it cuts over."""
        return self.axis if self.copies == 1 else X_PARTS

    def part_of(self, place: Mapping[str, int]) -> int:
        """Into how many parts it cuts the dim, of axes' sizes; or which of them a rank holds, of its coordinates."""
        return place[self.axis] // self.copies


@dataclass(frozen=True)
class Box:
    """A rectangular part of a shard: where it starts in the whole tensor and in the shard, and its size."""

    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ParameterLayout:
    """The cuts of one parameter of `shape`: `splits` in the order in which they apply; other axes replicate it.

    pipe_copies: how many ranks of pipe hold it: 2 for a tied embedding that the first and the last stage share.

    Sizes and coordinates are of all axes that a layout may name (`Grid.layout_sizes`, `layout_coordinates`).
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...]
    pipe_copies: int = 1

    @property
    def copies(self) -> int:
        """The number of successive ranks of x that hold each part."""
        return max((split.copies for split in self.splits), default=1)

    def placements(self, axes: Sequence[str]) -> list[Placement]:
        """The same, as DTensor placements over a mesh with these axes."""
        by_axis = {split.mesh_axis: split for split in self.splits}
        return [_placement(by_axis.get(axis)) for axis in axes]

    def replicas(self, sizes: Mapping[str, int]) -> int:
        """The number of ranks that hold each number of the parameter."""
        parts = {}
        for split in self.splits:  # inlined: a step asks for every parameter
            parts[split.axis] = sizes[split.axis] // split.copies
        return self.pipe_copies * prod(map(sizes.get, STAGE_AXES, repeat(1))) // prod(parts.values())

    def ranges(self, dim: int, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> list[tuple[int, int]]:
        """The indices of `dim` that a rank holds, in its shard's order: (start, length) pairs of the whole tensor."""
        held = [(0, self.shape[dim])]
        for split in self.splits:
            if split.dim == dim:
                held = _cut(held, split.segments, split.part_of(sizes), split.part_of(coordinates))
        return held

    def local_shape(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        return tuple(
            sum(length for _, length in self.ranges(dim, sizes, coordinates)) for dim in range(len(self.shape))
        )

    def boxes(self, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> list[Box]:
        """A rank's shard as rectangles of the whole tensor (one, unless a dim is segmented; none if it is empty)."""
        pieces = []
        for dim in range(len(self.shape)):
            local, of_dim = 0, []
            for start, length in self.ranges(dim, sizes, coordinates):
                of_dim.append((start, local, length))
                local += length
            pieces.append(of_dim)
        return [
            Box(*(tuple(piece[part] for piece in corner) for part in range(3)))  # of no dims, one of no offsets
            for corner in product(*pieces)
            if all(length > 0 for _, _, length in corner)
        ]

    def shard(self, whole: Tensor, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Tensor:
        """A rank's shard of the whole tensor, as a new contiguous tensor."""
        for dim in range(len(self.shape)):
            ranges = self.ranges(dim, sizes, coordinates)
            pieces = [whole.narrow(dim, start, length) for start, length in ranges]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        return whole.detach().clone(memory_format=torch.contiguous_format)


GRAD: Any = torch.Tensor.grad
"""torch's own attribute, a descriptor: that of a parameter on a grid takes calls to have its gradient be one, too."""


class TensorOnGrid(DTensor):
    """A DTensor of Stretto's own: a parameter that `parallelize` made, or a view of one, which has no layout.

    low_precision_weight: of a parameter, what an optimizer writes along with it (`parallel.low_precision_weights`).
    pruned: of a pruned one that z shards, the `PrunedWeight` of `parallel.comm.pruned_weights`. late_write: of a
    parameter that an optimizer has yet to write (`optim.muon_overlap`), what has the reader's stream wait for it.

    No `__slots__`: torch's stagers of checkpoints copy what `DTensor.__slots__` names, found on the instance.
    """

    __hash__ = object.__hash__  # by identity, as Tensor's, which is a function in Python
    parameter_layout: ParameterLayout | None = None
    low_precision_weight: Any = None
    pruned: Any = None
    late_write: Callable[[], None] | None = None

    def to_local(self, **options: Any) -> Tensor:
        """This rank's shard, as a DTensor's, once it is written."""
        if not torch.compiler.is_dynamo_compiling() and self.late_write is not None:
            self.late_write()
        return super().to_local(**options)

    def share_memory_(self) -> Self:
        """Refused: torch shares a tensor's own storage, of which a DTensor has none, and ends the process."""
        raise ValueError("shards are not put into shared memory: share a copy, of stretto.parallel.gather(parameter)")


def has_layout(tensor: object) -> bool:
    """True for a parameter that `parallelize` made."""
    return isinstance(tensor, TensorOnGrid) and tensor.parameter_layout is not None


def _cut(held: list[tuple[int, int]], segments: int, parts: int, part: int) -> list[tuple[int, int]]:
    """Cut a concatenation of ranges into `segments` equal runs, and each of these into `parts`; keep the `part`-th."""
    total = sum(length for _, length in held)
    run = total // segments
    chunk = -(-run // parts)
    kept = []
    for segment in range(segments):
        start = segment * run + min(part * chunk, run)
        stop = segment * run + min((part + 1) * chunk, run)
        position = 0
        for first, length in held:
            low, high = max(start, position), min(stop, position + length)
            if low < high:
                kept.append((first + low - position, high - low))
            position += length
    merged: list[tuple[int, int]] = []
    for first, length in kept:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((first, length))
    return merged or [(0, 0)]


def _placement(split: Split | None) -> Placement:
    if split is None:
        return Replicate()
    if split.segments == 1:
        return Shard(split.dim)
    return _StridedShard(split.dim, split_factor=split.segments)


def make_shard(whole: Tensor, layout: ParameterLayout, grid: Grid) -> DTensor:
    """This rank's shard of `whole`, on the grid's device and its mesh of parameters, or that of experts' parameters, or
    of parameters that several ranks of x hold."""
    local = layout.shard(whole, grid.layout_sizes, grid.layout_coordinates).to(grid.device)
    stride = torch.empty(layout.shape, device="meta").stride()
    mesh, axes = grid.parameter_mesh, grid.parameter_axes
    if any(split.axis in EXPERT_AXES for split in layout.splits):
        mesh, axes = grid.expert_mesh, grid.expert_axes
    elif (copies := layout.copies) > 1:
        mesh = grid.copies_mesh(copies)
        axes = mesh.mesh_dim_names or ()
    return DTensor.from_local(
        local, mesh, layout.placements(axes), run_check=False, shape=torch.Size(layout.shape), stride=stride
    )


def local(parameter: Any) -> Tensor:
    """This rank's shard of a DTensor parameter; its gradient flows back into the parameter's own shard.

    Raises ValueError for a parameter that has replaced the one that `parallelize` created.
    """
    if torch.compiler.is_dynamo_compiling():
        return parameter.to_local()
    if not isinstance(parameter, TensorOnGrid) or parameter.parameter_layout is None:
        raise ValueError(
            "a parameter was replaced after stretto.parallelize, and nothing would bring its gradient together: "
            "copy the new values into the parameter that was there (load_state_dict does, without assign=True)"
        )
    # With gradients, autograd has to know how the shard came from the parameter.
    return parameter.to_local() if torch.is_grad_enabled() else shard_of(parameter)


def shard_of(parameter: TensorOnGrid) -> Tensor:
    """This rank's shard of a parameter, once it is written, outside of autograd."""
    if parameter.late_write is not None:
        parameter.late_write()
    return parameter._local_tensor


@functools.cache
def allow_anomaly_checks() -> None:
    """Let torch.autograd.detect_anomaly look for NaN in DTensors, by an operator that DTensor does not know."""

    @register_sharding(torch.ops.aten._is_any_true.default)
    def _(*_: object) -> list[tuple[list[Placement], list[Placement]]]:
        return [([Replicate()], [Replicate()])]


def layout_of(parameter: Tensor) -> ParameterLayout:
    """The layout of a parameter that `parallelize` made. Raises ValueError for any other tensor."""
    if not isinstance(parameter, TensorOnGrid) or parameter.parameter_layout is None:
        raise ValueError("this tensor is not a parameter that stretto.parallelize has sharded")
    return parameter.parameter_layout


def check_is_sharded(name: str, parameter: Tensor) -> None:
    """Raise ValueError, with its name, for a parameter that `parallelize` has not made."""
    if not has_layout(parameter):
        raise ValueError(
            f"{name} was added or replaced after stretto.parallelize, and nothing would bring its gradient "
            "together: add or parametrize it before, or copy the new values into the parameter that was there, inside "
            "of `with stretto.full_parameters(model): ...`, for one"
        )


def gather(tensor: Tensor, layout: ParameterLayout | None = None) -> Tensor:
    """The whole of a sharded tensor, in the original shape, on every rank. Collective over all ranks of its grid.

    tensor: a parameter that `parallelize` made, or its entry of a state dict; or a DTensor cut like one (a gradient, an
    optimizer's moment), with that parameter's `layout_of` where the parameter has segments. A plain tensor is returned
    as it is.
    """
    require_type(tensor, Tensor, "tensor")
    if not isinstance(tensor, DTensor):
        return tensor
    if layout is None and isinstance(tensor, TensorOnGrid):
        layout = tensor.parameter_layout
    if layout is None:
        if any(isinstance(placement, _StridedShard) for placement in tensor.placements):
            if (view := getattr(tensor, "view_of", None)) is not None:
                return cast(Tensor, view.make(gather(view.parameter)))
            raise ValueError(
                "this tensor has segments: pass its parameter's layout, gather(grad, layout_of(parameter))"
            )
        return tensor.full_tensor().detach()
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    axes = mesh.mesh_dim_names or ()
    sizes, coordinates = place_on(mesh)
    whole = local.new_zeros(layout.shape)
    cut = {split.mesh_axis for split in layout.splits}
    if all(mesh.get_local_rank(axis) == 0 for axis in axes if axis not in cut):  # one replica of each number
        for box in layout.boxes(sizes, coordinates):
            view_box(whole, box.offsets, box.sizes).copy_(view_box(local, box.local_offsets, box.sizes))
    for axis in axes:
        if mesh.get_group(axis).size() > 1:
            dist.all_reduce(whole, group=mesh.get_group(axis))
    return whole


def shard_like(whole: Tensor, parameter: Tensor) -> DTensor:
    """A whole tensor cut as a parameter that `parallelize` made, on its device. Every rank has the whole."""
    assert isinstance(parameter, DTensor)
    local = layout_of(parameter).shard(whole, *place_on(parameter.device_mesh)).to(parameter.device)
    return place_like(local, parameter)


def place_like(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of this rank's shard, of the same whole shape and placements as another one."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def place_on(mesh: DeviceMesh) -> tuple[dict[str, int], dict[str, int]]:
    """The sizes of all axes on a mesh of parameters, and this rank's coordinates on them, for a `ParameterLayout`."""
    names, axes = (*NAMES, *EXPERT_AXES), mesh.mesh_dim_names or ()
    sizes = dict.fromkeys(names, 1) | {axis: mesh.get_group(axis).size() for axis in axes}
    coordinates = dict.fromkeys(names, 0) | {axis: mesh.get_local_rank(axis) for axis in axes}
    if copies := sizes.pop(X_COPIES, 0):
        sizes["x"] = sizes.pop(X_PARTS, 1) * copies
        coordinates["x"] = coordinates.pop(X_PARTS, 0) * copies + coordinates.pop(X_COPIES)
    return sizes, coordinates


def view_box(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of a rectangular part of a tensor."""
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]


Version = tuple[int, int, int]
"""Changes when a parameter's shard is written to in place, or replaced."""


def version_of(parameter: Tensor) -> Version:
    """The version of a DTensor parameter: a write counts at the parameter or at its shard, depending on its path."""
    shard = shard_of(parameter) if isinstance(parameter, TensorOnGrid) else local(parameter)
    with torch._C.DisableTorchFunctionSubclass():  # 2.11 calls Python for each attribute of a parameter
        return shard.data_ptr(), shard._version, parameter._version


def writes_of(parameter: Any) -> int:
    """The version of a parameter's shard, by which autograd refuses a saved tensor that was written since: writes
    through `.data` do not change it. -1 for inference tensors, which have none."""
    shard = shard_of(parameter)
    return -1 if shard.is_inference() else shard._version
