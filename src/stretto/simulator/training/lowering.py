# SPDX-License-Identifier: Apache-2.0
"""Makes an execution graph of a step's programs: one rank of each stage for all that do the same, or every rank.

All ranks of a stage run one program. On equal GPUs and links they do so at the same times: each group's ranks come to a
collective together, and it takes all of them equally long. So one rank of each stage stands for all, which is exact. It
is exact too where ranks differ, as long as one of each stage is slowest in everything, since all wait for it. Where
stragglers or slow links are drawn for each rank, every rank is simulated.

In closed form a collective is one operation on the stream of its group, of the planner's duration: each group has one
communicator, so all ranks issue its collectives in one order. In `event_driven` it is messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from stretto.axes import EXPERT, EXPERT_DATA, EXPERT_Z, GridSizes
from stretto.planner.step import COMPUTE, HOST, GroupCollective
from stretto.simulator.graph import ExecutionGraph, GraphBuilder, pausing_garbage_collection
from stretto.simulator.training.program import PIPE, StageMessage, StepOperation
from stretto.simulator.training.step import StepPrograms

BY_COPY_ENGINES = ", by copy engines"
"""Ends the names of streams of what copy engines send."""


@dataclass(frozen=True)
class RankFactors:
    """Slowness of each rank beside what the cluster says; () where none is. compute: at computing. links: at what it
    sends and receives. nics: at what of that leaves its node, which has gpus_per_node ranks.

    is_first_slowest: the first rank of each stage is slowest in everything, and so stands for all.
    """

    compute: tuple[float, ...] = ()
    links: tuple[float, ...] = ()
    nics: tuple[float, ...] = ()
    gpus_per_node: int = 1
    is_first_slowest: bool = False

    def of_computation(self, rank: int) -> float:
        """Return the factor of a rank's computation."""
        return self.compute[rank] if self.compute else 1.0

    def of_communication(self, first: int, last: int) -> float:
        """Return the factor of what a rank communicates in a group, or a pair, with another rank."""
        factor = max(self.links[first], self.links[last]) if self.links else 1.0
        if self.nics and first // self.gpus_per_node != last // self.gpus_per_node:
            factor *= max(self.nics[first], self.nics[last])
        return factor


@dataclass
class LoweredStep:
    """A graph, and the global rank that each of its ranks is. stage_of: the rank of pipe of each."""

    graph: ExecutionGraph
    devices: tuple[int, ...]
    stage_of: tuple[int, ...]


