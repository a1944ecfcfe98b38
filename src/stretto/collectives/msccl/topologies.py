# SPDX-License-Identifier: Apache-2.0
"""Topologies as scripts for msccl-tools build them: which ranks have a link, and how wide it is.

Only whether there is a link matters here; bandwidths and switches are kept for scripts that read them.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

Switch = tuple[Sequence[int], Sequence[int], Any, str]


class Topology:
    """links[dst][src]: the bandwidth from src to dst, 0 for none; switches: (sources, destinations, bandwidth, name).

    ValueError for a switch whose bandwidth is not positive.
    """

    def __init__(self, name: str, links: Sequence[Sequence[Any]], switches: Sequence[Switch] = ()) -> None:
        self.name = name
        self.links = links
        self.switches = list(switches)
        for _, _, bandwidth, switch in self.switches:
            if not bandwidth > 0:
                raise ValueError(f"a switch's bandwidth is positive, not {bandwidth} (switch {switch})")

    def num_nodes(self) -> int:
        return len(self.links)

    def nodes(self) -> range:
        return range(len(self.links))

    def link(self, src: int, dst: int) -> Any:
        """The bandwidth from `src` to `dst`: 0 for none."""
        return self.links[dst][src]

    def sources(self, dst: int) -> Iterator[int]:
        """The ranks that have a link to `dst`."""
        return (src for src in self.nodes() if self.link(src, dst) > 0)

    def destinations(self, src: int) -> Iterator[int]:
        """The ranks to which `src` has a link."""
        return (dst for dst in self.nodes() if self.link(src, dst) > 0)

    def bandwidth_constraints(self) -> Iterator[Switch]:
        """Every link and every switch, as switches are given."""
        for dst in self.nodes():
            for src in self.sources(dst):
                yield [src], [dst], self.link(src, dst), f"{src}→{dst}"
        yield from self.switches


def _linked(name: str, size: int, links: dict[tuple[int, int], int], switches: Sequence[Switch] = ()) -> Topology:
    """links: the bandwidth between two ranks, both ways."""
    matrix = [[0] * size for _ in range(size)]
    for (one, other), bandwidth in links.items():
        if one != other:
            matrix[one][other] = matrix[other][one] = bandwidth
    return Topology(name, matrix, switches)


def _all_pairs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    return [(one, other) for one in ranks for other in ranks if one < other]


def fully_connected(num_nodes: int) -> Topology:
    """A link between every two ranks."""
    return _linked(f"FullyConnected(n={num_nodes})", num_nodes, dict.fromkeys(_all_pairs(range(num_nodes)), 1))


def hub_and_spoke(num_nodes: int) -> Topology:
    """All ranks on one switch, with one link each."""
    switches: list[Switch] = []
    for node in range(num_nodes):
        others = [other for other in range(num_nodes) if other != node]
        switches += [([node], others, 1, f"node_{node}_out"), (others, [node], 1, f"node_{node}_in")]
    links = dict.fromkeys(_all_pairs(range(num_nodes)), 1)
    return _linked(f"HubAndSpoke(n={num_nodes})", num_nodes, links, switches)


def ring(num_nodes: int) -> Topology:
    """Links to the next rank and to the one before, around."""
    return _linked(f"Ring(n={num_nodes})", num_nodes, {(node, (node + 1) % num_nodes): 1 for node in range(num_nodes)})


def line(num_nodes: int) -> Topology:
    """Links to the next rank and to the one before."""
    return _linked(f"Line(n={num_nodes})", num_nodes, {(node, node + 1): 1 for node in range(num_nodes - 1)})


def star(num_nodes: int, non_blocking: bool = True) -> Topology:
    """Links from rank 0 to every other."""
    points = list(range(1, num_nodes))
    switches: list[Switch] = [] if non_blocking else [([0], points, 1, "to_points"), (points, [0], 1, "from_points")]
    return _linked(f"Star(n={num_nodes})", num_nodes, {(0, node): 1 for node in points}, switches)


def dgx1() -> Topology:
    """The eight V100s of a DGX-1: bandwidths are counts of NVLinks."""
    double = dict.fromkeys([(0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7)], 2)
    single = dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6)], 1)
    return _linked("DGX1", 8, double | single)


def dgx_a100() -> Topology:
    """The eight A100s of a DGX A100."""
    return _linked("DGX_A100", 8, dict.fromkeys(_all_pairs(range(8)), 12))


def amd4() -> Topology:
    """Four AMD GPUs in a ring."""
    return _linked("AMD4", 4, dict.fromkeys([(0, 1), (1, 3), (3, 2), (2, 0)], 1))


def amd8() -> Topology:
    """Eight AMD GPUs, in two groups of four with wider links inside."""
    groups = dict.fromkeys([*_all_pairs([0, 2, 3, 5]), *_all_pairs([1, 4, 6, 7])], 6)
    return _linked("AMD8", 8, dict.fromkeys(_all_pairs(range(8)), 5) | groups)


def nvlink_only(nvidia_smi_topo: str | None = None) -> Topology:
    """The NVLinks of this machine, from what `nvidia-smi topo -m` prints (None: run it)."""
    if nvidia_smi_topo is None:
        nvidia_smi_topo = subprocess.run(
            ["nvidia-smi", "topo", "-m"], check=True, capture_output=True, text=True
        ).stdout
    rows = [line.split("\t")[1:] for line in nvidia_smi_topo.splitlines()[1:] if line.startswith("GPU")]
    counts = [[re.fullmatch(r"NV(\d+)", cell.strip()) for cell in row[: len(rows)]] for row in rows]
    return Topology("NVLinkOnly", [[int(count[1]) if count else 0 for count in row] for row in counts])


def distributed_fully_connected(local_topology: Topology, num_copies: int, remote_bw: int) -> Topology:
    """Copies of a topology, with a link of `remote_bw` between any two ranks of different copies."""
    name = f"DistributedFullyConnected(local={local_topology.name},copies={num_copies},bw={remote_bw})"
    return Topology(name, *_copies(local_topology, num_copies, remote_bw))


def distributed_hub_and_spoke(local_topology: Topology, num_copies: int, remote_bw: int) -> Topology:
    """Copies of a topology, each with a switch of `remote_bw` to all the others."""
    links, switches = _copies(local_topology, num_copies, remote_bw)
    size = local_topology.num_nodes()
    for copy in range(num_copies):
        inside = list(range(copy * size, (copy + 1) * size))
        outside = [node for node in range(len(links)) if node not in inside]
        switches += [
            (inside, outside, remote_bw, f"copy_{copy}_out_remote"),
            (outside, inside, remote_bw, f"copy_{copy}_in_remote"),
        ]
    name = f"DistributedHubAndSpoke(local={local_topology.name},copies={num_copies},bw={remote_bw})"
    return Topology(name, links, switches)


def _copies(local: Topology, copies: int, remote_bw: int) -> tuple[list[list[Any]], list[Switch]]:
    size = local.num_nodes()
    nodes = range(size * copies)
    links = [
        [local.link(src % size, dst % size) if src // size == dst // size else remote_bw for src in nodes]
        for dst in nodes
    ]
    switches: list[Switch] = [
        (
            [copy * size + node for node in sources],
            [copy * size + node for node in destinations],
            bandwidth,
            f"copy_{copy}_{name}_local",
        )
        for sources, destinations, bandwidth, name in local.switches
        for copy in range(copies)
    ]
    return links, switches


def reverse_topology(topology: Topology) -> Topology:
    """Every link and switch the other way round."""
    links = [[topology.link(dst, src) for src in topology.nodes()] for dst in topology.nodes()]
    switches: list[Switch] = [
        (destinations, sources, bandwidth, f"{name}_reversed")
        for sources, destinations, bandwidth, name in topology.switches
    ]
    return Topology(f"Reverse{topology.name}", links, switches)


def binarize_topology(topology: Topology) -> Topology:
    """Every link with a bandwidth of 1, and no switch."""
    links = [[int(bandwidth > 0) for bandwidth in row] for row in topology.links]
    return Topology(f"Binarized{topology.name}", links)
