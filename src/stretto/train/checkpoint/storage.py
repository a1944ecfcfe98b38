# SPDX-License-Identifier: Apache-2.0
"""Reads and writes a checkpoint's files: torch.distributed.checkpoint's shard files, indexed by a `metadata.json`.

torch stores its own index in `.metadata`, a pickle, which can run code when it is loaded. It is written here too, so
that torch's tools can read a checkpoint that their user trusts, but Stretto reads only `metadata.json`, and the shards
with `weights_only=True`. Nothing in a checkpoint can run code.
"""

import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from stretto.train.checkpoint.folders import remove_folder
from stretto.train.checkpoint.metadata import (
    FORMAT_VERSION,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    CheckpointMetadata,
    StoredBox,
    TensorEntry,
)

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
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, box.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=box.chunk(),
                        properties=TensorProperties(dtype=box.values.dtype),
                        size=torch.Size(state.shape),
                    ),
                )
                for name, state in self.state_dict.items()
                for box in state.boxes
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
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
        return self.state_dict[index.fqn].box_at(index.offset)


class AtomicWriter(FileSystemWriter):
    """Writes a checkpoint to a hidden folder and renames it to its final path when all of it is on the disk.

    Rank 0 renames it in `finish`, which torch calls when every rank has written and synced its files. A checkpoint
    under its final name is therefore complete, even if processes are killed at any time.
    """

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        """`description`: the fields of CheckpointMetadata other than `tensors`."""
        self.final_path = path
        self.description = description
        self.working_path = path.with_name(f".{path.name}.writing")
        super().__init__(self.working_path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # torch calls this on rank 0, before any rank writes: only here can the folder be emptied.
        shutil.rmtree(self.working_path, ignore_errors=True)
        self.working_path.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {
            name: _entry(name, entry, stored)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        content = CheckpointMetadata(format=FORMAT_VERSION, tensors=tensors, **self.description)
        text = content.model_dump_json().encode()
        if len(text) > MAX_METADATA_BYTES:
            raise ValueError(
                f"{METADATA_FILE} has {len(text)} bytes, and one of more than {MAX_METADATA_BYTES} is not read"
            )
        with open(self.working_path / METADATA_FILE, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.working_path)
        remove_folder(self.final_path)
        self.working_path.rename(self.final_path)
        sync_folder(self.final_path.parent)


def _entry(name: str, entry: TensorStorageMetadata, stored: Mapping[MetadataIndex, _StorageInfo]) -> TensorEntry:
    chunks = []
    for chunk in entry.chunks:
        place = stored[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            StoredBox(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=place.relative_path,
                start=place.offset,
                bytes=place.length,
            )
        )
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return TensorEntry.model_validate({"shape": tuple(entry.size), "dtype": dtype, "chunks": chunks})


class SafeReader(FileSystemReader):
    """Reads shard files by the index in `metadata.json`. It does not open torch's own index, a pickle."""

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


def read_tensor(path: Path, entry: TensorEntry) -> Tensor:
    """Read a whole tensor of the checkpoint at `path` to the CPU. Raises ValueError for a damaged shard."""
    whole = torch.empty(entry.shape, dtype=entry.torch_dtype)
    for chunk in entry.chunks:
        with open(path / chunk.file, "rb") as file:
            file.seek(chunk.start)
            content = io.BytesIO(file.read(chunk.bytes))
        try:
            values = torch.load(content, map_location="cpu", weights_only=True)
        except RuntimeError as error:
            raise ValueError(f"{path / chunk.file} is damaged: {error}") from error
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path / chunk.file} is damaged: {NO_TENSOR}") from error
        if not isinstance(values, Tensor) or values.shape != chunk.sizes or values.dtype != whole.dtype:
            raise ValueError(f"{path / chunk.file} is damaged: it holds something else at byte {chunk.start}")
        box = zip(chunk.offsets, chunk.sizes, strict=True)
        whole[tuple(slice(start, start + length) for start, length in box)] = values
    return whole


def sync_folder(path: Path) -> None:
    """Force a folder's entries (new files, renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
