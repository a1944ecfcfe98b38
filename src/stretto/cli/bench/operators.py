"""What the overlapped operators take."""

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.bench.options import Out, Ranks, Rounds, count_gpus, count_ranks, parse_numbers
from stretto.cli.console import Json, print_json, refusing_bad_input


def embedding(
    ranks: Ranks = None,
    cases: Annotated[
        str, typer.Option(help="BATCHxTABLESxDIMxPOOLING (tables of each rank) or mlperf, with commas.")
    ] = "256x16x256x70,1024x64x256x70,4096x64x128x70,65536x7x128x8,mlperf",
    studies: Annotated[str, typer.Option(help="peers, orders, slices, occupancy, timeline, with commas.")] = "peers",
    rows: Annotated[int, typer.Option(help="Of each table; of MLPerf's, at most.")] = 100_000,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    graph: Annotated[bool, typer.Option(help="Time CUDA graphs, not calls.")] = False,
    backward: Annotated[bool, typer.Option(help="Measure the backward pass too.")] = True,
    jagged: Annotated[bool, typer.Option(help="Bags of 0 to twice the pooling, not all of it.")] = False,
    skip: Annotated[str, typer.Option(help="Peers to leave out: bags, batched, chunked, with commas.")] = "",
    rounds: Rounds = 2,
    replays: Annotated[int, typer.Option(help="Timed rows of calls in a round.")] = 5,
    out: Out = Path("results/embedding"),
    as_json: Json = False,
) -> None:
    """Embedding look-ups fused with their all-to-all, beside EmbeddingBag, one batched kernel, and its two streams."""
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.embedding.run import EmbeddingSetting, LookupShape, bench_embedding
        from stretto.bench.interleaved import TimingEffort

        if dtype not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"--dtype is float32, float16 or bfloat16, not {dtype!r}")
        setting = EmbeddingSetting(
            tuple(LookupShape.parse(text) for text in cases.replace(",", " ").split()),
            tuple(studies.replace(",", " ").split()),
            rows,
            dtype,
            graph,
            backward,
            not jagged,
            tuple(skip.replace(",", " ").split()),
            TimingEffort(rounds, replays),
        )
        found = bench_embedding(count_ranks(ranks), out, setting)
        if as_json:
            print_json({"rows": found})


def ops(
    ranks: Ranks = None,
    only: Annotated[str, typer.Option(help="gather, scatter, reduce, with commas.")] = "gather,scatter,reduce",
    cases: Annotated[
        str | None, typer.Option(help="Models whose shapes are taken, with commas (default: all; ablations: flux).")
    ] = None,
    ms: Annotated[str | None, typer.Option(help="Rows of the whole, with commas (default: each case's own).")] = None,
    modes: Annotated[str, typer.Option(help="graph, eager, with commas.")] = "graph,eager",
    implementation: Annotated[str, typer.Option(help="Of Stretto's calls: auto, kernel, library.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of operands: bf16, or fp8 with a scale a row.")] = "bf16",
    tune: Annotated[
        bool, typer.Option(help="Measure each shape's plans first, and keep the times for runs on this machine.")
    ] = False,
    ablations: Annotated[bool, typer.Option(help="Vary one choice at a time instead.")] = False,
    out: Out = Path("results/operators"),
    as_json: Json = False,
) -> None:
    """Overlapped operators beside the GEMM alone, GEMM and NCCL, and torch's async tensor parallelism.

    Rows are added to those that the folder has, and written as they come.
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.operators.ablations import bench_operator_ablations
        from stretto.bench.operators.run import CASES, OperatorsSetting, bench_operators

        chosen = tuple(cases.split(",")) if cases else ("flux",) if ablations else tuple(CASES)
        setting = OperatorsSetting(
            operators=tuple(only.split(",")),
            cases=chosen,
            ms=() if ms is None else tuple(parse_numbers(ms, "--ms")),
            modes=tuple(modes.split(",")),
            tunes=tune,
            implementation=implementation,
            dtype=dtype,
        )
        bench = bench_operator_ablations if ablations else bench_operators
        rows = bench(count_gpus(ranks), out, setting)
        if as_json:
            print_json({"rows": rows})
