# SPDX-License-Identifier: Apache-2.0
"""`python -m lab saves`: what a checkpoint adds to a step, at which speed it is copied and written, and kills.

steps: a GPT is trained with regular checkpoints, saved synchronously between two steps, and asynchronously. size: a
state of 7B's size, weights and two moments in fp32, on one GPU: pinning the memory, the host link, the copy, a step
with and without a concurrent copy; then a part of it is written, by several numbers of writer threads. hash: the hash
of 7B's weights that `train.verify_steps` compares before a save, relative to the GPU's memory bandwidth. With --kills,
runs are killed while they save (`tests.faults.kills`), on processes of the CPU.

Defaults are those of one GPU. With `--cpu`, steps run on `--ranks` processes, and `size` copies little: a try.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness import Bench, Measured, column
from stretto.bench.harness import empty_memory, run_ranks, time_steps
from stretto.bench.settings import Needs, Option, Repeats, require_known
from stretto.cluster.host_memory import host_memory_available
from stretto.cluster.probe import measure_host_link
from stretto.memory import failures
from stretto.parallel import Grid
from stretto.train.bit_hash import hash_bits
from stretto.train.checkpoint.retention import Retention
from stretto.train.checkpoint.saver import Saver
from stretto.train.checkpoint.staging import Staging, sizes_of
from stretto.train.checkpoint.storage import LocalBox, ShardedState
from stretto.train.checkpoint.writing import CheckpointWriter, free_bytes, write_checkpoint
from stretto.train.config import TrainConfig, make_config
from stretto.train.gpt.task import GPTTask

USUAL_PARTS = ("steps", "size")
PARTS = (*USUAL_PARTS, "hash")
LLAMA_7B_NUMBERS = 6_738_415_616
"""Parameters of Llama 7B (Touvron et al., 2023), of which each has a weight and two moments in fp32."""
LARGEST_NUMBERS = 11008 * 4096
"""Numbers of its largest matrix, and of the tensors that `size` copies."""
USABLE, USABLE_ON_HOST = 0.85, 0.75
"""The parts of a GPU's free memory and of the host's that `size` uses."""
STATES = ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq")
TEXT_FILE, TEXT = "text.txt", "It was a bright cold day in April, and the clocks were striking thirteen. " * 4000
DESCRIPTION: dict[str, Any] = {"optimizer": "adamw", "model": {}, "run": {}, "data": {}}


@dataclass(frozen=True)
class SavesSetting:
    """Settings of `python -m lab saves`. Raises ValueError for impossible settings."""

    parts: Annotated[tuple[str, ...], Option("steps, size, hash, with commas.")] = USUAL_PARTS
    ranks: Annotated[int, Option("Processes of the CPU, for steps and kills; a GPU has one.", least=1)] = 2
    steps: Annotated[int, Option("Timed steps of each way to save.", least=1)] = 48
    every: Annotated[int, Option("Steps between two saves.", least=1)] = 12
    layers: Annotated[int, Option("Transformer blocks of the model that is trained.", least=1)] = 4
    hidden: Annotated[int, Option("Width of a token's vector.")] = 512
    batch: Annotated[int, Option("Sequences of a step, of 256 tokens.", least=1)] = 4
    numbers: Annotated[
        int, Option("Parameters whose state is copied by `size`; fewer where memory does not suffice.", least=1)
    ] = LLAMA_7B_NUMBERS
    write_gigabytes: Annotated[float, Option("Of that state, how much `size` writes to the disk.")] = 8.0
    writers: Annotated[tuple[int, ...], Option("Writer threads to compare, with commas.")] = (1, 2, 4, 8)
    repeats: Repeats = 3
    kills: Annotated[
        int, Option("Kill runs so often while they save, on the CPU, and measure nothing else.", least=0)
    ] = 0
    seed: Annotated[int, Option("Of the kills' moments.", least=0)] = 0
    cpu: Annotated[bool, Option("On processes of the CPU; `size` is then a try.")] = False

    def __post_init__(self) -> None:
        require_known("part", self.parts, PARTS)
        if self.hidden < 64 or self.hidden % 64:
            raise ValueError(f"hidden is {self.hidden}, but must be a multiple of 64; 512 would do")
        if self.write_gigabytes <= 0:
            raise ValueError(f"write-gigabytes is {self.write_gigabytes:g}, but must be more than 0")
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
class SpeedRow:
    """Bytes that were moved, and the time."""

    what: str = column("")
    gigabytes: float = column("GB", "{:.1f}")
    seconds: float = column("seconds", "{:.3f}")
    rate: float = column("GB/s", "{:.1f}")


@dataclass(frozen=True)
class KillRow:
    """Kills that left the same state."""

    left: str = column("what the kill left")
    kills: int = column("kills")
    all: int = column("of all ranks")
    one: int = column("of one rank")
    broken: int = column("broken checkpoints")
    most_lost: int = column("most steps lost")


def measure_parts(setting: SavesSetting) -> Iterator[Measured]:
    """Measure the parts, or kill runs; each has a result of its own. Raises RuntimeError for other losses."""
    if setting.kills:
        yield kill(setting)
        return
    parts: dict[str, tuple[str, int, Callable[[SavesSetting, Path], list[Any]]]] = {
        "steps": ("What a save adds to training", setting.ranks if setting.cpu else 1, _measure_steps),
        "size": ("Copying and writing a state", 1, _measure_size),
        "hash": ("Hashing the weights that replicas compare", 1, _measure_hash),
    }
    for part, (title, ranks, measure) in parts.items():
        if part in setting.parts:
            with tempfile.TemporaryDirectory(prefix="stretto-bench-saves-") as folder:
                (Path(folder) / TEXT_FILE).write_text(TEXT)  # before any rank reads it
                rows = run_ranks(ranks, measure, setting, Path(folder))
            yield Measured(rows, name=f"saves-{part}", title=title)


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


# --- hash


def _measure_hash(setting: SavesSetting, folder: Path) -> list[SpeedRow]:
    """One pass over weights in fp32 and in bf16, and a sum of the same bytes by torch, which also reads them once."""
    device = torch.device(setting.device)
    Grid(data=1, device=device)
    numbers = min(setting.numbers, 1 << 24) if setting.cpu else min(setting.numbers, _numbers_that_fit(device))
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        parts = range(0, numbers, LARGEST_NUMBERS)
        weights = [torch.ones(min(LARGEST_NUMBERS, numbers - start), dtype=dtype, device=device) for start in parts]
        total = sum(weight.nbytes for weight in weights)

        def add_up(weights: list[Tensor] = weights) -> None:
            for weight in weights:
                weight.sum(dtype=torch.float32)

        for what, call in (("hashed", partial(hash_bits, weights)), ("added up by torch.sum", add_up)):
            seconds = time_steps(call, warm_up=2, repeats=max(3, setting.repeats))
            name = f"{numbers:,} weights in {str(dtype).removeprefix('torch.')}, {what}"
            rows.append(SpeedRow(name, total / 1e9, seconds, total / seconds / 1e9))
    return rows


# --- steps


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


# --- size


def _measure_size(setting: SavesSetting, folder: Path) -> list[SpeedRow]:
    device = torch.device(setting.device)
    Grid(device=device)
    rows: list[SpeedRow] = []

    def add(what: str, num_bytes: float, seconds: float) -> None:
        rows.append(SpeedRow(what, num_bytes / 1e9, seconds, num_bytes / seconds / 1e9))
        print(f"{what}: {num_bytes / 1e9:.1f} GB in {seconds:.3f} s, {num_bytes / seconds / 1e9:.1f} GB/s", flush=True)

    if device.type == "cuda":
        link = measure_host_link(device, partial(time_steps, warm_up=1, repeats=3)).to_host_bandwidth or 1.0
        add("the host link, device to pinned memory", link, 1.0)
        empty_memory()
    numbers = min(setting.numbers, _numbers_that_fit(device))
    state = _make_state(numbers, device)
    total = sum(sizes_of(state).values())
    staging = Staging(device)
    seconds = _clock(device, partial(staging.reserve, state))
    add("pinned memory is allocated, once", total, seconds)
    for _ in range(setting.repeats):
        calls = _clock(device, partial(staging.copy, state), waits=False)
        add("the copy: the host's call returns", total, calls)
        add("the copy: all values are on the host", total, staging.copy_seconds() or calls)
    if device.type == "cuda":
        for what, seconds in _time_overlapped(state, staging, device):
            add(what, total, seconds)
    _write(setting, folder, staging, state, add)
    return rows


def _numbers_that_fit(device: torch.device) -> int:
    bytes_each = 12
    on_host = USABLE_ON_HOST * host_memory_available().bytes
    if device.type != "cuda":
        return int(min(1 << 24, on_host / 2 / bytes_each))
    return int(min(on_host, USABLE * torch.cuda.mem_get_info(device)[0]) / bytes_each)


def _make_state(numbers: int, device: torch.device) -> dict[str, ShardedState]:
    """Weights and two moments of `numbers` numbers, in tensors of at most the size of Llama 7B's largest matrix."""
    state = {}
    for number, start in enumerate(range(0, numbers, LARGEST_NUMBERS)):
        size = min(LARGEST_NUMBERS, numbers - start)
        for pattern in STATES:
            values = torch.full((size,), float(number + 1), device=device)
            state[pattern.format(f"part{number}")] = ShardedState((size,), (LocalBox((0,), values),))
    return state


