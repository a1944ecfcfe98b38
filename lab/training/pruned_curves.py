# SPDX-License-Identifier: Apache-2.0
"""`python -m lab pruned-curves`: held-out losses of a GPT that is pruned before, early in, and never in its training.

The model has GPT-2 small's shape, but reads bytes; all runs read the same tokens (Singh, section 4.2: a model pruned to
90% trains to the loss of the dense one). The text is the source of Python's standard library, which every machine has.
"""

import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin
from lab.training.curves import load_example, train_example
from stretto.bench.settings import Needs, Option
from stretto.report.run import read_run
from stretto.train.config import TrainConfig

NEVER, AT_ONCE, EARLY = "never", "at initialization", "after 10% of the steps"


@dataclass(frozen=True)
class PrunedCurvesSetting:
    """Settings of `python -m lab pruned-curves`."""

    steps: Annotated[int, Option("Steps of each run.", least=10)] = 250
    batch: Annotated[int, Option("Sequences of a step.", least=1)] = 64
    sparsity: Annotated[float, Option("The part of the linears' weights that is pruned.", least=0)] = 0.9
    megabytes: Annotated[int, Option("Text that is read at most.", least=1)] = 24
    cpu: Annotated[bool, Option("A small model on the CPU: a try, no figure.")] = False


@dataclass(frozen=True)
class Row:
    """A run."""

    pruned: str = column("pruned")
    sparsity: float = column("sparsity")
    tokens: int = column("tokens (bytes of text)", "{:,}")
    loss: float = column("held-out loss (nats a byte)", "{:.4f}")
    beside_dense: float = column("times the dense run's", "{:.4f}")


def train_runs(setting: PrunedCurvesSetting) -> Iterator[Measured]:
    """Train all runs, one after the other; what is done is written after each."""
    rows: list[Row] = []
    curves: dict[str, list[tuple[int, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="stretto-pruned-") as folder:
        text = write_sources(Path(folder) / "text", setting.megabytes << 20)
        for name in (NEVER, AT_ONCE, EARLY):
            config = train_example(configure(name, setting, text, Path(folder) / name.replace(" ", "-")), name)
            evaluations = read_run(config.out).evaluations
            found = [(step, float(values["evaluation_loss"] or 0.0)) for step, values in evaluations]
            of_step = config.train.batch * config.train.seq_len
            curves[name] = [(step * of_step, loss) for step, loss in found]
            loss, dense = found[-1][1], curves[NEVER][-1][1]
            rows.append(Row(name, config.train.sparsity, setting.steps * of_step, loss, loss / dense))
            yield Measured(rows, {"curves": curves})


def configure(name: str, setting: PrunedCurvesSetting, text: Path, out: Path) -> TrainConfig:
    shape = "layers=2 hidden=64 heads=4" if setting.cpu else "layers=12 hidden=768 heads=12"
    options = [f"model.{each}" for each in shape.split()]
    options += ["device=cpu", "train.seq_len=64"] if setting.cpu else ["train.seq_len=1024"]
    options += [f"data.evaluation_sequences={8 if setting.cpu else 128}"]
    options += [f"out={out}", f"data.path={text}", "ranks=1", "grid.x=1", "grid.z=1"]
    options += [f"train.steps={setting.steps}", f"train.batch={setting.batch}", "train.lr=1e-3", "train.dtype=bf16"]
    options += [f"train.warmup_steps={setting.steps // 10}", f"train.evaluate_every={setting.steps // 10}"]
    options += ["train.optimizer_state=device"]
    if name != NEVER:
        options += [f"train.sparsity={setting.sparsity}"]
    if name == EARLY:
        options += [f"train.prune_at={setting.steps // 10}"]
    return load_example("demo", options)


def write_sources(folder: Path, size: int) -> Path:
    """Write the sources of Python's standard library, in the order of their names, up to so many bytes, to a folder."""
    folder.mkdir()
    root, left = Path(sysconfig.get_paths()["stdlib"]), size
    with (folder / "text.txt").open("w", encoding="utf-8") as out:
        for file in sorted(root.rglob("*.py")):
            if left > 0 and not {"site-packages", "dist-packages"} & set(file.parts):
                source = file.read_text(encoding="utf-8", errors="replace")[:left]
                left -= out.write(source)
    return folder


def plot_losses(data: dict[str, Any], picture: Path) -> None:
    """Draw held-out losses over tokens."""
    from lab.style import drawing
    from stretto.report.style import GREY, SKY, VERMILION

    with drawing(picture, 7, 4.2) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        for (name, curve), colour in zip(data["curves"].items(), (GREY, SKY, VERMILION), strict=False):
            panel.plot(
                [tokens / 1e6 for tokens, _ in curve], [loss for _, loss in curve], "o-", color=colour, label=name
            )
        panel.set(xlabel="million tokens", ylabel="held-out loss (nats a byte)")
        drawn.title = f"A GPT whose linears are pruned to {data['setting']['sparsity']:.0%}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = "All runs read the same tokens, with the same learning rates."


BENCH = Bench(
    "pruned-curves",
    "Held-out losses of a GPT of GPT-2 small's shape, pruned at initialization, after 10% of the steps, and never.",
    PrunedCurvesSetting,
    train_runs,
    Row,
    title="Losses of pruned models",
    plot=plot_losses,
    needs=Needs.ONE_GPU,
)
