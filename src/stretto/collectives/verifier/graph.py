# SPDX-License-Identifier: Apache-2.0
"""Builds the graph of a schedule: every step a node, with the steps that must have ended before it begins.

Three things order steps: their thread block, the step that one waits for, and messages: the k-th receive of a
connection takes the message of its k-th send.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.schedule import Schedule, Step, StepType

Connection = tuple[int, int, int]
"""A connection: its sender, its receiver and its channel."""


@dataclass(frozen=True)
class Graph:
    """Steps by number, thread block after thread block, and the edges between them.

    places: each step's (rank, thread block, step); first: whether it begins its thread block; waits_for: the number of
    the step that it waits for, released_by: of the one that ends the wait, sender: of the one that gives what it
    receives, receiver: of the one that takes what it sends, -1 for none; connections: the sends and the receives of
    each, in order.

    A thread block publishes its progress only at steps that are marked as awaited. So a wait may end later than it
    needs to, at the first such step from the named one on; what follows may rely on the named one alone.
    """

    schedule: Schedule
    steps: tuple[Step, ...]
    places: tuple[tuple[int, int, int], ...]
    first: tuple[bool, ...]
    waits_for: tuple[int, ...]
    released_by: tuple[int, ...]
    sender: tuple[int, ...]
    receiver: tuple[int, ...]
    connections: dict[Connection, tuple[list[int], list[int]]]

    def name(self, number: int) -> str:
        """The name of a step in error messages."""
        rank, block, step = self.places[number]
        return f"rank {rank}, thread block {block}, step {step} ({self.steps[number].type.value})"

    def before(self, number: int) -> list[int]:
        """The steps with an edge to this one: they must have ended before it."""
        others = [] if self.first[number] else [number - 1]
        if self.released_by[number] >= 0:
            others.append(self.released_by[number])
        if self.sender[number] >= 0:
            others.append(self.sender[number])
        return others


def build_graph(schedule: Schedule, errors: list[str]) -> Graph:
    """Build the graph of a schedule; adds malformed steps to `errors`, and leaves out edges that lead nowhere."""
    steps: list[Step] = []
    places: list[tuple[int, int, int]] = []
    first: list[bool] = []
    begins: dict[tuple[int, int], int] = {}
    connections: dict[Connection, tuple[list[int], list[int]]] = {}
    for rank, program in enumerate(schedule.ranks):
        for number, block in enumerate(program.thread_blocks):
            begins[rank, number] = len(steps)
            for at, step in enumerate(block.steps):
                where = len(steps)
                steps.append(step)
                places.append((rank, number, at))
                first.append(at == 0)
                if step.type.sends and block.send_peer is not None:
                    key = rank, block.send_peer, block.channel
                    connections.setdefault(key, ([], []))[0].append(where)
                if step.type.receives and block.receive_peer is not None:
                    key = block.receive_peer, rank, block.channel
                    connections.setdefault(key, ([], []))[1].append(where)
    sender, receiver = _match(len(steps), connections)
    waits_for, released_by = _resolve_waits(schedule, steps, places, begins, errors)
    graph = Graph(
        schedule, tuple(steps), tuple(places), tuple(first), waits_for, released_by, sender, receiver, connections
    )
    for number in range(len(steps)):
        _check_step(graph, number, errors)
    ends = _find_ends(schedule)
    for key in sorted(connections):
        _check_connection(graph, key, ends, errors)
    for rank, program in enumerate(schedule.ranks):
        for source, destination in program.copies:
            for buffer, index in ((Buffer.IN, source), (Buffer.OUT, destination)):
                if not 0 <= index < schedule.collective.chunks(buffer):
                    errors.append(
                        f"rank {rank} copies before its first step: {buffer} has {schedule.collective.chunks(buffer)} "
                        f"chunks, none of number {index}"
                    )
    return graph


def _resolve_waits(
    schedule: Schedule,
    steps: list[Step],
    places: list[tuple[int, int, int]],
    begins: dict[tuple[int, int], int],
    errors: list[str],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find for each step the one that it waits for, and the first from there on whose end is published."""
    # For each step of a thread block, the first at or after it whose end is published.
    published_at = [-1] * len(steps)
    for number in range(len(steps) - 1, -1, -1):
        last = number + 1 == len(steps) or places[number + 1][2] == 0
        published_at[number] = number if steps[number].awaited else -1 if last else published_at[number + 1]
    waits_for, released_by = [-1] * len(steps), [-1] * len(steps)
    for number, step in enumerate(steps):
        if step.waits_for is None:
            continue
        rank, block, at = places[number]
        other, awaited = step.waits_for
        here = f"rank {rank}, thread block {block}, step {at} ({step.type.value})"
        blocks = schedule.ranks[rank].thread_blocks
        if not 0 <= other < len(blocks) or not 0 <= awaited < len(blocks[other].steps):
            errors.append(f"{here} waits for step {awaited} of thread block {other}, which is not there")
            continue
        waits_for[number] = begins[rank, other] + awaited
        released_by[number] = published_at[waits_for[number]]
        if released_by[number] < 0:
            errors.append(
                f"{here} waits for step {awaited} of thread block {other}, whose end is never published: "
                "set its hasdep to 1"
            )
    return tuple(waits_for), tuple(released_by)


