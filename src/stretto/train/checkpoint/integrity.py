# SPDX-License-Identifier: Apache-2.0
"""Checksums of checkpoints: CRC-32 of pieces of files, and of a JSON text over itself. Needs no torch.

A checksum finds what disks, memories and networks do to files by accident. Whoever can write to a file can write its
checksum, too: security checks (no code execution, no paths outside of the folder, bounded memory) are separate.
"""

import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from stretto.launch.failures import JobError

# Below, threads cost more than they save: zlib takes about 3 GB/s on one core.
THREADED_BYTES = 1 << 23
MAX_THREADS = 8
PATTERN = r"^crc32:[0-9a-f]{8}$"
Buffer: TypeAlias = bytes | bytearray | memoryview

_OWN_CHECKSUM = re.compile(rb'"(?:stretto\.)?checksum": ?"crc32:([0-9a-f]{8})"')
_NONE = b"0" * 8


class DamagedError(JobError, ValueError):
    """Bytes of a checkpoint's or an exported model's file are not those that were written. The message names them."""

    would_recur = True


class DamagedCheckpointError(DamagedError):
    """A checkpoint is damaged. All ranks raise it alike. `path`: the checkpoint's folder."""

    has_advice = True

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True)
class Damage:
    """A range of a file's bytes that are not what was written.

    tensor: the name of the bytes' tensor. start, stop: the range in bytes. expected, found: checksums, or values of
    bytes, or None where there are none (for a file that is too short, say).
    """

    file: str
    tensor: str | None
    start: int
    stop: int
    reason: str
    expected: str | None = None
    found: str | None = None

    def __str__(self) -> str:
        of = "" if self.tensor is None else f", {self.tensor}"
        compared = "" if self.expected is None else f": {self.expected} expected, {self.found} found"
        return f"{self.file}{of}, bytes {self.start} to {self.stop}: {self.reason}{compared}"


def to_text(checksum: int) -> str:
    """Write a CRC-32 as files do: crc32:1a2b3c4d."""
    return f"crc32:{checksum:08x}"


def crc32_of_blocks(data: Buffer, block: int) -> list[int]:
    """Return the CRC-32 of each block of so many bytes; the last may be shorter."""
    view = memoryview(data).cast("B")
    blocks = [view[start : start + block] for start in range(0, len(view), block)]
    if len(view) < THREADED_BYTES:
        return [zlib.crc32(each) for each in blocks]
    with ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="stretto-crc32") as pool:
        return list(pool.map(zlib.crc32, blocks))


def read_range(file: IO[bytes], start: int, length: int) -> memoryview:
    """Read bytes of an open file. Returns fewer where the file ends. One read takes at most 2 GB on Linux."""
    import numpy as np

    content = np.empty(length, np.uint8).data  # not filled with zeros first
    file.seek(start)
    done = 0
    while done < length and (count := file.readinto(content[done:])):  # type: ignore[attr-defined]
        done += count
    return content[:done]


def file_checksum(path: Path) -> str:
    """The checksum of a whole file, which is read in blocks."""
    found = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found = zlib.crc32(block, found)
    return to_text(found)


def seal(text: bytes) -> bytes:
    """Put the checksum of a text into it, in place of zeros: of its first `"checksum": "crc32:00000000"`.

    The key may also be `stretto.checksum`. The checksum is that of all the text, with the zeros.
    """
    match = _OWN_CHECKSUM.search(text)
    if match is None or match[1] != _NONE:
        raise AssertionError("a text to be sealed has no place for its checksum")
    return _with_checksum(text, match, f"{zlib.crc32(text):08x}".encode())


def check_seal(text: bytes) -> str:
    """Compare a text with the checksum in it. Returns how they differ, in words; empty if they agree."""
    expected, found = "a checksum", "none"
    if (match := _OWN_CHECKSUM.search(text)) is not None:
        expected, found = to_text(int(match[1], 16)), to_text(zlib.crc32(_with_checksum(text, match, _NONE)))
    return "" if expected == found else f"checksum differs: {expected} expected, {found} found"


def _with_checksum(text: bytes, match: "re.Match[bytes]", digits: bytes) -> bytes:
    return text[: match.start(1)] + digits + text[match.end(1) :]
