# SPDX-License-Identifier: Apache-2.0
"""Several tables in one result's Markdown, and lines after a table."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.atomic_files import write_atomically
from stretto.bench.harness import Column, markdown_table

ANY_CPU = {"devices": "any CPU"}
"""The machine of results that are computed, and the same everywhere."""

TitledTable = tuple[str, Sequence[Column], Sequence[Mapping[str, Any]]]


def write_tables(result: Path, tables: Sequence[TitledTable]) -> None:
    """Write several tables, each with its title, into the Markdown next to a result, replacing its single table."""
    table = result.with_suffix(".md")
    head = table.read_text().partition("\n\n")[0]
    parts = [f"{title}:\n\n" + "\n".join(markdown_table(columns, rows)) for title, columns, rows in tables]
    write_atomically(table, "\n\n".join([head, *parts]) + "\n")


def append_to_table(result: Path, lines: Iterable[str]) -> None:
    """Append lines of Markdown, after an empty one, to the table next to a result."""
    table = result.with_suffix(".md")
    write_atomically(table, table.read_text() + "\n" + "\n".join(lines) + "\n")
