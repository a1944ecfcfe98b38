"""How commands speak: text for people on stdout, one line of JSON for machines, errors on stderr."""

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
    """Print one line of JSON. What has no number in JSON, NaN, is null."""
    print(
        json.dumps({key: None if value != value else value for key, value in values.items()}, default=str), flush=True
    )


def print_any_text() -> None:
    """Let stdout show what its encoding does not have (a folder's name, say) as escapes, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fail(message: str, status: int, *, as_json: bool) -> typer.Exit:
    """Print an error, and return what a command raises to end with `status`."""
    with suppress(OSError):  # nobody may read it any more
        print(f"stretto: {message}", file=sys.stderr, flush=True)
    if as_json:
        print_json({"error": message})
    return typer.Exit(status)


@contextmanager
def refusing_bad_input(*, as_json: bool = False) -> Iterator[None]:
    """Turn a ValueError, which is written for users, or a file that cannot be written, into exit status 2."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise fail(f"{where}{error.strerror or error}", BAD_INPUT, as_json=as_json) from error
    except ValueError as error:
        raise fail(str(error), BAD_INPUT, as_json=as_json) from error


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """Send what this process and those it starts write on stdout to stderr: stdout is kept for JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
