# SPDX-License-Identifier: Apache-2.0
"""Makes Chakra execution traces of a step of `stretto train --trace`, for simulators and for ASTRA-sim."""

from collections.abc import Iterator
from math import prod

from stretto.axes import EXPERT, INNER_TO_OUTER, check_sizes
from stretto.simulator.chakra import Attribute, ChakraNode, ChakraTrace, CollectiveType, Metadata, NodeType, group_node
from stretto.simulator.chakra.files import MAX_NODES, MAX_RANKS
from stretto.train.observe.timeline import AXES, COMPUTE, OTHER, Span, Timeline, TracedStep

_MICROSECONDS, _NANOSECONDS = 1e6, 1e9
_SHORTEST = 1e-9  # seconds; shorter than the clock of a trace


def step_trace(timeline: Timeline, step: int | None = None) -> ChakraTrace:
    """Make the trace of one traced step (default: the last) for all ranks of its grid.

    Rank 0 was traced; each other rank gets the same nodes, with its own groups. What ran on the compute row is one
    chain of COMP_NODEs, with nodes "idle" where nothing ran. A collective becomes a COMM_COLL_NODE with the measured
    duration and the bytes of its input; it begins as long after the last computation that had ended before it as it
    did, and every computation that began after its end waits for it, although it may not depend on it. Communication
    of unknown size (copy engines) is a COMP_NODE of its duration, concurrent with the others.

    Raises ValueError for a step that was not traced, and for grids on which ranks do different things (pipe, expert).
    """
    chosen = _find_step(timeline, step)
    for axis in ("pipe", EXPERT):
        if timeline.grid.get(axis, 1) > 1:
            raise ValueError(
                f"the trace is of rank 0 on a grid with {axis}={timeline.grid[axis]}, whose ranks do different things; "
                f"{axis}=1 would do"
            )
    sizes = {axis: size for axis, size in timeline.grid.items() if axis in INNER_TO_OUTER}
    check_sizes(sizes)
    world = prod(sizes.values())
    if world > MAX_RANKS or world * len(timeline.spans) > MAX_NODES:
        found = f"a grid of {world:,} ranks, with {len(timeline.spans):,} nodes each"
        raise ValueError(f"the trace is of {found}; at most {MAX_RANKS:,} ranks and {MAX_NODES:,} nodes are written")
    # By axis, for each rank, its group's ranks.
    groups = {axis: _groups_of(axis, sizes) for axis, size in sizes.items() if size > 1}
    names = {
        ranks: str(number)
        for number, ranks in enumerate(dict.fromkeys(row for rows in groups.values() for row in rows), start=1)
    }
    nodes = []
    for rank in range(world):
        head = group_node(0, {name: ranks for ranks, name in names.items()})
        of_axis = {axis: names[rows[rank]] for axis, rows in groups.items()}
        nodes.append((head, *_StepNodes(timeline, chosen, of_axis).make()))
    made = Attribute("producer", "string", f"stretto train --trace, step {chosen.number} of rank {timeline.rank}")
    return ChakraTrace(tuple(nodes), {name: ranks for ranks, name in names.items()}, Metadata(attributes=(made,)))


def _find_step(timeline: Timeline, number: int | None) -> TracedStep:
    steps = {step.number: step for step in timeline.steps}
    if number is None:
        return timeline.steps[-1]
    if number not in steps:
        raise ValueError(f"step {number} was not traced; traced are {', '.join(map(str, steps))}")
    return steps[number]


