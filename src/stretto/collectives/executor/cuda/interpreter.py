# SPDX-License-Identifier: Apache-2.0
"""Runs any verified schedule on GPUs by an interpreter kernel: a CUDA block executes a thread block, step by step.

`interpreter.cu` is the kernel. For each size of tensors this module makes the tables that it reads, once, and decides
whether the call runs on the caller's tensors or on padded copies of them (the rule in `executor.layout`).
"""

import logging
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.collectives.executor.cuda.interpreter_tables import find_initial_copies, lay_out_fifos, make_tables
from stretto.collectives.executor.cuda.puts import SchedulePuts
from stretto.collectives.executor.cuda.value_trace import Divisions, find_divisions, find_narrowing_writes
from stretto.collectives.executor.cuda.variant import (
    DATA_BYTES,
    MAX_THREADS,
    Variant,
    read_sources,
    require_runnable,
    write_macros,
)
from stretto.collectives.executor.cuda.workspace import COUNTS, CollectiveWorkspace
from stretto.collectives.executor.layout import depends_on_chunk_length, find_layout, find_sizes, writes_input
from stretto.collectives.executor.plan import ExecutionPlan, make_plan
from stretto.collectives.schedule import Schedule

logger = logging.getLogger("stretto.collectives")

DEFAULT_TILE_BYTES = 64 << 10
PARAMETERS = (
    *("input", "output", "scratch", "block_bytes", "chunk_bytes", "tile_bytes", "num_vectors", "tiles", "block_chunks"),
    *("slots", "blocks", "steps", "state", "report", "failed", "limit", "kernel", "peers", "counts", "region", "half"),
    *("connections", "rank", "puts"),
)
_MAX_COUNT = 1 << 32
_ALIGNMENT = 128  # of tensors in scratch memory, in bytes
_MAX_SIZES = 256  # whose tables are kept
_FOR_MESSAGE, _FOR_SLOT, _FOR_ROOM = 0, 1, 3  # as in primitives.cu


def write_interpreter(world_size: int, variant: Variant, *, between_nodes: bool = False) -> str:
    """The interpreter's CUDA C++ for a dtype, a reduction and a protocol: one kernel for all schedules and ranks.

    between_nodes: whether it puts, which takes registers.
    """
    macros = write_macros(replace(variant, unroll=1), world_size)
    return f"{macros}#define BETWEEN_NODES {int(between_nodes)}\n" + read_sources(
        "ptx.cu", "primitives.cu", "puts.cu", "interpreter.cu"
    )


class _PaddedCopy(NamedTuple):
    """A copy of one of the caller's tensors, on which a call runs instead.

    start: its offset in the scratch memory, in bytes. The tensor has `blocks` blocks of `elements` elements; a block of
    the copy has `full_elements`, so that all its chunks are full. is_result: whether the caller's tensor gets the
    copy's contents in the end.
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

    def write_back(self, tensor: Tensor, scratch: Tensor) -> None:
        """Copy the schedule's result to the caller's tensor, if this copy holds one."""
        if self.is_result:
            tensor.view(self.blocks, self.elements).copy_(self._find(scratch, tensor.dtype)[:, : self.elements])

    def count_bytes(self, itemsize: int) -> int:
        """The scratch memory that it takes."""
        return -(-self.blocks * self.full_elements * itemsize // _ALIGNMENT) * _ALIGNMENT

    def _find(self, scratch: Tensor, dtype: torch.dtype) -> Tensor:
        elements = self.blocks * self.full_elements
        part = scratch[self.start : self.start + elements * dtype.itemsize]
        return part.view(dtype).view(self.blocks, self.full_elements)


class _PaddedCopies(NamedTuple):
    """The copies that a call runs on, None for none; plan: the call's, for them; scratch_bytes: all scratch memory."""

    plan: ExecutionPlan
    input: _PaddedCopy | None
    output: _PaddedCopy | None
    scratch_bytes: int


class _SizedCall(NamedTuple):
    """Launch arguments of calls of one size.

    parameters: of the kernel; tables: the memory that these point to; scratch_bytes: the scratch memory that a call
    needs; initial_copies: of `find_initial_copies`; input_copy, output_copy: of `_copy_tensors`.
    """

    parameters: tuple[tuple[str, int], ...]
    tables: tuple[Tensor, Tensor]
    scratch_bytes: int
    initial_copies: tuple[tuple[int, int, int], ...]
    input_copy: _PaddedCopy | None
    output_copy: _PaddedCopy | None


