# SPDX-License-Identifier: Apache-2.0
"""`python -m lab saves`: what a checkpoint adds to a step, and kills.

A GPT is trained with regular checkpoints, saved synchronously between two steps, and asynchronously. With --kills, runs
are killed while they save (`tests.faults.kills`), on processes of the CPU.

Defaults are those of one GPU. With `--cpu`, steps run on `--ranks` processes.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch.distributed as dist

from lab.harness import Bench, Measured, column
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Needs, Option
from stretto.memory import failures
from stretto.parallel import Grid
from stretto.train.checkpoint.retention import Retention
from stretto.train.checkpoint.saver import Saver
from stretto.train.checkpoint.staging import sizes_of
from stretto.train.config import TrainConfig, make_config
from stretto.train.gpt.task import GPTTask

TEXT_FILE, TEXT = "text.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 4000


@dataclass(frozen=True)
class SavesSetting:
    """Settings of `python -m lab saves`. Raises ValueError for impossible settings."""

    ranks: Annotated[int, Option("Processes of the CPU; a GPU has one.", least=1)] = 2
    steps: Annotated[int, Option("Timed steps of each way to save.", least=1)] = 48
    every: Annotated[int, Option("Steps between two saves.", least=1)] = 12
    layers: Annotated[int, Option("Transformer blocks of the model that is trained.", least=1)] = 4
    hidden: Annotated[int, Option("Width of a token's vector.")] = 512
    batch: Annotated[int, Option("Sequences of a step, of 256 tokens.", least=1)] = 4
    kills: Annotated[
        int, Option("Kill runs so often while they save, on the CPU, and measure nothing else.", least=0)
    ] = 0
    seed: Annotated[int, Option("Of the kills' moments.", least=0)] = 0
    cpu: Annotated[bool, Option("On processes of the CPU.")] = False

    def __post_init__(self) -> None:
        if self.hidden < 64 or self.hidden % 64:
            raise ValueError(f"hidden is {self.hidden}, but must be a multiple of 64; 512 would do")
        if self.steps < 2 * self.every:
            raise ValueError(f"steps is {self.steps}, but must be at least twice every ({self.every})")

    @property
    def device(self) -> str:
        """The type of the devices that are measured."""
        return "cpu" if self.cpu else "cuda"


@dataclass(frozen=True)
class SaveRow:
    """Steps with a kind of saves, and what a save adds to them (None: there are none)."""

    total: float
    saves: str = column("checkpoints")
    gigabytes: float = column("state (GB)", "{:.3f}")
    step_ms: float = column("step, median (ms)", "{:.1f}")
    save_ms: float | None = column("save call, median (ms)", "{:.1f}")
    added_ms: float | None = column("a save adds to the run (ms)", "{:.1f}", default=None)
    added_steps: float | None = column("in steps", "{:.2f}", default=None)


@dataclass(frozen=True)
class KillRow:
    """Kills that left the same state."""

    left: str = column("what the kill left")
    kills: int = column("kills")
    all: int = column("of all ranks")
    one: int = column("of one rank")
    broken: int = column("broken checkpoints")
    most_lost: int = column("most steps lost")


def measure_saves(setting: SavesSetting) -> Measured:
    """Measure steps with saves, or kill runs. Raises RuntimeError where killed runs lose more than they may."""
    if setting.kills:
        return kill(setting)
    with tempfile.TemporaryDirectory(prefix="stretto-bench-saves-") as folder:
        (Path(folder) / TEXT_FILE).write_text(TEXT)  # before any rank reads it
        rows = run_ranks(setting.ranks if setting.cpu else 1, _measure_steps, setting, Path(folder))
    return Measured(rows, name="saves-steps")


def kill(setting: SavesSetting) -> Measured:
    """Kill runs while they save, and compare what is left with an undisturbed run's."""
    from tests.faults.kills import kill_runs

    kills, runs = kill_runs(setting.kills, setting.ranks, setting.seed, hidden=setting.hidden)
    rows = []
    for left in sorted({kill.left for kill in kills}):
        own = [kill for kill in kills if kill.left == left]
        of_all = sum(len(kill.victims) == setting.ranks for kill in own)
        broken, lost = sum(kill.broken for kill in own), max(kill.lost for kill in own)
        rows.append(KillRow(left, len(own), of_all, len(own) - of_all, broken, lost))
    title = f"{len(kills)} kills, seed {setting.seed}, in {runs} runs that ended with the losses of an undisturbed one"
    return Measured(rows, {"seed": setting.seed, "runs": runs, "ranks": setting.ranks}, name="saves-kills", title=title)


def _config(folder: Path, setting: SavesSetting, ranks: int) -> TrainConfig:
    config = make_config(
        {
            "out": str(folder / "run"),
            "device": setting.device,
            "grid": {"data": ranks},
            "data": {"path": str(folder / TEXT_FILE)},
            "model": {"layers": setting.layers, "hidden": setting.hidden, "heads": setting.hidden // 64},
            "train": {"steps": 1 << 30, "batch": ranks * max(1, setting.batch // ranks), "seq_len": 256},
        },
        [],
    )
    assert isinstance(config, TrainConfig)
    return config


def _measure_steps(setting: SavesSetting, folder: Path) -> list[SaveRow]:
    ranks = int(os.environ["WORLD_SIZE"])
    grid = Grid(data=ranks, device=setting.device)
    task = GPTTask(_config(folder, setting, ranks), grid)
    task.start()
    return list(_time_saves(setting, task, folder / "run"))


def _time_saves(setting: SavesSetting, task: GPTTask, out: Path) -> Iterator[SaveRow]:
    """Runs without saves, with synchronous and with asynchronous saves; the best of two rounds counts."""
    step = 0
    best: dict[str, SaveRow] = {}
    for kind in ("none", "between steps", "beside training") * 2:
        with Saver(out, task.grid.device, Retention(1), is_async=kind == "beside training") as saver:
            task.before_update = saver.wait_on_device
            for _ in range(3):
                step += 1
                task.step(step, 1e-4)
            saver.prepare(task.state())
            failures.synchronize(task.grid.device)
            dist.barrier()
            began, steps, saves = time.perf_counter(), [], []
            for number in range(1, setting.steps + 1):
                start = time.perf_counter()
                step += 1
                task.step(step, 1e-4)
                failures.synchronize(task.grid.device)
                steps.append(time.perf_counter() - start)
                if kind != "none" and number % setting.every == 0:
                    start = time.perf_counter()
                    saver.save(step, task.state(), task.description())
                    saves.append(time.perf_counter() - start)
            total = time.perf_counter() - began
        size, saving = sum(sizes_of(task.state()).values()) / 1e9, 1e3 * statistics.median(saves) if saves else None
        if kind not in best or best[kind].total > total:
            best[kind] = SaveRow(total, kind, size, 1e3 * statistics.median(steps), saving)
    plain = best["none"]
    for row in best.values():
        added = 1e3 * (row.total - plain.total) / (setting.steps // setting.every)
        yield row if row is plain else replace(row, added_ms=added, added_steps=added / plain.step_ms)


BENCH = Bench(
    "saves",
    """Measure what a checkpoint adds to a step, synchronous and asynchronous; with --kills N, kill -9 during saves.

    --kills runs on processes of the CPU alone, and needs no GPU.
    """,
    SavesSetting,
    measure_saves,
    SaveRow,
    title="What a save adds to training",
    needs=Needs.ONE_GPU,
    about=lambda setting: {},
)
