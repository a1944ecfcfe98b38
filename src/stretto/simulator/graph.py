# SPDX-License-Identifier: Apache-2.0
"""Graphs of computation and messages, and their execution on a network.

    builder = GraphBuilder(ranks=2)
    forward = builder.compute(0, seconds=1e-3)
    builder.message(0, 1, num_bytes=1 << 20, after=[forward])
    execution = execute(builder.build(), EventDrivenNetwork(topology))

Operations on one stream of a rank run one at a time, in the order in which they were added, as on a CUDA stream.
"""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from stretto.simulator.events import NANOSECONDS, EventQueue
from stretto.simulator.network.closed_form import NetworkModel


class OperationType(IntEnum):
    """Kind of an operation: a computation, a message, or a join, which takes no time."""

    COMPUTE = 0
    MESSAGE = 1
    JOIN = 2


@dataclass(frozen=True, eq=False)
class ExecutionGraph:
    """Operations by number, as columns. `GraphBuilder.build` makes it.

    sizes: of a computation its seconds, of a message its bytes. ranks: that which computes, or sends; -1: none.
    targets: that which receives; -1: none. streams: index into `stream_names`; -1: none. categories: index into
    `category_names`. successors: the operations that wait for one, those in order on its stream among them.
    """

    kinds: NDArray[np.int8]
    ranks: NDArray[np.int32]
    targets: NDArray[np.int32]
    sizes: NDArray[np.float64]
    streams: NDArray[np.int32]
    categories: NDArray[np.int32]
    stream_names: tuple[str, ...]
    category_names: tuple[str, ...]
    names: tuple[str, ...]
    successors: tuple[tuple[int, ...], ...]
    waits: tuple[int, ...]  # of how many operations each is a successor
    world: int  # ranks, from 0

    def __len__(self) -> int:
        return len(self.kinds)


