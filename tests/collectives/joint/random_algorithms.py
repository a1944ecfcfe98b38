# SPDX-License-Identifier: Apache-2.0
"""Random algorithms of the operators' collectives: each chunk goes up a random tree, down one, both, or along a way."""

from stretto.collectives import AllGather, AllReduce, AllToAll, ReduceScatter, Schedule, chunk, compile_program, trace

COLLECTIVES = {
    "all_gather_matmul": AllGather,
    "all_gather_attention": AllGather,
    "matmul_reduce_scatter": ReduceScatter,
    "matmul_all_reduce": AllReduce,
}


def random_schedule(rng, operator: str, ranks: int, chunks: int) -> Schedule:
    """A schedule of the operator's collective, with so many chunks a block, in place or not."""
    kind = COLLECTIVES[operator]
    collective = kind(ranks, chunks, in_place=rng.random() < 0.5)
    with trace(collective) as traced:
        jobs = list(range(collective.chunks_per_loop))
        rng.shuffle(jobs)
        for index in jobs:
            if kind is AllGather:
                root, within = divmod(index, chunks)
                _broadcast(rng, chunk(root, "in", within).copy(root, "out", index), root, ranks, index)
            elif kind is ReduceScatter:
                root, within = divmod(index, chunks)
                _reduce(rng, root, ranks, index).copy(root, "out", within)
            else:
                root = rng.randrange(ranks)
                _broadcast(rng, _reduce(rng, root, ranks, index).copy(root, "out", index), root, ranks, index)
    return compile_program(traced.program, name="random")


def _broadcast(rng, value, root, ranks, index):
    """Copy a chunk to all ranks' outputs, each from a rank that has it."""
    held, missing = {root: value}, [rank for rank in range(ranks) if rank != root]
    rng.shuffle(missing)
    for rank in missing:
        held[rank] = held[rng.choice(list(held))].copy(rank, "out", index)


def _reduce(rng, root, ranks, index):
    """Add all ranks' chunks up to the root, over a random tree, and return the sum in the root's scratch."""
    sums = {rank: chunk(rank, "in", index).copy(rank, "scratch", index) for rank in range(ranks)}
    while len(sums) > 1:
        child = rng.choice([rank for rank in sums if rank != root])
        parent = rng.choice([rank for rank in sums if rank != child])
        sums[parent] = sums[parent].reduce(sums.pop(child))
    return sums[root]


def random_all_to_all(rng, ranks: int, chunks: int) -> Schedule:
    """A schedule of an all-to-all of so many chunks a block, each of which goes by up to two other ranks."""
    with trace(AllToAll(ranks, chunks)) as traced:
        jobs = [(source, index) for source in range(ranks) for index in range(ranks * chunks)]
        rng.shuffle(jobs)
        for number, (source, index) in enumerate(jobs):
            target, piece = divmod(index, chunks)
            value = chunk(source, "in", index)
            for _ in range(rng.choice([0, 0, 1, 2])):
                value = value.copy(rng.choice([rank for rank in range(ranks) if rank != value.rank]), "scratch", number)
            value.copy(target, "out", source * chunks + piece)
    return compile_program(traced.program, name="random")
