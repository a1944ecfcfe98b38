# SPDX-License-Identifier: Apache-2.0
"""The command `stretto`: a file for each command, or group of commands.

A command imports what it needs when it runs, so that `stretto --help` does not wait for torch.
"""

from typing import Annotated

import typer

import stretto
from stretto.cli.bench import app as bench
from stretto.cli.checkpoint import app as checkpoint
from stretto.cli.checkpoint import export
from stretto.cli.cluster import app as cluster
from stretto.cli.collective_simulate import app as collective
from stretto.cli.console import Command, print_any_text, reporting_faults
from stretto.cli.demo import demo
from stretto.cli.doctor import doctor
from stretto.cli.pipeline import app as pipeline
from stretto.cli.plan import plan
from stretto.cli.probe import probe
from stretto.cli.simulate import app as simulate
from stretto.cli.simulate_dlrm import dlrm
from stretto.cli.simulate_trace import export as simulate_export
from stretto.cli.simulate_trace import trace
from stretto.cli.stress import stress
from stretto.cli.train import train

app = typer.Typer(
    name="stretto",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(demo)
app.command()(plan)
app.command()(probe)
app.command()(doctor)
app.command()(stress)
app.add_typer(bench, name="bench")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(cluster, name="cluster")
app.add_typer(collective, name="collective")
app.add_typer(pipeline, name="pipeline")
app.add_typer(simulate, name="simulate")
simulate.command()(dlrm)
simulate.command()(trace)
simulate.command("export")(simulate_export)
app.command()(export)
for group in (app, bench, checkpoint, cluster, collective, pipeline, simulate):
    for each in group.registered_commands:
        each.cls = Command


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"stretto {stretto.__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Train a PyTorch model on a grid of processes: data x X x Y x Z.

    Start with **stretto demo**; then **stretto train CONFIG.toml**.
    """


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 a rank failed, 2 bad input, 128 + n stopped by signal n."""
    print_any_text()
    with reporting_faults():
        app(prog_name="stretto")
