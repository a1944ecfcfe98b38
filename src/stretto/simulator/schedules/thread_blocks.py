# SPDX-License-Identifier: Apache-2.0
"""The event loop of a simulated schedule: thread blocks that take their steps, and FIFOs of slots between them.

As MSCCLang's interpreter (section 6.2, figure 5): a thread block executes its steps in order, for one tile of all
chunks after another. Before a step it waits for the step of another thread block that it depends on, for the message
that it receives and for a free slot of the FIFO that it sends through.
"""

from collections import deque
from dataclasses import dataclass

from stretto.collectives.schedule import Schedule, StepType
from stretto.simulator.events import EventQueue
from stretto.simulator.network import EventDrivenNetwork
from stretto.simulator.schedules.costs import ExecutorCosts, ProtocolCosts

_NS = 1e9
_STEP, _MESSAGE, _SLOT = 0, 1, 2


@dataclass(frozen=True)
class TileRun:
    """Result of one run of the event loop: nanoseconds, and by thread block (busy, step, message, slot)."""

    nanoseconds: float
    events: int
    blocks: tuple[tuple[float, float, float, float], ...]


class _Message:
    """A message on its way, complete once the network has delivered it and its sender's step has ended."""

    __slots__ = ("arrival", "connection", "is_complete", "sender_end", "waiter")

    def __init__(self, connection: "_Connection") -> None:
        self.connection = connection
        self.arrival = self.sender_end = -1.0
        self.is_complete = False
        self.waiter: tuple[_Block, float, _Message | None] | None = None


class _Connection:
    """The FIFO of one (sender, receiver, channel): free slots, and messages that have not been taken.

    A receiver takes messages in order, whatever the routes on which they come.
    """

    __slots__ = ("coming", "costs", "free", "latency", "messages", "pair", "ready", "receiver", "sender")

    def __init__(self, pair: tuple[int, int], free: int, latency: float, costs: ProtocolCosts) -> None:
        self.pair = pair
        self.free = free
        self.latency = latency  # ns of the links
        self.costs = costs
        self.ready = 0  # of the messages, from the first: may be taken
        self.messages: deque[_Message] = deque()
        self.coming: deque[_Message] = deque()  # of a protocol that does not stream: those that are not ready
        self.sender: _Block | None = None  # that waits for a slot
        self.receiver: _Block | None = None  # that waits for a message


class _Block:
    """A thread block: its current step, and what it waits for."""

    __slots__ = ("at", "busy", "ended", "incoming", "last", "outgoing", "since", "steps", "waited", "waiters")

    def __init__(self, steps: list[tuple[bool, bool, float, float, "tuple[_Block, int] | None"]]) -> None:
        self.steps = steps
        self.at = 0  # the next step
        self.ended = 0  # steps of all tiles
        self.last = len(steps)
        self.incoming: _Connection | None = None
        self.outgoing: _Connection | None = None
        self.busy = 0.0
        self.since = 0.0  # when it began to wait
        self.waited = [0.0, 0.0, 0.0]
        self.waiters: list[tuple[int, _Block]] = []


