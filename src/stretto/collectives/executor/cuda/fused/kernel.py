# SPDX-License-Identifier: Apache-2.0
"""Loads and launches the fused kernel of a verified schedule, for tensors of any size, on the current stream."""

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.collectives.executor.cuda.fused.codegen import MIN_THREADS, max_threads, parameter_names, write_source
from stretto.collectives.executor.cuda.fused.program import lower_to_fused_program
from stretto.collectives.executor.cuda.variant import DATA_BYTES, Variant, require_runnable
from stretto.collectives.executor.cuda.workspace import MAX_SIMPLE_MAILBOXES, CollectiveWorkspace
from stretto.collectives.executor.layout import depends_on_chunk_length, find_aligned_layout, find_layout, find_sizes
from stretto.collectives.schedule import Schedule

MAX_PLANS = 4096
# A large call by 48 blocks takes 4% to 8% longer than by 99 when it runs alone, and delays concurrent products that do
# by less: an all-gather of 64 MB two of 4096 x 4096 x 4096, which take 380 us alone, by 60 us, not by 110; NCCL's
# delays them by 107 (4x H100, 2026-11-26).
LARGE_CALL = 32 << 20  # bytes
BLOCKS_OF_LARGE = 48


class _Launches(NamedTuple):
    """Launches of calls of one size: parameters, threads of a block, and (begin, vectors, blocks) of every piece.

    The parameters are those of the first piece.
    """

    parameters: tuple[tuple[str, int], ...]
    threads: int
    pieces: tuple[tuple[int, int, int], ...]


class RecordedLaunch(NamedTuple):
    """A launch, for those that repeat it with other addresses.

    function: the driver's handle. values: all parameters; input_at, output_at: which of them are the addresses.
    """

    function: int
    blocks: int
    threads: int
    values: tuple[int, ...]
    input_at: int
    output_at: int


