# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer's states as boxes of whole tensors: a checkpoint of any placement loads into any other.

table_state         for the house's checkpoints (`train.checkpoint`)
distributed_state   for torch.distributed.checkpoint, in scripts; also of collections
"""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from stretto.recommendation.growing import GrowingRows
from stretto.recommendation.placement import TableShard
from stretto.recommendation.tables import ShardedTables
from stretto.train.checkpoint.storage import LocalBox, ShardedState


@runtime_checkable
class DistributedModule(Protocol):
    """A module that `distribute_embeddings` has made."""

    is_distributed: bool

    def boxes(self) -> Iterator[tuple[str, tuple[int, int], TableShard | None, dict[str, Tensor]]]:
        """Describe the tables as `TableExchange.boxes`."""


def table_state(tables: ShardedTables) -> dict[str, ShardedState]:
    """This rank's boxes: `model.tables.<number>.weight`, and `optimizer.tables.<number>.weight.<state>` of each."""
    return {name: ShardedState(shape, (LocalBox(offsets, tensor),)) for name, shape, offsets, tensor in _boxes(tables)}


def distributed_state(model: nn.Module) -> dict[str, Tensor]:
    """A state dict of this rank's boxes for torch.distributed.checkpoint's `save`, and `load`, which fills them.

    model: `ShardedTables`, whose keys are those of `table_state`, and `optimizer.tables.clock` (steps and seed), if
    `fuse_update` was called; or a model that `distribute_embeddings` has made, of whose tables the keys are
    `model.<name>` and `optimizer.<name>.<state>`, by the parameters' names. Of a table that several ranks hold, one box
    is written. Other parameters are not in it. ValueError for a model without such tables.
    """
    found = dict[str, Tensor]()
    if isinstance(model, ShardedTables):
        found |= {name: TensorBox(tensor, shape, offsets) for name, shape, offsets, tensor in _boxes(model)}
        if model.optimizer is not None:
            found["optimizer.tables.clock"] = model.optimizer.clock
        return found
    for name, module in model.named_modules():
        if not isinstance(module, DistributedModule) or not module.is_distributed:
            continue
        prefix = f"{name}." if name else ""
        for key, shape, shard, tensors in module.boxes():
            for state, tensor in tensors.items():
                place = f"optimizer.{prefix}{key}.{state}" if state else f"model.{prefix}{key}"
                dims = tensor.dim()
                offsets = None if shard is None else (shard.row, shard.column)[:dims]
                found[place] = tensor if offsets is None else TensorBox(tensor, shape[:dims], offsets)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no tables that are distributed: give it what distribute_embeddings has "
            "returned, or the `tables` of what distribute_tables was given"
        )
    return found


def _boxes(tables: ShardedTables) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Name, whole shape, offsets and values of each tensor."""
    states = [{} for _ in tables.shards] if tables.optimizer is None else tables.optimizer.states
    caches = tables.caches
    tables.average_replicas()
    if caches is not None:
        caches.flush()
    for place, (shard, weight, of_table) in enumerate(zip(tables.shards, tables.weights, states, strict=True)):
        size, name = tables.placement.tables[shard.table], f"tables.{shard.table}.weight"
        held = weight.detach()
        cache = None if caches is None else caches.find(place)
        if isinstance(cache, GrowingRows):
            for key, state in cache.state().items():  # int64, which checkpoints have as bytes
                numbers = state.view(torch.uint8)
                yield f"model.tables.{shard.table}.{key}", tuple(numbers.shape), (0,), numbers
        elif cache is not None:  # all rows are in host memory, also those to be loaded
            held, *rest = cache.held
            of_table = dict(zip(of_table, rest, strict=True))
        yield f"model.{name}", (size.rows, size.dim), (shard.row, shard.column), held
        for key, state in of_table.items():
            dims = state.dim()
            yield f"optimizer.{name}.{key}", (size.rows, size.dim)[:dims], (shard.row, shard.column)[:dims], state


class TensorBox(Tensor):
    """A whole tensor of which this process has a box, for torch.distributed.checkpoint alone: no operator takes it.

    By the protocol that DTensors have, too (`torch.distributed._checkpointable`).
    """

    held: Tensor
    place: ChunkStorageMetadata

    @staticmethod
    def __new__(cls, values: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> "TensorBox":
        """Make one of the box `values`, which begins at `offsets` of a tensor of this shape."""
        box = Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        box.held, box.place = values, ChunkStorageMetadata(torch.Size(offsets), values.size())
        return box

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """TypeError for every operator."""
        raise TypeError(f"{func}: a TensorBox is for torch.distributed.checkpoint; its box is in .held")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(self.place, TensorProperties.create_from_tensor(self.held), self.shape)
        return [WriteItem(MetadataIndex(fqn, self.place.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.place]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.held
