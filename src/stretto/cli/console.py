# SPDX-License-Identifier: Apache-2.0
"""Output of all commands: text for people on stdout, one line of JSON for machines, errors on stderr."""

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

BAD_INPUT = 2

Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON, for machines.")]


def print_json(values: Mapping[str, Any]) -> None:
    """Print one line of JSON, with null for NaN, which JSON lacks."""
    print(
        json.dumps({key: None if value != value else value for key, value in values.items()}, default=str), flush=True
    )


def print_any_text() -> None:
    """Make stdout escape characters that its encoding lacks (of a folder's name, say), as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fail(message: str, status: int, *, as_json: bool) -> typer.Exit:
    """Print an error, and return the exception that ends the command with `status`."""
    with suppress(OSError):  # its reader may have exited
        print(f"stretto: {message}", file=sys.stderr, flush=True)
    if as_json:
        print_json({"error": message})
    return typer.Exit(status)


@contextmanager
def refusing_bad_input(*, as_json: bool = False) -> Iterator[None]:
    """End the command with status 2 for a ValueError, whose message is for users, or an OSError."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise fail(f"{where}{error.strerror or error}", BAD_INPUT, as_json=as_json) from error
    except ValueError as error:
        raise fail(str(error), BAD_INPUT, as_json=as_json) from error


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Redirect stdout of this process and its children to stderr, since stdout is for JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
