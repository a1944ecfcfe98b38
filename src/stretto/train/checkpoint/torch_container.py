# SPDX-License-Identifier: Apache-2.0
"""Checks the zip container in which `torch.save` writes: each bit of it, without torch.

A container has records (the pickle, the numbers, versions), each with a CRC-32, which torch writes and does not check
when it loads. Only records have one, so the rest is compared with what torch would have written around them: local
headers with their padding, descriptors, the central directory and its end. Containers that another program has
written (with its own headers) are checked by the records' CRCs alone.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from stretto.train.checkpoint.integrity import crc32, to_text

_LIMIT = 0xFFFFFFFF  # sizes and offsets from here on are written as 64 bits, in extra fields
_ALIGNMENT = 64  # of the records' first bytes, unless a record says otherwise
_END = 56 + 20 + 22  # bytes of the directory's end as 64 bits, of its locator, and of the end as 32 bits
_HEAD = struct.pack("<4sHHHIIII", b"PK\3\4", 0, 0x0808, 0, 0, 0, 0, 0)  # of each local header
_EMPTY_HEAD = struct.pack("<4sHHHIIII", b"PK\3\4", 0, 0x0800, 0, 0, 0, 0, 0)  # of a record without bytes
_END_HEAD = struct.pack("<4sQHH", b"PK\6\6", 44, 0x031E, 45)
_MAX_RECORDS = 1 << 20
# What zipfile raises for bytes that are no zip container: RuntimeError for records that say that they are encrypted,
# OverflowError for offsets of 64 bits.
_NO_CONTAINER = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, OverflowError, struct.error)


class Checked(Enum):
    """The parts of a container that could be checked."""

    ALL = "each bit"
    RECORDS = "the records' CRCs"
    NOTHING = "nothing: it was written without CRCs"


@dataclass(frozen=True)
class ContainerFault:
    """A range of a container's bytes (from its beginning) that are not those that were written."""

    start: int
    stop: int
    reason: str
    expected: str | None = None
    found: str | None = None


@dataclass(frozen=True)
class _ZipRecord:
    name: bytes
    crc: int
    size: int


class _FaultError(Exception):
    def __init__(self, *fault: object) -> None:
        self.fault = ContainerFault(*fault)  # type: ignore[arg-type]


def check_container(content: memoryview, threads: int | None = None) -> tuple[Checked, ContainerFault | None]:
    """Check a container's bytes. Returns how much was checked, and the first fault, if there is one."""
    try:
        if not _is_of_torch(content):
            return Checked.RECORDS, _check_records(content)
        records = list(_read_directory(content))
        has_crcs = any(record.crc for record in records)
        _check_all(content, records, threads if has_crcs else 0)
        return Checked.ALL if has_crcs else Checked.NOTHING, None
    except _FaultError as error:
        return Checked.ALL, error.fault


def _is_of_torch(content: memoryview) -> bool:
    """True if two of four places that torch alone writes so are as it does: one may be damaged, or the end cut off."""
    head = content[: len(_HEAD)] == _HEAD
    name_end = 30 + int.from_bytes(content[26:28], "little")
    padding = content[name_end : name_end + 2] == b"FB"
    end = content[-_END:][: len(_END_HEAD)] == _END_HEAD
    rest = content[-42:-38] == b"PK\6\7" and content[-22:-18] == b"PK\5\6"
    return head + padding + end + rest >= 2


