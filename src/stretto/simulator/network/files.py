# SPDX-License-Identifier: Apache-2.0
"""Reads topologies: by a name such as torus:16x8, or any graph from a file that networkx writes."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stretto.cluster import check_depth, read_bounded
from stretto.cluster.nics import natural_order
from stretto.simulator.network.shapes import dragonfly, fat_tree, fully_connected, ring, switch, torus
from stretto.simulator.network.topology import DirectedLink, NetworkTopology, check_link
from stretto.suggestions import did_you_mean_file, name_known

LARGEST_FILE = 256 * 1024 * 1024  # bytes
MAX_DEVICES = 65_536
MAX_FULL = 2048  # devices of a full network, which has 4 million links then
_SHAPES: dict[str, tuple[str, Callable[..., NetworkTopology]]] = {
    "ring": ("ring:N", ring),
    "full": ("full:N", fully_connected),
    "switch": ("switch:N", switch),
    "torus": ("torus:AxB[xC]", torus),
    "fat-tree": ("fat-tree:PORTS", fat_tree),
    "dragonfly": ("dragonfly:GROUPSxROUTERSxDEVICES", dragonfly),
}
SUFFIXES = (".json", ".graphml", ".gml", ".edgelist")
_BY_NAME = "a network described by dims (ASTRA-sim's) is given as --topology ring:8, full:8, switch:8 or torus:4x8"


def parse_topology(text: str | Path, bandwidth: float | None, latency: float | None) -> NetworkTopology:
    """The topology that a name describes, or a file's: see `read_graph`.

    ring:N, full:N, switch:N, torus:AxB[xC], fat-tree:PORTS, dragonfly:GROUPSxROUTERSxDEVICES. bandwidth: bytes/s of
    every link (of a file, of those that say none). latency: seconds of every link, likewise. Raises ValueError for an
    unknown name, for sizes that it cannot have, and for None where a link needs it.
    """
    text = str(text)
    kind, _, numbers = text.partition(":")
    if Path(text).suffix in SUFFIXES or kind not in _SHAPES:
        if Path(text).suffix not in SUFFIXES and not Path(text).is_file():
            known = name_known(kind, _SHAPES)
            raise ValueError(f"there is no topology {text!r}{known}, and files that end in {', '.join(SUFFIXES)}")
        return read_graph(Path(text), bandwidth, latency)
    pattern, make = _SHAPES[kind]
    if bandwidth is None or latency is None:
        raise ValueError(f"topology {text!r} needs the bandwidth and the latency of its links")
    check_link(bandwidth, latency)
    sizes = _read_sizes(text, numbers, pattern)
    expected = {"torus": (2, 3), "dragonfly": (3,)}.get(kind, (1,))
    if len(sizes) not in expected:
        raise ValueError(f"topology {text!r} has {len(sizes)} sizes, but is written {pattern}")
    most = MAX_FULL if kind == "full" else MAX_DEVICES
    devices = sizes[0] ** 3 // 4 if kind == "fat-tree" else math.prod(sizes)
    if devices > most:
        raise ValueError(f"topology {text!r} has {devices} devices; {most} are the most")
    return make(sizes, bandwidth, latency) if kind == "torus" else make(*sizes, bandwidth, latency)


def read_graph(path: Path, bandwidth: float | None = None, latency: float | None = None) -> NetworkTopology:
    """A topology from a graph's file: networkx's node-link .json, .graphml, .gml or .edgelist.

    A node with `kind` = "switch" (or "nic") is no device; all others are, in the order of their ids, numbers in them as
    numbers (gpu2 before gpu10): the order in the file means nothing. An edge may have `bandwidth` (bytes/s) and
    `latency` (seconds); the others get those given. An undirected edge is two links.

    Raises ValueError that names the file and the rule; networkx is imported here.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a graph's file ends in {', '.join(SUFFIXES)}; {_BY_NAME}")
    if not path.exists():
        raise ValueError(f"{path}: there is no such file{did_you_mean_file(path, SUFFIXES)}")
    content = read_bounded(path, LARGEST_FILE, "a graph")
    try:
        graph = _parse(content.decode("utf-8"), path.suffix)
    except Exception as error:  # noqa: BLE001  networkx's parsers raise what they run into
        what = f"there is no key {error}" if isinstance(error, KeyError) else str(error)
        shown = " ".join(what.split())[:300] or type(error).__name__
        raise ValueError(f"{path}: is no graph that networkx reads from {path.suffix}: {shown}") from None
    nodes = {
        node: dict(about) for node, about in sorted(graph.nodes(data=True), key=lambda each: natural_order(each[0]))
    }
    devices, others = list[Any](), list[Any]()
    for node, about in nodes.items():
        (others if str(about.get("kind", "device")) in ("switch", "nic") else devices).append(node)
    numbers = {node: number for number, node in enumerate([*devices, *others])}
    links = []
    for source, target, about in graph.edges(data=True):
        rates = [_read_rate(path, about, "bandwidth", bandwidth), _read_rate(path, about, "latency", latency)]
        ends = [(source, target)] if graph.is_directed() else [(source, target), (target, source)]
        links += [DirectedLink(numbers[one], numbers[other], *rates) for one, other in ends]
    links.sort(key=lambda link: (link.source, link.target))  # which of equal routes is taken depends on their order
    return NetworkTopology(str(path), len(devices), links, vertices=len(nodes))


def _parse(text: str, suffix: str) -> Any:
    import networkx

    match suffix:
        case ".json":
            data = json.loads(text)
            check_depth(data, "the graph")
            if not isinstance(data, Mapping) or "nodes" not in data:
                raise ValueError(f"its JSON is no object with nodes and links; {_BY_NAME}")
            return networkx.node_link_graph(dict(data), edges="links" if "links" in data else "edges")
        case ".graphml":
            from defusedxml.ElementTree import fromstring

            fromstring(text)  # refuses entities, which networkx's own parser would expand
            return networkx.parse_graphml(text)
        case ".gml":
            return networkx.parse_gml(text)
        case _:
            lines = [line.partition("#")[0] for line in text.splitlines()]
            rates = (("bandwidth", float), ("latency", float)) if any(len(line.split()) > 2 for line in lines) else ()
            return networkx.parse_edgelist(lines, data="{" in text or rates)  # {}: as networkx writes by itself


def _read_rate(path: Path, about: Mapping[str, Any], key: str, default: float | None) -> float:
    value = about.get(key, default)
    if value is None:
        raise ValueError(f"{path}: an edge has no {key}; write it there, or give --{key} for all edges that have none")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        shown = repr(value)[:40]
        raise ValueError(f"{path}: an edge has {key} = {shown}, which must be a number up to 1e308") from None


def _read_sizes(text: str, numbers: str, pattern: str) -> list[int]:
    parts = numbers.split("x")
    if not all(part.isascii() and part.isdecimal() and len(part) < 7 and int(part) > 0 for part in parts):
        raise ValueError(f"topology {text!r} must be written {pattern}, with whole numbers of at least 1")
    return [int(part) for part in parts]
