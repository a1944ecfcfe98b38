# SPDX-License-Identifier: Apache-2.0
"""Plans and reads a checkpoint's files: torch.distributed.checkpoint's shard files, indexed by a `metadata.json`.

torch stores its own index in `.metadata`, a pickle, which can run code when it is loaded. It is written too, so that
torch's tools can read a checkpoint that their user trusts, but Stretto reads only `metadata.json`, and the shards
with `weights_only=True`. Nothing in a checkpoint can run code.

Each piece's checksum is computed from the bytes that are written, while they are, and compared when a piece is read,
before it is used (`checkpoint.pieces`).
"""

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from stretto.counters import advance
from stretto.parallel.segment_planner import plan_write
from stretto.train.checkpoint.integrity import DamagedError
from stretto.train.checkpoint.metadata import CheckpointMetadata, TensorEntry
from stretto.train.checkpoint.pieces import MemoryFile, StoredPiece, read_ahead, read_piece

# Replaces torch's message, which advises to load the file with weights_only=False.
NO_TENSOR = "a shard holds what is no tensor"


@dataclass(frozen=True)
class LocalBox:
    """A box of a tensor that this rank holds: its offsets in the whole tensor, and a view of its values."""

    offsets: tuple[int, ...]
    values: Tensor

    def read(self) -> Tensor:
        """The values, to be written to a file."""
        return self.values

    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.size())


@dataclass(frozen=True)
class LazyBox(LocalBox):
    """A box whose values are made when they are read, and not kept: those in `values` only show shape and dtype.

    values: on the meta device. make: returns the values.
    """

    make: Callable[[], Tensor]

    def read(self) -> Tensor:
        return self.make()


@dataclass(frozen=True)
class ShardedState:
    """A tensor of the training state: its whole shape and the boxes that this rank holds."""

    shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]

    def box_at(self, offsets: Iterable[int] | None) -> Tensor:
        wanted = tuple(offsets or ())
        return next(box.read() for box in self.boxes if box.offsets == wanted)


class StateSavePlanner(DefaultSavePlanner):
    """Plans the writing of a `dict[str, ShardedState]`. torch writes a box that several ranks hold once."""

    state_dict: dict[str, ShardedState]

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = [
            plan_write(name, box.chunk(), TensorProperties(dtype=box.values.dtype), torch.Size(state.shape))
            for name, state in self.state_dict.items()
            for box in state.boxes
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        advance()
        return self.state_dict[index.fqn].box_at(index.offset)


class StateLoadPlanner(DefaultLoadPlanner):
    """Plans the reading into a `dict[str, ShardedState]`: each rank reads what overlaps its own boxes."""

    state_dict: dict[str, ShardedState]

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, state in self.state_dict.items():
            entry = self.metadata.state_dict_metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, entry, [box.chunk() for box in state.boxes])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        advance()
        return self.state_dict[index.fqn].box_at(index.offset)


class SafeReader(FileSystemReader):
    """Reads shard files by the index in `metadata.json`, and checks each piece before it is used.

    It does not open torch's own index, a pickle.
    """

    def __init__(self, path: Path, metadata: CheckpointMetadata) -> None:
        super().__init__(path)
        self._index = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries, places = {}, {}
        for name, entry in self._index.tensors.items():
            for chunk in entry.chunks:
                places[MetadataIndex(name, chunk.offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.bytes)
            entries[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=entry.torch_dtype),
                size=torch.Size(entry.shape),
                chunks=[ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
            )
        meta = StorageMeta(load_id=self.load_id)
        return Metadata(entries, storage_data=places, storage_meta=meta)  # type: ignore[arg-type]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read the items of a plan. Raises DamagedError for the first piece whose bytes differ from those written."""
        wanted: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = {}
        for item in plan.items:
            index = item.storage_index
            wanted.setdefault((index.fqn, tuple(index.offset or ())), []).append(item)
        pieces = [
            StoredPiece(name, chunk)
            for name, entry in self._index.tensors.items()
            for chunk in entry.chunks
            if (name, chunk.offsets) in wanted
        ]
        pieces.sort(key=lambda piece: (piece.place.file, piece.place.start))
        for piece, content in zip(pieces, read_ahead(Path(self.path), pieces), strict=True):
            values = _load(Path(self.path), piece, self._index.tensors[piece.tensor or ""], content)
            for item in wanted[piece.tensor or "", piece.place.offsets]:
                target = planner.resolve_tensor(item).detach()
                target.copy_(narrow_tensor_by_index(values, item.storage_offsets, item.lengths))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_tensor(path: Path, entry: TensorEntry, name: str | None = None) -> Tensor:
    """Read a whole tensor of the checkpoint at `path` to the CPU. Raises DamagedError for a damaged shard.

    name: in the checkpoint, for messages.
    """
    whole = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
    for chunk in entry.chunks:
        piece = StoredPiece(name, chunk)
        try:
            content = read_piece(path, piece)
        except DamagedError as error:
            raise DamagedError(f"{path} is damaged: {error}") from None
        values = _load(path, piece, entry, content)
        box = zip(chunk.offsets, chunk.sizes, strict=True)
        whole[tuple(slice(start, start + length) for start, length in box)] = values
    return whole


def _load(path: Path, piece: StoredPiece, entry: TensorEntry, content: memoryview) -> Tensor:
    """Create a piece's tensor from its bytes. Raises DamagedError if they are not such a tensor."""
    place = piece.place
    tensor = "" if piece.tensor is None else f"{piece.tensor}, "
    where = f"{path / place.file} is damaged: {tensor}bytes {place.start} to {place.start + place.bytes}: "
    try:
        values = torch.load(MemoryFile(content), map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except pickle.UnpicklingError as error:
        raise DamagedError(where + NO_TENSOR) from error
    except Exception as error:  # torch's unpickler raises a dozen classes of errors for bytes that it has not written
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise  # the checkpoint may be whole, and an older one would not fit either
        raise DamagedError(f"{where}{type(error).__name__}: {error}") from error
    if not isinstance(values, Tensor) or values.shape != place.sizes or values.dtype != entry.torch_dtype:
        raise DamagedError(f"{where}it holds something else")
    return values