def _time_overlapped(
    state: dict[str, ShardedState], staging: Staging, device: torch.device
) -> Iterator[tuple[str, float]]:
    """A step of matrix products and an update of the whole state: without a copy, with a concurrent one, and after one.

    The update waits for the copy, and the products do not. They take about as long as the copy.
    """
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    values = [box.values for whole in state.values() for box in whole.boxes]

    def products(count: int) -> Tensor:
        result = a
        for _ in range(count):
            result = torch.mm(a, result).clamp_(-1, 1)
        return result

    products(8)
    one = _clock(device, partial(products, 64)) / 64
    copying = staging.copy_seconds() or 1.0
    count = max(1, round(copying / one))

    def step() -> None:
        products(count)
        staging.wait_on_device()
        torch._foreach_mul_(values, 1.0)

    def step_with_copy() -> None:
        staging.copy(state)
        step()

    def step_after_copy() -> None:
        staging.copy(state)
        staging.wait_on_device()
        step()

    for what, run in (
        ("a step without a copy", step),
        ("a step with a copy beside its products", step_with_copy),
        ("a step that waits for the copy first", step_after_copy),
    ):
        run()
        yield what, min(_clock(device, run) for _ in range(3))


def _write(
    setting: SavesSetting,
    folder: Path,
    staging: Staging,
    state: dict[str, ShardedState],
    add: Callable[[str, float, float], None],
) -> None:
    """Write a part of the state's copy with several numbers of writer threads, in turns; each file is synced."""
    wanted = min(setting.write_gigabytes * 1e9, 0.4 * free_bytes(folder))
    copy, part, size = staging.copy(state), {}, 0
    staging.wait_on_host()
    for name, whole in copy.items():
        if size < wanted:
            part[name] = whole
            size += whole.boxes[0].values.nbytes
    for turn in range(2):
        for writers in setting.writers:
            path = folder / "checkpoints" / f"step-{writers:08d}"
            writer = CheckpointWriter(path, {"step": writers, **DESCRIPTION}, threads=writers)
            began = time.perf_counter()
            write_checkpoint(part, writer, needed=size, is_async_save=True)
            seconds = time.perf_counter() - began
            shutil.rmtree(path)
            add(f"written by {writers} threads, turn {turn + 1}", size, seconds)


def _clock(device: torch.device, call: Callable[[], Any], *, waits: bool = True) -> float:
    """Seconds of a call; with `waits`, including the work that it launched on the device."""
    failures.synchronize(device)
    began = time.perf_counter()
    call()
    if waits:
        failures.synchronize(device)
    return time.perf_counter() - began


BENCH = Bench(
    "saves",
    """Cost of asynchronous checkpoints: step time, copies and writes; with --kills N, kill -9 during saves.

    --kills runs on processes of the CPU alone, and needs no GPU.
    """,
    SavesSetting,
    measure_parts,
    SaveRow,
    title="Saves",
    needs=Needs.ONE_GPU,
    about=lambda setting: {},
)
