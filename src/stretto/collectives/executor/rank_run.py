# SPDX-License-Identifier: Apache-2.0
"""Executes one rank's part of a schedule on host memory: its thread blocks as coroutines, and FIFOs between ranks.

Messages go through slots in the receiver's memory, counted by two signals a connection. The sender fills slot
k % slots with message k, then counts `sent` up at the receiver. The receiver waits for `sent` to reach k + 1, reads the
slot, then counts `freed` up at the sender. A slot may be used again because the sender fills it with message k only
once `freed` has reached k + 1 - slots. Between nodes the sender fills a slot of its own, which is put into the
receiver's, with the signal: both slots are free when `freed` says so.
"""

from collections.abc import Iterator, Mapping
from enum import Enum

import torch
from torch import Tensor

from stretto.collectives.executor.layout import Buffers
from stretto.collectives.executor.plan import REDUCTIONS, ExecutionPlan, FifoConnection
from stretto.collectives.schedule import Step, StepType, ThreadBlock
from stretto.memory import HostMemory, Reach


class _FifoEnd:
    """Both ends of a FIFO: its slots, and the number of messages that have passed since the memory was allocated."""

    def __init__(
        self, memory: HostMemory, connection: FifoConnection, slots: int, dtype: torch.dtype, passed: int = 0
    ) -> None:
        self.connection = connection
        self.passed = passed
        self._memory = memory
        start, size = connection.offset, connection.slot_bytes
        # Slots at a rank of another node are put into, from slots here of the same sizes.
        self._puts = memory.reach[connection.receiver] is Reach.PUTS
        self._source = 0
        if self._puts:
            self._source, buffer = memory.find_source((connection.receiver, start, size), slots * size)
            start = 0
        else:
            buffer = memory.buffer(connection.receiver)
        self._slots = [buffer[start + slot * size : start + (slot + 1) * size].view(dtype) for slot in range(slots)]

    def message(self, chunks: int, elements: int) -> Tensor:
        """The next message, [chunks, elements], in its slot."""
        return self._slots[self.passed % len(self._slots)].as_strided((chunks, elements), (elements, 1))


class FifoSender(_FifoEnd):
    """The sending end of a FIFO: fills slot k % slots with message k, then counts up `sent`."""

    def is_ready(self) -> bool:
        """Check whether there is a free slot."""
        target = self.passed + 1 - len(self._slots)
        return self._memory.has_reached(self.connection.receiver, self.connection.freed, target)

    def send(self, size: int) -> None:
        """Signal the receiver that the message has been written; puts the first `size` bytes of it between nodes."""
        connection = self.connection
        if self._puts:
            slot = self.passed % len(self._slots) * connection.slot_bytes
            self._memory.put(
                connection.receiver, slot, connection.offset + slot, size, connection.sent, source_region=self._source
            )
        else:
            self._memory.signal(connection.receiver, connection.sent)
        self.passed += 1


class FifoReceiver(_FifoEnd):
    """The receiving end of a FIFO: reads message k once `sent` has reached k + 1, then counts up `freed`."""

    def is_ready(self) -> bool:
        """Check whether a message has arrived."""
        return self._memory.has_reached(self.connection.sender, self.connection.sent, self.passed + 1)

    def free(self) -> None:
        """Signal the sender that the message has been read and its slot is free."""
        self._memory.signal(self.connection.sender, self.connection.freed)
        self.passed += 1


class Awaited(Enum):
    """A thread block's wait before its next step."""

    STEP = "a step of another thread block"
    MESSAGE = "a message"
    SLOT = "a free slot"


