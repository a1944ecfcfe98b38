# SPDX-License-Identifier: Apache-2.0
"""Small programs for the executor to run, and what must come out of them."""

import torch

from stretto.collectives.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToNext,
    Broadcast,
    Collective,
    Reduce,
    ReduceScatter,
)
from stretto.collectives.compiler import compile_program
from stretto.collectives.executor import REDUCTIONS
from stretto.collectives.language import chunk, parallelize, trace
from stretto.collectives.schedule import Schedule


def ring_all_reduce(ranks):
    for first in range(ranks):
        sums = chunk((first + 1) % ranks, "in", first)
        for step in range(1, ranks):
            sums = chunk((first + step + 1) % ranks, "in", first).reduce(sums)
        for step in range(1, ranks):
            sums = sums.copy((first + step) % ranks, "in", first)


def all_pairs_all_reduce(ranks):
    """Everyone gathers everyone's chunk in scratch, sums it, and sends the sum to all; out of place."""
    for rank in range(ranks):
        sums = chunk(rank, "in", rank).copy(rank, "out", rank)
        for peer in (peer for peer in range(ranks) if peer != rank):
            sums = sums.reduce(chunk(peer, "in", rank).copy(rank, "scratch", peer))
        for peer in (peer for peer in range(ranks) if peer != rank):
            sums.copy(peer, "out", rank)


def ring_all_gather(ranks):
    with parallelize(2):
        for rank in range(ranks):
            moving = chunk(rank, "in", 0, 2).copy(rank, "out", 2 * rank)
            for step in range(1, ranks):
                moving = moving.copy((rank + step) % ranks, "out", 2 * rank)


def ring_reduce_scatter(ranks):
    for rank in range(ranks):
        sums = chunk((rank + 1) % ranks, "in", 2 * rank, 2)
        for step in range(1, ranks):
            sums = chunk((rank + 1 + step) % ranks, "in", 2 * rank, 2).reduce(sums)
        sums.copy(rank, "out", 0)


def direct_all_to_all(ranks):
    for giver in range(ranks):
        for taker in range(ranks):
            chunk(giver, "in", 2 * taker, 2).copy(taker, "out", 2 * giver)


def chain_broadcast(ranks):
    for index in range(3):
        moving = chunk(1, "in", index).copy(1, "out", index)
        for step in range(1, ranks):
            moving = moving.copy((1 + step) % ranks, "out", index)


def chain_reduce(ranks):
    sums = chunk(0, "in", 0, 2)
    for rank in range(1, ranks):
        sums = chunk(rank, "in", 0, 2).reduce(sums)
    sums.copy(0, "out", 0)


def pass_on(ranks):
    for rank in range(ranks - 1):
        chunk(rank, "in", 0, 2).copy(rank + 1, "out", 0)


PROGRAMS = {
    "ring all-reduce": (ring_all_reduce, lambda ranks: AllReduce(ranks, ranks)),
    "all-pairs all-reduce": (all_pairs_all_reduce, lambda ranks: AllReduce(ranks, ranks, in_place=False)),
    "ring all-gather": (ring_all_gather, lambda ranks: AllGather(ranks, 2)),
    "all-gather out of place": (ring_all_gather, lambda ranks: AllGather(ranks, 2, in_place=False)),
    "ring reduce-scatter": (ring_reduce_scatter, lambda ranks: ReduceScatter(ranks, 2)),
    "reduce-scatter out of place": (ring_reduce_scatter, lambda ranks: ReduceScatter(ranks, 2, in_place=False)),
    "all-to-all": (direct_all_to_all, lambda ranks: AllToAll(ranks, 2)),
    "chain broadcast": (chain_broadcast, lambda ranks: Broadcast(ranks, 3, root=1)),
    "chain reduce": (chain_reduce, lambda ranks: Reduce(ranks, 2)),
    "all-to-next": (pass_on, lambda ranks: AllToNext(ranks, 2)),
}


def compile_collective(program, collective: Collective, name="test", **options) -> Schedule:
    with trace(collective) as traced:
        program(collective.ranks)
    return compile_program(traced.program, name=name, **options)


def compile_named(name: str, ranks: int, **options) -> Schedule:
    program, collective = PROGRAMS[name]
    return compile_collective(program, collective(ranks), name, **options)


def input_blocks(schedule: Schedule) -> int:
    """Count the blocks of equal size, as torch.distributed lays them out, of an input."""
    return schedule.collective.ranks if schedule.collective.name in ("reducescatter", "alltoall") else 1


def make_inputs(schedule: Schedule, block_elements: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Small whole numbers, so that no sum or product rounds."""
    generator = torch.Generator().manual_seed(seed)
    elements = block_elements * input_blocks(schedule)
    low = 0 if dtype is torch.uint8 else -2
    return [torch.randint(low, 4, (elements,), generator=generator).to(dtype) for _ in range(schedule.collective.ranks)]


def expected_outputs(schedule: Schedule, inputs: list[torch.Tensor], reduction="sum") -> list[torch.Tensor | None]:
    """Compute each rank's right output, None where it may be anything."""
    ranks = schedule.collective.ranks
    reduced = inputs[0]
    for tensor in inputs[1:]:
        reduced = REDUCTIONS[reduction](reduced, tensor)
    blocks = len(inputs[0]) // ranks
    match schedule.collective.name:
        case "allreduce":
            return [reduced] * ranks
        case "allgather":
            return [torch.cat(inputs)] * ranks
        case "reducescatter":
            return [reduced[rank * blocks : (rank + 1) * blocks] for rank in range(ranks)]
        case "alltoall":
            return [
                torch.cat([tensor[rank * blocks : (rank + 1) * blocks] for tensor in inputs]) for rank in range(ranks)
            ]
        case "broadcast":
            return [inputs[schedule.collective.root]] * ranks
        case "reduce":
            return [reduced if rank == schedule.collective.root else None for rank in range(ranks)]
        case "alltonext":
            return [None, *inputs[:-1]]
        case name:
            raise AssertionError(name)