class FusedScheduleKernel:
    """Runs a schedule on one rank as one kernel. All ranks make and call it in the same order.

    Waits: a block of the kernel waits only for the blocks with its own index on other ranks, since
    elements of chunks depend only on elements at the same position. Together with the bound on the number of blocks
    (`bound_blocks`) this lets kernels of two groups, and NCCL's, end whatever the order in which each rank launches
    them.

    in_place: whether it is called with one tensor for input and output. Raises ValueError for a schedule that is made
    for another number of ranks, or cannot run so.
    """

    def __init__(self, schedule: Schedule, workspace: CollectiveWorkspace, variant: Variant, *, in_place: bool) -> None:
        require_runnable(schedule, workspace, variant)
        self.name = schedule.name
        self.workspace = workspace
        self.variant = variant
        self.fused = lower_to_fused_program(schedule, in_place=in_place)
        self.collective = self.fused.collective
        if variant.protocol == "Simple" and self.fused.mailboxes > MAX_SIMPLE_MAILBOXES:
            raise ValueError(
                f"{schedule.name} has {self.fused.mailboxes} messages to a rank: Simple takes {MAX_SIMPLE_MAILBOXES}"
            )
        self._itemsize = getattr(torch, variant.dtype).itemsize
        self.block_chunks = find_layout(self.collective, 0, None).block_chunks
        self.needs_even = depends_on_chunk_length(self.collective, self.block_chunks)
        source = write_source(self.fused, workspace.rank, self.block_chunks, variant)
        self._function = workspace.load(source, parameter_names(workspace.world_size))
        region = workspace.regions[variant.protocol]
        self._capacity = region.size
        program = self.fused.ranks[workspace.rank]
        self._senders = {receive.message: receive.peer for level in program.levels for receive in level.receives}
        fixed = {f"peer_{rank}": address for rank, address in enumerate(workspace.peers)}
        fixed |= {"state": workspace.state.data_ptr(), "report": workspace.report.data_ptr(), "limit": workspace.limit}
        fixed |= {"failed": workspace.failed.data_ptr()}
        fixed |= {"kernel": workspace.register(self), "region": region.start, "half": workspace.half}
        for parameter, value in fixed.items():
            self._function.set(parameter, value)
        self._plans: dict[tuple[int | None, int | None], _Launches] = {}
        self._current: _Launches | None = None
        self._max_threads = max_threads(self.fused, variant)

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` holds both buffers.

        Chunks larger than the mailboxes go in pieces, a launch each. Raises ValueError for sizes that do not fit the
        collective, PeerError if an earlier call gave up.
        """
        self.workspace.check()
        stream = self.workspace.follow_stream()
        sizes = find_sizes(self.collective, input, output)
        plan = self._plans.get(sizes) or self._plan(sizes)
        function = self._function
        if plan is not self._current:
            for parameter, value in plan.parameters:
                function.set(parameter, value)
            self._current = plan
        function.set("input", input.data_ptr())
        function.set("output", input.data_ptr() if output is None else output.data_ptr())
        pieces = plan.pieces
        if len(pieces) == 1:  # its parameters have been set
            function.launch(pieces[0][2], plan.threads, stream=stream)
            return
        for begin, num_vectors, blocks in pieces:
            function.set("begin", begin)
            function.set("num_vectors", num_vectors)
            function.launch(blocks, plan.threads, stream=stream)

    def last_launch(self) -> RecordedLaunch | None:
        """The last call's launch, with the limit of later calls; None if it launched more than one kernel, or none."""
        plan, function = self._current, self._function
        if plan is None or len(plan.pieces) != 1:
            return None
        places, values = (function.place("input"), function.place("output")), list(function.parameters())
        values[function.place("limit")] = self.workspace.lasting_limit
        return RecordedLaunch(function.handle, plan.pieces[0][2], plan.threads, tuple(values), *places)

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """Describe what a thread block waited for, for a failure report."""
        return f"rank {self._senders.get(message, '?')}'s message {message} (level {level})"

    def _plan(self, sizes: tuple[int | None, int | None]) -> "_Launches":
        layout = find_aligned_layout(self.collective, sizes, self._itemsize, needs_even=self.needs_even)
        chunk_bytes = layout.chunk_elements * self._itemsize
        num_vectors = self._count_vectors(chunk_bytes)
        # A piece is whole warps of vectors, so that it is also whole lines of LL128 and a multiple of any element.
        most = self._capacity // (16 * max(self.fused.mailboxes, 1)) // 32 * 32
        if most == 0:
            raise ValueError(f"{self.name} has {self.fused.mailboxes} messages to a rank: there is no memory for these")
        is_large = chunk_bytes * self.collective.chunks_per_loop >= LARGE_CALL
        bound = min(self.workspace.max_blocks, BLOCKS_OF_LARGE) if is_large else self.workspace.max_blocks
        threads = self._choose_threads(min(num_vectors, most), bound)
        pieces = []
        # Without data there is no launch: no rank would wait in it, and only the waits keep the ranks in step.
        for start in range(0, num_vectors, most):
            here = min(most, num_vectors - start)
            blocks = min(-(-here // (threads * self.variant.unroll)), bound)
            pieces.append((start * DATA_BYTES[self.variant.protocol], here, blocks))
        parameters = {
            "block_bytes": layout.block_elements * self._itemsize,
            "chunk_bytes": chunk_bytes,
            "stride": 16 * min(num_vectors, most),
        }
        if pieces:
            parameters |= {"begin": pieces[0][0], "num_vectors": pieces[0][1]}
        if len(self._plans) == MAX_PLANS:
            self._plans.clear()
        plan = self._plans[sizes] = _Launches(tuple(parameters.items()), threads, tuple(pieces))
        return plan

    def _choose_threads(self, num_vectors: int, max_blocks: int) -> int:
        """The fewest threads, a multiple of MIN_THREADS, with which the blocks get equal shares, in as few rounds.

        A last round of a few blocks takes as long as a full one, and more blocks spread the waiting better than larger
        blocks.
        """
        turns = -(-num_vectors // self.variant.unroll)
        rounds = max(-(-turns // (max_blocks * self._max_threads)), 1)
        return -(-max(turns, 1) // (max_blocks * rounds * MIN_THREADS)) * MIN_THREADS

    def _count_vectors(self, chunk_bytes: int) -> int:
        """The vectors of 16 bytes that a chunk takes in a mailbox."""
        if self.variant.protocol == "LL128":
            lines = -(-chunk_bytes // 120)
            return -(-lines // 4) * 32  # whole warps of four lines
        return -(-chunk_bytes // DATA_BYTES[self.variant.protocol])
