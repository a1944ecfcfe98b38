# SPDX-License-Identifier: Apache-2.0
"""`python -m lab messages`: a message's time by transport (Singh, figure 3.2, left).

Messages go back and forth between two ranks, as in OSU's `osu_latency`: a message's time is half of a round trip, from
`send` until the other rank can use the tensor. The transports are compared with torch's own blocking `send` and `recv`,
into a preallocated tensor, with no header to read and no other message pending. All runs of a size are measured in
turn, for several rounds. `python -m lab backend` measures all-reduces, which runs before 2026-11-29 have here.
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from lab.harness import Bench, Measured, column
from lab.pictures import describe_origin, group, points
from lab.shared_gpus import shared_where_few
from stretto.bench.harness import FAILURES, in_one_line, run_ranks
from stretto.bench.settings import Option, Repeats
from stretto.memory import shared_gpus
from stretto.parallel.pipeline.messages import MessageKey, MessageTransport
from stretto.parallel.pipeline.transports import TRANSPORTS, choose_transport

MIB = 1 << 20
LARGEST_MIB = 4096
LIBRARY = "torch's send and recv"
"""The baseline for messages."""


@dataclass(frozen=True)
class MessagesSetting:
    """Settings of `python -m lab messages`. Raises ValueError for settings that cannot work."""

    sizes: Annotated[tuple[float, ...], Option("Sizes in MiB, with commas.")] = (1, 2, 5, 10, 20, 50)
    repeats: Repeats = 10
    rounds: Annotated[int, Option("Rounds over all transports; the median of all rounds' runs counts.", least=1)] = 5

    def __post_init__(self) -> None:
        for size in self.sizes:
            if not 0 < size <= LARGEST_MIB:
                raise ValueError(f"a size of {size:g} MiB: must be more than 0 and at most {LARGEST_MIB}")


@dataclass(frozen=True)
class Row:
    """The time of one size, by a transport, and divided by that of torch's."""

    part: str = column("what")
    by: str = column("by")
    megabytes: float = column("size (MiB)", "{:g}")
    milliseconds: float = column("time (ms)", "{:.3f}")
    gb_per_second: float = column("size / time (GB/s)", "{:.2f}")
    to_library: float = column("to torch's", "{:.2f}")


def compare_transports(setting: MessagesSetting) -> Measured:
    """Measure on two ranks, which share the GPU of a machine that has one."""
    with shared_where_few(2):
        found: Measured = run_ranks(2, measure_messages, setting, trains=False)
    return found


Run = Callable[[Tensor, int], list[float]]
"""Sends a tensor back and forth the given number of times, and returns the seconds of each."""


def measure_messages(setting: MessagesSetting) -> Measured:
    """The job of each rank: rows of each size and run, which take turns; the time is the median on rank 0."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(shared_gpus.default_backend(device.type))
    notes: list[str] = []
    rows: list[Row] = []
    pair = dist.new_group([0, 1])
    with ExitStack() as stack:
        chosen = choose_transport(pair, device)
        runs = {LIBRARY: _library_trips(pair)} | _transport_trips(pair, device, stack, notes)
        for size in setting.sizes:
            count = max(int(size * MIB) // 4, 1)
            tensor = torch.ones(count, device=device)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for turn in range(setting.rounds):
                for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
                    dist.barrier(pair)
                    runs[name](tensor, 2)  # to warm up
                    times[name] += runs[name](tensor, setting.repeats)
            seconds = {name: statistics.median(found) for name, found in times.items()}
            for name, median in seconds.items():
                each = 1e3 * median, 4e-9 * count / median, median / seconds[LIBRARY]
                rows.append(Row("message", name, size, *each))
    about = {"ranks": 2, "chosen": chosen, "notes": notes}
    return Measured(rows, about, (*notes, f"default transport of 2 ranks here: {chosen}"))


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


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def plot_messages(data: dict[str, Any], picture: Path) -> None:
    """Draw times over size, a line a transport; and a panel for the all-reduces that older runs have."""
    from lab.style import PEER, drawing, plain_log
    from stretto.report.style import SERIES

    titles = {"message": "a message, half of a round trip", "all-reduce": f"an all-reduce of all {data['ranks']} ranks"}
    parts = group(data["rows"], "part")
    names = list(dict.fromkeys(row["by"] for row in data["rows"]))
    looks = dict(zip([name for name in names if name != LIBRARY], cycle(SERIES), strict=False)) | {LIBRARY: PEER}
    with drawing(picture, max(5.0, 4.4 * len(parts)), 3.2) as drawn:
        for panel, (part, rows) in zip(drawn.panels(1, len(parts))[0], parts.items(), strict=True):
            for name, mine in group(rows, "by").items():
                panel.plot(*points(mine, "megabytes", "milliseconds"), label=name, **looks[name].line)
            drawn.log_ticks(panel.xaxis, [row["megabytes"] for row in rows])
            plain_log(panel.yaxis)
            panel.set(xlabel="MiB", ylabel="ms", title=titles[part])
        drawn.title = "Messages between two ranks by transport" + ", and all-reduces by back end" * (len(parts) > 1)
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Messages (Singh, figure 3.2, left): from the call of send until the receiver can use the tensor. torch's "
            "send and recv block, and their receiver knows the shape."
        )


BENCH = Bench(
    "messages",
    "Messages between pipeline stages by transport, compared with torch's send and recv.",
    MessagesSetting,
    compare_transports,
    Row,
    title="Messages between 2 ranks",
    plot=plot_messages,
)
