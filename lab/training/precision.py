# SPDX-License-Identifier: Apache-2.0
"""`python -m lab precision`: the loss of whole runs in float8, by both recipes, beside that of bf16.

Runs are `stretto train`'s on one rank of the CPU, which rounds to fp8 as GPUs do and multiplies in fp32: the dense GPT
and the mixture of experts of `python -m lab curves` with four blocks, of which the first and the last stay in bf16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin
from lab.training.curves import ALL, EXAMPLES, MOE, train_run
from stretto.bench.settings import Option

BF16 = "bf16"
RUNS = {
    BF16: "train.dtype=bf16",
    "fp8, tensorwise": "train.dtype=fp8",
    "fp8, rowwise": "train.dtype=fp8 train.fp8_recipe=rowwise",
}
MODELS = ("dense", MOE)


@dataclass(frozen=True)
class PrecisionSetting:
    """Settings of `python -m lab precision`. Raises ValueError for settings that cannot work."""

    steps: Annotated[int, Option("Steps of each run.", least=10)] = 500


@dataclass(frozen=True)
class Row:
    """A run: losses of its last tenth and of held-out text, and their distances from bf16's (None: it is that run)."""

    model: str = column("model")
    name: str = column("run")
    steps: int = column("steps")
    loss: float = column("loss, last tenth", "{:.4f}")
    evaluation_loss: float = column("held-out loss", "{:.4f}")
    distance: float | None = column("loss beside bf16's", "{:+.2%}")
    evaluation_distance: float | None = column("held-out, beside bf16's", "{:+.2%}")


def train_runs(setting: PrecisionSetting) -> Iterator[Measured]:
    """Train all runs, one after the other; what is done is written after each."""
    rows: list[Row] = []
    curves: dict[str, dict[str, list[float]]] = {}
    for model, name in ((model, name) for model in MODELS for name in RUNS):
        run = train_run(name_run(model, name), setting.steps, f"{model}, {name}")
        last = run.losses[-setting.steps // 10 :]
        loss, held_out = sum(last) / len(last), run.evaluations[-1][1]["evaluation_loss"]
        assert held_out is not None
        base = next((row for row in rows if row.model == model), None)
        apart = (None, None) if base is None else (loss / base.loss - 1, held_out / base.evaluation_loss - 1)
        rows.append(Row(model, name, setting.steps, loss, held_out, *apart))
        curves.setdefault(model, {})[name] = list(run.losses)
        yield Measured(rows, {"curves": curves})


def name_run(model: str, name: str) -> str:
    """The example of a run, and its options."""
    return f"{EXAMPLES[model]} {ALL} model.layers=4 {RUNS[name]}"


def plot_precisions(data: dict[str, Any], picture: Path) -> None:
    """Draw a column a model: the losses of all its runs over steps, and below how far each is from bf16's."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    from lab.style import drawing
    from stretto.report.loss_plot import running_mean
    from stretto.report.style import GREEN, SKY, VERMILION

    looks = dict(zip(RUNS, ((SKY, "-"), (VERMILION, "-"), (GREEN, (0, (5, 3)))), strict=True))
    with drawing(picture, 10, 4.8) as drawn:
        panels = drawn.panels(2, len(data["curves"]), sharex=True, sharey="row", height_ratios=(3, 2))
        for (above, below), (model, curves) in zip(panels.T, data["curves"].items(), strict=True):
            base = running_mean(np.array(curves[BF16]))
            for name, losses in curves.items():
                steps, (colour, dashes) = range(1, len(losses) + 1), looks[name]
                mean = running_mean(np.array(losses))
                above.plot(steps, mean, color=colour, ls=dashes, lw=5.0 if name == BF16 else 1.4, label=name)
                if name != BF16:
                    below.plot(steps, 100 * (mean / base - 1), color=colour, ls=dashes, lw=1.4)
            below.axhspan(-0.5, 0.5, color=SKY, alpha=0.2, lw=0)
            below.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 5, 10]))
            above.set(title=model)
            below.set(xlabel="step")
        panels[0, 0].set_ylabel("loss (nats a byte)")
        panels[1, 0].set_ylabel("beside bf16's (%)")
        drawn.title = "The same training in float8 and in bf16"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Running means over a fiftieth of the curve; the wide line is bf16's. Below: how far they are from "
            "bf16's, in percent of it; the band is half a percent."
        )


BENCH = Bench(
    "precision",
    "The loss of whole trainings in float8, tensorwise and rowwise, beside bf16's (CPU).",
    PrecisionSetting,
    train_runs,
    Row,
    title="Losses in float8 beside bf16's",
    plot=plot_precisions,
)