class GraphBuilder:
    """Adds operations one by one; each method returns the operation's number, for others to name in `after`.

    ranks: how many there are; None: as many as the operations name. ValueError, when an operation is added, for a rank
    that does not exist, a time or size that is negative or not finite, and an `after` that was not added.
    """

    def __init__(self, ranks: int | None = None) -> None:
        self._world = ranks
        self._highest = -1
        self._kinds: list[int] = []
        self._ranks: list[int] = []
        self._targets: list[int] = []
        self._sizes: list[float] = []
        self._streams: list[int] = []
        self._categories: list[int] = []
        self._names: list[str] = []
        self._successors: list[list[int] | None] = []
        self._waits: list[int] = []
        self._stream_numbers: dict[str, int] = {}
        self._category_numbers: dict[str, int] = {}
        self._last_on: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def compute(
        self,
        rank: int,
        seconds: float,
        *,
        stream: str = "compute",
        after: Sequence[int] = (),
        name: str = "",
        category: str = "compute",
    ) -> int:
        """Add a computation. It begins when all of `after`, and the operation before it on the stream, have ended."""
        self._check_rank(rank)
        self._check_size(seconds, "s of computation")
        return self._add(OperationType.COMPUTE, rank, -1, seconds, stream, after, name, category)

    def message(
        self,
        source: int,
        target: int,
        num_bytes: float,
        *,
        after: Sequence[int] = (),
        stream: str | None = None,
        name: str = "",
        category: str = "communication",
        is_ordered: bool = True,
    ) -> int:
        """Add a message between two ranks. It begins as a computation does, and ends when it has arrived.

        stream: of the source; None: it waits for `after` alone. With is_ordered=False it only counts as time of the
        stream, and neither waits for operations there nor do they wait for it.
        """
        self._check_rank(source)
        self._check_rank(target)
        if source == target:
            raise ValueError(f"operation {len(self)} is a message from rank {source} to itself; leave it out")
        self._check_size(num_bytes, "bytes in a message")
        return self._add(OperationType.MESSAGE, source, target, num_bytes, stream, after, name, category, is_ordered)

    def join(self, after: Sequence[int], rank: int = -1, *, stream: str | None = None) -> int:
        """Add an operation that takes no time and ends when all of `after` have. stream: of the rank."""
        if rank >= 0:
            self._check_rank(rank)
        elif stream is not None:
            raise ValueError(f"a join on stream {stream!r} needs a rank; 0 would do")
        return self._add(OperationType.JOIN, rank, -1, 0.0, stream, after, "", "")

    def build(self) -> ExecutionGraph:
        """The graph. Each operation waits for earlier ones alone, so that their numbers are an order to run them in."""
        return ExecutionGraph(
            kinds=np.array(self._kinds, np.int8),
            ranks=np.array(self._ranks, np.int32),
            targets=np.array(self._targets, np.int32),
            sizes=np.array(self._sizes, np.float64),
            streams=np.array(self._streams, np.int32),
            categories=np.array(self._categories, np.int32),
            stream_names=tuple(self._stream_numbers),
            category_names=tuple(self._category_numbers),
            names=tuple(self._names),
            successors=tuple(() if each is None else tuple(each) for each in self._successors),
            waits=tuple(self._waits),
            world=self._highest + 1 if self._world is None else self._world,
        )

    def _add(
        self,
        kind: OperationType,
        rank: int,
        target: int,
        size: float,
        stream: str | None,
        after: Sequence[int],
        name: str,
        category: str,
        is_ordered: bool = True,
    ) -> int:
        number = len(self._kinds)
        waits = 0
        for each in after:
            if not 0 <= each < number:
                raise ValueError(f"operation {number} waits for operation {each}, but there are {number} so far")
            self._append(each, number)
            waits += 1
        stream_number = -1
        if stream is not None:
            stream_number = self._stream_numbers.setdefault(stream, len(self._stream_numbers))
            if is_ordered:
                last = self._last_on.get((rank, stream_number))
                if last is not None:
                    self._append(last, number)
                    waits += 1
                self._last_on[rank, stream_number] = number
        self._kinds.append(kind)
        self._ranks.append(rank)
        self._targets.append(target)
        self._sizes.append(size)
        self._streams.append(stream_number)
        self._categories.append(self._category_numbers.setdefault(category, len(self._category_numbers)))
        self._names.append(name)
        self._successors.append(None)
        self._waits.append(waits)
        return number

    def _append(self, before: int, after: int) -> None:
        followers = self._successors[before]
        if followers is None:
            self._successors[before] = [after]
        else:
            followers.append(after)

    def _check_rank(self, rank: int) -> None:
        if rank < 0 or (self._world is not None and rank >= self._world):
            known = "ranks count from 0" if self._world is None else f"there are ranks 0 to {self._world - 1}"
            raise ValueError(f"operation {len(self)} is on rank {rank}, but {known}")
        if rank > self._highest:
            self._highest = rank

    def _check_size(self, size: float, what: str) -> None:
        if not (size >= 0 and math.isfinite(size)):
            raise ValueError(f"operation {len(self)} has {size} {what}, which must be finite and at least 0")


class Execution:
    """The times at which a graph's operations ran. fidelity: the network's. starts, ends: seconds, by operation."""

    def __init__(
        self,
        graph: ExecutionGraph,
        fidelity: str,
        starts: NDArray[np.float64],
        ends: NDArray[np.float64],
        events: int,
        link_busy: Sequence[float] | None,
        execution_seconds: float = 0.0,
    ) -> None:
        self.graph = graph
        self.fidelity = fidelity
        self.starts = starts
        self.ends = ends
        self.events = events
        self.execution_seconds = execution_seconds  # of this process, for execute() itself
        self.link_busy = None if link_busy is None else np.array(link_busy)  # seconds by link; None: not known

    @property
    def makespan(self) -> float:
        """Seconds until the last operation has ended; 0 for an empty graph."""
        return float(self.ends.max()) if len(self.ends) else 0.0

    def busy(self, rank: int, stream: str) -> float:
        """Seconds in which an operation runs on a rank's stream. ValueError for a stream that the graph lacks."""
        if stream not in self.graph.stream_names:
            known = ", ".join(self.graph.stream_names) or "none"
            raise ValueError(f"the graph has no stream {stream!r}; it has {known}")
        chosen = (self.graph.ranks == rank) & (self.graph.streams == self.graph.stream_names.index(stream))
        return float(covered(self.starts[chosen], self.ends[chosen]))

    def exposed(self, rank: int) -> float:
        """Seconds in which messages leave or reach a rank and it computes nothing: exposed communication."""
        graph = self.graph
        of_rank = (graph.ranks == rank) | (graph.targets == rank)
        messages = of_rank & (graph.kinds == OperationType.MESSAGE)
        computes = of_rank & (graph.kinds == OperationType.COMPUTE)
        either = messages | computes
        together = covered(self.starts[either], self.ends[either])
        return float(together - covered(self.starts[computes], self.ends[computes]))


