# SPDX-License-Identifier: Apache-2.0
"""Simulates a joint schedule: a product's tiles and a collective's moves, on a network and on the ranks' GPUs."""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from stretto.cluster.model import GPU
from stretto.simulator.graph import GraphBuilder, execute
from stretto.simulator.network import EventDrivenNetwork, NetworkTopology
from stretto.simulator.schedules.simulate import PACKET_BYTES

if TYPE_CHECKING:
    from stretto.collectives.joint.schedule import JointSchedule, Move

LATENCY = 5e-6
"""Seconds of a launch, a wait or a signal: 2 to 7 us on H100 (docs/decisions/011-copy-engine-collectives.md)."""
_NOBODY, _INPUT = -1, 0  # of `stretto.collectives.joint.schedule`, which imports torch


@dataclass(frozen=True)
class ProductCosts:
    """The cost of a product and its sums on one GPU.

    flops: a second, of a product with the whole GPU; memory: bytes a second, of sums; columns, depth: of the product
    (n and k); itemsize: bytes of an element that travels. movers: the part of the GPU whose programs move rows while
    they do; 0 where copy engines do. latency: seconds of a launch, of a wait or of a signal behind a copy. ValueError
    for figures that cannot be.
    """

    flops: float
    memory: float
    columns: int
    depth: int
    itemsize: int = 2
    movers: float = 0.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "memory"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be a rate a second, greater than 0")
        for name in ("columns", "depth", "itemsize"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency = {self.latency}: must be seconds, at least 0")
        if not 0 <= self.movers < 1:
            raise ValueError(f"movers = {self.movers}: must be a part of the GPU, at least 0 and less than 1")

    @classmethod
    def of_gpu(cls, gpu: GPU, columns: int, depth: int, latency: float = 0.0) -> "ProductCosts":
        """The costs on a cluster's GPU, of 16 bits. ValueError where the cluster does not say its speeds."""
        flops = gpu.empirical_flops.bf16 or gpu.peak_flops.bf16
        memory = gpu.measured_memory_bandwidth or gpu.memory_bandwidth
        if flops is None or memory is None:
            raise ValueError(f"the cluster does not say the bf16 FLOP/s and the memory bandwidth of its {gpu.name}")
        return cls(flops, memory, columns, depth, latency=latency)


class Interval(NamedTuple):
    """The time in which a move or the rows of a tile ran. number: of the move, or of the chunk. Times in seconds."""

    rank: int
    number: int
    start: float
    end: float


@dataclass(frozen=True)
class JointTime:
    """A simulated call. seconds: until the last rank ends; product: of the product alone, with the whole GPU."""

    fidelity: str
    seconds: float
    product: float
    tiles: tuple[Interval, ...]
    moves: tuple[Interval, ...]

    @property
    def exposed(self) -> float:
        """The seconds that the exchange adds to the product."""
        return self.seconds - self.product


def simulate_joint(joint: "JointSchedule", topology: NetworkTopology, costs: ProductCosts) -> JointTime:
    """Simulate a verified joint schedule, event-driven, on ranks 0 to n - 1 of the topology.

    A rank's rows of tiles run one after another, each with the whole GPU, and its moves one after another beside them;
    a sum takes as long as its bytes in memory. ValueError for another number of ranks than the topology has.
    """
    ranks = len(joint.ranks)
    if ranks != topology.devices:
        raise ValueError(f"{joint.name} has {ranks} ranks, the topology {topology.devices} devices: give it {ranks}")
    graph = _JointGraph(joint, costs)
    graph.build()
    execution = execute(graph.builder.build(), EventDrivenNetwork(topology, PACKET_BYTES))
    starts, ends = execution.starts, execution.ends

    def list_intervals(operations: dict[tuple[int, int], list[int]]) -> tuple[Interval, ...]:
        return tuple(
            Interval(rank, number, float(min(starts[at])), float(max(ends[at])))
            for (rank, number), at in operations.items()
        )

    product = 2 * joint.product_rows * costs.columns * costs.depth / costs.flops
    tiles, moves = list_intervals(graph.tiles), list_intervals(graph.moves)
    last = max(interval.end for interval in (*tiles, *moves))
    return JointTime(execution.fidelity, last, product, tiles, moves)


class _JointGraph:
    """The operations of all ranks. tiles: by (rank, chunk), of its rows of tiles; moves: by (rank, number)."""

    def __init__(self, joint: "JointSchedule", costs: ProductCosts) -> None:
        self.builder = GraphBuilder(len(joint.ranks))
        self.tiles: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.moves: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._joint, self._costs = joint, costs
        self._width = costs.itemsize * (costs.depth if joint.is_gather else costs.columns)
        self._signals: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        self._last: list[list[int]] = [[] for _ in joint.ranks]  # of pulled moves, each rank's last

    def build(self) -> None:
        """Add all operations; what others wait for first."""
        if not self._joint.is_gather:
            self._add_tiles()
        done, goes_on = [0] * len(self._joint.ranks), True
        while goes_on:
            goes_on = False
            for rank, plan in enumerate(self._joint.ranks):
                for number, move in enumerate(plan.moves[done[rank] :], done[rank]):
                    waits = [(rank, one.sender, one.channel) for one in move.sources if one.sender != _NOBODY]
                    if not all(wait in self._signals for wait in waits):
                        break
                    self._add_move(rank, number, move, [at for wait in waits for at in self._signals[wait]])
                    done[rank], goes_on = number + 1, True
        if self._joint.is_gather:
            self._add_tiles()

    def _add_tiles(self) -> None:
        for rank in range(len(self._joint.ranks)):
            if self._joint.is_gather:  # its kernel follows the beginning of the call, at which ranks meet
                self.builder.compute(rank, self._costs.latency, stream="tiles")
        of_row = 2 * self._costs.columns * self._costs.depth / (self._costs.flops * (1 - self._costs.movers))
        for rank, plan in enumerate(self._joint.ranks):
            for tile in plan.tiles:
                after = self._signals[rank, tile.sender, tile.channel] if self._joint.is_gather else ()
                seconds = (tile.stop - tile.start) * of_row
                at = self.builder.compute(rank, seconds, stream="tiles", after=after)
                self.tiles[rank, tile.channel].append(at)
                if not self._joint.is_gather:
                    self._signals[rank, rank, tile.channel].append(at)

    def _add_move(self, rank: int, number: int, move: "Move", after: list[int]) -> None:
        rows, holder = move.sources[0].rows, move.sources[0].rank
        size = (rows.stop - rows.start) * self._width
        if self._joint.pulls:  # the rank's copies, one after another; offers between them cost nothing
            after = [*after, *self._last[rank]]
            if holder != _NOBODY:
                after = [self.builder.message(holder, rank, size, after=after)]
            elif rows.area == _INPUT:
                after = [self.builder.compute(rank, 2 * size / self._costs.memory, stream="moves", after=after)]
            if holder != _NOBODY or rows.area == _INPUT:
                self._last[rank] = self.moves[rank, number] = after
            self._signals |= {(to.rank, rank, to.channel): after for to in move.destinations}
            return
        here = [to for to in move.destinations if to.rank == rank]
        if here or len(move.sources) > 1:  # read, and written
            seconds = size * (len(move.sources) + max(1, len(here))) / self._costs.memory + self._costs.latency
            at = self.builder.compute(rank, seconds, stream="moves", after=after)
            self.moves[rank, number].append(at)
            after = [at]
        for to in move.destinations:
            if to.rank == rank:
                self._signals[rank, rank, to.channel] = after
                continue
            if self._costs.latency:
                after = [self.builder.compute(rank, self._costs.latency, stream="moves", after=after)]
            at = self.builder.message(rank, to.rank, size, after=after, stream="moves")
            self.moves[rank, number].append(at)
            self._signals[to.rank, rank, to.channel] = [at]
