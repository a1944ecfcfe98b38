# SPDX-License-Identifier: Apache-2.0
"""Measures this machine's links and kernels into a `Cluster` for the planner: `stretto probe`.

All ranks measure at the same time, since in training they share the links and the power budget of a chip. Functions
import torch when they measure: planning needs none.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from stretto.cluster.cluster import Cluster
from stretto.cluster.detection import machine_kind
from stretto.cluster.model import (
    ATTENTION_TOKENS,
    LONG_ATTENTION_TOKENS,
    HostLink,
    HostTimes,
    InNodeBandwidth,
    Matmul,
    MeasuredCollective,
)
from stretto.quantities import MAX_LOCAL_RANKS

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

Timed = Callable[[Callable[[], Any]], float]
"""Returns the seconds of a step on the slowest rank."""
Draw = Callable[..., "Tensor"]
"""Draws random numbers of the probe's dtype on its device, in a given shape."""

LAYOUTS = ("NN", "NT", "TN")


@dataclass(frozen=True)
class ProbeEffort:
    """Extent of a measurement: `message_bytes` of whole arrays, `sides` of matrices, repeats of each."""

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


def require_links(ranks: int, gpus: int) -> None:
    """Raise ValueError for so few ranks that there is no link between two, and for ranks without a GPU each."""
    if ranks < 2:
        raise ValueError(f"a probe measures links, so it takes at least 2 ranks; it was given {ranks}")
    if ranks > MAX_LOCAL_RANKS:
        raise ValueError(f"--ranks is {ranks}, but a machine runs at most {MAX_LOCAL_RANKS:,} processes of a probe")
    if gpus and ranks > gpus:
        raise ValueError(f"{ranks} ranks need a GPU each, but there are {gpus}; --ranks {gpus} would do")


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


