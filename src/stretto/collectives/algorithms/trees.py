"""Binomial trees: a broadcast and a reduce in log2(ranks) steps, from and to any root."""

from stretto.collectives.algorithm import algorithm
from stretto.collectives.collective import Broadcast, Reduce
from stretto.collectives.language import chunk

SOURCE = "Thakur, Rabenseifner and Gropp (2005), section 4"


@algorithm(lambda ranks, root=0, in_place=True: Broadcast(ranks, 1, root, in_place), source=SOURCE)
def binomial_broadcast(ranks: int, root: int = 0) -> None:
    """In every step each rank that has the data sends it to one that has not."""
    chunk(root, "in", 0).copy(root, "out", 0)
    distance = 1
    while distance < ranks:
        for i in range(min(distance, ranks - distance)):
            chunk((root + i) % ranks, "out", 0).copy((root + i + distance) % ranks, "out", 0)
        distance *= 2


@algorithm(lambda ranks, root=0, in_place=True: Reduce(ranks, 1, root, in_place), source=SOURCE)
def binomial_reduce(ranks: int, root: int = 0) -> None:
    """The broadcast backwards: in every step half of the ranks that hold a sum give it to another."""
    for rank in range(ranks):
        chunk(rank, "in", 0).copy(rank, "out", 0)
    distance = 1
    while distance < ranks:
        for i in range(0, ranks - distance, 2 * distance):
            chunk((root + i) % ranks, "out", 0).reduce(chunk((root + i + distance) % ranks, "out", 0))
        distance *= 2
