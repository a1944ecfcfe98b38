# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.stress`: random calls of every kernel in every configuration."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli.console import Json, fail, print_any_text, print_json, refusing_bad_input, reporting_faults
from stretto.cluster.detection import count_gpus

LATE_WARPS = "tests.stress.late_warps"
FOUND = 1


def stress(
    ranks: Annotated[int, typer.Option(help="Number of processes; they share GPUs if there are fewer.")] = 2,
    minutes: Annotated[float, typer.Option(help="Start no new batch of calls after this many minutes.")] = 5.0,
    only: Annotated[
        str | None,
        typer.Option(help="Configurations to run: names, patterns (*, ?) or parts of names, separated by commas."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random choices (default: a random one).")] = None,
    results: Annotated[
        int | None, typer.Option(help="End when each configuration has this many results (default: after --minutes).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="JSON file: continue from its results, and add the new ones.")
    ] = None,
    lists: Annotated[bool, typer.Option("--list", help="Show all configurations and run none.")] = False,
    stops: Annotated[bool, typer.Option("--stop-at-first", help="End at the first error.")] = False,
    late_warps: Annotated[
        bool,
        typer.Option("--late-warps", help="Insert random sleeps into the kernels, so that warps drift apart; on GPUs."),
    ] = False,
    nodes: Annotated[
        str, typer.Option(help="Declare the ranks to be several nodes, as 2x2 or 3,1: what puts between them.")
    ] = "",
    limit: Annotated[
        float | None, typer.Option(hidden=True, help="Seconds that a batch may take before its ranks count as hung.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Stress the kernels: call each in every configuration, with random inputs, and compare results bit by bit.

    Operands are whole numbers, so that results are known exactly. Ranks are late at random, workspaces are poisoned,
    calls run eagerly, in CUDA graphs and in several groups at once. Ends with 1 if a result was wrong, or a call raised
    or hung. Without a GPU kernels are interpreted, with few calls.
    """
    with refusing_bad_input(as_json=as_json):
        if lists:
            _list(only, as_json=as_json)
            return
        from tests.stress.harness.settings import StressSetting

        if late_warps and not count_gpus():
            raise ValueError("warps are late on a GPU only, and torch finds none here")
        prepare = LATE_WARPS if late_warps else ""
        setting = StressSetting(
            ranks, minutes, only, seed, results, resume, limit=limit, stops_at_first=stops, prepare=prepare, nodes=nodes
        )

        from tests.stress.harness.run import stress as run

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that nothing is left behind
        try:
            report = run(setting, _print_to_stderr if as_json else _print)
        except RuntimeError as error:
            raise fail(str(error), FOUND, as_json=as_json) from error
    if as_json:
        counts = {what: report.count(what) for what in ("wrong", "raised", "hung")}
        print_json(
            {
                "seed": report.seed,
                "ranks": report.ranks,
                "device": report.device,
                "seconds": round(report.seconds, 1),
                "results": report.results,
                **counts,
                "configurations": report.list_rows(),
            }
        )
    else:
        _print_report(report, " --late-warps" * late_warps + f" --nodes {nodes}" * bool(nodes))
    if not report.is_clean:
        raise typer.Exit(FOUND)


def _print(line: str) -> None:
    print(line, flush=True)


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _list(only: str | None, *, as_json: bool) -> None:
    from tests.stress.harness.catalogue import load_catalogue, select

    found = select(load_catalogue(), only)
    if as_json:
        print_json({"configurations": [one.describe() for one in found.values()]})
        return
    _print_table(
        ["configuration", "covers", "kernels"],
        [[one.name, one.covers, ", ".join(name.rpartition(".")[2] for name in one.kernels)] for one in found.values()],
    )
    print(f"{len(found)} configurations")


def _print_report(report: Any, options: str) -> None:
    headings = ["configuration", "results", "wrong", "raised", "hung", "seconds"]
    rows = report.list_rows()
    _print_table(headings, [[row["name"], *(f"{row[key]:,}" for key in headings[1:])] for row in rows])
    for row in rows:
        for finding in row["findings"]:
            print(f"{row['name']}: {finding}")
    counts = ", ".join(f"{report.count(what):,} {what}" for what in ("wrong", "raised", "hung"))
    print(
        f"seed {report.seed}: {report.results:,} results of {len(rows)} configurations on {report.ranks} ranks "
        f"({report.device}): {counts}"
    )
    again = next((row["name"] for row in rows if row["wrong"] or row["raised"] or row["hung"]), None)
    if again is not None:
        again = f"--ranks {report.ranks} --only {again} --seed {report.seed}{options}"
        print(f"to see it again: python -m tests.stress {again}")


def _print_table(headings: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number and heading not in ("covers", "kernels") else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


app = typer.Typer(add_completion=False)
app.command()(stress)

if __name__ == "__main__":
    print_any_text()
    with reporting_faults():
        app(prog_name="python -m tests.stress")
