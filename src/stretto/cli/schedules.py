# SPDX-License-Identifier: Apache-2.0
"""Shared by the commands of `stretto collective`: schedules by name or from files, described for people."""

import re
import sys
import traceback
from collections.abc import Collection
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.quantities import counted
from stretto.suggestions import did_you_mean, did_you_mean_file

if TYPE_CHECKING:
    from stretto.collectives import Algorithm, Schedule, Verification

SHOWN_ERRORS = 20
SHOWN_LETTERS = 100
DEFAULT_MAX_FILE_BYTES = 128 * 2**20
FIXED = ("protocol", "instances", "slots", "min_bytes", "max_bytes")
"""Compile options of every algorithm; no algorithm has a parameter of such a name."""


Slots = Annotated[
    int | None, typer.Option(help="FIFO slots per connection (default: 2 for Simple, 8 for LL and LL128).")
]


@dataclass(frozen=True)
class Compilation:
    """The options by which a command line has an algorithm compiled. sets: further parameters, as NAME=NUMBER."""

    ranks: Annotated[int | None, typer.Option(help="Number of ranks, for an algorithm with the parameter `ranks`.")] = (
        None
    )
    nodes: Annotated[
        int | None, typer.Option(help="Number of nodes, for an algorithm with the parameters `nodes` and `gpus`.")
    ] = None
    gpus: Annotated[int | None, typer.Option(help="GPUs per node.")] = None
    instances: Annotated[
        int, typer.Option(help="Number of instances of the whole program, each for a part of the data.")
    ] = 1
    protocol: Annotated[str, typer.Option(help="Simple, LL or LL128.")] = "Simple"
    slots: Slots = None
    in_place: Annotated[
        bool | None, typer.Option("--in-place/--out-of-place", help="Whether input and output share memory.")
    ] = None
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=NUMBER", help="Another parameter of the algorithm.")
    ] = None
    min_bytes: int = 0
    max_bytes: int = 0

    def list_given(self) -> list[str]:
        """The names of the options that are not as they are without being given."""
        return [each.name for each in fields(self) if getattr(self, each.name) not in (each.default, [])]


def is_schedule_file(name: str) -> bool:
    """True if a name means a file with a schedule, and not an algorithm or file.py:function."""
    return ":" not in name and (any(letter in name for letter in "./") or Path(name).is_file())


def load_schedule(
    name: str, given: Compilation, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES, of_files: Collection[str] = ()
) -> "Schedule":
    """The schedule of a file, or the compiled one of an algorithm or of file.py:function.

    of_files: what a command takes of `given` for compiled schedules, too. ValueError for a name that means none of
    these, and for options that do not suit it.
    """
    if not is_schedule_file(name):
        if max_file_bytes != DEFAULT_MAX_FILE_BYTES:
            raise ValueError(f"--max-file-bytes is for schedules' files, and {name} is a program: leave it out")
        return compile_algorithm(name, given)
    if extra := [each for each in given.list_given() if each not in of_files]:
        options = ", ".join(_shown_option(each) for each in extra)
        raise ValueError(f"{name} is compiled: leave out what only a program takes: {options}")

    from stretto.collectives.xml import read_schedule

    try:
        return read_schedule(Path(name), max_bytes=max_file_bytes)
    except FileNotFoundError as error:
        raise ValueError(f"{name}: {error.strerror}{did_you_mean_file(Path(name), ('.xml',))}") from error


def _shown_option(field: str) -> str:
    known = {"sets": "--set", "in_place": "--in-place or --out-of-place"}
    return known.get(field, f"--{field.replace('_', '-')}")


def write(schedule: "Schedule", output: Path | None) -> None:
    from stretto.collectives.xml import to_xml, write_schedule

    if output is not None:
        write_schedule(schedule, output)
        return
    sys.stdout.write(to_xml(schedule))
    sys.stdout.flush()


def compile_algorithm(name: str, given: Compilation) -> "Schedule":
    """Compile an algorithm's schedule. Output of the user's own program goes to stderr, since stdout is for XML.

    ValueError for whatever goes wrong in it, with its line.
    """
    parameters = _parameters(given)
    with redirect_stdout(sys.stderr):
        try:
            return _find(name).compile(
                protocol=given.protocol,
                instances=given.instances,
                slots=given.slots,
                min_bytes=given.min_bytes,
                max_bytes=given.max_bytes,
                **parameters,
            )
        except (Exception, SystemExit) as error:
            text = one_line(error)
            if isinstance(error, ValueError) and text:
                raise ValueError(text) from error
            kind = type(error).__name__
            raise ValueError(f"{name} does not run: {_place(error, name)}: {kind}: {text}") from error


