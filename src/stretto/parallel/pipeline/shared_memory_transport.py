# SPDX-License-Identifier: Apache-2.0
"""Messages between the CPU ranks of one machine, over rings of slots in shared memory.

Each rank's symmetric buffer has a ring for each other rank, into which that rank writes:

    sender                                                   receiver
    waits while all slots of its ring are in use
    copies a slice of a message into the next slot
    signal FILLED  ------------------------------------->    copies the slice to the message's tensors
    counts the slot as free again  <-------------------------signal FREED

A message is its header, then its tensors, each at a multiple of 64 bytes; slot k of it holds the bytes from
k * slot_bytes on. Signals count up and are never reset; `HostMemory` orders them after the data. Since a slot is free
until its ring is full, nothing is agreed on before a message is sent.

The thread that waits in a method moves slices itself. While none does, a thread of the transport's own moves them, from
`begin_step` to `end_step`, so that messages arrive and leave while this rank computes. A lock lets only one of them
move slices at a time, as `HostMemory` demands.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execution import MESSAGE_SLOTS
from stretto.memory import Backoff, HostMemory, group_timeout
from stretto.parallel.pipeline.message_format import (
    MAX_BYTES_OF_HEADER,
    MessageHeader,
    MessageKey,
    TensorLayout,
    as_bytes,
)
from stretto.parallel.pipeline.messages import MessageTransport

MAX_SLOT_BYTES = 1 << 19
MAX_BYTES_OF_RINGS = 64 << 20
"""All rings of a rank take no more than this, however many ranks there are, unless slots would be too small."""

_FILLED, _FREED, _FAILED = range(3)
_ALIGNMENT = 64
_LOOK_AT_PEERS = 0.1  # seconds between checks whether peers live
_LONGEST_SLEEP = 1e-3
_JOIN_SECONDS = 10.0


class SharedMemoryTransport(MessageTransport):
    """Carries messages between processes of one machine and one user, for tensors on CPUs.

    All ranks of the group make it. slot_bytes: of a slot (None: 512 KiB, less for many ranks), at least 32 KiB; slots:
    of each of the rings that a rank has for each other rank. ValueError where the memory is not there, or for a GPU.
    """

    name = "shared memory"
    signals = 3
    """The number of signals of each pair of ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        *,
        slot_bytes: int | None = None,
        slots: int = MESSAGE_SLOTS,
    ) -> None:
        self._check_device(torch.device(device))
        size = dist.get_world_size(group)
        if slot_bytes is None:
            fair = MAX_BYTES_OF_RINGS // (slots * max(size - 1, 1)) // _ALIGNMENT * _ALIGNMENT
            slot_bytes = max(min(MAX_SLOT_BYTES, fair), MAX_BYTES_OF_HEADER)
        if slot_bytes < MAX_BYTES_OF_HEADER or slot_bytes % _ALIGNMENT:
            raise ValueError(f"a slot has a multiple of 64 bytes from {MAX_BYTES_OF_HEADER} on, not {slot_bytes}")
        if slots < 1:
            raise ValueError(f"a ring has at least 1 slot, not {slots}")
        super().__init__(group, device)
        self._slots = slots
        try:
            self._memory = HostMemory.allocate(
                slot_bytes * slots * (self.size - 1), self.signals, group, group_timeout(self.group)
            )
        except BaseException:
            self._record.close()
            raise
        self._moving = threading.Lock()
        self._outgoing = {
            peer: Outgoing(self._cut(self._memory.buffer(peer), peer, self.rank, slot_bytes)) for peer in self._peers()
        }
        self._incoming = {
            peer: _Incoming(self._cut(self._memory.buffer(), self.rank, peer, slot_bytes)) for peer in self._peers()
        }
        self._is_waiting = False  # the caller's thread moves slices at present
        self._ends = threading.Event()
        self._mover: threading.Thread | None = None
        self._backoff = Backoff()
        self._looked_at_peers = 0.0

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"shared memory carries messages of tensors on CPUs, not on {device}: take gloo")

    def _cut(self, buffer: Tensor, owner: int, source: int, slot_bytes: int) -> list[Tensor]:
        """The slots in the owner's buffer that `source` writes to."""
        place = source if source < owner else source - 1
        return list(buffer.view(-1, self._slots, slot_bytes)[place])

    def _begin(self, expected: Mapping[int, int]) -> None:
        for source, count in expected.items():
            self._incoming[source].left = count
        if self.size > 1:
            self._ends.clear()
            self._mover = threading.Thread(target=self._move_until_end, name="stretto-messages", daemon=True)
            self._mover.start()

    def _send(self, destination: int, header: MessageHeader, tensors: list[Tensor | None]) -> None:
        self._outgoing[destination].messages.append(SlicedMessage(header, tensors, header.pack(), self._is_in_slots))
        self._progress()

    def _end(self) -> None:
        self._ends.set()
        if self._mover is not None:
            self._mover.join(_JOIN_SECONDS)
            self._mover = None

    def _break(self) -> None:
        # Called once, so it is the only writer of these signals, and needs no lock.
        for peer in self._peers():
            self._memory.signal(peer, _FAILED)
        self._ends.set()

    def _close(self) -> None:
        self._end()
        self._outgoing, self._incoming = {}, {}
        self._memory.close()

    # Moving slices.

    def _progress(self) -> bool:
        """Move what can be moved; whether anything was. Another thread that does so already is not disturbed."""
        if not self._moving.acquire(blocking=False):
            return False
        finished = Finished([], [])
        problem = ""
        moved = False
        try:
            moved = self._move(finished)
        except Exception as error:  # noqa: BLE001  (such as no memory: ranks that wait for this one must be informed)
            problem = f"could not move its messages: {error!r}"
        finally:
            self._moving.release()
        # Without the lock: a thread that fails concurrently holds the other one.
        for destination, key in finished.sent:
            self.note_sent(destination, key)
        for source, message, event in finished.received:
            self._deliver(source, message.header.key, message.tensors, message.header.step, event)
        if problem:
            self._fail([], problem)
        return moved

    def _move(self, finished: "Finished") -> bool:
        """Move slices in all channels, with the lock held; whether any was moved."""
        moved = [self._push(peer, outgoing, finished) for peer, outgoing in self._outgoing.items()]
        moved += [self._pull(peer, incoming, finished) for peer, incoming in self._incoming.items()]
        return any(moved)

    def _is_in_slots(self, layout: TensorLayout) -> bool:
        """True if a tensor's bytes go through the slots."""
        return True

    def _finish_push(self, peer: int, message: "SlicedMessage", finished: "Finished") -> None:
        """A message's last slice is in a slot."""
        finished.sent.append((peer, message.header.key))

    def _finish_pull(self, peer: int, message: "SlicedMessage", finished: "Finished") -> None:
        """A message's last slice has been copied."""
        finished.received.append((peer, message, None))

    def _push(self, peer: int, outgoing: "Outgoing", finished: "Finished") -> bool:
        """Fill the free slots of a peer's ring."""
        moved = False
        while outgoing.messages and self._memory.has_reached(peer, _FREED, outgoing.filled + 1 - self._slots):
            message = outgoing.messages[0]
            copy_all(message.next_slice(outgoing.ring[outgoing.filled % self._slots], to_slot=True))
            outgoing.filled += 1
            self._memory.signal(peer, _FILLED)
            moved = True
            if message.is_complete:
                outgoing.messages.popleft()
                self._finish_push(peer, message, finished)
        return moved

    def _pull(self, peer: int, incoming: "_Incoming", finished: "Finished") -> bool:
        """Take what is in the ring of a peer, up to the last message of this step."""
        moved = False
        while incoming.left and self._memory.has_reached(peer, _FILLED, incoming.taken + 1):
            slot = incoming.ring[incoming.taken % self._slots]
            if incoming.message is None:
                incoming.message = self._prepare(peer, *MessageHeader.unpack(slot))
            copy_all(incoming.message.next_slice(slot, to_slot=False))
            incoming.taken += 1
            self._memory.signal(peer, _FREED)
            moved = True
            if incoming.message.is_complete:
                self._finish_pull(peer, incoming.message, finished)
                incoming.message = None
                incoming.left -= 1
        return moved

    def _prepare(self, peer: int, header: MessageHeader, header_bytes: int) -> "SlicedMessage":
        tensors = [None if one is None else self._empty(peer, one) for one in header.tensors]
        return SlicedMessage(
            header, tensors, torch.empty(header_bytes, dtype=torch.uint8, device="cpu"), self._is_in_slots
        )

    def _empty(self, peer: int, layout: TensorLayout) -> Tensor:
        return layout.view(self._buffers.take(layout.num_bytes))

    def _wait(self, *args: Any, **kwargs: Any) -> None:
        self._backoff.reset()
        super()._wait(*args, **kwargs)

    def _pause(self, seconds: float) -> None:
        self._is_waiting = True
        self._changed.release()
        try:
            self._move_or_pause(self._backoff)
        finally:
            self._changed.acquire()
            self._is_waiting = False

    def _move_until_end(self) -> None:
        """Work of the transport's own thread in a step."""
        backoff = Backoff()
        while not self._ends.is_set():
            if self._is_waiting:
                time.sleep(_LONGEST_SLEEP)
            else:
                self._move_or_pause(backoff)

    def _move_or_pause(self, backoff: Backoff) -> None:
        if self._progress():
            backoff.reset()
        else:
            self._check_peers()
            backoff.pause()

    def _check_peers(self) -> None:
        """Fail if a peer has failed, or if one that this rank depends on has ended."""
        for peer in self._peers():
            if self._memory.seen(peer, _FAILED):
                self._fail([peer], f"{self._name_rank(peer)} has failed")
                return
        now = time.monotonic()
        if now - self._looked_at_peers < _LOOK_AT_PEERS:
            return
        self._looked_at_peers = now
        for peer in self._depends_on():
            if self._memory.has_ended(peer):
                self._progress()  # what it did before it ended is valid
                if peer in self._depends_on():
                    self._fail([peer], f"the process of {self._name_rank(peer)} has ended")
                    return

    def _depends_on(self) -> list[int]:
        with self._changed:
            return sorted({*self._sources(), *self._unsent})


