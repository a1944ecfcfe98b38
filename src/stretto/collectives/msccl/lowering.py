# SPDX-License-Identifier: Apache-2.0
"""Lowers a script's program to one of our own chunk language: its collective, its places and its operations.

The collectives of msccl-tools are known here by their conditions. A script's own collective gives its precondition by
what its input buffers hold at the start. Its postcondition is code, so it is taken from the trace: each output chunk
must hold at the end what it held at the end of the trace, which the script's check has approved.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stretto.collectives import collective as ours
from stretto.collectives.collective import MAX_CHUNKS, Expected
from stretto.collectives.language import Chunks, Operation, OperationKind, Program
from stretto.collectives.msccl import conditions
from stretto.collectives.msccl.values import MscclBuffer, ScriptError


class ChunkRange(NamedTuple):
    """`size` chunks from `start` on in a rank's buffer, under the script's name for it."""

    rank: int
    buffer: Hashable
    start: int
    size: int

    def __str__(self) -> str:
        last = f"..{self.start + self.size - 1}" if self.size > 1 else ""
        name = self.buffer.name if isinstance(self.buffer, MscclBuffer) else f"scratch {self.buffer!r}"
        return f"rank {self.rank}'s {name}[{self.start}{last}]"


class Recorded(NamedTuple):
    """One copy or reduce, like `Operation`, but with the script's places."""

    kind: OperationKind
    source: ChunkRange
    destination: ChunkRange
    channel: int | None
    thread_blocks: tuple[int | None, int | None]
    line: str


@dataclass(frozen=True)
class Lowered:
    """notes: remarks on how the script was interpreted."""

    program: Program
    notes: tuple[str, ...]


def lower(
    collective: conditions.MscclCollective,
    buffers: conditions.Buffers,
    filled: tuple[tuple[bool, ...], ...],
    operations: tuple[Recorded, ...],
    origin: str,
) -> Lowered:
    """Lower these operations to a program.

    buffers: what all places hold at the end; filled[rank][index]: whether that input chunk held something at the
    start; origin: what errors call the program. ScriptError for conditions that cannot be understood.
    """
    known = _find_known(collective)
    memory, notes = (known, ()) if known else _find_memory(collective, buffers, filled, operations, origin)
    starts, sizes = _lay_out_scratch(buffers)
    if max(sizes) > MAX_CHUNKS:
        raise ScriptError(f"{origin}: a scratch buffer has at most {MAX_CHUNKS} chunks, not {max(sizes)}")

    def find(place: ChunkRange) -> Chunks:
        rank, buffer, index, size = place
        if buffer in (MscclBuffer.input, MscclBuffer.output):
            name, index = memory.place(rank, ours.Buffer.IN if buffer is MscclBuffer.input else ours.Buffer.OUT, index)
            return Chunks(rank, name, index, size)
        return Chunks(rank, ours.Buffer.SCRATCH, starts[rank][buffer] + index, size)

    lowered = tuple(
        Operation(kind, find(source), find(destination), channel, 1, thread_blocks, line)
        for kind, source, destination, channel, thread_blocks, line in operations
    )
    if known is None:
        memory = _with_the_traced_end(memory, lowered, origin)
    return Lowered(Program(memory, lowered, sizes), notes)


def is_index_wise(collective: ours.Collective) -> bool:
    """Check that every output chunk sums the input chunks of its own index, on the same ranks for all indices."""
    if collective.input_chunks != collective.output_chunks:
        return False
    for rank in range(collective.ranks):
        sums = [collective.expected(rank, index) for index in range(collective.output_chunks)]
        if any(of is not None and any(at != index for _, at in of) for index, of in enumerate(sums)):
            return False
        if len({None if of is None else tuple(source for source, _ in of) for of in sums}) > 1:
            return False
    return True


def _find_known(collective: conditions.MscclCollective) -> ours.Collective | None:
    """Our collective with the same conditions, unless the script gave others."""
    if not isinstance(collective, conditions.KnownCollective):
        return None
    own = type(collective)
    known = next(each for each in own.__mro__ if each.__module__ == conditions.__name__)
    methods = ("init_buffers", "check", "get_buffer_index")
    return collective.find_ours() if all(getattr(own, one) is getattr(known, one) for one in methods) else None


