# SPDX-License-Identifier: Apache-2.0
"""The interpreter kernel's tables of a schedule: its steps, its thread blocks, and the positions of its FIFOs."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from stretto.collectives.collective import Buffer
from stretto.collectives.executor.cuda.puts import ConnectionKey, PutSlots
from stretto.collectives.executor.cuda.value_trace import Divisions, StepPlace
from stretto.collectives.executor.cuda.workspace import MAX_COUNTS
from stretto.collectives.executor.plan import ExecutionPlan
from stretto.collectives.schedule import Step, StepType

_BUFFERS = {Buffer.IN: 0, Buffer.OUT: 1, Buffer.SCRATCH: 2}
# As the structs StepRow and BlockRow of interpreter.cu.
_STEP_ROW = np.dtype([(name, "i4") for name in ("kind", "source", "destination", "size", "block", "step")])
_BLOCK_ROW = np.dtype(
    [(name, "i4") for name in ("send_peer", "receive_peer", "send", "receive", "first_step", "steps")]
    + [(name, "i4") for name in ("puts_out", "puts_in")]
    + [(name, "u8") for name in ("send_start", "send_stride", "receive_start", "receive_stride", "send_source")]
)


class FifoLayout(NamedTuple):
    """Positions of FIFOs. slots: each connection's first slot in its receiver's memory, and the bytes of one slot;
    needed: the bytes that the rank with the largest FIFOs needs.
    """

    slots: Mapping[ConnectionKey, tuple[int, int]]
    needed: int


def lay_out_fifos(
    plan: ExecutionPlan, tile_slot_bytes: int, put_slots: Mapping[ConnectionKey, PutSlots] | None = None
) -> FifoLayout:
    """Lay out the slots of all connections but put_slots', the same on all ranks. tile_slot_bytes: for a chunk's tile.

    Raises ValueError for more connections than there are counters for.
    """
    if 2 * len(plan.connections) > MAX_COUNTS:
        raise ValueError(
            f"{plan.schedule.name} has {len(plan.connections)} connections: there are counts for {MAX_COUNTS // 2}"
        )
    used = [0] * plan.collective.ranks
    slots = {}
    for key in sorted(plan.connections.keys() - (put_slots or {}).keys()):
        receiver, slot_bytes = key[1], plan.connections[key].chunks * tile_slot_bytes
        slots[key] = used[receiver], slot_bytes
        used[receiver] += plan.slots * slot_bytes
    return FifoLayout(slots, max(used))


def make_tables(
    plan: ExecutionPlan,
    rank: int,
    fifos: FifoLayout,
    divisions: Divisions,
    put_slots: Mapping[ConnectionKey, PutSlots] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The rank's steps and thread blocks, a row each. divisions: where an average divides by the number of ranks;
    put_slots: of connections between nodes.
    """
    numbers = {key: number for number, key in enumerate(sorted(plan.connections))}
    put_slots = put_slots or {}
    steps: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    for number, block in enumerate(plan.schedule.ranks[rank].thread_blocks):
        send = None if block.send_peer is None else (rank, block.send_peer, block.channel)
        receive = None if block.receive_peer is None else (block.receive_peer, rank, block.channel)
        send = send if send in numbers else None
        receive = receive if receive in numbers else None
        first = len(steps)
        for at, step in enumerate(block.steps):
            steps.append(_step_row(plan, rank, step, (rank, number, at), divisions))
        put_out, put_in = (None if key is None else put_slots.get(key) for key in (send, receive))
        blocks.append(
            (
                -1 if send is None else send[1],
                -1 if receive is None else receive[0],
                put_out.signal if put_out else 0 if send is None else numbers[send],
                put_in.signal if put_in else 0 if receive is None else numbers[receive],
                first,
                len(block.steps),
                put_out is not None,
                put_in is not None,
                *((put_out.start, put_out.stride) if put_out else fifos.slots[send] if send else (0, 0)),
                *((put_in.start, put_in.stride) if put_in else fifos.slots[receive] if receive else (0, 0)),
                put_out.source if put_out else 0,
            )
        )
    empty = (-1, -1, *[0] * 11)
    return np.array(steps or [(0,) * 6], dtype=_STEP_ROW), np.array(blocks or [empty], dtype=_BLOCK_ROW)


def _step_row(plan: ExecutionPlan, rank: int, step: Step, place: StepPlace, divisions: Divisions) -> tuple[int, ...]:
    kind = step.type
    # In the order of the bits SENDS, RECEIVES, ... of interpreter.cu.
    flags = (
        kind.sends,
        kind.receives,
        kind.reduces,
        kind.reads_source,
        kind.writes_destination,
        place in divisions.of_sums,
        step.awaited,
        place in divisions.of_left,
        place in divisions.of_right,
    )
    needs_destination = kind.writes_destination or kind is StepType.REDUCE
    awaited = step.waits_for or (-1, -1)
    return (
        sum(1 << bit for bit, is_set in enumerate(flags) if is_set),
        _pack_place(plan, rank, step.source_buffer, step.source) if kind.reads_source else -1,
        _pack_place(plan, rank, step.destination_buffer, step.destination) if needs_destination else -1,
        0 if kind is StepType.NOP else step.size,
        *awaited,
    )


def _pack_place(plan: ExecutionPlan, rank: int, buffer: Buffer, chunk: int) -> int:
    """A chunk's place as one number: its buffer above bit 28, its index below."""
    shared, index = plan.collective.place(rank, buffer, chunk)
    return _BUFFERS[shared] << 28 | index


def find_initial_copies(plan: ExecutionPlan, rank: int) -> Iterator[tuple[int, int, int]]:
    """The copies before the first step: from an element of the input, to an element of the output, how many."""
    layout = plan.layout
    for pair in plan.schedule.ranks[rank].copies:
        buffers = (Buffer.IN, Buffer.OUT)
        places = [plan.collective.place(rank, *one) for one in zip(buffers, pair, strict=True)]
        if places[0] != places[1]:
            (block, at), (to_block, to) = (divmod(index, layout.block_chunks) for _, index in places)
            start, end = (part * layout.chunk_elements for part in (at, to))
            elements = max(min(layout.block_elements - start, layout.chunk_elements), 0)
            yield block * layout.block_elements + start, to_block * layout.block_elements + end, elements
