# SPDX-License-Identifier: Apache-2.0
"""The all-to-all of pooled vectors on a network, as one collective or slice by slice.

On a torus there are two: "direct", in which each message takes a shortest path, and "by-dimension", in which it stops
at the rank of the sender's row that is in the receiver's column: one all-to-all a dimension, as ASTRA-sim has them on
networks of several dimensions. The slices of a fused kernel take the same ways.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stretto.simulator.collectives import add_collective, closed_form_seconds
from stretto.simulator.graph import GraphBuilder
from stretto.simulator.network.topology import NetworkTopology

DIRECT, BY_DIMENSION = "direct", "by-dimension"
EXCHANGES = (DIRECT, BY_DIMENSION)
CHUNKS = 8  # of a collective: what a rank sends to another takes all their shortest paths, and not one of them


@dataclass(frozen=True)
class Slice:
    """A part of the data that a rank sends to another: the receiver, and the index of the part."""

    peer: int
    part: float


class Exchange(ABC):
    """Exchanges of vectors and reductions of gradients between ranks.

    kind: direct or by-dimension. ranks: those that are simulated, of the `world`. slices: the number of slices of a
    fused kernel for each pair of ranks. window: the maximum number of slices of a rank in flight; None: any number.
    """

    def __init__(
        self, topology: NetworkTopology, kind: str, ranks: Sequence[int], slices: int, window: int | None
    ) -> None:
        self.world, self.ranks, self.window = topology.devices, ranks, window
        self._slices, self._kind = slices, kind
        sizes = torus_sizes(topology)
        assert kind == DIRECT or len(sizes) == 2, f"{topology.name} is no torus of two dimensions"
        self._columns = sizes[-1] if len(sizes) == 2 else 1
        self._algorithm = "direct" if kind == DIRECT else "two-level-direct"
        # The all-reduce of the MLPs' gradients is by rows and then columns of a torus, else a ring of all ranks.
        self._reduction_columns: int | None = sizes[-1] if len(sizes) == 2 else None
        self._reduction = "ring" if self._reduction_columns is None else "two-level-ring"

    @abstractmethod
    def slices(self, rank: int) -> Iterator[Slice]:
        """Yield a rank's slices in the order in which a fused kernel makes them: one for each other rank, and again."""

    @abstractmethod
    def send(self, builder: GraphBuilder, rank: int, slice: Slice, pair_bytes: float, after: Sequence[int]) -> int:
        """Send a slice. Returns the operation that ends when it has arrived."""

    @abstractmethod
    def all_to_all(self, builder: GraphBuilder, pair_bytes: float, after: Sequence[int]) -> list[int]:
        """Exchange everything in one collective. `after` and what returns are an operation for each of `ranks`."""

    @abstractmethod
    def all_reduce(self, builder: GraphBuilder, num_bytes: float, after: Sequence[Sequence[int]]) -> list[int]:
        """Sum gradients of so many bytes over all ranks."""


class MessageExchange(Exchange):
    """All ranks, with each message on the network (event-driven)."""

    def __init__(self, topology: NetworkTopology, kind: str, slices_a_pair: int, window: int | None) -> None:
        super().__init__(topology, kind, range(topology.devices), slices_a_pair, window)

    def slices(self, rank: int) -> Iterator[Slice]:
        # Of every rank the first slice, the next rank first, before any rank's second one.
        for _ in range(self._slices):
            for distance in range(1, self.world):
                yield Slice((rank + distance) % self.world, 1 / self._slices)

    def send(self, builder: GraphBuilder, rank: int, slice: Slice, pair_bytes: float, after: Sequence[int]) -> int:
        size = slice.part * pair_bytes
        if self._kind == BY_DIMENSION:
            stop = rank // self._columns * self._columns + slice.peer % self._columns
            if stop not in (rank, slice.peer):
                first = builder.message(rank, stop, size, after=after)
                return builder.message(stop, slice.peer, size, after=[first])
        return builder.message(rank, slice.peer, size, after=after)

    def all_to_all(self, builder: GraphBuilder, pair_bytes: float, after: Sequence[int]) -> list[int]:
        return add_collective(
            builder,
            "all_to_all",
            self._algorithm,
            self.ranks,
            pair_bytes * self.world,
            after=[[each] for each in after],
            ranks_per_node=self._columns,
            in_node="direct",
            splits=CHUNKS,
        )

    def all_reduce(self, builder: GraphBuilder, num_bytes: float, after: Sequence[Sequence[int]]) -> list[int]:
        return add_collective(
            builder,
            "all_reduce",
            self._reduction,
            self.ranks,
            num_bytes,
            after=after,
            ranks_per_node=self._reduction_columns,
        )


class FormulaExchange(Exchange):
    """One rank for all, which are alike, and exchanges that take a formula's time (closed-form).

    The all-to-all and the all-reduce take `closed_form_seconds` and do not disturb each other. Slices go one after
    another, all together in the time of the collective.
    """

    def __init__(self, topology: NetworkTopology, kind: str, slices: int) -> None:
        # The wire itself takes one slice after another, so the window holds all of them.
        super().__init__(topology, kind, (0,), slices, window=slices)
        self._topology = topology
        self._latency = self._seconds(0.0)
        self._slope = self._seconds(1.0) - self._latency  # a byte of a pair; the formula is linear

    def slices(self, rank: int) -> Iterator[Slice]:
        yield from (Slice(rank, 1 / self._slices) for _ in range(self._slices))  # each is a part for every rank

    def send(self, builder: GraphBuilder, rank: int, slice: Slice, pair_bytes: float, after: Sequence[int]) -> int:
        # The latency comes after the wire is free for the next slice.
        wire = self._slope * pair_bytes * slice.part
        sent = builder.compute(rank, wire, stream="all_to_all", after=after, category="communication")
        return builder.compute(
            rank, self._latency, stream=f"latency {len(builder)}", after=[sent], category="communication"
        )

    def all_to_all(self, builder: GraphBuilder, pair_bytes: float, after: Sequence[int]) -> list[int]:
        seconds = self._seconds(pair_bytes)
        return [builder.compute(0, seconds, stream="all_to_all", after=after, category="communication")]

    def all_reduce(self, builder: GraphBuilder, num_bytes: float, after: Sequence[Sequence[int]]) -> list[int]:
        columns = self._reduction_columns
        seconds = closed_form_seconds("all_reduce", self._reduction, self._topology, num_bytes, ranks_per_node=columns)
        return [builder.compute(0, seconds, stream="all_reduce", after=after[0], category="communication")]

    def _seconds(self, pair_bytes: float) -> float:
        return closed_form_seconds(
            "all_to_all",
            self._algorithm,
            self._topology,
            pair_bytes * self.world,
            ranks_per_node=self._columns,
            in_node="direct",
        )


def torus_sizes(topology: NetworkTopology) -> tuple[int, ...]:
    """The sizes of a torus's dimensions; () for another network."""
    found = re.fullmatch(r"torus:(\d+(?:x\d+)*)", topology.name)
    sizes = tuple(map(int, found[1].split("x"))) if found else ()
    return sizes if math.prod(sizes) == topology.devices else ()
