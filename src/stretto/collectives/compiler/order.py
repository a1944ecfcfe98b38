# SPDX-License-Identifier: Apache-2.0
"""Finds one global order of all instructions that respects every dependency and every FIFO (MSCCLang, section 5.2).

Thread blocks execute their instructions in this order, so no order inside a thread block can close a cycle. Two more
rules make it hold with real FIFOs: the receives of a connection come in the order of its sends, and no send comes
before the receive that frees its slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from stretto.collectives.compiler.instructions import InstructionDag


@dataclass(frozen=True)
class Order:
    """sequence: the instructions in order; split: the messages whose sends must not be fused for one to be found."""

    sequence: tuple[int, ...]
    split: frozenset[int]


def find_order(dag: InstructionDag, channels: dict[int, int], slots: int) -> Order:
    """Order instructions by when they are ready, and among those by the longest path that begins at them."""
    instructions = dag.instructions
    after: list[list[int]] = [[] for _ in instructions]
    missing = [0] * len(instructions)
    for number, others in enumerate(dag.before):
        missing[number] = len(others)
        for other in others:
            after[other].append(number)
    depths, heights = _depths(dag, after, missing)
    connections = {message: connection(dag, message, channel) for message, channel in channels.items()}
    fifos = {key: _Fifo() for key in set(connections.values())}
    ready = [(depths[number], -heights[number], number) for number, count in enumerate(missing) if count == 0]
    heapify(ready)
    sequence: list[int] = []
    while ready:
        entry = heappop(ready)
        number = entry[2]
        receives, sends = instructions[number].receives, instructions[number].sends
        incoming = None if receives is None else fifos[connections[receives]]
        outgoing = None if sends is None else fifos[connections[sends]]
        if incoming is not None and incoming.messages[:1] != [receives]:
            assert receives is not None
            incoming.receivers[receives] = entry
            continue
        if outgoing is not None and len(outgoing.messages) >= slots:
            heappush(outgoing.senders, entry)
            continue
        sequence.append(number)
        if incoming is not None:
            for woken in incoming.take():
                heappush(ready, woken)
        if outgoing is not None:
            assert sends is not None
            for woken in outgoing.give(sends):
                heappush(ready, woken)
        for other in after[number]:
            missing[other] -= 1
            if missing[other] == 0:
                heappush(ready, (depths[other], -heights[other], other))
    if len(sequence) == len(instructions):
        return Order(tuple(sequence), frozenset())
    return Order((), _culprits(dag, [message for fifo in fifos.values() for message in fifo.messages]))


class _Fifo:
    """A connection while the order is found: the messages in flight, and the instructions that it blocks.

    receivers: by message, instructions that are ready except that their message is not the first one; senders: those
    that are ready except for a free slot, the best first.
    """

    def __init__(self) -> None:
        self.messages: list[int] = []
        self.receivers: dict[int, tuple[int, int, int]] = {}
        self.senders: list[tuple[int, int, int]] = []

    def give(self, message: int) -> Iterator[tuple[int, int, int]]:
        """Send a message; yields its receiver, if that is no longer blocked."""
        self.messages.append(message)
        if len(self.messages) == 1 and message in self.receivers:
            yield self.receivers.pop(message)

    def take(self) -> Iterator[tuple[int, int, int]]:
        """Receive the first message; yields the next one's receiver and the best sender, if no longer blocked."""
        self.messages.pop(0)
        if self.messages and self.messages[0] in self.receivers:
            yield self.receivers.pop(self.messages[0])
        if self.senders:
            yield heappop(self.senders)


def _culprits(dag: InstructionDag, in_flight: list[int]) -> frozenset[int]:
    """Messages of fused instructions that fill the FIFOs at which the order ended; else all fused ones."""
    fused = {
        instruction.sends
        for instruction in dag.instructions
        if instruction.sends is not None and instruction.receives is not None
    }
    return frozenset((set(in_flight) & fused) or fused)


def connection(dag: InstructionDag, message: int, channel: int) -> tuple[int, int, int]:
    """A message's connection: its sender, its receiver and its channel."""
    operation = dag.chunk_dag.parts.operations[message]
    return operation.source.rank, operation.destination.rank, channel


def _depths(dag: InstructionDag, after: list[list[int]], missing: list[int]) -> tuple[list[int], list[int]]:
    """Find for each instruction the longest path to it, and the longest one from it, in instructions."""
    instructions = dag.instructions
    count = [missing[number] + (instruction.receives is not None) for number, instruction in enumerate(instructions)]
    depths, heights = [0] * len(instructions), [0] * len(instructions)
    stack = [number for number, left in enumerate(count) if left == 0]
    topological = []
    while stack:
        number = stack.pop()
        topological.append(number)
        sends = instructions[number].sends
        following = after[number] if sends is None else [*after[number], dag.receiver[sends]]
        for other in following:
            depths[other] = max(depths[other], depths[number] + 1)
            count[other] -= 1
            if count[other] == 0:
                stack.append(other)
    assert len(topological) == len(instructions), "fusion made a cycle"
    for number in reversed(topological):
        sends = instructions[number].sends
        following = after[number] if sends is None else [*after[number], dag.receiver[sends]]
        heights[number] = max((heights[other] + 1 for other in following), default=0)
    return depths, heights
