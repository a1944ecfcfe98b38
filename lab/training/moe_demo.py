# SPDX-License-Identifier: Apache-2.0
"""`python -m lab moe-demo`: a mixture of experts compared with a dense model of the same FLOPs a token.

Both are trained by `stretto train`'s loop on the same data, in the same order, on 4 processes of the CPU: the mixture
as `stretto init moe` has it, with its experts divided among ranks; the dense model with the same options but those of
experts.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin
from lab.training.curves import load_example, train_example
from stretto.bench.settings import Option
from stretto.models.gpt_config import GPTConfig
from stretto.report.run import read_metrics, read_run
from stretto.train.config import TrainConfig

MIXTURE, DENSE = "mixture of experts", "dense"
# Options that turn moe.toml into the dense model of the same active size.
WITHOUT_EXPERTS = [
    f"model.{name}=none"
    for name in (
        *("num_experts", "experts_per_token", "expert_ffn", "router_scores", "expert_weight_scale"),
        *("balance", "bias_rate"),
    )
] + ["grid.expert=1"]


@dataclass(frozen=True)
class MoeDemoSetting:
    """Settings of `python -m lab moe-demo`. Raises ValueError for settings that cannot work."""

    steps: Annotated[int, Option("Steps of each run.", least=2)] = 300


@dataclass(frozen=True)
class Row:
    """A trained model: its size, losses, and the load of its experts (None: it has none)."""

    name: str = column("model")
    parameters: int = column("parameters", "{:,}")
    flops_per_token: int = column("FLOPs a token", "{:,}")
    steps: int = column("steps")
    loss: float = column("last loss", "{:.3f}")
    evaluation_loss: float = column("held-out loss", "{:.3f}")
    highest_load: float | None = column("highest load", "{:.2f}")
    last_load: float | None = column("last load", "{:.2f}")


def train_both(setting: MoeDemoSetting) -> Measured:
    rows, curves = [], {}
    with tempfile.TemporaryDirectory(prefix="stretto-moe-demo-") as folder:
        for name in (MIXTURE, DENSE):
            config = configure(name, setting, Path(folder) / name.replace(" ", "-"))
            row, curves[name] = _read(train_example(config, name), name)
            rows.append(row)
    return Measured(rows, {"curves": curves})


def configure(name: str, setting: MoeDemoSetting, out: Path) -> TrainConfig:
    options = [f"out={out}", "device=cpu", f"train.steps={setting.steps}", f"train.warmup_steps={setting.steps // 8}"]
    return load_example("moe", [*options, *(WITHOUT_EXPERTS if name == DENSE else [])])


def _read(config: TrainConfig, name: str) -> tuple[Row, dict[str, Any]]:
    """A run's row of the table, and its curves."""
    lines = read_metrics(config.out)
    shape: GPTConfig = config.model.to_gpt(data_vocab=256, seq_len=config.train.seq_len)
    evaluated = [line for line in lines if "evaluation_loss" in line]
    loads = [line["expert_load"] for line in lines if "expert_load" in line]
    row = Row(
        name=name,
        parameters=read_run(config.out).summary["parameters"],
        flops_per_token=shape.flops_per_token(config.train.seq_len),
        steps=len(lines),
        loss=lines[-1]["loss"],
        evaluation_loss=evaluated[-1]["evaluation_loss"],
        highest_load=max(map(max, loads)) if loads else None,
        last_load=max(loads[-1]) if loads else None,
    )
    curves = {
        "loss": [round(line["loss"], 5) for line in lines],
        "evaluated": [line["step"] for line in evaluated],
        "evaluation_loss": [round(line["evaluation_loss"], 5) for line in evaluated],
        "blocks": list(shape.moe_blocks),
        "load": [[round(value, 4) for value in load] for load in loads],
    }
    return row, curves


def plot_moe_demo(data: dict[str, Any], picture: Path) -> None:
    """Draw the losses of all runs over steps, and the load of each block of those that have experts."""
    from lab.style import drawing
    from stretto.report.expert_plot import draw_loads
    from stretto.report.style import SERIES

    curves = data["curves"]
    with drawing(picture, 7.5, 4.8) as drawn:
        losses, loads = drawn.panels(2, 1, sharex=True, height_ratios=(3, 2))[:, 0]
        for (name, curve), look in zip(curves.items(), SERIES, strict=False):
            steps = range(1, len(curve["loss"]) + 1)
            losses.plot(steps, curve["loss"], color=look.colour, linewidth=0.7, alpha=0.45)
            losses.plot(curve["evaluated"], curve["evaluation_loss"], label=f"{name}, held-out text", **look.line)
            if curve["load"]:
                draw_loads(loads, list(steps), curve["load"], [f"load of block {block}" for block in curve["blocks"]])
        losses.set_ylabel("loss (nats a byte)")
        loads.set(ylabel="load: max / mean", xlabel="step")
        drawn.title = "A mixture of experts beside a dense model of the same FLOPs a token"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Pale: the loss of each step's batch. Load: tokens of a block's fullest expert, as a multiple of the mean "
            "expert's; 1 is even. Of long runs a running mean is drawn."
        )


BENCH = Bench(
    "moe-demo",
    "A mixture of experts on 4 CPU processes, compared with a dense model of its active size: losses and load.",
    MoeDemoSetting,
    train_both,
    Row,
    title="A mixture of experts beside a dense model of its active size",
    plot=plot_moe_demo,
)
