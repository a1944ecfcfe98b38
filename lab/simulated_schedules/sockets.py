# SPDX-License-Identifier: Apache-2.0
"""Measures schedules of 8 processes over links of a given bandwidth, and describes these links as a topology."""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.simulated_schedules.cases import MeasuredSchedule
from lab.simulated_schedules.settings import (
    NETWORK,
    RANKS,
    RANKS_PER_NODE,
    SCHEDULES,
    TILE_BYTES,
    SimulatedCollectivesSetting,
)
from lab.two_level.namespaces import Network, namespace_of, shaped_network
from stretto.collectives.algorithms import find
from stretto.simulator.collectives.times import CollectiveOptions, simulate_collective
from stretto.simulator.network import EventDrivenNetwork, NetworkTopology
from stretto.simulator.network.topology import DirectedLink
from stretto.simulator.schedules.simulate import PACKET_BYTES

_LEAD = 0.03  # seconds from agreeing on a start to the start
_PORT = 23450
_HEADERS = 8934 / 9014  # TCP payload of an Ethernet frame of 9000 bytes
_IN_MEMORY = 10e9  # bytes/s: only links of the network limit the bandwidth


def socket_topology(network: Network = NETWORK, in_node: float = 0.0, between: float = 0.0) -> NetworkTopology:
    """The links between the namespaces as they are shaped. in_node, between: seconds of latency."""
    nodes, size = network.nodes, RANKS_PER_NODE
    devices = nodes * size
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


def measure_sockets(
    setting: SimulatedCollectivesSetting, schedules: Sequence[str] = tuple(SCHEDULES)
) -> list[dict[str, Any]]:
    """Time all schedules at all sizes, medians of the slowest rank; the rows of `read_socket_cases`.

    Raises ValueError where this machine or user cannot make network namespaces, or a schedule's output is wrong.
    """
    with shaped_network(NETWORK):
        team = SocketTeam()
        try:
            return [row for name in schedules for row in team.measure(name, SCHEDULES[name], setting)]
        finally:
            team.close()


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
            yield {
                "contest": f"two-level {row['collective']}, {row['shard_kib']:g} KiB a rank",
                "schedule": f"{row['collective']}, {name}",
                "ran": "two-level",
                "executor": "two-level",
                "ranks": RANKS,
                "bytes": whole,
                "mode": "sockets",
                "measured_us": row[f"{name}_ms"] * 1e3,
                "predicted_us": predicted * 1e6,
                "error": predicted * 1e3 / row[f"{name}_ms"] - 1,
                "use": "predicted",
            }


class SocketTeam:
    """The ranks' processes, each in its node's namespace."""

    def __init__(self) -> None:
        job = {
            "addresses": [f"10.213.77.{rank // RANKS_PER_NODE + 1}" for rank in range(RANKS)],
            "ports": [_PORT + rank for rank in range(RANKS)],
        }
        module = "lab.simulated_schedules.socket_rank"
        self._ranks = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", namespace_of(rank // RANKS_PER_NODE)),
                    *("env", "OMP_NUM_THREADS=1", sys.executable, "-P", "-m", module, json.dumps(job), str(rank)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(RANKS)
        ]
        self._read()

    def measure(
        self, algorithm: str, parameters: dict[str, int], setting: SimulatedCollectivesSetting
    ) -> list[dict[str, Any]]:
        """The rows of one schedule."""
        given: dict[str, Any] = dict(parameters)
        schedule = find(algorithm).compile(in_place=False, **given)
        collective = schedule.collective
        order: dict[str, Any] = {"algorithm": algorithm, "parameters": parameters}
        self._write(order)
        self._read()
        rows: list[dict[str, Any]] = []
        for num_bytes in setting.all_bytes:
            elements = math.ceil(num_bytes / 4 / collective.chunks_per_loop)
            order |= {"elements": elements, "tile_elements": TILE_BYTES // 4}
            times = [self._time(order, algorithm) for _ in range(setting.repeats + 1)][1:]
            rows.append(
                {
                    "algorithm": algorithm,
                    "collective": collective.name,
                    "bytes": num_bytes,
                    "seconds": statistics.median(times),
                    "least": min(times),
                    "most": max(times),
                }
            )
            print(f"{algorithm}, {num_bytes} bytes: {rows[-1]['seconds'] * 1e3:.1f} ms", file=sys.stderr, flush=True)
        return rows

    def _time(self, order: dict[str, Any], algorithm: str) -> float:
        start = time.monotonic() + _LEAD
        self._write(order | {"start": start})
        answers = [json.loads(line) for line in self._read()]
        if not all(answer["is_right"] for answer in answers):
            raise ValueError(f"{algorithm} over sockets gave a wrong result: {answers}")
        return max(float(answer["ended"]) for answer in answers) - start

    def _write(self, order: dict[str, Any]) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(order) + "\n")
            rank.stdin.flush()

    def _read(self) -> list[str]:
        lines = []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            line = rank.stdout.readline()
            if not line:
                raise ValueError(f"rank {number} of the bench has ended; its own words are above")
            lines.append(line)
        return lines

    def close(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()
