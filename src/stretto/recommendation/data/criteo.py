# SPDX-License-Identifier: Apache-2.0
"""Criteo's click logs: lines of text with a label, 13 integers and 26 categories, separated by tabs.

The text is parsed once into a cached file of fixed-size records, which a shuffle can read in any order.
"""

import gzip
import hashlib
import mmap
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from stretto.cluster import reading
from stretto.recommendation.data.batch import ClickBatch, make_bags
from stretto.train.data.cache import cached_file
from stretto.train.data.files import cut_short, file_size, find_files
from stretto.train.data.hashing import key_of, mix

NUMBERS, CATEGORIES = 13, 26
COLUMNS = 1 + NUMBERS + CATEGORIES
ABSENT = np.iinfo(np.int32).min  # marks an empty number
RECORD = np.dtype([("label", "u1"), ("numbers", "<i4", NUMBERS), ("categories", "<u4", CATEGORIES), ("absent", "<u4")])
VERSION = 1  # of RECORD and its contents
PIECE_BYTES = 1 << 22
GZIP = b"\x1f\x8b"
TAB, NEWLINE, RETURN, MINUS = b"\t\n\r-"

_NO_DIGIT = 255
_HEX = np.full(256, _NO_DIGIT, dtype=np.uint8)
for _digit in range(16):
    _HEX[list(f"{_digit:x}{_digit:X}".encode())] = _digit
_DECIMAL = np.where(_HEX < 10, _HEX, _NO_DIGIT).astype(np.uint8)


class CriteoClicks:
    """The lines of text files, gzipped or not, as samples for tables with `rows` rows and bags of `pooling` rows.

    A number x becomes log(1 + x), a negative or empty one 0. A category is hashed to a row of its table; row 0 is for
    empty categories. If pooling is above 1, the category determines the other rows as in MLPerf's DLRM-v2. Raises
    ValueError, with file and line, for a malformed file.
    """

    def __init__(self, path: str | list[str], rows: Sequence[int], pooling: Sequence[int]) -> None:
        if len(rows) != CATEGORIES:
            raise ValueError(f"Criteo's lines have {CATEGORIES} categories, but model.rows has {len(rows)} tables")
        self._rows, self._pooling = tuple(rows), tuple(pooling)
        _, files = find_files([path] if isinstance(path, str) else path, "text")
        records = cached_file(f"clicks/{_key_of(files)}.records", lambda file: _write_records(files, file))
        self._path, self._size = records, file_size(records)
        if self._size % RECORD.itemsize:
            raise ValueError(f"{records}: is cut short or damaged: delete it, and it is written again")
        with reading(records), records.open("rb") as file:
            # A batch has samples from everywhere, which a map reads several times as fast as a call for each sample.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._records = np.frombuffer(self._map, dtype=RECORD)

    @property
    def fingerprint(self) -> str:
        """A hexadecimal hash of the number of samples, a bounded sample of them, and the tables."""
        sample = self._take(np.linspace(0, len(self) - 1, num=min(len(self), 1000), dtype=np.int64))
        digest = hashlib.blake2b(repr((len(self), self._rows, self._pooling)).encode(), digest_size=16)
        digest.update(sample.tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._records)

    def read(self, samples: NDArray[np.int64]) -> ClickBatch:
        """Read samples by their numbers in [0, len). Raises ValueError if the cached records were cut short."""
        records = self._take(samples)
        dense = np.log1p(np.maximum(records["numbers"], 0).astype(np.float32))
        first = np.empty((CATEGORIES, len(samples)), dtype=np.int64)
        for table, rows in enumerate(self._rows):
            is_absent = (records["absent"] >> np.uint32(table)) & np.uint32(1)
            # Each table has its own hash, so that categories that collide in one do not in another of the same size.
            hashed = mix(records["categories"][:, table].astype(np.uint64) ^ key_of(table))
            first[table] = np.where(is_absent, 0, 1 + hashed % np.uint64(rows - 1)) if rows > 1 else 0
        indices, offsets = make_bags(first, self._rows, self._pooling)
        return ClickBatch(dense, records["label"].astype(np.float32), indices, offsets)

    def _take(self, samples: NDArray[np.int64]) -> NDArray[np.void]:
        """Read records. The file's size is checked before and after: a map has zeros where a file was truncated.

        Where whole pages are cut off between the two looks, the process is ended by SIGBUS.
        """
        self._require_whole()
        records = self._records[samples]
        self._require_whole()
        return records

    def _require_whole(self) -> None:
        if (size := self._map.size()) < self._size:
            raise cut_short(self._path, size, self._size)


