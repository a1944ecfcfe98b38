# SPDX-License-Identifier: Apache-2.0
"""Generates each rank's instructions for each operation, and fuses a receive with a send (MSCCLang, 4.2, 4.3)."""

from dataclasses import dataclass
from typing import NamedTuple

from stretto.collectives.compiler.chunk_dag import ChunkDag
from stretto.collectives.language import Chunks, OperationKind
from stretto.collectives.schedule import StepType


class Instruction(NamedTuple):
    """One rank's part of an operation.

    source, destination: its own chunks, as in a schedule's step; receives, sends: its messages, by the number of the
    operation that they belong to; part: the instance that it belongs to (see `Operation`); thread_block: the number
    that the program asks for.
    """

    type: StepType
    rank: int
    source: Chunks | None
    destination: Chunks | None
    receives: int | None
    sends: int | None
    part: int
    thread_block: int | None

    @property
    def size(self) -> int:
        """The number of chunks that it handles."""
        chunks = self.source or self.destination
        assert chunks is not None
        return chunks.size

    @property
    def is_local(self) -> bool:
        """True if it has no message."""
        return self.receives is None and self.sends is None

    @property
    def message(self) -> int:
        """The message that determines its channel; a fused instruction's two messages share theirs."""
        message = self.receives if self.sends is None else self.sends
        assert message is not None
        return message


@dataclass(frozen=True)
class InstructionDag:
    """Instructions, and for each the instructions of its rank that must come before it.

    A message's sender comes before its receiver, too: `sender` and `receiver` map a message (by its operation) to these
    two instructions. Once some are fused, the list is not in an order in which it could be executed.
    """

    chunk_dag: ChunkDag
    instructions: tuple[Instruction, ...]
    before: tuple[tuple[int, ...], ...]
    sender: dict[int, int]
    receiver: dict[int, int]


def generate_instructions(dag: ChunkDag) -> InstructionDag:
    """Generate a send and a receive (or rrc) for an operation between ranks, a copy or a reduce inside a rank."""
    instructions: list[Instruction] = []
    before: list[tuple[int, ...]] = []
    sender: dict[int, int] = {}
    receiver: dict[int, int] = {}
    # For each operation, its instruction at the source's and at the destination's rank.
    at_source: list[int] = []
    at_destination: list[int] = []

    def on_rank(operation: int, rank: int) -> int:
        same = dag.parts.operations[operation].destination.rank == rank
        return at_destination[operation] if same else at_source[operation]

    for number, operation in enumerate(dag.parts.operations):
        kind, source, destination, _, _, thread_blocks, _, part = operation
        dependencies = dag.true[number] + dag.false[number]
        reduces = kind is OperationKind.REDUCE
        if source.rank == destination.rank:
            at_source.append(len(instructions))
            at_destination.append(len(instructions))
            what = StepType.REDUCE if reduces else StepType.COPY
            instructions.append(Instruction(what, source.rank, source, destination, None, None, part, thread_blocks[0]))
            before.append(tuple({on_rank(*dependency) for dependency in dependencies}))
            continue
        sender[number] = len(instructions)
        receiver[number] = len(instructions) + 1
        at_source.append(len(instructions))
        at_destination.append(len(instructions) + 1)
        instructions.append(Instruction(StepType.SEND, source.rank, source, None, None, number, part, thread_blocks[0]))
        before.append(tuple({on_rank(operation, rank) for operation, rank in dependencies if rank == source.rank}))
        # The received sum's other addend is the local chunk, which may be in another place than the sender's.
        what, local = (StepType.RECEIVE_REDUCE_COPY, destination) if reduces else (StepType.RECEIVE, None)
        instructions.append(
            Instruction(what, destination.rank, local, destination, number, None, part, thread_blocks[1])
        )
        before.append(tuple({on_rank(operation, rank) for operation, rank in dependencies if rank == destination.rank}))
    return InstructionDag(dag, tuple(instructions), tuple(before), sender, receiver)


def fuse(dag: InstructionDag, unfused: frozenset[int] = frozenset()) -> InstructionDag:
    """Fuse each receive with a send of exactly the chunks that it stored: r + s to rcs, rrc + s to rrcs or rrs.

    Of several sends, the one on the longest path is fused, and none for which the program asks for another thread
    block. rrs stores nothing: it is generated only if no other operation reads the sum and the collective does not ask
    for it. Sends of the operations in `unfused` stay separate.
    """
    fused_into, survives = _choose(dag, unfused), dag.chunk_dag.survives
    instructions: list[Instruction] = []
    before: list[tuple[int, ...]] = []
    number_of: dict[int, int] = {}
    absorbed = {send: receive for receive, send in fused_into.items()}
    for old, instruction in enumerate(dag.instructions):
        if old in absorbed:
            continue
        number_of[old] = len(instructions)
        send = fused_into.get(old)
        if send is not None:
            message = dag.instructions[send].sends
            assert instruction.receives is not None
            if instruction.type is StepType.RECEIVE:
                what, destination = StepType.RECEIVE_COPY_SEND, instruction.destination
            elif dag.chunk_dag.read_by_others[instruction.receives] == 1 and not survives[instruction.receives]:
                what, destination = StepType.RECEIVE_REDUCE_SEND, None
            else:
                what, destination = StepType.RECEIVE_REDUCE_COPY_SEND, instruction.destination
            instruction = instruction._replace(type=what, destination=destination, sends=message)
        instructions.append(instruction)
    for send, receive in absorbed.items():
        number_of[send] = number_of[receive]
    for old in range(len(dag.instructions)):
        if old not in absorbed:
            before.append(tuple({number_of[other] for other in dag.before[old]}))
    sender = {message: number_of[old] for message, old in dag.sender.items()}
    receiver = {message: number_of[old] for message, old in dag.receiver.items()}
    return InstructionDag(dag.chunk_dag, tuple(instructions), tuple(before), sender, receiver)


def _choose(dag: InstructionDag, unfused: frozenset[int]) -> dict[int, int]:
    """Choose for each receive that is fused its send."""
    operations = dag.chunk_dag.parts.operations
    to_leaf = _longest_paths_to_a_leaf(dag)
    chosen: dict[int, int] = {}
    for number, instruction in enumerate(dag.instructions):
        message = instruction.sends
        if message is None or message in unfused or len(dag.before[number]) != 1:
            continue
        (receive,) = dag.before[number]
        stored = dag.instructions[receive]
        if stored.receives is None or stored.destination != instruction.source or stored.part != instruction.part:
            continue
        channels = {operations[message].channel, operations[stored.receives].channel} - {None}
        if len(channels) > 1 or stored.thread_block != instruction.thread_block:
            continue
        other = chosen.get(receive)
        if other is None or to_leaf[number] > to_leaf[other]:
            chosen[receive] = number
    return chosen


def _longest_paths_to_a_leaf(dag: InstructionDag) -> list[int]:
    """Find for each instruction, before fusion, the length of the longest path that begins at it."""
    longest = [0] * len(dag.instructions)
    for number in range(len(dag.instructions) - 1, -1, -1):
        # Before fusion, the instructions can be executed in the order of their numbers.
        through = longest[number] + 1
        for other in dag.before[number]:
            if longest[other] < through:
                longest[other] = through
        message = dag.instructions[number].receives
        if message is not None:
            send = dag.sender[message]
            if longest[send] < through:
                longest[send] = through
    return longest