def execute(graph: ExecutionGraph, network: NetworkModel) -> Execution:
    """Run a graph on a network, whose queues are emptied first.

    Deterministic: what happens at one time happens in the order in which it was caused. Raises ValueError if the graph
    has more ranks than the network has devices.
    """
    if graph.world > network.topology.devices:
        raise ValueError(
            f"the graph has {graph.world} ranks, but the network {network.topology.name} has "
            f"{network.topology.devices} devices; {graph.world} would do"
        )
    return GraphRun(graph, network).run()


@contextmanager
def pausing_garbage_collection() -> Iterator[None]:
    """Pause it: events and graphs are millions of tuples and lists, none in cycles, and looking through them would take
    half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphRun:
    """One execution: counts down what each operation waits for. Times are nanoseconds.

    A subclass may let operations take other times: each begins in `_start`, which has to call `_end` once.
    """

    def __init__(self, graph: ExecutionGraph, network: NetworkModel) -> None:
        network.reset()  # before its `send` is taken, which a reset may replace
        self.queue = EventQueue()
        self._graph, self._network = graph, network
        self.starts = [0.0] * len(graph)
        self.ends = [0.0] * len(graph)
        self._kinds = graph.kinds.tolist()  # lists: reading one element of an array costs three times as much
        self._ranks = graph.ranks.tolist()
        self._targets = graph.targets.tolist()
        self._sizes = graph.sizes.tolist()
        self._successors = graph.successors
        self._waits = list(graph.waits)
        self._send = network.send

    def run(self) -> Execution:
        """Run the graph on the network, whose queues were emptied."""
        begin = time.process_time()
        with pausing_garbage_collection():
            for number in [number for number, count in enumerate(self._waits) if count == 0]:
                self._start(number)
            self.queue.run()
        return Execution(
            self._graph,
            self._network.fidelity,
            np.array(self.starts) / NANOSECONDS,
            np.array(self.ends) / NANOSECONDS,
            self.queue.processed,
            getattr(self._network, "link_busy", None),
            time.process_time() - begin,
        )

    def _start(self, number: int) -> None:
        queue = self.queue
        self.starts[number] = queue.now
        kind = self._kinds[number]
        if kind == 1:
            self._send(queue, self._ranks[number], self._targets[number], self._sizes[number], self._end, number)
        elif kind == 0:
            queue.at(queue.now + self._sizes[number] * NANOSECONDS, self._end, number)
        else:
            queue.at(queue.now, self._end, number)

    def _end(self, number: int) -> None:
        self.ends[number] = self.queue.now
        waits = self._waits
        for after in self._successors[number]:
            waits[after] -= 1
            if waits[after] == 0:
                self._start(after)


def covered(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> float:
    """The length of the union of intervals, which may overlap and come in any order."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    latest = np.maximum.accumulate(ends)
    if not len(starts):
        return 0.0
    uncovered_before = np.concatenate(([starts[0]], latest[:-1]))
    return float(np.sum(np.maximum(latest - np.maximum(starts, uncovered_before), 0.0)))
