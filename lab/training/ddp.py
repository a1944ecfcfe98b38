# SPDX-License-Identifier: Apache-2.0
"""`python -m lab ddp`: torch's DistributedDataParallel over Stretto's backend, of two checkouts, on one GPU.

Each rank traces one step. The picture has rank 0's kernels, of the backward pass and of the buckets' all-reduces, of
both checkouts. The checkouts alternate in fresh processes, and each step's time is the median over their steps.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lab.checkouts.settings import find_source
from lab.pictures import draw_result
from lab.training.settings import DdpSetting
from stretto.bench.harness import Column, print_table, write_result
from stretto.cluster.detection import count_gpus
from stretto.memory.mps import mps_daemon, share_for
from stretto.train.observe.timeline import Interval, Intervals, merge, subtract, total

_RANK = Path(__file__).with_name("ddp_rank.py")
_SIZES = {True: {"width": 64, "layers": 4, "rows": 32}, False: {"width": 2048, "layers": 6, "rows": 2048}}
_BUCKET_MB = {True: 0.01, False: 8.0}  # two layers or fewer
COLUMNS = (
    Column("checkout", "checkout"),
    Column("rank", "rank"),
    Column("milliseconds", "a step (ms)", "{:.2f}"),
    Column("communication_milliseconds", "all-reduces (ms)", "{:.2f}"),
    Column("exposed_milliseconds", "of them with nothing beside them (ms)", "{:.2f}"),
)


def bench_ddp(setting: DdpSetting, out: Path) -> list[dict[str, Any]]:
    """Measure both checkouts and write ddp.json, .md and .png. Returns a row for each checkout and rank.

    Raises ValueError where there is no GPU or no MPS, and RuntimeError with a rank's last words if one fails.
    """
    if not setting.on_cpu and not count_gpus():
        raise ValueError("this bench takes a GPU, which all ranks share: torch sees none here; --cpu tries the command")
    sources = {"before": find_source("before", setting.before), "after": find_source("after", setting.after)}
    measured: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in sources}
    for turn in range(setting.turns):
        for name in list(sources)[:: -1 if turn % 2 else 1]:
            measured[name].append(_measure(sources[name], setting))
    rows = [
        _summarize(name, rank, [turn[rank] for turn in measured[name]])
        for name in sources
        for rank in range(setting.ranks)
    ]
    print_table("DistributedDataParallel over Stretto's backend", COLUMNS, rows)
    about = {
        "ranks": setting.ranks,
        "model": _SIZES[setting.on_cpu],
        "bucket_mb": _BUCKET_MB[setting.on_cpu],
        "kernels": {name: turns[-1][0]["kernels"] for name, turns in measured.items()},
    }
    path = write_result(out, "ddp", COLUMNS, rows, **about)
    if not setting.on_cpu:
        draw_result(path)
    return rows


def _measure(source: Path, setting: DdpSetting) -> list[dict[str, Any]]:
    """Run the ranks of one checkout. Returns each rank's result."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-bench-")))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "OMP_NUM_THREADS": "1",
            "STRETTO_SHARE_GPUS": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        }
        if not setting.on_cpu:
            environment |= stack.enter_context(mps_daemon(share_for(setting.ranks)))
        written = [folder / f"rank-{rank}.json" for rank in range(setting.ranks)]
        processes = []
        for rank, file in enumerate(written):
            processes.append(_start(rank, setting, folder / "store", file, environment))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)  # does nothing to a process that has exited
        _wait(processes, [file.with_suffix(".err") for file in written], setting.seconds)
        found = [json.loads(file.read_text()) for file in written]
    for each in found:
        if not Path(each["stretto"]).resolve().is_relative_to(source):
            raise RuntimeError(f"a rank imported Stretto from {each['stretto']}, not from {source}")
    return found


def _start(
    rank: int, setting: DdpSetting, store: Path, out: Path, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    given = {
        "rank": rank,
        "world": setting.ranks,
        "store": str(store),
        "out": str(out),
        "device": "cpu" if setting.on_cpu else "cuda",
        "bucket_mb": _BUCKET_MB[setting.on_cpu],
        "steps": setting.steps,
        **_SIZES[setting.on_cpu],
    }
    # -P keeps the script's folder off sys.path, before the checkout.
    command = [sys.executable, "-P", str(_RANK), json.dumps(given)]
    with out.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(command, env=environment, stdout=errors, stderr=errors, start_new_session=True)


def _wait(processes: "list[subprocess.Popen[bytes]]", errors: list[Path], seconds: float) -> None:
    """Wait for all ranks. Raises RuntimeError once one fails, with its last words, or when the time is over."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if not failed and time.monotonic() < end:
            time.sleep(0.05)
            continue
        if not failed:
            raise RuntimeError(f"the ranks did not end within {seconds:.0f} s")
        break
    for rank, process in enumerate(processes):
        if process.poll():
            lines = errors[rank].read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"rank {rank} ended with status {process.returncode}: {lines[-1] if lines else ''}")


def _summarize(checkout: str, rank: int, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """A row: medians over all steps of all turns, and means over the turns' traced steps."""
    collectives, exposed = [], []
    for turn in turns:
        work, communication = split_kernels(turn["kernels"])
        collectives.append(total(communication) / 1e3)
        exposed.append(total(subtract(communication, work)) / 1e3)
    return {
        "checkout": checkout,
        "rank": rank,
        "milliseconds": 1e3 * statistics.median(second for turn in turns for second in turn["seconds"]),
        "communication_milliseconds": statistics.mean(collectives),
        "exposed_milliseconds": statistics.mean(exposed),
    }


def split_kernels(kernels: list[list[Any]]) -> tuple[Intervals, Intervals]:
    """The times of the model's kernels and of the collectives', merged, in microseconds."""
    times: dict[bool, list[Interval]] = {False: [], True: []}
    for is_collective, start, end in kernels:
        times[bool(is_collective)].append((start, end))
    return merge(times[False]), merge(times[True])
