# SPDX-License-Identifier: Apache-2.0
"""The help of commands and groups, as plain text.

typer's own help is drawn by rich, which takes longer to import than most commands take to refuse an argument, and cuts
options' names on a terminal of 80 columns.
"""

import inspect
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

LONGEST_NAME = 26  # characters of an option or command that has its help beside it, not below it


def write_help(command: Any, ctx: Any, formatter: Any, commands: Mapping[str, Any] | None = None) -> None:
    """Write usage, text, and a section of options or commands for each of the panels that they name."""
    command.format_usage(ctx, formatter)
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        formatter.write("\n")
        items = paragraph.split("\n") if paragraph.startswith("- ") else [paragraph]
        for item in items:
            below = "    " if item.startswith("- ") else "  "
            formatter.write("\n".join(_wrap(item, formatter.width, "  ", below)) + "\n")
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
    for name, each in (commands or {}).items():
        if not each.hidden:
            summary = each.get_short_help_str(limit=1000)
            sections.setdefault(each.rich_help_panel or "Commands", []).append((name, summary))
    for heading, rows in sections.items():
        formatter.write(f"\n{heading}:\n")
        for line in _list_rows(rows, formatter.width):
            formatter.write(f"{line}\n")


def _list_rows(rows: list[tuple[str, str]], width: int) -> Iterable[str]:
    """Lines of two columns: names, and what they mean."""
    column = 4 + max((len(name) for name, _ in rows if len(name) <= LONGEST_NAME), default=4)
    for name, text in rows:
        if len(name) > LONGEST_NAME:
            yield f"  {name}"
            name = ""
        yield from _wrap(text, width, f"  {name}".ljust(column), " " * column) or [f"  {name}"]


def _wrap(text: str, width: int, first: str, below: str) -> list[str]:
    """Lines of a text; names with hyphens stay whole."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=below, break_on_hyphens=False)