def _groups_of(axis: str, sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """List for each rank the ranks of its group over an axis."""
    grid = check_sizes(sizes)
    stride, size = grid.preceding(axis), sizes[axis]
    rows = []
    for rank in range(prod(sizes.values())):
        first = rank - rank // stride % size * stride
        rows.append(tuple(first + place * stride for place in range(size)))
    return rows


class _StepNodes:
    """The nodes of one rank's step. groups: the name of its group over each axis."""

    def __init__(self, timeline: Timeline, step: TracedStep, groups: dict[str, str]) -> None:
        self._step, self._groups = step, groups
        inside = [span for span in timeline.spans if span.start >= step.start and span.end <= step.end]
        self._computations = [span for span in inside if span.row == COMPUTE]
        self._communication = [span for span in inside if span.row in (*AXES, OTHER)]
        self._nodes: list[ChakraNode] = []

    def make(self) -> list[ChakraNode]:
        """Add computations in order, and each collective before the first computation that began after its end."""
        spans = sorted(self._communication, key=lambda span: span.end)
        done: list[tuple[float, int]] = [(self._step.start, 0)]  # ends of computations, and their nodes
        last, cursor = 0, self._step.start
        for computation in (*self._pieces(), Span(COMPUTE, "end of the step", self._step.end, self._step.end)):
            waits, ready = [last], cursor
            while spans and spans[0].end <= computation.start:
                span = spans.pop(0)
                waits.append(self._add_communication(span, done))
                ready = max(ready, span.end)
            if computation.start - ready > _SHORTEST:
                waits = [self._add_computation("idle", computation.start - ready, ready, waits)]
            last = self._add_computation(
                computation.name, computation.end - computation.start, computation.start, waits
            )
            cursor = computation.end
            done.append((cursor, last))
        return self._nodes

    def _pieces(self) -> Iterator[Span]:
        """Computations one after another: of two that overlap, the second is what comes after the first."""
        cursor = self._step.start
        for span in self._computations:
            if span.end > cursor:
                yield Span(COMPUTE, span.name, max(span.start, cursor), span.end)
                cursor = span.end

    def _add_communication(self, span: Span, done: list[tuple[float, int]]) -> int:
        ended, node = next((each for each in reversed(done) if each[0] <= span.start), done[0])
        waits = [node]
        if span.start - ended > _SHORTEST:
            waits = [
                self._add_computation("launch", span.start - ended, ended, waits, stream=f"launch {len(self._nodes)}")
            ]
        seconds = span.end - span.start
        if span.sent is None or (span.row not in self._groups and span.row != OTHER):
            return self._add_computation(span.name, seconds, span.start, waits, stream=f"communication {span.row}")
        attributes = [
            Attribute("is_cpu_op", "bool", False),
            Attribute("comm_type", "int64", int(CollectiveType[span.sent.collective.upper()])),
            Attribute("comm_size", "int64", span.sent.num_bytes),
        ]
        if span.row in self._groups:
            attributes.append(Attribute("pg_name", "string", self._groups[span.row]))
        return self._add(NodeType.COMM_COLL_NODE, span.name, seconds, span.start, waits, attributes)

    def _add_computation(self, name: str, seconds: float, start: float, waits: list[int], *, stream: str = "") -> int:
        attributes = [Attribute("is_cpu_op", "bool", bool(stream))]
        if stream:
            attributes.append(Attribute("stretto_stream", "string", stream))
            attributes.append(Attribute("stretto_category", "string", stream.split()[0]))
        elif name == "idle":
            attributes.append(Attribute("stretto_category", "string", "idle"))
        return self._add(NodeType.COMP_NODE, name, seconds, start, waits, attributes)

    def _add(
        self, kind: NodeType, name: str, seconds: float, start: float, waits: list[int], attributes: list[Attribute]
    ) -> int:
        number = len(self._nodes) + 1  # 0 is the node that describes the groups
        self._nodes.append(
            ChakraNode(
                number,
                name,
                kind,
                data_dependencies=tuple(sorted(set(waits))),
                start_micros=round((start - self._step.start) * _MICROSECONDS),
                duration_micros=round(seconds * _MICROSECONDS),
                attributes=(*attributes, Attribute("duration_ns", "double", seconds * _NANOSECONDS)),
            )
        )
        return number
