# SPDX-License-Identifier: Apache-2.0
"""Output of all commands: text for people on stdout, one line of JSON for machines, errors on stderr."""

import io
import json
import os
import re
import signal
import sys
import threading
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
    """Make stdout escape characters that its encoding lacks (of a folder's name, say), as stderr does.

    Standard streams that were closed (`>&-`) are /dev/null: the next file that is opened would have their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # it has the lowest free number
            setattr(sys, name, open(number, "r+", closefd=False))  # noqa: SIM115  (as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def fail(message: str, status: int, *, as_json: bool) -> typer.Exit:
    """Print an error, and return the exception that ends the command with `status`.

    A file's control characters, which it may quote, are escaped: they could steer a terminal.
    """
    shown = "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in message)
    with suppress(OSError):  # its reader may have exited
        print(f"stretto: {shown}", file=sys.stderr, flush=True)
    if as_json:
        print_json({"error": message})
    return typer.Exit(status)


@contextmanager
def refusing_bad_input(*, as_json: bool = False) -> Iterator[None]:
    """End the command with status 2 for a ValueError, whose message is for users, or an OSError; 1 if ranks failed."""
    try:
        yield
    except BrokenPipeError:
        raise  # `reporting_faults` ends the command
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise fail(f"{where}{error.strerror or error}", BAD_INPUT, as_json=as_json) from error
    except ValueError as error:
        raise fail(str(error), BAD_INPUT, as_json=as_json) from error
    except RuntimeError as error:
        from stretto.launch.failures import RanksFailed  # imported where it was raised

        if not isinstance(error, RanksFailed):
            raise
        raise fail(str(error), 1, as_json=as_json) from error


@contextmanager
def reporting_faults() -> Iterator[None]:
    """End any command with a line, and no traceback, where its output cannot be written or memory does not suffice.

    A reader of the output that has ended, as `head` does, is no fault: the command ends as by SIGPIPE.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, for Python would report what fails at exit with a traceback
    except SystemExit as end:  # typer's, with status 1, where the command wrote to a reader that had ended
        if isinstance(end.__context__, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from end
        raise
    except (ImportError, MemoryError, OSError) as error:
        if isinstance(error, ImportError) and not re.search("failed to map|cannot allocate", str(error)):
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)  # what is left in the buffer must not fail again
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from error
        what = f"{error.filename or 'output'}: {error.strerror or error}" if isinstance(error, OSError) else ""
        with suppress(OSError):
            print(f"stretto: {what or f'memory does not suffice: {error}'.rstrip(': ')}", file=sys.stderr, flush=True)
        raise SystemExit(BAD_INPUT) from error


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


@contextmanager
def raising_on_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind as Ctrl-C does, so that what was made is removed. Does nothing outside the main thread."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
