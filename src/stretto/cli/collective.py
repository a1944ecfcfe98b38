# SPDX-License-Identifier: Apache-2.0
"""`stretto collective`: compiles, verifies, draws, simulates and runs collectives."""

import json
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.console import Json, fail, print_json, refusing_bad_input

if TYPE_CHECKING:
    from stretto.collectives import Algorithm, Schedule, Verification

NOT_VERIFIED = 1
SHOWN_ERRORS = 20
SHOWN_LETTERS = 100
FIXED = ("protocol", "instances", "slots", "min_bytes", "max_bytes")
"""Compile options of every algorithm; no algorithm has a parameter of such a name."""

app = typer.Typer(
    no_args_is_help=True,
    help="Collectives as programs over chunks: compiled, proved safe before they run, stored as MSCCL XML.",
)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME_OR_FILE:FUNCTION", help="One of `stretto collective list`, or file.py:function."),
]
File = Annotated[Path, typer.Argument(metavar="F.xml", help="A schedule.")]
Ranks = Annotated[int | None, typer.Option(help="Ranks, for an algorithm that takes `ranks`.")]
Nodes = Annotated[int | None, typer.Option(help="Nodes, for an algorithm that takes `nodes` and `gpus`.")]
Gpus = Annotated[int | None, typer.Option(help="GPUs a node.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=NUMBER", help="Another parameter of the algorithm.")
]
InPlace = Annotated[
    bool | None,
    typer.Option("--in-place/--out-of-place", help="Whether input and output share memory."),
]
Instances = Annotated[int, typer.Option(help="Copies of the whole program, each on a part of the data.")]
Protocol = Annotated[str, typer.Option(help="Simple, LL or LL128.")]
Slots = Annotated[int | None, typer.Option(help="FIFO slots a connection (default: the protocol's, 2, 8 and 8).")]
Waive = Annotated[
    list[str] | None, typer.Option(help="An error that is not counted: replica_consistency. May be given again.")
]
LimitsOf = Annotated[str | None, typer.Option("--limits", help="Also check the limits of a runtime: rccl.")]
MaxFileBytes = Annotated[int, typer.Option(help="The largest file that is read.", min=1)]
DEFAULT_MAX_FILE_BYTES = 128 * 2**20


@app.command("list")
def list_algorithms(as_json: Json = False) -> None:
    """List the algorithms that come with Stretto."""
    from stretto.collectives.algorithms import ALGORITHMS

    rows = [
        {"name": each.name, "parameters": list(each.parameters), "summary": each.summary, "source": each.source}
        for each in ALGORITHMS.values()
    ]
    if as_json:
        print_json({"algorithms": rows})
        return
    for row in rows:
        print(f"{row['name']}  ({', '.join(row['parameters']) or 'no parameters'})\n    {row['summary']}")
        print(f"    {row['source']}")


@app.command("compile")
def compile_(
    name: Name,
    ranks: Ranks = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    instances: Instances = 1,
    protocol: Protocol = "Simple",
    slots: Slots = None,
    in_place: InPlace = None,
    set_: Sets = None,
    min_bytes: Annotated[int, typer.Option(help="The smallest size that it is meant for.", min=0)] = 0,
    max_bytes: Annotated[int, typer.Option(help="The largest size that it is meant for (0: any).", min=0)] = 0,
    limits: LimitsOf = None,
    waive: Waive = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the schedule here (default: to standard output).")
    ] = None,
) -> None:
    """Compile a program to a schedule, verify it, and write it as MSCCL XML. Words go to standard error.

    - stretto collective compile ring-all-reduce --ranks 8 --instances 4 --protocol LL -o ring.xml
    - stretto collective compile my_file.py:my_function --ranks 8
    """
    with refusing_bad_input():
        from stretto.collectives import verify

        parameters = _parameters(ranks, nodes, gpus, in_place, set_)
        made = _compile(name, protocol, instances, slots, parameters | {"min_bytes": min_bytes, "max_bytes": max_bytes})
        _require_limits(made, limits)
        found = verify(made, slots=slots, waive=waive or ())
        if found.ok:
            _write(made, output)
    print(_describe(made, found), file=sys.stderr)
    if not found.ok:
        raise fail("not written: the schedule is not verified", NOT_VERIFIED, as_json=False)


