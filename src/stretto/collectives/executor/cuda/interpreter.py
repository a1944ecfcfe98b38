"""The interpreter of schedules on GPUs: any that was verified, thread block by thread block and step by step."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.executor.cuda.kernel import DATA_BYTES, find_sizes, moves_chunks, require_runnable
from stretto.collectives.executor.cuda.source import ELEMENTS, MAX_THREADS, OPERATIONS, PROTOCOLS, Variant, read_sources
from stretto.collectives.executor.cuda.workspace import COUNTS, MAX_COUNTS, Workspace
from stretto.collectives.executor.layout import find_layout
from stretto.collectives.executor.plan import Plan, make_plan
from stretto.collectives.schedule import Schedule, Step, StepType
from stretto.collectives.verifier.graph import build_graph, linear_order

DEFAULT_TILE_BYTES = 64 << 10
PARAMETERS = (
    *("input", "output", "scratch", "block_bytes", "chunk_bytes", "tile_bytes", "lanes", "tiles", "block_chunks"),
    *("slots", "blocks", "steps", "state", "report", "limit", "kernel", "peers", "counts", "region", "half"),
    "connections",
)
_MAX_COUNT = 1 << 32
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


class _Sized(NamedTuple):
    """What calls of one size launch with.

    parameters: of the kernel. tables: the memory that these name. scratch_bytes: what it needs besides. copies: of
    `_find_copies`.
    """

    parameters: tuple[tuple[str, int], ...]
    tables: tuple[Tensor, Tensor]
    scratch_bytes: int
    copies: tuple[tuple[int, int, int], ...]


class InterpretedSchedule:
    """Runs a schedule on one rank, a CUDA block a thread block. All ranks make and call it in the same order.

    tile_bytes: of a chunk, what a step does at once; with at least a chunk's bytes nothing is pipelined. ValueError for
    a schedule that is made for another number of ranks or cannot run so.
    """

    def __init__(
        self,
        schedule: Schedule,
        workspace: Workspace,
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
        self.needs_even = moves_chunks(self.collective, self.block_chunks)
        is_average = variant.reduction == "avg"
        self._completes = _find_completing_steps(schedule, self.collective) if is_average else frozenset()
        source = write_interpreter(workspace.world_size, workspace.rank, variant)
        self._function = workspace.load(source, list(PARAMETERS))
        self._region = workspace.regions[variant.protocol]
        self._peers = torch.tensor(workspace.peers, dtype=torch.int64, device=workspace.device)
        fixed = {
            "state": workspace.state.data_ptr(),
            "report": workspace.report.data_ptr(),
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

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` is the one that holds both.

        ValueError for sizes that do not fit, PeerError if an earlier call was given up, RuntimeError for sizes that
        are new while a CUDA graph is captured.
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
        self._function.set("input", input.data_ptr())
        self._function.set("output", input.data_ptr() if output is None else output.data_ptr())
        for source, target, elements in sized.copies:
            (input if output is None else output)[target : target + elements] = input[source : source + elements]
        self._function.launch(max(self._blocks, 1), self.threads, is_cooperative=True)

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
        scratch = self.schedule.ranks[self.workspace.rank].scratch_chunks * max(chunk_bytes, 1)
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
        return _Sized(tuple(parameters.items()), (rows, blocks), -(-scratch // 16) * 16 + 16, copies)

    def _lay_out(self, plan: Plan, tile_slot_bytes: int) -> tuple[dict[tuple[int, int, int], tuple[int, int]], int]:
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

    def _find_copies(self, plan: Plan) -> Iterator[tuple[int, int, int]]:
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

    def _tables(self, plan: Plan, starts: dict[tuple[int, int, int], tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
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

    def _row(self, plan: Plan, step: Step, completes: bool) -> tuple[int, ...]:
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

    def _place(self, plan: Plan, buffer: Buffer, chunk: int) -> int:
        shared, index = plan.collective.place(self.workspace.rank, buffer, chunk)
        return _BUFFERS[shared] << 28 | index


def _free_in_order(*memories: Tensor) -> None:
    """Have torch give memory to others only after all calls so far, which the current stream has followed.

    It may have been made on another stream, which knows nothing of these calls.
    """
    for memory in memories:
        if memory.is_cuda:
            memory.record_stream(torch.cuda.current_stream(memory.device))


def _find_completing_steps(schedule: Schedule, collective: Collective) -> frozenset[tuple[int, int, int]]:
    """The steps whose sums are those of all ranks' inputs, so that an average divides there: (rank, block, step).

    ValueError for a step that completes the sums of some of its chunks only.
    """
    graph = build_graph(schedule, [])
    order, _ = linear_order(graph)
    held: dict[tuple[int, Buffer, int], frozenset[tuple[int, int]]] = {
        (rank, *collective.place(rank, Buffer.IN, index)): frozenset(((rank, index),))
        for rank in range(collective.ranks)
        for index in range(collective.input_chunks)
    }
    sent: dict[int, list[frozenset[tuple[int, int]]]] = {}
    found: set[tuple[int, int, int]] = set()

    def read(rank: int, buffer: Buffer, index: int) -> frozenset[tuple[int, int]]:
        return held.get((rank, *collective.place(rank, buffer, index)), frozenset())

    for rank, program in enumerate(schedule.ranks):
        for given, taken in program.copies:
            held[rank, *collective.place(rank, Buffer.OUT, taken)] = read(rank, Buffer.IN, given)
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
                held[rank, *collective.place(rank, step.destination_buffer, step.destination + at)] = value
        if step.type.sends:
            sent[number] = values
        if step.type.reduces:
            are_whole = {len(value) == collective.ranks for value in values}
            if len(are_whole) > 1:
                raise ValueError(
                    f"{schedule.name} cannot average: {graph.name(number)} completes the sums of some chunks only"
                )
            if are_whole == {True}:
                found.add(place)
    return frozenset(found)
