# SPDX-License-Identifier: Apache-2.0
"""`python -m lab muon-curves`: the loss of a small GPT trained by Muon beside AdamW's, on CPU ranks.

Runs are `stretto train`'s of the demo's model, on the demo's text. Both optimizers take the same learning rate, as
Muon's updates have AdamW's size, from a few that are tried; Muon also runs on four ranks, where it hides its exchange.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin
from lab.training.curves import ALL, load_example, train_example
from stretto.bench.settings import Option
from stretto.report.run import read_run

ON_GRID = "grid.x=2 grid.z=2"


@dataclass(frozen=True)
class MuonCurvesSetting:
    """Settings of `python -m lab muon-curves`. Raises ValueError for settings that cannot work."""

    steps: Annotated[int, Option("Steps of each run.", least=10)] = 500
    rates: Annotated[tuple[float, ...], Option("Learning rates that both optimizers try.")] = (0.003, 0.01)


@dataclass(frozen=True)
class Row:
    """A run: its last losses."""

    optimizer: str = column("optimizer")
    ranks: str = column("grid")
    lr: float = column("learning rate", "{:g}")
    steps: int = column("steps")
    loss: float = column("loss, mean of the last tenth", "{:.4f}")
    evaluation_loss: float = column("held-out loss", "{:.4f}")


def train_runs(setting: MuonCurvesSetting) -> Iterator[Measured]:
    """Train all runs, one after the other; what is done is written after each."""
    rows: list[Row] = []
    curves: dict[str, list[float]] = {}
    runs = [(name, "", lr) for lr in setting.rates for name in ("adamw", "muon")]
    for name, grid, lr in (*runs, ("muon", ON_GRID, setting.rates[-1])):
        label = f"{name}, lr {lr:g}" + (", x=2 z=2" if grid else "")
        with tempfile.TemporaryDirectory(prefix="stretto-muon-curves-") as folder:
            options = f"model.layers=2 {ALL} {grid} train.optimizer={name} train.lr={lr}".split()
            options += [f"out={folder}", *(f"train.{each}={setting.steps}" for each in ("steps", "evaluate_every"))]
            options += [f"train.warmup_steps={setting.steps // 10}", "data.evaluation_sequences=128"]
            run = read_run(train_example(load_example("demo", options), label).out)
        last = run.losses[-max(1, setting.steps // 10) :]
        held_out = run.evaluations[-1][1]["evaluation_loss"]
        assert held_out is not None
        rows.append(
            Row(name, grid.replace("grid.", "") or "1 rank", lr, setting.steps, sum(last) / len(last), held_out)
        )
        curves[label] = list(run.losses)
        yield Measured(rows, {"curves": curves})


def plot_curves(data: dict[str, Any], picture: Path) -> None:
    """Draw the running means of all losses over steps."""
    import numpy as np

    from lab.style import drawing
    from stretto.report.loss_plot import running_mean
    from stretto.report.style import GREEN, SKY, VERMILION

    with drawing(picture, 7, 4) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        for label, losses in data["curves"].items():
            is_muon, is_first = label.startswith("muon"), f"{label}, ".count("lr 0.003")
            colour = GREEN if "x=2" in label else VERMILION if is_muon else SKY
            style = (0, (1.5, 1)) if "x=2" in label else (0, (5, 3)) if is_first else "-"
            panel.plot(range(1, len(losses) + 1), running_mean(np.array(losses)), color=colour, ls=style, label=label)
        panel.set(xlabel="step", ylabel="loss (nats a byte)")
        panel.legend()
        drawn.title = "Muon beside AdamW"
        drawn.subtitle = describe_origin(data)
        drawn.caption = "The demo's GPT of two layers; running means over a fiftieth of the curve."


BENCH = Bench(
    "muon-curves",
    "The loss of a small GPT trained by Muon beside AdamW's (CPU, fp32).",
    MuonCurvesSetting,
    train_runs,
    Row,
    title="Muon beside AdamW",
    plot=plot_curves,
)
