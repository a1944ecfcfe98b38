# SPDX-License-Identifier: Apache-2.0
"""`python -m lab muon-curves`: the loss of a small GPT trained by Muon beside AdamW's, on a CPU.

Runs are `stretto train`'s of the demo's model, on the demo's text. Both optimizers try the same learning rates, as
Muon's updates have AdamW's size. The weights of grids are those of one rank (tests/optim/test_muon.py).
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin
from lab.training.curves import ALL, train_run
from stretto.bench.settings import Option


@dataclass(frozen=True)
class MuonCurvesSetting:
    """Settings of `python -m lab muon-curves`. Raises ValueError for settings that cannot work."""

    steps: Annotated[int, Option("Steps of each run.", least=10)] = 500
    rates: Annotated[tuple[float, ...], Option("Learning rates that both optimizers try.")] = (0.003,)


@dataclass(frozen=True)
class Row:
    """A run: its last losses."""

    optimizer: str = column("optimizer")
    lr: float = column("learning rate", "{:g}")
    steps: int = column("steps")
    loss: float = column("loss, mean of the last tenth", "{:.4f}")
    evaluation_loss: float | None = column("held-out loss", "{:.4f}")


def train_runs(setting: MuonCurvesSetting) -> Iterator[Measured]:
    """Train all runs, one after the other; what is done is written after each."""
    rows: list[Row] = []
    curves: dict[str, list[float]] = {}
    for lr, name in itertools.product(setting.rates, ("adamw", "muon")):
        label = f"{name}, lr {lr:g}"
        options = f"train.optimizer={name} train.lr={lr} train.warmup_steps={setting.steps // 10}"
        run = train_run(f"demo model.layers=2 {ALL} {options}", setting.steps, label)
        last = run.losses[-max(1, setting.steps // 10) :]
        rows.append(Row(name, lr, setting.steps, sum(last) / len(last), run.evaluations[-1][1]["evaluation_loss"]))
        curves[label] = list(run.losses)
        yield Measured(rows, {"curves": curves})


def plot_curves(data: dict[str, Any], picture: Path) -> None:
    """Draw the running means of all losses over steps."""
    import numpy as np

    from lab.style import drawing
    from stretto.report.loss_plot import running_mean
    from stretto.report.style import SKY, VERMILION

    styles = ["-", (0, (5, 3)), (0, (1.5, 1))]
    rates = list(dict.fromkeys(label.split()[-1] for label in data["curves"]))
    with drawing(picture, 7, 4) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        for label, losses in data["curves"].items():
            colour = VERMILION if label.startswith("muon") else SKY
            style = styles[rates.index(label.split()[-1]) % len(styles)]
            panel.plot(range(1, len(losses) + 1), running_mean(np.array(losses)), color=colour, ls=style, label=label)
        panel.set(xlabel="step", ylabel="loss (nats a byte)")
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
