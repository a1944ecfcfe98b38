# SPDX-License-Identifier: Apache-2.0
"""Rings: every rank passes chunks on to the next one. Bandwidth-optimal, in 2 (ranks - 1) steps for an all-reduce."""

from stretto.collectives.algorithm import algorithm
from stretto.collectives.collective import AllGather, AllReduce, ReduceScatter
from stretto.collectives.language import chunk


@algorithm(lambda ranks, in_place=True: AllReduce(ranks, ranks, in_place), source="MSCCLang, section 7.1.1")
def ring_all_reduce(ranks: int, channels: int = 1) -> None:
    """Each chunk goes around once to be summed and once to be copied; chunks take turns on the channels."""
    _require_channels(channels)
    for index in range(ranks):
        c = chunk((index + 1) % ranks, "in", index)
        for step in range(2, ranks):
            c = chunk((index + step) % ranks, "in", index).reduce(c, ch=index % channels)
        last = chunk(index, "in", index).copy(index, "out", index)
        c = last.reduce(c, ch=index % channels) if ranks > 1 else last
        for step in range(1, ranks):
            c = c.copy((index + step) % ranks, "out", index, ch=index % channels)


@algorithm(lambda ranks, in_place=True: AllGather(ranks, 1, in_place), source="MSCCLang, figure 3")
def ring_all_gather(ranks: int, channels: int = 1) -> None:
    """Each rank's chunk goes around the ring once."""
    _require_channels(channels)
    for rank in range(ranks):
        c = chunk(rank, "in", 0).copy(rank, "out", rank)
        for step in range(1, ranks):
            c = c.copy((rank + step) % ranks, "out", rank, ch=rank % channels)


@algorithm(lambda ranks, in_place=True: ReduceScatter(ranks, 1, in_place), source="MSCCLang, figure 3")
def ring_reduce_scatter(ranks: int, channels: int = 1) -> None:
    """Each chunk goes around the ring once, ends on its own rank, and is summed on the way."""
    _require_channels(channels)
    for index in range(ranks):
        c = chunk((index + 1) % ranks, "in", index)
        for step in range(2, ranks):
            c = chunk((index + step) % ranks, "in", index).reduce(c, ch=index % channels)
        last = chunk(index, "in", index).copy(index, "out", 0)
        if ranks > 1:
            last.reduce(c, ch=index % channels)


def _require_channels(channels: int) -> None:
    if channels < 1:
        raise ValueError(f"a ring has at least 1 channel, not {channels}")
