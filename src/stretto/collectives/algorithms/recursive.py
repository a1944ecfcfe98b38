# SPDX-License-Identifier: Apache-2.0
"""Recursive halving and doubling, and binomial trees: log2(ranks) steps. Any number of ranks.

With p the largest power of two that is not above the number of ranks, rank p + i first folds into rank i and is served
by it in the end, and rank i stands for the blocks i and p + i in between (Thakur, Rabenseifner and Gropp, 2005, as
Singh's dissertation, section 6.2.3, uses them between nodes).
"""

from collections.abc import Sequence

from stretto.collectives.algorithm import algorithm
from stretto.collectives.collective import AllGather, AllReduce, Broadcast, Reduce, ReduceScatter
from stretto.collectives.language import chunk

SOURCE = "Thakur, Rabenseifner and Gropp (2005); PCCL (Singh, 2025), section 6.2.3"
BINOMIAL_SOURCE = "Thakur, Rabenseifner and Gropp (2005), section 4"


def halve(members: Sequence[int], buffer: str, start: int, size: int = 1, folded: bool = True) -> None:
    """Reduce-scatter among `members`: member i ends with the sum of block i, `size` chunks at start + i * size.

    All members' blocks are overwritten. folded: whether a member beyond the power of two gets its block in the end;
    else its partner keeps it.
    """
    power = _largest_power(len(members))
    extra = len(members) - power
    everything = len(members) * size
    for i in range(extra):
        chunk(members[i], buffer, start, everything).reduce(chunk(members[power + i], buffer, start, everything))
    distance = power // 2
    while distance >= 1:
        for i in range(power):
            peer = i ^ distance
            # The peer's half of the blocks that both still have.
            first = peer // distance * distance
            for at, count in _runs(first, distance, power, len(members)):
                there = chunk(members[peer], buffer, start + at * size, count * size)
                there.reduce(chunk(members[i], buffer, start + at * size, count * size))
        distance //= 2
    if folded:
        for i in range(extra):
            place = start + (power + i) * size
            chunk(members[i], buffer, place, size).copy(members[power + i], buffer, place)


def double(members: Sequence[int], buffer: str, start: int, size: int = 1, folded: bool = True) -> None:
    """All-gather among `members`: every member ends with block i of each member i, `size` chunks at start + i * size.

    folded: whether a member beyond the power of two has its block at first; else its partner has it.
    """
    power = _largest_power(len(members))
    extra = len(members) - power
    if folded:
        for i in range(extra):
            place = start + (power + i) * size
            chunk(members[power + i], buffer, place, size).copy(members[i], buffer, place)
    distance = 1
    while distance < power:
        for i in range(power):
            first = i // distance * distance
            for at, count in _runs(first, distance, power, len(members)):
                mine = chunk(members[i], buffer, start + at * size, count * size)
                mine.copy(members[i ^ distance], buffer, start + at * size)
        distance *= 2
    for i in range(extra):
        # The partner has its own block already, unless it never gave it away.
        for at, count in _all_but(power + i if folded else None, len(members)):
            chunk(members[i], buffer, start + at * size, count * size).copy(
                members[power + i], buffer, start + at * size
            )


def _largest_power(count: int) -> int:
    return 1 << (count.bit_length() - 1)


def _runs(first: int, count: int, power: int, members: int) -> list[tuple[int, int]]:
    """The blocks that members first .. first + count - 1 stand for, as (first, count) of neighbours."""
    beyond = min(count, members - power - first)
    return [(first, count)] + ([(power + first, beyond)] if beyond > 0 else [])


def _all_but(one: int | None, count: int) -> list[tuple[int, int]]:
    """All blocks but one, as (first, count) of neighbours."""
    if one is None:
        return [(0, count)]
    return [(first, size) for first, size in ((0, one), (one + 1, count - one - 1)) if size]


@algorithm(lambda ranks, in_place=True: AllGather(ranks, 1, in_place), source=SOURCE)
def recursive_doubling_all_gather(ranks: int) -> None:
    """Recursive doubling: in step k every rank exchanges all that it has with the rank 2^k away."""
    for rank in range(ranks):
        chunk(rank, "in", 0).copy(rank, "out", rank)
    double(range(ranks), "out", 0)


@algorithm(lambda ranks, in_place=True: ReduceScatter(ranks, 1, in_place), source=SOURCE)
def recursive_halving_reduce_scatter(ranks: int, in_place: bool = True) -> None:
    """Recursive halving: in each step a rank sends half of its sums to one half as far away as in the step before."""
    if not in_place:
        for rank in range(ranks):
            chunk(rank, "in", 0, ranks).copy(rank, "scratch", 0)
    buffer = "in" if in_place else "scratch"
    halve(range(ranks), buffer, 0)
    for rank in range(ranks):
        chunk(rank, buffer, rank).copy(rank, "out", 0)


@algorithm(lambda ranks, in_place=True: AllReduce(ranks, ranks, in_place), source=SOURCE)
def recursive_halving_all_reduce(ranks: int) -> None:
    """A reduce-scatter by recursive halving, then an all-gather by recursive doubling."""
    for rank in range(ranks):
        chunk(rank, "in", 0, ranks).copy(rank, "out", 0)
    halve(range(ranks), "out", 0, folded=False)
    double(range(ranks), "out", 0, folded=False)


@algorithm(lambda ranks, root=0, in_place=True: Broadcast(ranks, 1, root, in_place), source=BINOMIAL_SOURCE)
def binomial_broadcast(ranks: int, root: int = 0) -> None:
    """A binomial tree: in every step each rank that has the data sends it to one that has not."""
    chunk(root, "in", 0).copy(root, "out", 0)
    distance = 1
    while distance < ranks:
        for i in range(min(distance, ranks - distance)):
            chunk((root + i) % ranks, "out", 0).copy((root + i + distance) % ranks, "out", 0)
        distance *= 2


@algorithm(lambda ranks, root=0, in_place=True: Reduce(ranks, 1, root, in_place), source=BINOMIAL_SOURCE)
def binomial_reduce(ranks: int, root: int = 0) -> None:
    """The broadcast backwards: in every step half of the ranks that hold a sum give it to another."""
    for rank in range(ranks):
        chunk(rank, "in", 0).copy(rank, "out", 0)
    distance = 1
    while distance < ranks:
        for i in range(0, ranks - distance, 2 * distance):
            chunk((root + i) % ranks, "out", 0).reduce(chunk((root + i + distance) % ranks, "out", 0))
        distance *= 2
