"""The picture of `stretto bench collectives`: latency, bus bandwidth and ratio over size."""

import json
from pathlib import Path

from matplotlib.figure import Figure

from stretto.bench.plots import OURS, PEER

# What one H200 of four linked ones can send to its peers by plain stores, and by a copy engine, in GB/s.
LIMITS = {"stores to all peers": 351, "copy engine, one peer": 391}


def plot_collectives(result: Path, picture: Path) -> None:
    """A row a collective (bf16 where it is there, in graphs): microseconds, GB/s with the machine's limits, ratio."""
    data = json.loads(result.read_text())
    mode = "graph" if any(row["mode"] == "graph" for row in data["rows"]) else "eager"
    dtype = "bf16" if any(row["dtype"] == "bf16" for row in data["rows"]) else data["rows"][0]["dtype"]
    shown = [row for row in data["rows"] if row["mode"] == mode and row["dtype"] == dtype]
    names = list(dict.fromkeys(row["collective"] for row in shown))
    figure = Figure(figsize=(12, 2.8 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 3, squeeze=False)
    for (latency, bandwidth, ratio), name in zip(panels, names, strict=True):
        rows = sorted((row for row in shown if row["collective"] == name), key=lambda row: row["bytes"])
        sizes = [row["bytes"] for row in rows]
        latency.plot(sizes, [row["nccl"] for row in rows], color=PEER, marker=".", label="NCCL")
        if any(row["torch"] for row in rows):
            latency.plot(sizes, [row["torch"] for row in rows], color="#b08968", marker=".", label="torch's best")
        latency.plot(sizes, [row["stretto"] for row in rows], color=OURS, marker=".", label="Stretto")
        latency.set_yscale("log")
        latency.set_ylabel(f"{name}\nmicroseconds")
        scale = [row["busbw"] * row["stretto"] for row in rows]
        bandwidth.plot(sizes, [s / row["nccl"] for s, row in zip(scale, rows, strict=True)], color=PEER, marker=".")
        bandwidth.plot(sizes, [row["busbw"] for row in rows], color=OURS, marker=".")
        for limit, value in LIMITS.items():
            bandwidth.axhline(value, color="black", linewidth=0.6, linestyle=":")
            bandwidth.annotate(limit, (sizes[0], value), fontsize=6, va="bottom")
        bandwidth.set_ylabel("busbw (GB/s)")
        ratio.plot(sizes, [row["ratio"] for row in rows], color=OURS, marker=".")
        ratio.axhline(1, color=PEER, linewidth=1)
        ratio.set_ylabel("NCCL / Stretto")
        for panel in (latency, bandwidth, ratio):
            panel.set_xscale("log", base=2)
        latency.legend(fontsize=7)
    for panel in panels[-1]:
        panel.set_xlabel("bytes of the whole array")
    machine = f"{data['machine']['devices']}, {data['date']}"
    figure.suptitle(f"{data['ranks']} ranks, {dtype}, {mode}, {machine}", fontsize=10)
    figure.savefig(picture, dpi=110)
