# SPDX-License-Identifier: Apache-2.0
"""Makes a Chakra trace of an execution graph, so that a simulated step can be taken to other simulators."""

from collections.abc import Sequence

from stretto.simulator.chakra.files import ChakraTrace
from stretto.simulator.chakra.schema import Attribute, ChakraNode, Metadata, NodeType
from stretto.simulator.chakra.to_graph import CATEGORY, DURATION, STREAM
from stretto.simulator.graph import Execution, ExecutionGraph, OperationType

_MICROSECONDS, _NANOSECONDS = 1e6, 1e9


def graph_trace(graph: ExecutionGraph, execution: Execution | None = None) -> ChakraTrace:
    """Make a trace: a COMP_NODE of each computation, a COMM_SEND_NODE and COMM_RECV_NODE of each message.

    A collective of the graph is written as its messages, and
    sizes are rounded to whole bytes. A node's dependencies have the order on its stream among them.
    execution: whose times the nodes begin at (default: they have no times). A computation's duration is in whole
    microseconds, as the schema has it, and in the attribute duration_ns exactly. The tag of a message is its number
    among those of its ranks.

    Raises ValueError for an operation that waits for one of another rank without a message between them, which a trace
    cannot say.
    """
    return _TraceWriter(graph, execution).write()


class _TraceWriter:
    def __init__(self, graph: ExecutionGraph, execution: Execution | None) -> None:
        self._graph, self._execution = graph, execution
        self._nodes: list[list[ChakraNode]] = [[] for _ in range(graph.world)]
        self._ids: dict[tuple[int, int], int] = {}  # of an operation's node on a rank
        self._tags: dict[tuple[int, int], int] = {}
        self._before: list[list[int]] = [[] for _ in range(len(graph))]
        for number, successors in enumerate(graph.successors):
            for after in successors:
                self._before[after].append(number)

    def write(self) -> ChakraTrace:
        for number, kind in enumerate(self._graph.kinds.tolist()):
            match kind:
                case OperationType.COMPUTE:
                    self._add_computation(number)
                case OperationType.MESSAGE:
                    self._add_message(number)
                case OperationType.JOIN:
                    self._add_join(number)
        made = Attribute("producer", "string", "Stretto")
        return ChakraTrace(tuple(map(tuple, self._nodes)), metadata=Metadata(attributes=(made,)))

    def _add_computation(self, number: int) -> None:
        seconds = float(self._graph.sizes[number])
        self._add(
            number,
            int(self._graph.ranks[number]),
            NodeType.COMP_NODE,
            self._before[number],
            [Attribute("is_cpu_op", "bool", False), Attribute(DURATION, "double", seconds * _NANOSECONDS)],
            micros=round(seconds * _MICROSECONDS),
        )

    def _add_message(self, number: int) -> None:
        source, target = int(self._graph.ranks[number]), int(self._graph.targets[number])
        tag = self._tags[source, target] = self._tags.get((source, target), -1) + 1
        about = [
            Attribute("is_cpu_op", "bool", False),
            Attribute("comm_size", "int64", round(float(self._graph.sizes[number]))),
            Attribute("comm_src", "int32", source),
            Attribute("comm_dst", "int32", target),
            Attribute("comm_tag", "int32", tag),
        ]
        self._add(number, source, NodeType.COMM_SEND_NODE, self._before[number], about)
        self._add(number, target, NodeType.COMM_RECV_NODE, (), about)

    def _add_join(self, number: int) -> None:
        """A join becomes a metadata node on its rank, or on each rank on which all that it waits for has nodes."""
        rank, before = int(self._graph.ranks[number]), self._before[number]
        for each in [rank] if rank >= 0 else range(self._graph.world):
            if rank >= 0 or all((one, each) in self._ids for one in before):
                self._add(number, each, NodeType.METADATA_NODE, before, [])

    def _add(
        self,
        number: int,
        rank: int,
        kind: NodeType,
        before: Sequence[int],
        attributes: list[Attribute],
        *,
        micros: int = 0,
    ) -> None:
        for each in before:
            if (each, rank) not in self._ids:
                raise ValueError(
                    f"{self._name(number)} on rank {rank} waits for {self._name(each)} of another rank without a "
                    "message: a Chakra trace cannot say that"
                )
        stream = int(self._graph.streams[number])
        if stream >= 0 and kind != NodeType.COMM_RECV_NODE:
            attributes = [*attributes, Attribute(STREAM, "string", self._graph.stream_names[stream])]
        category = self._graph.category_names[int(self._graph.categories[number])]
        if kind == NodeType.COMP_NODE and category != "compute":
            attributes = [*attributes, Attribute(CATEGORY, "string", category)]
        start = 0.0 if self._execution is None else float(self._execution.starts[number])
        self._ids[number, rank] = len(self._nodes[rank])
        self._nodes[rank].append(
            ChakraNode(
                id=len(self._nodes[rank]),
                name=self._graph.names[number] or kind.name,
                type=kind,
                data_dependencies=tuple(sorted({self._ids[each, rank] for each in before})),
                start_micros=round(start * _MICROSECONDS),
                duration_micros=micros,
                attributes=tuple(attributes),
            )
        )

    def _name(self, number: int) -> str:
        name = self._graph.names[number]
        return f"operation {number}" + (f" ({name})" if name else "")
