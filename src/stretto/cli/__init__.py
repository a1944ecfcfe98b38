# SPDX-License-Identifier: Apache-2.0
"""The command `stretto`: a file for each command, or group of commands, which is imported when it is used.

A command imports what it needs when its arguments are known to be good, so that help and refusals do not wait for
torch.
"""

from typing import Annotated

import typer

import stretto
from stretto.cli.commands import App
from stretto.cli.console import print_any_text, reporting_faults

app = App(name="stretto", add_completion=True, context_settings={"help_option_names": ["-h", "--help"]})
app.add_lazy("init", "stretto.cli.init:init")
app.add_lazy("train", "stretto.cli.train:train")
app.add_lazy("demo", "stretto.cli.demo:demo")
app.add_lazy("plan", "stretto.cli.plan:plan")
app.add_lazy("probe", "stretto.cli.probe:probe")
app.add_lazy("tune", "stretto.cli.tune:app")
app.add_lazy("doctor", "stretto.cli.doctor:doctor")
app.add_lazy("export", "stretto.cli.checkpoint:export")
app.add_lazy("bench", "stretto.cli.bench:app")
app.add_lazy("checkpoint", "stretto.cli.checkpoint:app")
app.add_lazy("cluster", "stretto.cli.cluster:app")
app.add_lazy("collective", "stretto.cli.collective_simulate:app")
app.add_lazy("pipeline", "stretto.cli.pipeline:app")
app.add_lazy("simulate", "stretto.cli.simulate:app")


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

    Start with `stretto demo`; then `stretto init demo` writes a configuration, and `stretto train demo.toml` trains.
    """


def main() -> None:
    """Run the command line. Exit status: 0 done, 1 a rank failed, 2 bad input, 128 + n stopped by signal n."""
    print_any_text()
    with reporting_faults():
        app(prog_name="stretto")