def _lay_out_scratch(buffers: conditions.Buffers) -> tuple[list[dict[Hashable, int]], tuple[int, ...]]:
    """Find where each scratch buffer of each rank starts in our one, one after another; and the size of ours."""
    starts: list[dict[Hashable, int]] = []
    sizes = []
    for of_rank in buffers:
        end = 0
        starts.append({})
        for name, held in of_rank.items():
            if name not in (MscclBuffer.input, MscclBuffer.output):
                starts[-1][name] = end
                end += len(held)
        sizes.append(end)
    return starts, tuple(sizes)


def _find_memory(
    collective: conditions.MscclCollective,
    buffers: conditions.Buffers,
    filled: tuple[tuple[bool, ...], ...],
    operations: Sequence[Recorded],
    origin: str,
) -> tuple[ours.Collective, tuple[str, ...]]:
    """The collective without its postcondition: its buffers, and which memory they share."""
    ranks = range(collective.num_ranks)
    input_chunks = max(len(of_rank.get(MscclBuffer.input, ())) for of_rank in buffers)
    output_chunks = max(len(of_rank.get(MscclBuffer.output, ())) for of_rank in buffers)
    used = {place.buffer for operation in operations for place in (operation.source, operation.destination)}
    shares = [_shared_memory(collective, buffers[rank], rank) for rank in ranks]
    notes: tuple[str, ...] = ()
    in_place = collective.inplace
    starts = [share or (0, 0) for share in shares]
    if not collective.inplace:
        if any(shares):
            raise ScriptError(f"{origin}: its collective's buffers share memory, but it says inplace=False")
    elif any(shares):
        if not all(shares):
            raise ScriptError(f"{origin}: its collective's buffers share memory on some ranks only")
    elif MscclBuffer.output in used:
        in_place = False
        notes = (
            f"{collective.name}: says inplace=True, but its program uses the output as memory of its own: "
            "imported out of place",
        )
    if in_place and output_chunks == 0:
        # Nothing gives the length of the output: all of the memory counts.
        output_chunks, starts = input_chunks, [(0, 0) for _ in ranks]
    memory = ours.Collective(
        str(collective.name),
        collective.num_ranks,
        input_chunks,
        output_chunks,
        expected=lambda rank, index: None,
        initialized=lambda rank, index: index < len(filled[rank]) and filled[rank][index],
        in_place=in_place,
        starts=lambda rank: starts[rank],
    )
    return memory, notes


def _shared_memory(
    collective: conditions.MscclCollective, buffers: dict[Any, Any], rank: int
) -> tuple[int, int] | None:
    """Find where input and output begin in the memory that they share; None where they share none."""
    found = [collective.get_buffer_index(rank, buffer, 0) for buffer in (MscclBuffer.input, MscclBuffer.output)]
    (input_at, input_start), (output_at, output_start) = found
    same = input_at is output_at or buffers.get(MscclBuffer.input, ()) is buffers.get(MscclBuffer.output)
    return (input_start, output_start) if same else None


def _with_the_traced_end(memory: ours.Collective, operations: tuple[Operation, ...], origin: str) -> ours.Collective:
    """The collective that expects the outputs of the end of the trace: sums of input chunks."""
    held: dict[tuple[int, ours.Buffer, int], Expected] = {}
    for rank in range(memory.ranks):
        for index in range(memory.input_chunks):
            if memory.initialized(rank, index):
                buffer, at = memory.place(rank, ours.Buffer.IN, index)
                held[rank, buffer, at] = ((rank, index),)

    def read(chunks: Chunks, line: str) -> list[Expected]:
        rank, buffer, start, size = chunks
        try:
            return [held[rank, buffer, at] for at in range(start, start + size)]
        except KeyError:
            raise ScriptError(
                f"{line}: {chunks} holds nothing yet: only input buffers hold data at the start"
            ) from None

    for kind, source, destination, _, _, _, line, _ in operations:
        sent = read(source, line)
        if kind is OperationKind.REDUCE:
            sent = [there + added for there, added in zip(read(destination, line), sent, strict=True)]
        for at, content in enumerate(sent, destination.start):
            held[destination.rank, destination.buffer, at] = content

    expected: dict[tuple[int, int], Expected] = {}
    for rank in range(memory.ranks):
        for index in range(memory.output_chunks):
            at_the_end = held.get((rank, *memory.place(rank, ours.Buffer.OUT, index)))
            if at_the_end is not None:
                expected[rank, index] = tuple(sorted(at_the_end))
    if not expected:
        raise ScriptError(f"{origin}: its output buffers hold nothing at the end, so there is nothing to prove")
    return replace(memory, expected=lambda rank, index: expected.get((rank, index)))
