# SPDX-License-Identifier: Apache-2.0
"""Measures schedules of 8 processes over links of a given bandwidth, and describes these links as a topology."""

import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.processes import Processes
from lab.simulated_schedules.cases import MeasuredSchedule
from lab.two_level.namespaces import command_in, shaped_network
from lab.two_level.run import TwoLevelSetting
from stretto.collectives.algorithms import find
from stretto.simulator.collectives.times import CollectiveOptions, simulate_collective
from stretto.simulator.network import EventDrivenNetwork, NetworkTopology
from stretto.simulator.network.topology import DirectedLink
from stretto.simulator.schedules.simulate import PACKET_BYTES

NODES, RANKS_PER_NODE = 4, 2
RANKS = NODES * RANKS_PER_NODE
TILE_BYTES = 64 << 10
_BOTH = {"nodes": NODES, "gpus": RANKS_PER_NODE}
SCHEDULES: dict[str, dict[str, int]] = {
    "ring-all-reduce": {"ranks": RANKS},
    "two-shot-all-reduce": {"ranks": RANKS},
    "recursive-halving-all-reduce": {"ranks": RANKS},
    "hierarchical-all-reduce": _BOTH,
    "ring-all-gather": {"ranks": RANKS},
    "direct-all-gather": {"ranks": RANKS},
    "recursive-doubling-all-gather": {"ranks": RANKS},
    "hierarchical-all-gather": _BOTH,
    "ring-reduce-scatter": {"ranks": RANKS},
    "direct-reduce-scatter": {"ranks": RANKS},
    "recursive-halving-reduce-scatter": {"ranks": RANKS},
    "hierarchical-reduce-scatter": _BOTH,
    "direct-all-to-all": {"ranks": RANKS},
    "two-step-all-to-all": _BOTH,
}
NETWORK = TwoLevelSetting(RANKS_PER_NODE, NODES).network()
"""50 Mbit/s a node and between the halves of the nodes, 200 inside a node."""
_START_LIMIT, _RUN_LIMIT = 300.0, 120.0  # seconds for eight processes on few cores
_LEAD = 0.03  # seconds from agreeing on a start to the start
_PORT = 23450
_HEADERS = 8934 / 9014  # TCP payload of an Ethernet frame of 9000 bytes
_IN_MEMORY = 10e9  # bytes/s: only links of the network limit the bandwidth