class StepLowering:
    """Adds programs to a graph in closed form. represented: offsets within a stage of the ranks that are simulated."""

    def __init__(self, programs: StepPrograms, represented: Sequence[int], factors: RankFactors | None = None) -> None:
        self.programs, self.grid = programs, programs.config.grid
        self.represented, self.factors = tuple(represented), factors or RankFactors()
        self.stage_ranks, self.places = self.grid.stage_ranks, range(len(self.represented))
        self.builder = GraphBuilder(ranks=len(programs.ranks) * len(self.represented))
        # Numbers of the operations of each place of each program, one for each represented rank.
        self._numbers: list[list[Sequence[int]]] = [[] for _ in programs.ranks]
        self._sent: dict[StageMessage, Sequence[int]] = {}
        self._arrived: dict[int, list[int]] = {}  # what each rank's barrier waits for
        self._barrier: int | None = None
        self._groups: dict[str, list[tuple[int, ...]]] = {}

    def lower(self) -> LoweredStep:
        """The graph of a whole step. Raises ValueError for receives without a send."""
        with pausing_garbage_collection():
            return self._lower()

    def _lower(self) -> LoweredStep:
        pipe = len(self.programs.ranks)
        ready = list(range(pipe))
        while ready:
            before = [len(numbers) for numbers in self._numbers]
            for rank in ready:
                self._advance(rank)
            ready = [rank for rank in range(pipe) if len(self._numbers[rank]) < len(self.programs.ranks[rank])]
            if ready and before == [len(numbers) for numbers in self._numbers]:
                operation = self.programs.ranks[ready[0]][len(self._numbers[ready[0]])]
                raise ValueError(f"rank {ready[0]} of pipe waits for {operation.received}, which is not sent before it")
        devices = [rank * self.stage_ranks + each for rank in range(pipe) for each in self.represented]
        stage_of = [rank for rank in range(pipe) for _ in self.represented]
        return LoweredStep(self.builder.build(), tuple(devices), tuple(stage_of))

    def _advance(self, rank: int) -> None:
        """Add a program's operations up to a message that is not sent yet."""
        program, numbers = self.programs.ranks[rank], self._numbers[rank]
        while len(numbers) < len(program):
            operation = program[len(numbers)]
            after = self._after(rank, operation)
            if operation.received is not None:
                if operation.received not in self._sent:
                    return
                numbers.append(self._sent[operation.received])
            elif operation.is_barrier:
                self._arrived[rank] = list(chain.from_iterable(after))
                if len(self._arrived) < len(self.programs.ranks):
                    return
                if self._barrier is None:
                    self._barrier = self.builder.join(list(chain.from_iterable(self._arrived.values())))
                numbers.append([self._barrier] * len(self.represented))
            elif operation.sent is not None:
                numbers.append(self._send(rank, operation.sent, operation.name, after))
                self._sent[operation.sent] = numbers[-1]
            elif operation.collective is not None:
                numbers.append(self._collective(rank, operation, operation.collective, after))
            else:
                numbers.append(self._compute(rank, operation, after))

    def graph_rank(self, rank: int, place: int) -> int:
        """The graph's rank of one that is represented."""
        return rank * len(self.represented) + place

    def _after(self, rank: int, operation: StepOperation) -> list[list[int]]:
        numbers = self._numbers[rank]
        return [[numbers[each][place] for each in operation.after] for place in self.places]

    def _compute(self, rank: int, operation: StepOperation, after: Sequence[Sequence[int]]) -> Sequence[int]:
        return [
            self.builder.compute(
                self.graph_rank(rank, place),
                operation.seconds * self.factors.of_computation(self.device(rank, place)),
                stream=operation.stream,
                after=after[place],
                name=operation.name,
                category=HOST if operation.stream == HOST else COMPUTE,
            )
            for place in self.places
        ]

    def _collective(
        self, rank: int, operation: StepOperation, collective: GroupCollective, after: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        """One operation on each rank. All ranks of a group begin when the last has come."""
        numbers = [-1] * len(self.represented)
        for members in self._groups_of(collective.group):
            waits = list(chain.from_iterable(after[place] for place in members))
            if len(members) > 1:
                waits = [self.builder.join(waits)]
            devices = [self.device(rank, place) for place in members]
            if len(self.represented) == 1:
                dims = group_dims(self.grid, collective.group)
                devices.append(devices[0] + sum(stride * (size - 1) for stride, size in dims))
            slowest = max(self.factors.of_communication(devices[0], other) for other in devices)
            for place in members:
                numbers[place] = self.builder.compute(
                    self.graph_rank(rank, place),
                    collective.seconds * slowest,
                    stream=stream_of(collective),
                    after=waits,
                    name=operation.name,
                    category=collective.axis,
                )
        return numbers

    def _groups_of(self, group: str) -> list[tuple[int, ...]]:
        """The groups among represented ranks, by their places; each alone where one stands for all."""
        if group not in self._groups:
            if len(self.represented) == 1:
                self._groups[group] = [(0,)]
            else:
                self._groups[group] = list(list_groups(self.grid, group))
        return self._groups[group]

    def _send(self, rank: int, message: StageMessage, name: str, after: Sequence[Sequence[int]]) -> Sequence[int]:
        pairs = [(self.graph_rank(rank, place), self.graph_rank(message.target, place)) for place in self.places]
        return [
            self.builder.message(
                source,
                target,
                self._message_bytes(message, source, target),
                after=after[place],
                name=name,
                category=PIPE,
            )
            for place, (source, target) in enumerate(pairs)
        ]

    def _message_bytes(self, message: StageMessage, source: int, target: int) -> float:
        return self.programs.tied_bytes if message.micro_batch is None else self.programs.message_bytes

    def device(self, rank: int, place: int) -> int:
        """The global rank of one that is represented."""
        return rank * self.stage_ranks + self.represented[place]


def stream_of(collective: GroupCollective) -> str:
    """The stream of a collective: its group's, since a communicator runs one collective at a time."""
    return collective.group + (BY_COPY_ENGINES if collective.by_copy_engine else "")


def group_dims(grid: GridSizes, group: str) -> tuple[tuple[int, int], ...]:
    """Return how the ranks of a group differ: (how far apart, how many) for each axis, the innermost first.

    group: an axis, a group over several, or one of experts' axes (`stretto.axes`).
    """
    taken = grid.expert_taken
    match group:
        case _ if group == EXPERT:
            dims = [(grid.preceding(axis), taken[axis]) for axis in ("x", "z", "data")]
        case _ if group == EXPERT_Z:
            dims = [(grid.preceding("z") * taken["z"], grid.expert_z)]
        case _ if group == EXPERT_DATA:
            dims = [(grid.preceding("data") * taken["data"], grid.expert_data)]
        case _:
            dims = [(grid.preceding(axis), grid[axis]) for axis in reversed(grid.axes_of(group))]
    return tuple((stride, size) for stride, size in dims if size > 1)


def list_groups(grid: GridSizes, group: str) -> Iterator[tuple[int, ...]]:
    """All groups of a kind among the ranks of the first stage, each in the order of its ranks; none of one rank."""
    dims = group_dims(grid, group)
    if not dims:
        return
    offsets = [sum(parts) for parts in product(*(range(0, stride * size, stride) for stride, size in dims[::-1]))]
    for rank in range(grid.stage_ranks):
        if all(rank // stride % size == 0 for stride, size in dims):
            yield tuple(rank + offset for offset in offsets)
