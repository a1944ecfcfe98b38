"""A schedule whose messages copy engines push, and whose sums are kernels: the fastest way for large arrays.

A copy engine sends to one peer at a link's full speed, faster than stores of all multiprocessors together, and leaves
these to others. What can go so, `pushes` says.

Copies push messages one after another, and kernels wait for them, sum and store. Kernels are on the caller's stream,
pushes on one of their own; on a third a tick is put into the receiver's flag after each push, by a kernel, since a copy
would come after all pushes that wait for the same engine; and on a fourth is who waits until the peers are done with
the slot that will be used again. In which order, `courses` says of schedules that forward: in pieces of their chunks,
of which one is summed while the next is pushed. `rounds` says it of all others: in as few pushes as can be.

Where the tensor that is written to is a symmetric one (`stretto.memory.empty`), on all ranks, what a rank only stores
is pushed straight to its place there, and lies in no mailbox.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from stretto.collectives.executor.cuda.courses import ENTERS, Courses, Layout, Sentinels, Step, require_copyable
from stretto.collectives.executor.cuda.kernel import (
    depends_on_chunk_length,
    find_aligned_layout,
    find_sizes,
    require_runnable,
)
from stretto.collectives.executor.cuda.lanes import Lanes, Place, lower_to_lanes
from stretto.collectives.executor.cuda.pushes import find_straight, lower_to_copies
from stretto.collectives.executor.cuda.queues import Queues
from stretto.collectives.executor.cuda.rounds import RoundCourses, goes_in_rounds
from stretto.collectives.executor.cuda.source import Variant, read_sources, write_macros
from stretto.collectives.executor.cuda.workspace import Symmetric, Workspace
from stretto.collectives.executor.plan import find_layout
from stretto.collectives.schedule import Schedule

PROTOCOL = "Copy"
_WAIT = ("state", "report", "failed", "limit", "kernel", "base", "index")
BEGIN_PARAMETERS = (*_WAIT, "behind", "rank", "world", "done", "peers", "enters", "entered", "key")
TELL_PARAMETERS = ("failed", "base", "index", "flag")
FINISH_PARAMETERS = (*_WAIT, "is_last", "rank", "world", "peers", "done")
_MOST_COURSES = 256  # of different sizes or symmetric tensors, that are kept


class CopiedSchedule:
    """Runs a schedule on one rank by copy engines. All ranks make and call it in the same order.

    in_place: whether it is called with one tensor for input and output. ValueError for a schedule that is made for
    another number of ranks, or cannot run so.
    """

    def __init__(self, schedule: Schedule, workspace: Workspace, variant: Variant, *, in_place: bool) -> None:
        require_runnable(schedule, workspace, variant)
        self.name = schedule.name
        self.workspace = workspace
        self.variant = variant
        self.lanes: Lanes = lower_to_lanes(schedule, in_place=in_place)
        require_copyable(self.lanes, schedule.name)
        self.collective = self.lanes.collective
        self._itemsize = getattr(torch, variant.dtype).itemsize
        self.block_chunks = find_layout(self.collective, 0, None).block_chunks
        self.needs_even = depends_on_chunk_length(self.collective, self.block_chunks)
        program = self.lanes.ranks[workspace.rank]
        self._senders = {receive.message: receive.peer for level in program.levels for receive in level.receives}
        self._compiled = replace(variant, protocol="Simple")  # in mailboxes lies what Simple would have stored
        self._straight = find_straight(self.lanes)
        self._load()
        self._mailed = self._make_courses({})
        self._pushed: Courses | None = None
        self._courses: dict[tuple[int, int | None, Symmetric | None], tuple[Courses, tuple[Step, ...]]] = {}

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
        source = write_macros(self.lanes, workspace.rank, self._compiled) + read_sources(
            "ptx.cu", "primitives.cu", "copied.cu"
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
        self._sentinels = Sentinels(begin, tell, finish)

    def _make_courses(self, straight: Mapping[tuple[int, int], Place]) -> Courses:
        every = [lower_to_copies(program, self.name, straight) for program in self.lanes.ranks]
        return (RoundCourses if goes_in_rounds(every) else Courses)(
            self.lanes,
            every,
            self.workspace,
            self._compiled,
            self.block_chunks,
            self._sentinels,
            self._fixed,
            straight,
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
        known = self._courses.get(key)
        if known is None:
            known = self._chart(find_sizes(self.collective, input, output), symmetric)
            if len(self._courses) == _MOST_COURSES:
                self._courses.clear()
            self._courses[key] = known
        courses, steps = known
        if not steps:
            return
        buffers = input.data_ptr(), (input if output is None else output).data_ptr()
        for kernel in courses.kernels:
            if kernel is not None:
                kernel.set("input", buffers[0])
                kernel.set("output", buffers[1])
        queues = workspace.queues()
        try:
            queues.fork()
            for number, step in enumerate(steps):
                self._take(step, queues, buffers, is_first=number == 0)
        except BaseException:
            if not workspace.is_capturing:  # of a graph nothing has run, and unjoined streams let its capture fail
                self._break_off(queues)
            raise

    def _break_off(self, queues: Queues) -> None:
        """The next call would take for its own what peers have sent for this one: there is none."""
        self.workspace.break_off(self._fixed["kernel"])
        with suppress(RuntimeError):
            queues.join()  # the tensors may be freed once the caller's stream is done with them

    def _find_symmetric(self, written: Tensor) -> Symmetric | None:
        """What peers know the tensor by, if there is what may go straight into it, and kernels for that."""
        found = self.workspace.find_symmetric(written) if self._straight else None
        if found is not None and self._pushed is None:
            if self.workspace.is_capturing:  # nothing can be compiled meanwhile
                return None
            self._pushed = self._make_courses(self._straight)
        return found

    def _chart(
        self, sizes: tuple[int | None, int | None], symmetric: Symmetric | None
    ) -> tuple[Courses, tuple[Step, ...]]:
        found = find_aligned_layout(self.collective, sizes, self._itemsize, needs_even=self.needs_even)
        layout = Layout(found.chunk_elements * self._itemsize, found.block_elements * self._itemsize)
        courses = self._mailed if symmetric is None or self._pushed is None else self._pushed
        return courses, courses.chart(layout, symmetric)

    def _take(self, step: Step, queues: Queues, buffers: tuple[int, int], *, is_first: bool) -> None:
        if step.begins is not None:
            step.begins.run(queues.handle("watch"))
            queues.mark(step.begun, "watch")
            queues.follow(step.begun, "push")
            if is_first:  # no kernel holds multiprocessors while peers have yet to come, or reports them later
                queues.follow(step.begun, "caller")
        if step.kernel is not None:
            if step.overwrites is not None:
                queues.follow(step.overwrites, "caller")
            step.kernel.run(queues.handle("caller"))
            if step.done is not None:
                queues.mark(step.done, "caller")
                queues.follow(step.done, "push")
        for push in step.pushes:
            if push.num_bytes:
                queues.copy(push.target, buffers[push.buffer] + push.offset, push.num_bytes, "push")
            queues.mark("sent", "push")
            queues.follow("sent", "tell")
            push.tells.run(queues.handle("tell"))
        if step.pushed is not None:
            queues.mark(step.pushed, "push")
        if step.is_last:  # what comes then changes the base, which kernels of all queues have read by now
            queues.join()
        if step.finishes is not None:
            step.finishes.run(queues.handle("caller"))

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """See `Waiting`."""
        return f"rank {self._senders.get(message, '?')}'s message {message} (level {level})"
