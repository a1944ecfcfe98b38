"""Thread blocks: which of them does each instruction, and what it must wait for in others (section 5.2)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from stretto.collectives.compiler.instructions import Instruction, InstructionDag


class CompileError(ValueError):
    """A program that no schedule can be made of as it was asked for."""


class Placed(NamedTuple):
    """An instruction, and the (thread block, position) pairs on its rank that it must wait for."""

    instruction: int
    waits_for: tuple[tuple[int, int], ...]


@dataclass
class ThreadBlockBuilder:
    """A thread block while it is filled. part: that of its channel's messages, None where it has no connection."""

    channel: int
    part: int | None
    send_peer: int | None = None
    receive_peer: int | None = None
    instructions: list[Placed] = field(default_factory=list)


def place(dag: InstructionDag, channels: dict[int, int], sequence: tuple[int, ...]) -> list[list[ThreadBlockBuilder]]:
    """Every rank's thread blocks, filled in the order of `sequence`.

    An instruction goes to the thread block that the program asks for. The others: one for each unique (send peer,
    receive peer, channel); those inside a rank go to the one whose last instruction comes earliest, of their own part
    where it has any. CompileError where the program asks for a thread block that would need two peers or channels, or
    for two for one connection.
    """
    placement = _Placement(dag, channels)
    if any(instruction.thread_block is not None for instruction in dag.instructions):
        placement.add_asked()
    placement.add_connected()
    ranks, block_of, inside = placement.ranks, placement.block_of, placement.inside
    for rank, part in inside:
        if not ranks[rank]:
            ranks[rank].append(ThreadBlockBuilder(0, part))
    last_used = [[-1] * len(blocks) for blocks in ranks]
    candidates: dict[tuple[int, int], list[int]] = {}
    for rank, part in inside:
        own = [number for number, block in enumerate(ranks[rank]) if block.part == part]
        candidates[rank, part] = own or list(range(len(ranks[rank])))
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
        block.instructions.append(Placed(number, waits_for))
        clocks.end(rank, chosen)
    return ranks