def socket_topology(in_node: float = 0.0, between: float = 0.0) -> NetworkTopology:
    """The links between the namespaces as they are shaped. in_node, between: seconds of latency."""
    network, nodes, size, devices = NETWORK, NODES, RANKS_PER_NODE, RANKS
    vertices = iter(range(devices, devices + 4 * nodes + network.leaves))
    loop_in, loop_out, out, back = ([next(vertices) for _ in range(nodes)] for _ in range(4))
    leaves = [next(vertices) for _ in range(network.leaves)]
    links = []

    def link(source: int, target: int, bandwidth: float, latency: float = 0.0) -> None:
        links.append(DirectedLink(source, target, bandwidth * _HEADERS, latency))

    for node in range(nodes):
        link(loop_in[node], loop_out[node], network.loopback_bandwidth, in_node)
        link(out[node], leaves[node // network.leaf_nodes], network.node_bandwidth, between)
        link(leaves[node // network.leaf_nodes], back[node], network.node_bandwidth)
        for rank in range(node * size, (node + 1) * size):
            for source, target in (
                (rank, loop_in[node]),
                (loop_out[node], rank),
                (rank, out[node]),
                (back[node], rank),
            ):
                link(source, target, _IN_MEMORY)
    for one, other in pairwise(leaves):
        link(one, other, network.trunk_bandwidth)
        link(other, one, network.trunk_bandwidth)
    return NetworkTopology("namespaces", devices, links, vertices=devices + 4 * nodes + network.leaves)


def measure_sockets(sizes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Time all schedules at all sizes (bytes), medians of the slowest rank; the rows of `read_socket_cases`.

    Raises ValueError where this machine or user cannot make network namespaces, or a schedule's output is wrong.
    """
    job = {
        "addresses": [f"10.213.77.{rank // RANKS_PER_NODE + 1}" for rank in range(RANKS)],
        "ports": [_PORT + rank for rank in range(RANKS)],
    }
    commands = [
        command_in(rank // RANKS_PER_NODE, "lab.simulated_schedules.socket_rank", json.dumps(job), str(rank))
        for rank in range(RANKS)
    ]
    with shaped_network(NETWORK), Processes(commands) as ranks:
        ranks.receive("start; its own words are above", _START_LIMIT)
        return [row for name in SCHEDULES for row in _measure(ranks, name, sizes, repeats)]


def _measure(ranks: Processes, algorithm: str, sizes: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """The rows of one schedule."""
    parameters: dict[str, Any] = dict(SCHEDULES[algorithm])
    collective = find(algorithm).compile(in_place=False, **parameters).collective
    ranks.ask({"do": "connect", "algorithm": algorithm, "parameters": parameters}, _START_LIMIT)
    for num_bytes in sizes:
        elements = math.ceil(num_bytes / 4 / collective.chunks_per_loop)
        times = []
        for _ in range(repeats + 1):
            start = time.monotonic() + _LEAD
            order = {"do": "run", "elements": elements, "tile_elements": TILE_BYTES // 4, "start": start}
            answers = ranks.ask(order, _RUN_LIMIT)
            if not all(answer["is_right"] for answer in answers):
                raise ValueError(f"{algorithm} over sockets gave a wrong result: {answers}")
            times.append(max(float(answer["ended"]) for answer in answers) - start)
        timed = times[1:]
        found = {"seconds": statistics.median(timed), "least": min(timed), "most": max(timed)}
        print(f"{algorithm}, {num_bytes} bytes: {found['seconds'] * 1e3:.1f} ms", file=sys.stderr, flush=True)
        yield {"algorithm": algorithm, "collective": collective.name, "bytes": num_bytes, **found}


def read_socket_cases(rows: Sequence[dict[str, Any]]) -> list[MeasuredSchedule]:
    """The measured rows as cases."""
    return [
        MeasuredSchedule(
            f"{row['collective']}, {RANKS} processes, {row['bytes'] >> 10} KB",
            row["algorithm"], "sockets", "Simple", tuple(SCHEDULES[row["algorithm"]].items()), row["bytes"], "sockets",
            "fp32", row["seconds"], TILE_BYTES,
        )
        for row in rows
    ]  # fmt: skip


def list_two_level(results: Path) -> Iterator[dict[str, Any]]:
    """Rows of lab/results/two-level: two-level collectives and a flat ring of 8 processes, with their simulation.

    Nothing is fitted: the links are as they were set there, and a message's latency as that bench measured it.
    """
    path = results / "two-level" / "two-level.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    links = data["links"]
    topology = socket_topology(in_node=links["in_node_latency"], between=links["latency"])
    options = CollectiveOptions(ranks_per_node=RANKS_PER_NODE)
    names = {"recursive": "two-level-recursive", "ring": "two-level-ring", "flat": "ring"}
    for row in data["rows"]:
        for name, algorithm in names.items():
            network = EventDrivenNetwork(topology, PACKET_BYTES)
            whole = row["shard_bytes"] * RANKS
            predicted = simulate_collective(row["collective"], algorithm, network, whole, options).seconds
            case = {"executor": "two-level", "ran": "two-level", "ranks": RANKS, "bytes": whole, "mode": "sockets"}
            yield case | {
                "contest": f"two-level {row['collective']}, {row['shard_kib']:g} KiB a rank",
                "schedule": f"{row['collective']}, {name}",
                "measured_us": row[f"{name}_ms"] * 1e3,
                "predicted_us": predicted * 1e6,
                "error": predicted * 1e3 / row[f"{name}_ms"] - 1,
                "use": "predicted",
            }
