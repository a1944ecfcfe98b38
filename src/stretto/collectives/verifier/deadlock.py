# SPDX-License-Identifier: Apache-2.0
"""Checks freedom from deadlock: with so many FIFO slots a connection, no step waits for itself around a cycle.

Thread blocks run over a chunk tile by tile, and may be tiles apart. That changes nothing: messages of one tile are
all taken before the next tile's first receive, so in the oldest tile that is not done, only the waits of this graph
hold anything up.
"""

from stretto.collectives.verifier.graph import Graph, linear_order


def find_min_slots(graph: Graph) -> int | None:
    """The smallest number of FIFO slots a connection at which every step can run, None if no number is enough."""
    most = max((len(sends) for sends, _ in graph.connections.values()), default=0)
    low, high = 1, 1
    while not _runs(graph, high):
        if high >= most:
            return None
        low, high = high + 1, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        if _runs(graph, middle):
            high = middle
        else:
            low = middle + 1
    return high


def _runs(graph: Graph, slots: int) -> bool:
    return not linear_order(graph, slots)[1]


def describe_deadlock(graph: Graph, slots: int, min_slots: int | None) -> str:
    """A cycle of waits with so many slots, step by step, and what would break it."""
    _, left = linear_order(graph, slots)
    stuck = set(left)
    freeing: dict[int, int] = {}
    for sends, receives in graph.connections.values():
        freeing.update(zip(sends[slots:], receives, strict=False))
    path: dict[int, str] = {}  # in the order of its steps
    at = left[0]
    while at not in path:
        following, path[at] = _why_stuck(graph, at, stuck, freeing)
        at = following
    cycle = list(path.items())[list(path).index(at) :]
    # Of consecutive steps of one thread block, only the ends matter.
    waits = [
        f"{graph.name(number)} {reason}"
        for position, (number, reason) in enumerate(cycle)
        if reason != _AFTER or position == 0 or cycle[position - 1][1] != _AFTER
    ]
    remedy = (
        f"{min_slots} slots are enough" if min_slots is not None else "no number of slots is enough: change the order"
    )
    shown = "; ".join(waits[:8]) + (f"; ... ({len(waits)} waits)" if len(waits) > 8 else "")
    return f"deadlock with {slots} FIFO slots a connection: {shown}. {remedy}"


_AFTER = "comes after the step before it"


def _why_stuck(graph: Graph, number: int, stuck: set[int], freeing: dict[int, int]) -> tuple[int, str]:
    """A step that this one waits for forever, and the kind of wait."""
    if not graph.first[number] and number - 1 in stuck:
        return number - 1, _AFTER
    if graph.released_by[number] in stuck:
        return graph.released_by[number], f"waits for {graph.name(graph.released_by[number])}"
    if graph.sender[number] in stuck:
        return graph.sender[number], f"receives what {graph.name(graph.sender[number])} sends"
    freed = freeing[number]
    return freed, f"needs the slot that {graph.name(freed)} frees"
