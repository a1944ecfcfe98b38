# SPDX-License-Identifier: Apache-2.0
"""Makes an execution graph of a Chakra trace: matches messages and collectives of all ranks, and times each node.

A rank's messages and collectives are matched in the order in which ASTRA-sim issues them: of the nodes whose
dependencies are done, the one with the smallest id first. The order of nodes in a file means nothing.

The ranks' nodes are put into one order in which every node follows its dependencies, so that streams, which run
their operations in order, cannot wait for each other in a circle. Among nodes that are free, the one comes first that
would be ready first if communication took no time.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from stretto.simulator.chakra.files import ChakraTrace
from stretto.simulator.chakra.schema import ChakraNode, CollectiveType, NodeType
from stretto.simulator.collectives import add_collective
from stretto.simulator.collectives.patterns import MAX_MESSAGES
from stretto.simulator.graph import ExecutionGraph, GraphBuilder

DURATION = "duration_ns"  # an attribute of Stretto: duration_micros would round
STREAM, CATEGORY = "stretto_stream", "stretto_category"
ALGORITHMS = {
    "all_gather": "ring",
    "all_reduce": "ring",
    "all_to_all": "direct",
    "broadcast": "ring",
    "reduce_scatter": "ring",
}

_MICROSECOND, _NANOSECOND = 1e-6, 1e-9
COMMUNICATION = (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE, NodeType.COMM_COLL_NODE)
_MAX_NAMED = 6  # nodes or ranks in a message
_REQUIRED: Any = object()
_Key = tuple[int, int]  # rank and the node's place in the order of issue


@dataclass(frozen=True, kw_only=True)
class NodeTimes:
    """Estimate of the time of nodes whose trace does not say: a roofline of FLOP/s and memory bandwidth in bytes/s.

    is_replayed: communication takes the measured durations of the trace, and the network is not used.
    """

    flops: float | None = None
    memory_bandwidth: float | None = None
    is_replayed: bool = False

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value:g}, but must be finite and more than 0")

    def seconds(self, node: ChakraNode, rank: int) -> float:
        """A compute or memory node's time: its duration, else num_ops and tensor_size by the roofline, else 0."""
        measured = measured_seconds(node)
        if measured:
            return measured
        work, moved = quantity(node, rank, "num_ops", 0), quantity(node, rank, "tensor_size", 0)
        if node.type != NodeType.COMP_NODE:
            work = 0
        seconds = 0.0
        for amount, rate, option, unit in (
            (work, self.flops, "flops", "operations"),
            (moved, self.memory_bandwidth, "memory_bandwidth", "bytes"),
        ):
            if amount and rate is None and not (option == "memory_bandwidth" and seconds):
                raise ValueError(
                    f"{node.describe(rank)} has no duration, but {amount:,} {unit}: give {option} "
                    f"({unit.replace('operations', 'FLOP')}/s)"
                )
            seconds = max(seconds, amount / rate) if rate is not None else seconds
        return seconds


def measured_seconds(node: ChakraNode) -> float:
    """A node's duration in the trace in seconds: exact where Stretto wrote it, else whole microseconds."""
    exact = node.get(DURATION)
    if isinstance(exact, int | float) and exact >= 0:
        return float(exact) * _NANOSECOND
    return node.duration_micros * _MICROSECOND


def trace_graph(
    trace: ChakraTrace, *, times: NodeTimes | None = None, algorithms: Mapping[str, str] | None = None
) -> ExecutionGraph:
    """Make the execution graph of a trace.

    times: how long nodes take (default: as the trace says). algorithms: of each collective (default: ALGORITHMS).

    What a node is: a COMP_NODE occupies its rank's stream "compute" (with is_cpu_op "cpu", with Stretto's attribute of
    a stream that one); a MEM node the stream "memory"; METADATA and INVALID nodes take no time. A COMM_SEND_NODE is a
    message of comm_size bytes, and ends when it has arrived; a COMM_RECV_NODE ends when its message has, which is the
    first not yet received from that rank with that tag. A collective of a group begins on a rank when the group's one
    before it has ended there. Dependencies and ids decide what is first, not places in a file. comm_size is a rank's
    input, as in ASTRA-sim, so an all-gather's output is as many times as large as the group has ranks.

    Raises ValueError, in one line that names ranks and nodes: for a cycle, a receive without a send, a message that
    is never received, a dependency or rank that does not exist, an unknown node type, a collective that only some ranks
    of its group run, and work without a duration if `times` does not tell how fast it is.
    """
    issued = replace(trace, nodes=tuple(_order_of_issue(rank, nodes) for rank, nodes in enumerate(trace.nodes)))
    return _Translation(issued, times or NodeTimes(), {**ALGORITHMS, **(algorithms or {})}).build()


