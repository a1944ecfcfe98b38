# SPDX-License-Identifier: Apache-2.0
"""`stretto cluster`: lists and shows machines, with their links and figures."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.commands import App
from stretto.cli.console import Json, print_json, refusing_bad_input

if TYPE_CHECKING:
    from stretto.cluster import Cluster

app = App(help="Show machines for planning: their nodes, GPUs and links, with the source of each value.")


@app.command("list")
def list_presets(as_json: Json = False) -> None:
    """List the machines that come with Stretto."""
    from stretto.cluster import Cluster

    if as_json:
        print_json({"presets": Cluster.presets()})
        return
    for name in Cluster.presets():
        cluster = Cluster.preset(name)
        print(f"{name:14} {cluster.description or cluster.gpu.name}")


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A machine of `stretto cluster list`, or a cluster file.")
    ],
    as_json: Json = False,
) -> None:
    """Show a machine's properties, each with its unit and source."""
    from stretto.cluster import Cluster

    with refusing_bad_input(as_json=as_json):
        _print(Cluster.find(name), as_json)


@app.command()
def detect(as_json: Json = False) -> None:
    """Show this machine's GPUs, as far as they can be detected without measuring."""
    from stretto.cluster import Cluster

    with refusing_bad_input(as_json=as_json):
        _print(Cluster.detect(), as_json)


def _print(cluster: "Cluster", as_json: bool) -> None:
    if as_json:
        print_json(asdict(cluster) | {"sources": dict(cluster.sources)})
    else:
        print(cluster.describe())
