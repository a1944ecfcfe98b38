# SPDX-License-Identifier: Apache-2.0
"""`stretto simulate dlrm`: a DLRM's training step with look-up and all-to-all separate or fused."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.cli.simulate import Bandwidth, ClusterName, Gpus, Latency, NetworkOptions, Packets, Topology, read_packets

if TYPE_CHECKING:
    from stretto.recommendation.simulation import SimulatedRecommendation

TORUS, TORUS_BANDWIDTH, TORUS_LATENCY = "torus:16x8", "200Gb/s", "700ns"  # Punniyamurthy et al., table 2


def dlrm(
    topology: Topology = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    cluster: ClusterName = None,
    gpus: Gpus = None,
    batch: Annotated[int, typer.Option(help="Samples of each rank.")] = 512,
    tables: Annotated[int, typer.Option(help="Embedding tables of each rank.")] = 4,
    dim: Annotated[int, typer.Option(help="Embedding dimension.")] = 92,
    pooling: Annotated[int, typer.Option(help="Rows in a bag.")] = 70,
    layers: Annotated[int, typer.Option(help="Layers of both MLPs.")] = 43,
    width: Annotated[int, typer.Option(help="Width of a layer.")] = 682,
    bottom_layers: Annotated[int, typer.Option(help="Number of the layers that are the bottom MLP's.")] = 21,
    kernels: Annotated[
        str, typer.Option(help="Kernel times: mi210 (from its datasheet) or h200 (measured).")
    ] = "mi210",
    fused: Annotated[str, typer.Option(help="The fused passes: forward, or both.")] = "forward",
    collective: Annotated[
        str, typer.Option(help="The all-to-all algorithm: direct, or, on a torus, by-dimension.")
    ] = "direct",
    slice_vectors: Annotated[int, typer.Option(help="Pooled vectors per slice.")] = 128,
    window: Annotated[int, typer.Option(help="Most slices of a rank in flight; 0: any number.")] = 64,
    packet_bytes: Packets = None,
    as_json: Json = False,
) -> None:
    """Simulate a DLRM's training step with separate and with fused embedding look-up and all-to-all, in both
    fidelities.

    Without --topology and --cluster: 128 nodes on a 2D torus of 200 Gb/s links with 700 ns, as in the paper. The
    defaults for dim, pooling, layers and width are the paper's; it does not give batch and tables.

    - stretto simulate dlrm
    - stretto simulate dlrm --collective by-dimension --fused both --kernels h200
    - stretto simulate dlrm --topology switch:64 --bandwidth 50GB/s --latency 2us --batch 1024
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.recommendation.simulation import (
            FIDELITIES,
            RecommendationStep,
            find_kernels,
            simulate_recommendation,
        )

        if topology is None and cluster is None:
            topology, bandwidth, latency = TORUS, bandwidth or TORUS_BANDWIDTH, latency or TORUS_LATENCY
        network = NetworkOptions(topology, bandwidth, latency, cluster, gpus, packet_bytes).build()
        step = RecommendationStep(
            batch=batch,
            tables=tables,
            dim=dim,
            pooling=pooling,
            layers=layers,
            width=width,
            bottom_layers=bottom_layers,
        )
        rates, packets = find_kernels(kernels), read_packets(packet_bytes)
        rows = [
            simulate_recommendation(
                step,
                rates,
                network,
                fused=each,
                collective=collective,
                fidelity=fidelity,
                slice_vectors=slice_vectors,
                window=window or None,
                packet_bytes=packets,
            )
            for fidelity in FIDELITIES
            for each in dict.fromkeys(("none", fused))
        ]
    found = [row.as_json() | {"reduction": _reduction(row, rows)} for row in rows]
    if as_json:
        print_json({"topology": network.name, "ranks": network.devices, "kernels": rates.source, "rows": found})
    else:
        _print_table(f"A DLRM step on {network.name}, kernels of {rates.name}: {rates.source}", found)


def _reduction(row: "SimulatedRecommendation", rows: "list[SimulatedRecommendation]") -> float:
    """Return the time saved against the separate step of its fidelity."""
    separate = next(each for each in rows if each.fidelity == row.fidelity and each.fused == "none")
    return 1 - row.seconds / separate.seconds


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from stretto.quantities import show_nanoseconds

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("fidelity", "fused"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "not computing", "look-up", "less time"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times = (show_nanoseconds(row[name]) for name in ("step_ns", "exposed_ns", "lookup_ns"))
        table.add_row(row["fidelity"], row["fused"], *times, f"{row['reduction']:.1%}")
    console = Console()
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    console.print(table)