class _Placement:
    """Which thread block each instruction goes to, and whom each thread block talks to, while both are found."""

    def __init__(self, dag: InstructionDag, channels: dict[int, int]) -> None:
        self.ranks: list[list[ThreadBlockBuilder]] = [[] for _ in range(dag.chunk_dag.parts.collective.ranks)]
        self.block_of: dict[int, int] = {}
        self.inside: set[tuple[int, int]] = set()
        self._dag = dag
        self._channels = channels
        self._operations = dag.chunk_dag.parts.operations
        # By rank, peer and channel: the one thread block that may send to it, or receive from it.
        self._sends_to: dict[tuple[int, int, int], int] = {}
        self._receives_from: dict[tuple[int, int, int], int] = {}

    def add_asked(self) -> None:
        """Instructions for which the program asks for a thread block by number: each part has its own of a number."""
        numbered: dict[tuple[int, int, int], int] = {}
        # Those with messages first: they say which channel a thread block has.
        for number, instruction in sorted(enumerate(self._dag.instructions), key=lambda pair: _is_inside(pair[1])):
            if instruction.thread_block is None:
                continue
            rank, key = instruction.rank, (instruction.rank, instruction.part, instruction.thread_block)
            if key not in numbered:
                channel = 0 if _is_inside(instruction) else self._channel(instruction)
                numbered[key] = self._new_block(rank, channel, instruction.part)
            self._bind(number, numbered[key])

    def add_connected(self) -> None:
        """The other instructions with messages: one thread block for each connection, shared where fusion binds two."""
        # Fused instructions first: they bind a peer to receive from to one to send to.
        by_fusion = sorted(
            range(len(self._dag.instructions)),
            key=lambda number: (
                self._dag.instructions[number].sends is None or self._dag.instructions[number].receives is None
            ),
        )
        for number in by_fusion:
            instruction = self._dag.instructions[number]
            if instruction.thread_block is not None:
                continue
            if _is_inside(instruction):
                self.inside.add((instruction.rank, instruction.part))
                continue
            rank, channel = instruction.rank, self._channel(instruction)
            giver, taker = self._peers(instruction)
            found = None
            if taker is not None:
                found = self._sends_to.get((rank, taker, channel))
            if found is None and giver is not None:
                found = self._receives_from.get((rank, giver, channel))
            if found is None:
                found = self._new_block(rank, channel, instruction.part)
            self._bind(number, found)

    def _new_block(self, rank: int, channel: int, part: int) -> int:
        self.ranks[rank].append(ThreadBlockBuilder(channel, part))
        return len(self.ranks[rank]) - 1

    def _peers(self, instruction: Instruction) -> tuple[int | None, int | None]:
        """Whom it receives from and whom it sends to."""
        receives, sends = instruction.receives, instruction.sends
        return (
            None if receives is None else self._operations[receives].source.rank,
            None if sends is None else self._operations[sends].destination.rank,
        )

    def _channel(self, instruction: Instruction) -> int:
        message = instruction.receives if instruction.sends is None else instruction.sends
        assert message is not None
        return self._channels[message]

    def _bind(self, number: int, found: int) -> None:
        """Put an instruction into a thread block, which must have its peers and its channel or none yet."""
        instruction = self._dag.instructions[number]
        self.block_of[number] = found
        if _is_inside(instruction):
            return
        rank, channel = instruction.rank, self._channel(instruction)
        giver, taker = self._peers(instruction)
        block = self.ranks[rank][found]
        if block.channel != channel:
            self._refuse(number, found, f"channels {block.channel} and {channel}", lambda other: True)
        if taker is not None:
            if block.send_peer not in (None, taker):
                what = f"two ranks to send to, {block.send_peer} and {taker}"
                self._refuse(number, found, what, lambda other: other.sends is not None)
            if (first := self._sends_to.setdefault((rank, taker, channel), found)) != found:
                self._refuse_second(number, first, f"sends to rank {taker}")
            block.send_peer = taker
        if giver is not None:
            if block.receive_peer not in (None, giver):
                what = f"two ranks to receive from, {block.receive_peer} and {giver}"
                self._refuse(number, found, what, lambda other: other.receives is not None)
            if (first := self._receives_from.setdefault((rank, giver, channel), found)) != found:
                self._refuse_second(number, first, f"receives from rank {giver}")
            block.receive_peer = giver

    def _refuse(self, number: int, block: int, what: str, is_cause: Callable[[Instruction], bool]) -> NoReturn:
        instruction = self._dag.instructions[number]
        other = next(
            other
            for other in self._others(number, block)
            if is_cause(self._dag.instructions[other]) and not _is_inside(self._dag.instructions[other])
        )
        raise CompileError(
            f"{self._line(number)}: {self._name(other)} on rank {instruction.rank} would need {what}; "
            f"the other is asked for at {self._line(other)}"
        )

    def _refuse_second(self, number: int, block: int, what: str) -> NoReturn:
        instruction = self._dag.instructions[number]
        other = next(iter(self._others(number, block)))
        raise CompileError(
            f"{self._line(number)}: {self._name(number)} on rank {instruction.rank} {what} over a channel on which "
            f"{self._name(other)} does already ({self._line(other)}): ask for that one, or for another channel"
        )

    def _others(self, number: int, block: int) -> Iterator[int]:
        """The instructions that were put into a thread block of this one's rank."""
        rank = self._dag.instructions[number].rank
        return (
            other
            for other, found in self.block_of.items()
            if found == block and other != number and self._dag.instructions[other].rank == rank
        )

    def _name(self, number: int) -> str:
        asked = self._dag.instructions[number].thread_block
        return "a thread block" if asked is None else f"thread block {asked}"

    def _line(self, number: int) -> str:
        instruction = self._dag.instructions[number]
        message = instruction.receives if instruction.sends is None else instruction.sends
        assert message is not None
        return self._operations[message].line


def _is_inside(instruction: Instruction) -> bool:
    return instruction.receives is None and instruction.sends is None


class _Clocks:
    """What each thread block knows to have ended in the others of its rank, so that it waits for nothing twice."""

    def __init__(self, ranks: list[list[ThreadBlockBuilder]]) -> None:
        # A dictionary is never changed once it is stored, so that one can stand for many positions.
        self._known: list[list[dict[int, int]]] = [[{} for _ in blocks] for blocks in ranks]
        self._at: list[list[list[dict[int, int]]]] = [[[] for _ in blocks] for blocks in ranks]

    def wait(self, rank: int, block: int, others: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Which of these (thread block, position) pairs must be waited for, by what is known already."""
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
        """An instruction of this thread block was placed: what it knows, whoever waits for it knows too."""
        self._at[rank][block].append(self._known[rank][block])
