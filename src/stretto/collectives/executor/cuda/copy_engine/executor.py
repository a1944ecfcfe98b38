# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule by copy engines: they send its messages, and kernels reduce and store them. Fastest for large arrays.

A copy engine sends to one peer at a link's full speed, faster than the stores of all multiprocessors together, and
leaves these to others. `lowering` says which schedules can run so; `planner` (schedules that forward) and `direct`
(single-hop collectives) plan what each call issues, on four streams:

- the caller's: kernels that reduce and store, and the end of the call;
- "copy": the copies to peers, one after another;
- "flag": a kernel after each copy that signals it to the receiver. A kernel, since a copy of a flag would queue behind
  all copies that wait for the same engine;
- "wait": the waits until peers have begun the call, and have released mailboxes that are used again.

Where the tensor that is written to is symmetric (`stretto.memory.empty`), on all ranks, messages that a rank only
stores go straight to their place there, and need no mailbox.
"""

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from stretto.collectives.executor.cuda.copy_engine.direct import DirectCopyPlanner, is_single_hop
from stretto.collectives.executor.cuda.copy_engine.lowering import ZeroCopy, find_zero_copy, lower_to_copies
from stretto.collectives.executor.cuda.copy_engine.planner import (
    ENTRY_FLAGS,
    ByteLayout,
    CopyPlanner,
    CopyStep,
    FlagKernels,
    PipelinedCopyPlanner,
    require_copyable,
)
from stretto.collectives.executor.cuda.fused.program import FusedProgram, lower_to_fused_program
from stretto.collectives.executor.cuda.variant import Variant, read_sources, require_runnable, write_macros
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace, SymmetricView
from stretto.collectives.executor.layout import depends_on_chunk_length, find_aligned_layout, find_layout, find_sizes
from stretto.collectives.schedule import Schedule
from stretto.memory.copy_engine import CudaCopyStreams

PROTOCOL = "Copy"
_WAIT = ("state", "report", "failed", "limit", "kernel", "base", "index")
WAIT_FOR_PEERS_PARAMETERS = (
    *_WAIT,
    *("num_mailbox_sets", "rank", "world", "release_flags", "peers", "entry_flags_offset", "entry_flags", "tensor_key"),
)
SIGNAL_ARRIVAL_PARAMETERS = ("failed", "base", "index", "flag")
RELEASE_MAILBOXES_PARAMETERS = (*_WAIT, "is_last", "rank", "world", "peers", "release_flags_offset")
_MAX_PLANS = 256  # of different sizes or symmetric tensors, that are kept


class CopyEngineExecutor:
    """Runs a schedule on one rank by copy engines. All ranks make and call it in the same order.

    in_place: whether it is called with one tensor for input and output. Raises ValueError for a schedule that is made
    for another number of ranks, or cannot run so.
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
        self._compiled = replace(variant, protocol="Simple")  # mailboxes hold what Simple would have stored there
        self._zero_copy = find_zero_copy(self.fused)
        self._load_flag_kernels()
        self._mailbox_planner = self._make_planner({})
        self._zero_copy_planner: CopyPlanner | None = None
        self._plans: dict[tuple[int, int | None, SymmetricView | None], tuple[CopyPlanner, tuple[CopyStep, ...]]] = {}

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` holds both buffers.

        Raises ValueError for sizes that do not fit the collective, PeerError if an earlier call gave up, or an error
        has aborted it.
        """
        workspace = self.workspace
        workspace.check()
        workspace.follow_stream()
        symmetric = self._find_symmetric(input if output is None else output)
        key = input.numel(), None if output is None else output.numel(), symmetric
        known = self._plans.get(key)
        if known is None:
            known = self._plan(find_sizes(self.collective, input, output), symmetric)
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
        streams, is_captured = workspace.copy_streams(), workspace.is_capturing
        try:
            streams.fork()
            for number, step in enumerate(steps):
                self._issue(step, streams, buffers, is_first=number == 0, is_captured=is_captured)
        except BaseException:
            if not is_captured:  # nothing of a graph has run, and unjoined streams make its capture fail
                self._abort(streams)
            raise

    def last_launch(self) -> None:
        """None: a call is more than a launch whose parameters differ by two addresses (`FusedScheduleKernel`)."""

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """Describe what a thread block waited for, for a failure report."""
        return f"rank {self._senders.get(message, '?')}'s message {message} (level {level})"

    def _issue(
        self, step: CopyStep, streams: CudaCopyStreams, buffers: tuple[int, int], *, is_first: bool, is_captured: bool
    ) -> None:
        """Put a step's launches and copies on the streams, in order."""
        if step.wait_for_peers is not None:
            if is_captured and step.after_release is not None:
                streams.follow(step.after_release, "wait")
            step.wait_for_peers.run(streams.handle("wait"))
            streams.mark(step.peers_ready, "wait")
            streams.follow(step.peers_ready, "copy")
            if is_first:  # no kernel holds multiprocessors, or reports a wait, while peers have yet to begin
                streams.follow(step.peers_ready, "caller")
        if step.kernel is not None:
            if step.overwrites is not None:
                streams.follow(step.overwrites, "caller")
            if is_captured and step.after_signals is not None:
                streams.follow(step.after_signals, "caller")
            step.kernel.run(streams.handle("caller"))
            if step.done is not None:
                streams.mark(step.done, "caller")
                streams.follow(step.done, "copy")
        for copy in step.copies:
            if copy.num_bytes:
                streams.copy(copy.target, buffers[copy.buffer] + copy.offset, copy.num_bytes, "copy")
            streams.mark("copied", "copy")
            streams.follow("copied", "flag")
            copy.signal_arrival.run(streams.handle("flag"))
            if is_captured and copy.signalled is not None:
                streams.mark(copy.signalled, "flag")
        if is_captured and step.signalled is not None:
            streams.mark(step.signalled, "flag")
        if step.sent is not None:
            streams.mark(step.sent, "copy")
        if step.is_last:  # `release_mailboxes` changes the base, which kernels of all streams have read by then
            streams.join()
        if step.release_mailboxes is not None:
            if is_captured and step.signalled is not None:
                streams.follow(step.signalled, "caller")
            step.release_mailboxes.run(streams.handle("caller"))
            if is_captured and step.released is not None:
                streams.mark(step.released, "caller")

    def _abort(self, streams: CudaCopyStreams) -> None:
        """Refuse all further calls: the next one would take for its own what peers have sent for this one."""
        self.workspace.abort(self._fixed["kernel"])
        with suppress(RuntimeError):
            streams.join()  # the tensors may be freed once the caller's stream is done with them

    def _plan(
        self, sizes: tuple[int | None, int | None], symmetric: SymmetricView | None
    ) -> tuple[CopyPlanner, tuple[CopyStep, ...]]:
        found = find_aligned_layout(self.collective, sizes, self._itemsize, needs_even=self.needs_even)
        layout = ByteLayout(found.chunk_elements * self._itemsize, found.block_elements * self._itemsize)
        without_mailboxes = self._zero_copy_planner
        planner = self._mailbox_planner if symmetric is None or without_mailboxes is None else without_mailboxes
        return planner, planner.build(layout, symmetric)

    def _find_symmetric(self, written: Tensor) -> SymmetricView | None:
        """The peers' view of the tensor, if it is symmetric and there are zero-copy messages and kernels for them."""
        found = self.workspace.find_symmetric(written) if self._zero_copy else None
        if found is not None and self._zero_copy_planner is None:
            if self.workspace.is_capturing:  # nothing can be compiled during capture
                return None
            self._zero_copy_planner = self._make_planner(self._zero_copy)
        return found

    def _make_planner(self, zero_copy: ZeroCopy) -> CopyPlanner:
        all_levels = [lower_to_copies(program, self.name, zero_copy) for program in self.fused.ranks]
        return (DirectCopyPlanner if is_single_hop(all_levels) else PipelinedCopyPlanner)(
            self.fused,
            all_levels,
            self.workspace,
            self._compiled,
            self.block_chunks,
            self._flag_kernels,
            {**self._fixed, "limit": self.workspace.limit},  # as it is now
            zero_copy,
        )

    def _load_flag_kernels(self) -> None:
        workspace, area = self.workspace, self.workspace.copy_area()
        own_memory = area.addresses[workspace.rank]
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
        macros = write_macros(self._compiled, workspace.world_size, workspace.rank)
        source = macros + read_sources("ptx.cu", "primitives.cu", "copy_engine/flags.cu")
        wait_for_peers = workspace.load(source, list(WAIT_FOR_PEERS_PARAMETERS), "wait_for_peers")
        signal_arrival = workspace.load(source, list(SIGNAL_ARRIVAL_PARAMETERS), "signal_arrival")
        release_mailboxes = workspace.load(source, list(RELEASE_MAILBOXES_PARAMETERS), "release_mailboxes")
        for kernel, names in (
            (wait_for_peers, WAIT_FOR_PEERS_PARAMETERS),
            (signal_arrival, SIGNAL_ARRIVAL_PARAMETERS),
            (release_mailboxes, RELEASE_MAILBOXES_PARAMETERS),
        ):
            for name, value in self._fixed.items():
                if name in names:
                    kernel.set(name, value)
        wait_for_peers.set("release_flags", own_memory)
        wait_for_peers.set("entry_flags_offset", ENTRY_FLAGS)
        wait_for_peers.set("entry_flags", own_memory + ENTRY_FLAGS)
        release_mailboxes.set("release_flags_offset", 0)
        self._flag_kernels = FlagKernels(wait_for_peers, signal_arrival, release_mailboxes)
