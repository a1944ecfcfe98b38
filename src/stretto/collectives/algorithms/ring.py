# SPDX-License-Identifier: Apache-2.0
"""Rings: every rank passes chunks on to the next one. Bandwidth-optimal, in 2 (ranks - 1) steps for an all-reduce.

order: the ranks as they follow each other on the ring; None: by their numbers.
"""

from collections.abc import Sequence

from stretto.collectives.algorithm import algorithm
from stretto.collectives.collective import AllGather, AllReduce, ReduceScatter
from stretto.collectives.language import chunk


@algorithm(lambda ranks, in_place=True: AllReduce(ranks, ranks, in_place), source="MSCCLang, section 7.1.1")
def ring_all_reduce(ranks: int, channels: int = 1, order: Sequence[int] | None = None) -> None:
    """Each chunk goes around once to be summed and once to be copied; chunks take turns on the channels."""
    for index, around in _go_around(ranks, channels, order):
        c = chunk(around[1 % ranks], "in", index)
        for rank in around[2:]:
            c = chunk(rank, "in", index).reduce(c, ch=index % channels)
        last = chunk(index, "in", index).copy(index, "out", index)
        c = last.reduce(c, ch=index % channels) if ranks > 1 else last
        for rank in around[1:]:
            c = c.copy(rank, "out", index, ch=index % channels)


@algorithm(lambda ranks, in_place=True: AllGather(ranks, 1, in_place), source="MSCCLang, figure 3")
def ring_all_gather(ranks: int, channels: int = 1, order: Sequence[int] | None = None) -> None:
    """Each rank's chunk goes around the ring once."""
    for index, around in _go_around(ranks, channels, order):
        c = chunk(index, "in", 0).copy(index, "out", index)
        for rank in around[1:]:
            c = c.copy(rank, "out", index, ch=index % channels)


@algorithm(lambda ranks, in_place=True: ReduceScatter(ranks, 1, in_place), source="MSCCLang, figure 3")
def ring_reduce_scatter(ranks: int, channels: int = 1, order: Sequence[int] | None = None) -> None:
    """Each chunk goes around the ring once, ends on its own rank, and is summed on the way."""
    for index, around in _go_around(ranks, channels, order):
        c = chunk(around[1 % ranks], "in", index)
        for rank in around[2:]:
            c = chunk(rank, "in", index).reduce(c, ch=index % channels)
        last = chunk(index, "in", index).copy(index, "out", 0)
        if ranks > 1:
            last.reduce(c, ch=index % channels)


def _go_around(ranks: int, channels: int, order: Sequence[int] | None) -> list[tuple[int, list[int]]]:
    """Return for each rank all ranks from it on around the ring."""
    if channels < 1:
        raise ValueError(f"a ring has at least 1 channel, not {channels}")
    places = list(range(ranks)) if order is None else list(order) if isinstance(order, Sequence) else [order]
    if sorted(places) != list(range(ranks)):
        raise ValueError(f"a ring's order has each rank from 0 to {ranks - 1} once, not {order!r}")
    at = {rank: place for place, rank in enumerate(places)}
    return [(rank, places[at[rank] :] + places[: at[rank]]) for rank in range(ranks)]
