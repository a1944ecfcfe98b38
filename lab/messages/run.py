# SPDX-License-Identifier: Apache-2.0
"""`python -m lab messages`: a message's time by transport, and an all-reduce's by back end (Singh, figure 3.2).

Messages go back and forth between ranks 0 and 1, as in OSU's `osu_latency`: a message's time is half of a round trip,
from `send` until the other rank can use the tensor. The transports are compared with torch's own blocking `send` and
`recv`, into a preallocated tensor, with no header to read and no other message pending. All-reduces are of all ranks.
All runs of a size are measured in turn, for several rounds.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.messages.settings import LIBRARY, MessagesSetting
from lab.pictures import draw_result
from lab.shared_gpus import shared_where_few
from stretto.bench.harness import FAILURES, Column, in_one_line, print_table, run_ranks, write_result
from stretto.memory import shared_gpus
from stretto.parallel.pipeline.messages import MessageKey, MessageTransport
from stretto.parallel.pipeline.transports import TRANSPORTS, choose_transport

MIB = 1 << 20
COLUMNS = (
    Column("part", "what"),
    Column("by", "by"),
    Column("megabytes", "size (MiB)", "{:g}"),
    Column("milliseconds", "time (ms)", "{:.3f}"),
    Column("gb_per_second", "size / time (GB/s)", "{:.2f}"),
    Column("to_library", "to torch's", "{:.2f}"),
)


def bench_messages(ranks: int, setting: MessagesSetting, out: Path) -> dict[str, Any]:
    """Measure, print the table, and write messages.json, .md and .png to `out`."""
    with shared_where_few(ranks):
        result = run_ranks(ranks, measure_messages, setting, trains=False)
    print_table(f"Messages between 2 ranks, and all-reduces of {ranks}", COLUMNS, result["rows"])
    for line in (*result["notes"], f"default transport of 2 ranks here: {result['chosen']}"):
        print(line)
    about = {"setting": asdict(setting), "ranks": ranks, "chosen": result["chosen"], "notes": result["notes"]}
    draw_result(write_result(out, "messages", COLUMNS, result["rows"], **about))
    return result


def measure_messages(setting: MessagesSetting) -> dict[str, Any]:
    """The job of each rank."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(shared_gpus.default_backend(device.type))
    notes: list[str] = []
    pair = dist.new_group([0, 1])
    rows: list[dict[str, Any]] = []
    chosen = ""
    with ExitStack() as stack:
        if dist.get_rank() < 2:
            chosen = choose_transport(pair, device)
            messages = {LIBRARY: _library_trips(pair)} | _transport_trips(pair, device, stack, notes)
            rows += _measure("message", messages, setting, device, pair)
        dist.barrier()
        reductions = _all_reduces(device)
        rows += _measure("all-reduce", reductions, setting, device, dist.group.WORLD)
    _compare(rows)
    return {"rows": rows, "notes": notes, "chosen": chosen}


Run = Callable[[Tensor, int], list[float]]
"""Runs something the given number of times with a tensor, and returns the seconds of each."""


def _measure(
    part: str, runs: Mapping[str, Run], setting: MessagesSetting, device: torch.device, group: Any
) -> list[dict[str, Any]]:
    """Rows of each size and run, which take turns; the time is the median on the group's first rank."""
    rows = []
    for size in setting.sizes:
        count = max(int(size * MIB) // 4, 1)
        tensor = torch.ones(count, device=device)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(setting.rounds):
            for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
                dist.barrier(group)
                runs[name](tensor, 2)  # to warm up
                times[name] += runs[name](tensor, setting.repeats)
        for name, found in times.items():
            seconds = statistics.median(found)
            rows.append(
                {
                    "part": part,
                    "by": name,
                    "megabytes": size,
                    "milliseconds": 1e3 * seconds,
                    "gb_per_second": 4e-9 * count / seconds,
                }
            )
    return rows


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add each time divided by torch's, the first row of the same part and size."""
    first: dict[tuple[str, float], float] = {}
    for row in rows:
        library = first.setdefault((row["part"], row["megabytes"]), row["milliseconds"])
        row["to_library"] = row["milliseconds"] / library


# Messages.


def _transport_trips(pair: Any, device: torch.device, stack: ExitStack, notes: list[str]) -> dict[str, Run]:
    """The transports that work between the two ranks, with their trips; `notes` gets why others do not."""
    found: dict[str, Run] = {}
    for name, kind in TRANSPORTS.items():
        try:
            transport = stack.enter_context(kind(pair, device))
        except FAILURES as error:
            notes.append(f"{name}: not measured, {in_one_line(error)}")
            continue
        found[name] = _trips(transport)
    return found


def _trips(transport: MessageTransport) -> Run:
    def run(tensor: Tensor, count: int) -> list[float]:
        other = 1 - transport.rank
        seconds = []
        transport.begin_step({other: count})
        for number in range(count):
            began = time.perf_counter()
            there, back = MessageKey("F", 1, number), MessageKey("B", 0, number)
            if transport.rank == 0:
                transport.send(1, there, [tensor])
                transport.take(back, 1)
            else:
                (received,) = transport.take(there, 0)
                transport.send(0, back, [received])
            _synchronize(tensor)
            seconds.append((time.perf_counter() - began) / 2)
        transport.end_step()
        return seconds

    return run


def _library_trips(pair: Any) -> Run:
    def run(tensor: Tensor, count: int) -> list[float]:
        received = torch.empty_like(tensor)
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            if dist.get_rank(pair) == 0:
                dist.send(tensor, group=pair, group_dst=1)
                dist.recv(received, group=pair, group_src=1)
            else:
                dist.recv(received, group=pair, group_src=0)
                dist.send(received, group=pair, group_dst=0)
            _synchronize(tensor)
            seconds.append((time.perf_counter() - began) / 2)
        return seconds

    return run


# All-reduces.


def _all_reduces(device: torch.device) -> dict[str, Run]:
    """The back ends of all-reduces, torch's first."""
    ranks = dist.get_world_size()
    if device.type == "cpu":
        from stretto.collectives import install
        from stretto.collectives.algorithms import find

        ours = dist.new_group(backend="stretto")
        install(find("ring-all-reduce").compile(ranks=ranks), ours)
        return {"gloo": _reduce(dist.group.WORLD), "Stretto's host executor, ring": _reduce(ours)}
    ours, gloo = dist.new_group(backend="stretto"), dist.new_group(backend="gloo")
    return {
        "gloo, GPUs shared" if shared_gpus.is_enabled() else "nccl": _reduce(dist.group.WORLD),
        "Stretto's kernels": _reduce(ours),
        "gloo by way of the host": _reduce_on_host(gloo),
    }


def _reduce(group: Any) -> Run:
    def run(tensor: Tensor, count: int) -> list[float]:
        return list(_timed(tensor, count, lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)))

    return run


def _reduce_on_host(group: Any) -> Run:
    def run(tensor: Tensor, count: int) -> list[float]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)

        def reduce() -> None:
            host.copy_(tensor)
            dist.all_reduce(host, op=dist.ReduceOp.MAX, group=group)
            tensor.copy_(host)

        return list(_timed(tensor, count, reduce))

    return run


def _timed(tensor: Tensor, count: int, call: Callable[[], object]) -> Iterator[float]:
    for _ in range(count):
        began = time.perf_counter()
        call()
        _synchronize(tensor)
        yield time.perf_counter() - began


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
