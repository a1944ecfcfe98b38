# SPDX-License-Identifier: Apache-2.0
"""Output of all commands: text for people on stdout, one line of JSON for machines, errors on stderr."""

import io
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from stretto.cli.help import write_help
from stretto.suggestions import similar_names

BAD_INPUT = 2
MAX_INTEGER = 2**62

Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON, for machines.")]


UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of errors in a command line, which typer does not export."""


class Command(TyperCommand):
    """A command whose error names all missing options, and suggests an option for an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line as typer does, with these messages, and refuse numbers that nothing can be."""
        try:
            rest = super().parse_args(ctx, list(args))
            for parameter in self.get_params(ctx):
                given = ctx.params.get(parameter.name)
                for number in given if isinstance(given, list | tuple) else [given]:
                    if isinstance(number, float) and not math.isfinite(number):
                        ctx.fail(f"{_shown_name(parameter)} is {number}, but must be a finite number.")
                    if isinstance(number, int) and abs(number) > MAX_INTEGER:
                        ctx.fail(f"{_shown_name(parameter)} is {number}, but must lie between -2^62 and 2^62.")
            return rest
        except UsageError as error:
            missing = self._find_missing(ctx, args) if isinstance(error, typer.BadParameter) else []
            if len(missing) > 1:
                ctx.fail(f"Missing {' and '.join(missing)}.")
            if (unknown := getattr(error, "option_name", None)) is not None:
                options = [
                    name for parameter in self.get_params(ctx) for name in parameter.opts if name.startswith("--")
                ]
                if near := similar_names(unknown, options):
                    ctx.fail(f"No such option: {unknown}; did you mean {near[0]}?")
                error.possibilities = options  # type: ignore[attr-defined]
            raise

    def _find_missing(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        parameters: list[Any] = self.get_params(ctx)
        return [
            f"{parameter.param_type_name} {_shown_name(parameter)}"
            for parameter in parameters
            if parameter.required and given.get(parameter.name) is None
        ]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the command's help."""
        write_help(self, ctx, formatter)


def _shown_name(parameter: Any) -> str:
    return repr(parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name)


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
    except BrokenPipeError:
        raise  # `reporting_faults` ends the command
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise fail(f"{where}{error.strerror or error}", BAD_INPUT, as_json=as_json) from error
    except ValueError as error:
        raise fail(str(error), BAD_INPUT, as_json=as_json) from error


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