def _order_of_issue(rank: int, nodes: Sequence[ChakraNode]) -> tuple[ChakraNode, ...]:
    """Order a rank's nodes: each after its dependencies, else by id; those in or behind a cycle last.

    Raises ValueError for two nodes with one id, and for a dependency that does not exist.
    """
    nodes = sorted(nodes, key=lambda node: node.id)
    places = {node.id: place for place, node in enumerate(nodes)}
    for node, other in pairwise(nodes):
        if node.id == other.id:
            raise ValueError(f"{node.describe(rank)} has the id of another node of this rank, {other.name!r}")
    for node in nodes:
        for id in (*node.control_dependencies, *node.data_dependencies):
            if id not in places:
                raise ValueError(f"{node.describe(rank)} waits for node {id}, which rank {rank} does not have")
    before = [{places[id] for id in (*node.control_dependencies, *node.data_dependencies)} for node in nodes]
    order = dict.fromkeys(_order_units(before, [0.0] * len(nodes)))
    return tuple(nodes[place] for place in (*order, *(place for place in range(len(nodes)) if place not in order)))


class _Translation:
    """A trace on its way to a graph. A unit is a node, or the nodes of one collective on all ranks of its group."""

    def __init__(self, trace: ChakraTrace, times: NodeTimes, algorithms: Mapping[str, str]) -> None:
        self._trace, self._times, self._algorithms = trace, times, algorithms
        self._builder = GraphBuilder(trace.ranks)
        self._operations: dict[_Key, int] = {}  # the operation that ends when the node does
        self._messages: dict[_Key, int] = {}  # by the sender
        self._places = [{node.id: place for place, node in enumerate(nodes)} for nodes in trace.nodes]
        self._sender = {} if times.is_replayed else _match_messages(trace)  # of a receive
        groups = [] if times.is_replayed else list(_match_collectives(trace))
        collectives = {keys[0]: keys for keys in groups}
        later = {key for keys in groups for key in keys[1:]}
        self._units = [
            collectives.get((rank, place), ((rank, place),))
            for rank, nodes in enumerate(trace.nodes)
            for place in range(len(nodes))
            if (rank, place) not in later
        ]
        self._unit_of = {key: number for number, keys in enumerate(self._units) for key in keys}
        self._previous: dict[int, int] = {}  # the collective before it in its group
        for first, second in pairwise(groups):
            if self._group(first[0]) == self._group(second[0]):
                self._previous[self._unit_of[second[0]]] = self._unit_of[first[0]]

    def build(self) -> ExecutionGraph:
        before = [self._units_before(number) for number in range(len(self._units))]
        seconds = [max(map(self._compute_seconds, keys)) for keys in self._units]
        order = _order_units(before, seconds)
        if len(order) < len(self._units):
            raise ValueError(self._describe_cycle(before, set(order)))
        for number in order:
            self._add(number)
        return self._builder.build()

    # --- what waits for what

    def _node(self, key: _Key) -> ChakraNode:
        return self._trace.nodes[key[0]][key[1]]

    def _group(self, key: _Key) -> str:
        return str(self._node(key).get("pg_name", ""))

    def _dependencies(self, key: _Key) -> list[_Key]:
        """The nodes of its rank that a node waits for."""
        rank, _ = key
        node = self._node(key)
        ids = dict.fromkeys((*node.control_dependencies, *node.data_dependencies))
        return [(rank, self._places[rank][id]) for id in ids]

    def _units_before(self, number: int) -> set[int]:
        before = {self._unit_of[each] for key in self._units[number] for each in self._dependencies(key)}
        before |= {self._unit_of[self._sender[key]] for key in self._units[number] if key in self._sender}
        if number in self._previous:
            before.add(self._previous[number])
        return before

    def _describe_cycle(self, before: Sequence[set[int]], done: set[int]) -> str:
        """Name a cycle among the units that never become free: each waits for one of them."""
        at = next(number for number in range(len(self._units)) if number not in done)
        path: dict[int, None] = {}
        while at not in path:
            path[at] = None
            at = min(each for each in before[at] if each not in done)
        cycle = list(path)[list(path).index(at) :]
        names = [self._node(self._units[number][0]).describe(self._units[number][0][0]) for number in cycle]
        shown = names if len(names) <= _MAX_NAMED else [*names[:_MAX_NAMED], f"{len(names) - _MAX_NAMED} more"]
        return f"the trace has a cycle: {' waits for '.join([*shown, names[0]])}"

    # --- operations

    def _compute_seconds(self, key: _Key) -> float:
        """The time that a node takes without the network."""
        node = self._node(key)
        if node.type in (NodeType.COMP_NODE, NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE):
            return self._times.seconds(node, key[0])
        return measured_seconds(node) if self._times.is_replayed and node.type in COMMUNICATION else 0.0

    def _add(self, number: int) -> None:
        keys = self._units[number]
        (rank, _), node = keys[0], self._node(keys[0])
        after = [self._operations[each] for each in self._dependencies(keys[0])]
        match node.type:
            case NodeType.COMP_NODE | NodeType.MEM_LOAD_NODE | NodeType.MEM_STORE_NODE:
                is_host = node.type == NodeType.COMP_NODE and bool(node.get("is_cpu_op", False))
                stream = "compute" if node.type == NodeType.COMP_NODE else "memory"
                operation = self._builder.compute(
                    rank,
                    self._times.seconds(node, rank),
                    stream=str(node.get(STREAM, "cpu" if is_host else stream)),
                    after=after,
                    name=node.name,
                    category=str(node.get(CATEGORY, "cpu" if is_host else stream)),
                )
            case NodeType.INVALID_NODE | NodeType.METADATA_NODE:
                operation = self._builder.join(after, rank)
            case kind if kind in COMMUNICATION and self._times.is_replayed:
                operation = self._builder.compute(
                    rank,
                    measured_seconds(node),
                    stream=f"replayed {number}",  # when others of its group ran is in its measured time
                    after=after,
                    name=node.name,
                    category="communication",
                )
            case NodeType.COMM_SEND_NODE:
                operation = self._builder.message(
                    rank,
                    quantity(node, rank, "comm_dst"),
                    quantity(node, rank, "comm_size"),
                    after=after,
                    name=node.name,
                )
            case NodeType.COMM_RECV_NODE:
                operation = self._builder.join([self._operations[self._sender[keys[0]]], *after], rank)
            case NodeType.COMM_COLL_NODE:
                self._add_collective(number)
                return
            case NodeType():
                raise ValueError(f"{node.describe(rank)} is a {node.type.name}, which is not simulated")
            case unknown:
                raise ValueError(
                    f"{node.describe(rank)} has the unknown type {unknown}; known are 0 to {max(NodeType)}"
                )
        self._operations[keys[0]] = operation

    def _add_collective(self, number: int) -> None:
        keys = self._units[number]
        previous = self._units[self._previous[number]] if number in self._previous else ()
        last = {rank: self._operations[rank, place] for rank, place in previous}
        after = [
            [*(self._operations[each] for each in self._dependencies(key)), *([last[key[0]]] if key[0] in last else [])]
            for key in keys
        ]
        (rank, _), node = keys[0], self._node(keys[0])
        kind = CollectiveType(quantity(node, rank, "comm_type"))
        if kind == CollectiveType.BARRIER or len(keys) == 1:
            all_ranks = self._builder.join([operation for row in after for operation in row])
            self._operations.update((key, self._builder.join([all_ranks], key[0])) for key in keys)
            return
        name = kind.name.lower()
        if name not in self._algorithms:
            known = ", ".join(sorted([*(each.upper() for each in self._algorithms), CollectiveType.BARRIER.name]))
            raise ValueError(f"{node.describe(rank)} is a {kind.name}, which is not simulated; simulated are {known}")
        size = quantity(node, rank, "comm_size")
        if len(self._builder) > MAX_MESSAGES:
            raise ValueError(
                f"the trace's collectives send more than {MAX_MESSAGES:,} messages, the most that are simulated; "
                f"{node.describe(rank)} is not reached"
            )
        finals = add_collective(
            self._builder,
            name,
            self._algorithms[name],
            [key[0] for key in keys],
            size * len(keys) if name == "all_gather" else size,
            after=after,
        )
        self._operations.update(zip(keys, finals, strict=True))


