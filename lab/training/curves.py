# SPDX-License-Identifier: Apache-2.0
"""`python -m lab curves`: the loss of whole runs on grids beside that on one rank (Singh's figures 3.8 and 7.7).

Runs are `stretto train`'s, on processes of the CPU: the demo's model and the mixture of experts of `stretto init moe`,
made smaller. On a grid, sums are rounded in another order, and training amplifies that: in a mixture of experts
suddenly, once a token's choice among nearly equal experts depends on it. One more run on one rank, whose gradients
accumulate over micro-batches, shows by how much without any parallelism; in fp64 no choice depends on rounding.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Option
from stretto.report.run import RunRecord, read_run
from stretto.train.config import TrainConfig, config_to_toml, load_config
from stretto.train.preflight import preflight
from stretto.train.trainer import train

ONE, ACCUMULATED, IN_FOUR = "one rank", "one rank, 4 micro-batches", "train.micro_batch=2"
MOE, IN_FP64 = "mixture of experts", "mixture of experts, fp64"
# Options of each run. A loss of each sequence balances experts the same in any micro-batches.
RUNS = {
    "dense": {ONE: "", "pipe=2": f"grid.pipe=2 {IN_FOUR}", "x=2 z=2": "grid.x=2 grid.z=2", ACCUMULATED: IN_FOUR},
    MOE: {ONE: "", "data=2 expert=2": "grid.data=2 grid.expert=2", ACCUMULATED: IN_FOUR},
    IN_FP64: {ONE: "", "data=2 expert=2": "grid.data=2 grid.expert=2"},
}
EXAMPLES = {"dense": "demo model.layers=2"}
EXAMPLES[MOE] = "moe model.ffn=192 model.expert_ffn=96 model.balance=sequence model.bias_rate=none"
EXAMPLES[IN_FP64] = f"{EXAMPLES[MOE]} train.dtype=fp64"
ALL = "device=cpu ranks=none grid.data=1 grid.x=1 grid.z=1 grid.expert=1 model.hidden=64 train.seq_len=32"


@dataclass(frozen=True)
class CurvesSetting:
    """Settings of `python -m lab curves`. Raises ValueError for settings that cannot work."""

    steps: Annotated[int, Option("Steps of each run.", least=10)] = 1000


@dataclass(frozen=True)
class Row:
    """A run: its last losses, and its largest distance from the same model on one rank (None: it is that run)."""

    model: str = column("model")
    name: str = column("run")
    steps: int = column("steps")
    loss: float = column("last step's loss", "{:.5f}")
    evaluation_loss: float | None = column("held-out loss", "{:.5f}")
    largest: float | None = column("largest distance from one rank", "{:.1e}")
    early: float | None = column("in the first tenth", "{:.1e}")


def train_runs(setting: CurvesSetting) -> Iterator[Measured]:
    """Train all runs, one after the other; what is done is written after each."""
    rows: list[Row] = []
    curves: dict[str, dict[str, list[float]]] = {}
    for model, name in ((model, name) for model, runs in RUNS.items() for name in runs):
        run = train_run(name_run(model, name), setting.steps, f"{model}, {name}")
        apart = [abs(loss - one) for loss, one in zip(run.losses, curves.get(model, {}).get(ONE, ()), strict=False)]
        largest, early = (max(each, default=None) for each in (apart, apart[: setting.steps // 10]))
        held_out = run.evaluations[-1][1]["evaluation_loss"]
        rows.append(Row(model, name, setting.steps, run.losses[-1], held_out, largest, early))
        curves.setdefault(model, {})[name] = list(run.losses)
        yield Measured(rows, {"curves": curves})


def name_run(model: str, name: str) -> str:
    """The example of a run, and its options."""
    return f"{EXAMPLES[model]} {ALL} {RUNS[model][name]}"


def train_run(example: str, steps: int, label: str) -> RunRecord:
    """Train an example for so many steps, in a folder that is removed."""
    with tempfile.TemporaryDirectory(prefix="stretto-curves-") as folder:
        return read_run(train_example(make_run(example, steps, Path(folder)), label).out)


def make_run(example: str, steps: int, out: Path) -> TrainConfig:
    """The configuration of a run of so many steps, evaluated at its end. example: a name, and options."""
    name, *given = example.split()
    options = [f"out={out}", *(f"train.{each}={steps}" for each in ("steps", "evaluate_every"))]
    options += [f"train.warmup_steps={steps // 8}", "data.evaluation_sequences=128"]
    return load_example(name, options + given)


def load_example(name: str, options: list[str]) -> TrainConfig:
    """The configuration that `stretto init NAME` writes, with options as `--set` takes them."""
    with as_file(files("stretto") / "configs" / f"{name}.toml") as file:
        config = load_config(file, options)
    assert isinstance(config, TrainConfig)
    return config


def train_example(config: TrainConfig, name: str) -> TrainConfig:
    """Train as `stretto train` does, on ranks of its own. Returns the configuration as it was completed."""
    checked = preflight(config)
    assert isinstance(checked, TrainConfig)
    print(f"{name}: {checked.ranks} ranks, {checked.grid}", flush=True)
    checked.out.mkdir(parents=True, exist_ok=True)
    (checked.out / "config.toml").write_text(config_to_toml(checked), encoding="utf-8")
    run_ranks(checked.ranks, train, checked)
    return checked


def plot_curves(data: dict[str, Any], picture: Path) -> None:
    """Draw a column a model: the losses of all its runs over steps, and below how far each is from one rank's."""
    import numpy as np

    from lab.style import drawing
    from stretto.report.loss_plot import running_mean
    from stretto.report.style import GREEN, GREY, SKY, VERMILION

    looks = {ONE: (SKY, "-"), ACCUMULATED: (GREY, (0, (1.5, 1))), "x=2 z=2": (GREEN, (0, (5, 3)))}
    with drawing(picture, 10, 4.8) as drawn:
        panels = drawn.panels(2, len(data["curves"]), sharex=True, sharey="row", height_ratios=(3, 2))
        for (above, below), (model, curves) in zip(panels.T, data["curves"].items(), strict=True):
            for name, losses in curves.items():
                steps, (colour, dashes) = range(1, len(losses) + 1), looks.get(name, (VERMILION, "-"))
                width, apart = 5.0 if name == ONE else 1.4, np.abs(np.array(losses) - curves[ONE])
                above.plot(steps, running_mean(np.array(losses)), color=colour, ls=dashes, lw=width, label=name)
                below.semilogy(steps, np.where(apart > 0, apart, np.nan), ".", color=colour, markersize=2)
            above.set(title=model)
            below.set(xlabel="step")
        panels[0, 0].set_ylabel("loss (nats a byte)")
        panels[1, 0].set_ylabel("distance from one rank")
        drawn.title = "The same training on grids and on one rank"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Above: running means over a fiftieth of the curve; the wide line is one rank's. Below: how far the loss "
            "of each step is from one rank's. Grey: one rank again, with gradients summed in another order."
        )


BENCH = Bench(
    "curves",
    "The loss of whole trainings with pipe=2, x=2 z=2 and expert=2 beside that on one rank (CPU, fp32).",
    CurvesSetting,
    train_runs,
    Row,
    title="Losses on grids beside one rank's",
    plot=plot_curves,
)
