# SPDX-License-Identifier: Apache-2.0
"""`python -m lab chunks`: the sum of gradients and the optimizer's step together, for each size of an all-reduce.

Singh, figure 3.6: with k buckets an all-reduce, steps of a chunk's buckets run while later chunks travel. Ranks are
processes of one machine, over a link that is made by waiting: a thread of its own waits for each message's latency and
bytes, and then sums it. Relative to a step of all buckets, the link has the dissertation's proportions: an all-reduce
of all gradients takes 2.5 times as long (figure 3.4), and `latency` is a message's fixed cost over the time of one
bucket's bytes.
"""

import os
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.training.settings import ChunksSetting
from stretto.bench.harness import Column, print_table, run_ranks, write_result
from stretto.bench.pictures import draw_result
from stretto.execution import StateOptions
from stretto.optim.state.store import OptimizerStateStore, StoredParameter
from stretto.planner.optimizer_state import exposed_sums
from stretto.train.stored_optimizer import adamw_update, build_store

# Of an all-reduce of all gradients to all steps (Singh, figure 3.4: "2.5 times longer").
SUMS_TO_STEPS = 2.5

COLUMNS = (
    Column("latency", "latency / a bucket's bytes", "{:g}"),
    Column("coarsening", "k"),
    Column("chunks", "all-reduces"),
    Column("seconds", "measured (s)", "{:.3f}"),
    Column("predicted_seconds", "predicted (s)", "{:.3f}"),
    Column("to_none", "to k = all", "{:.3f}"),
)


class _LinkWork:
    """A sum that the link's thread makes."""

    def __init__(self, future: "Future[Tensor]") -> None:
        self._future = future

    def wait(self) -> Tensor:
        return self._future.result()


class _SlowLink:
    """A communicator whose messages take `latency + bytes / rate` seconds, one after another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.latency, self.rate = 0.0, float("inf")
        self._group = group
        self._thread = ThreadPoolExecutor(1, "link")

    def start_sum(self, key: Any, gradients: Tensor) -> _LinkWork:
        return _LinkWork(self._thread.submit(self._sum, gradients))

    def sum_squares(self, squares: Tensor) -> Tensor:
        return self._thread.submit(self._sum_now, squares).result()

    def _sum(self, gradients: Tensor) -> Tensor:
        began = time.perf_counter()
        self._sum_now(gradients)
        spent = time.perf_counter() - began
        time.sleep(max(0.0, self.latency + gradients.numel() * gradients.element_size() / self.rate - spent))
        return gradients

    def _sum_now(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self._group)
        return tensor


def bench_chunks(setting: ChunksSetting, out: Path) -> list[dict[str, Any]]:
    """Measure each k over each link, print the table, and write chunks.json, .md and .png to `out`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the links are between processes of the CPU
    result = run_ranks(setting.ranks, measure_chunks, setting)
    print_table(f"Gradients' sum and the optimizer's step on {setting.ranks} CPU ranks", COLUMNS, result["rows"])
    for line in result["choices"]:
        print(line)
    about = {"setting": asdict(setting), "choices": result["choices"]}
    draw_result(write_result(out, "chunks", COLUMNS, result["rows"], **about))
    return result["rows"]


def measure_chunks(setting: ChunksSetting) -> dict[str, Any]:
    """The job of each rank: rows for each link and k, measured in turn, and the predicted choice."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    link = _SlowLink(dist.group.WORLD)  # type: ignore[arg-type]
    stores = {k: _build(setting, k, link) for k in setting.coarsenings()}
    everything = max(stores)
    _time(stores[everything], link, alone=True)  # to warm up
    steps = _agree(statistics.median(_time(stores[everything], link, alone=True) for _ in range(setting.repeats)))
    num_bytes = 2 * setting.bucket * setting.buckets
    rate = num_bytes / (SUMS_TO_STEPS * steps)
    rows, choices = [], []
    for latency in setting.latencies:
        link.latency, link.rate = latency * 2 * setting.bucket / rate, rate
        times: dict[int, list[float]] = {k: [] for k in stores}
        for _ in range(setting.repeats):
            for k, store in stores.items():
                times[k].append(_time(store, link))
        measured = {k: _agree(statistics.median(found)) for k, found in times.items()}
        predicted = {}
        for k, seconds in measured.items():
            chunks = len(stores[k].layout.chunks)
            whole = chunks * link.latency + num_bytes / rate
            predicted[k] = steps + exposed_sums(whole, whole, chunks, steps)
            rows.append(
                {
                    "latency": latency,
                    "coarsening": k,
                    "chunks": chunks,
                    "seconds": seconds,
                    "predicted_seconds": predicted[k],
                    "to_none": seconds / measured[everything],
                }
            )
        best, chosen = min(measured, key=measured.__getitem__), min(predicted, key=predicted.__getitem__)
        choices.append(
            f"latency {latency:g}: measured best is k = {best}, predicted best k = {chosen}, "
            f"{measured[chosen] / measured[best] - 1:.1%} slower than it"
        )
    return {"rows": rows, "choices": choices}


def _build(setting: ChunksSetting, k: int, link: _SlowLink) -> OptimizerStateStore:
    numbers = setting.bucket * setting.buckets
    parameter = StoredParameter("flat", torch.Size((numbers,)), (), 1, 0.0)
    options = StateOptions("host", bucket_size=setting.bucket, coarsening=k)
    make = adamw_update(betas=(0.9, 0.95), eps=1e-8)
    store = build_store([parameter], make, torch.bfloat16, options, torch.device("cpu"), link)
    store.prepare()
    store.gradients.fill_(1e-3)
    return store


def _time(store: OptimizerStateStore, link: _SlowLink, *, alone: bool = False) -> float:
    """Seconds from the end of the backward pass to the end of the step. alone: over an infinitely fast link."""
    kept = link.latency, link.rate
    if alone:
        link.latency, link.rate = 0.0, float("inf")
    store.add(0, store.gradients)  # itself
    dist.barrier()
    began = time.perf_counter()
    store.finish()
    if alone:  # the sums themselves are not the step's
        for reduction in store._step.started.values():
            reduction.wait()
        began = time.perf_counter()
    store.step(1e-5)
    seconds = time.perf_counter() - began
    link.latency, link.rate = kept
    return seconds


def _agree(seconds: float) -> float:
    """The slowest rank's."""
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
