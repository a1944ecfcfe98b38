# SPDX-License-Identifier: Apache-2.0
"""`stretto collective`: compiles, verifies, draws, simulates and runs collectives."""

import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.atomic_files import require_writable, require_writable_folder
from stretto.cli.commands import App, with_options_of
from stretto.cli.console import Json, fail, print_json, raising_on_sigterm, refusing_bad_input
from stretto.cli.schedules import (
    DEFAULT_MAX_FILE_BYTES,
    Compilation,
    Slots,
    compile_algorithm,
    describe,
    find_limits,
    is_schedule_file,
    load_schedule,
    one_line,
    require_limits,
    shown_name,
    write,
)
from stretto.quantities import counted, read_bytes

if TYPE_CHECKING:
    from stretto.collectives.schedule import Schedule

NOT_VERIFIED = 1
MAX_SCRIPT_BYTES = 16 * 2**20

app = App(help="Write collectives as programs over chunks: compile them to MSCCL XML, verify, simulate and run them.")

Program = Annotated[
    str,
    typer.Argument(metavar="NAME_OR_FILE:FUNCTION", help="A name from `stretto collective list`, or file.py:function."),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A name from `stretto collective list`, file.py:function, or a schedule F.xml."
    ),
]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="One or more names from `stretto collective list`, file.py:function, or schedules F.xml.",
    ),
]
Waive = Annotated[
    list[str] | None, typer.Option(help="A check whose failure is not an error: replica_consistency. May be repeated.")
]
MaybeClusterName = Annotated[
    str | None,
    typer.Option("--cluster", metavar="NAME|FILE", help="A preset (`stretto cluster list`) or a cluster file."),
]
LimitsOf = Annotated[str | None, typer.Option("--limits", help="Also check the limits of a runtime; supported: rccl.")]
MaxFileBytes = Annotated[int, typer.Option(help="Files larger than this are rejected.", min=1)]


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
@with_options_of(Compilation)
def compile_(
    name: Program,
    given: Compilation,
    min_bytes: Annotated[int, typer.Option(help="The smallest call that the schedule runs, in bytes.", min=0)] = 0,
    max_bytes: Annotated[
        int, typer.Option(help="The largest call that the schedule runs, in bytes (0: any).", min=0)
    ] = 0,
    limits: LimitsOf = None,
    waive: Waive = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the schedule here (default: to standard output).")
    ] = None,
) -> None:
    """Compile a program to a schedule, verify it, and write it as MSCCL XML. Messages go to standard error.

    - stretto collective compile ring-all-reduce --ranks 8 --instances 4 --protocol LL -o ring.xml
    - stretto collective compile my_file.py:my_function --ranks 8
    """
    with refusing_bad_input():
        from stretto.collectives import verify

        if output is not None:
            require_writable(output, "--output")
        made = compile_algorithm(name, replace(given, min_bytes=min_bytes, max_bytes=max_bytes))
        require_limits(made, limits)
        found = verify(made, slots=given.slots, waive=waive or ())
        print(describe(made, found), file=sys.stderr, flush=True)
        if not found.ok:
            raise fail("not written: the schedule is not verified", NOT_VERIFIED, as_json=False)
        write(made, output)


