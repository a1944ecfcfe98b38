"""The steps between nodes, ring and recursive, as values: what to send whom, and where what comes belongs.

Both work on N slots of one buffer, N nodes. On node n, slot i belongs to node (n + i) mod N: with the slots turned so,
every step is the same on every node, and what a message carries lies together. The turn is undone by the shuffle, which
is there anyway.

A reduce-scatter is an all-gather backwards: where that sends a slot and receives another, this one adds what that
would have sent to where that had it from. So one list of steps says both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Between = Literal["ring", "recursive"]


@dataclass(frozen=True)
class Step:
    """One step of an all-gather on node n of N.

    Slots `source` to `source + blocks - 1` go to node n - distance, and as many from node n + distance come into
    `target` and following. In a reduce-scatter, `target` and following go to node n + distance, and what comes from
    node n - distance is added into `source` and following.
    """

    distance: int
    source: int
    target: int
    blocks: int


def all_gather_steps(algorithm: Between, nodes: int) -> tuple[Step, ...]:
    """The steps of an all-gather of one slot a node; before it, a node has its slot 0, after it all of them.

    ring: N - 1 steps of one slot. recursive: ceil(log2 N) steps, which double what a node has until it has all:
    recursive doubling (Singh, section 6.2.3). That pairs nodes that differ in one bit of their number, and so
    needs N to be a power of two; here each step's partners lie `distance` apart on a ring (Bruck et al., "Efficient
    algorithms for all-to-all communications in multiport message-passing systems", 1997), which takes as many steps
    and bytes then, and works for every N, with N - 1 slots sent by each node in any case.
    """
    return tuple(_ring(nodes) if algorithm == "ring" else _recursive(nodes))


def reduce_scatter_steps(algorithm: Between, nodes: int) -> tuple[Step, ...]:
    """The steps of a reduce-scatter, after which slot 0 of a node is the sum of all nodes' slots for it.

    recursive: recursive halving (section 6.2.3), for every N as `all_gather_steps`.
    """
    return all_gather_steps(algorithm, nodes)[::-1]


def _ring(nodes: int) -> Iterator[Step]:
    for slot in range(nodes - 1):
        yield Step(distance=1, source=slot, target=slot + 1, blocks=1)


def _recursive(nodes: int) -> Iterator[Step]:
    held = 1
    while held < nodes:
        blocks = min(held, nodes - held)
        yield Step(distance=held, source=0, target=held, blocks=blocks)
        held += blocks
