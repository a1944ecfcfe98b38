"""The two ends of a connection: messages through slots in the receiver's memory, counted by two signals.

Who writes: the sender fills slot k % slots with message k, then counts `sent` up at the receiver. Who waits: the
receiver, for `sent` to reach k + 1; it reads the slot, then counts `freed` up at the sender. Why a slot may be used
again: the sender fills it with message k only once `freed` has reached k + 1 - slots.
"""

import torch
from torch import Tensor

from stretto.collectives.executor.plan import FifoConnection
from stretto.memory import HostMemory


class _End:
    """What both ends have: the slots, and how many messages have passed here, in this memory's whole life."""

    def __init__(
        self, memory: HostMemory, connection: FifoConnection, slots: int, dtype: torch.dtype, passed: int = 0
    ) -> None:
        self.connection = connection
        self.passed = passed
        self._memory = memory
        start, size = connection.offset, connection.slot_bytes
        buffer = memory.buffer(connection.receiver)
        self._slots = [buffer[start + slot * size : start + (slot + 1) * size].view(dtype) for slot in range(slots)]

    def message(self, chunks: int, elements: int) -> Tensor:
        """The next message, [chunks, elements], in its slot."""
        return self._slots[self.passed % len(self._slots)].as_strided((chunks, elements), (elements, 1))


class Sender(_End):
    """The end that messages are put into."""

    def is_ready(self) -> bool:
        """Whether there is a free slot."""
        target = self.passed + 1 - len(self._slots)
        return self._memory.has_reached(self.connection.receiver, self.connection.freed, target)

    def send(self) -> None:
        """The message has been written: the receiver may have it."""
        self._memory.signal(self.connection.receiver, self.connection.sent)
        self.passed += 1


class Receiver(_End):
    """The end that messages are taken from."""

    def is_ready(self) -> bool:
        """Whether a message is there."""
        return self._memory.has_reached(self.connection.sender, self.connection.sent, self.passed + 1)

    def free(self) -> None:
        """The message has been read: the sender may have its slot."""
        self._memory.signal(self.connection.sender, self.connection.freed)
        self.passed += 1
