# SPDX-License-Identifier: Apache-2.0
"""Predicts how long the algorithms take, from latency and bandwidth inside nodes and between them (Singh, section 6.2).

The paper states where ring or recursive is faster, and why, but gives no formulas. These are the usual ones with one
latency and one bandwidth (Thakur et al., "Optimization of collective communication operations in MPICH", 2005),
extended for two levels: the ranks of a node share its network interfaces, and distant nodes may share links. It uses no
GPU library.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from stretto.cluster.cluster import Cluster

InterNodeAlgorithm = Literal["ring", "recursive"]
Algorithm = Literal["ring", "recursive", "flat"]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
ALGORITHMS: tuple[Algorithm, ...] = ("recursive", "ring", "flat")
LEVELED: tuple[Algorithm, ...] = ("recursive", "ring")
PARTS = (1, 2, 4, 8)
"""Parts of a buffer that the two levels may pipeline."""


@dataclass(frozen=True)
class Links:
    """Costs of a message: latencies in seconds, bandwidths in bytes/s in one direction.

    in_node_bandwidth: from a rank to the others of its node while all of them send. node_bandwidth: what one node
    sends to others, all its network interfaces together. leaf_nodes: how many nodes, in rank order, are attached to one
    switch (None: all); oversubscription: how many times more these could send to other switches than the links there
    carry. library_scatters: False where the library's reduce-scatter sends as much as an all-reduce, as gloo's does.
    Raises ValueError for a figure that is negative, or not positive where it must be.
    """

    in_node_latency: float
    in_node_bandwidth: float
    latency: float
    node_bandwidth: float
    leaf_nodes: int | None = None
    oversubscription: float = 1.0
    library_scatters: bool = True

    def __post_init__(self) -> None:
        for name in ("in_node_latency", "latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a finite number of seconds, at least 0")
        for name in ("in_node_bandwidth", "node_bandwidth"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a finite number of bytes/s, greater than 0")
        if self.leaf_nodes is not None and self.leaf_nodes < 1:
            raise ValueError(f"leaf_nodes = {self.leaf_nodes}: must be at least 1, or None for one switch")
        if not 1 <= self.oversubscription < math.inf:
            raise ValueError(f"oversubscription = {self.oversubscription}: must be at least 1 (none)")

    @classmethod
    def of_cluster(cls, cluster: Cluster) -> "Links":
        """Take the figures of a cluster. ValueError where it lacks one; latencies that it lacks are assumed typical."""
        cluster.require("nics_per_node")
        between = cluster.require("between_nodes.bandwidth")
        return cls(
            in_node_latency=cluster.in_node.latency or TYPICAL.in_node_latency,
            in_node_bandwidth=cluster.require("in_node.bandwidth"),
            latency=cluster.between_nodes.latency or TYPICAL.latency,
            node_bandwidth=cluster.inter_node_bandwidth or between,
            library_scatters=cluster.library != "gloo",
        )

    def slowdown(self, distance: int, nodes: int) -> float:
        """Factor by which a message takes longer while every node sends to the one `distance` before it.

        The first `distance` nodes of a switch then send to other switches, over links that carry what leaf_nodes /
        oversubscription of them can send.
        """
        if self.leaf_nodes is None or self.leaf_nodes >= nodes:
            return 1.0
        crossing = min(distance, nodes - distance, self.leaf_nodes)
        return max(1.0, crossing * self.oversubscription / self.leaf_nodes)


# The default: GPUs on NVLink and four 25 GB/s network interfaces a node. Measure yours, or give them.
TYPICAL = Links(in_node_latency=10e-6, in_node_bandwidth=200e9, latency=20e-6, node_bandwidth=100e9)


def predict(
    collective: Collective,
    algorithm: Algorithm,
    shard_bytes: float,
    nodes: int,
    size: int,
    links: Links,
    parts: int = 1,
) -> float:
    """Predict the seconds of a collective on `nodes` nodes of `size` ranks.

    shard_bytes: the bytes of one rank's part: an all-gather's input, a reduce-scatter's output, an all-reduce's buffer
    divided by all ranks. With L bytes a rank, N nodes of M ranks, latencies a and bandwidths B:

    - two levels: for each step between nodes, a + blocks x L x M x slowdown / B (M ranks share the node's interfaces);
      then M - 1 steps inside a node, each of a_in + N L / B_in. Ring: N - 1 steps of one block; recursive:
      ceil(log2 N) steps of together N - 1 blocks.
    - flat: the library's ring over all N M ranks, of N M - 1 hops of L bytes, where one rank of each node sends to the
      next node, with the whole of B. A hop begins when its block has arrived and the link is done with the one before.

    Additions are assumed to be free. An all-reduce is a reduce-scatter and an all-gather.

    parts: so many equal parts of the buffer are pipelined: while one is between nodes, another is inside them. The
    slower level then hides the other but for the first part (of an all-reduce, the first and the last).
    """
    trips = 2 if collective == "all_reduce" else 1
    is_flat = algorithm == "flat" or nodes == 1
    if is_flat and collective == "reduce_scatter" and not links.library_scatters:
        trips = 2
    if not shard_bytes or nodes * size == 1:
        return 0.0
    if is_flat:
        return trips * _flat(shard_bytes, nodes, size, links)
    part = shard_bytes / parts
    between = sum(
        links.latency + step.blocks * part * size * links.slowdown(step.distance, nodes) / links.node_bandwidth
        for step in all_gather_steps(cast(InterNodeAlgorithm, algorithm), nodes)
    )
    inside = (size - 1) * (links.in_node_latency + nodes * part / links.in_node_bandwidth)
    if parts == 1:
        return trips * (between + inside)
    # In an all-reduce a level takes each part twice, and the ends are inside: a sum before, a gather after.
    hidden = max(between, inside) * trips * (parts - 1)
    return hidden + trips * (between + inside)


def choose(
    collective: Collective,
    shard_bytes: float,
    nodes: int,
    size: int,
    links: Links,
    algorithms: Sequence[Algorithm] = ALGORITHMS,
) -> Algorithm:
    """The algorithm that `predict` finds fastest with `choose_parts`; among equals, the first of `algorithms`.

    One node has only flat. It is remembered: predicting takes milliseconds for tens of thousands of ranks, and calls
    repeat their sizes.
    """
    return _choose(collective, shard_bytes, nodes, size, links, tuple(algorithms))


@lru_cache(maxsize=4096)
def _choose(
    collective: Collective, shard_bytes: float, nodes: int, size: int, links: Links, algorithms: tuple[Algorithm, ...]
) -> Algorithm:
    if nodes == 1:
        return "flat"

    def seconds(name: Algorithm) -> float:
        parts = choose_parts(collective, name, shard_bytes, nodes, size, links)
        return predict(collective, name, shard_bytes, nodes, size, links, parts)

    return min(algorithms, key=seconds)


@lru_cache(maxsize=4096)
def choose_parts(
    collective: Collective, algorithm: Algorithm, shard_bytes: float, nodes: int, size: int, links: Links
) -> int:
    """The number of parts to pipeline, of `PARTS`, that `predict` finds fastest; the smallest among equals."""
    if algorithm == "flat" or nodes == 1 or size == 1:
        return 1
    return min(PARTS, key=lambda parts: predict(collective, algorithm, shard_bytes, nodes, size, links, parts))


@lru_cache(maxsize=1024)
def _flat(shard_bytes: float, nodes: int, size: int, links: Links) -> float:
    """Seconds of a ring over all ranks. Every node does the same at the same time, so the model simulates one."""
    inside = (links.in_node_latency, shard_bytes / links.in_node_bandwidth)
    across = (links.latency, shard_bytes * links.slowdown(1, nodes) / links.node_bandwidth)
    # Place 0 receives from the previous node, the others from the place before them.
    hops = [inside if nodes == 1 else across, *[inside] * (size - 1)]
    arrived = [0.0] * size  # when the newest block of a place arrived; at first, its own
    free = [0.0] * size  # when the link to a place has sent the previous block
    for _ in range(nodes * size - 1):
        begin = [max(arrived[place - 1], free[place]) for place in range(size)]
        free = [start + serial for start, (_, serial) in zip(begin, hops, strict=True)]
        arrived = [end + latency for end, (latency, _) in zip(free, hops, strict=True)]
    return max(arrived)


@dataclass(frozen=True)
class InterNodeStep:
    """One step of an all-gather on node n of N.

    Sends slots `source` to `source + blocks - 1` to node n - distance, and receives as many from node n + distance into
    `target` and following. A reduce-scatter sends `target` and following to node n + distance, and adds what node n -
    distance sends into `source` and following.
    """

    distance: int
    source: int
    target: int
    blocks: int


def all_gather_steps(algorithm: InterNodeAlgorithm, nodes: int) -> tuple[InterNodeStep, ...]:
    """The steps of an all-gather of one slot a node. Before them a node has its slot 0, after them all slots.

    ring: N - 1 steps of one slot. recursive: ceil(log2 N) steps, each of which doubles what a node has: recursive
    doubling (Singh, section 6.2.3). That algorithm pairs nodes that differ in one bit of their number, and so needs N
    to be a power of two; here each step's partners are `distance` apart on a ring (Bruck et al., "Efficient algorithms
    for all-to-all communications in multiport message-passing systems", 1997). For a power of two this takes as many
    steps and bytes, it works for every N, and each node always sends N - 1 slots.
    """
    return tuple(_ring(nodes) if algorithm == "ring" else _recursive(nodes))


def _ring(nodes: int) -> Iterator[InterNodeStep]:
    for slot in range(nodes - 1):
        yield InterNodeStep(distance=1, source=slot, target=slot + 1, blocks=1)


def _recursive(nodes: int) -> Iterator[InterNodeStep]:
    held = 1
    while held < nodes:
        blocks = min(held, nodes - held)
        yield InterNodeStep(distance=held, source=0, target=held, blocks=blocks)
        held += blocks
