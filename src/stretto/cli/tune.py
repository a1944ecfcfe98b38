# SPDX-License-Identifier: Apache-2.0
"""`stretto tune`: measures on this machine what "auto" chooses between, and keeps the times for later runs."""

from __future__ import annotations  # the settings are imported when a command is used

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.bench.settings import Needs
from stretto.cli.console import Json, print_json, refusing_bad_input, stdout_on_stderr
from stretto.cli.settings_command import BenchApp
from stretto.quantities import counted

if TYPE_CHECKING:
    from stretto.bench.collectives.settings import CollectivesTuning
    from stretto.bench.embedding.settings import EmbeddingTuning
    from stretto.bench.operators.settings import AttentionTuning, ExpertsTuning, OperatorsTuning
    from stretto.bench.training.settings import ProductsTuning

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

        from stretto.bench.collectives.settings import CollectivesTuning
        from stretto.bench.embedding.settings import EmbeddingTuning
        from stretto.bench.operators.settings import AttentionTuning, ExpertsTuning, OperatorsTuning
        from stretto.bench.training.settings import ProductsTuning

        found: dict[str, Any] = {"left_out": {}}
        kinds = {"collectives": CollectivesTuning, "operators": OperatorsTuning}
        kinds |= {"experts": ExpertsTuning, "attention": AttentionTuning, "embedding": EmbeddingTuning}
        with stdout_on_stderr() if as_json else nullcontext():
            for kind, setting_type in kinds.items():
                try:
                    tuning.count_gpus(count)
                except ValueError as error:
                    found["left_out"][kind] = str(error)
                    print(f"{kind} left out: {error}")
                else:
                    found[kind] = _tune(count, setting_type(lists=lists))
            found["products"] = _tune(count, ProductsTuning(lists=lists))
    if as_json:
        print_json(found)


@tuning.command("collectives", "stretto.bench.collectives.settings", needs=Needs.TWO_GPUS, count=tuning.count_gpus)
def collectives(ranks: int, setting: CollectivesTuning) -> Any:
    """Time every algorithm and protocol of the collectives, and NCCL, size by size."""
    return _tune(ranks, setting)


@tuning.command("operators", "stretto.bench.operators.settings", needs=Needs.TWO_GPUS, count=tuning.count_gpus)
def operators(ranks: int, setting: OperatorsTuning) -> Any:
    """Time the configurations of overlapped operators, and the library, shape by shape."""
    return _tune(ranks, setting)


@tuning.command("attention", "stretto.bench.operators.settings", needs=Needs.TWO_GPUS, count=tuning.count_gpus)
def attention(ranks: int, setting: AttentionTuning) -> Any:
    """Time the implementations of attention over a shared sequence, causal, length by length."""
    return _tune(ranks, setting)


@tuning.command("experts", "stretto.bench.operators.settings", needs=Needs.TWO_GPUS, count=tuning.count_gpus)
def experts(ranks: int, setting: ExpertsTuning) -> Any:
    """Time the kernels of tensor-parallel experts, and the library, for each product of a layer's two passes."""
    return _tune(ranks, setting)


@tuning.command("embedding", "stretto.bench.embedding.settings", needs=Needs.TWO_GPUS, count=tuning.count_gpus)
def embedding(ranks: int, setting: EmbeddingTuning) -> Any:
    """Time the launch configurations of embedding look-ups."""
    return _tune(ranks, setting)


@tuning.command("products", "stretto.bench.training.settings", needs=Needs.RANKS, count=tuning.count_ranks)
def products(ranks: int, setting: ProductsTuning) -> Any:
    """Time the layouts of a model's matrix products, on every grid of the ranks (for `tune_matmuls`)."""
    return _tune(ranks, setting)


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
