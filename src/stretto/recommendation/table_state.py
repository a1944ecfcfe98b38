# SPDX-License-Identifier: Apache-2.0
"""Tables and their optimizer's states as boxes of whole tensors: a checkpoint of any placement loads into any other.

table_state         for the house's checkpoints (`train.checkpoint`)
distributed_state   for torch.distributed.checkpoint, in scripts
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from stretto.recommendation.growing import GrowingRows
from stretto.train.checkpoint.storage import LocalBox, ShardedState

if TYPE_CHECKING:
    from stretto.recommendation.tables import ShardedTables


def table_state(tables: "ShardedTables") -> dict[str, ShardedState]:
    """This rank's boxes: `model.tables.<number>.weight`, and `optimizer.tables.<number>.weight.<state>` of each."""
    return {name: ShardedState(shape, (LocalBox(offsets, tensor),)) for name, shape, offsets, tensor in _boxes(tables)}


def distributed_state(tables: "ShardedTables") -> dict[str, Tensor]:
    """A state dict of this rank's boxes for torch.distributed.checkpoint's `save`, and `load`, which fills them.

    With the keys of `table_state`, and `optimizer.tables.clock` (steps and seed), if `fuse_update` was called. Of a
    table that several ranks hold, one box is written.
    """
    found: dict[str, Tensor] = {
        name: TensorBox(tensor, shape, offsets) for name, shape, offsets, tensor in _boxes(tables)
    }
    if tables.optimizer is not None:
        found["optimizer.tables.clock"] = tables.optimizer.clock
    return found


def _boxes(tables: "ShardedTables") -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Name, whole shape, offsets and values of each tensor."""
    states = [{} for _ in tables.shards] if tables.optimizer is None else tables.optimizer.states
    caches = tables.caches
    if caches is not None:
        caches.flush()
    for place, (shard, weight, of_table) in enumerate(zip(tables.shards, tables.weights, states, strict=True)):
        size, name = tables.placement.tables[shard.table], f"tables.{shard.table}.weight"
        cache = None if caches is None else caches.find(place)
        if isinstance(cache, GrowingRows):
            for key, state in cache.state().items():  # int64, which checkpoints have as bytes
                numbers = state.view(torch.uint8)
                yield f"model.tables.{shard.table}.{key}", tuple(numbers.shape), (0,), numbers
        elif cache is not None:  # all rows are in host memory, also those to be loaded
            weight, *rest = cache.held
            of_table = dict(zip(of_table, rest, strict=True))
        yield f"model.{name}", (size.rows, size.dim), (shard.row, shard.column), weight.detach()
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
