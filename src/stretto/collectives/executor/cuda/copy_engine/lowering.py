# SPDX-License-Identifier: Apache-2.0
"""Lowers a fused program to copies between ranks, and the kernels that reduce and store what arrives.

A copy engine reads from memory, so a message can be a copy only if it is a chunk of a user's buffer: it was loaded from
there, or stored there by an earlier kernel. A kernel reads again from such places what it needs of earlier levels. A
message goes into a mailbox, or without one (zero-copy) straight into the receiver's tensor, if that is a symmetric
tensor, whose address the sender knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from stretto.collectives.executor.cuda.fused.program import (
    ChunkPlace,
    FusedProgram,
    FusedRankProgram,
    Level,
    LoadChunk,
    ReceiveChunk,
    SendChunk,
)


@dataclass(frozen=True)
class OutgoingChunk:
    """A message by copy: the chunk of the sender's memory that goes into the mailbox `message` of `peer`.

    needs_kernel: whether the chunk is there only after this level's kernel; zero_copy: the place in the peer's tensor
    where the message goes instead of the mailbox.
    """

    place: ChunkPlace
    peer: int
    message: int
    needs_kernel: bool
    zero_copy: ChunkPlace | None


@dataclass(frozen=True)
class CopyLevel:
    """One level: a kernel, which sends nothing, then the copies. kernel None: there is nothing for one to do.

    awaits: the zero-copy messages of this level, for which the kernel only waits.
    """

    kernel: Level | None
    awaits: tuple[ReceiveChunk, ...]
    sends: tuple[OutgoingChunk, ...]


ZeroCopy = Mapping[tuple[int, int], ChunkPlace]
"""The messages that go without a mailbox: by (receiver, message), the place in the receiver's memory."""


def find_zero_copy(fused: FusedProgram) -> ZeroCopy:
    """Find the messages that the receiver only stores, in a place that it never reads: these can go without a mailbox.

    A peer's copy may arrive as soon as both ranks have begun the call, so the place's old contents must be unused.
    """
    found = {}
    for program in fused.ranks:
        levels = program.levels
        read = {load.place for level in levels for load in level.loads}
        used = {side for level in levels for reduce in level.reduces for side in (reduce.left, reduce.right)}
        used |= {send.value for level in levels for send in level.sends}
        stores = [store for level in levels for store in level.stores]
        for receive in (receive for level in levels for receive in level.receives):
            places = [store.place for store in stores if store.value == receive.value]
            if receive.value in used or len(places) != 1 or places[0] in read:
                continue
            if not all(store.is_whole for store in stores if store.value == receive.value):
                continue
            if sum(store.place == places[0] for store in stores) == 1:
                found[program.rank, receive.message] = places[0]
    return found


class _ValuePlaces(NamedTuple):
    """The memory locations of a program's values.

    loads: the place that each was loaded from; stored: where it was stored whole, and at which level; overwritten: the
    first level that stores to a place.
    """

    program: FusedRankProgram
    name: str
    loads: dict[int, ChunkPlace]
    stored: dict[int, tuple[ChunkPlace, int]]
    overwritten: dict[ChunkPlace, int]


def lower_to_copies(program: FusedRankProgram, name: str, zero_copy: ZeroCopy) -> tuple[CopyLevel, ...]:
    """Lower a rank's program, level by level. zero_copy: the messages that go so, of `find_zero_copy`.

    Raises ValueError for a schedule whose messages are not chunks of its buffers.
    """
    awaits = [
        tuple(receive for receive in level.receives if (program.rank, receive.message) in zero_copy)
        for level in program.levels
    ]
    program = _remove_values({receive.value for level in awaits for receive in level}, program)
    places = _find_places(program, name)
    return tuple(
        CopyLevel(
            _lower_kernel(places, number, level, has_awaits=bool(awaits[number])),
            awaits[number],
            tuple(_lower_send(places, number, send, zero_copy.get((send.peer, send.message))) for send in level.sends),
        )
        for number, level in enumerate(program.levels)
    )


def _remove_values(values: set[int], program: FusedRankProgram) -> FusedRankProgram:
    """The program without the receives and stores of those values: copies of peers do both."""
    levels = tuple(
        replace(
            level,
            receives=tuple(receive for receive in level.receives if receive.value not in values),
            stores=tuple(store for store in level.stores if store.value not in values),
        )
        for level in program.levels
    )
    return replace(program, levels=levels)


def _find_places(program: FusedRankProgram, name: str) -> _ValuePlaces:
    loads = {load.value: load.place for level in program.levels for load in level.loads}
    stored = {
        store.value: (store.place, number)
        for number, level in enumerate(program.levels)
        for store in level.stores
        if store.is_whole  # a place that may be shorter does not hold all of the value
    }
    overwritten: dict[ChunkPlace, int] = {}
    for number, level in enumerate(program.levels):
        for store in level.stores:
            overwritten.setdefault(store.place, number)
    return _ValuePlaces(program, name, loads, stored, overwritten)


def _lower_send(places: _ValuePlaces, number: int, send: SendChunk, zero_copy: ChunkPlace | None) -> OutgoingChunk:
    loads, stored = places.loads, places.stored
    if send.value in loads and places.overwritten.get(loads[send.value], number + 1) > number:
        return OutgoingChunk(loads[send.value], send.peer, send.message, False, zero_copy)
    if send.value in stored and stored[send.value][1] <= number:
        return OutgoingChunk(stored[send.value][0], send.peer, send.message, True, zero_copy)
    raise ValueError(f"{places.name} cannot go by copy engines: it sends what is in none of its buffers")


def _lower_kernel(places: _ValuePlaces, number: int, level: Level, *, has_awaits: bool) -> Level | None:
    """The level as a separate program, which reloads from memory what earlier levels had in registers."""
    if not (level.receives or level.reduces or level.stores or has_awaits):
        return None
    loads, stored = places.loads, places.stored
    made_here = {receive.value for receive in level.receives} | {reduce.value for reduce in level.reduces}
    used = {side for reduce in level.reduces for side in (reduce.left, reduce.right)}
    used |= {store.value for store in level.stores}
    reloads = []
    for value in sorted(used - made_here):
        if value in loads and places.overwritten.get(loads[value], number) >= number:
            reloads.append(LoadChunk(value, loads[value]))
        elif value in stored and stored[value][1] < number and _is_exact(value, places.program):
            reloads.append(LoadChunk(value, stored[value][0]))
        else:
            raise ValueError(f"{places.name} cannot go by copy engines: it uses again what is in none of its buffers")
    return replace(level, loads=tuple(reloads), sends=())


def _is_exact(value: int, program: FusedRankProgram) -> bool:
    """Check whether memory holds a stored value exactly: a sum that is not rounded is wider in registers."""
    is_sum = any(reduce.value == value for level in program.levels for reduce in level.reduces)
    return not is_sum or value in program.rounded


def find_overwriting(levels: tuple[CopyLevel, ...]) -> frozenset[int]:
    """The levels whose kernels write over chunks that earlier levels send."""
    sent: set[ChunkPlace] = set()
    found = set()
    for number, level in enumerate(levels):
        if level.kernel is not None and any(store.place in sent for store in level.kernel.stores):
            found.add(number)
        sent |= {send.place for send in level.sends}
    return frozenset(found)
