"""What collectives take: to compile, on GPUs, and between nodes."""

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.bench.options import Out, Ranks, count_gpus, parse_numbers
from stretto.cli.console import Json, print_json, refusing_bad_input


def compile_(
    largest: Annotated[int | None, typer.Option(help="Leave out what has more ranks.")] = None,
    out: Out = Path("results/compile"),
    as_json: Json = False,
) -> None:
    """Seconds and memory to compile and verify collectives of up to 512 ranks (needs no GPU)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.collectives.compile import bench_compile

        rows = bench_compile(out, largest)
        if as_json:
            print_json({"rows": rows})


def collectives(
    ranks: Ranks = None,
    only: Annotated[str, typer.Option(help="Collectives, with commas.")] = "allreduce,allgather,reducescatter,alltoall",
    dtypes: Annotated[str, typer.Option(help="bf16, fp32, with commas.")] = "bf16,fp32",
    smallest: Annotated[int, typer.Option(help="Bytes of the whole array.")] = 1024,
    largest: Annotated[int, typer.Option(help="Bytes of the whole array.")] = 1 << 30,
    step: Annotated[int, typer.Option(help="A size is this many times the one before it.")] = 4,
    modes: Annotated[str, typer.Option(help="graph, eager, with commas.")] = "graph,eager",
    tune: Annotated[
        bool, typer.Option(help="Measure every way first, and keep the times for runs on this machine.")
    ] = False,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="STRETTO_COLLECTIVES_TABLE",
            help="Where --tune keeps the times, and whose times choose (default: the cache).",
        ),
    ] = None,
    out: Out = Path("results/collectives"),
    as_json: Json = False,
) -> None:
    """Collectives by Stretto's kernels, NCCL and torch's symmetric-memory operators, size by size."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.collectives.run import CollectivesSetting, bench_collectives

        setting = CollectivesSetting(
            sizes=tuple(_list_sizes(smallest, largest, step)),
            collectives=tuple(only.split(",")),
            dtypes=tuple(dtypes.split(",")),
            modes=tuple(modes.split(",")),
            tunes=tune,
            table=table,
        )
        rows = bench_collectives(count_gpus(ranks), out, setting)
        if as_json:
            print_json({"rows": rows})


def ablations(
    ranks: Ranks = None,
    only: Annotated[str, typer.Option(help="pipelining, composition, with commas.")] = "pipelining,composition",
    protocol: Annotated[str, typer.Option(help="Simple, LL or LL128.")] = "LL128",
    instances: Annotated[
        int, typer.Option(help="Of the interpreted schedules; each has thread blocks of its own.")
    ] = 16,
    tiles: Annotated[str, typer.Option(help="Bytes of tiles, with commas.")] = "16384,65536,262144",
    smallest: Annotated[int, typer.Option(help="Bytes of the whole array; sizes are multiples of it.")] = 1 << 20,
    largest: Annotated[int, typer.Option(help="Bytes of the whole array.")] = 256 << 20,
    step: Annotated[int, typer.Option(help="A size is this many times the one before it.")] = 4,
    modes: Annotated[str, typer.Option(help="graph, eager, with commas.")] = "graph,eager",
    out: Out = Path("results/ablations"),
    as_json: Json = False,
) -> None:
    """MSCCLang's ablations: pipelining over tiles on and off; one kernel against the algorithm made of NCCL calls."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.collectives.ablations import AblationsSetting, bench_ablations

        setting = AblationsSetting(
            sizes=tuple(_list_sizes(smallest, largest, step)),
            tiles=tuple(parse_numbers(tiles, "--tiles")),
            protocol=protocol,
            instances=instances,
            modes=tuple(modes.split(",")),
            ablations=tuple(only.split(",")),
        )
        rows = bench_ablations(count_gpus(ranks), out, setting)
        if as_json:
            print_json(rows)


def two_level(
    ranks_per_node: Annotated[int, typer.Option(help="Ranks in each of the namespaces.")] = 2,
    nodes: Annotated[int, typer.Option(help="Network namespaces.")] = 4,
    bandwidth: Annotated[float, typer.Option(help="Of a node's link, Mbit/s.")] = 50.0,
    loopback: Annotated[float, typer.Option(help="Inside a node, Mbit/s.")] = 200.0,
    trunk: Annotated[float, typer.Option(help="Of the link between the halves of the nodes, Mbit/s.")] = 50.0,
    delay: Annotated[float, typer.Option(help="Of a message between nodes, ms.")] = 40.0,
    smallest: Annotated[int, typer.Option(help="Bytes a rank of the smallest collective.")] = 4096,
    sizes: Annotated[int, typer.Option(help="How many sizes, each twice the one before.")] = 8,
    repeats: Annotated[int, typer.Option(help="Runs of each; their median counts.")] = 7,
    out: Out = Path("results/two-level"),
    as_json: Json = False,
) -> None:
    """Two-level collectives between network namespaces: recursive, ring and flat beside the model (needs root)."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.two_level.run import TwoLevelSetting, bench_two_level

        setting = TwoLevelSetting(nodes, ranks_per_node, bandwidth, loopback, trunk, delay, smallest, sizes, repeats)
        result = bench_two_level(setting, out)
        if as_json:
            print_json(result)


def _list_sizes(smallest: int, largest: int, step: int) -> list[int]:
    """Sizes in bytes, each `step` times the one before it."""
    if step < 2 or smallest < 64 or largest < smallest:
        raise ValueError(f"sizes go from {smallest} (at least 64) to {largest} by a factor of {step} (at least 2)")
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= step
    return sizes