@app.command("verify")
@with_options_of(Compilation)
def verify_(
    names: Names,
    given: Compilation,
    waive: Waive = None,
    limits: LimitsOf = None,
    max_file_bytes: MaxFileBytes = DEFAULT_MAX_FILE_BYTES,
    as_json: Json = False,
) -> None:
    """Verify schedules. Exit status: 0 if all are correct, 1 if one is not, 2 if a file is not a schedule.

    Checks the collective's postcondition, deadlock, data races, whether all ranks add in one order, and that the
    schedule is well formed.

    - stretto collective verify ring.xml
    - stretto collective verify schedules/*.xml
    - stretto collective verify ring-all-reduce --ranks 8
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.collectives import verify
        from stretto.collectives.limits import exceeded_limits

        known_limits = None if limits is None else find_limits(limits)
        answers = {}
        for name in names:
            schedule = load_schedule(name, given, max_file_bytes, ("slots",))
            found = verify(schedule, slots=given.slots, waive=waive or ())
            over = [] if known_limits is None else exceeded_limits(schedule, known_limits)
            answers[name] = asdict(found) | {"ok": found.ok and not over, "errors": [*found.errors, *over]}
            if not as_json:
                print("\n".join([describe(schedule, found), *(f"  {each}" for each in over)]), flush=True)
        ok = all(answer["ok"] for answer in answers.values())
        if as_json:
            print(json.dumps(answers[names[0]] if len(names) == 1 else {"ok": ok, "schedules": answers}), flush=True)
    if not ok:
        raise typer.Exit(NOT_VERIFIED)


@app.command("import-msccl", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def import_msccl(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.py", help="A script written for msccl-tools.")],
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGS]...",
            help="The script's arguments; a final -o F.xml belongs to this command, unless it follows --.",
        ),
    ] = None,
    is_agreed: Annotated[
        bool, typer.Option("--yes", help="Run the script without asking (needed once for each script).")
    ] = False,
    slots: Slots = None,
    waive: Waive = None,
    limits: LimitsOf = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the schedule here (default: to standard output); for several schedules, a folder.",
        ),
    ] = None,
) -> None:
    """Run an unmodified msccl-tools script, verify its programs' schedules, and write them.

    The script is a Python program, and it runs with your rights: it can read, write and send what you can. Read it
    first. You are asked once for each script, until its text changes; --yes agrees without being asked.

    - stretto collective import-msccl --yes allreduce_ring.py 8 --protocol LL -o ring.xml
    """
    with refusing_bad_input():
        from stretto.collectives import verify
        from stretto.collectives.msccl import ScriptError
        from stretto.collectives.msccl import import_msccl as run_script

        arguments, output = _script_arguments(args or [], output)
        if output is not None and output.suffix:
            require_writable(output, "--output")
        elif output is not None:
            require_writable_folder(output.parent, "--output")
        _agree_to_run(script, is_agreed=is_agreed)
        try:
            programs = run_script(script, arguments).programs
        except ScriptError as error:
            print(error.printed, end="", file=sys.stderr)
            raise
        if len(programs) > 1 and (output is None or output.suffix):
            raise ValueError(f"{script} makes {len(programs)} programs: name a folder for them with -o")
        for program in programs:
            require_limits(program.schedule, limits)
            for note in program.notes:
                print(f"note: {note}", file=sys.stderr)
            found = verify(program.schedule, slots=slots, waive=waive or ())
            print(describe(program.schedule, found), file=sys.stderr)
            if not found.ok:
                raise fail("not written: the schedule is not verified", NOT_VERIFIED, as_json=False)
        if len(programs) == 1:
            write(programs[0].schedule, output)
            return
        assert output is not None
        output.mkdir(parents=True, exist_ok=True)
        for number, program in enumerate(programs):
            name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in program.schedule.name)
            write(program.schedule, output / f"{number}-{name}.xml")


@app.command()
@with_options_of(Compilation)
def show(
    name: Name,
    given: Compilation,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The picture, .png or .svg (default: F.png next to F.xml, or NAME.png)."),
    ] = None,
    only: Annotated[str | None, typer.Option(help="The ranks to show, as FIRST-LAST (default: all).")] = None,
    max_file_bytes: MaxFileBytes = DEFAULT_MAX_FILE_BYTES,
    operator: Annotated[
        str | None,
        typer.Option(
            help="Draw it inside this operator, as simulated: all_gather_matmul, matmul_reduce_scatter, "
            "matmul_all_reduce or all_gather_attention."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="MxNxK",
            help="With --operator: rows of the product, and a rank's weight [n, k], in bf16 (default: "
            "8192x12288x12288, and --cluster dgx-h200); of attention, all keys, a rank's queries, and the numbers of "
            "a position's keys and values.",
        ),
    ] = None,
    cluster: MaybeClusterName = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="With --operator: a trace of torch.profiler, whose last call marked by record_function with the "
            "operator's name is laid beside; one a rank.",
        ),
    ] = None,
) -> None:
    """Draw a schedule: ranks and thread blocks as rows, steps as boxes, messages as arrows.

    - stretto collective show ring.xml --only 0-3
    - stretto collective show ring-all-reduce --ranks 4 -o ring.svg
    - stretto collective show ring-all-gather --ranks 4 --operator all_gather_matmul --sizes 8192x12288x12288
    """
    with refusing_bad_input():
        file = Path(name if is_schedule_file(name) else name.rpartition(":")[2])
        # A folder as "/" has no name, which load_schedule refuses.
        picture = output or (file.with_suffix(".png") if file.name else Path("schedule.png"))
        if picture.exists() and file.exists() and picture.samefile(file):
            raise ValueError(f"{picture} is the schedule itself: name another file for the picture with -o")
        require_writable(picture, "--output")
        shown = _rank_range(only)
        schedule = load_schedule(name, given, max_file_bytes)

        from stretto.report.pictures import require_drawing
        from stretto.report.schedule_layout import lay_out

        if operator is not None:
            require_drawing()
            if only is not None:
                raise ValueError("--only is for a schedule's steps: leave it out with --operator")
            sizes, cluster = sizes or "8192x12288x12288", cluster or "dgx-h200"
            _show_in_operator(schedule, operator, sizes, cluster, picture, trace or ())
            return
        if sizes is not None or cluster is not None or trace:
            raise ValueError("--sizes, --cluster and --trace are of --operator: name one, as all_gather_matmul")
        layout = lay_out(schedule, picture, shown)
        require_drawing()

        from stretto.report.schedule import draw_schedule  # imports matplotlib

        draw_schedule(layout, picture)
        print(picture)


def _show_in_operator(
    schedule: "Schedule", operator: str, sizes: str, cluster: str, picture: Path, traces: Sequence[Path]
) -> None:
    """Simulate the schedule inside an operator, print its time, and draw its tiles and moves beside traced calls."""
    from stretto.cluster import Cluster
    from stretto.collectives.joint import is_gather, join, require_collective, require_operator, verify_joint
    from stretto.collectives.joint.schedule import COLLECTIVES, ROUTED
    from stretto.collectives.verifier import verify
    from stretto.report.joint import plot_joint, read_call  # imports matplotlib
    from stretto.simulator.network import of_cluster
    from stretto.simulator.schedules.joint import LATENCY, ProductCosts, simulate_joint

    require_operator(operator)
    if operator in ROUTED:
        others = ", ".join(one for one in COLLECTIVES if one not in ROUTED)
        raise ValueError(f"{operator}'s messages have sizes that a call gives, and are not shown: {others} will do")
    m, n, k = _read_sizes(sizes)
    traced = [read_call(trace, operator) for trace in traces]
    ranks = schedule.collective.ranks
    require_collective(operator, schedule, ranks)
    if operator != "matmul_all_reduce" and m % ranks:
        raise ValueError(f"{ranks} ranks do not divide {m} rows: {-(-m // ranks) * ranks} will do")
    found = verify(schedule)
    if not found.ok:
        raise ValueError(f"{shown_name(schedule.name)} is not verified: {found.errors[0]}")
    joint = join(operator, schedule, m // ranks if is_gather(operator) else m, 128)
    if errors := verify_joint(joint):
        raise ValueError(f"{shown_name(schedule.name)} in {operator}: {errors[0]}")
    machine = Cluster.find(cluster)
    time = simulate_joint(joint, of_cluster(machine, ranks), ProductCosts.of_gpu(machine.gpu, n, k, LATENCY))
    title = f"{shown_name(schedule.name)} in {operator}, {m} x {n} x {k}, {counted(ranks, 'rank')} of {machine.name}"
    plot_joint(time, title, picture, traced)
    print(f"{title}: {1e6 * time.seconds:,.0f} us, {1e6 * time.exposed:,.0f} beyond the product ({time.fidelity})")
    for call in traced:
        print(f"rank {call.rank}, traced: {1e6 * call.seconds:,.0f} us")
    print(picture)


def _read_sizes(text: str) -> tuple[int, int, int]:
    numbers = text.split("x")
    if len(numbers) != 3 or not all(number.isdecimal() and 0 < int(number) < 1 << 31 for number in numbers):
        raise ValueError(f"--sizes takes MxNxK, as 8192x12288x12288, not {text!r}")
    m, n, k = map(int, numbers)
    return m, n, k


@app.command()
@with_options_of(Compilation)
def run(
    name: Name,
    given: Compilation,
    size: Annotated[
        str,
        typer.Option(
            "--bytes",
            help="Size of a rank's larger buffer, rounded down to whole chunks: 4096, 64KiB, 1MiB (2^20 bytes), 1MB "
            "(10^6).",
        ),
    ] = "1MiB",
    dtype: Annotated[str, typer.Option(help="fp64, fp32, fp16, bf16, int8, int16, int32, int64 or uint8.")] = "fp32",
    reduction: Annotated[str, typer.Option(help="sum, max, min or prod.")] = "sum",
    repeats: Annotated[int, typer.Option(help="Number of runs; the median is reported.", min=1)] = 1,
    waive: Waive = None,
    max_file_bytes: MaxFileBytes = DEFAULT_MAX_FILE_BYTES,
    as_json: Json = False,
) -> None:
    """Run a collective on processes of this machine, one per rank, and check every element of the results.

    It is verified first. Exit status: 0 right, 1 not verified, wrong or not run to its end, 2 bad input.

    - stretto collective run ring-all-reduce --ranks 4 --bytes 1M
    - stretto collective run ring.xml
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.collectives import verify
        from stretto.collectives.host_trial import plan_trial

        schedule = load_schedule(name, given, max_file_bytes, ("slots", "in_place"))
        # Refused before it is verified and torch is imported.
        plan_trial(schedule, size, dtype, reduction, given.in_place)
        found = verify(schedule, slots=given.slots, waive=waive or ())
        if found.ok:
            from stretto.collectives.host_benchmark import run_host_benchmark

            try:
                with raising_on_sigterm():
                    result = run_host_benchmark(
                        schedule, size, dtype, reduction, repeats=repeats, slots=given.slots, in_place=given.in_place
                    )
            except RuntimeError as error:  # a process died, or the others did not wait any longer
                raise fail(f"not run to its end: {one_line(error)}", NOT_VERIFIED, as_json=as_json) from error
    if not found.ok:
        print(describe(schedule, found), file=sys.stderr)
        raise fail("not run: the schedule is not verified", NOT_VERIFIED, as_json=as_json)
    if as_json:
        print_json(asdict(result))
    else:
        rounded = "" if result.bytes == (asked := read_bytes(size)) else f" ({asked:,} in whole chunks)"
        print(
            f"{shown_name(schedule.name)} on {schedule.collective.ranks} processes, {result.bytes:,} bytes{rounded} of "
            f"{dtype}: "
            f"{result.seconds * 1e3:.1f} ms with their start, "
            + ("all numbers right" if not result.wrong else f"{result.wrong:,} numbers WRONG")
        )
    if result.wrong:
        raise typer.Exit(NOT_VERIFIED)