def _match(
    count: int, connections: dict[Connection, tuple[list[int], list[int]]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find for each step the one that sends what it receives, and the one that receives what it sends."""
    sender, receiver = [-1] * count, [-1] * count
    for sends, receives in connections.values():
        for send, receive in zip(sends, receives, strict=False):
            sender[receive] = send
            receiver[send] = receive
    return tuple(sender), tuple(receiver)


def _check_step(graph: Graph, number: int, errors: list[str]) -> None:
    """Check that its peers and its chunks exist."""
    step = graph.steps[number]
    if step.type is StepType.NOP:
        return
    rank, block, _ = graph.places[number]
    program = graph.schedule.ranks[rank]
    if step.size < 1:
        errors.append(f"{graph.name(number)} handles {step.size} chunks")
    if step.type.sends and program.thread_blocks[block].send_peer is None:
        errors.append(f"{graph.name(number)} sends, but its thread block has no peer to send to")
    if step.type.receives and program.thread_blocks[block].receive_peer is None:
        errors.append(f"{graph.name(number)} receives, but its thread block has no peer to receive from")
    if step.type.reads_source:
        _check_bounds(graph, number, "source", step.source_buffer, step.source, errors)
    if step.type.writes_destination:
        _check_bounds(graph, number, "destination", step.destination_buffer, step.destination, errors)


def find_overlaps(graph: Graph, collective: Collective) -> Iterator[str]:
    """Find steps that read and write chunks that overlap, given the buffers' positions in these calls."""
    for number, step in enumerate(graph.steps):
        if step.type.reads_source and step.type.writes_destination:
            rank = graph.places[number][0]
            source = collective.place(rank, step.source_buffer, step.source)
            destination = collective.place(rank, step.destination_buffer, step.destination)
            if source[0] is destination[0] and 0 < abs(source[1] - destination[1]) < step.size:
                yield f"{graph.name(number)} reads and writes chunks that overlap: copy them elsewhere first"


def _check_bounds(graph: Graph, number: int, what: str, buffer: Buffer, start: int, errors: list[str]) -> None:
    rank, _, _ = graph.places[number]
    chunks = graph.schedule.ranks[rank].chunks(buffer)
    if buffer is not Buffer.SCRATCH:
        chunks = min(chunks, graph.schedule.collective.chunks(buffer))
    size = graph.steps[number].size
    if start < 0 or start + size > chunks:
        errors.append(
            f"{graph.name(number)}: its {what}, {size} chunks of {buffer} from {start}, is out of bounds: "
            f"{buffer} has {chunks}"
        )


def _find_ends(schedule: Schedule) -> dict[Connection, tuple[list[int], list[int]]]:
    """List for each connection the thread blocks that hold its sending end, and those that hold its receiving one."""
    ends: dict[Connection, tuple[list[int], list[int]]] = {}
    for rank, program in enumerate(schedule.ranks):
        for number, block in enumerate(program.thread_blocks):
            if block.send_peer is not None:
                ends.setdefault((rank, block.send_peer, block.channel), ([], []))[0].append(number)
            if block.receive_peer is not None:
                ends.setdefault((block.receive_peer, rank, block.channel), ([], []))[1].append(number)
    return ends


def _check_connection(
    graph: Graph, key: Connection, ends: dict[Connection, tuple[list[int], list[int]]], errors: list[str]
) -> None:
    """Check that either end has one thread block, and that each receive takes a whole message."""
    sender, receiver, channel = key
    sends, receives = graph.connections[key]
    name = f"from rank {sender} to rank {receiver} on channel {channel}"
    for rank, what, blocks in zip((sender, receiver), ("send", "receive"), ends[key], strict=True):
        if len(blocks) > 1:
            listed = " and ".join(str(block) for block in blocks[:3])
            errors.append(f"rank {rank}: thread blocks {listed} both {what} {name}: give one of them another channel")
    if len(sends) != len(receives):
        more = "sends" if len(sends) > len(receives) else "receives"
        first = (sends if more == "sends" else receives)[min(len(sends), len(receives))]
        errors.append(
            f"{len(sends)} sends but {len(receives)} receives {name}: there is no counterpart for {graph.name(first)}"
        )
    for send, receive in zip(sends, receives, strict=False):
        given, taken = graph.steps[send].size, graph.steps[receive].size
        if given != taken:
            errors.append(f"{graph.name(send)} sends {given} chunks, but {graph.name(receive)} receives {taken}")


def linear_order(graph: Graph, slots: int | None = None) -> tuple[list[int], list[int]]:
    """The steps in an order in which they can run with so many FIFO slots (None: any number), and those left over.

    A step begins when all before it ended; a send besides needs a slot, which the receive of the message `slots`
    before it frees.
    """
    count = len(graph.steps)
    missing = [0] * count
    waited_by: list[list[int]] = [[] for _ in range(count)]
    for number in range(count):
        missing[number] = (not graph.first[number]) + (graph.released_by[number] >= 0) + (graph.sender[number] >= 0)
        if graph.released_by[number] >= 0:
            waited_by[graph.released_by[number]].append(number)
    if slots is not None:
        for sends, receives in graph.connections.values():
            for receive, send in zip(receives, sends[slots:], strict=False):
                waited_by[receive].append(send)
                missing[send] += 1
            # A send with no receive before it that could free its slot never finds one.
            for send in sends[slots + len(receives) :]:
                missing[send] += 1
    for sends, receives in graph.connections.values():
        for receive in receives[len(sends) :]:
            missing[receive] += 1
    ready = deque(number for number in range(count) if missing[number] == 0)
    order = []
    while ready:
        number = ready.popleft()
        order.append(number)
        following = waited_by[number]
        if number + 1 < count and not graph.first[number + 1]:
            following = [*following, number + 1]
        if graph.receiver[number] >= 0:
            following = [*following, graph.receiver[number]]
        for other in following:
            missing[other] -= 1
            if missing[other] == 0:
                ready.append(other)
    if len(order) == count:
        return order, []
    ended = bytearray(count)
    for number in order:
        ended[number] = 1
    return order, [number for number in range(count) if not ended[number]]
