# SPDX-License-Identifier: Apache-2.0
"""The lab's commands: what measures, predicts and simulates every figure of the README and the docs."""

from __future__ import annotations  # the settings are imported when a command is used

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.harness import add_commands
from stretto.bench.settings import Needs
from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.cli.settings_command import BenchApp

if TYPE_CHECKING:
    from tests.faults.flips import FlipsSetting
    from tests.faults.settings import FaultsSetting


benches = BenchApp("Run the benches whose results the README and the documentation report.", "lab/results")
app = benches.app
add_commands(benches)


@app.command("redraw", rich_help_panel=Needs.NO_GPU.value)
def redraw(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder with results, in it or in its subfolders.")
    ],
    as_json: Json = False,
) -> None:
    """Redraw the pictures of results from their JSON, and the losses of runs, without measuring."""
    with refusing_bad_input(as_json=as_json):
        from lab.pictures import redraw

        pictures = redraw(folder)
    if as_json:
        print_json({"pictures": pictures})
    else:
        print("\n".join(map(str, pictures)))


@app.command("index", rich_help_panel=Needs.NO_GPU.value)
def index() -> None:
    """Write the list of committed runs, lab/results/README.md, and into each run its commit."""
    from lab.index import INDEX, stamp_commits, write_index

    stamp_commits()
    INDEX.write_text(write_index())
    print(INDEX)


@benches.command("faults", "tests.faults.settings")
def faults(setting: FaultsSetting, out: Path) -> Any:
    """Kill, stop and disturb ranks at random times of training; check the reports and restarts (on CPUs)."""
    from tests.faults.run import bench_faults

    return bench_faults(setting, out)


@benches.command("flips", "tests.faults.flips")
def flips(setting: FlipsSetting, out: Path) -> Any:
    """Flip random bits of checkpoints and exported weights, one at a time, and check that each is detected (no GPU)."""
    from tests.faults.flips import bench_flips

    return bench_flips(setting, out)
