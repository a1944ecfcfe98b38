# SPDX-License-Identifier: Apache-2.0
"""Planners for torch.distributed.checkpoint that know fused parameters, of which a rank holds several boxes.

A DTensor has one box on each rank for torch's own planners: the first one of a fused parameter (with segments) that x
cuts. They would read other numbers into it, which is why its entry of a state dict refuses them.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NoReturn, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from stretto.parallel.layout import Box, ParameterLayout, Split, place_on, view_box

REFUSAL = (
    "torch's own planner takes one box of a tensor from each rank, and of a fused parameter that x cuts a rank holds "
    "several: pass planner=stretto.parallel.SegmentSavePlanner() to torch.distributed.checkpoint.save, or "
    "planner=stretto.parallel.SegmentLoadPlanner() to load"
)


def has_segments(value: object) -> TypeGuard[DTensor]:
    """True if a rank holds several boxes of a tensor: an axis cuts each segment of it."""
    return isinstance(value, DTensor) and any(
        isinstance(placement, _StridedShard) and placement.split_factor > 1 and value.device_mesh.size(dim) > 1
        for dim, placement in enumerate(value.placements)
    )


def refuse_default_planners(value: Tensor) -> None:
    """Have torch's own planners raise for this entry of a state dict, if a rank holds several boxes of it."""
    if has_segments(value):
        value.__dict__ |= {"__create_chunk_list__": _refuse, "__create_write_items__": _refuse}


def _refuse(*_: object) -> NoReturn:
    raise RuntimeError(REFUSAL)  # torch takes a ValueError for another mistake, and says that one


@cache
def watch_optimizers() -> None:
    """Have optimizers of torch refuse state that `set_optimizer_state_dict(broadcast_from_rank0=True)` has mixed up: it
    writes one box of a tensor on each rank into the optimizer's own tensors, and loads these."""
    register_optimizer_step_pre_hook(_watch)


def _watch(optimizer: Optimizer, *_: Any) -> None:
    if optimizer not in _noted:
        optimizer.register_state_dict_post_hook(_note_versions)
        optimizer.register_load_state_dict_pre_hook(_refuse_mixed)
    _noted[optimizer] = WeakTensorKeyDictionary()  # the step writes


# Versions of an optimizer's state with segments when its state dict was taken: of each tensor, and of its shard.
_noted: WeakKeyDictionary[Optimizer, WeakTensorKeyDictionary] = WeakKeyDictionary()


def _segmented(state: Mapping[Any, Any]) -> Iterator[tuple[str, DTensor]]:
    for name, of_parameter in state.items():
        yield from ((f"{key} of {name}", value) for key, value in of_parameter.items() if has_segments(value))


def _note_versions(optimizer: Optimizer, _: Any) -> None:
    _noted[optimizer] = WeakTensorKeyDictionary(
        {value: (value._version, value._local_tensor._version) for _, value in _segmented(optimizer.state)}
    )


def _refuse_mixed(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise RuntimeError for the optimizer's own tensors of which only the shard was written since they were taken."""
    for name, value in _segmented(state_dict["state"]):
        version, of_shard = _noted[optimizer].get(value, (-1, -1))
        if version == value._version and of_shard != value._local_tensor._version:
            raise RuntimeError(
                f"{name} was written shard by shard, as set_optimizer_state_dict does with broadcast_from_rank0=True: "
                "torch writes one box of a fused parameter on each rank, and x cuts this one into several, which may "
                "have other numbers now. Load the state again, with full_state_dict=True alone, on every rank"
            )


class SegmentSavePlanner(DefaultSavePlanner):
    """torch.distributed.checkpoint's planner of a `save`, which also writes fused parameters and their moments whole.

    A checkpoint has their whole tensors under their names, as of any other parameter, and any planner can read it into
    a model that does not cut them over x.
    """

    state_dict: dict[str, Any]

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(*args, **kwargs)
        self.boxes = _boxes_by_name(self.state_dict)

    def create_local_plan(self) -> SavePlan:
        everything = self.state_dict
        self.state_dict = {name: value for name, value in everything.items() if name not in self.boxes}
        plan = super().create_local_plan()
        self.state_dict = everything
        items = [
            plan_write(name, _chunk(box), TensorProperties.create_from_tensor(whole.to_local()), whole.size())
            for name, whole in everything.items()
            for box in self.boxes.get(name, ())
        ]
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn in self.boxes:
            return _values(self.state_dict[index.fqn], self.boxes[index.fqn], index)
        return super().lookup_object(index)


class SegmentLoadPlanner(DefaultLoadPlanner):
    """torch.distributed.checkpoint's planner of a `load`, which also reads into fused parameters and their moments."""

    state_dict: dict[str, Any]

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.boxes = _boxes_by_name(self.state_dict)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        everything, metadata = self.state_dict, self.metadata
        stored = {name: entry for name, entry in metadata.state_dict_metadata.items() if name not in self.boxes}
        self.metadata = dataclasses.replace(metadata, state_dict_metadata=stored)
        self.state_dict = {name: value for name, value in everything.items() if name not in self.boxes}
        plan = super().create_local_plan()
        self.metadata = metadata
        self.state_dict |= {name: everything[name] for name in self.boxes}
        items = list(plan.items)
        for name, boxes in self.boxes.items():
            entry = metadata.state_dict_metadata.get(name)
            if entry is None and self.allow_partial_load:
                continue
            if not isinstance(entry, TensorStorageMetadata):
                raise RuntimeError(f"Missing key in checkpoint state_dict: {name}.")
            if entry.size != everything[name].size():
                raise ValueError(f"{name} is {list(entry.size)} there and {list(everything[name].size())} here")
            items += create_read_items_for_chunk_list(name, entry, [_chunk(box) for box in boxes])
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        if index.fqn in self.boxes:
            increment_version(self.state_dict[index.fqn])  # all of its boxes are read
            return _values(self.state_dict[index.fqn], self.boxes[index.fqn], index)
        return super().lookup_tensor(index)


def plan_write(name: str, chunk: ChunkStorageMetadata, properties: TensorProperties, size: torch.Size) -> WriteItem:
    """The writing of one box of the tensor `name`, whose whole size this is."""
    data = TensorWriteData(chunk=chunk, properties=properties, size=size)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _boxes_by_name(state: Mapping[str, Any]) -> dict[str, list[Box]]:
    return {name: _boxes(value) for name, value in state.items() if has_segments(value)}


def _boxes(tensor: DTensor) -> list[Box]:
    """This rank's boxes of a tensor that is cut as one of `parallelize`'s parameters, by its placements."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ()
    splits = [
        Split(placement.dim, axis, getattr(placement, "split_factor", 1))
        for axis, placement in zip(names, tensor.placements, strict=True)
        if isinstance(placement, Shard | _StridedShard)
    ]
    return ParameterLayout(tuple(tensor.shape), tuple(splits)).boxes(*place_on(mesh))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _values(tensor: DTensor, boxes: list[Box], index: MetadataIndex) -> Tensor:
    """The values of the box that a planner's index names, as a view."""
    values = tensor.to_local().detach()
    box = next(box for box in boxes if box.offsets == tuple(index.offset or ()))
    return view_box(values, box.local_offsets, box.sizes)
