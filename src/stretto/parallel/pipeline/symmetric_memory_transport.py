# SPDX-License-Identifier: Apache-2.0
"""Messages between GPUs that reach each other's memory, over rings of slots in symmetric memory on the GPUs.

A message's header, and its tensors on the CPU, go through shared host memory, as in `shared_memory_transport`. The
tensors on a GPU follow in slices, by copies on side streams of the transport, concurrently with kernels that compute:

    sender                                                        receiver
    its copies into a free slot, on the receiver's GPU, end
    signal DATA_FILLED (host)  ------------------------------>    copies the slot to the message's tensors, on its GPU
                                                                  that copy ends
    counts the slot as free again  <------------------------------signal DATA_FREED (host)

The host asks whether copies have ended, and signals in shared host memory: no kernel and no stream waits for another
rank, so a rank that dies leaves nothing on a GPU that hangs, and NCCL's kernels cannot deadlock with it. A message has
arrived when its last copy is enqueued on the receiver; `take` makes the current stream wait for that copy.

A copy that has ended is visible to the other GPU's later copies: the end of a copy, which the host has seen, comes
before the host's signal, and this before the host of the receiver enqueues its copy.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.execution import MESSAGE_RINGS_BYTES, MESSAGE_SLOT_BYTES, MESSAGE_SLOTS
from stretto.memory import SymmetricMemory, allocate, group_timeout
from stretto.memory.copy_engine import ChannelStreams
from stretto.parallel.pipeline.message_format import MAX_BYTES_OF_HEADER, MessageHeader, TensorLayout
from stretto.parallel.pipeline.shared_memory_transport import Finished, Outgoing, SharedMemoryTransport, SlicedMessage

_ALIGNMENT = 128
_DATA_FILLED, _DATA_FREED = 3, 4


class SymmetricMemoryTransport(SharedMemoryTransport):
    """Carries messages between the GPUs of one machine, each rank's current one, or one that ranks share.

    All ranks of the group make it. data_slot_bytes: of a slot on a GPU (None: 8 MiB, less for many ranks); slots: of
    each of the rings that a rank has for each other rank. ValueError where GPUs have no memory left or are not there,
    PeerError where they do not reach each other's memory.
    """

    name = "symmetric memory"
    signals = 5

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cuda",
        *,
        data_slot_bytes: int | None = None,
        slots: int = MESSAGE_SLOTS,
    ) -> None:
        size = dist.get_world_size(group)
        if data_slot_bytes is None:
            fair = MESSAGE_RINGS_BYTES // (slots * max(size - 1, 1)) // _ALIGNMENT * _ALIGNMENT
            data_slot_bytes = max(min(MESSAGE_SLOT_BYTES, fair), _ALIGNMENT)
        if data_slot_bytes < _ALIGNMENT or data_slot_bytes % _ALIGNMENT:
            raise ValueError(f"a slot on a GPU has a multiple of {_ALIGNMENT} bytes, not {data_slot_bytes}")
        super().__init__(group, device, slot_bytes=MAX_BYTES_OF_HEADER, slots=slots)
        self._copies = self._make_copies()
        try:
            self._data = self._allocate_data(data_slot_bytes * slots * (self.size - 1))
        except BaseException:
            self._record.close()
            self._memory.close()
            raise
        self._data_outgoing = {
            peer: _DataOutgoing(self._cut(self._data.buffer(peer), peer, self.rank, data_slot_bytes))
            for peer in self._peers()
        }
        self._data_incoming = {
            peer: _DataIncoming(self._cut(self._data.buffer(), self.rank, peer, data_slot_bytes))
            for peer in self._peers()
        }

    def _check_device(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"symmetric memory carries messages of tensors on GPUs, not on {device}")

    def _make_copies(self) -> ChannelStreams:
        return ChannelStreams(self.device)

    def _allocate_data(self, num_bytes: int) -> SymmetricMemory:
        with torch.cuda.device(self.device):
            return allocate(num_bytes, self.group, timeout=group_timeout(self.group), backend="cuda")

    def _is_in_slots(self, layout: TensorLayout) -> bool:
        return not self._is_data(layout)

    def _is_data(self, layout: TensorLayout) -> bool:
        """True if a tensor's bytes go from GPU to GPU."""
        return layout.is_on_gpu

    def _send(self, destination: int, header: MessageHeader, tensors: list[Tensor | None]) -> None:
        message = SlicedMessage(header, tensors, header.pack(), self._is_in_slots)
        message.ready = self._copies.ready()
        self._outgoing[destination].messages.append(message)
        self._progress()

    def _end(self) -> None:
        super()._end()
        if not self.has_failed:  # the senders get their slots back even if this rank begins no other step
            for peer, incoming in self._data_incoming.items():
                for event in incoming.copying:
                    event.synchronize()
                self._free_slots(peer, incoming)

    def _close(self) -> None:
        super()._close()
        self._data_outgoing, self._data_incoming = {}, {}
        self._data.close()

    # Moving slices, with the lock held.

    def _move(self, finished: Finished) -> bool:
        moved = super()._move(finished)
        for peer, outgoing in self._data_outgoing.items():
            moved |= self._push_data(peer, outgoing, finished)
        for peer, incoming in self._data_incoming.items():
            moved |= self._pull_data(peer, incoming, finished)
        return moved

    def _push_data(self, peer: int, outgoing: "_DataOutgoing", finished: Finished) -> bool:
        """Copy to the free slots of a peer's ring, and signal the copies that have ended."""
        moved = False
        while outgoing.messages and self._memory.has_reached(peer, _DATA_FREED, outgoing.filled + 1 - self._slots):
            message = outgoing.messages[0]
            slot = outgoing.ring[outgoing.filled % self._slots]
            event = self._copies.copy(peer, message.next_slice(slot, to_slot=True), message.ready)
            outgoing.filled += 1
            outgoing.copying.append((event, message))
            moved = True
            if message.is_complete:
                outgoing.messages.popleft()
        while outgoing.copying and outgoing.copying[0][0].query():
            _, message = outgoing.copying.popleft()
            self._memory.signal(peer, _DATA_FILLED)
            moved = True
            if message.is_complete and not any(other is message for _, other in outgoing.copying):
                finished.sent.append((peer, message.header.key))
        return moved

    def _pull_data(self, peer: int, incoming: "_DataIncoming", finished: Finished) -> bool:
        """Copy the slots that a peer has filled, and free those whose copies have ended."""
        moved = self._free_slots(peer, incoming)
        while incoming.messages and self._memory.has_reached(peer, _DATA_FILLED, incoming.taken + 1):
            host, message = incoming.messages[0]
            slot = incoming.ring[incoming.taken % self._slots]
            event = self._copies.copy(self.size + peer, message.next_slice(slot, to_slot=False), None)
            incoming.taken += 1
            incoming.copying.append(event)
            moved = True
            if message.is_complete:
                incoming.messages.popleft()
                finished.received.append((peer, host, event))
        return moved

    def _free_slots(self, peer: int, incoming: "_DataIncoming") -> bool:
        moved = False
        while incoming.copying and incoming.copying[0].query():
            incoming.copying.popleft()
            self._memory.signal(peer, _DATA_FREED)
            moved = True
        return moved

    def _finish_push(self, peer: int, message: SlicedMessage, finished: Finished) -> None:
        data = SlicedMessage(message.header, message.tensors, None, self._is_data)
        data.ready = message.ready
        if data.is_complete:
            super()._finish_push(peer, message, finished)
        else:
            self._data_outgoing[peer].messages.append(data)

    def _finish_pull(self, peer: int, message: SlicedMessage, finished: Finished) -> None:
        data = SlicedMessage(message.header, message.tensors, None, self._is_data)
        if data.is_complete:
            super()._finish_pull(peer, message, finished)
        else:
            self._data_incoming[peer].messages.append((message, data))

    def _empty(self, peer: int, layout: TensorLayout) -> Tensor:
        if self._is_data(layout):
            return self._copies.empty(self.size + peer, layout.shape, layout.dtype)
        return super()._empty(peer, layout)


@dataclass
class _DataOutgoing(Outgoing):
    """Copies under way to a peer's GPU. copying: slices, with the events of their ends."""

    copying: deque[tuple[Any, SlicedMessage]] = field(default_factory=deque)


@dataclass
class _DataIncoming:
    """Copies under way from this rank's ring. messages: the part of the host's slots, and that of the GPU's."""

    ring: list[Tensor]
    taken: int = 0
    messages: deque[tuple[SlicedMessage, SlicedMessage]] = field(default_factory=deque)
    copying: deque[Any] = field(default_factory=deque)