@app.command("verify")
def verify_(
    file: File,
    slots: Slots = None,
    waive: Waive = None,
    limits: LimitsOf = None,
    max_file_bytes: MaxFileBytes = DEFAULT_MAX_FILE_BYTES,
    as_json: Json = False,
) -> None:
    """Verify a schedule. Exit status: 0 verified, 1 not, 2 not a schedule.

    Checks the collective's postcondition, deadlock, data races, whether all ranks add in one order, and that the
    schedule is well formed.
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.collectives import verify
        from stretto.collectives.limits import exceeded_limits

        schedule = _read(file, max_file_bytes)
        found = verify(schedule, slots=slots, waive=waive or ())
        over = exceeded_limits(schedule, _limits(limits)) if limits is not None else []
        ok = found.ok and not over
        if as_json:
            print(json.dumps(asdict(found) | {"ok": ok, "errors": [*found.errors, *over]}), flush=True)
        else:
            print("\n".join([_describe(schedule, found), *(f"  {each}" for each in over)]), flush=True)
    if not ok:
        raise typer.Exit(NOT_VERIFIED)


@app.command("import-msccl", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def import_msccl(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="A script written for msccl-tools.")],
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGS]...", help="The script's own arguments; a last -o F.xml is ours, unless after --."
        ),
    ] = None,
    slots: Slots = None,
    waive: Waive = None,
    limits: LimitsOf = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the schedule here (default: to standard output); a folder for several."
        ),
    ] = None,
) -> None:
    """Run an unmodified script for msccl-tools, and write its programs' schedules once they are verified.

    - stretto collective import-msccl allreduce_ring.py 8 --protocol LL -o ring.xml
    """
    with refusing_bad_input():
        from stretto.collectives import verify
        from stretto.collectives.msccl import ScriptError
        from stretto.collectives.msccl import import_msccl as run_script

        arguments, output = _script_arguments(args or [], output)
        try:
            programs = run_script(script, arguments).programs
        except ScriptError as error:
            print(error.printed, end="", file=sys.stderr)
            raise
        if len(programs) > 1 and (output is None or output.suffix):
            raise ValueError(f"{script} makes {len(programs)} programs: name a folder for them with -o")
        for program in programs:
            _require_limits(program.schedule, limits)
            for note in program.notes:
                print(f"note: {note}", file=sys.stderr)
            found = verify(program.schedule, slots=slots, waive=waive or ())
            print(_describe(program.schedule, found), file=sys.stderr)
            if not found.ok:
                raise fail("not written: the schedule is not verified", NOT_VERIFIED, as_json=False)
        if len(programs) == 1:
            _write(programs[0].schedule, output)
            return
        assert output is not None
        output.mkdir(parents=True, exist_ok=True)
        for number, program in enumerate(programs):
            name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in program.schedule.name)
            _write(program.schedule, output / f"{number}-{name}.xml")


@app.command()
def show(
    file: File,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The picture, .png or .svg (default: F.png beside F.xml).")
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="The ranks to show, as FIRST-LAST (default: all).")] = None,
    max_file_bytes: MaxFileBytes = DEFAULT_MAX_FILE_BYTES,
) -> None:
    """Draw a schedule: ranks and thread blocks as rows, steps as boxes, messages as arrows."""
    with refusing_bad_input():
        from stretto.report.schedule import plot_schedule

        picture = output or file.with_suffix(".png")
        if picture.exists() and picture.samefile(file):
            raise ValueError(f"{picture} is the schedule itself: name another file for the picture with -o")
        plot_schedule(_read(file, max_file_bytes), picture, _rank_range(ranks))
        print(picture)


@app.command()
def run(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="One of `stretto collective list`, file.py:function, or a schedule.")
    ],
    ranks: Ranks = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    size: Annotated[str, typer.Option("--bytes", help="Of a rank's larger buffer: 4096, 64K, 1M, 1G.")] = "1M",
    dtype: Annotated[str, typer.Option(help="fp64, fp32, fp16, bf16, int8, int16, int32, int64 or uint8.")] = "fp32",
    reduction: Annotated[str, typer.Option(help="sum, max, min or prod.")] = "sum",
    repeats: Annotated[int, typer.Option(help="Runs; their median counts.", min=1)] = 1,
    instances: Instances = 1,
    protocol: Protocol = "Simple",
    slots: Slots = None,
    in_place: InPlace = None,
    set_: Sets = None,
    waive: Waive = None,
    max_file_bytes: MaxFileBytes = DEFAULT_MAX_FILE_BYTES,
    as_json: Json = False,
) -> None:
    """Run a collective on processes of this machine, each rank one, and check every number that comes out.

    It is verified first. Exit status: 0 right, 1 not verified, wrong or not run to its end, 2 bad input.

    - stretto collective run ring-all-reduce --ranks 4 --bytes 1M
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.collectives import verify
        from stretto.collectives.host_benchmark import run_host_benchmark

        parameters = _parameters(ranks, nodes, gpus, in_place, set_)
        if name.endswith(".xml"):
            if parameters.keys() - {"in_place"} or (instances, protocol) != (1, "Simple"):
                raise ValueError(f"{name} is compiled: leave out what only a program takes, as --ranks and --instances")
            schedule = _read(Path(name), max_file_bytes)
        else:
            schedule = _compile(name, protocol, instances, slots, parameters)
        found = verify(schedule, slots=slots, waive=waive or ())
        if found.ok:
            try:
                with _cleaning_up_when_ended():
                    result = run_host_benchmark(
                        schedule, size, dtype, reduction, repeats=repeats, slots=slots, in_place=in_place
                    )
            except RuntimeError as error:  # a process died, or the others did not wait any longer
                raise fail(f"not run to its end: {_one_line(error)}", NOT_VERIFIED, as_json=as_json) from error
    if not found.ok:
        print(_describe(schedule, found), file=sys.stderr)
        raise fail("not run: the schedule is not verified", NOT_VERIFIED, as_json=as_json)
    if as_json:
        print_json(asdict(result))
    else:
        print(
            f"{_shown(schedule.name)} on {schedule.collective.ranks} processes, {result.bytes:,} bytes of {dtype}: "
            f"{result.seconds * 1e3:.1f} ms with their start, "
            + ("all numbers right" if not result.wrong else f"{result.wrong:,} numbers WRONG")
        )
    if result.wrong:
        raise typer.Exit(NOT_VERIFIED)


