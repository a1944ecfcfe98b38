# SPDX-License-Identifier: Apache-2.0
"""`stretto tune`: measures on this machine what "auto" chooses between, and keeps the times for later runs."""

from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer

from stretto.bench.settings import Needs
from stretto.cli.console import Json, print_json, refusing_bad_input, stdout_on_stderr
from stretto.cli.settings_command import BenchApp
from stretto.quantities import counted

_KINDS = {
    "collectives": (
        "collectives.settings:CollectivesTuning",
        "Time every algorithm and protocol of the collectives, and NCCL, size by size.",
    ),
    "operators": (
        "operators.settings:OperatorsTuning",
        "Time the configurations of overlapped operators, and the library, shape by shape.",
    ),
    "attention": (
        "operators.settings:AttentionTuning",
        "Time the implementations of attention over a shared sequence, causal, length by length.",
    ),
    "experts": (
        "operators.settings:ExpertsTuning",
        "Time the kernels of tensor-parallel experts, and the library, for each product of a layer's two passes.",
    ),
    "embedding": ("embedding.settings:EmbeddingTuning", "Time the launch configurations of embedding look-ups."),
    "products": (
        "training.settings:ProductsTuning",
        "Time the layouts of a model's matrix products, on every grid of the ranks (for `tune_matmuls`).",
    ),
}
"""Each command's settings in `stretto.bench`, which are imported when it is used, and its summary."""

tuning = BenchApp(
    """Measure on this machine what "auto" chooses between, and keep the times for later runs.

    `stretto tune` measures all kinds that this machine can, with their defaults; without GPUs these are products, with
    --ranks N. `stretto tune operators`, say, measures one, and has options of its own. The times are kept in
    tuning.json in $STRETTO_CACHE, or in ~/.cache/stretto.
    """,
    None,
)
app = tuning.app


@app.callback(invoke_without_command=True)
def tune_all(
    context: typer.Context,
    ranks: Annotated[int | None, typer.Option(help="Processes (default: the machine's GPUs).")] = None,
    lists: Annotated[bool, typer.Option("--list", help="Show what would be measured, and measure nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Measure all kinds, unless a command for one is given."""
    with refusing_bad_input(as_json=as_json):
        if (kind := context.invoked_subcommand) is not None:
            if ranks is not None or lists or as_json:
                raise ValueError(f"options of one kind come after its name: stretto tune {kind} --ranks 2, say")
            return
        count = tuning.count_ranks(ranks)

        found: dict[str, Any] = {"left_out": {}}
        with stdout_on_stderr() if as_json else nullcontext():
            for kind in _KINDS:
                try:
                    if kind != "products":
                        tuning.count_gpus(count)
                except ValueError as error:
                    found["left_out"][kind] = str(error)
                    print(f"{kind} left out: {error}")
                else:
                    found[kind] = _tune(count, _find_settings(kind)(lists=lists))
    if as_json:
        print_json(found)


def _find_settings(kind: str) -> Any:
    module, _, name = _KINDS[kind][0].partition(":")
    return getattr(import_module(f"stretto.bench.{module}"), name)


def _tune(ranks: int, setting: Any) -> dict[str, Any]:
    """Show what would be measured, or measure and show it. Returns what --json prints."""
    problems = setting.problems(ranks)
    if setting.lists:
        print("\n".join(problems))
        return {"problems": problems}

    from stretto.bench.harness import Column, print_table  # imports torch
    from stretto.bench.tuning import tune
    from stretto.tuning import TuningStore

    rows = tune(setting, ranks)
    columns = (
        Column("problem", "problem"),
        Column("fastest", "fastest"),
        Column("seconds", "seconds", "{:.3g}"),
        Column("choices", "choices"),
        Column("error", "error"),
    )
    store = TuningStore(getattr(setting, "table", None)).path
    print_table(f"Measured on {counted(ranks, 'rank')}, kept in {store}", columns, rows)
    return {"store": str(store), "rows": rows}


def _add_command(kind: str, summary: str) -> None:
    def run(ranks: int, setting: Any) -> Any:
        return _tune(ranks, setting)

    run.__doc__ = summary
    needs, count = (Needs.RANKS, tuning.count_ranks) if kind == "products" else (Needs.TWO_GPUS, tuning.count_gpus)
    tuning.command(kind, partial(_find_settings, kind), needs=needs, count=count)(run)


for _kind, (_, _summary) in _KINDS.items():
    _add_command(_kind, _summary)
