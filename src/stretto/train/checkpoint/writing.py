# SPDX-License-Identifier: Apache-2.0
"""Writes one checkpoint, whole or not at all: several writer threads a rank, and errors that name a full disk."""

import errno
import os
import shutil
import threading
import time
import zlib
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stretto.atomic_files import delete_tree, hide_folder
from stretto.counters import advance
from stretto.launch.failures import JobError
from stretto.launch.watching.ranks import WRITES_FILE
from stretto.train.checkpoint.integrity import file_checksum, to_text
from stretto.train.checkpoint.metadata import (
    FORMAT_VERSION,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    CheckpointMetadata,
    StoredBox,
    StoredFile,
    TensorEntry,
)
from stretto.train.checkpoint.storage import ShardedState, StateSavePlanner
from stretto.train.checkpoint.torch_format import INDEX_FILE

OVERHEAD = 0.01
"""The most that headers, padding and the index add, as a part of the tensors' bytes, beside BYTES_OF_BOX."""
BYTES_OF_BOX = 2048
"""The bytes that torch.save and the index add to each box of a tensor."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, a limit of the process
_RETRIES, _PAUSE = 20, 0.05  # of deleting a partial folder into which other ranks may still write; seconds


class WriteError(JobError, OSError):
    """A checkpoint could not be written. rank: the one whose part it was, if it is known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class NoSpaceError(WriteError):
    """The file system has no room for a checkpoint."""

    is_whole, blames_rank = True, False


def free_bytes(out: Path) -> int:
    """Bytes that this user may still write to the file system of a run's folder, which may not exist yet."""
    return shutil.disk_usage(next(folder for folder in (out, *out.absolute().parents) if folder.exists())).free


def bytes_on_disk(tensor_bytes: int, boxes: int) -> int:
    """Bound the bytes on disk of a checkpoint of so many bytes, in so many boxes."""
    return round(tensor_bytes * (1 + OVERHEAD)) + boxes * BYTES_OF_BOX


def describe_lack(out: Path, needed: int, free: int, *, was: bool = False) -> str:
    """Say that a checkpoint does not fit. was: `free` was measured before it was begun."""
    has = f"{_size(free)} {'were' if was else 'are'} free{' when it began' if was else ''}"
    return f"no space left for a checkpoint in {out}: it needs {_size(needed)}, and {has}"


