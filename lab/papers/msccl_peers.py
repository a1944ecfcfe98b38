# SPDX-License-Identifier: Apache-2.0
"""MSCCLang's baselines as schedules: NCCL's rings and trees, hand-written exchanges, and SCCL's copies."""

from collections.abc import Iterable, Sequence

from stretto.collectives.algorithm import algorithm
from stretto.collectives.algorithms.hierarchical import gather_around, reduce_around
from stretto.collectives.collective import AllReduce, AllToAll, AllToNext, Buffer, Collective
from stretto.collectives.language import chunk
from stretto.collectives.schedule import RankProgram, Schedule, Step, StepType, ThreadBlock
from stretto.simulator.network import NetworkTopology
from stretto.simulator.network.topology import DirectedLink

DGX1_LINK = 25e9  # bytes/s, one direction, of one NVLink of a V100
# NVIDIA DGX-1 with Tesla V100 system architecture (2017), figure 4: pairs of GPUs, and their NVLinks.
DGX1_PAIRS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1, (2, 6): 2, (3, 7): 2,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1,
}  # fmt: skip


def dgx1_topology(latency: float) -> NetworkTopology:
    """The hybrid cube mesh of a DGX-1 with 8 V100."""
    links = [
        DirectedLink(source, target, count * DGX1_LINK, latency)
        for pair, count in DGX1_PAIRS.items()
        for source, target in (pair, pair[::-1])
    ]
    return NetworkTopology("dgx-1v", 8, links)


@algorithm(
    lambda nodes, gpus, rings, in_place=True: AllReduce(nodes * gpus, nodes * gpus * rings, in_place),
    source="NCCL's rings between nodes: each enters and leaves a node at another GPU, so that each uses another NIC",
)
def rotated_rings_all_reduce(nodes: int, gpus: int, rings: int) -> None:
    """A ring a NIC of a node, each on its own channel and its own part of the data."""
    for ring in range(rings):
        first = ring * gpus // rings
        members = [node * gpus + (place + first) % gpus for node in range(nodes) for place in range(gpus)]
        reduce_around(members, "in", ring * len(members), 1, ch=ring)
        gather_around(members, "in", ring * len(members), 1, ch=ring)


@algorithm(
    lambda nodes, gpus, in_place=True: AllReduce(nodes * gpus, gpus, in_place),
    source="NCCL's trees on two nodes: a chain in each node, and one link between their ends",
)
def chained_trees_all_reduce(nodes: int, gpus: int) -> None:
    """A tree a GPU of a node: reduced along a chain in each node, over to the other node, and back along the chains."""
    if nodes != 2:
        raise ValueError(f"these trees join 2 nodes, not {nodes}")
    for tree in range(gpus):
        chains = [[node * gpus + (place + tree) % gpus for place in range(gpus)] for node in range(nodes)]
        for chain in chains:
            c = chunk(chain[-1], "in", tree)
            for rank in reversed(chain[:-1]):
                c = chunk(rank, "in", tree).reduce(c, ch=tree)
        root, other = (chains[tree % 2][0], chains[1 - tree % 2][0])
        c = chunk(root, "in", tree).reduce(chunk(other, "in", tree), ch=tree)
        c.copy(other, "in", tree, ch=tree)
        for chain in chains:
            c = chunk(chain[0], "in", tree)
            for rank in chain[1:]:
                c = c.copy(rank, "in", tree, ch=tree)


def exchange(name: str, collective: Collective, messages: Iterable[tuple[int, int, int]]) -> Schedule:
    """A schedule of (source, target, chunks) messages, all at once, each by a thread block of its own at either end."""
    blocks: list[list[ThreadBlock]] = [[] for _ in range(collective.ranks)]
    for source, target, chunks in messages:
        send = Step(StepType.SEND, Buffer.IN, 0, size=chunks)
        receive = Step(StepType.RECEIVE, destination_buffer=Buffer.OUT, destination=0, size=chunks)
        blocks[source].append(ThreadBlock(target, None, 0, (send,)))
        blocks[target].append(ThreadBlock(None, source, 0, (receive,)))
    programs = tuple(RankProgram(collective.input_chunks, collective.output_chunks, 0, tuple(own)) for own in blocks)
    return Schedule(name, collective, "Simple", programs, in_place=False, out_of_place=True)


def two_step_exchanges(nodes: int, gpus: int) -> tuple[Schedule, Schedule]:
    """The two kernels of sends and receives of a hand-written two-step all-to-all: inside the nodes, then between."""
    ranks = range(nodes * gpus)
    collective = AllToAll(len(ranks), 1)
    inside = [(source, target, nodes) for source in ranks for target in _node_of(source, gpus) if target != source]
    between = [
        (source, target, gpus) for source in ranks for target in ranks[source % gpus :: gpus] if target != source
    ]
    return exchange("inside", collective, inside), exchange("between", collective, between)


def direct_sends(ranks: int, chunks: int) -> Schedule:
    """AllToNext as each GPU's one send of its whole buffer to the next."""
    return exchange("direct-sends", AllToNext(ranks, chunks), ((rank, rank + 1, chunks) for rank in range(ranks - 1)))


def _node_of(rank: int, gpus: int) -> Sequence[int]:
    return range(rank // gpus * gpus, rank // gpus * gpus + gpus)
