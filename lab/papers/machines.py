# SPDX-License-Identifier: Apache-2.0
"""Frontier and Perlmutter, the machines of Singh's chapter 6: the cost of each library's collectives on them.

Every number is from a source that is not the chapter under study: the presets of `stretto.cluster`, the tables by which
NCCL and RCCL choose their protocols (machines.toml), and one assumption for MPI. Nothing is fitted to the chapter's
figures.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lab.papers import read_paper
from stretto.cluster import Cluster
from stretto.cluster.two_level import Algorithm, Collective
from stretto.collectives.two_level import Links, predict
from stretto.planner.compute import COPY_EFFICIENCY

MIB = 2**20  # the chapter's MB is taken as this many bytes
# A message of Slingshot takes some 2 us one way (De Sensi et al., "An in-depth analysis of the Slingshot interconnect",
# 2020). The chapter turns eager messages off (section 6.1.1), so each one is three: a request, an answer, the data.
MPI_LATENCY = 6e-6


@dataclass(frozen=True)
class RingProtocol:
    """A protocol of the vendor's ring. Seconds: to start a collective, and of a hop inside a node and between nodes.

    bandwidth: bytes/s of a node at most (None: what its links carry).
    """

    name: str
    start: float
    in_node_latency: float
    latency: float
    bandwidth: float | None = None


@dataclass(frozen=True)
class StudiedMachine:
    """A machine of the chapter, its vendor's library, and the bandwidth of a ring of all ranks of a node.

    ring_bandwidth: bytes/s that each rank sends to the next one of its node while all ranks send.
    """

    name: str
    unit: str
    library: str
    ring_bandwidth: float
    protocols: tuple[RingProtocol, ...]
    sources: Mapping[str, str] = field(hash=False)

    @property
    def cluster(self) -> Cluster:
        return Cluster.preset(self.name)

    @property
    def nics(self) -> int:
        return int(self.cluster.require("nics_per_node"))

    @property
    def nic_bandwidth(self) -> float:
        return self.cluster.require("between_nodes.bandwidth")

    @property
    def gpus_per_node(self) -> int:
        return self.cluster.gpus_per_node

    @property
    def simple(self) -> RingProtocol:
        """The protocol of large messages, which the phase inside nodes uses."""
        return next(protocol for protocol in self.protocols if protocol.name == "Simple")

    def flat_links(self, protocol: RingProtocol) -> Links:
        """Links of the vendor's ring over all ranks."""
        most = protocol.bandwidth or float("inf")
        return Links(
            in_node_latency=protocol.in_node_latency,
            in_node_bandwidth=min(self.ring_bandwidth, most),
            latency=protocol.latency,
            node_bandwidth=min(self.nics * self.nic_bandwidth, most),
        )

    def two_level_links(self, leaf_nodes: int | None = None, oversubscription: float = 1.0) -> Links:
        """Links of two levels: MPI between nodes on all network interfaces, the vendor's library in a node."""
        return Links(
            in_node_latency=self.simple.in_node_latency,
            in_node_bandwidth=self.ring_bandwidth,
            latency=MPI_LATENCY,
            node_bandwidth=self.nics * self.nic_bandwidth,
            leaf_nodes=leaf_nodes,
            oversubscription=oversubscription,
        )

    def choose_protocol(self, num_bytes: float, ranks: int) -> RingProtocol:
        """The protocol that the library's tables make fastest, as the library chooses."""
        return min(self.protocols, key=lambda protocol: self._ring_seconds(protocol, num_bytes, ranks))

    def flat_seconds(self, num_bytes: float, ranks: int) -> float:
        """Seconds of the vendor's ring over all ranks. num_bytes: an all-gather's output, a reduce-scatter's input."""
        return self._ring_seconds(self.choose_protocol(num_bytes, ranks), num_bytes, ranks)

    def _ring_seconds(self, protocol: RingProtocol, num_bytes: float, ranks: int) -> float:
        nodes = ranks // self.gpus_per_node
        links = self.flat_links(protocol)
        return protocol.start + predict("all_gather", "flat", num_bytes / ranks, nodes, self.gpus_per_node, links)

    def mpi_seconds(self, num_bytes: float, ranks: int) -> float:
        """Seconds of Cray MPICH's ring, on one network interface of a node (the chapter's Explanation 1).

        Additions, which it makes on the host, are left out.
        """
        nodes = ranks // self.gpus_per_node
        links = Links(MPI_LATENCY, self.ring_bandwidth, MPI_LATENCY, self.nic_bandwidth)
        return predict("all_gather", "flat", num_bytes / ranks, nodes, self.gpus_per_node, links)

    def two_level_seconds(
        self, collective: Collective, algorithm: Algorithm, num_bytes: float, ranks: int, links: Links | None = None
    ) -> float:
        """Seconds of two levels: the phases, the start of the vendor's collective, and each rank's local work."""
        nodes = ranks // self.gpus_per_node
        chosen = links or self.two_level_links()
        phases = predict(collective, algorithm, num_bytes / ranks, nodes, self.gpus_per_node, chosen)
        added = self.addition_seconds(num_bytes / ranks * (nodes - 1))
        alone = self.shuffle_seconds(num_bytes) + (added if collective == "reduce_scatter" else 0.0)
        return phases + self.simple.start + alone

    def shuffle_seconds(self, num_bytes: float) -> float:
        """Seconds of reordering all blocks: each byte is read and written."""
        return 2 * num_bytes / self._copied

    def addition_seconds(self, num_bytes: float) -> float:
        """Seconds of adding `num_bytes` received bytes: two are read and one is written for each."""
        return 3 * num_bytes / self._copied

    @property
    def _copied(self) -> float:
        return COPY_EFFICIENCY * self.cluster.require("gpu.memory_bandwidth")


_TABLES = read_paper("machines")
RCCL_HOPS: dict[str, list[float]] = _TABLES["rccl"]["hops"]
"""Seconds of protocol Simple's hops, in a node and between nodes, by RCCL's tables."""


def with_rccl_table(machine: StudiedMachine, table: str) -> StudiedMachine:
    """The machine with the hops of another of RCCL's tables."""
    in_node, between = RCCL_HOPS[table]
    return replace(machine, protocols=(RingProtocol("Simple", machine.simple.start, in_node, between),))


def _read_machine(name: str, protocols: list[dict[str, Any]], **about: Any) -> StudiedMachine:
    return StudiedMachine(name, protocols=tuple(RingProtocol(**each) for each in protocols), **about)


MACHINES = {name: _read_machine(name, **about) for name, about in _TABLES["machines"].items()}


def name_machines(machines: Iterable[str]) -> str:
    """The names as a picture shows them."""
    return ", ".join(machine.capitalize() for machine in machines)
