# SPDX-License-Identifier: Apache-2.0
"""Hierarchies: ranks of one node talk to each other, and to the rank of the same number in other nodes. And a DGX-1.

Rank n * gpus + g is GPU g of node n. All GPUs of a node send to other nodes concurrently, so that every NIC carries its
share.
"""

from collections.abc import Sequence

from stretto.collectives.algorithm import algorithm
from stretto.collectives.algorithms.recursive import double, halve
from stretto.collectives.collective import AllGather, AllReduce, Collective, ReduceScatter
from stretto.collectives.language import chunk, parallelize

PCCL = "PCCL (Singh, 2025), section 6.2.1"


def reduce_around(members: Sequence[int], buffer: str, start: int, size: int, ch: int | None = None) -> None:
    """Reduce-scatter over a ring: member i ends with the sum of block i, `size` chunks at start + i * size."""
    for i in range(len(members)):
        place = start + i * size
        c = chunk(members[(i + 1) % len(members)], buffer, place, size)
        for step in range(2, len(members) + 1):
            c = chunk(members[(i + step) % len(members)], buffer, place, size).reduce(c, ch=ch)


def gather_around(members: Sequence[int], buffer: str, start: int, size: int, ch: int | None = None) -> None:
    """All-gather over a ring: every member ends with block i of each member i, `size` chunks at start + i * size."""
    for i in range(len(members)):
        c = chunk(members[i], buffer, start + i * size, size)
        for step in range(1, len(members)):
            c = c.copy(members[(i + step) % len(members)], buffer, start + i * size, ch=ch)


@algorithm(
    lambda nodes, gpus, in_place=True: AllReduce(nodes * gpus, nodes * gpus, in_place),
    source="MSCCLang, section 2, figure 3",
)
def hierarchical_all_reduce(nodes: int, gpus: int, parallel: int = 1) -> None:
    """Rings inside the nodes, then between them, and back; inside a node `parallel` instances share the data."""
    for rank in range(nodes * gpus):
        chunk(rank, "in", 0, nodes * gpus).copy(rank, "out", 0)
    inside = [range(node * gpus, (node + 1) * gpus) for node in range(nodes)]
    across = [range(gpu, nodes * gpus, gpus) for gpu in range(gpus)]
    for members in inside:
        with parallelize(parallel):
            reduce_around(members, "out", 0, nodes, ch=0)
    for gpu, members in enumerate(across):
        reduce_around(members, "out", gpu * nodes, 1, ch=1)
        gather_around(members, "out", gpu * nodes, 1, ch=1)
    for members in inside:
        with parallelize(parallel):
            gather_around(members, "out", 0, nodes, ch=2)


@algorithm(lambda nodes, gpus, in_place=True: AllGather(nodes * gpus, 1, in_place), source=PCCL)
def hierarchical_all_gather(nodes: int, gpus: int) -> None:
    """Recursive doubling between nodes, then a ring inside each, then a local shuffle into rank order."""
    # scratch holds the blocks by GPU and then by node, as the two phases gather them.
    for rank in range(nodes * gpus):
        node, gpu = divmod(rank, gpus)
        chunk(rank, "in", 0).copy(rank, "scratch", gpu * nodes + node)
    for gpu in range(gpus):
        double(range(gpu, nodes * gpus, gpus), "scratch", gpu * nodes)
    for node in range(nodes):
        gather_around(range(node * gpus, (node + 1) * gpus), "scratch", 0, nodes)
    for rank in range(nodes * gpus):
        for source in range(nodes * gpus):
            node, gpu = divmod(source, gpus)
            chunk(rank, "scratch", gpu * nodes + node).copy(rank, "out", source)


@algorithm(lambda nodes, gpus, in_place=True: ReduceScatter(nodes * gpus, 1, in_place), source=PCCL)
def hierarchical_reduce_scatter(nodes: int, gpus: int) -> None:
    """A local shuffle, then a ring inside each node, then recursive halving between them."""
    for rank in range(nodes * gpus):
        for target in range(nodes * gpus):
            node, gpu = divmod(target, gpus)
            chunk(rank, "in", target).copy(rank, "scratch", gpu * nodes + node)
    for node in range(nodes):
        reduce_around(range(node * gpus, (node + 1) * gpus), "scratch", 0, nodes)
    for gpu in range(gpus):
        halve(range(gpu, nodes * gpus, gpus), "scratch", gpu * nodes)
    for rank in range(nodes * gpus):
        node, gpu = divmod(rank, gpus)
        chunk(rank, "scratch", gpu * nodes + node).copy(rank, "out", 0)


def _dgx1_collective(ranks: int = 8, in_place: bool = True) -> Collective:
    if ranks != 8:
        raise ValueError(f"a DGX-1 has 8 GPUs, not {ranks}")
    return AllGather(8, 1, in_place)


@algorithm(_dgx1_collective, source="SCCL (Cai et al., 2021), table 4; MSCCLang, section 7.5")
def dgx1_all_gather() -> None:
    """1 chunk, 2 steps, 2 rounds: own chunk to all four neighbours, then the partner's to the three of the group."""
    for rank in range(8):
        own = chunk(rank, "in", 0).copy(rank, "out", rank)
        group, partner = rank // 4 * 4, (rank + 4) % 8
        for neighbour in (*range(group, group + 4), partner):
            if neighbour != rank:
                own.copy(neighbour, "out", rank)
    for rank in range(8):
        group, partner = rank // 4 * 4, (rank + 4) % 8
        for neighbour in range(group, group + 4):
            if neighbour != rank:
                chunk(rank, "out", partner).copy(neighbour, "out", partner)
