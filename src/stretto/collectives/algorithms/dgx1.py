"""A DGX-1: 8 GPUs in two groups of four that are linked to each other, and each to its partner in the other group."""

from stretto.collectives.algorithm import algorithm
from stretto.collectives.collective import AllGather, Collective
from stretto.collectives.language import chunk


def _collective(ranks: int = 8, in_place: bool = True) -> Collective:
    if ranks != 8:
        raise ValueError(f"a DGX-1 has 8 GPUs, not {ranks}")
    return AllGather(8, 1, in_place)


@algorithm(_collective, source="SCCL (Cai et al., 2021), table 4; MSCCLang, section 7.5")
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
