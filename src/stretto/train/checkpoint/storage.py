# SPDX-License-Identifier: Apache-2.0
"""Reads and writes a checkpoint's files: torch.distributed.checkpoint's shard files, indexed by a `metadata.json`.

torch stores its own index in `.metadata`, a pickle, which can run code when it is loaded. It is written here too, so
that torch's tools can read a checkpoint that their user trusts, but Stretto reads only `metadata.json`, and the shards
with `weights_only=True`. Nothing in a checkpoint can run code.

Each piece's checksum is computed from the bytes that are written, while they are, and compared when a piece is read,
before it is used (`checkpoint.pieces`).
"""

import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stretto.atomic_files import delete_tree, hide_folder
from stretto.counters import advance
from stretto.train.checkpoint.file_objects import ChecksummedFiles
from stretto.train.checkpoint.integrity import DamagedError, file_checksum
from stretto.train.checkpoint.metadata import (
    FORMAT_VERSION,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    CheckpointMetadata,
    StoredBox,
    StoredFile,
    TensorEntry,
)
from stretto.train.checkpoint.pieces import MemoryFile, StoredPiece, read_ahead, read_piece

INDEX_FILE: Literal[".metadata"] = ".metadata"  # torch's own
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


@dataclass(frozen=True)
class _CheckedPlace:
    """A rank's record of a piece that it has written, for the first rank."""

    place: _StorageInfo
    checksum: str


class AtomicWriter(FileSystemWriter):
    """Writes a checkpoint to a hidden folder and renames it to its final path when all of it is on the disk.

    Rank 0 renames it in `finish`, which torch calls when every rank has written and synced its files. A checkpoint
    under its final name is therefore complete, even if processes are killed at any time. It makes no collective call of
    its own, so `dcp.save` may run in a thread with a process group of that thread's.
    """

    def __init__(self, path: Path, description: Mapping[str, Any], *, thread_count: int = 1) -> None:
        """`description`: CheckpointMetadata's fields step, torch, optimizer, model, run and data.

        thread_count: threads that write, each to a separate file.
        """
        self.final_path = path
        self.description = description
        self.working_path = path.with_name(f".{path.name}.writing")
        super().__init__(self.working_path, thread_count=thread_count)
        self.fs = self._files = ChecksummedFiles()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # torch calls this on rank 0, before any rank writes: only here can the folder be emptied.
        if os.path.lexists(self.working_path):
            delete_tree(self.working_path)
        self.working_path.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        results: list[WriteResult] = super().write_data(plan, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result([replace(result, storage_data=self._checked(result.storage_data)) for result in results])
        return done

    def _checked(self, place: _StorageInfo) -> _CheckedPlace:
        return _CheckedPlace(place, self._files.checksums[place.relative_path][place.offset, place.length])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        # torch's index has torch's classes alone, so that torch's tools can read it.
        super().finish(metadata, [[replace(r, storage_data=r.storage_data.place) for r in each] for each in results])
        tensors = {
            name: _entry(name, entry, stored)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        files = {INDEX_FILE: describe_file(self.working_path / INDEX_FILE)}
        content = CheckpointMetadata(format=FORMAT_VERSION, tensors=tensors, files=files, **self.description)
        text = content.to_bytes()
        if len(text) > MAX_METADATA_BYTES:
            raise ValueError(
                f"{METADATA_FILE} has {len(text)} bytes, and one of more than {MAX_METADATA_BYTES} is not read"
            )
        with open(self.working_path / METADATA_FILE, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.working_path)
        replaced = hide_folder(self.final_path)  # deleted last: a crash may come at any time
        self.working_path.rename(self.final_path)
        sync_folder(self.final_path.parent)
        if replaced is not None:
            delete_tree(replaced)


def describe_file(path: Path) -> StoredFile:
    """Size and checksum of a file that has just been written."""
    return StoredFile(bytes=path.stat().st_size, checksum=file_checksum(path))


def _entry(name: str, entry: TensorStorageMetadata, stored: Mapping[MetadataIndex, _CheckedPlace]) -> TensorEntry:
    chunks = []
    for chunk in entry.chunks:
        checked = stored[MetadataIndex(name, chunk.offsets)]
        chunks.append(
            StoredBox(
                offsets=tuple(chunk.offsets),
                sizes=tuple(chunk.sizes),
                file=checked.place.relative_path,
                start=checked.place.offset,
                bytes=checked.place.length,
                checksum=checked.checksum,
            )
        )
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return TensorEntry.model_validate({"shape": tuple(entry.size), "dtype": dtype, "chunks": chunks})


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


def sync_folder(path: Path) -> None:
    """Force a folder's entries (new files, renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
