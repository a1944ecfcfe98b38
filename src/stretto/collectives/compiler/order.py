"""The order: one global sequence of all instructions that respects every dependency and every FIFO (section 5.2).

Thread blocks take their instructions in this sequence, so no order inside a thread block can close a cycle. Two more
rules make it hold with real FIFOs: the receives of a connection come in the order of its sends, and no send comes
before the receive that frees its slot.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from stretto.collectives.compiler.instructions import InstructionDag


@dataclass(frozen=True)
class Order:
    """sequence: the instructions in order; split: the messages whose sends must not be fused for one to be found."""

    sequence: tuple[int, ...]
    split: frozenset[int]


def find_order(dag: InstructionDag, channels: dict[int, int], slots: int) -> Order:
    """The instructions that are ready first come first, and of those, the ones with the longest path behind them."""
    instructions = dag.instructions
    after: list[list[int]] = [[] for _ in instructions]
    missing = [0] * len(instructions)
    for number, others in enumerate(dag.before):
        missing[number] = len(others)
        for other in others:
            after[other].append(number)
    depths, heights = _depths(dag, after, missing)
    connections = _connections(dag, channels)
    in_flight: dict[tuple[int, int, int], deque[int]] = {key: deque() for key in set(connections.values())}
    waiting: dict[tuple[int, int, int], list[int]] = {key: [] for key in in_flight}
    ready: list[tuple[int, int, int]] = []

    def offer(number: int) -> None:
        heappush(ready, (depths[number], -heights[number], number))

    for number, count in enumerate(missing):
        if count == 0:
            offer(number)
    sequence: list[int] = []
    blocked: set[int] = set()
    while ready:
        number = heappop(ready)[2]
        instruction = instructions[number]
        receives, sends = instruction.receives, instruction.sends
        if receives is not None:
            queue = in_flight[connections[receives]]
            if not queue or queue[0] != receives:
                waiting[connections[receives]].append(number)
                blocked.add(number)
                continue
        if sends is not None and len(in_flight[connections[sends]]) >= slots:
            waiting[connections[sends]].append(number)
            blocked.add(number)
            continue
        sequence.append(number)
        blocked.discard(number)
        changed = []
        if receives is not None:
            in_flight[connections[receives]].popleft()
            changed.append(connections[receives])
        if sends is not None:
            in_flight[connections[sends]].append(sends)
            changed.append(connections[sends])
        for key in changed:
            for other in waiting[key]:
                offer(other)
            waiting[key].clear()
        for other in after[number]:
            missing[other] -= 1
            if missing[other] == 0:
                offer(other)
    if len(sequence) == len(instructions):
        return Order(tuple(sequence), frozenset())
    return Order((), _culprits(dag, in_flight))


def _culprits(dag: InstructionDag, in_flight: dict[tuple[int, int, int], deque[int]]) -> frozenset[int]:
    """Messages of fused instructions that fill the FIFOs at which the order ended; else all fused ones."""
    fused = {
        instruction.sends
        for instruction in dag.instructions
        if instruction.sends is not None and instruction.receives is not None
    }
    stuck = {message for queue in in_flight.values() for message in queue}
    return frozenset((stuck & fused) or fused)


def program_order(dag: InstructionDag) -> tuple[int, ...]:
    """The order of the program itself, each receive right after its send: one slot is enough, but nothing may be fused.

    It is what remains where the order by priority ends with every FIFO full.
    """
    return tuple(range(len(dag.instructions)))


def connection(dag: InstructionDag, message: int, channel: int) -> tuple[int, int, int]:
    """A message's connection: who sends, who receives, and the channel."""
    operation = dag.chunk_dag.parts.operations[message]
    return operation.source.rank, operation.destination.rank, channel


def _connections(dag: InstructionDag, channels: dict[int, int]) -> dict[int, tuple[int, int, int]]:
    return {message: connection(dag, message, channel) for message, channel in channels.items()}


def _depths(dag: InstructionDag, after: list[list[int]], missing: list[int]) -> tuple[list[int], list[int]]:
    """For each instruction: the longest path to it, and the longest one from it, in instructions."""
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
