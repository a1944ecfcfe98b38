# SPDX-License-Identifier: Apache-2.0
"""Ten algorithms, each with the operators whose collective it implements."""

from stretto.collectives import AllGather, AllReduce, ReduceScatter, Schedule, algorithm, chunk, from_xml, to_xml
from stretto.collectives.algorithms import find

KINDS = {
    "all_gather_matmul": "all-gather",
    "all_gather_attention": "all-gather",
    "matmul_reduce_scatter": "reduce-scatter",
    "matmul_all_reduce": "all-reduce",
}
TWO_LEVEL = {4: (2, 2), 8: (2, 4)}
"""Ranks as (nodes, GPUs of each)."""


def _both_ways(rank, ranks, half):
    """All ranks from this one on: half 0 one way around, half 1 the other (docs/tutorial-kernel.md)."""
    return [(rank + (1 - 2 * half) * hop) % ranks for hop in range(ranks)]


def _double_ring(rank, ranks, half):
    """All ranks from this one on: half 1 around a second ring, of the even ranks and then the odd ones."""
    order = [*range(0, ranks, 2), *range(1, ranks, 2)] if half else [*range(ranks)]
    at = order.index(rank)
    return order[at:] + order[:at]


def _make_rings(name, go_around):
    """An all-gather, a reduce-scatter and an all-reduce whose halves go around rings."""

    def gather(ranks, value, rank, half):
        for other in go_around(rank, ranks, half)[1:]:
            value = value.copy(other, "out", 2 * rank + half)

    def add_up(ranks, rank, half):
        around = [*go_around(rank, ranks, half)[1:], rank]
        total = chunk(around[0], "in", 2 * rank + half)
        for other in around[1:]:
            total = chunk(other, "in", 2 * rank + half).reduce(total)
        return total

    def all_gather(ranks):
        for rank, half in ((rank, half) for rank in range(ranks) for half in (0, 1)):
            gather(ranks, chunk(rank, "in", half).copy(rank, "out", 2 * rank + half), rank, half)

    def reduce_scatter(ranks):
        for rank, half in ((rank, half) for rank in range(ranks) for half in (0, 1)):
            add_up(ranks, rank, half).copy(rank, "out", half)

    def all_reduce(ranks):
        for rank, half in ((rank, half) for rank in range(ranks) for half in (0, 1)):
            gather(ranks, add_up(ranks, rank, half).copy(rank, "out", 2 * rank + half), rank, half)

    return _name_all(name, all_gather, reduce_scatter, all_reduce, chunks=2)


def _make_trees():
    """Binomial trees: a chunk goes up its rank's tree, down it, or both."""

    def broadcast(value, root, ranks, index):
        held, step = {root: value}, 1
        while step < ranks:
            for place in range(min(step, ranks - step)):
                held[(root + step + place) % ranks] = held[(root + place) % ranks].copy(
                    (root + step + place) % ranks, "out", index
                )
            step *= 2

    def add_up(root, ranks, index):
        sums = {place: chunk((root + place) % ranks, "in", index) for place in range(ranks)}
        step = 1
        while step < ranks:
            for place in range(0, ranks - step, 2 * step):
                kept = sums[place] if step > 1 else sums[place].copy((root + place) % ranks, "scratch", index)
                sums[place] = kept.reduce(sums[place + step])
            step *= 2
        return sums[0]

    def all_gather(ranks):
        for rank in range(ranks):
            broadcast(chunk(rank, "in", 0).copy(rank, "out", rank), rank, ranks, rank)

    def reduce_scatter(ranks):
        for rank in range(ranks):
            add_up(rank, ranks, rank).copy(rank, "out", 0)

    def all_reduce(ranks):
        for rank in range(ranks):
            broadcast(add_up(rank, ranks, rank).copy(rank, "out", rank), rank, ranks, rank)

    return _name_all("tree", all_gather, reduce_scatter, all_reduce, chunks=1)


def _name_all(name, all_gather, reduce_scatter, all_reduce, chunks):
    found = {}
    for kind, program, collective in (
        ("all-gather", all_gather, lambda ranks: AllGather(ranks, chunks)),
        ("reduce-scatter", reduce_scatter, lambda ranks: ReduceScatter(ranks, chunks)),
        ("all-reduce", all_reduce, lambda ranks: AllReduce(ranks, chunks * ranks)),
    ):
        program.__name__ = f"{name}_{kind}"
        found[kind] = algorithm(collective)(program)
    return found


def _read_file(kind: str, ranks: int) -> Schedule:
    """As from a file in RCCL's manner: a comment before it, an attribute of its own, and in place."""
    made = to_xml(find(f"ring-{kind}").compile(ranks=ranks, in_place=True, protocol="LL"))
    return from_xml("<!-- of a runtime -->\n" + made.replace("<algo ", '<algo maxcount="1" ', 1))


RINGS = {"double ring": _make_rings("double_ring", _double_ring), "a user's": _make_rings("both_ways", _both_ways)}
TREES = _make_trees()
NAMES = "direct", "ring", "double ring", "recursive", "two levels", "tree", "a user's", "an XML"
OTHERS = "two-step-all-to-all", "all-to-next", "binomial-broadcast"
"""Algorithms of other collectives, which no operator here takes."""
_DIRECT = {"all-gather": "direct", "reduce-scatter": "direct", "all-reduce": "two-shot"}
_RECURSIVE = {
    "all-gather": "recursive-doubling",
    "reduce-scatter": "recursive-halving",
    "all-reduce": "recursive-halving",
}


def make_schedule(name: str, operator: str, ranks: int) -> Schedule | None:
    """The algorithm's schedule for the operator; None where it is for another number of ranks."""
    kind = KINDS[operator]
    match name:
        case "direct":
            return find(f"{_DIRECT[kind]}-{kind}").compile(ranks=ranks)
        case "ring":
            return find(f"ring-{kind}").compile(ranks=ranks)
        case "recursive":
            return find(f"{_RECURSIVE[kind]}-{kind}").compile(ranks=ranks)
        case "two levels":
            if ranks not in TWO_LEVEL:
                return None
            nodes, gpus = TWO_LEVEL[ranks]
            return find(f"hierarchical-{kind}").compile(nodes=nodes, gpus=gpus)
        case "tree":
            return TREES[kind].compile(ranks=ranks)
        case "an XML":
            return _read_file(kind, ranks)
    return RINGS[name][kind].compile(ranks=ranks)


def make_other(name: str, ranks: int) -> Schedule:
    """A schedule of another collective."""
    if name == "binomial-broadcast":
        return find(name).compile(ranks=ranks)
    return find(name).compile(nodes=TWO_LEVEL.get(ranks, (1, ranks))[0], gpus=TWO_LEVEL.get(ranks, (1, ranks))[1])
