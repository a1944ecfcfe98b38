# SPDX-License-Identifier: Apache-2.0
"""Pictures of `stretto bench collectives`, drawn from its JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from lab.pictures import describe_origin, points, select
from lab.style import OTHER_PEER, PEER, drawing, plain_log
from stretto.bench.interleaved import name_size
from stretto.report.style import GUIDE, INK, STRETTO

# GB/s that one GPU can send: with plain stores to all peers, and with a copy engine to one.
LIMITS = {
    "4x NVIDIA H200": {"limit of stores to all peers": 351, "limit of a copy engine": 391},
    "2x NVIDIA H200": {"limit of a copy engine": 391},
}
_LIMIT_DASHES = ("--", ":")
_NAMES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
_MODES = {"graph": "in CUDA graphs", "eager": "without CUDA graphs"}


def plot_collectives(data: dict[str, Any], picture: Path) -> None:
    """Draw a row a collective: microseconds, GB/s with the machine's limits, ratio. Prefers bf16 and graphs."""
    mode = "graph" if any(row["mode"] == "graph" for row in data["rows"]) else "eager"
    dtype = "bf16" if any(row["dtype"] == "bf16" for row in data["rows"]) else data["rows"][0]["dtype"]
    shown = select(data["rows"], mode=mode, dtype=dtype)
    names = list(dict.fromkeys(row["collective"] for row in shown))
    with drawing(picture, 9.5, 1.75 * len(names) + 0.5) as drawn:
        panels = drawn.panels(len(names), 3)
        for row_of_panels, name in zip(panels, names, strict=True):
            rows = sorted(select(shown, collective=name), key=lambda row: row["bytes"])
            _plot_collective(row_of_panels, rows, LIMITS.get(data["machine"]["devices"], {}))
            row_of_panels[0].set_ylabel(f"{_NAMES.get(name, name)}\nmicroseconds")
            for panel in row_of_panels:
                drawn.log_ticks(panel.xaxis, [row["bytes"] for row in rows], name_size)
        for panel, title in zip(panels[0], ("time", "bus bandwidth", "NCCL's time / Stretto's"), strict=True):
            panel.set_title(title)
        for panel in panels[:-1].flat:
            panel.tick_params(labelbottom=False)
        for panel in panels[-1]:
            panel.set_xlabel("size of the whole array")
        drawn.title = f"Collectives: {data['ranks']} ranks, {dtype}, {_MODES[mode]}"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Bus bandwidth, as nccl-tests define it: the bytes that every algorithm must send from each of n ranks, "
            "over the time. That is 2\u00a0(n\u00a0-\u00a01)\u00a0/\u00a0n of the array for an all-reduce, and "
            "(n\u00a0-\u00a01)\u00a0/\u00a0n for the others."
        )
        if any(row["torch"] is not None for row in shown):
            drawn.caption += " torch's best: the fastest of its symmetric-memory operators, which are all-reduces."


def _plot_collective(panels: Sequence[Axes], rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> None:
    latency, bandwidth, ratio = panels
    sizes = [row["bytes"] for row in rows]
    latency.plot(sizes, [row["nccl"] for row in rows], label="NCCL", **PEER.line)
    if any(row["torch"] is not None for row in rows):
        latency.plot(*points(rows, "bytes", "torch"), label="torch's best", **OTHER_PEER.line)
    of_nccl = [row["busbw"] * row["stretto"] / row["nccl"] for row in rows]
    bandwidth.plot(sizes, of_nccl, **PEER.line)
    latency.plot(sizes, [row["stretto"] for row in rows], label="Stretto", **STRETTO.line)
    bandwidth.plot(sizes, [row["busbw"] for row in rows], **STRETTO.line)
    ratio.plot(sizes, [row["ratio"] for row in rows], **STRETTO.line)
    ratio.axhline(1, **GUIDE)
    by_library = select(rows, way="NCCL")
    for panel, key in ((latency, "stretto"), (bandwidth, "busbw"), (ratio, "ratio")):
        if by_library:
            panel.plot(
                *points(by_library, "bytes", key),
                linestyle="none",
                marker="o",
                markerfacecolor="white",
                markeredgecolor=STRETTO.colour,
                label="Stretto, which calls NCCL here" if panel is latency else None,
            )
    for (label, value), dashes in zip(limits.items(), _LIMIT_DASHES, strict=False):
        bandwidth.axhline(value, color=INK, linewidth=1, linestyle=dashes, label=label)
    plain_log(latency.yaxis)
    bandwidth.set_ylabel("GB/s")
    bandwidth.set_ylim(0, 1.06 * max(*limits.values(), *of_nccl, *(row["busbw"] for row in rows)))
    ratio.set_ylim(bottom=0)