class RankRun:
    """The state of one rank during a run: its buffers, its ends of connections, the steps that have ended.

    passed: by a connection's key in the plan, the number of messages that earlier runs on this memory have sent.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        rank: int,
        memory: HostMemory,
        buffers: Buffers,
        passed: Mapping[tuple[int, int, int], int] | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.memory = memory
        self.blocks = plan.schedule.ranks[rank].thread_blocks
        self._chunks = buffers.chunks
        self._passed = passed or {}
        self._reduce = REDUCTIONS[plan.reduction]
        # Of each thread block, over all tiles: step s of tile t has ended once this is more than t * steps + s.
        self._ended = [0] * len(self.blocks)

    def run_thread_block(self, number: int) -> Iterator[Awaited | None]:
        """Execute a thread block, tile by tile; yields None after each step, and the step's waits before it."""
        block = self.blocks[number]
        sender, receiver = self._ends(block)
        ended = self._ended
        tile_elements, chunk_elements = self.plan.tile_elements, self.plan.layout.chunk_elements
        for tile in range(self.plan.tiles):
            start = tile * tile_elements
            elements = min(tile_elements, chunk_elements - start)
            for step in block.steps:
                if step.waits_for is not None:
                    other, at = step.waits_for
                    while ended[other] <= tile * len(self.blocks[other].steps) + at:
                        yield Awaited.STEP
                if step.type.receives:
                    assert receiver is not None
                    while not receiver.is_ready():
                        yield Awaited.MESSAGE
                if step.type.sends:
                    assert sender is not None
                    while not sender.is_ready():
                        yield Awaited.SLOT
                if step.type is not StepType.NOP:
                    self._do(step, start, elements, sender, receiver)
                ended[number] += 1
                yield None

    def _ends(self, block: ThreadBlock) -> tuple[FifoSender | None, FifoReceiver | None]:
        plan, memory, rank = self.plan, self.memory, self.rank
        outgoing = incoming = None
        sent = received = 0
        if block.send_peer is not None:
            key = (rank, block.send_peer, block.channel)
            outgoing, sent = plan.connections.get(key), self._passed.get(key, 0)
        if block.receive_peer is not None:
            key = (block.receive_peer, rank, block.channel)
            incoming, received = plan.connections.get(key), self._passed.get(key, 0)
        return (
            None if outgoing is None else FifoSender(memory, outgoing, plan.slots, plan.dtype, sent),
            None if incoming is None else FifoReceiver(memory, incoming, plan.slots, plan.dtype, received),
        )

    def _do(
        self, step: Step, start: int, elements: int, sender: FifoSender | None, receiver: FifoReceiver | None
    ) -> None:
        """Execute a step on one tile, once nothing is left to wait for. It sends exactly the bits that it stores."""
        kind = step.type
        source = destination = received = message = None
        if kind.reads_source:
            source = self._tile(step.source_buffer, step.source, step.size, start, elements)
        if kind.writes_destination:
            destination = self._tile(step.destination_buffer, step.destination, step.size, start, elements)
        if kind.receives and receiver is not None:
            received = receiver.message(step.size, elements)
        if kind.sends and sender is not None:
            message = sender.message(step.size, elements)
        first, *further = [target for target in (destination, message) if target is not None]
        if kind.reduces:
            self._reduce(destination if received is None else received, source, out=first)
        else:
            given = source if received is None else received
            assert given is not None
            first.copy_(given)
        for target in further:
            target.copy_(first)
        if kind.receives and receiver is not None:
            receiver.free()
        if kind.sends and sender is not None:
            assert message is not None
            sender.send(message.nbytes)

    def _tile(self, buffer: str, chunk: int, chunks: int, start: int, elements: int) -> Tensor:
        """A tile of several chunks, as [chunks, elements]."""
        whole = self._chunks[buffer]  # type: ignore[index]
        row, offset = whole.stride(0), whole.storage_offset()
        return whole.as_strided((chunks, elements), (row, 1), offset + chunk * row + start)

    def describe(self, number: int, awaited: Awaited) -> str:
        """Describe a thread block's current step, and what it waits for from which rank."""
        block = self.blocks[number]
        tile, at = divmod(self._ended[number], len(block.steps))
        step = block.steps[at]
        match awaited:
            case Awaited.STEP:
                assert step.waits_for is not None
                what = f"step {step.waits_for[1]} of thread block {step.waits_for[0]} to end"
            case Awaited.MESSAGE:
                what = f"a message from rank {block.receive_peer} over channel {block.channel}"
            case Awaited.SLOT:
                what = f"one of {self.plan.slots} slots to rank {block.send_peer} over channel {block.channel}"
        where = f"rank {self.rank}, thread block {number}, step {at} ({step.type}), tile {tile} of {self.plan.tiles}"
        return f"{where} waits for {what}"

    def awaited_peer(self, number: int, awaited: Awaited) -> int | None:
        match awaited:
            case Awaited.STEP:
                return None
            case Awaited.MESSAGE:
                return self.blocks[number].receive_peer
            case Awaited.SLOT:
                return self.blocks[number].send_peer
