# SPDX-License-Identifier: Apache-2.0
"""Places instructions in thread blocks, and finds what each must wait for in others (MSCCLang, section 5.2).

Three passes:

1. `_Assignment` finds the thread block of each instruction with a message, and whom each thread block talks to.
2. `place` fills the thread blocks in the compiler's order; instructions without a message go where there is room.
3. At the same time, `_Clocks` finds the required waits: for steps that the thread block does not know to have ended.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.collectives.compiler.instructions import Instruction, InstructionDag
from stretto.collectives.compiler.placement_errors import PlacementErrors


class PlacedInstruction(NamedTuple):
    """An instruction, and the (thread block, position) pairs on its rank that it must wait for."""

    instruction: int
    waits_for: tuple[tuple[int, int], ...]


@dataclass
class ThreadBlockBuilder:
    """A thread block while it is filled. part: the part of the data that it handles, None where it may be any."""

    channel: int
    part: int | None
    send_peer: int | None = None
    receive_peer: int | None = None
    instructions: list[PlacedInstruction] = field(default_factory=list)


def place(dag: InstructionDag, channels: dict[int, int], sequence: tuple[int, ...]) -> list[list[ThreadBlockBuilder]]:
    """Every rank's thread blocks, filled in the order of `sequence`.

    An instruction goes to the thread block that the program asks for. The others: one for each unique (send peer,
    receive peer, channel); those without a message go to the one whose last instruction comes earliest, of their own
    part where it has any. Raises CompileError where the program asks for a thread block that would need two peers or
    channels, or for two for one connection.
    """
    assignment = _Assignment(dag, channels)
    if any(instruction.thread_block is not None for instruction in dag.instructions):
        assignment.add_asked()
    assignment.add_connected()
    ranks, block_of = assignment.ranks, assignment.block_of
    for rank, part in assignment.local_parts:
        if not ranks[rank]:
            ranks[rank].append(ThreadBlockBuilder(0, part))
    candidates: dict[tuple[int, int], list[int]] = {}
    for rank, part in assignment.local_parts:
        own = [number for number, block in enumerate(ranks[rank]) if block.part == part]
        candidates[rank, part] = own or list(range(len(ranks[rank])))
    last_used = [[-1] * len(blocks) for blocks in ranks]
    where: dict[int, tuple[int, int]] = {}
    clocks = _Clocks(ranks)
    for time, number in enumerate(sequence):
        instruction = dag.instructions[number]
        rank = instruction.rank
        chosen = block_of.get(number)
        if chosen is None:
            used = last_used[rank]
            chosen = min(candidates[rank, instruction.part], key=lambda block: used[block])
        last_used[rank][chosen] = time
        block = ranks[rank][chosen]
        waits_for = clocks.wait(rank, chosen, [where[other] for other in dag.before[number]])
        where[number] = chosen, len(block.instructions)
        block.instructions.append(PlacedInstruction(number, waits_for))
        clocks.end(rank, chosen)
    return ranks


class _Assignment:
    """Assigns instructions with messages to thread blocks.

    ranks: the thread blocks so far; block_of: each assigned instruction's number of a thread block on its rank;
    local_parts: the (rank, part) pairs that have instructions without a message, which `place` puts anywhere.
    """

    def __init__(self, dag: InstructionDag, channels: dict[int, int]) -> None:
        self.ranks: list[list[ThreadBlockBuilder]] = [[] for _ in range(dag.chunk_dag.parts.collective.ranks)]
        self.block_of: dict[int, int] = {}
        self.local_parts: set[tuple[int, int]] = set()
        self._dag = dag
        self._channels = channels
        self._operations = dag.chunk_dag.parts.operations
        self._errors = PlacementErrors(dag, self.block_of)
        # By rank, peer and channel: the one thread block that may send to it, or receive from it.
        self._sends_to: dict[tuple[int, int, int], int] = {}
        self._receives_from: dict[tuple[int, int, int], int] = {}

    def add_asked(self) -> None:
        """Assign instructions whose thread block the program asks for by number: each part has its own of a number."""
        numbered: dict[tuple[int, int, int], int] = {}
        # Those with messages first: they determine a thread block's channel.
        for number, instruction in sorted(enumerate(self._dag.instructions), key=lambda pair: pair[1].is_local):
            if instruction.thread_block is None:
                continue
            rank, key = instruction.rank, (instruction.rank, instruction.part, instruction.thread_block)
            if key not in numbered:
                channel = 0 if instruction.is_local else self._channels[instruction.message]
                numbered[key] = self._new_block(rank, channel, instruction.part)
            self._assign(number, numbered[key])

    def add_connected(self) -> None:
        """Assign the other instructions with messages: a thread block for each connection, shared by fused ones."""
        # Fused instructions first: they tie a peer to receive from to one to send to.
        fused_first = sorted(
            range(len(self._dag.instructions)),
            key=lambda number: (
                self._dag.instructions[number].sends is None or self._dag.instructions[number].receives is None
            ),
        )
        for number in fused_first:
            instruction = self._dag.instructions[number]
            if instruction.thread_block is not None:
                continue
            if instruction.is_local:
                self.local_parts.add((instruction.rank, instruction.part))
                continue
            rank, channel = instruction.rank, self._channels[instruction.message]
            sender, receiver = self._peers(instruction)
            found = None
            if receiver is not None:
                found = self._sends_to.get((rank, receiver, channel))
            if found is None and sender is not None:
                found = self._receives_from.get((rank, sender, channel))
            if found is None:
                found = self._new_block(rank, channel, instruction.part)
            self._assign(number, found)

    def _assign(self, number: int, found: int) -> None:
        """Assign an instruction to a thread block, which must have its peers and its channel, or none yet."""
        instruction = self._dag.instructions[number]
        self.block_of[number] = found
        if instruction.is_local:
            return
        rank, channel = instruction.rank, self._channels[instruction.message]
        sender, receiver = self._peers(instruction)
        block = self.ranks[rank][found]
        if block.channel != channel:
            self._errors.raise_for_two(number, found, f"channels {block.channel} and {channel}", lambda _: True)
        if receiver is not None:
            if block.send_peer not in (None, receiver):
                what = f"two ranks to send to, {block.send_peer} and {receiver}"
                self._errors.raise_for_two(number, found, what, lambda other: other.sends is not None)
            if (first := self._sends_to.setdefault((rank, receiver, channel), found)) != found:
                self._errors.raise_for_second_block(number, first, f"sends to rank {receiver}")
            block.send_peer = receiver
        if sender is not None:
            if block.receive_peer not in (None, sender):
                what = f"two ranks to receive from, {block.receive_peer} and {sender}"
                self._errors.raise_for_two(number, found, what, lambda other: other.receives is not None)
            if (first := self._receives_from.setdefault((rank, sender, channel), found)) != found:
                self._errors.raise_for_second_block(number, first, f"receives from rank {sender}")
            block.receive_peer = sender

    def _new_block(self, rank: int, channel: int, part: int) -> int:
        self.ranks[rank].append(ThreadBlockBuilder(channel, part))
        return len(self.ranks[rank]) - 1

    def _peers(self, instruction: Instruction) -> tuple[int | None, int | None]:
        """The rank that it receives from and the rank that it sends to."""
        receives, sends = instruction.receives, instruction.sends
        return (
            None if receives is None else self._operations[receives].source.rank,
            None if sends is None else self._operations[sends].destination.rank,
        )


class _Clocks:
    """Vector clocks: what each thread block knows to have ended in the others of its rank, so it never waits twice."""

    def __init__(self, ranks: list[list[ThreadBlockBuilder]]) -> None:
        # A dictionary is never changed once it is stored, so that one can stand for many positions.
        self._known: list[list[dict[int, int]]] = [[{} for _ in blocks] for blocks in ranks]
        self._at: list[list[list[dict[int, int]]]] = [[[] for _ in blocks] for blocks in ranks]

    def wait(self, rank: int, block: int, others: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Find the (thread block, position) pairs that must be waited for, given what is known already."""
        known = self._known[rank][block]
        needed = [(other, at) for other, at in others if other != block and known.get(other, -1) < at]
        if not needed:
            return ()
        waits_for: list[tuple[int, int]] = []
        known = dict(known)
        # The one that knows most first: it may make the others needless.
        for other, at in sorted(needed, key=lambda pair: -len(self._at[rank][pair[0]][pair[1]])):
            if known.get(other, -1) >= at:
                continue
            waits_for.append((other, at))
            known[other] = at
            for third, ended in self._at[rank][other][at].items():
                if third != block and known.get(third, -1) < ended:
                    known[third] = ended
        self._known[rank][block] = known
        latest: dict[int, int] = {}
        for other, at in waits_for:
            latest[other] = max(latest.get(other, -1), at)
        return tuple(sorted(latest.items()))

    def end(self, rank: int, block: int) -> None:
        """Note that this thread block has one more instruction: a wait for it conveys all that the block knows now."""
        self._at[rank][block].append(self._known[rank][block])