@contextmanager
def _cleaning_up_when_ended() -> Iterator[None]:
    """Make SIGTERM unwind the program as Ctrl-C does, so that its processes and files are removed."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _script_arguments(args: list[str], output: Path | None) -> tuple[list[str], Path | None]:
    """Split the arguments: a last `-o F.xml` is this command's, all that follows a `--` is the script's."""
    if args[:1] == ["--"]:
        return args[1:], output
    if output is None and len(args) >= 2 and args[-2] in ("-o", "--output"):
        return args[:-2], Path(args[-1])
    return args, output


def _write(schedule: "Schedule", output: Path | None) -> None:
    from stretto.collectives.xml import to_xml, write_schedule

    if output is not None:
        write_schedule(schedule, output)
        return
    sys.stdout.write(to_xml(schedule))
    sys.stdout.flush()


def _read(file: Path, max_bytes: int) -> "Schedule":
    from stretto.collectives.xml import read_schedule

    return read_schedule(file, max_bytes=max_bytes)


def _compile(name: str, protocol: str, instances: int, slots: int | None, parameters: dict[str, Any]) -> "Schedule":
    """Compile an algorithm's schedule. Output of the user's own program goes to stderr, since stdout is for XML.

    ValueError for whatever goes wrong in it, with its line.
    """
    with redirect_stdout(sys.stderr):
        try:
            return _find(name).compile(protocol=protocol, instances=instances, slots=slots, **parameters)
        except (Exception, SystemExit) as error:
            text = _one_line(error)
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


def _one_line(error: BaseException) -> str:
    return " ".join(line.strip() for line in str(error).splitlines())


def _find(name: str) -> "Algorithm":
    """Find an algorithm by its name, or by the file and function that define it."""
    from stretto.collectives.algorithms import find, load

    file, colon, function = name.rpartition(":")
    return load(Path(file), function) if colon else find(name)


def _parameters(
    ranks: int | None, nodes: int | None, gpus: int | None, in_place: bool | None, sets: list[str] | None
) -> dict[str, Any]:
    given: dict[str, Any] = {"ranks": ranks, "nodes": nodes, "gpus": gpus, "in_place": in_place}
    parameters = {name: value for name, value in given.items() if value is not None}
    for each in sets or ():
        name, equals, text = each.partition("=")
        if not equals or re.fullmatch(r"-?[0-9]{1,18}", text) is None:
            raise ValueError(f"--set takes NAME=NUMBER, not {each!r}")
        if name in given:
            raise ValueError(f"--set {each}: there is an option for {name}: --{name.replace('_', '-')}")
        if name in FIXED:
            raise ValueError(f"--set {each}: {name} is no parameter of an algorithm")
        parameters[name] = int(text)
    # Whoever gives nodes and GPUs may say again how many ranks that makes.
    if "ranks" in parameters and {"nodes", "gpus"} <= parameters.keys():
        if parameters["nodes"] * parameters["gpus"] != parameters["ranks"]:
            raise ValueError(f"{nodes} nodes of {gpus} GPUs are not {ranks} ranks")
        del parameters["ranks"]
    return parameters


def _limits(name: str) -> Any:
    from stretto.collectives.limits import LIMITS

    if name not in LIMITS:
        raise ValueError(f"limits are known of {', '.join(LIMITS)}, not of {name!r}")
    return LIMITS[name]


def _require_limits(schedule: "Schedule", name: str | None) -> None:
    from stretto.collectives.limits import exceeded_limits

    if name is not None and (over := exceeded_limits(schedule, _limits(name))):
        raise ValueError("; ".join(over[:5]))


def _rank_range(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise ValueError(f"--ranks takes FIRST-LAST or one rank, not {text!r}")
    return range(int(first), int(last or first) + 1)


def _describe(schedule: "Schedule", found: "Verification") -> str:
    """Describe a schedule and its verification, for people."""
    collective = schedule.collective
    blocks = max((len(program.thread_blocks) for program in schedule.ranks), default=0)
    lines = [
        f"{_shown(schedule.name)}: {_shown(collective.name)} of {collective.ranks} ranks, "
        f"{collective.chunks_per_loop} chunks, "
        f"{schedule.protocol}, {schedule.channels} channels, up to {blocks} thread blocks a rank, {found.steps} steps",
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


def _shown(name: str) -> str:
    """Escape control characters and line breaks of a name that was read from a file."""
    letters = (letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name[:SHOWN_LETTERS])
    return "".join(letters) + ("..." if len(name) > SHOWN_LETTERS else "")


def _word(value: bool | None, yes: str, no: str) -> str:
    return "not checked" if value is None else yes if value else no