class Finished(NamedTuple):
    """Result of a round of moving: finished keys by destination, and messages by source with the event of a GPU."""

    sent: list[tuple[int, MessageKey]]
    received: list[tuple[int, "SlicedMessage", Any]]


class SlicedMessage:
    """A message whose slices are being copied; the bytes of those tensors for whose layout `is_part` is true.

    packed: the header, copied before them, or None.
    """

    def __init__(
        self,
        header: MessageHeader,
        tensors: list[Tensor | None],
        packed: Tensor | None,
        is_part: Callable[[TensorLayout], bool],
    ) -> None:
        self.header = header
        self.tensors = tensors
        self.ready: Any = None  # an event on a GPU, before which its tensors do not hold their values
        self._position = 0
        self._parts: deque[tuple[int, Tensor]] = deque()  # where each begins in the message, and its memory
        end = 0
        if packed is not None:
            self._parts.append((0, packed))
            end = packed.numel()
        for tensor, layout in zip(tensors, header.tensors, strict=True):
            if tensor is not None and layout is not None and is_part(layout):
                start = -(-end // _ALIGNMENT) * _ALIGNMENT
                self._parts.append((start, as_bytes(tensor)))
                end = start + tensor.nbytes if tensor.nbytes else end
        self._num_bytes = end

    @property
    def is_complete(self) -> bool:
        return self._position >= self._num_bytes

    def next_slice(self, slot: Tensor, *, to_slot: bool) -> list[tuple[Tensor, Tensor]]:
        """Begin the next slice: what to copy to the slot, or from it, as (target, source)."""
        begin, end = self._position, self._position + slot.numel()
        self._position = end
        pairs = []
        while self._parts and self._parts[0][0] < end:
            start, data = self._parts[0]
            first, last = max(begin, start), min(end, start + data.numel())
            ours, theirs = data[first - start : last - start], slot[first - begin : last - begin]
            pairs.append((theirs, ours) if to_slot else (ours, theirs))
            if last < start + data.numel():
                break
            self._parts.popleft()
        return pairs


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


@dataclass
class Outgoing:
    """Messages under way to a peer. filled: slots so far; messages: the first of them is being copied."""

    ring: list[Tensor]
    filled: int = 0
    messages: deque[SlicedMessage] = field(default_factory=deque)


@dataclass
class _Incoming:
    """Messages under way from a peer. taken: slots so far; left: messages that this step still expects."""

    ring: list[Tensor]
    taken: int = 0
    left: int = 0
    message: SlicedMessage | None = None
