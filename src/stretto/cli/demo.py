# SPDX-License-Identifier: Apache-2.0
"""`stretto demo`: trains a small GPT on a grid and on one rank, and compares the losses."""

import signal
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.quantities import counted

if TYPE_CHECKING:
    from stretto.report import RunRecord
    from stretto.train.config import TrainConfig

PROMPT = "The standard library "
SAMPLE_TOKENS = 300


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run's folder.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run (default: 120).")] = None,
    as_json: Json = False,
) -> None:
    """Train a small GPT on 4 processes, then on one, and compare.

    The text is the documentation inside Python's standard library. It trains for less than a minute on 2 cores; GPUs
    are used where there are some. Shows the loss of both runs, a text that the model writes, and what was sent over
    which axis.
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.train.preflight import preflight

        overrides = [] if steps is None else [f"train.steps={steps}", f"train.warmup_steps={steps // 8}"]
        config = preflight(_configure(out, overrides))
        alone = preflight(_configure(out / "one-rank", [*overrides, "ranks=1", "grid={data=1, x=1, y=1, z=1}"]))

    if not as_json:
        ranks = f"{config.ranks} ranks, then on one" if config.ranks > 1 else "one rank"
        seconds = round(30 + config.train.steps / 2, -1)
        print(
            f"{counted(config.train.steps, 'step')} on {ranks}: about {seconds:.0f} s on 2 CPU cores, less on GPUs",
            flush=True,
        )

    from stretto.report import read_run, write_report

    _train(config, f"Training on {counted(config.ranks, 'rank')}: {config.grid}", as_json)
    beside = None
    if config.ranks > 1:
        _train(alone, "The same on one rank", as_json)
        beside = alone.out
    sample = _write_sample(config)
    run = write_report(config.out, compare_with=beside, sample=sample)
    other = None if beside is None else read_run(beside)
    if as_json:
        print_json(_result(run, other, sample))
    else:
        _show(run, other, sample)


def _configure(out: Path, overrides: list[str]) -> "TrainConfig":
    """The demo's configuration, for as many of the machine's GPUs as it can use."""
    from stretto.cluster.detection import count_gpus
    from stretto.train.config import TrainConfig, load_config

    grids = {0: "{x=2, z=2}", 1: "{x=1, z=1}", 2: "{x=2, z=1}", 3: "{x=2, z=1}"}
    grid = grids.get(count_gpus(), "{x=2, z=2}")
    with as_file(files("stretto") / "configs" / "demo.toml") as file:
        config = load_config(file, ["ranks=none", f"grid={grid}", *overrides, f"out={out}"])
    assert isinstance(config, TrainConfig)  # demo.toml is a GPT's
    return config


def _train(config: "TrainConfig", heading: str, as_json: bool) -> None:
    from stretto.cli.running import exit_by, run_training

    if not as_json:
        print(f"\n{heading}", flush=True)
    stopped_by: signal.Signals | None = run_training(config, as_json=as_json)
    if stopped_by is not None:
        raise exit_by(stopped_by)


def _write_sample(config: "TrainConfig") -> str:
    """Generate a text with the trained model, loaded whole into this process."""
    from stretto.models import GPT
    from stretto.models.gpt import generate
    from stretto.train.checkpoint import load_checkpoint, newest_checkpoint
    from stretto.train.gpt.preflight import build_model_config, open_data

    model = GPT(build_model_config(config, open_data(config)))
    checkpoint = newest_checkpoint(config.out)
    assert checkpoint is not None  # the run has just ended
    load_checkpoint(checkpoint, model)
    tokens = generate(model, list(PROMPT.encode()), SAMPLE_TOKENS, temperature=0.7, seed=1)
    text = bytes(tokens).decode(errors="replace")
    # A model of bytes may write what would steer a terminal.
    return "".join(character if character.isprintable() or character == "\n" else "·" for character in text)


def _result(run: "RunRecord", other: "RunRecord | None", sample: str) -> dict[str, object]:
    from stretto.report import largest_difference

    result = dict(run.summary) | {"out": run.out, "step": run.steps[-1], "sample": sample}
    if other is not None:
        result |= {"one_rank": dict(other.summary), "largest_loss_difference": largest_difference(run, other)}
    return result


def _show(run: "RunRecord", other: "RunRecord | None", sample: str) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from stretto.report import largest_difference

    console = Console()
    table = Table("step", run.label)
    if other is not None:
        table.add_column(other.label)
    shown = sorted(
        {0, *range(max(0, len(run.steps) // 5 - 1), len(run.steps), max(1, len(run.steps) // 5)), len(run.steps) - 1}
    )
    for at in shown:
        beside = [f"{other.losses[at]:.5f}"] if other is not None else []
        table.add_row(str(run.steps[at]), f"{run.losses[at]:.5f}", *beside)
    console.print("\nLoss, nats a token:")
    console.print(table)
    if other is not None:
        console.print(f"largest difference at any step: {largest_difference(run, other):.1e}")
    sent = {axis: count for axis, count in run.summary["bytes_sent"].items() if count}
    if sent:
        table = Table("axis", "bytes")
        table.columns[1].justify = "right"
        for axis, count in sent.items():
            table.add_row(axis, f"{count:,}")
        console.print("\nSent by one rank in one step:")
        console.print(table)
    console.print()
    console.print(Panel(Text(sample), title="What the model writes now", title_align="left"))
    curve = f"The loss curve: {run.out / 'loss.png'}    " if (run.out / "loss.png").is_file() else ""
    print(f"\n{curve}All of it: {run.out / 'summary.md'}")
