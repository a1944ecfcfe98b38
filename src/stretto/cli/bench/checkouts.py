"""What a change costs: two checkouts measured in turn."""

import random
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.bench.options import Out
from stretto.cli.console import Json, fail, print_json, refusing_bad_input


def checkouts(
    before: Annotated[Path, typer.Option(help="A checkout of Stretto, or its src.")],
    after: Annotated[Path | None, typer.Option(help="Another one (default: where this command is from).")] = None,
    ranks: Annotated[int, typer.Option(help="Of each checkout; all share one GPU.")] = 4,
    rounds: Annotated[int, typer.Option(help="Of every case.")] = 30,
    most_rounds: Annotated[
        int | None, typer.Option(help="Of a case that 30 do not decide (default: ten times).")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time limit of the whole run.")] = 270.0,
    only: Annotated[str | None, typer.Option(help="Parts of the names of cases, with commas.")] = None,
    percentage: Annotated[
        int | None, typer.Option(help="Of the GPU's multiprocessors for a rank (default: 100 / ranks).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of measurements (default: random).")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Two cases by interpreted kernels, to try the command.")] = False,
    out: Out = Path("results/checkouts"),
    as_json: Json = False,
) -> None:
    """Collectives, tiles, embeddings and operators of two checkouts, interleaved, all ranks on one GPU under MPS.

    Ends with 1 where ranks were lost while they measured; what was measured until then is written.
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.bench.checkouts.run import CheckoutsSetting, bench_checkouts

        setting = CheckoutsSetting(
            before,
            **({} if after is None else {"after": after}),
            ranks=ranks,
            rounds=rounds,
            most_rounds=10 * rounds if most_rounds is None else most_rounds,
            seconds=seconds,
            only=() if only is None else tuple(only.split(",")),
            percentage=percentage,
            seed=random.randrange(2**31) if seed is None else seed,
            on_cpu=cpu,
        )
        result = bench_checkouts(setting, out)
    if result["failure"] is not None:
        raise fail(result["failure"], 1, as_json=as_json)
    if as_json:
        print_json(result)
