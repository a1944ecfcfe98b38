# SPDX-License-Identifier: Apache-2.0
"""Reads documents one after another from JSON Lines, Parquet files, and folders that `datasets` has saved.

A document is text, or a list of token ids, in one field of a record. Files are read in pieces. What is damaged is named
with its file, its record, and the byte at which that, or the part that holds it, begins.
"""

import importlib.util
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from stretto.cluster import reading
from stretto.quantities import MAX_VOCAB
from stretto.suggestions import did_you_mean
from stretto.train.data.files import file_size, read_head

MAX_LINE_BYTES = 1 << 28  # of JSON Lines: a longer one is no document
BATCH_ROWS = 256  # of Parquet's that are held as Python's objects
PARQUET_END_BYTES = 8  # the index's size and a magic number


class Document(NamedTuple):
    """value: text or token ids. where: the file and the place in it, for messages."""

    value: str | list[int]
    where: str


def read_documents(file: Path, format: str, field: str) -> Iterator[Document]:
    """Yield the documents of a file in order. format: "jsonl", "parquet" or "arrow".

    Raises ValueError that names file and place for whatever is not a document, and for a file that changes meanwhile.
    """
    with reading(file):
        before = file.stat()
    records = {"jsonl": _read_json, "parquet": _read_parquet, "arrow": _read_arrow}[format](file, field)
    for value, where in records:
        is_ids = isinstance(value, list) and all(type(token) is int for token in value)
        if not is_ids and not isinstance(value, str):
            raise ValueError(f"{where}: field {field!r} is {str(value)[:40]!r}, but must be text or a list of ids")
        if is_ids and value and not 0 <= min(value) <= max(value) < MAX_VOCAB:
            raise ValueError(f"{where}: token ids are from {min(value)} to {max(value)}, not in [0, {MAX_VOCAB})")
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{where}: field {field!r} is not Unicode: {error.reason}") from None
        yield Document(value, where)
    with reading(file):
        after = file.stat()
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ValueError(
            f"{file}: was written to while it was read: it had {before.st_size} bytes, and has {after.st_size}; start "
            "again when it is whole"
        )


def _read_json(file: Path, field: str) -> Iterator[tuple[Any, str]]:
    read_head(file, 64)  # refuses a compressed file
    offset = number = 0
    with reading(file), file.open("rb") as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            number += 1
            where = f"{file}: line {number} (byte {offset})"
            if len(line) == MAX_LINE_BYTES:
                raise ValueError(f"{where} has more than {MAX_LINE_BYTES} bytes")
            offset += len(line)
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
            except UnicodeDecodeError as error:
                at = offset - len(line) + error.start
                raise ValueError(f"{where}: byte {at} is not valid UTF-8 ({error.reason})") from None
            except (ValueError, RecursionError) as error:
                end = "" if line.endswith(b"\n") else ", and is the last: the file may have been cut short"
                raise ValueError(f"{where} is not JSON: {error}{end}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where} is no object of JSON, such as {{{field!r}: ...}}")
            _require_field(where, field, record)
            yield record[field], where


def _require_field(where: str, field: str, names: Iterable[str]) -> None:
    if field in names:
        return
    found = ", ".join(map(repr, islice(names, 20))) or "none"
    raise ValueError(
        f"{where}: has no field {field!r} (its fields: {found}): name the one with the documents by data.field"
        f"{did_you_mean(field, list(names))}, or set format to 'text' for raw lines"
    )


def _require_pyarrow(file: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{file}: needs the package pyarrow: pip install 'stretto[data]'")


def _read_parquet(file: Path, field: str) -> Iterator[tuple[Any, str]]:
    _require_pyarrow(file)
    from pyarrow import parquet

    try:
        opened = parquet.ParquetFile(file, page_checksum_verification=True)
    except Exception as error:  # pyarrow's are of several kinds, here and below
        at = max(0, file_size(file) - PARQUET_END_BYTES)
        raise ValueError(f"{file}: the index at its end (byte {at}) cannot be read: {error}") from error
    with opened:
        _require_field(str(file), field, opened.schema_arrow.names)
        groups, row = opened.metadata.num_row_groups, 0
        for group in range(groups):
            where = (
                f"{file}: row group {group} of {groups} (byte {_first_byte(opened.metadata.row_group(group), field)})"
            )
            try:
                for batch in opened.iter_batches(BATCH_ROWS, row_groups=[group], columns=[field]):
                    for value in batch.column(0).to_pylist():
                        yield value, f"{where}, row {row}"
                        row += 1
            except Exception as error:
                raise ValueError(f"{where} cannot be read from row {row} on: {error}") from error


def _first_byte(group: Any, field: str) -> int:
    """The byte at which a field's pages begin in a row group of a Parquet file."""
    columns = (group.column(index) for index in range(group.num_columns))
    pages = [each for each in columns if each.path_in_schema.split(".")[0] == field]
    return min(start for each in pages for start in (each.dictionary_page_offset, each.data_page_offset) if start)


def _read_arrow(file: Path, field: str) -> Iterator[tuple[Any, str]]:
    """Read batches in Arrow's stream format, as `datasets.Dataset.save_to_disk` writes, or in its file format."""
    _require_pyarrow(file)
    import pyarrow

    row = place = 0
    try:
        with pyarrow.OSFile(str(file)) as source:
            if source.read(8) != b"ARROW1\0\0":  # after which a file has a stream, and then an index
                source.seek(0)
            batches = pyarrow.ipc.open_stream(source)
            names = batches.schema.names
            while field in names:
                place = source.tell()
                try:
                    batch = batches.read_next_batch()
                except StopIteration:
                    break
                batch.validate(full=True)
                for value in batch.column(field).to_pylist():
                    yield value, f"{file}: row {row}, of the batch at byte {place}"
                    row += 1
    except Exception as error:
        raise ValueError(f"{file}: the batch at byte {place} (row {row}) cannot be read: {error}") from error
    _require_field(str(file), field, names)
