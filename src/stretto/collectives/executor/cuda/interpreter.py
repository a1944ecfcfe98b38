"""The interpreter of schedules on GPUs: any that was verified, thread block by thread block and step by step."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.executor.cuda.fused.codegen import (
    ELEMENTS,
    MAX_THREADS,
    OPERATIONS,
    PROTOCOLS,
    Variant,
    read_sources,
)
from stretto.collectives.executor.cuda.fused.kernel import (
    DATA_BYTES,
    depends_on_chunk_length,
    find_sizes,
    require_runnable,
)
from stretto.collectives.executor.cuda.workspace import COUNTS, MAX_COUNTS, CollectiveWorkspace
from stretto.collectives.executor.layout import find_layout, writes_input
from stretto.collectives.executor.plan import ExecutionPlan, make_plan
from stretto.collectives.schedule import Schedule, Step, StepType
from stretto.collectives.verifier.graph import build_graph, linear_order

logger = logging.getLogger("stretto.collectives")

DEFAULT_TILE_BYTES = 64 << 10
PARAMETERS = (
    *("input", "output", "scratch", "block_bytes", "chunk_bytes", "tile_bytes", "lanes", "tiles", "block_chunks"),
    *("slots", "blocks", "steps", "state", "report", "failed", "limit", "kernel", "peers", "counts", "region", "half"),
    "connections",
)
_MAX_COUNT = 1 << 32
_ALIGNMENT = 128  # of what lies in scratch memory, in bytes
_MOST_SIZES = 256  # whose tables are kept
_FOR_MESSAGE, _FOR_SLOT = 0, 1  # as primitives.cu has them
_BUFFERS = {Buffer.IN: 0, Buffer.OUT: 1, Buffer.SCRATCH: 2}
_STEP_ROW = np.dtype([(name, "i4") for name in ("kind", "source", "destination", "size", "block", "step")])
_BLOCK_ROW = np.dtype(
    [(name, "i4") for name in ("send_peer", "receive_peer", "send", "receive", "first_step", "steps")]
    + [(name, "u8") for name in ("send_start", "send_stride", "receive_start", "receive_stride")]
)


def write_interpreter(world_size: int, rank: int, variant: Variant) -> str:
    """The interpreter's CUDA C++ for a dtype, a reduction and a protocol: one for all schedules."""
    macros = {
        "ELEMENT": ELEMENTS[variant.dtype],
        "OPERATION": OPERATIONS[variant.reduction],
        "IS_AVERAGE": int(variant.reduction == "avg"),
        "PROTOCOL": PROTOCOLS[variant.protocol],
        "WORLD": world_size,
        "RANK": rank,
        "UNROLL": 1,
    }
    lines = [f"#define {name} {value}" for name, value in macros.items()]
    return "\n".join([*lines, read_sources("ptx.cu", "primitives.cu", "interpreter.cu")])