def measure(
    device: "torch.device", dtype: str, shapes: Sequence[tuple[int, int, int]], time_steps: Callable[..., float]
) -> dict[str, Any]:
    """Measure on every rank of a job at once; `assemble` makes a cluster of it, and of the host's times. Collective.

    dtype: "bf16", "fp16", "fp32" or "fp64". shapes: (m, n, k) of products that are measured besides the table's.
    time_steps: as `stretto.bench.harness.time_steps`.
    """
    import torch

    effort = ON_GPU if device.type == "cuda" else ON_CPU
    timed: Timed = partial(time_steps, warm_up=2, repeats=effort.repeats)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[dtype]
    draw = partial(torch.randn, device=device, dtype=kind)
    measured: dict[str, Any] = {"transfers": list(_transfers(effort, device, timed))}
    measured["host_link"] = measure_host_link(device, timed) if device.type == "cuda" else None
    crowding = _crowding(effort, draw, timed) if device.type == "cpu" else 1.0

    def computed(step: Callable[[], Any]) -> float:
        return crowding * timed(step)

    table = {(m, n, k) for m, n, k in itertools.product(effort.sides, repeat=3)} | set(shapes)
    measured["matmuls"] = list(_matmuls(sorted(table), draw, computed))
    source = torch.empty(effort.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    measured["memory_bandwidth"] = 2 * effort.copied_bytes / computed(lambda: target.copy_(source))
    measured["attention_flops"] = _attention(effort.attention, draw, computed)
    measured["long_attention_flops"] = _attention(effort.long_attention, draw, computed)
    measured["slowdown"] = _slowdown(effort, device, draw, timed)
    return measured


def _crowding(effort: ProbeEffort, draw: Draw, timed: Timed) -> float:
    """The factor by which computation slows down when all ranks, which share cores, compute at length.

    A single product ends before another process gets its core, and would not show it.
    """
    a = draw((effort.sides[-1], effort.sides[-1]))

    def compute() -> None:
        for _ in range(_CROWDED_PRODUCTS):
            a.mm(a)

    return max(1.0, timed(compute) / _CROWDED_PRODUCTS / timed(lambda: a.mm(a)))


def _transfers(effort: ProbeEffort, device: "torch.device", timed: Timed) -> Iterator[tuple[str, int, int, int, float]]:
    """Rows (collective, preceding, size, bytes that a rank sends, seconds)."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
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


def _collective(kind: str, rows: int, group: "dist.ProcessGroup", device: "torch.device") -> Callable[[], Any]:
    """A call of a collective as layers make it: into new memory, asynchronously, then awaited."""
    import torch
    import torch.distributed as dist

    part = torch.zeros(-(-rows // group.size()), device=device)
    whole = torch.zeros(part.numel() * group.size(), device=device)
    # torch 2.13 renamed these two, and warns at each call of the old names
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    match kind:
        case "all_gather":
            return lambda: gather(torch.empty_like(whole), part, group=group, async_op=True).wait()
        case "reduce_scatter":
            return lambda: scatter(torch.empty_like(part), whole, group=group, async_op=True).wait()
        case _:
            return lambda: dist.all_reduce(whole[:rows], group=group, async_op=True).wait()


def measure_host_link(device: "torch.device", timed: Timed) -> HostLink:
    """Measure copies between pinned host memory and a GPU: in each direction alone, and in both, on two streams."""
    import torch

    sent, received = torch.zeros(2, _HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
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
    shapes: Sequence[tuple[int, int, int]], draw: Draw, timed: Timed
) -> Iterator[tuple[int, int, int, str, float]]:
    for m, n, k in shapes:
        for layout in LAYOUTS:
            a = draw((k, m) if layout == "TN" else (m, k))
            b = draw((n, k) if layout == "NT" else (k, n))
            left, right = a.t() if layout == "TN" else a, b.t() if layout == "NT" else b
            yield m, n, k, layout, timed(partial(left.mm, right))


def _attention(shape: tuple[int, int, int, int], draw: Draw, timed: Timed) -> float:
    """FLOP/s of causal attention, forward and backward: 3.5 times the products that the mask leaves of the forward.

    shape: batch, heads, tokens of a sequence, head size.
    """
    from torch.nn.functional import scaled_dot_product_attention

    batch, heads, seq_len, size = shape
    q, k, v = (draw(shape, requires_grad=True) for _ in range(3))
    gradient = draw(shape)

    def step() -> None:
        scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    return 3.5 * 2 * batch * heads * seq_len**2 * size / timed(step)


def _slowdown(effort: ProbeEffort, device: "torch.device", draw: Draw, timed: Timed) -> float:
    """Seconds that computation loses for each second of a collective that overlaps it."""
    import torch
    import torch.distributed as dist

    a = draw((effort.sides[-2], effort.sides[-2]))
    message = torch.zeros(effort.message_bytes[-2] // 4, device=device)

    def compute() -> None:
        for _ in range(8):
            a.mm(a)

    def both() -> None:
        pending = dist.all_reduce(message, async_op=True)
        compute()
        pending.wait()

    alone = timed(compute)
    sending = timed(lambda: dist.all_reduce(message, async_op=True).wait())
    together = timed(both)
    hidden = min(alone, sending)
    return min(1.0, max(0.01, (together - max(alone, sending)) / hidden))


def assemble(detected: Cluster, ranks: int, dtype: str, measured: dict[str, Any]) -> Cluster:
    """Make a cluster of what was detected, and of what `measure` returned on `ranks` ranks."""
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
    keys = ["in_node_bandwidths", "transfers", "matmuls", "in_node", "host", *(f"gpu.{figure}" for figure in of_gpu)]
    sources = dict(detected.sources) | dict.fromkeys(keys, source)
    sources["host_link"] = source if measured["host_link"] else "not measured: this machine has no GPU"
    # Without GPUs a rank is a process, and they share the machine's memory.
    share = 1.0 if measured["host_link"] else detected.gpus_per_node / ranks
    return replace(
        detected,
        name="probed",
        gpus_per_node=ranks,
        in_node_bandwidths=tuple(in_node),
        transfers=transfers,
        matmuls=tuple(Matmul(m, n, k, dtype, layout, seconds) for m, n, k, layout, seconds in measured["matmuls"]),
        host_link=measured["host_link"] or HostLink(),
        host=HostTimes(**measured["host"]),
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
