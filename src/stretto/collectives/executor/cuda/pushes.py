"""What copy engines can do of a schedule: messages that are chunks of a buffer, which is memory that they copy from.

A schedule can go so that sends what it has loaded or stored, and whose kernels find again what they need from earlier
levels.
"""

from dataclasses import dataclass, replace

from stretto.collectives.executor.cuda.lanes import LaneProgram, Level, Load, Place, Send


@dataclass(frozen=True)
class PushedChunk:
    """A message: the chunk of the user's memory that goes into the mailbox `message` of `peer`.

    needs_kernel: it is there only after this level's kernel.
    """

    place: Place
    peer: int
    message: int
    needs_kernel: bool


@dataclass(frozen=True)
class CopiedLevel:
    """One level as a kernel, which sends nothing, and the pushes after it. kernel None: there is nothing for one."""

    kernel: Level | None
    pushes: tuple[PushedChunk, ...]


def lower_to_copies(program: LaneProgram, name: str) -> tuple[CopiedLevel, ...]:
    """A rank's lane program by levels. ValueError for a schedule whose messages are not chunks of its buffers."""
    loads = {load.value: load.place for level in program.levels for load in level.loads}
    stored = {
        store.value: (store.place, number) for number, level in enumerate(program.levels) for store in level.stores
    }
    overwritten: dict[Place, int] = {}
    for number, level in enumerate(program.levels):
        for store in level.stores:
            overwritten.setdefault(store.place, number)
    return tuple(
        CopiedLevel(
            _kernel_of(program, number, level, loads, stored, overwritten, name),
            tuple(_push_of(send, number, loads, stored, overwritten, name) for send in level.sends),
        )
        for number, level in enumerate(program.levels)
    )


def _push_of(
    send: Send,
    number: int,
    loads: dict[int, Place],
    stored: dict[int, tuple[Place, int]],
    overwritten: dict[Place, int],
    name: str,
) -> PushedChunk:
    if send.value in loads and overwritten.get(loads[send.value], number + 1) > number:
        return PushedChunk(loads[send.value], send.peer, send.message, needs_kernel=False)
    if send.value in stored and stored[send.value][1] <= number:
        return PushedChunk(stored[send.value][0], send.peer, send.message, needs_kernel=True)
    raise ValueError(f"{name} cannot go by copy engines: it sends what is in none of its buffers")


def _kernel_of(
    program: LaneProgram,
    number: int,
    level: Level,
    loads: dict[int, Place],
    stored: dict[int, tuple[Place, int]],
    overwritten: dict[Place, int],
    name: str,
) -> Level | None:
    """The level alone: what earlier levels knew is read again from where it lies."""
    if not (level.receives or level.reduces or level.stores):
        return None
    here = {receive.value for receive in level.receives} | {reduce.value for reduce in level.reduces}
    used = {side for reduce in level.reduces for side in (reduce.left, reduce.right)}
    used |= {store.value for store in level.stores}
    again = []
    for value in sorted(used - here):
        if value in loads and overwritten.get(loads[value], number) >= number:
            again.append(Load(value, loads[value]))
        elif value in stored and stored[value][1] < number and _is_exact(value, program):
            again.append(Load(value, stored[value][0]))
        else:
            raise ValueError(f"{name} cannot go by copy engines: it uses again what is in none of its buffers")
    return replace(level, loads=tuple(again), sends=())


def _is_exact(value: int, program: LaneProgram) -> bool:
    """Whether a stored value is the value itself: sums that are not rounded are wider than what is stored."""
    is_sum = any(reduce.value == value for level in program.levels for reduce in level.reduces)
    return not is_sum or value in program.rounded


def find_overwriting(levels: tuple[CopiedLevel, ...], *, is_one: bool) -> frozenset[int]:
    """Levels whose kernels may write over what earlier levels push; is_one: input and output are one tensor."""
    pushed: set[Place] = set()
    found = set()
    for number, level in enumerate(levels):
        stored = {store.place for store in level.kernel.stores} if level.kernel is not None else set()
        if pushed and stored and (is_one or pushed & stored):
            found.add(number)
        pushed |= {push.place for push in level.pushes}
    return frozenset(found)
