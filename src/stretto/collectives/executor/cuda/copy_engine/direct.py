# SPDX-License-Identifier: Apache-2.0
"""Copy plans for single-hop collectives: sends read user input; receives are reduced or stored.

Nothing is forwarded, so all copies are queued at the call's start, in as few copies as still hide the kernels' work:

- A message that is only stored is copied whole, one peer after another; a kernel stores it while the next one is on its
  way. (Pieces of a message would cost the overhead of a copy each.)
- Nothing hides the storing of the last message, so it goes in parts, the last of which is small.
- Messages that are reduced go in parts, too: part 0 of all of them, then part 1, ...

All-gather on 4 ranks, rank 0's streams:

    copy stream      to rank 1 (whole)   to rank 2 (whole)   to rank 3, part 0    part 1   part 2
    caller's stream                   store from rank 3   store from rank 2    store from rank 1: part 0, 1, 2   release

A call that the mailboxes have no room for goes in rounds of this kind, one after another.
"""

from typing import NamedTuple

from stretto.collectives.executor.cuda.copy_engine.lowering import CopyLevel, OutgoingChunk, find_overwriting
from stretto.collectives.executor.cuda.copy_engine.planner import (
    MAX_PARTS,
    PIECE_SHARE,
    ByteLayout,
    ChunkSlice,
    CopyPlanner,
    CopyStep,
    order_by_distance,
    split_into_pieces,
)
from stretto.collectives.executor.cuda.fused.program import Level
from stretto.collectives.executor.cuda.nvrtc import Function
from stretto.collectives.executor.cuda.workspace import SymmetricView

KERNEL_TO_LINK_SPEED = 6.5
"""Ratio of a kernel's rate of reducing received bytes, reads and writes together, to a link's rate."""


class _ReceiveKernel(NamedTuple):
    """A kernel that stores one message, or reduces several, or stores values that need none, or only waits.

    messages: those it waits for; in_parts: whether these come in parts, so that it is launched for each.
    """

    kernel: Function
    level: Level
    messages: tuple[int, ...]
    in_parts: bool


def is_single_hop(all_levels: list[tuple[CopyLevel, ...]]) -> bool:
    """Check that no rank forwards data or overwrites what it sends: all copies can then be queued at the beginning."""
    return not any(
        any(send.needs_kernel for level in levels for send in level.sends) or find_overwriting(levels)
        for levels in all_levels
    )


class DirectCopyPlanner(CopyPlanner):
    """Plans single-hop schedules: queues all copies, and launches kernels in the order in which messages arrive."""

    def build(self, layout: ByteLayout, symmetric: SymmetricView | None) -> tuple[CopyStep, ...]:
        """The steps of a call, round by round."""
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
        # The reduction of a part, which reads what all send and writes one result, ends when the next part has arrived.
        share = 1 - (world + 1) / ((world - 1) * KERNEL_TO_LINK_SPEED) if self._reduced else PIECE_SHARE
        pieces = split_into_pieces(whole.size, whole.size, share)
        assert len(pieces) <= MAX_PARTS
        parts = [ChunkSlice(whole.begin + begin, size, begin, part) for part, (begin, size) in enumerate(pieces)]
        queues = [self._queue(sender, whole, parts) for sender in range(world)]
        positions = {
            (send.peer, send.message, part.part): position
            for queue in queues
            for position, (send, part) in enumerate(queue)
        }
        send_step = CopyStep(
            after_release="released" if number else None,
            wait_for_peers=self._wait_for_peers(number, symmetric),
            copies=tuple(
                self._copy(send, part, number, layout, symmetric)._replace(signalled=("signalled", position))
                for position, (send, part) in enumerate(queues[rank])
            ),
        )
        receive_steps = []
        for receiver in self._receivers:
            for part in parts if receiver.in_parts else [whole]:
                awaited = [positions[rank, message, part.part] for message in receiver.messages]
                # What this rank has sent by the time that the peers send these messages.
                sent = min(max(awaited), len(queues[rank]) - 1) if awaited and queues[rank] else None
                receive_steps.append(
                    CopyStep(
                        after_signals=None if sent is None else ("signalled", sent),
                        kernel=self._compute(receiver.kernel, receiver.level, part, number, layout),
                    )
                )
        end_step = CopyStep(
            signalled="all signalled",
            release_mailboxes=self._release_mailboxes(number, last),
            released="released",
            is_last=number == last,
        )
        return [send_step, *receive_steps, end_step]

    def _queue(self, sender: int, whole: ChunkSlice, parts: list[ChunkSlice]) -> list[tuple[OutgoingChunk, ChunkSlice]]:
        """A rank's copies of a round in the order in which they are queued."""
        sends = order_by_distance(
            (send for level in self._all_levels[sender] for send in level.sends), sender, len(self._all_levels)
        )
        in_parts = self._find_sends_in_parts(sender)
        queued = [(send, whole) for send in sends if send not in in_parts]
        return queued + [(send, part) for part in parts for send in in_parts]

    def _count_mailbox_sets(self) -> int:
        return 1

    def _load_kernels(self) -> None:
        """Load a kernel for each message, in the order of their arrival, and one for all that a level reduces."""
        rank, world = self._workspace.rank, self._workspace.world_size
        self._reduced = {
            (receiver, receive.message)
            for receiver, levels in enumerate(self._all_levels)
            for level in levels
            if level.kernel is not None and level.kernel.reduces
            for receive in level.kernel.receives
        }
        in_parts = {(send.peer, send.message) for sender in range(world) for send in self._find_sends_in_parts(sender)}
        self._receivers: list[_ReceiveKernel] = []
        for number, copy_level in enumerate(self._levels):
            level = copy_level.kernel
            if level is None:
                continue
            if level.reduces:
                messages = tuple(receive.message for receive in level.receives)
                self._receivers.append(_ReceiveKernel(self._load(number, level, ()), level, messages, True))
                continue
            received = {receive.value for receive in level.receives}
            stores = tuple(store for store in level.stores if store.value not in received)
            if stores:
                own = Level((), level.loads, (), (), stores)
                self._receivers.append(_ReceiveKernel(self._load(number, own, ()), own, (), False))
            for receive in sorted(level.receives, key=lambda receive: (rank - receive.peer) % world):
                stores = tuple(store for store in level.stores if store.value == receive.value)
                alone = Level((receive,), (), (), (), stores)
                kernel, message = self._load(number, alone, ()), receive.message
                self._receivers.append(_ReceiveKernel(kernel, alone, (message,), (rank, message) in in_parts))
        for number, copy_level in enumerate(self._levels):
            if copy_level.awaits:
                nothing = Level((), (), (), (), ())
                kernel = self._load(number, nothing, copy_level.awaits)
                messages = tuple(receive.message for receive in copy_level.awaits)
                self._receivers.append(_ReceiveKernel(kernel, nothing, messages, False))
        self.kernels = [receiver.kernel for receiver in self._receivers]

    def _find_sends_in_parts(self, sender: int) -> list[OutgoingChunk]:
        """The messages of a rank that their receiver reduces, and the last one that is stored from a mailbox."""
        sends = order_by_distance(
            (send for level in self._all_levels[sender] for send in level.sends), sender, len(self._all_levels)
        )
        return [
            send
            for send in sends
            if send.zero_copy is None and (send is sends[-1] or (send.peer, send.message) in self._reduced)
        ]