class _ChecksummedFile:
    """A file that is written from its beginning, and keeps the checksum of the bytes between two calls of `tell`.

    torch's writer calls `tell` before and after each piece.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._start, self._length, self._crc = 0, 0, 0
        self.checksums: dict[tuple[int, int], str] = {}  # by the first byte and the number of bytes

    def tell(self) -> int:
        if self._length:
            self.checksums[self._start, self._length] = to_text(self._crc)
        self._start, self._length, self._crc = self._start + self._length, 0, 0
        return self._start

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._crc = zlib.crc32(view, self._crc)
        self._length += len(view)
        advance()
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class _ChecksummedFiles(FileSystem):
    """The file system of a writer; keeps the checksums of the pieces of each file. Each file has one thread.

    error: the first of the system. torch replaces a file's error by its own ("unexpected pos").
    """

    def __init__(self) -> None:
        self.checksums: dict[str, dict[tuple[int, int], str]] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        try:
            with open(path, mode) as file:
                if "w" not in mode:
                    yield file
                    return
                stream = _ChecksummedFile(file)
                self.checksums[Path(path).name] = stream.checksums
                yield stream
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            self.error = self.error or cause
            raise


@dataclass(frozen=True)
class _CheckedPlace:
    """A rank's record of a piece that it has written, for the first rank."""

    place: _StorageInfo
    checksum: str


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint to a hidden folder and renames it to its final path when all of it is on the disk.

    Rank 0 renames it in `finish`, which torch calls when every rank has written and synced its files. A checkpoint
    under its final name is therefore complete, even if processes are killed at any time. It makes no collective call of
    its own, so `dcp.save` may run in a thread with a process group of that thread's.

    description: CheckpointMetadata's fields other than `torch` and `tensors`. threads: each writes a separate file.
    """

    def __init__(self, path: Path, description: Mapping[str, Any], *, threads: int = 1) -> None:
        self.final_path = path
        self.description = {"torch": torch.__version__, **description}
        self.working_path = path.with_name(f".{path.name}.writing")
        # torch would copy tensors of a GPU ahead, on the stream of a thread that may have another GPU.
        super().__init__(self.working_path, per_thread_copy_ahead=0)
        self.fs = self._files = _ChecksummedFiles()
        self._threads = threads
        self._lock = threading.Lock()
        self._is_discarded = False

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # torch calls this on rank 0, before any rank writes: only here can the folder be emptied.
        if os.path.lexists(self.working_path):
            delete_tree(self.working_path)
        self.working_path.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # torch's own threads would lose their errors, and a checkpoint without their files would look whole.
        parts = list(_divide(plan, self._threads))
        write = super().write_data
        try:
            with ThreadPoolExecutor(len(parts), WRITES_FILE) as pool:
                written = list(pool.map(lambda part: write(part, planner).wait(), parts))
        except Exception as error:
            if self._files.error is not None:
                raise self._files.error from error
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result([self._checked(result) for of_part in written for result in of_part])
        return done

    def _checked(self, result: WriteResult) -> WriteResult:
        place = result.storage_data
        checksum = self._files.checksums[place.relative_path][place.offset, place.length]
        return replace(result, storage_data=_CheckedPlace(place, checksum))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with self._lock:
            if self._is_discarded:
                raise OSError("the run ended while the checkpoint was written")
            self._finish(metadata, results)

    def _finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        # torch's index has torch's classes alone, so that torch's tools can read it.
        super().finish(metadata, [[replace(r, storage_data=r.storage_data.place) for r in each] for each in results])
        tensors = {
            name: _entry(name, entry, stored)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        index = self.working_path / INDEX_FILE
        files = {INDEX_FILE: StoredFile(bytes=index.stat().st_size, checksum=file_checksum(index))}
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
        _sync_folder(self.working_path)
        replaced = hide_folder(self.final_path)  # deleted last: a crash may come at any time
        self.working_path.rename(self.final_path)
        _sync_folder(self.final_path.parent)
        if replaced is not None:
            delete_tree(replaced)

    def discard(self) -> None:
        """Delete what was written, unless the checkpoint is whole by now; it never becomes whole afterwards."""
        with self._lock:
            self._is_discarded = True
            for _ in range(_RETRIES):
                shutil.rmtree(self.working_path, ignore_errors=True)
                if not self.working_path.exists():
                    return
                time.sleep(_PAUSE)


def _entry(name: str, entry: TensorStorageMetadata, stored: Mapping[MetadataIndex, _CheckedPlace]) -> TensorEntry:
    written = [(chunk, stored[MetadataIndex(name, chunk.offsets)]) for chunk in entry.chunks]
    boxes = (StoredBox.of(one.place, chunk.offsets, chunk.sizes, one.checksum) for chunk, one in written)
    return TensorEntry.of(entry, boxes)


def _sync_folder(path: Path) -> None:
    """Force a folder's entries (new files, renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint(
    state: dict[str, ShardedState],
    writer: CheckpointWriter,
    *,
    needed: int,
    group: dist.ProcessGroup | None = None,
    is_async_save: bool = False,
) -> None:
    """Write a checkpoint of all ranks' states; it is whole and on the disk on return. Collective over the group.

    needed: bytes of the file system, for the message. group: of all ranks (None: the default one). is_async_save:
    whether another thread of this process trains concurrently.
    After an error, which all ranks raise, nothing of it is left. Raises NoSpaceError for a full disk, OSError where it
    cannot be written for another reason.
    """
    out = writer.final_path.parent.parent
    free = free_bytes(out)
    try:
        with _without_zip_checksums() if is_async_save else nullcontext():
            dcp.save(state, storage_writer=writer, planner=StateSavePlanner(), process_group=group)
    except BaseException as error:
        if dist.get_rank() == 0:  # it alone can make the folder final, so it alone may delete it
            writer.discard()
        if isinstance(error, dcp.CheckpointException):
            raise _explain(error, writer.final_path, needed, free) from error
        raise


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Have torch.save leave out the checksums of its container, which nothing in torch compares.

    It computes them while it holds the interpreter's lock, and the training thread would wait for it: for a tenth of a
    second at a tensor of 400 MB. The index has checksums of all pieces.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _explain(error: dcp.CheckpointException, path: Path, needed: int, free: int) -> WriteError:
    """Make one rank's error of torch's CheckpointException, a BaseException with a traceback for each rank."""
    causes = {rank: cause for rank, (cause, _) in error.failures.items()}
    for rank, cause in causes.items():
        if isinstance(cause, OSError) and cause.errno in _FULL:
            what = describe_lack(path.parent.parent, needed, free, was=True)
            return NoSpaceError(f"{what} (rank {rank}: {os.strerror(cause.errno)})", rank)
    rank, cause = next(iter(causes.items()))
    why = f"on rank {rank}, {type(cause).__name__}: {cause}"
    return WriteError(f"the checkpoint {path} could not be written: {why}", rank)


def _divide(plan: SavePlan, count: int) -> Iterator[SavePlan]:
    """Divide a rank's plan among writer threads, by bytes; each part has its own file name."""
    parts: list[list[WriteItem]] = [[] for _ in range(min(count, max(len(plan.items), 1)))]
    sizes = [0] * len(parts)
    for item in sorted(plan.items, key=_bytes_of, reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(item)
        sizes[least] += _bytes_of(item)
    prefix = plan.storage_data.prefix  # torch appends a number: __2_0.distcp, then __2_10.distcp, __2_20.distcp
    for number, items in enumerate(parts):
        yield replace(plan, items=items, storage_data=_StoragePrefix(f"{prefix}{number or ''}"))


def _bytes_of(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _size(count: float) -> str:
    """A number of bytes for a message."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:,.3g} {unit}"
    return f"{count:.0f} bytes"