class InterpretedSchedule:
    """Runs a schedule on one rank, a CUDA block for each thread block. All ranks make and call it in the same order.

    leaves_room: whether two of these, of two groups, and NCCL's kernel fit on the GPU side by side, with a
    multiprocessor for each thread block. If not, issue calls of two groups on one stream, or the groups may wait for
    each other for ever.

    tile_bytes: bytes of each chunk per step; with at least a chunk's bytes nothing is pipelined. puts: between nodes,
    the schedule's, for as many bytes; None: they are allocated here. Raises ValueError for a schedule that is made for
    another number of ranks or cannot run so.
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
        puts: SchedulePuts | None = None,
    ) -> None:
        require_runnable(schedule, workspace, variant, puts=True)
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
        self._divisions = Divisions()
        if variant.reduction == "avg":
            self._divisions = find_divisions(schedule, self.collective, of_inputs=variant.is_16_bit_float)
        source = write_interpreter(workspace.world_size, variant, between_nodes=bool(workspace.nodes))
        self._function = workspace.load(source, list(PARAMETERS))
        self._region = workspace.regions[variant.protocol]
        self._peers = torch.tensor(workspace.peers, dtype=torch.int64, device=workspace.device)
        if workspace.nodes and puts is None:
            puts = SchedulePuts.allocate(schedule, workspace, tile_bytes)
        self._puts = puts
        fixed = {
            "rank": workspace.rank,
            "puts": 0 if self._puts is None else self._puts.address,
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
        self._sized: dict[tuple[int | None, int | None], _SizedCall] = {}
        self._current: _SizedCall | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8, device=workspace.device)
        self._of_graphs: dict[int, Tensor] = {}  # by address: the memory that replays of CUDA graphs read and write
        self._blocks = len(schedule.ranks[workspace.rank].thread_blocks)
        self.leaves_room = self._blocks <= workspace.max_blocks // 2
        if not self.leaves_room:
            logger.warning(
                "the schedule %s has %d thread blocks, which are all resident at once: beside more than %d a kernel of "
                "another group, launched in another order on another rank, may find no place, and both wait for ever",
                *(self.name, self._blocks, workspace.max_blocks // 2),
            )

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` holds both buffers.

        The kernel runs on copies of the tensors where the rule in `executor.layout` asks for it: out of place the
        caller's input is not modified. Raises ValueError for sizes that do not fit, PeerError if an earlier call gave
        up, RuntimeError for sizes that are new while a CUDA graph is captured.
        """
        self.workspace.check()
        self.workspace.follow_stream()
        if self._puts is not None:
            self._puts.begin()
        sized = self._find_sized(find_sizes(self.collective, input, output))
        if sized is not self._current:
            for name, value in (*sized.parameters, ("scratch", self._scratch.data_ptr())):
                self._function.set(name, value)
            self._current = sized
        if self.workspace.is_capturing:
            self._of_graphs |= {memory.data_ptr(): memory for memory in (*sized.tables, self._scratch)}
        given, taken = input, input if output is None else output
        if sized.input_copy is not None:
            given = sized.input_copy.fill(input, self._scratch)
            taken = given if output is None else taken
        if sized.output_copy is not None:
            taken = sized.output_copy.fill(taken, self._scratch)
        self._function.set("input", given.data_ptr())
        self._function.set("output", taken.data_ptr())
        for source, target, elements in sized.initial_copies:
            taken[target : target + elements] = given[source : source + elements]
        self._function.launch(max(self._blocks, 1), self.threads, is_cooperative=True)
        if sized.input_copy is not None:
            sized.input_copy.write_back(input, self._scratch)
        if sized.output_copy is not None:
            sized.output_copy.write_back(input if output is None else output, self._scratch)

    def last_launch(self) -> None:
        """None: a call is more than a launch whose parameters differ by two addresses (`FusedScheduleKernel`)."""

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """Describe what a thread block waited for, for a failure report. level: the step; message: which wait of it."""
        waiting = self.schedule.ranks[self.workspace.rank].thread_blocks[block]
        step = waiting.steps[level]
        match message:
            case _ if message == _FOR_MESSAGE:
                awaited = f"{self._describe_rank(waiting.receive_peer)}'s message"
            case _ if message == _FOR_SLOT:
                awaited = f"a free slot at {self._describe_rank(waiting.send_peer)}"
            case _ if message == _FOR_ROOM:
                awaited = "room in the proxy's FIFO, to put to other nodes"
            case _:
                assert step.waits_for is not None
                awaited = f"its own thread block {step.waits_for[0]} to end step {step.waits_for[1]}"
        return f"{awaited} (step {level}, {step.type.value}, channel {waiting.channel})"

    def _describe_rank(self, rank: int | None) -> str:
        assert rank is not None
        return f"rank {rank}" if self._puts is None else self._puts.describe(rank)

    def _find_sized(self, sizes: tuple[int | None, int | None]) -> _SizedCall:
        """Find the launch arguments of these sizes: made once and kept, as is the largest scratch memory so far."""
        sized = self._sized.get(sizes)
        if sized is not None:
            return sized
        if self.workspace.is_capturing:
            raise RuntimeError(
                f"{self.name} has no tables for tensors of this size yet, and none can be made while a graph is "
                "captured: call once before"
            )
        sized = self._prepare(*sizes)
        if len(self._sized) == _MAX_SIZES:
            for old in self._sized.values():
                _free_in_order(*old.tables)
            self._sized.clear()
        if sized.scratch_bytes > self._scratch.numel():
            _free_in_order(self._scratch)
            self._scratch = torch.empty(sized.scratch_bytes, dtype=torch.uint8, device=self.workspace.device)
            self._current = None
        self._sized[sizes] = sized
        return sized

    def _prepare(self, input_elements: int | None, output_elements: int | None) -> _SizedCall:
        variant, rank = self.variant, self.workspace.rank
        plan = make_plan(
            self.schedule,
            input_elements,
            output_elements,
            in_place=self.in_place,
            dtype=self._dtype,
            reduction="sum" if variant.reduction == "avg" else variant.reduction,
            tile_bytes=self._tile_bytes,
            slots=None,
        )
        scratch = self.schedule.ranks[rank].scratch_chunks
        copies = self._copy_tensors(plan, max(plan.layout.chunk_elements, 1) * scratch * self._dtype.itemsize)
        plan = copies.plan
        itemsize = self._dtype.itemsize
        chunk_bytes = plan.layout.chunk_elements * itemsize
        # All tiles but the last have the same bytes, a multiple of 480.
        tile_bytes = min(self._tile_bytes, max(-(-chunk_bytes // 480), 1) * 480)
        vectors = tile_bytes // DATA_BYTES[variant.protocol]
        vectors = tile_bytes // 120 * 8 if variant.protocol == "LL128" else vectors
        slots = {} if self._puts is None else self._puts.slots
        fifos = lay_out_fifos(plan, 16 * vectors, slots)
        if fifos.needed > self._region.size:
            raise ValueError(
                f"{self.name} needs {fifos.needed} bytes of FIFOs with tiles of {tile_bytes} bytes, of "
                f"{self._region.size} that there are for {variant.protocol}: take smaller tiles"
            )
        tiles = -(-chunk_bytes // tile_bytes)
        longest = max((len(block.steps) for block in self.schedule.ranks[rank].thread_blocks), default=0)
        if tiles * longest >= _MAX_COUNT:  # a flag counts them below the call's number
            raise ValueError(
                f"{self.name} does {longest} steps on {tiles} tiles of {tile_bytes} bytes: take larger tiles"
            )
        steps, blocks = (
            torch.from_numpy(table.view(np.uint8)).to(self.workspace.device)
            for table in make_tables(plan, rank, fifos, self._divisions, slots)
        )
        parameters = {
            "block_bytes": plan.layout.block_elements * itemsize,
            "chunk_bytes": chunk_bytes,
            "tile_bytes": tile_bytes,
            "num_vectors": vectors,
            "tiles": tiles,
            "block_chunks": plan.layout.block_chunks,
            "slots": plan.slots,
            "blocks": blocks.data_ptr(),
            "steps": steps.data_ptr(),
            "connections": len(plan.connections),
        }
        return _SizedCall(
            tuple(parameters.items()),
            (steps, blocks),
            copies.scratch_bytes + 16,
            tuple(find_initial_copies(plan, rank)),
            copies.input,
            copies.output,
        )

    def _copy_tensors(self, plan: ExecutionPlan, scratch_bytes: int) -> _PaddedCopies:
        """Decide which copies a call runs on, by the rule in `executor.layout`.

        Both tensors are copied with full chunks where a longer chunk passes through a shorter place here; the input is
        copied where the schedule writes it and it is the caller's own. Most calls need neither.
        """
        layout, collective = plan.layout, plan.collective
        length = layout.chunk_length
        narrows = not layout.is_even and any(length(value) > length(place) for value, place in self._narrowing_writes)
        full_elements = layout.block_chunks * layout.chunk_elements if narrows else layout.block_elements
        own_program = self.schedule.ranks[self.workspace.rank]
        first = (collective.chunks_per_loop, narrows, True)
        if not self.in_place:
            first = (collective.input_chunks, narrows or writes_input(own_program), False)
        copies: list[_PaddedCopy | None] = []
        for chunks, is_copied, is_result in (first, (collective.output_chunks, narrows and not self.in_place, True)):
            blocks = chunks // layout.block_chunks
            if not is_copied or not blocks or not layout.block_elements:
                copies.append(None)
                continue
            start = -(-scratch_bytes // _ALIGNMENT) * _ALIGNMENT
            copy = _PaddedCopy(start, blocks, layout.block_elements, full_elements, is_result)
            scratch_bytes = start + copy.count_bytes(self._dtype.itemsize)
            copies.append(copy)
        padded = replace(plan, layout=replace(layout, block_elements=full_elements))
        return _PaddedCopies(padded, copies[0], copies[1], scratch_bytes)

    @cached_property
    def _narrowing_writes(self) -> frozenset[tuple[int, int]]:
        return find_narrowing_writes(self.schedule, self.collective, self.workspace.rank, self.block_chunks)


def _free_in_order(*memories: Tensor) -> None:
    """Let torch reuse memory only after all calls so far, which the current stream has followed.

    The memory may have been allocated on another stream, which knows nothing of these calls.
    """
    for memory in memories:
        if memory.is_cuda:
            memory.record_stream(torch.cuda.current_stream(memory.device))
