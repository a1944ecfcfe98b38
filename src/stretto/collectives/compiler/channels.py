# SPDX-License-Identifier: Apache-2.0
"""Assigns a channel to each message: which of the connections between two ranks it uses (MSCCLang, section 5.2).

A thread block has one peer to send to and one to receive from, and a connection has one thread block at either end.
So on one channel of a rank, fused instructions forward the messages of one peer to one peer only; the messages of a
fused instruction share a channel; messages of different parts share none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from stretto.collectives.compiler.instructions import InstructionDag


@dataclass(frozen=True)
class Channels:
    """of: each message's channel; split: the messages whose sends must not be fused for a channel to be found."""

    of: dict[int, int]
    split: frozenset[int]


def assign_channels(dag: InstructionDag) -> Channels:
    """Assign the channel that the program asks for, else the lowest on which a message's thread blocks are possible."""
    operations = dag.chunk_dag.parts.operations
    # By rank, part and channel: the peer to which fused instructions forward a peer's messages, and the reverse.
    passes_to: dict[tuple[int, int, int], dict[int, int]] = {}
    passes_from: dict[tuple[int, int, int], dict[int, int]] = {}
    chosen: dict[int, int] = {}
    split: set[int] = set()

    def fits(link: tuple[int, int, int], part: int, channel: int) -> bool:
        rank, sender, receiver = link
        at = rank, part, channel
        return (
            passes_to.get(at, {}).get(sender, receiver) == receiver
            and passes_from.get(at, {}).get(receiver, sender) == sender
        )

    for chain in _chains(dag):
        part = dag.instructions[dag.sender[chain[0]]].part
        asked = {operations[message].channel for message in chain} - {None}
        links = [_link(dag, message) for message in chain[1:]]
        crossing = _first_that_crosses(chain[1:], links)
        if crossing is not None:
            split.add(crossing)
            continue
        if len(asked) > 1:
            split.add(_first_that_differs(chain, [operations[message].channel for message in chain]))
            continue
        if asked:
            channel = next(iter(asked))
            assert channel is not None
            misfits = [message for message, link in zip(chain[1:], links, strict=True) if not fits(link, part, channel)]
            if misfits:
                split.update(misfits)
                continue
        else:
            channel = next(channel for channel in count() if all(fits(link, part, channel) for link in links))
        for rank, sender, receiver in links:
            passes_to.setdefault((rank, part, channel), {})[sender] = receiver
            passes_from.setdefault((rank, part, channel), {})[receiver] = sender
        for message in chain:
            chosen[message] = channel
    if split:
        return Channels({}, frozenset(split))
    return Channels(_numbered(dag, chosen), frozenset())


def _chains(dag: InstructionDag) -> Iterator[list[int]]:
    """Chains of messages: each is forwarded by the fused instruction that receives it."""
    for first in sorted(dag.sender):
        if dag.instructions[dag.sender[first]].receives is not None:
            continue
        chain = [first]
        while (following := dag.instructions[dag.receiver[chain[-1]]].sends) is not None:
            chain.append(following)
        yield chain


def _first_that_differs(chain: list[int], asked: list[int | None]) -> int:
    """The first message that the program wants on another channel than one before it in the chain."""
    wanted: int | None = None
    for message, channel in zip(chain, asked, strict=True):
        if channel is not None and wanted is not None and channel != wanted:
            return message
        wanted = wanted if channel is None else channel
    raise AssertionError("all agree")


def _first_that_crosses(messages: list[int], links: list[tuple[int, int, int]]) -> int | None:
    """The first message of a chain that passes a rank a second time, from another peer or to another one."""
    passes_to: dict[tuple[int, int], int] = {}
    passes_from: dict[tuple[int, int], int] = {}
    for message, (rank, sender, receiver) in zip(messages, links, strict=True):
        if (
            passes_to.setdefault((rank, sender), receiver) != receiver
            or passes_from.setdefault((rank, receiver), sender) != sender
        ):
            return message
    return None


def _link(dag: InstructionDag, message: int) -> tuple[int, int, int]:
    """The rank that forwards this message, the peer that it comes from, and the peer that it goes to."""
    passing = dag.instructions[dag.sender[message]]
    assert passing.receives is not None
    operations = dag.chunk_dag.parts.operations
    return passing.rank, operations[passing.receives].source.rank, operations[message].destination.rank


def _numbered(dag: InstructionDag, chosen: dict[int, int]) -> dict[int, int]:
    """Number every part's channels separately: those of the first part as they are, the others after them."""
    operations = dag.chunk_dag.parts.operations
    used = sorted({(operations[message].part, channel) for message, channel in chosen.items()})
    numbers: dict[tuple[int, int], int] = {}
    following = max((channel for part, channel in used if part == 0), default=-1) + 1
    for part, channel in used:
        if part == 0:
            numbers[part, channel] = channel
        else:
            numbers[part, channel] = following
            following += 1
    return {message: numbers[operations[message].part, channel] for message, channel in chosen.items()}