def _order_units(before: Sequence[set[int]], seconds: Sequence[float]) -> list[int]:
    """Order units so that each comes after those before it; those in or behind a cycle are left out."""
    after: list[list[int]] = [[] for _ in before]
    for number, units in enumerate(before):
        for each in units:
            after[each].append(number)
    waits = [len(units) for units in before]
    ready = [0.0] * len(before)
    free = [(0.0, number) for number, count in enumerate(waits) if not count]
    order = []
    while free:
        _, number = heappop(free)
        order.append(number)
        for each in after[number]:
            ready[each] = max(ready[each], ready[number] + seconds[number])
            waits[each] -= 1
            if not waits[each]:
                heappush(free, (ready[each], each))
    return order


def _match_messages(trace: ChakraTrace) -> dict[_Key, _Key]:
    """Find each receive's send: the first of that rank with that tag which is not yet received, in order of issue."""
    sent: dict[tuple[int, int, int], deque[_Key]] = defaultdict(deque)
    for rank, nodes in enumerate(trace.nodes):
        for place, node in enumerate(nodes):
            if node.type == NodeType.COMM_SEND_NODE:
                target = _peer(trace, node, rank, "comm_dst", "comm_src")
                sent[rank, target, quantity(node, rank, "comm_tag", 0)].append((rank, place))
    matched: dict[_Key, _Key] = {}
    for rank, nodes in enumerate(trace.nodes):
        for place, node in enumerate(nodes):
            if node.type == NodeType.COMM_RECV_NODE:
                source, tag = _peer(trace, node, rank, "comm_src", "comm_dst"), quantity(node, rank, "comm_tag", 0)
                if not sent[source, rank, tag]:
                    raise ValueError(
                        f"{node.describe(rank)} receives from rank {source} with tag {tag}, but no rank sends it"
                    )
                key = matched[rank, place] = sent[source, rank, tag].popleft()
                sender = trace.nodes[source][key[1]]
                sizes = quantity(sender, source, "comm_size"), quantity(node, rank, "comm_size", None)
                if sizes[1] not in (None, sizes[0]):
                    raise ValueError(
                        f"{node.describe(rank)} receives {sizes[1]:,} bytes, but {sender.describe(source)} sends "
                        f"{sizes[0]:,}"
                    )
    for (source, target, tag), keys in sent.items():
        if keys:
            node = trace.nodes[source][keys[0][1]]
            raise ValueError(f"{node.describe(source)} sends to rank {target} with tag {tag}, but no rank receives it")
    return matched