class TileSimulation:
    """One run of a schedule, whose chunks have `tiles` tiles of `tile_bytes`. Runs once."""

    def __init__(
        self,
        schedule: Schedule,
        tile_bytes: float,
        tiles: int,
        network: EventDrivenNetwork,
        costs: ExecutorCosts,
        protocol: str,
        ranks_per_node: int,
        slots: int,
        instances: int,
    ) -> None:
        self._queue = EventQueue()
        self._network = network
        self._schedule = schedule
        inside = costs.find(protocol, is_in_node=True)
        connections: dict[tuple[int, int, int, int], _Connection] = {}

        def connect(sender: int, receiver: int, channel: int, instance: int) -> _Connection:
            key = (sender, receiver, channel, instance)
            if key not in connections:
                is_in_node = sender // ranks_per_node == receiver // ranks_per_node
                route = network.topology.routes(sender, receiver)[0]
                latency = sum(network.topology.links[link].latency for link in route) * _NS
                connections[key] = _Connection(
                    (sender, receiver), slots, latency, costs.find(protocol, is_in_node=is_in_node)
                )
            return connections[key]

        self._blocks: list[list[_Block]] = []
        for rank, program in enumerate(schedule.ranks):
            self._blocks.append([])
            for instance in range(instances):
                blocks = [_Block([]) for _ in program.thread_blocks]
                self._blocks[rank] += blocks
                for block, described in zip(blocks, program.thread_blocks, strict=True):
                    if described.send_peer is not None:
                        block.outgoing = connect(rank, described.send_peer, described.channel, instance)
                    if described.receive_peer is not None:
                        block.incoming = connect(described.receive_peer, rank, described.channel, instance)
                    for step in described.steps:
                        waits = None if step.waits_for is None else (blocks[step.waits_for[0]], step.waits_for[1])
                        num_bytes, taken = 0.0, 0.0
                        if step.type is not StepType.NOP:
                            num_bytes = step.size * tile_bytes
                            is_in_place = step.type is StepType.RECEIVE and not costs.copies_from_slots
                            moved = 0.0 if is_in_place else num_bytes
                            taken = (inside.step_seconds + moved / inside.block_bandwidth) * _NS
                        block.steps.append((step.type.receives, step.type.sends, num_bytes, taken, waits))
                    block.last = len(block.steps) * tiles

    def run(self) -> TileRun:
        """Run all thread blocks to their end. Raises ValueError if they wait for each other for ever."""
        queue = self._queue
        all_blocks = [block for blocks in self._blocks for block in blocks]
        for block in all_blocks:
            if block.last:
                queue.at(0.0, self._advance, block)
        queue.run()
        stuck = [
            (rank, number)
            for rank, blocks in enumerate(self._blocks)
            for number, block in enumerate(blocks)
            if block.ended < block.last
        ]
        if stuck:
            rank, number = stuck[0]
            raise ValueError(
                f"{self._schedule.name} deadlocks: rank {rank}, thread block {number} and {len(stuck) - 1} others wait "
                "for each other for ever; verify it, or give it more slots"
            )
        return TileRun(
            max((block.since for block in all_blocks), default=0.0),
            queue.processed,
            tuple((block.busy, block.waited[0], block.waited[1], block.waited[2]) for block in all_blocks),
        )

    def _advance(self, block: _Block) -> None:
        """Begin the block's next step if it need not wait; else the event that ends the wait calls this again."""
        receives, sends, num_bytes, taken, waits = block.steps[block.at]
        queue = self._queue
        now = queue.now
        if waits is not None:
            other, step = waits
            # Step `step` of the same tile.
            target = (block.ended // len(block.steps)) * len(other.steps) + step
            if other.ended <= target:
                other.waiters.append((target, block))
                return
            self._count_wait(block, _STEP, now)
        incoming, outgoing = block.incoming, block.outgoing
        message = None
        if receives:
            assert incoming is not None
            if not incoming.ready:
                incoming.receiver = block
                return
            self._count_wait(block, _MESSAGE, now)
        if sends:
            assert outgoing is not None
            if not outgoing.free:
                outgoing.sender = block
                return
            self._count_wait(block, _SLOT, now)
            outgoing.free -= 1
        if receives:
            assert incoming is not None
            incoming.ready -= 1
            message = incoming.messages.popleft()
        sent = self._send(outgoing, num_bytes, now) if sends and outgoing is not None else None
        if message is not None and not message.is_complete:
            message.waiter = (block, now + taken, sent)
            block.since = now
        else:
            block.busy += taken
            queue.at(now + taken, self._finish, block, sent)

    def _count_wait(self, block: _Block, what: int, now: float) -> None:
        block.waited[what] += now - block.since
        block.since = now

    def _send(self, connection: _Connection, num_bytes: float, now: float) -> _Message:
        message = _Message(connection)
        connection.messages.append(message)
        costs = connection.costs
        self._network.send(
            self._queue,
            *connection.pair,
            num_bytes / costs.bandwidth_factor + costs.header_bytes,
            self._arrive,
            message,
        )
        if costs.is_streaming:
            head = now + connection.latency + costs.latency * _NS
            self._queue.at(head, self._make_ready, connection)
        else:
            connection.coming.append(message)
        return message

    def _make_ready(self, connection: _Connection) -> None:
        connection.ready += 1
        receiver, connection.receiver = connection.receiver, None
        if receiver is not None:
            self._advance(receiver)

    def _arrive(self, message: _Message) -> None:
        message.arrival = self._queue.now
        if message.sender_end >= 0:
            self._complete_later(message)

    def _complete_later(self, message: _Message) -> None:
        connection = message.connection
        whole = max(message.arrival, message.sender_end + connection.latency) + connection.costs.latency * _NS
        self._queue.at(max(whole, self._queue.now), self._complete, message)

    def _complete(self, message: _Message) -> None:
        message.is_complete = True
        connection = message.connection
        if not connection.costs.is_streaming:
            while connection.coming and connection.coming[0].is_complete:
                connection.coming.popleft()
                self._make_ready(connection)
        elif message.waiter is not None:
            block, end, sent = message.waiter
            now = self._queue.now
            # It has processed the data that had arrived; the rest of the time it has waited for the message.
            block.busy += end - block.since
            block.waited[_MESSAGE] += max(0.0, now - end)
            self._queue.at(max(now, end), self._finish, block, sent)

    def _finish(self, block: _Block, sent: _Message | None) -> None:
        """End the block's step: publish what it sent, free the slot that it read, and wake waiting blocks."""
        now = self._queue.now
        receives = block.steps[block.at][0]
        block.ended += 1
        block.at = block.at + 1 if block.at + 1 < len(block.steps) else 0
        block.since = now
        if sent is not None:
            sent.sender_end = now
            if sent.arrival >= 0:
                self._complete_later(sent)
        if receives:
            incoming = block.incoming
            assert incoming is not None
            self._queue.at(now + incoming.latency, self._free_slot, incoming)
        if block.waiters:
            met = [other for target, other in block.waiters if block.ended > target]
            if met:
                block.waiters = [each for each in block.waiters if block.ended <= each[0]]
                for other in met:
                    self._advance(other)
        if block.ended < block.last:
            self._advance(block)

    def _free_slot(self, connection: _Connection) -> None:
        connection.free += 1
        sender, connection.sender = connection.sender, None
        if sender is not None:
            self._advance(sender)
