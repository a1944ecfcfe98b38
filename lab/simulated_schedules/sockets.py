# SPDX-License-Identifier: Apache-2.0
"""Times of schedules and two-level collectives of 8 processes over links of a given bandwidth, and these links.

The schedules ran over TCP sockets between network namespaces, by a program that the run's commit has.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.simulated_schedules.cases import MeasuredSchedule
from lab.two_level.run import TwoLevelSetting
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


def read_socket_cases(results: Path) -> list[MeasuredSchedule]:
    """The times of `lab/results/simulated-collectives/sockets.json` as cases: each schedule in each size."""
    path = results / "simulated-collectives" / "sockets.json"
    return [
        MeasuredSchedule(
            f"{row['collective']}, {RANKS} processes, {row['bytes'] >> 10} KB",
            row["algorithm"], "sockets", "Simple", tuple(SCHEDULES[row["algorithm"]].items()), row["bytes"], "sockets",
            "fp32", row["seconds"], TILE_BYTES,
        )
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
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