def _key_of(files: Sequence[Path]) -> str:
    """Compute the cache key of the files' records; it changes if one of the files changes."""
    digest = hashlib.blake2b(f"{VERSION}".encode(), digest_size=16)
    for file in files:
        with reading(file):
            status = file.stat()
        digest.update(f"\0{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _write_records(files: Sequence[Path], output: BinaryIO) -> None:
    for file in files:
        line = 1
        for piece in _pieces(file, file_size(file)):
            records = parse_lines(piece, file, line)
            output.write(records.tobytes())
            line += len(records)
        if line == 1:
            raise ValueError(f"{file}: holds no line")


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """Yield the file's lines, about PIECE_BYTES at a time, decompressed if the file is gzipped.

    Raises ValueError if the file does not give `size` bytes.
    """
    with reading(path), path.open("rb") as file:
        is_packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        text = gzip.GzipFile(fileobj=file) if is_packed else file
        lines, rest = 0, b""
        try:
            while len(rest) <= PIECE_BYTES and (piece := text.read(PIECE_BYTES)):
                cut = piece.rfind(b"\n") + 1
                if cut:
                    yield rest + piece[:cut]
                    lines += 1 + piece.count(b"\n", 0, cut - 1)
                    rest = b""
                rest += piece[cut:]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: is cut short or damaged after line {lines}: {error}") from error
        if len(rest) <= PIECE_BYTES and (read := file.tell()) != size:
            raise cut_short(path, read, size)
        if rest:  # the last line, or a line that is too long, which the parser refuses
            yield rest + b"\n"


def parse_lines(text: bytes, path: Path, line: int = 1) -> NDArray[np.void]:
    """Parse complete lines into records. path, line: the file and the number of the first line, for messages.

    Raises ValueError for the first malformed line: a wrong number of columns, a label that is neither 0 nor 1, a number
    that is not an integer of 32 bits, a category that is not a hexadecimal number of 32 bits.
    """
    data = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(data == NEWLINE)
    separators = np.flatnonzero((data == TAB) | (data == NEWLINE))
    columns = np.diff(np.searchsorted(separators, ends), prepend=-1)
    if (wrong := np.flatnonzero(columns != COLUMNS)).size:
        # The lines before it are parsed first, so that the error names the first malformed line.
        parse_lines(text[: ends[wrong[0] - 1] + 1] if wrong[0] else b"", path, line)
        found = int(columns[wrong[0]])
        hint = ": a file without labels cannot be trained on" if found == COLUMNS - 1 else ""
        raise ValueError(
            f"{path}: line {line + wrong[0]} has {found} column{'s' * (found != 1)}, but must have {COLUMNS}: "
            f"a label, {NUMBERS} numbers and {CATEGORIES} categories with tabs between them{hint}"
        )
    stops = separators.reshape(-1, COLUMNS).copy()
    starts = np.concatenate(([0], separators[:-1] + 1))[: separators.size].reshape(-1, COLUMNS)
    if stops.size:
        last = stops[:, -1]
        stops[:, -1] -= (data[np.maximum(last - 1, 0)] == RETURN) & (last > starts[:, -1])
    records = np.zeros(len(stops), dtype=RECORD)
    faults = np.zeros(stops.shape, dtype=bool)
    lengths = stops - starts
    labels = data[starts[:, 0]] if stops.size else np.empty(0, np.uint8)
    faults[:, 0] = (lengths[:, 0] != 1) | ((labels != ord("0")) & (labels != ord("1")))
    records["label"] = labels == ord("1")
    some = slice(1, 1 + NUMBERS)
    records["numbers"], faults[:, some] = _parse_numbers(data, starts[:, some], stops[:, some])
    some = slice(1 + NUMBERS, COLUMNS)
    values, faults[:, some] = _parse_digits(data, starts[:, some], stops[:, some], _HEX, 16, 8)
    records["categories"] = values
    is_absent = (lengths[:, some] == 0).astype(np.uint32)
    records["absent"] = (is_absent << np.arange(CATEGORIES, dtype=np.uint32)).sum(axis=1)
    if faults.any():
        row, column = np.argwhere(faults)[0]
        value = text[starts[row, column] : stops[row, column]][:40].decode(errors="backslashreplace")
        raise ValueError(f"{path}: line {line + row}: {_rule(column)}, but is {value!r}")
    return records


def _rule(column: int) -> str:
    if column == 0:
        return "the label must be 0 or 1"
    if column <= NUMBERS:
        return f"number {column} of {NUMBERS} must be a whole number of 32 bits, or empty"
    return f"category {column - NUMBERS} of {CATEGORIES} must be a hexadecimal number of 32 bits, or empty"


def _parse_numbers(
    data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Parse decimal numbers. Returns the values (ABSENT for empty fields), and which fields are malformed."""
    is_negative = (stops > starts) & (data[np.minimum(starts, len(data) - 1)] == MINUS)
    values, faults = _parse_digits(data, starts + is_negative, stops, _DECIMAL, 10, 10)
    faults |= (is_negative & (stops == starts + 1)) | (values > np.iinfo(np.int32).max + is_negative)
    values = np.maximum(np.where(is_negative, -values, values), ABSENT + 1)  # all negative numbers are read as 0
    return np.where(starts == stops, ABSENT, values), faults


def _parse_digits(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    digits: NDArray[np.uint8],
    base: int,
    most: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Parse numbers of at most `most` digits. Returns the values (0 for empty fields), and which are malformed."""
    lengths = stops - starts
    faults = lengths > most
    values = np.zeros(starts.shape, dtype=np.int64)
    for place in range(min(most, int(lengths.max(initial=0)))):
        is_there = lengths > place
        found = digits[data[np.where(is_there, stops - 1 - place, 0)]]
        faults |= is_there & (found == _NO_DIGIT)
        values += np.where(is_there & (found != _NO_DIGIT), found.astype(np.int64) * base**place, 0)
    return values, faults
