# SPDX-License-Identifier: Apache-2.0
"""Plans a run of a schedule for tensors of one size: layout, tiles and FIFOs, the same on all ranks, and checked."""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.executor.layout import BlockLayout, find_layout
from stretto.collectives.schedule import Schedule, Step, StepType, ThreadBlock

DEFAULT_TILE_BYTES = 256 << 10
MAX_SLOTS = 1024
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
# Each rounds once: torch adds and multiplies two fp16 or bf16 numbers in fp32, and rounds the result to their type.
REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}
_ALIGNMENT = 64
_STEP_TYPES = list(StepType)
_BUFFERS = list(Buffer)


@dataclass(frozen=True)
class FifoConnection:
    """One FIFO: messages from a sender to a receiver over a channel, in `slots` slots of the receiver's memory.

    number: of its channel among those in use, which its signals go by; offset: of its first slot, in bytes;
    slot_bytes: room for the largest message, of so many chunks; messages: its number of messages per tile.
    """

    sender: int
    receiver: int
    channel: int
    number: int
    offset: int
    slot_bytes: int
    chunks: int
    messages: int

    @property
    def sent(self) -> int:
        """The signal at the receiver that counts the messages sent."""
        return 2 * self.number

    @property
    def freed(self) -> int:
        """The signal at the sender that counts the slots that were read."""
        return 2 * self.number + 1


