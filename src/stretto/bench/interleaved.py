# SPDX-License-Identifier: Apache-2.0
"""Times several callables on GPUs in turn, so that drift of the machine affects all of them alike."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from stretto.bench.harness import time_steps
from stretto.quantities import require_least


@dataclass(frozen=True)
class TimingEffort:
    """Extent of a measurement: rounds over all callables, and replays of a graph (or rows of calls) in a round."""

    rounds: int = 3
    replays: int = 7

    def __post_init__(self) -> None:
        require_least(1, rounds=self.rounds, replays=self.replays)


@dataclass(frozen=True)
class Timed:
    """Median seconds of a call on the slowest rank: on the GPU, and for the host to issue it."""

    seconds: float
    host: float


def time_interleaved(
    runs: Mapping[str, Callable[[], Any]],
    size: int,
    *,
    is_graph: bool,
    effort: TimingEffort | None = None,
    never_captured: Collection[str] = (),
    rests: bool = True,
) -> dict[str, Timed]:
    """Time all runs in turn for several rounds, in CUDA graphs of ten calls (one call from 64 MB) or as eager calls.

    never_captured: names of runs that are always eager. rests: let the GPU idle before each run's turn. If False, runs
    follow each other at once, in another order each round, and the first replay of a turn is not counted. Kernels that
    take much power run faster after a rest (large products by up to a tenth), which training does not have. A CPU times
    one call of each.
    """
    if not torch.cuda.is_available():
        return {name: Timed(time_steps(run, warm_up=1, repeats=1), 0.0) for name, run in runs.items()}
    effort = effort or TimingEffort()
    calls = 10 if size < 64 << 20 else 1
    rows: dict[str, Callable[[], Any]] = {}
    for name, run in runs.items():
        for _ in range(3):
            run()
        rows[name] = _capture(run, calls) if is_graph and name not in never_captured else partial(_repeat, run, calls)
    device_times: dict[str, list[float]] = {name: [] for name in runs}
    host_times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(effort.rounds):
        names = list(rows) if turn % 2 == 0 else list(rows)[::-1]
        first = turn // 2 % len(names)
        timed = []
        for name in names[first:] + names[:first]:
            row = rows[name]
            row()
            if rests:
                torch.cuda.synchronize()
                dist.barrier()
            for _ in range(effort.replays):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                began = time.perf_counter()
                start.record()
                row()
                end.record()
                host_times[name].append((time.perf_counter() - began) / calls)
                timed.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in timed:
            device_times[name].append(start.elapsed_time(end) / 1e3 / calls)
    medians = torch.tensor(
        [[statistics.median(device_times[name]), statistics.median(host_times[name])] for name in runs], device="cuda"
    )
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return {name: Timed(*row) for name, row in zip(runs, medians.tolist(), strict=True)}


def _capture(run: Callable[[], Any], calls: int) -> Callable[[], Any]:
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeat(run, calls)
    return graph.replay


def _repeat(run: Callable[[], Any], calls: int) -> None:
    for _ in range(calls):
        run()


def name_size(size: int) -> str:
    """A number of bytes for people: "64 KB"."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"
