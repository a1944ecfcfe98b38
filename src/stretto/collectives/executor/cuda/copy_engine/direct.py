"""Copy plans for single-hop collectives: sends read user input; receives are reduced or stored."""

from typing import NamedTuple

from stretto.collectives.executor.cuda.copy_engine.lowering import CopyLevel, OutgoingChunk, find_overwriting
from stretto.collectives.executor.cuda.copy_engine.planner import (
    PARTS,
    SHARE,
    ByteLayout,
    ChunkSlice,
    CopyPlanner,
    CopyStep,
    cut,
    in_turn,
)
from stretto.collectives.executor.cuda.fused.program import Level
from stretto.collectives.executor.cuda.nvrtc import Launchable
from stretto.collectives.executor.cuda.workspace import SymmetricView

KERNEL_TO_LINK = 6.5
"""How many times faster a kernel sums bytes that have come, reads and writes together, than a link brings them."""


class _Storing(NamedTuple):
    """A kernel that stores one message, or sums some, or stores what needs none; in_parts: whether these come so."""

    kernel: Launchable
    level: Level
    in_parts: bool


def is_single_hop(every: list[tuple[CopyLevel, ...]]) -> bool:
    """Whether no rank forwards anything, or stores over what it sends: then all pushes can be queued at once."""
    return not any(
        any(push.needs_kernel for level in levels for push in level.pushes) or find_overwriting(levels)
        for levels in every
    )


class DirectCopyPlanner(CopyPlanner):
    """All that a rank sends is queued at a call's start, in as few pushes as let what comes be hidden.

    What is only stored is pushed whole, one peer after another, and stored while the next is on its way: of a message
    a piece would cost what every copy costs beside its bytes. What comes last has nothing to hide its storing, so it
    goes in parts, the last of which is small. So does what is summed: a part of all these messages after another.
    A call that the mailboxes have no room for goes in rounds.
    """

    def _count_slots(self) -> int:
        return 1

    def _load_kernels(self) -> None:
        """One for each message, in the order in which they come, and one for what a level sums."""
        rank, world = self._workspace.rank, self._workspace.world_size
        self._summed = {
            (receiver, receive.message)
            for receiver, levels in enumerate(self._every)
            for level in levels
            if level.kernel is not None and level.kernel.reduces
            for receive in level.kernel.receives
        }
        parted = {(push.peer, push.message) for sender in range(world) for push in self._find_parted(sender)}
        self._storing: list[_Storing] = []
        for number, copied in enumerate(self._levels):
            level = copied.kernel
            if level is None:
                continue
            if level.reduces:
                self._storing.append(_Storing(self._load(number, level, ()), level, True))
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

    def _find_parted(self, sender: int) -> list[OutgoingChunk]:
        """What a rank pushes that its receiver sums, or stores after all else."""
        pushes = in_turn((push for level in self._every[sender] for push in level.pushes), sender, len(self._every))
        return [
            push
            for push in pushes
            if push.zero_copy is None and (push is pushes[-1] or (push.peer, push.message) in self._summed)
        ]

    def build(self, layout: ByteLayout, symmetric: SymmetricView | None) -> tuple[CopyStep, ...]:
        """See `CopyPlanner`: round by round."""
        if not layout.chunk:
            return ()
        count = 1 if self._is_whole else -(-layout.chunk // self._largest)
        size = -(-layout.chunk // (16 * count)) * 16
        rounds = [ChunkSlice(begin, min(size, layout.chunk - begin)) for begin in range(0, layout.chunk, size)]
        return tuple(
            step
            for number, whole in enumerate(rounds)
            for step in self._round(whole, number, len(rounds) - 1, layout, symmetric)
        )

    def _round(
        self, whole: ChunkSlice, number: int, last: int, layout: ByteLayout, symmetric: SymmetricView | None
    ) -> list[CopyStep]:
        rank, world = self._workspace.rank, self._workspace.world_size
        # A part's sum, of what all send and into one, is over when the next part has come.
        share = 1 - (world + 1) / ((world - 1) * KERNEL_TO_LINK) if self._summed else SHARE
        pieces = cut(whole.size, whole.size, share)
        assert len(pieces) <= PARTS
        parts = [ChunkSlice(whole.begin + begin, size, begin, flag) for flag, (begin, size) in enumerate(pieces)]
        parted = self._find_parted(rank)
        pushes = in_turn((push for level in self._levels for push in level.pushes), rank, world)
        queued = [(push, whole) for push in pushes if push not in parted]
        queued += [(push, part) for part in parts for push in parted]
        first = CopyStep(
            begins=self._begin(number, symmetric),
            begun="begun",
            overwrites=None,
            kernel=None,
            done=None,
            pushes=tuple(self._push(push, part, number, layout, symmetric) for push, part in queued),
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
