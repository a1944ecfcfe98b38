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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin, group
from lab.training.offload import flat_store
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Option, Repeats
from stretto.execution import StateOptions
from stretto.optim.state.store import OptimizerStateStore
from stretto.planner.optimizer_state import exposed_sums
from stretto.train.stored_optimizer import adamw_update

# Of an all-reduce of all gradients to all steps (Singh, figure 3.4: "2.5 times longer").
SUMS_TO_STEPS = 2.5


@dataclass(frozen=True)
class ChunksSetting:
    """Settings of `python -m lab chunks`. Raises ValueError for settings that cannot work."""

    ranks: Annotated[int, Option("Processes.", least=1)] = 2
    buckets: Annotated[int, Option("Buckets of a rank.", least=1)] = 64
    bucket: Annotated[int, Option("Numbers of a bucket.", least=64)] = 1 << 16
    latencies: Annotated[
        tuple[float, ...], Option("A message's fixed time, relative to that of a bucket's bytes, with commas.")
    ] = (0.4, 0.02)
    repeats: Repeats = 5

    def __post_init__(self) -> None:
        if self.bucket % 64:
            raise ValueError(f"bucket is {self.bucket}, but must be a multiple of 64")
        if not self.latencies or min(self.latencies) < 0:
            raise ValueError(f"latencies is {self.latencies}, but must be numbers of 0 and more")

    def coarsenings(self) -> list[int]:
        """The powers of two up to all buckets, and all."""
        powers = [1 << power for power in range(self.buckets.bit_length()) if 1 << power < self.buckets]
        return [*powers, self.buckets]


@dataclass(frozen=True)
class Row:
    """A bucket count of an all-reduce over one link: measured and predicted time."""

    latency: float = column("latency / a bucket's bytes", "{:g}")
    coarsening: int = column("k")
    chunks: int = column("all-reduces")
    seconds: float = column("measured (s)", "{:.3f}")
    predicted_seconds: float = column("predicted (s)", "{:.3f}")
    to_none: float = column("to k = all", "{:.3f}")


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


def run_chunks(setting: ChunksSetting) -> Measured:
    """Measure each k over each link, on processes of the CPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the links are between processes of the CPU
    found: Measured = run_ranks(setting.ranks, measure_chunks, setting)
    return found


def measure_chunks(setting: ChunksSetting) -> Measured:
    """The job of each rank: rows for each link and k, measured in turn, and the predicted choice."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    link = _SlowLink(dist.group.WORLD)  # type: ignore[arg-type]
    make, stores = adamw_update(betas=(0.9, 0.95), eps=1e-8), {}
    for k in setting.coarsenings():
        options = StateOptions("host", bucket_size=setting.bucket, coarsening=k)
        stores[k] = flat_store(setting.bucket * setting.buckets, torch.device("cpu"), make, options, link)
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
                Row(
                    latency=latency,
                    coarsening=k,
                    chunks=chunks,
                    seconds=seconds,
                    predicted_seconds=predicted[k],
                    to_none=seconds / measured[everything],
                )
            )
        best, chosen = min(measured, key=measured.__getitem__), min(predicted, key=predicted.__getitem__)
        choices.append(
            f"latency {latency:g}: measured best is k = {best}, predicted best k = {chosen}, "
            f"{measured[chosen] / measured[best] - 1:.1%} slower than it"
        )
    return Measured(rows, {"choices": choices}, tuple(choices))


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


def plot_chunks(data: dict[str, Any], picture: Path) -> None:
    """Draw a panel a latency: measured and predicted time of sums and step, against k (Singh, figure 3.6)."""
    from matplotlib.ticker import MaxNLocator

    from lab.style import PEER, drawing
    from stretto.report.style import GUIDE, STRETTO

    latencies = group(data["rows"], "latency")
    with drawing(picture, max(5.0, 4.2 * len(latencies)), 3) as drawn:
        panels = drawn.panels(1, len(latencies), sharey=True)[0]
        for panel, (latency, rows) in zip(panels, latencies.items(), strict=True):
            sizes = [row["coarsening"] for row in rows]
            panel.plot(sizes, [row["seconds"] for row in rows], label="measured", **STRETTO.line)
            predicted = [row["predicted_seconds"] for row in rows]
            panel.plot(sizes, predicted, label="predicted by the planner", **PEER.line)
            for row in rows:
                if row["chunks"] == 1:
                    panel.axhline(row["seconds"], linestyle="--", label="measured without overlap", **GUIDE)
            drawn.log_ticks(panel.xaxis, sizes)
            panel.set(xlabel="k: buckets an all-reduce", title=f"latency of a message: {latency:g} of a bucket's time")
        panels[0].yaxis.set_major_locator(MaxNLocator(5))  # the same ticks whatever the panel's height becomes
        panels[0].set_ylabel("seconds")
        drawn.title = "Gradients' sum and the optimizer's step together, by the size of all-reduces"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            f"{data['setting']['buckets']} buckets, {data['setting']['ranks']} ranks. Without overlap: one all-reduce "
            "of all buckets, then all steps. A bucket's time is that of its bytes on the link."
        )


BENCH = Bench(
    "chunks",
    "Overlap of gradients' all-reduces with optimizer steps, by the number of buckets per all-reduce (slow link).",
    ChunksSetting,
    run_chunks,
    Row,
    title=lambda setting: f"Gradients' sum and the optimizer's step on {setting.ranks} CPU ranks",
    plot=plot_chunks,
)
