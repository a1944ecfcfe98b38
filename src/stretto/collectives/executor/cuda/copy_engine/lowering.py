"""What copy engines can do of a schedule: messages that are chunks of a buffer, which is memory that they copy from.

A schedule can go so that sends what it has loaded or stored, and whose kernels find again what they need from earlier
levels. A message goes into a mailbox, or straight into the receiver's tensor, where peers know its address and it is a
symmetric one.
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
    """A message: the chunk of the user's memory that goes into the mailbox `message` of `peer`.

    needs_kernel: it is there only after this level's kernel; zero_copy: where it goes instead, in the peer's tensor.
    """

    place: ChunkPlace
    peer: int
    message: int
    needs_kernel: bool
    zero_copy: ChunkPlace | None


@dataclass(frozen=True)
class CopyLevel:
    """One level as a kernel, which sends nothing, and the pushes after it. kernel None: there is nothing for one.

    awaits: messages that come straight, for which the kernel only waits.
    """

    kernel: Level | None
    awaits: tuple[ReceiveChunk, ...]
    pushes: tuple[OutgoingChunk, ...]


def find_zero_copy(fused: FusedProgram) -> dict[tuple[int, int], ChunkPlace]:
    """{(rank, message): where it may go straight, in the rank's memory}: what it only stores, and never reads there.

    A peer's copy may come as soon as both have begun the call, so nobody may need what was there before.
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


class _Known(NamedTuple):
    """Where a program's values lie.

    loads: the place that each was loaded from; stored: where it was stored whole, and at which level; overwritten: the
    first level that stores to a place.
    """

    program: FusedRankProgram
    name: str
    loads: dict[int, ChunkPlace]
    stored: dict[int, tuple[ChunkPlace, int]]
    overwritten: dict[ChunkPlace, int]


def lower_to_copies(
    program: FusedRankProgram, name: str, zero_copy: Mapping[tuple[int, int], ChunkPlace]
) -> tuple[CopyLevel, ...]:
    """A rank's lane program by levels. ValueError for a schedule whose messages are not chunks of its buffers.

    zero_copy: of `find_zero_copy`, the messages that go so.
    """
    awaits = [
        tuple(receive for receive in level.receives if (program.rank, receive.message) in zero_copy)
        for level in program.levels
    ]
    program = _without({receive.value for level in awaits for receive in level}, program)
    loads = {load.value: load.place for level in program.levels for load in level.loads}
    stored = {
        store.value: (store.place, number)
        for number, level in enumerate(program.levels)
        for store in level.stores
        if store.is_whole  # a place that may be shorter does not have all of the value
    }
    overwritten: dict[ChunkPlace, int] = {}
    for number, level in enumerate(program.levels):
        for store in level.stores:
            overwritten.setdefault(store.place, number)
    known = _Known(program, name, loads, stored, overwritten)
    return tuple(
        CopyLevel(
            _kernel_of(known, number, level, has_awaits=bool(awaits[number])),
            awaits[number],
            tuple(_push_of(known, number, send, zero_copy.get((send.peer, send.message))) for send in level.sends),
        )
        for number, level in enumerate(program.levels)
    )


def _without(values: set[int], program: FusedRankProgram) -> FusedRankProgram:
    """The program without those values, which come and are stored by themselves."""
    levels = tuple(
        replace(
            level,
            receives=tuple(receive for receive in level.receives if receive.value not in values),
            stores=tuple(store for store in level.stores if store.value not in values),
        )
        for level in program.levels
    )
    return replace(program, levels=levels)


def _push_of(known: _Known, number: int, send: SendChunk, zero_copy: ChunkPlace | None) -> OutgoingChunk:
    loads, stored = known.loads, known.stored
    if send.value in loads and known.overwritten.get(loads[send.value], number + 1) > number:
        return OutgoingChunk(loads[send.value], send.peer, send.message, False, zero_copy)
    if send.value in stored and stored[send.value][1] <= number:
        return OutgoingChunk(stored[send.value][0], send.peer, send.message, True, zero_copy)
    raise ValueError(f"{known.name} cannot go by copy engines: it sends what is in none of its buffers")


def _kernel_of(known: _Known, number: int, level: Level, *, has_awaits: bool) -> Level | None:
    """The level alone: what earlier levels knew is read again from where it lies."""
    if not (level.receives or level.reduces or level.stores or has_awaits):
        return None
    loads, stored = known.loads, known.stored
    here = {receive.value for receive in level.receives} | {reduce.value for reduce in level.reduces}
    used = {side for reduce in level.reduces for side in (reduce.left, reduce.right)}
    used |= {store.value for store in level.stores}
    again = []
    for value in sorted(used - here):
        if value in loads and known.overwritten.get(loads[value], number) >= number:
            again.append(LoadChunk(value, loads[value]))
        elif value in stored and stored[value][1] < number and _is_exact(value, known.program):
            again.append(LoadChunk(value, stored[value][0]))
        else:
            raise ValueError(f"{known.name} cannot go by copy engines: it uses again what is in none of its buffers")
    return replace(level, loads=tuple(again), sends=())


def _is_exact(value: int, program: FusedRankProgram) -> bool:
    """Whether a stored value is the value itself: sums that are not rounded are wider than what is stored."""
    is_sum = any(reduce.value == value for level in program.levels for reduce in level.reduces)
    return not is_sum or value in program.rounded


def find_overwriting(levels: tuple[CopyLevel, ...]) -> frozenset[int]:
    """Levels whose kernels write over what earlier levels push."""
    pushed: set[ChunkPlace] = set()
    found = set()
    for number, level in enumerate(levels):
        if level.kernel is not None and any(store.place in pushed for store in level.kernel.stores):
            found.add(number)
        pushed |= {push.place for push in level.pushes}
    return frozenset(found)
