# SPDX-License-Identifier: Apache-2.0
"""`stretto probe`: measures this machine's links and kernels into a cluster file for the planner.

All ranks measure at the same time, since in training they share the links and the power budget of a chip.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from stretto.bench.harness import TORCH_DTYPES, machine_kind, run_ranks, time_steps
from stretto.bench.settings import require_links
from stretto.cluster import Cluster, HostLink, InNodeBandwidth, Matmul, MeasuredCollective
from stretto.memory.pinned import allocate_pinned
from stretto.parallel import Grid
from stretto.parallel.comm.collectives import start_all_reduce, start_gather_rows, start_scatter_rows
from stretto.planner.compute import ATTENTION_TOKENS, LONG_ATTENTION_TOKENS

LAYOUTS = ("NN", "NT", "TN")


@dataclass(frozen=True)
class ProbeEffort:
    """How much is measured: `message_bytes` of whole arrays, `sides` of matrices, repeats of each."""

    message_bytes: tuple[int, ...]
    sides: tuple[int, ...]
    attention: tuple[int, int, int, int]  # batch, heads, sequence, head size
    long_attention: tuple[int, int, int, int]
    copied_bytes: int
    repeats: int


_CROWDED_PRODUCTS = 64
_HOST_COPY_BYTES = 64 << 20
_HOST_COPIES = 8  # a timed step, in each direction: starting and ending it takes little of its time

ON_GPU = ProbeEffort(
    message_bytes=tuple(2**n for n in (12, 15, 18, 21, 24, 27, 30)),
    sides=(1024, 2048, 4096, 8192, 16384),
    attention=(2, 32, ATTENTION_TOKENS, 128),
    long_attention=(1, 32, LONG_ATTENTION_TOKENS, 128),
    copied_bytes=2**30,
    repeats=7,
)
ON_CPU = ProbeEffort(
    message_bytes=tuple(2**n for n in (9, 12, 15, 18, 21)),
    sides=(32, 64, 128, 256, 512),
    attention=(2, 4, 64, 32),
    long_attention=(1, 4, 256, 32),
    copied_bytes=2**24,
    repeats=7,
)


def probe(ranks: int, dtype: str, shapes: Sequence[tuple[int, int, int]] = ()) -> Cluster:
    """Measure this machine with `ranks` processes, one a GPU (or on the CPU's cores, with gloo).

    `shapes`: (m, n, k) of products that are measured besides the table's. Raises ValueError for fewer than two ranks.
    """
    require_links(ranks)
    detected = Cluster.detect()
    gpus = torch.cuda.device_count()
    if gpus and ranks > gpus:
        raise ValueError(f"{ranks} ranks need a GPU each, but there are {gpus}; --ranks {gpus} would do")
    measured = run_ranks(ranks, _measure, ranks, dtype, tuple(shapes))
    return _assemble(detected, ranks, dtype, measured)


def hierarchies(ranks: int) -> Iterator[tuple[int, int]]:
    """Every (preceding, size) of groups that fit into the ranks (Singh, section 5.1.2, case 1)."""
    for preceding in range(1, ranks // 2 + 1):
        for size in range(2, ranks // preceding + 1):
            yield preceding, size


def members(ranks: int, preceding: int, size: int) -> list[list[int]]:
    """The ranks of each group: `size` ranks with stride `preceding`; left-over ranks are in no group."""
    return [
        [block + inner + outer * preceding for outer in range(size)]
        for block in range(0, ranks - preceding * size + 1, preceding * size)
        for inner in range(preceding)
    ]


def _measure(ranks: int, dtype: str, shapes: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
    device = Grid(data=ranks).device
    effort = ON_GPU if device.type == "cuda" else ON_CPU
    timed = partial(time_steps, warm_up=2, repeats=effort.repeats)
    measured: dict[str, Any] = {"transfers": list(_transfers(ranks, effort, device, timed))}
    measured["host_link"] = measure_host_link(device, timed) if device.type == "cuda" else None
    crowding = _crowding(effort, dtype, device) if device.type == "cpu" else 1.0
    computed = partial(_time_crowded, timed, crowding)
    table = {(m, n, k) for m, n, k in itertools.product(effort.sides, repeat=3)} | set(shapes)
    measured["matmuls"] = list(_matmuls(sorted(table), dtype, device, computed))
    source = torch.empty(effort.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    measured["memory_bandwidth"] = 2 * effort.copied_bytes / computed(lambda: target.copy_(source))
    measured["attention_flops"] = _attention(effort.attention, dtype, device, computed)
    measured["long_attention_flops"] = _attention(effort.long_attention, dtype, device, computed)
    measured["slowdown"] = _slowdown(effort, dtype, device)
    dist.destroy_process_group()
    return measured


def _crowding(effort: ProbeEffort, dtype: str, device: torch.device) -> float:
    """The factor by which computation slows down when all ranks, which share cores, compute at length.

    A single product ends before another process gets its core, and would not show it.
    """
    a = torch.randn(effort.sides[-1], effort.sides[-1], device=device, dtype=TORCH_DTYPES[dtype])
    timed = partial(time_steps, warm_up=2, repeats=effort.repeats)

    def compute() -> None:
        for _ in range(_CROWDED_PRODUCTS):
            torch.mm(a, a)

    return max(1.0, timed(compute) / _CROWDED_PRODUCTS / timed(lambda: torch.mm(a, a)))


def _time_crowded(timed: Callable[[Callable[[], Any]], float], crowding: float, step: Callable[[], Any]) -> float:
    return crowding * timed(step)


def _transfers(
    ranks: int, effort: ProbeEffort, device: torch.device, timed: Callable[[Callable[[], Any]], float]
) -> Iterator[tuple[str, int, int, int, float]]:
    """Rows (collective, preceding, size, bytes that a rank sends, seconds)."""
    for preceding, size in hierarchies(ranks):
        groups = [dist.new_group(group) for group in members(ranks, preceding, size)]
        mine = next((group for group in groups if dist.get_rank() in dist.get_process_group_ranks(group)), None)
        for total in effort.message_bytes:
            rows = max(size, total // 4)
            for kind, trips in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
                step = (lambda: None) if mine is None else _collective(kind, rows, mine, device)
                seconds = timed(step)
                yield kind, preceding, size, round(trips * 4 * rows * (size - 1) / size), seconds
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER and group is mine:
                dist.destroy_process_group(group)


def _collective(kind: str, rows: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], Tensor]:
    whole = torch.zeros(rows, device=device)
    part = whole[: -(-rows // group.size())].clone()
    match kind:
        case "all_gather":
            return lambda: start_gather_rows(part, part.numel() * group.size(), group).wait()
        case "reduce_scatter":
            return lambda: start_scatter_rows(whole, part.numel(), group).wait()
        case _:
            return lambda: start_all_reduce(whole, group).wait()


def measure_host_link(device: torch.device, timed: Callable[[Callable[[], Any]], float]) -> HostLink:
    """Measure copies between pinned host memory and a GPU: in each direction alone, and in both, on two streams."""
    sent, received = allocate_pinned(2 * _HOST_COPY_BYTES, device).split(_HOST_COPY_BYTES)
    there, source = torch.zeros(2, _HOST_COPY_BYTES, dtype=torch.uint8, device=device)
    side = torch.cuda.Stream(device)

    def to_device() -> None:
        for _ in range(_HOST_COPIES):
            there.copy_(sent, non_blocking=True)

    def to_host() -> None:
        for _ in range(_HOST_COPIES):
            received.copy_(source, non_blocking=True)

    def both() -> None:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            to_host()
        to_device()
        current.wait_stream(side)

    num_bytes = _HOST_COPIES * _HOST_COPY_BYTES
    there_alone, back_alone, together = (
        num_bytes / timed(to_device),
        num_bytes / timed(to_host),
        num_bytes / timed(both),
    )
    return HostLink(there_alone, back_alone, min(2 * together, there_alone + back_alone))


def _matmuls(
    shapes: Sequence[tuple[int, int, int]],
    dtype: str,
    device: torch.device,
    timed: Callable[[Callable[[], Any]], float],
) -> Iterator[tuple[int, int, int, str, float]]:
    kind = TORCH_DTYPES[dtype]
    for m, n, k in shapes:
        for layout in LAYOUTS:
            a = torch.randn((k, m) if layout == "TN" else (m, k), device=device, dtype=kind)
            b = torch.randn((n, k) if layout == "NT" else (k, n), device=device, dtype=kind)
            left, right = a.t() if layout == "TN" else a, b.t() if layout == "NT" else b
            yield m, n, k, layout, timed(partial(torch.mm, left, right))


def _attention(
    shape: tuple[int, int, int, int],
    dtype: str,
    device: torch.device,
    timed: Callable[[Callable[[], Any]], float],
) -> float:
    """FLOP/s of causal attention, forward and backward: 3.5 times the products that the mask leaves of the forward.

    shape: batch, heads, tokens of a sequence, head size.
    """
    batch, heads, seq_len, size = shape
    q, k, v = (torch.randn(shape, device=device, dtype=TORCH_DTYPES[dtype], requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=TORCH_DTYPES[dtype])

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    return 3.5 * 2 * batch * heads * seq_len**2 * size / timed(step)


def _slowdown(effort: ProbeEffort, dtype: str, device: torch.device) -> float:
    """Seconds that computation loses for each second of a collective that overlaps it."""
    group = dist.group.WORLD
    assert group is not None
    side = effort.sides[-2]
    a = torch.randn(side, side, device=device, dtype=TORCH_DTYPES[dtype])
    message = torch.zeros(effort.message_bytes[-2] // 4, device=device)

    def compute() -> None:
        for _ in range(8):
            torch.mm(a, a)

    def both() -> None:
        pending = start_all_reduce(message, group)
        compute()
        pending.wait()

    timed = partial(time_steps, warm_up=2, repeats=effort.repeats)
    alone = timed(compute)
    sending = timed(lambda: start_all_reduce(message, group).wait())
    together = timed(both)
    hidden = min(alone, sending)
    return min(1.0, max(0.01, (together - max(alone, sending)) / hidden))


def _assemble(detected: Cluster, ranks: int, dtype: str, measured: dict[str, Any]) -> Cluster:
    transfers = tuple(MeasuredCollective(*row) for row in measured["transfers"])
    in_node = []
    for preceding, size in hierarchies(ranks):
        rows = [row for row in transfers if (row.preceding, row.size) == (preceding, size)]
        top = max(row.bytes for row in rows if row.collective == "all_gather")
        rates = [row.bytes / row.seconds for row in rows if row.bytes >= top]
        in_node.append(InNodeBandwidth(preceding, size, statistics.median(rates)))
    small = [row for row in transfers if (row.preceding, row.size) == (1, ranks) and row.collective == "all_gather"]
    latency = min(row.seconds for row in small) / (ranks - 1)
    best = max(2 * m * n * k / seconds for m, n, k, _, seconds in measured["matmuls"])
    by_pair = {(row.preceding, row.size): row.bandwidth for row in in_node}
    whole = max(by_pair[1, ranks], by_pair[1, 2])
    kind = machine_kind()
    about = ", ".join(f"{name} {value}" for name, value in kind.items() if name != "devices")
    source = f"Measured by stretto probe, {ranks} ranks on {kind['devices']}, {about}, {time.strftime('%Y-%m-%d')}"
    of_gpu = (
        "measured_memory_bandwidth",
        "attention_flops",
        "long_attention_flops",
        "overlap_slowdown",
        "empirical_flops",
    )
    keys = ["in_node_bandwidths", "transfers", "matmuls", "in_node", *(f"gpu.{figure}" for figure in of_gpu)]
    sources = dict(detected.sources) | dict.fromkeys(keys, source)
    sources["host_link"] = source if measured["host_link"] else "not measured: this machine has no GPU"
    # Without GPUs a rank is a process, and they share the machine's memory.
    share = 1.0 if torch.cuda.is_available() else detected.gpus_per_node / ranks
    return replace(
        detected,
        name="probed",
        gpus_per_node=ranks,
        in_node_bandwidths=tuple(in_node),
        transfers=transfers,
        matmuls=tuple(Matmul(m, n, k, dtype, layout, seconds) for m, n, k, layout, seconds in measured["matmuls"]),
        host_link=measured["host_link"] or HostLink(),
        in_node=replace(detected.in_node, bandwidth=whole, pair_bandwidth=min(whole, by_pair[1, 2]), latency=latency),
        gpu=replace(
            detected.gpu,
            memory=None if detected.gpu.memory is None else detected.gpu.memory * share,
            measured_memory_bandwidth=measured["memory_bandwidth"],
            attention_flops=measured["attention_flops"],
            long_attention_flops=measured["long_attention_flops"],
            overlap_slowdown=measured["slowdown"],
            empirical_flops=replace(detected.gpu.empirical_flops, **{dtype: best}),
        ),
        sources=sources,
    )
