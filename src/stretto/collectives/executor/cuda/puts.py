# SPDX-License-Identifier: Apache-2.0
"""Puts of a schedule's connections between nodes: their slots in pinned memory, as many as the verifier has counted."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace
from stretto.collectives.executor.plan import lay_out_connections
from stretto.collectives.schedule import Schedule
from stretto.memory.host import HostMemory
from stretto.memory.network.descriptors import CAPACITY
from stretto.memory.pinned_puts import PinnedPuts

ConnectionKey = tuple[int, int, int]
"""A connection: its sender, its receiver and its channel."""


class PutSlots(NamedTuple):
    """Slots of a connection between nodes: where the first one is in the receiver's buffer, and in the sender's, and
    the bytes of one. signal: the number of what counts its messages there; the next one counts credits at the sender.
    """

    start: int
    source: int
    stride: int
    signal: int


class PutLayout(NamedTuple):
    """All slots, and the bytes of a rank's buffer and its signals for each other rank, the same on all ranks."""

    slots: Mapping[ConnectionKey, PutSlots]
    num_bytes: int
    signals: int


def lay_out_puts(schedule: Schedule, nodes: Sequence[int], tile_bytes: int) -> PutLayout:
    """Lay out the slots of connections between nodes: a rank's arriving ones, then its leaving ones.

    nodes: each rank's. tile_bytes: the most of a chunk that a step handles at once.
    """
    connections, _ = lay_out_connections(schedule, tile_bytes, schedule.slots)
    far = {key: one for key, one in sorted(connections.items()) if nodes[one.sender] != nodes[one.receiver]}
    arriving, leaving = [0] * len(nodes), [0] * len(nodes)
    places = {}
    for key, one in far.items():
        places[key] = arriving[one.receiver], leaving[one.sender]
        arriving[one.receiver] += schedule.slots * one.slot_bytes
        leaving[one.sender] += schedule.slots * one.slot_bytes
    slots = {
        key: PutSlots(start, max(arriving) + source, far[key].slot_bytes, far[key].sent)
        for key, (start, source) in places.items()
    }
    return PutLayout(slots, max(arriving) + max(leaving), 2 + max((one.sent for one in far.values()), default=0))


class SchedulePuts:
    """The memory, FIFO and counters by which a rank's kernel puts the messages of one schedule.

    address: of the kernel's struct `Puts`, on the device. Made by `allocate`, on all ranks together.
    """

    def __init__(self, layout: PutLayout, pinned: PinnedPuts, thread_blocks: int, device: torch.device) -> None:
        memory = pinned.memory
        self.slots = layout.slots
        self._pinned = pinned
        self._passed = torch.zeros(2 * max(thread_blocks, 1), dtype=torch.int64, device=device)
        numbers = (
            *(pinned.words.data_ptr(), pinned.tail.data_ptr(), pinned.tickets.data_ptr()),
            *(memory.buffer().data_ptr(), pinned.signals.data_ptr(), self._passed.data_ptr()),
            *(layout.signals, memory.region, CAPACITY),
        )
        self._struct = torch.tensor(numbers, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @classmethod
    def allocate(cls, schedule: Schedule, workspace: CollectiveWorkspace, tile_bytes: int) -> "SchedulePuts":
        """Allocate for calls with tiles of so many bytes. Collective. ValueError for more than there is memory for."""
        layout = lay_out_puts(schedule, workspace.nodes, max(tile_bytes, 480))
        memory = HostMemory.allocate(
            layout.num_bytes,
            layout.signals,
            workspace.group,
            workspace.timeout,
            f"slots of {schedule.name}",
            always_puts=True,
        )
        blocks = len(schedule.ranks[workspace.rank].thread_blocks)
        return cls(layout, PinnedPuts(memory, workspace.device), blocks, workspace.device)

    @property
    def address(self) -> int:
        """The address of the kernel's struct, in the device's memory."""
        return self._struct.data_ptr()

    def begin(self) -> None:
        """Wake the proxy for a call. PeerError if a rank is lost."""
        self._pinned.check()
        self._pinned.wake()

    def break_connection(self, peer: int) -> None:
        """Break the connection to a peer of another node, for tests: it is opened again, and nothing is lost."""
        self._pinned.endpoint.proxy.break_connection(peer)

    def describe(self, rank: int) -> str:
        """Name a rank with its node and NIC, and what the proxy knows of it."""
        endpoint = self._pinned.endpoint
        why = None if rank == endpoint.rank else endpoint.failure(rank)
        return f"{endpoint.describe(rank)}{f', of which the proxy says: {why};' if why else ''}"