def _peer(trace: ChakraTrace, node: ChakraNode, rank: int, other: str, own: str) -> int:
    """The other rank of a message, which must exist; a node may name its own rank too."""
    peer = quantity(node, rank, other)
    if not 0 <= peer < trace.ranks or peer == rank:
        raise ValueError(f"{node.describe(rank)} has {other} {peer}, but the trace has ranks 0 to {trace.ranks - 1}")
    if quantity(node, rank, own, rank) != rank:
        raise ValueError(f"{node.describe(rank)} has {own} {node.get(own)}, but is in rank {rank}'s file")
    return peer


def _match_collectives(trace: ChakraTrace) -> Iterator[tuple[_Key, ...]]:
    """Yield the nodes of each collective in group order, those of a group one after the other.

    The ranks of a group must run the same collectives of the same sizes in the same order.
    """
    rows: dict[str, dict[int, list[_Key]]] = defaultdict(lambda: defaultdict(list))
    for rank, nodes in enumerate(trace.nodes):
        for place, node in enumerate(nodes):
            if node.type == NodeType.COMM_COLL_NODE:
                if not all(node.get("involved_dim", ())):
                    raise ValueError(
                        f"{node.describe(rank)} involves some dims of the network: name its group, pg_name"
                    )
                rows[str(node.get("pg_name", ""))][rank].append((rank, place))
    for name, by_rank in rows.items():
        ranks = trace.group(name)
        for rank, keys in by_rank.items():
            if rank not in ranks:
                node = trace.nodes[rank][keys[0][1]]
                raise ValueError(f"{node.describe(rank)} is in group {name!r}, whose ranks are {_shorten(ranks)}")
        most = max(ranks, key=lambda rank: len(by_rank[rank]))
        for number, (_, place) in enumerate(by_rank[most]):
            missing = next((rank for rank in ranks if len(by_rank[rank]) <= number), None)
            node = trace.nodes[most][place]
            if missing is not None:
                raise ValueError(
                    f"{node.describe(most)} is collective {number + 1} of group {name!r}, of which rank {missing} "
                    f"runs {len(by_rank[missing])}"
                )
            if quantity(node, most, "comm_type") not in CollectiveType._value2member_map_:
                raise ValueError(
                    f"{node.describe(most)} has the unknown comm_type {node.get('comm_type')}; known are 0 to "
                    f"{max(CollectiveType)}"
                )
            matched = tuple(by_rank[rank][number] for rank in ranks)
            for rank, at in matched:
                other = trace.nodes[rank][at]
                for attribute in ("comm_type", "comm_size"):
                    default = 0 if attribute == "comm_size" else _REQUIRED
                    values = quantity(node, most, attribute, default), quantity(other, rank, attribute, default)
                    if values[0] != values[1]:
                        raise ValueError(
                            f"{other.describe(rank)} has {attribute} {values[1]}, but {node.describe(most)}, of the "
                            f"same collective, {values[0]}"
                        )
            yield matched


def quantity(node: ChakraNode, rank: int, name: str, default: Any = _REQUIRED) -> Any:
    """A node's attribute that must be a whole number of at least 0; `default` where it is missing."""
    value = node.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if type(value) is not int or value < 0:
        what = "has no" if value is None else f"has {value!r} as"
        raise ValueError(f"{node.describe(rank)} {what} {name}, which must be a whole number of at least 0")
    return value


def _shorten(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_MAX_NAMED])) + (", ..." if len(ranks) > _MAX_NAMED else "")
