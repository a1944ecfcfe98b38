# SPDX-License-Identifier: Apache-2.0
"""Checksums in safetensors files that Stretto writes, in the header's `__metadata__`, which other readers pass over.

`stretto.checksum` is that of the header itself (`integrity.seal`), with the eight bytes before it; `stretto.crc32` is
JSON text with the CRC-32 of each block of BLOCK bytes of each tensor, eight digits a block. By blocks, a rank that
reads a few rows checks these. Needs no torch.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from stretto.train.checkpoint.integrity import (
    Buffer,
    Damage,
    DamagedError,
    check_seal,
    crc32_of_blocks,
    read_range,
    seal,
    to_text,
)

BLOCK = 1 << 22
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_MARK = b'"stretto.'
_NO_CHECKSUM = "crc32:00000000"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file: where its bytes are, and the CRC-32 of each of its blocks (None: not known)."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    checksums: tuple[int, ...] | None

    def read(self, first: int, last: int) -> memoryview:
        """Read the tensor's bytes from `first` to `last`, with the blocks that they are in checked.

        Raises DamagedError, with the block, for one whose bytes are not those that were written.
        """
        begin = first // BLOCK * BLOCK
        end = min(self.stop - self.start, -(-last // BLOCK) * BLOCK)
        with open(self.file, "rb", buffering=0) as file:
            content = read_range(file, self.start + begin, end - begin)
        if len(content) < end - begin:  # blocks that are missing have no checksum that could differ
            stop = self.start + begin + len(content)
            raise DamagedError(f"{self.file} is damaged: {self.name}: the file ends at byte {stop}")
        if damage := self.check(content, begin):
            raise DamagedError(f"{self.file} is damaged: {damage}")
        return content[first - begin : last - begin]

    def check(self, content: memoryview, begin: int) -> Damage | None:
        """Compare the tensor's bytes from its byte `begin` on, at a block's beginning, with their checksums."""
        if self.checksums is None:
            return None
        for number, found in enumerate(crc32_of_blocks(content, BLOCK), begin // BLOCK):
            if found != self.checksums[number]:
                start = self.start + number * BLOCK
                where = start, min(start + BLOCK, self.stop)
                expected = to_text(self.checksums[number])
                return Damage(self.file.name, self.name, *where, "the checksum differs", expected, to_text(found))
        return None


def make_header(tensors: Mapping[str, Mapping[str, Any]], checksums: Mapping[str, str] | None) -> bytes:
    """The first bytes of a file, up to its first tensor. tensors: the header's entries, by name.

    checksums: digits of each tensor's blocks (`digits_of`); None for a header of the same length, to be replaced.
    """
    if checksums is None:
        sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in tensors.items()}
        checksums = {name: "0" * 8 * -(-size // BLOCK) for name, size in sizes.items()}
    about = {"format": "pt", "stretto.checksum": _NO_CHECKSUM, "stretto.crc32": json.dumps(checksums)}
    header = json.dumps({"__metadata__": about} | dict(tensors)).encode()
    header += b" " * (-len(header) % 8)  # aligns the tensors' bytes
    return seal(struct.pack("<Q", len(header)) + header)


def digits_of(content: Buffer) -> str:
    """The checksums of a tensor's blocks as the header has them."""
    return "".join(f"{checksum:08x}" for checksum in crc32_of_blocks(content, BLOCK))


def header_bytes(file: Path) -> int:
    """The size of a file's header in bytes, including the eight that contain it. The file must have them."""
    with open(file, "rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read a safetensors file's header: its tensors, with their checksums if Stretto has written it.

    Raises ValueError for a file that is not safetensors, and DamagedError for a header that is not what Stretto wrote.
    """
    status = file.stat()
    if not S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
        raise DamagedError(f"{file} cannot be read as safetensors: it is not a regular file")
    size = status.st_size
    with open(file, "rb") as opened:
        prefix = opened.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise DamagedError(f"{file} cannot be read as safetensors: its header would have {length} bytes")
        header = opened.read(length)
    if _MARK in header and (differs := check_seal(prefix + header)):
        raise DamagedError(f"{file} is damaged: header, bytes 0 to {8 + length}: the {differs}")
    try:
        content = json.loads(header)
        about = content.pop("__metadata__", None) or {}
        checksums = json.loads(about["stretto.crc32"]) if "stretto.crc32" in about else None
        return dict(_read_tensors(file, content, 8 + length, checksums))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{file} cannot be read as safetensors: {error!r}") from error


def _read_tensors(
    file: Path, content: Mapping[str, Any], start: int, checksums: Mapping[str, str] | None
) -> Iterator[tuple[str, StoredTensor]]:
    for name, entry in content.items():
        first, last = entry["data_offsets"]
        if type(first) is not int or type(last) is not int or not 0 <= first <= last:
            raise ValueError(f"{name} has the offsets {entry['data_offsets']}")
        known = None
        if checksums is not None:
            digits = checksums[name]
            if len(digits) != 8 * -(-(last - first) // BLOCK):
                raise ValueError(f"{name} has {len(digits)} digits of checksums, and {last - first} bytes")
            known = tuple(int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
        shape = tuple(int(size) for size in entry["shape"])
        yield name, StoredTensor(file, name, str(entry["dtype"]), shape, start + first, start + last, known)


def seal_index(index: dict[str, Any]) -> bytes:
    """The text of an index of several files (`model.safetensors.index.json`), with its checksum."""
    about = {"stretto.checksum": _NO_CHECKSUM, "stretto.format": "1"}
    return seal((json.dumps(index | {"metadata": about | index["metadata"]}, indent=2) + "\n").encode())


def require_sealed_index(file: Path, text: bytes) -> None:
    """Raise DamagedError for an index of several files that is not what Stretto wrote; one of others passes."""
    if _MARK in text and (differs := check_seal(text)):
        raise DamagedError(f"{file} is damaged: its {differs}")
