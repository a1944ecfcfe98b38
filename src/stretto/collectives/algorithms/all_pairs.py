# SPDX-License-Identifier: Apache-2.0
"""All pairs: every rank sends to every other rank directly. Few steps, for small sizes on fully connected ranks."""

from stretto.collectives.algorithm import algorithm
from stretto.collectives.collective import AllGather, AllReduce, ReduceScatter
from stretto.collectives.language import Reference, chunk


@algorithm(lambda ranks, in_place=True: AllReduce(ranks, 1, in_place), source="MSCCLang, section 7.1.2, in one step")
def one_shot_all_reduce(ranks: int) -> None:
    """Every rank gets every other's whole buffer, and all add in rank order, so that all hold the same bits."""
    for source in range(ranks):
        chunk(source, "in", 0).copy(source, "out", 0)
        for rank in range(ranks):
            if rank != source:
                chunk(source, "out", 0).copy(rank, "scratch", source)
    for rank in range(ranks):
        _add_in_rank_order(rank, ranks, chunk(rank, "out", 0))


@algorithm(lambda ranks, in_place=True: AllReduce(ranks, ranks, in_place), source="MSCCLang, section 7.1.2")
def two_shot_all_reduce(ranks: int) -> None:
    """Every rank gets its chunk from all others, sums it, and sends the sum to all others."""
    for rank in range(ranks):
        own = chunk(rank, "in", rank).copy(rank, "out", rank)
        for source in range(ranks):
            if source != rank:
                chunk(source, "in", rank).copy(rank, "scratch", source)
        total = _add_in_rank_order(rank, ranks, own)
        for other in range(ranks):
            if other != rank:
                total.copy(other, "out", rank)


@algorithm(lambda ranks, in_place=True: AllGather(ranks, 1, in_place), source="MSCCLang, section 7.1.2")
def direct_all_gather(ranks: int) -> None:
    """Every rank sends its chunk to every other."""
    for rank in range(ranks):
        own = chunk(rank, "in", 0).copy(rank, "out", rank)
        for step in range(1, ranks):
            own.copy((rank + step) % ranks, "out", rank)


@algorithm(lambda ranks, in_place=True: ReduceScatter(ranks, 1, in_place), source="MSCCLang, section 7.1.2")
def direct_reduce_scatter(ranks: int) -> None:
    """Every rank gets its chunk from all others, and adds in rank order."""
    for rank in range(ranks):
        own = chunk(rank, "in", rank).copy(rank, "out", 0)
        for source in range(ranks):
            if source != rank:
                chunk(source, "in", rank).copy(rank, "scratch", source)
        _add_in_rank_order(rank, ranks, own)


def _add_in_rank_order(rank: int, ranks: int, own: Reference) -> Reference:
    """The sum, into `own`, of what scratch[source] holds of each other rank: ((0 + 1) + 2) + ... on every rank."""
    if rank > 0:
        before = chunk(rank, "scratch", 0)
        for source in range(1, rank):
            before = before.reduce(chunk(rank, "scratch", source))
        own = own.reduce(before)
    for source in range(rank + 1, ranks):
        own = own.reduce(chunk(rank, "scratch", source))
    return own