def _place(error: BaseException, name: str) -> str:
    """The innermost traceback line of the user's own file, or of any file if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(name.rpartition(":")[0]).absolute()
    place = ([frame for frame in frames if Path(frame.filename) == file] or frames)[-1]
    return f"{place.filename}:{place.lineno}"


def one_line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines())


def _find(name: str) -> "Algorithm":
    """Find an algorithm by its name, or by the file and function that define it."""
    from stretto.collectives.algorithms import find, load

    file, colon, function = name.rpartition(":")
    return load(Path(file), function) if colon else find(name)


def _parameters(given: Compilation) -> dict[str, Any]:
    options = {"ranks": given.ranks, "nodes": given.nodes, "gpus": given.gpus, "in_place": given.in_place}
    parameters: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for each in given.sets or ():
        name, equals, text = each.partition("=")
        if not equals or re.fullmatch(r"-?[0-9]{1,18}", text) is None:
            raise ValueError(f"--set takes NAME=NUMBER, not {each!r}")
        if name in options:
            raise ValueError(f"--set {each}: there is an option for {name}: --{name.replace('_', '-')}")
        if name in FIXED:
            raise ValueError(f"--set {each}: {name} is no parameter of an algorithm")
        parameters[name] = int(text)
    # Whoever gives nodes and GPUs may say again how many ranks that makes.
    if "ranks" in parameters and {"nodes", "gpus"} <= parameters.keys():
        if parameters["nodes"] * parameters["gpus"] != parameters["ranks"]:
            raise ValueError(f"{given.nodes} nodes of {given.gpus} GPUs are not {given.ranks} ranks")
        del parameters["ranks"]
    return parameters


def find_limits(name: str) -> Any:
    """The limits of a runtime. ValueError for one that is not known."""
    from stretto.collectives.limits import LIMITS

    if name not in LIMITS:
        raise ValueError(f"limits are known of {', '.join(LIMITS)}, not of {name!r}{did_you_mean(name, LIMITS)}")
    return LIMITS[name]


def require_limits(schedule: "Schedule", name: str | None) -> None:
    """ValueError for a schedule that exceeds the limits of the runtime of this name (None: none)."""
    from stretto.collectives.limits import exceeded_limits

    if name is not None and (over := exceeded_limits(schedule, find_limits(name))):
        raise ValueError("; ".join(over[:5]))


def describe(schedule: "Schedule", found: "Verification") -> str:
    """Describe a schedule and its verification, for people."""
    collective = schedule.collective
    blocks = max((len(program.thread_blocks) for program in schedule.ranks), default=0)
    lines = [
        f"{shown_name(schedule.name)}: {shown_name(collective.name)} of {counted(collective.ranks, 'rank')}, "
        f"{counted(collective.chunks_per_loop, 'chunk')}, {schedule.protocol}, "
        f"{counted(schedule.channels, 'channel')}, up to {counted(blocks, 'thread block')} a rank, "
        f"{counted(found.steps, 'step')}",
        f"  postcondition       {_word(found.postcondition, 'holds', 'does not hold')}",
        f"  deadlock            {_word(found.deadlock_free, 'none', 'possible')} with {found.slots} slots a connection"
        + (f" (needs {found.min_slots})" if found.min_slots is not None else ""),
        f"  data races          {'not checked' if found.races is None else len(found.races) or 'none'}",
        f"  order of additions  {_word(found.replica_consistent, 'the same on all ranks', 'differs between ranks')}"
        + (f", at most {found.roundings} roundings" if found.roundings else ""),
    ]
    if found.writes_input:
        lines.append("  note: a call that is out of place finds its input changed")
    lines += [f"  {error}" for error in found.errors[:SHOWN_ERRORS]]
    if len(found.errors) > SHOWN_ERRORS:
        lines.append(f"  ... and {len(found.errors) - SHOWN_ERRORS} more errors (--json has them)")
    if not found.ok and all(error.startswith("replica consistency") for error in found.errors):
        lines.append("  all else holds: --waive replica_consistency accepts that")
    lines.append("verified" if found.ok else "NOT verified")
    return "\n".join(lines)


def shown_name(name: str) -> str:
    """Escape control characters and line breaks of a name that was read from a file."""
    letters = (letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name[:SHOWN_LETTERS])
    return "".join(letters) + ("..." if len(name) > SHOWN_LETTERS else "")


def _word(value: bool | None, yes: str, no: str) -> str:
    return "not checked" if value is None else yes if value else no
