# SPDX-License-Identifier: Apache-2.0
"""Checksums of checkpoints: CRC-32 of pieces of files, and of a JSON text over itself. Needs no torch.

A checksum finds what disks, memories and networks do to files by accident. Whoever can write to a file can write its
checksum, too: security checks (no code execution, no paths outside of the folder, bounded memory) are separate.
"""

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import IO, TypeAlias

from stretto.launch.failures import JobError

# Below, threads cost more than they save: zlib takes about 3 GB/s on one core.
THREADED_BYTES = 1 << 23
MAX_THREADS = 8
PATTERN = r"^crc32:[0-9a-f]{8}$"
Buffer: TypeAlias = bytes | bytearray | memoryview

_POLYNOMIAL = 0xEDB88320
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


def crc32(data: Buffer, threads: int | None = None) -> int:
    """The CRC-32 of bytes (zlib's), computed by several threads for many bytes (None: as many as this rank may)."""
    with crc32_in_background(data, threads) as checksum:
        pass
    return checksum()


@contextmanager
def crc32_in_background(data: Buffer, threads: int | None = None) -> Iterator["_PendingChecksum"]:
    """Compute the CRC-32 of bytes in other threads while the block runs, which may write them, say.

    Yields a function that returns the checksum once the block has ended. The bytes must not change during the block.
    """
    view = memoryview(data).cast("B")
    count = _threads_of_rank() if threads is None else threads
    if len(view) < THREADED_BYTES:
        yield _PendingChecksum([], [], zlib.crc32(view))
        return
    step = max(1 << 22, -(-len(view) // (4 * count)))
    bounds = [*range(0, len(view), step), len(view)]
    with ThreadPoolExecutor(count, thread_name_prefix="stretto-crc32") as pool:
        parts = [pool.submit(zlib.crc32, view[start:stop]) for start, stop in pairwise(bounds)]
        yield _PendingChecksum(parts, [stop - start for start, stop in pairwise(bounds)])


def crc32_of_blocks(data: Buffer, block: int) -> list[int]:
    """The CRC-32 of each block of so many bytes, of which the last may have fewer."""
    view = memoryview(data).cast("B")
    blocks = [view[start : start + block] for start in range(0, len(view), block)]
    if len(view) < THREADED_BYTES:
        return [zlib.crc32(each) for each in blocks]
    with ThreadPoolExecutor(_threads_of_rank(), thread_name_prefix="stretto-crc32") as pool:
        return list(pool.map(zlib.crc32, blocks))


class _PendingChecksum:
    def __init__(self, parts: Sequence["Future[int]"], lengths: Sequence[int], known: int | None = None) -> None:
        self._parts, self._lengths, self._known = parts, lengths, known

    def __call__(self) -> int:
        if self._known is None:
            self._known = 0
            for part, length in zip(self._parts, self._lengths, strict=True):
                self._known = combine(self._known, part.result(), length)
        return self._known


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two byte strings, one after the other, from their own; `length`: bytes of the second.

    A CRC is a remainder of polynomials over GF(2): the first is multiplied by x^(8 length).
    """
    return _multiply(_power_of_x(8 * length), first) ^ second


@lru_cache(maxsize=64)  # parts of one length follow each other
def _power_of_x(exponent: int) -> int:
    """x to a power, modulo the CRC's polynomial, by squaring. The highest bit is the constant term."""
    power, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        exponent >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials, modulo the CRC's."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@cache
def _threads_of_rank() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(MAX_THREADS, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


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


def check_seal(text: bytes) -> tuple[str, str] | None:
    """Compare a text with the checksum in it. Returns None if they agree, else the expected and the found value."""
    match = _OWN_CHECKSUM.search(text)
    if match is None:
        return "a checksum", "none"
    found = zlib.crc32(_with_checksum(text, match, _NONE))
    return None if int(match[1], 16) == found else (to_text(int(match[1], 16)), to_text(found))


def _with_checksum(text: bytes, match: "re.Match[bytes]", digits: bytes) -> bytes:
    return text[: match.start(1)] + digits + text[match.end(1) :]
