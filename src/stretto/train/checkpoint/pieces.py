# SPDX-License-Identifier: Apache-2.0
"""Reads pieces of shard files, each checked before it is used: by the index's checksum, else by torch's own CRCs.

Needs no torch.
"""

import io
import os
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.train.checkpoint.integrity import Damage, DamagedError, read_range, to_text
from stretto.train.checkpoint.metadata import StoredBox

# What zipfile raises for bytes that are no zip container: RuntimeError for records that say that they are encrypted,
# OverflowError for offsets of 64 bits.
_NO_CONTAINER = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OverflowError, struct.error)

_DIRECTORY = 0x10  # a record's attribute

READERS = 4  # threads that read pieces ahead
MAX_BYTES_AHEAD = 1 << 28  # of pieces that are read and not used yet, unless one is larger


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a tensor: the tensor's name, for messages, and where its bytes are."""

    tensor: str | None
    place: StoredBox


def read_piece(folder: Path, piece: StoredPiece) -> memoryview:
    """Read a piece's bytes. Raises DamagedError, with file, tensor and bytes, if they are not what was written."""
    with open(folder / piece.place.file, "rb", buffering=0) as file:
        content = read_range(file, piece.place.start, piece.place.bytes)
    damage, _ = check_piece(piece, content)
    if damage is not None:
        raise DamagedError(str(damage))
    return content


def check_piece(piece: StoredPiece, content: memoryview) -> tuple[Damage | None, bool]:
    """Check a piece's bytes. Returns what is damaged, if anything is, and whether there was a checksum."""
    place = piece.place
    start, stop = place.start, place.start + place.bytes
    if len(content) < place.bytes:
        reason = f"the file ends at byte {start + len(content)}"
        return Damage(place.file, piece.tensor, start, stop, reason), True
    if place.checksum is None:
        fault, has_crcs = check_container(content)
        return (None if fault is None else Damage(place.file, piece.tensor, start, stop, fault)), has_crcs
    if (found := to_text(zlib.crc32(content))) == place.checksum:
        return None, True
    return Damage(place.file, piece.tensor, start, stop, "the checksum differs", place.checksum, found), True


def check_container(content: memoryview) -> tuple[str | None, bool]:
    """Compare the records of a zip container of `torch.save` with their CRCs, which torch writes and does not check.

    Returns what is wrong, if anything is, and whether there are CRCs. What is around records has none: a change there
    is harmless, or it shows in a record.
    """
    try:
        with zipfile.ZipFile(MemoryFile(content)) as container:
            records = container.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                return "a zip container with compressed records, which torch never has", True
            if any(record.external_attr & _DIRECTORY for record in records):  # its numbers would not be read
                return "a zip container with a directory, which torch never has", True
            if sum(record.file_size for record in records) > len(content):  # a few bytes could demand any work
                return "a zip container whose records overlap", True
            if not any(record.CRC for record in records):
                return None, False
            name = container.testzip()
    except _NO_CONTAINER as error:
        return f"no zip container ({error})", True
    return None if name is None else f"the CRC of its record {ascii(name)[1:-1]} differs", True


class MemoryFile(io.RawIOBase):
    """Bytes in memory as a file to be read. io.BytesIO would copy them."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        self._at = origin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._content[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def read_ahead(folder: Path, pieces: Sequence[StoredPiece]) -> Iterator[memoryview]:
    """Read pieces as `read_piece` does, in this order, while their user works on those before."""
    waiting: deque[tuple[int, Future[memoryview]]] = deque()
    with ThreadPoolExecutor(READERS, thread_name_prefix="stretto-read") as pool:
        try:
            ahead = 0
            for piece in pieces:
                while waiting and ahead + piece.place.bytes > MAX_BYTES_AHEAD:
                    size, content = waiting.popleft()
                    yield content.result()
                    ahead -= size
                ahead += piece.place.bytes
                waiting.append((piece.place.bytes, pool.submit(read_piece, folder, piece)))
            while waiting:
                yield waiting.popleft()[1].result()
        finally:
            for _, content in waiting:
                content.cancel()
