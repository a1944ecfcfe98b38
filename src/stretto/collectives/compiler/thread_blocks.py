"""Thread blocks: which of them does each instruction, and what it must wait for in others (section 5.2)."""

from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.collectives.compiler.instructions import InstructionDag


class CompileError(ValueError):
    """A program that no schedule can be made of as it was asked for."""


class Placed(NamedTuple):
    """An instruction, and the (thread block, position) pairs on its rank that it must wait for."""

    instruction: int
    waits_for: tuple[tuple[int, int], ...]


@dataclass
class Block:
    """A thread block while it is filled. part: that of its channel's messages, None where it has no connection."""

    channel: int
    part: int | None
    send_peer: int | None = None
    receive_peer: int | None = None
    instructions: list[Placed] = field(default_factory=list)


def place(dag: InstructionDag, channels: dict[int, int], sequence: tuple[int, ...]) -> list[list[Block]]:
    """Every rank's thread blocks, filled in the order of `sequence`.

    One for each unique (send peer, receive peer, channel); instructions inside a rank go to the one whose last
    instruction comes earliest, of their own part where it has any. CompileError where the program itself asks for
    thread blocks that cannot be.
    """
    ranks: list[list[Block]] = [[] for _ in range(dag.chunk_dag.parts.collective.ranks)]
    block_of, inside = _connected(dag, channels, ranks)
    _add_asked(dag, ranks, block_of, inside)
    for rank, part in inside:
        if not ranks[rank]:
            ranks[rank].append(Block(0, part))
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


def _connected(
    dag: InstructionDag, channels: dict[int, int], ranks: list[list[Block]]
) -> tuple[dict[int, int], set[tuple[int, int]]]:
    """Thread blocks for all connections, which of them each instruction goes to, and the (rank, part) of the rest."""
    operations = dag.chunk_dag.parts.operations
    sends_to: dict[tuple[int, int, int], int] = {}
    receives_from: dict[tuple[int, int, int], int] = {}
    inside: set[tuple[int, int]] = set()
    block_of: dict[int, int] = {}
    # Fused instructions first: they bind a peer to receive from to one to send to.
    by_fusion = sorted(
        range(len(dag.instructions)),
        key=lambda number: dag.instructions[number].sends is None or dag.instructions[number].receives is None,
    )
    for number in by_fusion:
        _, rank, _, _, receives, sends, part, asked = dag.instructions[number]
        if receives is None and sends is None:
            if asked is None:
                inside.add((rank, part))
            continue
        if asked is not None:
            continue
        message = sends if sends is not None else receives
        assert message is not None
        channel = channels[message]
        giver = None if receives is None else operations[receives].source.rank
        taker = None if sends is None else operations[sends].destination.rank
        found = None
        if taker is not None:
            found = sends_to.get((rank, taker, channel))
        if found is None and giver is not None:
            found = receives_from.get((rank, giver, channel))
        if found is None:
            found = len(ranks[rank])
            ranks[rank].append(Block(channel, part))
        block = ranks[rank][found]
        if taker is not None:
            block.send_peer = taker
            sends_to[rank, taker, channel] = found
        if giver is not None:
            block.receive_peer = giver
            receives_from[rank, giver, channel] = found
        block_of[number] = found
    return block_of, inside


def _add_asked(
    dag: InstructionDag, ranks: list[list[Block]], block_of: dict[int, int], inside: set[tuple[int, int]]
) -> None:
    """Thread blocks that the program asks for by number; CompileError where one would need two peers or channels."""
    if all(instruction.thread_block is None for instruction in dag.instructions):
        return
    raise NotImplementedError
    del ranks, block_of, inside


class _Clocks:
    """What each thread block knows to have ended in the others of its rank, so that it waits for nothing twice."""

    def __init__(self, ranks: list[list[Block]]) -> None:
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
