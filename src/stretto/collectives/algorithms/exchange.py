# SPDX-License-Identifier: Apache-2.0
"""All-to-all and AllToNext: chunks that go from one rank to one other."""

from stretto.collectives.algorithm import algorithm
from stretto.collectives.collective import AllToAll, AllToNext
from stretto.collectives.language import chunk


@algorithm(lambda ranks, in_place=False: AllToAll(ranks, 1, in_place), source="MSCCLang, section 7.3")
def direct_all_to_all(ranks: int, in_place: bool = False) -> None:
    """Every rank sends every other its chunk; in place, through scratch, or arrivals would overwrite unsent ones."""
    arrivals = "scratch" if in_place else "out"
    for step in range(ranks):
        for source in range(ranks):
            target = (source + step) % ranks
            chunk(source, "in", target).copy(target, arrivals, source)
    if in_place:
        for rank in range(ranks):
            chunk(rank, "scratch", 0, ranks).copy(rank, "out", 0)


@algorithm(
    lambda nodes, gpus, in_place=False: AllToAll(nodes * gpus, 1, in_place), source="MSCCLang, section 7.3, figure 9"
)
def two_step_all_to_all(nodes: int, gpus: int, in_place: bool = False) -> None:
    """Chunks for one GPU of another node are brought together in this node, and cross in one message."""
    arrivals = "scratch" if in_place else "out"
    # In place, what arrives takes the first chunks of scratch, and what is brought together those after it.
    together = nodes * gpus if in_place else 0
    for node in range(nodes):
        for target in range(nodes * gpus):
            away, gpu = divmod(target, gpus)
            for source in range(node * gpus, (node + 1) * gpus):
                c = chunk(source, "in", target)
                if away == node:
                    c.copy(target, arrivals, source)
                else:
                    c.copy(node * gpus + gpu, "scratch", together + away * gpus + source % gpus)
    for node in range(nodes):
        for gpu in range(gpus):
            for away in range(nodes):
                if away != node:
                    c = chunk(node * gpus + gpu, "scratch", together + away * gpus, gpus)
                    c.copy(away * gpus + gpu, arrivals, node * gpus)
    if in_place:
        for rank in range(nodes * gpus):
            chunk(rank, "scratch", 0, nodes * gpus).copy(rank, "out", 0)


@algorithm(lambda nodes, gpus: AllToNext(nodes * gpus, gpus), source="MSCCLang, section 7.4, figure 10")
def all_to_next(nodes: int, gpus: int) -> None:
    """Each rank sends to the next; where the next is in another node, all GPUs of the node help to send."""
    for rank in range(nodes * gpus - 1):
        node, gpu = divmod(rank, gpus)
        if gpu < gpus - 1:
            chunk(rank, "in", 0, gpus).copy(rank + 1, "out", 0)
            continue
        for helper in range(gpus):
            c = chunk(rank, "in", helper)
            if helper != gpu:
                c = c.copy(node * gpus + helper, "scratch", 0)
            across = (node + 1) * gpus + helper
            if helper == 0:
                c.copy(across, "out", 0)
            else:
                c.copy(across, "scratch", 1).copy(rank + 1, "out", helper)
