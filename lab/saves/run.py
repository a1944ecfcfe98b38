# SPDX-License-Identifier: Apache-2.0
"""The overhead of a save in training steps, and the speed of copies of a state to the host and of writes to a disk.

steps: a GPT is trained with regular checkpoints, saved synchronously between two steps, and asynchronously. size: a
state of 7B's size, weights and two moments in fp32, on one GPU: pinning the memory, the host link, the copy, a step
with and without a concurrent copy; then a part of it is written, by several numbers of writer threads. hash: the hash
of 7B's weights that `train.verify_steps` compares before a save, relative to the GPU's memory bandwidth.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.saves.kills import bench_kills
from lab.saves.settings import LARGEST_NUMBERS, USABLE, USABLE_ON_HOST, SavesSetting
from stretto.bench.harness import Column, empty_memory, print_table, run_ranks, time_steps, write_result
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

STATES = ("model.{}", "optimizer.{}.exp_avg", "optimizer.{}.exp_avg_sq")
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4000
DESCRIPTION = {"optimizer": "adamw", "model": {}, "run": {}, "data": {}}

STEP_COLUMNS = (
    Column("saves", "checkpoints"),
    Column("gigabytes", "state (GB)", "{:.3f}"),
    Column("step_ms", "step, median (ms)", "{:.1f}"),
    Column("save_ms", "save call, median (ms)", "{:.1f}"),
    Column("added_ms", "a save adds to the run (ms)", "{:.1f}"),
    Column("added_steps", "in steps", "{:.2f}"),
)
SIZE_COLUMNS = (
    Column("what", ""),
    Column("gigabytes", "GB", "{:.1f}"),
    Column("seconds", "seconds", "{:.3f}"),
    Column("rate", "GB/s", "{:.1f}"),
)


def bench_saves(setting: SavesSetting, out: Path) -> Any:
    """Measure the parts, or kill runs, and write a result for each."""
    if setting.kills:
        return bench_kills(setting, out)
    found: dict[str, Any] = {}
    if "steps" in setting.parts:
        rows = run_ranks(setting.ranks if setting.cpu else 1, _measure_steps, setting)
        print_table("What a save adds to training", STEP_COLUMNS, rows)
        write_result(out, "saves-steps", STEP_COLUMNS, rows)
        found["steps"] = rows
    if "size" in setting.parts:
        rows = run_ranks(1, _measure_size, setting)
        print_table("Copying and writing a state", SIZE_COLUMNS, rows)
        write_result(out, "saves-size", SIZE_COLUMNS, rows)
        found["size"] = rows
    if "hash" in setting.parts:
        rows = run_ranks(1, _measure_hash, setting)
        print_table("Hashing the weights that replicas compare", SIZE_COLUMNS, rows)
        write_result(out, "saves-hash", SIZE_COLUMNS, rows)
        found["hash"] = rows
    return found


# --- hash


def _measure_hash(setting: SavesSetting) -> list[dict[str, Any]]:
    """One pass over weights in fp32 and in bf16, and a sum of the same bytes by torch, which also reads them once."""
    device = torch.device("cpu" if setting.cpu else "cuda")
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
            rows.append({"what": name, "gigabytes": total / 1e9, "seconds": seconds, "rate": total / seconds / 1e9})
    return rows


# --- steps


def _config(folder: Path, setting: SavesSetting, ranks: int) -> TrainConfig:
    (folder / "text.txt").write_text(TEXT)
    config = make_config(
        {
            "out": str(folder / "run"),
            "device": "cpu" if setting.cpu else "cuda",
            "grid": {"data": ranks},
            "data": {"path": str(folder / "text.txt")},
            "model": {"layers": setting.layers, "hidden": setting.hidden, "heads": setting.hidden // 64},
            "train": {"steps": 1 << 30, "batch": ranks * max(1, setting.batch // ranks), "seq_len": 256},
        },
        [],
    )
    assert isinstance(config, TrainConfig)
    return config


def _measure_steps(setting: SavesSetting) -> list[dict[str, Any]]:
    device = torch.device("cpu" if setting.cpu else "cuda")
    ranks = int(os.environ["WORLD_SIZE"])
    grid = Grid(data=ranks, device=device)
    folder = [tempfile.mkdtemp(prefix="stretto-bench-saves-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    try:
        task = GPTTask(_config(Path(folder[0]), setting, ranks), grid)
        task.start()
        return list(_time_saves(setting, task, Path(folder[0]) / "run"))
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder[0], ignore_errors=True)


def _time_saves(setting: SavesSetting, task: GPTTask, out: Path) -> Iterator[dict[str, Any]]:
    """Runs without saves, with synchronous and with asynchronous saves; the best of two rounds counts."""
    step = 0
    best: dict[str, dict[str, Any]] = {}
    for kind in ("none", "between steps", "beside training") * 2:
        with Saver(out, task.grid.device, Retention(1), is_async=kind == "beside training") as saver:
            task.before_update = saver.wait_on_device
            for _ in range(3):
                step = _run_step(task, step)
            saver.prepare(task.state())
            _synchronize(task.grid.device)
            dist.barrier()
            began, steps, saves = time.perf_counter(), [], []
            for number in range(1, setting.steps + 1):
                start = time.perf_counter()
                step = _run_step(task, step)
                _synchronize(task.grid.device)
                steps.append(time.perf_counter() - start)
                if kind != "none" and number % setting.every == 0:
                    start = time.perf_counter()
                    saver.save(step, task.state(), task.description())
                    saves.append(time.perf_counter() - start)
            total = time.perf_counter() - began
        row = {
            "saves": kind,
            "gigabytes": sum(sizes_of(task.state()).values()) / 1e9,
            "total": total,
            "step_ms": 1e3 * statistics.median(steps),
            "save_ms": 1e3 * statistics.median(saves) if saves else None,
        }
        if kind not in best or best[kind]["total"] > total:
            best[kind] = row
    plain = best["none"]
    for row in best.values():
        if row is not plain:
            count = setting.steps // setting.every
            row["added_ms"] = 1e3 * (row["total"] - plain["total"]) / count
            row["added_steps"] = row["added_ms"] / plain["step_ms"]
        yield row


def _run_step(task: GPTTask, step: int) -> int:
    task.step(step + 1, 1e-4)
    return step + 1


# --- size


def _measure_size(setting: SavesSetting) -> list[dict[str, Any]]:
    device = torch.device("cpu" if setting.cpu else "cuda")
    Grid(device=device)
    rows: list[dict[str, Any]] = []

    def add(what: str, num_bytes: float, seconds: float) -> None:
        rows.append({"what": what, "gigabytes": num_bytes / 1e9, "seconds": seconds, "rate": num_bytes / seconds / 1e9})
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
    _write(setting, staging, state, add)
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
    staging: Staging,
    state: dict[str, ShardedState],
    add: Callable[[str, float, float], None],
) -> None:
    """Write a part of the state's copy with several numbers of writer threads, in turns; each file is synced."""
    wanted = min(setting.write_gigabytes * 1e9, 0.4 * free_bytes(Path(tempfile.gettempdir())))
    copy, part, size = staging.copy(state), {}, 0
    staging.wait_on_host()
    for name, whole in copy.items():
        if size < wanted:
            part[name] = whole
            size += whole.boxes[0].values.nbytes
    folder = Path(tempfile.mkdtemp(prefix="stretto-bench-saves-"))
    try:
        for turn in range(2):
            for writers in setting.writers:
                path = folder / "checkpoints" / f"step-{writers:08d}"
                writer = CheckpointWriter(path, {"step": writers, **DESCRIPTION}, threads=writers)
                began = time.perf_counter()
                write_checkpoint(part, writer, needed=size, is_async_save=True)
                seconds = time.perf_counter() - began
                shutil.rmtree(path)
                add(f"written by {writers} threads, turn {turn + 1}", size, seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clock(device: torch.device, call: Callable[[], Any], *, waits: bool = True) -> float:
    """Seconds of a call; with `waits`, including the work that it launched on the device."""
    _synchronize(device)
    began = time.perf_counter()
    call()
    if waits:
        _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    failures.synchronize(device)