class _Copied(NamedTuple):
    """A copy of one of the caller's tensors, which a call runs on in its place.

    start: where it begins in the scratch memory, in bytes; blocks, elements: the blocks of the tensor, and the elements
    of each; full_elements: those of a block of the copy, whose chunks are all full; is_result: whether the caller's
    tensor gets what the copy holds in the end.
    """

    start: int
    blocks: int
    elements: int
    full_elements: int
    is_result: bool

    def fill(self, tensor: Tensor, scratch: Tensor) -> Tensor:
        """Copy the caller's tensor on the current stream; returns the copy, flat."""
        copy = self._find(scratch, tensor.dtype)
        copy[:, : self.elements] = tensor.view(self.blocks, self.elements)
        copy[:, self.elements :] = 0
        return copy.view(-1)

    def give_back(self, tensor: Tensor, scratch: Tensor) -> None:
        """Copy what the schedule has left to the caller's tensor, where that is wanted."""
        if self.is_result:
            tensor.view(self.blocks, self.elements).copy_(self._find(scratch, tensor.dtype)[:, : self.elements])

    def count_bytes(self, itemsize: int) -> int:
        """The scratch memory that it takes."""
        return -(-self.blocks * self.full_elements * itemsize // _ALIGNMENT) * _ALIGNMENT

    def _find(self, scratch: Tensor, dtype: torch.dtype) -> Tensor:
        elements = self.blocks * self.full_elements
        part = scratch[self.start : self.start + elements * dtype.itemsize]
        return part.view(dtype).view(self.blocks, self.full_elements)


class _Sized(NamedTuple):
    """What calls of one size launch with.

    parameters: of the kernel. tables: the memory that these name. scratch_bytes: what it needs besides. copies: of
    `_find_copies`. copied_input, copied_output: see `_copy_tensors`.
    """

    parameters: tuple[tuple[str, int], ...]
    tables: tuple[Tensor, Tensor]
    scratch_bytes: int
    copies: tuple[tuple[int, int, int], ...]
    copied_input: _Copied | None
    copied_output: _Copied | None


class InterpretedSchedule:
    """Runs a schedule on one rank, a CUDA block a thread block. All ranks make and call it in the same order.

    leaves_room: whether two of these, of two groups, and NCCL's kernel have room side by side on the GPU, with a
    multiprocessor for each thread block. Else calls of two groups belong on one stream, or the groups may wait for each
    other for ever.

    tile_bytes: of a chunk, what a step does at once; with at least a chunk's bytes nothing is pipelined. ValueError for
    a schedule that is made for another number of ranks or cannot run so.
    """

    def __init__(
        self,
        schedule: Schedule,
        workspace: CollectiveWorkspace,
        variant: Variant,
        *,
        in_place: bool,
        tile_bytes: int = DEFAULT_TILE_BYTES,
        threads: int = MAX_THREADS,
    ) -> None:
        require_runnable(schedule, workspace, variant)
        self.name = schedule.name
        self.schedule = schedule
        self.workspace = workspace
        self.variant = variant
        self.in_place = in_place
        self.threads = threads
        self._dtype: torch.dtype = getattr(torch, variant.dtype)
        # Whole warps of LL128's lines, and a multiple of what any dtype and any access needs.
        self._tile_bytes = max(tile_bytes // 480, 1) * 480
        self.collective = schedule.collective.aliased() if in_place else schedule.collective.out_of_place()
        self.block_chunks = find_layout(self.collective, 0, None).block_chunks
        self.needs_even = depends_on_chunk_length(self.collective, self.block_chunks)
        is_average = variant.reduction == "avg"
        self._completes = _find_completing_steps(schedule, self.collective) if is_average else frozenset()
        source = write_interpreter(workspace.world_size, workspace.rank, variant)
        self._function = workspace.load(source, list(PARAMETERS))
        self._region = workspace.regions[variant.protocol]
        self._peers = torch.tensor(workspace.peers, dtype=torch.int64, device=workspace.device)
        fixed = {
            "state": workspace.state.data_ptr(),
            "report": workspace.report.data_ptr(),
            "failed": workspace.failed.data_ptr(),
            "limit": workspace.limit,
            "kernel": workspace.register(self),
            "peers": self._peers.data_ptr(),
            "counts": COUNTS,
            "region": self._region.start,
            "half": workspace.half,
        }
        for name, value in fixed.items():
            self._function.set(name, value)
        self._sized: dict[tuple[int | None, int | None], _Sized] = {}
        self._current: _Sized | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8, device=workspace.device)
        self._of_graphs: dict[int, Tensor] = {}  # by address: what replays of CUDA graphs read and write
        self._blocks = len(schedule.ranks[workspace.rank].thread_blocks)
        self.leaves_room = self._blocks <= workspace.most_blocks // 2
        if not self.leaves_room:
            logger.warning(
                "the schedule %s has %d thread blocks, which are all resident at once: beside more than %d a kernel of "
                "another group, launched in another order on another rank, may find no place, and both wait for ever",
                *(self.name, self._blocks, workspace.most_blocks // 2),
            )

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` is the one that holds both.

        Its own copies of the tensors are used where the rule of `layout` asks for it: out of place the caller's input
        stays as it is. ValueError for sizes that do not fit, PeerError if an earlier call was given up, RuntimeError
        for sizes that are new while a CUDA graph is captured.
        """
        self.workspace.check()
        self.workspace.follow_stream()
        sized = self._find_sized(find_sizes(self.collective, input, output))
        if sized is not self._current:
            for name, value in (*sized.parameters, ("scratch", self._scratch.data_ptr())):
                self._function.set(name, value)
            self._current = sized
        if self.workspace.is_capturing:
            self._of_graphs |= {memory.data_ptr(): memory for memory in (*sized.tables, self._scratch)}
        given, taken = input, input if output is None else output
        if sized.copied_input is not None:
            given = sized.copied_input.fill(input, self._scratch)
            taken = given if output is None else taken
        if sized.copied_output is not None:
            taken = sized.copied_output.fill(taken, self._scratch)
        self._function.set("input", given.data_ptr())
        self._function.set("output", taken.data_ptr())
        for source, target, elements in sized.copies:
            taken[target : target + elements] = given[source : source + elements]
        self._function.launch(max(self._blocks, 1), self.threads, is_cooperative=True)
        if sized.copied_input is not None:
            sized.copied_input.give_back(input, self._scratch)
        if sized.copied_output is not None:
            sized.copied_output.give_back(input if output is None else output, self._scratch)

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """See `Waiting`; level: the step, message: which of its waits."""
        waiting = self.schedule.ranks[self.workspace.rank].thread_blocks[block]
        step = waiting.steps[level]
        match message:
            case _ if message == _FOR_MESSAGE:
                awaited = f"rank {waiting.receive_peer}'s message"
            case _ if message == _FOR_SLOT:
                awaited = f"a free slot at rank {waiting.send_peer}"
            case _:
                assert step.waits_for is not None
                awaited = f"its own thread block {step.waits_for[0]} to end step {step.waits_for[1]}"
        return f"{awaited} (step {level}, {step.type.value}, channel {waiting.channel})"

    def _find_sized(self, sizes: tuple[int | None, int | None]) -> _Sized:
        """What calls of these sizes launch with: made once, and kept, as is the largest scratch memory of all."""
        sized = self._sized.get(sizes)
        if sized is not None:
            return sized
        if self.workspace.is_capturing:
            raise RuntimeError(
                f"{self.name} has no tables for tensors of this size yet, and none can be made while a graph is "
                "captured: call once before"
            )
        sized = self._prepare(*sizes)
        if len(self._sized) == _MOST_SIZES:
            for old in self._sized.values():
                _free_in_order(*old.tables)
            self._sized.clear()
        if sized.scratch_bytes > self._scratch.numel():
            _free_in_order(self._scratch)
            self._scratch = torch.empty(sized.scratch_bytes, dtype=torch.uint8, device=self.workspace.device)
            self._current = None
        self._sized[sizes] = sized
        return sized

    def _prepare(self, input_elements: int | None, output_elements: int | None) -> _Sized:
        variant = self.variant
        reduction = "sum" if variant.reduction == "avg" else variant.reduction
        plan = make_plan(
            self.schedule,
            input_elements,
            output_elements,
            in_place=self.in_place,
            dtype=self._dtype,
            reduction=reduction,
            tile_bytes=self._tile_bytes,
            slots=None,
        )
        scratch = self.schedule.ranks[self.workspace.rank].scratch_chunks
        scratch = max(plan.layout.chunk_elements, 1) * scratch * self._dtype.itemsize
        plan, copied_input, copied_output, scratch = self._copy_tensors(plan, scratch)
        itemsize = self._dtype.itemsize
        chunk_bytes = plan.layout.chunk_elements * itemsize
        # All tiles but the last have the same bytes, a multiple of 480.
        tile_bytes = min(self._tile_bytes, max(-(-chunk_bytes // 480), 1) * 480)
        lanes = tile_bytes // DATA_BYTES[variant.protocol]
        lanes = tile_bytes // 120 * 8 if variant.protocol == "LL128" else lanes
        starts, needed = self._lay_out(plan, 16 * lanes)
        if needed > self._region.size:
            raise ValueError(
                f"{self.name} needs {needed} bytes of FIFOs with tiles of {tile_bytes} bytes, of {self._region.size} "
                f"that there are for {variant.protocol}: take smaller tiles"
            )
        tiles = -(-chunk_bytes // tile_bytes)
        longest = max((len(block.steps) for block in self.schedule.ranks[self.workspace.rank].thread_blocks), default=0)
        if tiles * longest >= _MAX_COUNT:  # a flag counts them below the call's number
            raise ValueError(
                f"{self.name} does {longest} steps on {tiles} tiles of {tile_bytes} bytes: take larger tiles"
            )
        rows, blocks = (
            torch.from_numpy(table.view(np.uint8)).to(self.workspace.device) for table in self._tables(plan, starts)
        )
        parameters = {
            "block_bytes": plan.layout.block_elements * itemsize,
            "chunk_bytes": chunk_bytes,
            "tile_bytes": tile_bytes,
            "lanes": lanes,
            "tiles": tiles,
            "block_chunks": plan.layout.block_chunks,
            "slots": plan.slots,
            "blocks": blocks.data_ptr(),
            "steps": rows.data_ptr(),
            "connections": len(plan.connections),
        }
        copies = tuple(self._find_copies(plan))
        return _Sized(tuple(parameters.items()), (rows, blocks), scratch + 16, copies, copied_input, copied_output)

    def _copy_tensors(
        self, plan: ExecutionPlan, scratch_bytes: int
    ) -> tuple[ExecutionPlan, _Copied | None, _Copied | None, int]:
        """The rule of `layout`: which copies the call runs on, the plan for these, and the scratch memory in all.

        Both tensors are copied with full chunks where a longer chunk passes through a shorter place here; the input is
        copied where the schedule writes it and it is the caller's own. Most calls need neither.
        """
        layout, collective = plan.layout, plan.collective
        length = layout.chunk_length
        narrows = not layout.is_even and any(length(value) > length(place) for value, place in self._narrowing_writes)
        full_elements = layout.block_chunks * layout.chunk_elements if narrows else layout.block_elements
        own_program = self.schedule.ranks[self.workspace.rank]
        copied: list[_Copied | None] = []
        for chunks, is_copied, is_result in (
            (collective.chunks_per_loop, narrows, True)
            if self.in_place
            else (collective.input_chunks, narrows or writes_input(own_program), False),
            (collective.output_chunks, narrows and not self.in_place, True),
        ):
            blocks = chunks // layout.block_chunks
            if not is_copied or not blocks or not layout.block_elements:
                copied.append(None)
                continue
            start = -(-scratch_bytes // _ALIGNMENT) * _ALIGNMENT
            copy = _Copied(start, blocks, layout.block_elements, full_elements, is_result)
            scratch_bytes = start + copy.count_bytes(self._dtype.itemsize)
            copied.append(copy)
        return replace(plan, layout=replace(layout, block_elements=full_elements)), copied[0], copied[1], scratch_bytes

    @cached_property
    def _narrowing_writes(self) -> frozenset[tuple[int, int]]:
        return _find_narrowing_writes(self.schedule, self.collective, self.workspace.rank, self.block_chunks)

    def _lay_out(
        self, plan: ExecutionPlan, tile_slot_bytes: int
    ) -> tuple[dict[tuple[int, int, int], tuple[int, int]], int]:
        """Where each connection's slots begin at its receiver and how large one is, and the bytes that a rank needs."""
        if 2 * len(plan.connections) > MAX_COUNTS:
            raise ValueError(
                f"{self.name} has {len(plan.connections)} connections: there are counts for {MAX_COUNTS // 2}"
            )
        used = [0] * plan.collective.ranks
        starts = {}
        for key in sorted(plan.connections):
            sender, receiver, channel = key
            sizes = [
                step.size
                for block in self.schedule.ranks[sender].thread_blocks
                if block.send_peer == receiver and block.channel == channel
                for step in block.steps
                if step.type.sends
            ]
            stride = max(sizes) * tile_slot_bytes
            starts[key] = used[receiver], stride
            used[receiver] += plan.slots * stride
        return starts, max(used)

    def _find_copies(self, plan: ExecutionPlan) -> Iterator[tuple[int, int, int]]:
        """What is copied before the first step: from and to which element of the two tensors, and how many."""
        layout, rank = plan.layout, self.workspace.rank
        for pair in self.schedule.ranks[rank].copies:
            buffers = (Buffer.IN, Buffer.OUT)
            places = [plan.collective.place(rank, *one) for one in zip(buffers, pair, strict=True)]
            if places[0] != places[1]:
                (block, at), (to_block, to) = (divmod(index, layout.block_chunks) for _, index in places)
                start, end = (part * layout.chunk_elements for part in (at, to))
                elements = max(min(layout.block_elements - start, layout.chunk_elements), 0)
                yield block * layout.block_elements + start, to_block * layout.block_elements + end, elements

    def _tables(
        self, plan: ExecutionPlan, starts: dict[tuple[int, int, int], tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        rank = self.workspace.rank
        numbers = {key: number for number, key in enumerate(sorted(plan.connections))}
        rows: list[tuple[int, ...]] = []
        blocks: list[tuple[int, ...]] = []
        for number, block in enumerate(self.schedule.ranks[rank].thread_blocks):
            send = None if block.send_peer is None else (rank, block.send_peer, block.channel)
            receive = None if block.receive_peer is None else (block.receive_peer, rank, block.channel)
            send = send if send in starts else None
            receive = receive if receive in starts else None
            first = len(rows)
            for at, step in enumerate(block.steps):
                rows.append(self._row(plan, step, (rank, number, at) in self._completes))
            blocks.append(
                (
                    -1 if send is None else send[1],
                    -1 if receive is None else receive[0],
                    0 if send is None else numbers[send],
                    0 if receive is None else numbers[receive],
                    first,
                    len(block.steps),
                    *(starts[send] if send else (0, 0)),
                    *(starts[receive] if receive else (0, 0)),
                )
            )
        empty = (-1, -1, 0, 0, 0, 0, 0, 0, 0, 0)
        return np.array(rows or [(0,) * 6], dtype=_STEP_ROW), np.array(blocks or [empty], dtype=_BLOCK_ROW)

    def _row(self, plan: ExecutionPlan, step: Step, completes: bool) -> tuple[int, ...]:
        kind = step.type
        flags = (
            kind.sends,
            kind.receives,
            kind.reduces,
            kind.reads_source,
            kind.writes_destination,
            completes,
            step.awaited,
        )
        needs_destination = kind.writes_destination or kind is StepType.REDUCE
        awaited = step.waits_for or (-1, -1)
        return (
            sum(1 << bit for bit, is_set in enumerate(flags) if is_set),
            self._place(plan, step.source_buffer, step.source) if kind.reads_source else -1,
            self._place(plan, step.destination_buffer, step.destination) if needs_destination else -1,
            0 if kind is StepType.NOP else step.size,
            *awaited,
        )

    def _place(self, plan: ExecutionPlan, buffer: Buffer, chunk: int) -> int:
        shared, index = plan.collective.place(self.workspace.rank, buffer, chunk)
        return _BUFFERS[shared] << 28 | index


def _free_in_order(*memories: Tensor) -> None:
    """Have torch give memory to others only after all calls so far, which the current stream has followed.

    It may have been made on another stream, which knows nothing of these calls.
    """
    for memory in memories:
        if memory.is_cuda:
            memory.record_stream(torch.cuda.current_stream(memory.device))


Sums = frozenset[tuple[int, int]]
"""A value in a schedule, by the input chunks (rank, index) that it is the sum of."""


class _Values(NamedTuple):
    """What a schedule's steps make: each step's values, and all writes to input and output.

    A step is (rank, thread block, step), and has a value for each of its chunks.
    A write is (rank, index of the chunk in its buffer, value).
    """

    of_steps: dict[tuple[int, int, int], list[Sums]]
    writes: list[tuple[int, int, Sums]]


def _follow_values(schedule: Schedule, collective: Collective) -> _Values:
    """Run a verified schedule on names of input chunks instead of numbers."""
    graph = build_graph(schedule, [])
    order, _ = linear_order(graph)
    held: dict[tuple[int, Buffer, int], Sums] = {
        (rank, *collective.place(rank, Buffer.IN, index)): frozenset(((rank, index),))
        for rank in range(collective.ranks)
        for index in range(collective.input_chunks)
    }
    sent: dict[int, list[Sums]] = {}
    found = _Values({}, [])

    def read(rank: int, buffer: Buffer, index: int) -> Sums:
        return held.get((rank, *collective.place(rank, buffer, index)), frozenset())

    def write(rank: int, buffer: Buffer, index: int, value: Sums) -> None:
        held[rank, *collective.place(rank, buffer, index)] = value
        if buffer is not Buffer.SCRATCH:
            found.writes.append((rank, index, value))

    for rank, program in enumerate(schedule.ranks):
        for given, taken in program.copies:
            write(rank, Buffer.OUT, taken, read(rank, Buffer.IN, given))
    for number in order:
        step, place = graph.steps[number], graph.places[number]
        if step.type is StepType.NOP:
            continue
        rank = place[0]
        received = sent.pop(graph.sender[number], []) if step.type.receives else []
        values = []
        for at in range(step.size):
            value = received[at] if step.type.receives else frozenset()
            if step.type.reads_source:
                source = read(rank, step.source_buffer, step.source + at)
                if step.type is StepType.REDUCE:
                    value = read(rank, step.destination_buffer, step.destination + at)
                value = value | source
            values.append(value)
            if step.type.writes_destination:
                write(rank, step.destination_buffer, step.destination + at, value)
        if step.type.sends:
            sent[number] = values
        found.of_steps[place] = values
    return found


def _find_completing_steps(schedule: Schedule, collective: Collective) -> frozenset[tuple[int, int, int]]:
    """The steps whose sums are those of all ranks' inputs, so that an average divides there: (rank, block, step).

    ValueError for a step that completes the sums of some of its chunks only.
    """
    found: set[tuple[int, int, int]] = set()
    for place, values in _follow_values(schedule, collective).of_steps.items():
        rank, block, at = place
        step = schedule.ranks[rank].thread_blocks[block].steps[at]
        if not step.type.reduces:
            continue
        are_whole = {len(value) == collective.ranks for value in values}
        if len(are_whole) > 1:
            raise ValueError(
                f"{schedule.name} cannot average: rank {rank}, thread block {block}, step {at} ({step.type.value}) "
                "completes the sums of some chunks only"
            )
        if are_whole == {True}:
            found.add(place)
    return frozenset(found)


def _find_narrowing_writes(
    schedule: Schedule, collective: Collective, rank: int, block_chunks: int
) -> frozenset[tuple[int, int]]:
    """Where a rank's input or output holds a value that may be longer than its place: (chunk of a block that the value
    is as long as, chunk of a block that the place is).

    Chunks of a block do not get longer from one to the next, so the former comes before the latter.
    """
    found = set()
    for writer, index, value in _follow_values(schedule, collective).writes:
        if writer == rank and value:
            longest = min(given % block_chunks for _, given in value)
            if longest < index % block_chunks:
                found.add((longest, index % block_chunks))
    return frozenset(found)