@dataclass(frozen=True)
class ExecutionPlan:
    """A schedule with the sizes of one call; collective: the schedule's, as it is called (in place or not)."""

    schedule: Schedule
    collective: Collective
    layout: BlockLayout
    dtype: torch.dtype
    reduction: str
    tile_elements: int
    slots: int
    connections: dict[tuple[int, int, int], FifoConnection]
    buffer_bytes: int
    signals: int

    @property
    def tiles(self) -> int:
        return -(-self.layout.chunk_elements // self.tile_elements)

    @property
    def gave_up(self) -> int:
        """The signal by which a rank notifies all others of its failure."""
        return self.signals - 1

    def describe(self) -> dict[str, object]:
        """The properties that must be the same on all ranks, by name."""
        return {
            "schedule": f"{self.schedule.name} ({digest(self.schedule)})",
            "collective": f"{self.collective.name} {'in place' if self.collective.in_place else 'out of place'}",
            "elements of a block": self.layout.block_elements,
            "dtype": str(self.dtype),
            "reduction": self.reduction,
            "elements of a tile": self.tile_elements,
            "slots": self.slots,
        }


def make_plan(
    schedule: Schedule,
    input_elements: int | None,
    output_elements: int | None,
    *,
    in_place: bool,
    dtype: torch.dtype,
    reduction: str | None,
    tile_bytes: int,
    slots: int | None,
) -> ExecutionPlan:
    """Plan a run on tensors of so many elements (None: as in `find_layout`). Raises ValueError if it cannot run."""
    if dtype not in DTYPES:
        raise ValueError(f"the dtypes are {', '.join(str(known)[6:] for known in DTYPES)}, not {str(dtype)[6:]}")
    if not (schedule.in_place if in_place else schedule.out_of_place):
        how = "out of place: give input and output" if in_place else "in place: give one tensor for input and output"
        raise ValueError(f"the schedule {schedule.name} runs {how}")
    if tile_bytes < dtype.itemsize:
        raise ValueError(f"a tile holds an element, {dtype.itemsize} bytes here: not {tile_bytes}")
    slots = schedule.slots if slots is None else slots
    if not 1 <= slots <= MAX_SLOTS:
        raise ValueError(f"a connection has 1 to {MAX_SLOTS} FIFO slots, not {slots}")
    if len(schedule.ranks) != schedule.collective.ranks:
        raise ValueError(f"{schedule.name} has {len(schedule.ranks)} ranks, its collective {schedule.collective.ranks}")
    collective = schedule.collective.aliased() if in_place else schedule.collective.out_of_place()
    layout = find_layout(collective, input_elements, output_elements)
    tile_elements = max(min(tile_bytes // dtype.itemsize, layout.chunk_elements), 1)
    for rank in range(collective.ranks):
        _check_rank(schedule, collective, rank)
    connections, buffer_bytes = lay_out_connections(schedule, tile_elements * dtype.itemsize, slots)
    return ExecutionPlan(
        schedule,
        collective,
        layout,
        dtype,
        _find_reduction(schedule, reduction),
        tile_elements,
        slots,
        connections,
        buffer_bytes,
        signals=2 * len({channel for _, _, channel in connections}) + 1,
    )


def _find_reduction(schedule: Schedule, asked: str | None) -> str:
    reduction = asked or schedule.reduction or "sum"
    if reduction not in REDUCTIONS:
        raise ValueError(f"the reductions are {', '.join(REDUCTIONS)}, not {reduction!r}")
    if schedule.reduction not in (None, reduction):
        raise ValueError(f"the schedule {schedule.name} is made for {schedule.reduction!r}, not for {reduction!r}")
    return reduction


def _check_rank(schedule: Schedule, collective: Collective, rank: int) -> None:
    """Raise ValueError for steps that lack a peer or memory, or wait for steps that do not exist."""
    program = schedule.ranks[rank]
    for source, destination in program.copies:
        if not (0 <= source < collective.input_chunks and 0 <= destination < collective.output_chunks):
            raise ValueError(f"rank {rank} copies in[{source}] to out[{destination}] first: one of them is not there")
    lengths = [len(block.steps) for block in program.thread_blocks]
    for number, block in enumerate(program.thread_blocks):
        for peer in (block.send_peer, block.receive_peer):
            if peer is not None and (not 0 <= peer < collective.ranks or peer == rank):
                raise ValueError(f"rank {rank}, thread block {number}: rank {peer} is no peer of it")
        for at, step in enumerate(block.steps):
            problem = _find_problem(step, block, lengths) or _find_bad_chunks(step, collective, schedule, rank)
            if problem:
                raise ValueError(f"rank {rank}, thread block {number}, step {at} ({step.type}): {problem}")


def _find_problem(step: Step, block: ThreadBlock, lengths: list[int]) -> str | None:
    if step.type.sends and block.send_peer is None:
        return "its thread block has no peer to send to"
    if step.type.receives and block.receive_peer is None:
        return "its thread block has no peer to receive from"
    if step.waits_for is not None:
        other, at = step.waits_for
        if not 0 <= other < len(lengths) or not 0 <= at < lengths[other]:
            return f"it waits for step {at} of thread block {other}, which is not there"
    return None


def _find_bad_chunks(step: Step, collective: Collective, schedule: Schedule, rank: int) -> str | None:
    if step.type is StepType.NOP:
        return None
    if step.size < 1:
        return f"it has {step.size} chunks"
    used = []
    if step.type.reads_source:
        used.append((step.source_buffer, step.source))
    if step.type.writes_destination:
        used.append((step.destination_buffer, step.destination))
    for buffer, start in used:
        chunks = schedule.ranks[rank].scratch_chunks if buffer is Buffer.SCRATCH else collective.chunks(buffer)
        if start < 0 or start + step.size > chunks:
            return f"{buffer} has {chunks} chunks: not {start} to {start + step.size - 1}"
    places = [collective.place(rank, buffer, start) for buffer, start in used]
    if len(places) == 2 and places[0][0] is places[1][0] and 0 < abs(places[0][1] - places[1][1]) < step.size:
        return "its source and its destination overlap"
    return None


def lay_out_connections(
    schedule: Schedule, chunk_tile_bytes: int, slots: int
) -> tuple[dict[tuple[int, int, int], FifoConnection], int]:
    """Lay out all connections, by (sender, receiver, channel), and find the bytes of the rank with the largest FIFOs.

    chunk_tile_bytes: of a tile of a chunk. Raises ValueError if two thread blocks share a direction of one, or its
    sends do not match its receives.
    """
    sends: dict[tuple[int, int, int], list[int]] = {}
    receives: dict[tuple[int, int, int], list[int]] = {}
    for rank, number, block in _thread_blocks(schedule):
        for peer, is_send, known in ((block.send_peer, True, sends), (block.receive_peer, False, receives)):
            sizes = [step.size for step in block.steps if (step.type.sends if is_send else step.type.receives)]
            if peer is None or not sizes:
                continue
            key = (rank, peer, block.channel) if is_send else (peer, rank, block.channel)
            if key in known:
                verb = "sends" if is_send else "receives"
                raise ValueError(
                    f"rank {rank}, thread block {number} {verb} on {_name(key)}, and so does another thread block"
                )
            known[key] = sizes
    channels = {channel: number for number, channel in enumerate(sorted({key[2] for key in sends}))}
    connections = {}
    used = [0] * len(schedule.ranks)
    for key in sorted(sends.keys() | receives.keys()):
        sent, received = sends.get(key, []), receives.get(key, [])
        if sent != received:
            raise ValueError(
                f"{_name(key)}: {len(sent)} sends of {sent[:8]} chunks meet {len(received)} receives of {received[:8]}"
            )
        sender, receiver, channel = key
        slot_bytes = -(-max(sent) * chunk_tile_bytes // _ALIGNMENT) * _ALIGNMENT
        connections[key] = FifoConnection(
            sender, receiver, channel, channels[channel], used[receiver], slot_bytes, max(sent), len(sent)
        )
        used[receiver] += slots * slot_bytes
    return connections, max(used)


def _thread_blocks(schedule: Schedule) -> Iterator[tuple[int, int, ThreadBlock]]:
    for rank, program in enumerate(schedule.ranks):
        for number, block in enumerate(program.thread_blocks):
            yield rank, number, block


def _name(key: tuple[int, int, int]) -> str:
    return f"the connection from rank {key[0]} to rank {key[1]} over channel {key[2]}"


def digest(schedule: Schedule) -> str:
    """A short hash of a schedule, the same in all processes."""
    numbers = array("q", [number for program in schedule.ranks for pair in program.copies for number in pair])
    for rank, number, block in _thread_blocks(schedule):
        send, receive = (-1 if peer is None else peer for peer in (block.send_peer, block.receive_peer))
        numbers.extend((rank, number, send, receive, block.channel, len(block.steps)))
        for step in block.steps:
            numbers.extend(
                (
                    _STEP_TYPES.index(step.type),
                    _BUFFERS.index(step.source_buffer),
                    step.source,
                    _BUFFERS.index(step.destination_buffer),
                    step.destination,
                    step.size,
                    *(step.waits_for or (-1, -1)),
                )
            )
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:12]
