"""A schedule whose messages copy engines push, and whose sums are kernels: the fastest way for large arrays.

A copy engine sends to one peer at a link's full speed, faster than stores of all multiprocessors together, and leaves
these to others. What can go so, `pushes` says.

Copies push messages one after another, and kernels wait for them, sum and store. Kernels are on the caller's stream,
pushes on one of their own; on a third a tick is put into the receiver's flag after each push, by a kernel, since a copy
would come after all pushes that wait for the same engine; and on a fourth is who waits until the peers are done with
the slot that will be used again. In which order, `planner` says of schedules that forward: in pieces of their chunks,
of which one is summed while the next is pushed. `rounds` says it of all others: in as few pushes as can be.

Where the tensor that is written to is a symmetric one (`stretto.memory.empty`), on all ranks, what a rank only stores
is pushed straight to its place there, and lies in no mailbox.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from stretto.collectives.executor.cuda.copy_engine.direct import DirectCopyPlanner, is_single_hop
from stretto.collectives.executor.cuda.copy_engine.lowering import find_zero_copy, lower_to_copies
from stretto.collectives.executor.cuda.copy_engine.planner import (
    ENTERS,
    ByteLayout,
    CopyPlanner,
    CopyStep,
    FlagKernels,
    require_copyable,
)
from stretto.collectives.executor.cuda.copy_engine.streams import CopyStreams
from stretto.collectives.executor.cuda.fused.program import ChunkPlace, FusedProgram, lower_to_fused_program
from stretto.collectives.executor.cuda.variant import Variant, read_sources, require_runnable, write_macros
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace, SymmetricView
from stretto.collectives.executor.layout import depends_on_chunk_length, find_aligned_layout, find_sizes
from stretto.collectives.executor.plan import find_layout
from stretto.collectives.schedule import Schedule

PROTOCOL = "Copy"
_WAIT = ("state", "report", "failed", "limit", "kernel", "base", "index")
BEGIN_PARAMETERS = (*_WAIT, "behind", "rank", "world", "done", "peers", "enters", "entered", "key")
TELL_PARAMETERS = ("failed", "base", "index", "flag")
FINISH_PARAMETERS = (*_WAIT, "is_last", "rank", "world", "peers", "done")
_MAX_PLANS = 256  # of different sizes or symmetric tensors, that are kept


class CopyEngineExecutor:
    """Runs a schedule on one rank by copy engines. All ranks make and call it in the same order.

    in_place: whether it is called with one tensor for input and output. ValueError for a schedule that is made for
    another number of ranks, or cannot run so.
    """

    def __init__(self, schedule: Schedule, workspace: CollectiveWorkspace, variant: Variant, *, in_place: bool) -> None:
        require_runnable(schedule, workspace, variant)
        self.name = schedule.name
        self.workspace = workspace
        self.variant = variant
        self.fused: FusedProgram = lower_to_fused_program(schedule, in_place=in_place)
        require_copyable(self.fused, schedule.name)
        self.collective = self.fused.collective
        self._itemsize = getattr(torch, variant.dtype).itemsize
        self.block_chunks = find_layout(self.collective, 0, None).block_chunks
        self.needs_even = depends_on_chunk_length(self.collective, self.block_chunks)
        program = self.fused.ranks[workspace.rank]
        self._senders = {receive.message: receive.peer for level in program.levels for receive in level.receives}
        self._compiled = replace(variant, protocol="Simple")  # in mailboxes lies what Simple would have stored
        self._zero_copy = find_zero_copy(self.fused)
        self._load()
        self._mailed = self._make_planner({})
        self._pushed: CopyPlanner | None = None
        self._plans: dict[tuple[int, int | None, SymmetricView | None], tuple[CopyPlanner, tuple[CopyStep, ...]]] = {}

    def _load(self) -> None:
        workspace, area = self.workspace, self.workspace.copy_area()
        mine = area.addresses[workspace.rank]
        self._fixed = {
            "state": workspace.state.data_ptr(),
            "report": workspace.report.data_ptr(),
            "failed": workspace.failed.data_ptr(),
            "limit": workspace.limit,
            "kernel": workspace.register(self),
            "base": area.base,
            "rank": workspace.rank,
            "world": workspace.world_size,
            "peers": area.table,
        }
        source = write_macros(self._compiled, workspace.world_size, workspace.rank) + read_sources(
            "ptx.cu", "primitives.cu", "copy_engine/flags.cu"
        )
        begin = workspace.load(source, list(BEGIN_PARAMETERS), "begin")
        tell = workspace.load(source, list(TELL_PARAMETERS), "tell")
        finish = workspace.load(source, list(FINISH_PARAMETERS), "finish")
        for kernel, names in ((begin, BEGIN_PARAMETERS), (tell, TELL_PARAMETERS), (finish, FINISH_PARAMETERS)):
            for name, value in self._fixed.items():
                if name in names:
                    kernel.set(name, value)
        begin.set("done", mine)
        begin.set("enters", ENTERS)
        begin.set("entered", mine + ENTERS)
        finish.set("done", 0)
        self._flag_kernels = FlagKernels(begin, tell, finish)

    def _make_planner(self, zero_copy: Mapping[tuple[int, int], ChunkPlace]) -> CopyPlanner:
        every = [lower_to_copies(program, self.name, zero_copy) for program in self.fused.ranks]
        return (DirectCopyPlanner if is_single_hop(every) else CopyPlanner)(
            self.fused,
            every,
            self.workspace,
            self._compiled,
            self.block_chunks,
            self._flag_kernels,
            self._fixed,
            zero_copy,
        )

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` is the one that holds both.

        ValueError for sizes that do not fit the collective, PeerError if an earlier call was given up, or an
        error has broken it off.
        """
        workspace = self.workspace
        workspace.check()
        workspace.follow_stream()
        symmetric = self._find_symmetric(input if output is None else output)
        key = input.numel(), None if output is None else output.numel(), symmetric
        known = self._plans.get(key)
        if known is None:
            known = self._build(find_sizes(self.collective, input, output), symmetric)
            if len(self._plans) == _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = known
        planner, steps = known
        if not steps:
            return
        buffers = input.data_ptr(), (input if output is None else output).data_ptr()
        for kernel in planner.kernels:
            if kernel is not None:
                kernel.set("input", buffers[0])
                kernel.set("output", buffers[1])
        copy_streams = workspace.copy_streams()
        try:
            copy_streams.fork()
            for number, step in enumerate(steps):
                self._take(step, copy_streams, buffers, is_first=number == 0)
        except BaseException:
            if not workspace.is_capturing:  # of a graph nothing has run, and unjoined streams let its capture fail
                self._break_off(copy_streams)
            raise

    def _break_off(self, copy_streams: CopyStreams) -> None:
        """The next call would take for its own what peers have sent for this one: there is none."""
        self.workspace.break_off(self._fixed["kernel"])
        with suppress(RuntimeError):
            copy_streams.join()  # the tensors may be freed once the caller's stream is done with them

    def _find_symmetric(self, written: Tensor) -> SymmetricView | None:
        """What peers know the tensor by, if there is what may go straight into it, and kernels for that."""
        found = self.workspace.find_symmetric(written) if self._zero_copy else None
        if found is not None and self._pushed is None:
            if self.workspace.is_capturing:  # nothing can be compiled meanwhile
                return None
            self._pushed = self._make_planner(self._zero_copy)
        return found

    def _build(
        self, sizes: tuple[int | None, int | None], symmetric: SymmetricView | None
    ) -> tuple[CopyPlanner, tuple[CopyStep, ...]]:
        found = find_aligned_layout(self.collective, sizes, self._itemsize, needs_even=self.needs_even)
        layout = ByteLayout(found.chunk_elements * self._itemsize, found.block_elements * self._itemsize)
        planner = self._mailed if symmetric is None or self._pushed is None else self._pushed
        return planner, planner.build(layout, symmetric)

    def _take(self, step: CopyStep, copy_streams: CopyStreams, buffers: tuple[int, int], *, is_first: bool) -> None:
        if step.begins is not None:
            step.begins.run(copy_streams.handle("watch"))
            copy_streams.mark(step.begun, "watch")
            copy_streams.follow(step.begun, "push")
            if is_first:  # no kernel holds multiprocessors while peers have yet to come, or reports them later
                copy_streams.follow(step.begun, "caller")
        if step.kernel is not None:
            if step.overwrites is not None:
                copy_streams.follow(step.overwrites, "caller")
            step.kernel.run(copy_streams.handle("caller"))
            if step.done is not None:
                copy_streams.mark(step.done, "caller")
                copy_streams.follow(step.done, "push")
        for push in step.pushes:
            if push.num_bytes:
                copy_streams.copy(push.target, buffers[push.buffer] + push.offset, push.num_bytes, "push")
            copy_streams.mark("sent", "push")
            copy_streams.follow("sent", "tell")
            push.tells.run(copy_streams.handle("tell"))
        if step.pushed is not None:
            copy_streams.mark(step.pushed, "push")
        if step.is_last:  # what comes then changes the base, which kernels of all streams have read by now
            copy_streams.join()
        if step.finishes is not None:
            step.finishes.run(copy_streams.handle("caller"))

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """See `Waiting`."""
        return f"rank {self._senders.get(message, '?')}'s message {message} (level {level})"
