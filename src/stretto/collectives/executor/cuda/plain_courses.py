"""Courses of collectives that add nothing up: what is sent is what was given, and what comes is only stored."""

from typing import NamedTuple

from stretto.collectives.executor.cuda.courses import PARTS, Courses, Layout, Part, Step, cut, in_turn
from stretto.collectives.executor.cuda.function import Launchable
from stretto.collectives.executor.cuda.lanes import Lanes, Level
from stretto.collectives.executor.cuda.pushes import CopiedLevel, PushedChunk, find_overwriting
from stretto.collectives.executor.cuda.workspace import Symmetric


class _Storing(NamedTuple):
    """A kernel that stores one message, or what needs none; in_parts: whether that message comes in parts."""

    kernel: Launchable
    level: Level
    in_parts: bool


def is_plain(lanes: Lanes, every: list[tuple[CopiedLevel, ...]]) -> bool:
    """Whether no rank adds anything up, forwards anything, or stores over what it sends."""
    return not any(
        any(level.reduces for level in program.levels)
        or any(push.needs_kernel for level in levels for push in level.pushes)
        or find_overwriting(levels)
        for program, levels in zip(lanes.ranks, every, strict=True)
    )


class PlainCourses(Courses):
    """All messages of a rank are pushed whole, one peer after another, and each is stored while the next is on its way.

    What comes last has nothing to hide its storing: the last message goes in parts, the last of which is small. Of the
    others a piece would cost what every copy costs beside its bytes. A call that the mailboxes have no room for goes in
    rounds.
    """

    def _count_slots(self) -> int:
        return 1

    def _load_kernels(self) -> None:
        """One for each message, in the order in which they come."""
        rank, world = self._workspace.rank, self._workspace.world_size
        parted = {(push.peer, push.message) for sender in range(world) for push in self._find_parted(sender)}
        self._storing: list[_Storing] = []
        for number, copied in enumerate(self._levels):
            level = copied.kernel
            if level is None:
                continue
            came = {receive.value for receive in level.receives}
            stores = tuple(store for store in level.stores if store.value not in came)
            if stores:
                own = Level((), level.loads, (), (), stores)
                self._storing.append(_Storing(self._load(number, own, ()), own, False))
            for receive in sorted(level.receives, key=lambda receive: (rank - receive.peer) % world):
                stores = tuple(store for store in level.stores if store.value == receive.value)
                alone = Level((receive,), (), (), (), stores)
                kernel = self._load(number, alone, ())
                self._storing.append(_Storing(kernel, alone, (rank, receive.message) in parted))
        for number, copied in enumerate(self._levels):
            if copied.awaits:
                nothing = Level((), (), (), (), ())
                self._storing.append(_Storing(self._load(number, nothing, copied.awaits), nothing, False))
        self.kernels = [storing.kernel for storing in self._storing]

    def _find_parted(self, sender: int) -> list[PushedChunk]:
        """The message that a rank pushes last, if its receiver has to store it."""
        pushes = in_turn((push for level in self._every[sender] for push in level.pushes), sender, len(self._every))
        return [push for push in pushes[-1:] if push.straight is None]

    def chart(self, layout: Layout, symmetric: Symmetric | None) -> tuple[Step, ...]:
        """See `Courses`: round by round."""
        if not layout.chunk:
            return ()
        count = 1 if self._is_whole else -(-layout.chunk // self._largest)
        size = -(-layout.chunk // (16 * count)) * 16
        rounds = [Part(begin, min(size, layout.chunk - begin)) for begin in range(0, layout.chunk, size)]
        return tuple(
            step
            for number, whole in enumerate(rounds)
            for step in self._round(whole, number, len(rounds) - 1, layout, symmetric)
        )

    def _round(self, whole: Part, number: int, last: int, layout: Layout, symmetric: Symmetric | None) -> list[Step]:
        pieces = cut(whole.size, whole.size)
        assert len(pieces) <= PARTS
        parts = [Part(whole.begin + begin, size, begin, flag) for flag, (begin, size) in enumerate(pieces)]
        rank, world = self._workspace.rank, self._workspace.world_size
        parted = self._find_parted(rank)
        pushes = in_turn((push for level in self._levels for push in level.pushes), rank, world)
        first = Step(
            begins=self._begin(number, symmetric),
            begun="begun",
            overwrites=None,
            kernel=None,
            done=None,
            pushes=tuple(
                self._push(push, part, number, layout, symmetric)
                for push in pushes
                for part in (parts if push in parted else [whole])
            ),
            pushed=None,
            finishes=None,
            is_last=False,
        )
        stores = [
            first._replace(
                begins=None, pushes=(), kernel=self._compute(storing.kernel, storing.level, part, number, layout)
            )
            for storing in self._storing
            for part in (parts if storing.in_parts else [whole])
        ]
        end = first._replace(begins=None, pushes=(), finishes=self._finish(number, last), is_last=number == last)
        return [first, *stores, end]
