# SPDX-License-Identifier: Apache-2.0
"""Formats a cluster as plain text for people."""

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

from stretto.cluster.model import FlopRates

if TYPE_CHECKING:
    from stretto.cluster.cluster import Cluster


WIDTH = 100
UNKNOWN = "unknown"


def describe(cluster: "Cluster") -> str:
    title = cluster.name + (f": {cluster.description}" if cluster.description else "")
    rows = list(_rows(cluster))
    width = max(len(label) for label, _ in rows)
    table = [f"  {label:<{width}}  {value}" for label, value in rows]
    parts = [fill(title, WIDTH), "\n".join(table)]
    if cluster.sources:
        keys: dict[str, list[str]] = {}
        for key, text in cluster.sources.items():
            keys.setdefault(text, []).append(key)
        sources = (
            fill(f"{', '.join(named)}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    ")
            for text, named in keys.items()
        )
        parts.append("\n".join(["Sources", *sources]))
    return "\n\n".join(parts)


def _rows(cluster: "Cluster") -> Iterator[tuple[str, str]]:
    gpu, inside, between = cluster.gpu, cluster.in_node, cluster.between_nodes
    yield "nodes", "not limited" if cluster.nodes is None else f"{cluster.nodes} ({cluster.gpus} GPUs in all)"
    yield "GPUs a node", str(cluster.gpus_per_node)
    yield "GPU", gpu.name
    yield "memory a GPU", _scaled(gpu.memory, "B")
    yield "memory bandwidth", _scaled(gpu.memory_bandwidth, "B/s")
    if gpu.measured_memory_bandwidth:
        yield "memory bandwidth, measured", _scaled(gpu.measured_memory_bandwidth, "B/s")
    yield "peak", _rates(gpu.peak_flops)
    yield "peak, measured", _rates(gpu.empirical_flops)
    if gpu.attention_flops:
        yield "attention, measured", _scaled(gpu.attention_flops, "FLOP/s")
    if gpu.long_attention_flops:
        yield "attention of long sequences, measured", _scaled(gpu.long_attention_flops, "FLOP/s")
    if gpu.overlap_slowdown:
        yield "slower beside a collective", f"{gpu.overlap_slowdown:.2g} s a second"
    if cluster.matmuls or cluster.transfers:
        yield "tables", f"{len(cluster.matmuls)} matrix products, {len(cluster.transfers)} collectives"
    yield "host memory a node", _scaled(cluster.host_memory, "B")
    yield from _host_link_rows(cluster)
    if (host := cluster.host).block_forward:
        passes = f"forward {_scaled(host.block_forward, 's')}, backward {_scaled(host.block_backward, 's')}"
        yield "host, to launch a block", f"{passes}; a collective {_scaled(host.collective, 's')}"
    yield "in a node, one GPU to all", _scaled(inside.bandwidth, "B/s a direction")
    yield "in a node, GPU to GPU", _scaled(inside.pair_bandwidth, "B/s a direction")
    yield "in a node, latency", _scaled(inside.latency, "s")
    for row in cluster.in_node_bandwidths:
        yield f"measured, {row.size} GPUs {row.preceding} apart", _scaled(row.bandwidth, "B/s a GPU")
    yield "NICs a node", UNKNOWN if cluster.nics_per_node is None else str(cluster.nics_per_node)
    yield "between nodes, a NIC", _scaled(between.bandwidth, "B/s a direction")
    yield "between nodes, a node", _scaled(cluster.inter_node_bandwidth, "B/s a direction")
    yield "between nodes, latency", _scaled(between.latency, "s")


def _host_link_rows(cluster: "Cluster") -> Iterator[tuple[str, str]]:
    link = cluster.host_link_or_default
    note = "" if link == cluster.host_link else ", default of this kind of GPU"
    yield "host to GPU", _scaled(link.to_device_bandwidth, f"B/s{note}")
    yield "GPU to host", _scaled(link.to_host_bandwidth, f"B/s{note}")
    yield "host and GPU, both ways at once", _scaled(link.duplex_bandwidth, f"B/s together{note}")


def _rates(rates: FlopRates) -> str:
    known = {dtype: rate for dtype, rate in vars(rates).items() if rate is not None}
    listed = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in known.items())
    return f"{listed} TFLOP/s" if known else UNKNOWN


def _scaled(value: float | None, unit: str) -> str:
    """A value with the decimal prefix that leaves 1 to 1000 before the unit: 25e9 bytes/s is 25 GB/s."""
    if value is None:
        return UNKNOWN
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u")):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value / 1e-9:.4g} n{unit}"