def _agree_to_run(script: Path, *, is_agreed: bool) -> None:
    """Ask before a script is run for the first time, or after a change. ValueError without a terminal."""
    from stretto.cluster import read_bounded, reading
    from stretto.native_code import cache_folder

    with reading(script, (".py",)):
        content = read_bounded(script, MAX_SCRIPT_BYTES, "a script")
    mark = cache_folder() / "agreed-scripts" / hashlib.sha256(content).hexdigest()
    if mark.exists():
        return
    what = f"{script} is a Python program, which import-msccl runs with your rights"
    if not is_agreed and sys.stdin.isatty():
        is_agreed = typer.confirm(f"{what}: run it?", err=True)
    if not is_agreed:
        raise ValueError(f"{what}: read it, then run stretto collective import-msccl --yes {script} ...")
    with suppress(OSError):  # without a cache the next run asks again
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _script_arguments(args: list[str], output: Path | None) -> tuple[list[str], Path | None]:
    """Split the arguments: a last `-o F.xml` is this command's, all that follows a `--` is the script's."""
    if args[:1] == ["--"]:
        return args[1:], output
    if output is None and len(args) >= 2 and args[-2] in ("-o", "--output"):
        return args[:-2], Path(args[-1])
    return args, output


def _rank_range(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise ValueError(f"--only takes FIRST-LAST or one rank, not {text!r}")
    return range(int(first), int(last or first) + 1)