def _check_records(content: memoryview) -> ContainerFault | None:
    """Check the records' CRCs alone, by Python's own reader."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as container:
            infos = container.infolist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
                return ContainerFault(0, len(content), "a zip container with compressed records, which torch never has")
            if sum(info.file_size for info in infos) > len(content):  # a few bytes could demand any amount of work
                return ContainerFault(0, len(content), "a zip container whose records overlap")
            name = container.testzip()
    except _NO_CONTAINER as error:
        return ContainerFault(0, len(content), f"no zip container ({error})")
    if name is None:
        return None
    info = next(info for info in infos if info.filename == name)
    return ContainerFault(info.header_offset, len(content), f"the CRC of its record {name} differs")


def _read_directory(content: memoryview) -> Iterator[_ZipRecord]:
    """Read names, CRCs and sizes of the records from the central directory."""
    if len(content) < _END:
        raise _FaultError(0, len(content), "its zip container is cut short")
    count, _, size, start = struct.unpack_from("<QQQQ", content, len(content) - _END + 24)
    stop = len(content) - _END
    if start + size != stop or count > min(size // 46, _MAX_RECORDS):
        raise _FaultError(stop, len(content), "the end of its zip directory does not fit the directory")
    at = start
    for _ in range(count):
        if at + 46 > stop:
            raise _FaultError(start, stop, "its zip directory is cut short")
        crc, _, length, name_size, extra_size, comment_size = struct.unpack_from("<IIIHHH", content, at + 16)
        after = at + 46 + name_size + extra_size + comment_size
        if after > stop:
            raise _FaultError(at, stop, "its zip directory is cut short")
        if length == _LIMIT and extra_size >= 12:
            (length,) = struct.unpack_from("<Q", content, at + 46 + name_size + 4)
        yield _ZipRecord(bytes(content[at + 46 : at + 46 + name_size]), crc, length)
        at = after
    if at != stop:
        raise _FaultError(at, stop, "its zip directory has bytes that belong to no record")


def _check_all(content: memoryview, records: list[_ZipRecord], threads: int | None) -> None:
    """Compare a container with what torch writes for these records. threads: 0 to leave the CRCs out."""
    at, directory, alignment = 0, [], _ALIGNMENT
    for record in records:
        what = ascii(record.name.decode("latin-1"))[1:-1]
        start = at
        at = _compare(content, at, _local_header(record, at, alignment), f"the zip header of its record {what}")
        if at + record.size > len(content):
            raise _FaultError(at, len(content), f"its record {what} is longer than the container")
        data = content[at : at + record.size]
        if threads != 0 and (found := crc32(data, threads)) != record.crc:
            raise _FaultError(
                at, at + record.size, f"the CRC of its record {what}", to_text(record.crc), to_text(found)
            )
        if record.name.endswith(b"/.storage_alignment") and bytes(data[:5]).isdigit():
            alignment = max(1, int(bytes(data[:5])))
        descriptor = _descriptor(record, is_wide=start >= _LIMIT or record.size >= _LIMIT)
        at = _compare(content, at + record.size, descriptor, f"the zip descriptor of its record {what}")
        directory.append(_directory_entry(record, start))
    start, size = at, sum(map(len, directory))
    at = _compare(content, at, b"".join(directory), "its zip directory")
    at = _compare(content, at, _end(len(records), size, start), "the end of its zip directory")
    if at != len(content):
        raise _FaultError(at, len(content), "bytes after the end of its zip container")


def _compare(content: memoryview, at: int, expected: bytes, what: str) -> int:
    """Compare bytes from `at` on; returns where they end."""
    found = bytes(content[at : at + len(expected)])
    if found != expected:
        same = next((n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
        there = f"0x{found[same]:02x}" if same < len(found) else "the end"
        raise _FaultError(at + same, at + same + 1, what, f"0x{expected[same]:02x}", there)
    return at + len(expected)


def _wide(size: int, at: int) -> bytes:
    """The extra field of a record that is too large for 32 bits, or that begins too far behind."""
    sizes = struct.pack("<QQ", size, 0) if size >= _LIMIT else b""
    offset = struct.pack("<Q", at) if at >= _LIMIT else b""
    return struct.pack("<HH", 1, len(sizes + offset)) + sizes + offset if sizes or offset else b""


def _local_header(record: _ZipRecord, at: int, alignment: int) -> bytes:
    """A record's local header, with what aligns its first byte: FB, the count, and that many Z."""
    wide = _wide(record.size, at)
    start = at + 30 + len(record.name) + len(wide) + 4
    count = -start % alignment
    if len(wide) + 4 + count > 0xFFFF:  # the header has 16 bits for the length of both
        raise _FaultError(at, at + 30, f"records cannot be aligned to {alignment} bytes, as its container says")
    padding = b"FB" + struct.pack("<H", count) + b"Z" * count
    lengths = struct.pack("<HH", len(record.name), len(wide) + len(padding))
    return (_HEAD if record.size else _EMPTY_HEAD) + lengths + record.name + wide + padding


def _descriptor(record: _ZipRecord, *, is_wide: bool) -> bytes:
    if not record.size:
        return b""
    sizes = struct.pack("<QQ" if is_wide else "<II", record.size, record.size)
    return b"PK\7\x08" + struct.pack("<I", record.crc) + sizes


def _directory_entry(record: _ZipRecord, at: int) -> bytes:
    wide = _wide(record.size, at)
    if record.size >= _LIMIT:  # here the stored size stands too
        wide = wide[:12] + struct.pack("<Q", record.size) + wide[20:]
    size, offset = min(record.size, _LIMIT), min(at, _LIMIT)
    fixed = struct.pack(
        "<4sHHHHIIIIHHHHHII",
        *(
            b"PK\1\2",
            0,
            0,
            0x0808 if record.size else 0x0800,
            0,
            0,
            record.crc,
            size,
            size,
            len(record.name),
            len(wide),
        ),
        *(0, 0, 0, 0, offset),
    )
    return fixed + record.name + wide


def _end(count: int, size: int, start: int) -> bytes:
    wide = _END_HEAD + struct.pack("<IIQQQQ", 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    few = min(count, 0xFFFF)
    return wide + locator + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, few, few, size, min(start, _LIMIT), 0)
