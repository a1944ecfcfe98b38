# SPDX-License-Identifier: Apache-2.0
"""`python -m lab kernel-puts`: what a kernel's puts cost between two ranks, that are declared to be two nodes, or one.

Two nodes put over sockets on loopback, one by the transport `host`. Ranks share a GPU where there is one.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from lab.harness import Bench, column
from stretto import tiles
from stretto.bench.settings import Needs, Option
from stretto.tiles.launches import launch_kernel

_PROGRAMS = tl.constexpr(8)
_BLOCK = tl.constexpr(256 if tiles.INTERPRETED else 4096)


@dataclass(frozen=True)
class KernelPutsSetting:
    """Numbers of descriptors and bytes that are put."""

    descriptors: Annotated[int, Option("Puts of no bytes, one after another.", least=1)] = 200_000
    round_trips: Annotated[int, Option("Puts of 8 bytes that a kernel of the other rank answers.", least=1)] = 2000
    megabytes: Annotated[int, Option("MB of slots that a kernel fills, or reads.", least=1)] = 64
    repeats: Annotated[int, Option("Runs of each; their median counts.", least=1)] = 5


@dataclass(frozen=True)
class Row:
    """A figure of one transport, and what is asked."""

    transport: str = column("transport")
    what: str = column("what")
    value: float = column("measured", "{:,.3g}")
    asked: str = column("asked")


@triton.jit
def post_many(puts, peer, count):  # type: ignore[no-untyped-def]
    """Post puts of no bytes to `peer`, a program's with its own signal. Waits: for room in the FIFO alone."""
    for _ in range(tl.program_id(0), count, tl.num_programs(0)):
        tiles.put_slice(puts, tl.program_id(0), 0, peer, tl.program_id(0))


@triton.jit
def bounce(puts, peer, count, IS_FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Put 8 bytes to `peer`, which answers, again and again. Waits: for the other's put; its answer frees the slot."""
    for _ in range(count):
        if IS_FIRST:
            tiles.put_slice(puts, 0, 8, peer, 0)
            tiles.wait_slice(puts, peer, 0)
        else:
            tiles.wait_slice(puts, peer, 0)
            tiles.put_slice(puts, 0, 8, peer, 0)
        tl.debug_barrier()
        tl.atomic_add(puts.taken + peer * puts.slices, 1, sem="relaxed", scope="gpu")


@triton.jit
def fill_slots(puts, data, peer, count):  # type: ignore[no-untyped-def]
    """Store int32 data [count] into the slots from which it would be put to `peer`. Synchronization: none."""
    slots = tiles.outgoing_slice(puts, 0, peer).to(tl.pointer_type(tl.int32))
    for start in range(tl.program_id(0) * _BLOCK, count, tl.num_programs(0) * _BLOCK):
        at = start + tl.arange(0, _BLOCK)
        tl.store(slots + at, tl.load(data + at, mask=at < count), mask=at < count)


@triton.jit
def read_slots(puts, data, peer, count):  # type: ignore[no-untyped-def]
    """Load int32 [count] from the slots into which `peer` would put it, to data. Synchronization: none."""
    slots = tiles.arrived_slice(puts, 0, peer).to(tl.pointer_type(tl.int32))
    for start in range(tl.program_id(0) * _BLOCK, count, tl.num_programs(0) * _BLOCK):
        at = start + tl.arange(0, _BLOCK)
        tl.store(data + at, tl.load(slots + at, mask=at < count), mask=at < count)


def measure_puts(setting: KernelPutsSetting) -> list[Row]:
    from stretto.bench.harness import run_ranks, shared_where_few

    with shared_where_few(2):
        found: list[dict[str, Any]] = run_ranks(2, _measure, setting, trains=False)
    return [Row(**row) for row in found]


def _measure(setting: KernelPutsSetting) -> list[dict[str, Any]]:
    """One rank's part of all rows."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    transports = ("2x1", "sockets"), ("", "host")
    return [row for nodes, name in transports for row in _measure_transport(setting, nodes, name)]


def _measure_transport(setting: KernelPutsSetting, nodes: str, name: str) -> Iterator[dict[str, Any]]:
    os.environ["STRETTO_NODES"] = nodes
    group, rank = dist.new_group(), dist.get_rank()
    peer, programs = 1 - rank, _PROGRAMS.value
    backend, device = ("cuda", "cuda") if torch.cuda.is_available() else ("host", "cpu")
    make = partial(tiles.PutChannel.allocate, group, timeout=60.0, backend=backend)
    posted, bounced = (make(slots=programs, slot_bytes=16) for _ in range(2))
    filled = make(slots=setting.megabytes, slot_bytes=1 << 20)
    data = torch.ones(setting.megabytes << 18, dtype=torch.int32, device=device)
    copied = torch.empty(data.numel(), dtype=torch.int32, pin_memory=backend == "cuda")
    words = data.numel()

    def launch(kernel: Any, channel: tiles.PutChannel, count: int, *arguments: Any) -> None:
        operands = channel.begin(name), *arguments
        launch_kernel(kernel, count, *operands, on_load=channel.limit.allow_loading)

    def post() -> None:
        if rank == 0:
            launch(post_many, posted, programs, peer, setting.descriptors)

    def copy(*, is_back: bool = False) -> None:
        into, source = (data, copied) if is_back else (copied, data)
        into.copy_(source, non_blocking=True)

    runs: dict[str, Callable[[], None]] = {
        "post": post,
        "bounce": lambda: launch(bounce, bounced, 1, peer, setting.round_trips, rank == 0),
        "fill": lambda: launch(fill_slots, filled, 4 * programs, data, peer, words),
        "fill by 16": lambda: launch(fill_slots, filled, 2 * programs, data, peer, words),
        "read by 16": lambda: launch(read_slots, filled, 2 * programs, data, peer, words),
        "copy": copy,
        "copy back": lambda: copy(is_back=True),
    }
    seconds = {
        key: _time(run, setting.repeats, is_alone=key[:4] in ("fill", "copy", "read")) for key, run in runs.items()
    }
    for channel in (posted, bounced, filled):
        channel.check()
        dist.barrier()
        channel.close()
    trip = seconds["bounce"] / setting.round_trips / 2 * 1e6
    for what, value, asked in (
        ("descriptors, a second", setting.descriptors / seconds["post"], "1,000,000"),
        ("post to signal at the other rank, us", trip, "10"),
        ("slots filled, of the copy engine's rate", seconds["copy"] / seconds["fill"], "0.85"),
        ("slots filled by 16 programs, as look-ups do, the same", seconds["copy"] / seconds["fill by 16"], "-"),
        ("slots read by 16 programs, the same", seconds["copy back"] / seconds["read by 16"], "-"),
    ):
        yield {"transport": name, "what": what, "value": value, "asked": asked}


def _time(run: Callable[[], None], repeats: int, *, is_alone: bool) -> float:
    """Median seconds of a run on both ranks together; is_alone: on rank 0, while the other one waits."""
    times = []
    for repeat in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        if not is_alone or dist.get_rank() == 0:
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        if repeat:
            times.append(time.perf_counter() - started)
        dist.barrier()
    return statistics.median(times)


BENCH = Bench(
    "kernel-puts",
    "What a kernel's puts cost: descriptors a second, post to signal, and slots filled beside a copy.",
    KernelPutsSetting,
    measure_puts,
    Row,
    title="Puts of kernels between two ranks",
    needs=Needs.ONE_GPU,
)
