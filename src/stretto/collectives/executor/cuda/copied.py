"""A schedule whose messages copy engines push, and whose sums are kernels: the fastest way for large arrays.

A copy engine sends to one peer at a link's full speed, faster than stores of all multiprocessors together, and leaves
these to others. What can go so, `pushes` says.

A call goes in pieces of its chunks. For each piece and level (see `lanes`) one kernel waits for the messages before it,
sums and stores, and copies push what the level sends, one after another. Kernels are on the caller's stream, pushes on
one of their own; on a third the piece's tick is put into the receiver's flag after each push, by a kernel, since a copy
would come after all pushes that wait for the same engine; and on a fourth is who waits until the peers are done with
the slot that a piece will use. Pieces overlap: while one is summed, the next is pushed.

What a call does in which order depends on its sizes alone, and is written down once for each: a call only puts its
tensors' addresses in.
"""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.collectives.collective import Buffer
from stretto.collectives.executor.cuda.function import Launchable
from stretto.collectives.executor.cuda.kernel import (
    find_aligned_layout,
    find_sizes,
    moves_chunks,
    require_runnable,
)
from stretto.collectives.executor.cuda.lanes import LaneProgram, Lanes, lower_to_lanes
from stretto.collectives.executor.cuda.pushes import CopiedLevel, PushedChunk, find_overwriting, lower_to_copies
from stretto.collectives.executor.cuda.queues import Queues
from stretto.collectives.executor.cuda.source import (
    LEVEL_PARAMETERS,
    MAX_THREADS,
    Variant,
    read_sources,
    write_level_source,
    write_macros,
)
from stretto.collectives.executor.cuda.workspace import Workspace
from stretto.collectives.executor.plan import find_layout
from stretto.collectives.schedule import Schedule

PROTOCOL = "Copy"
SLOTS = 3  # pieces that a peer may be ahead by
LARGEST_PIECE = 64 << 20  # bytes of a chunk, where the memory suffices: the larger, the nearer to a link's speed
SMALLEST_PIECE = 4 << 20  # about as small as the last one is: what comes after its messages is hidden by nothing
FLAGS = 16 << 10
HEAD = 64 << 10
"""Bytes before the mailboxes: what each peer is done with, 64 bits a rank, and from FLAGS on a flag a message."""
KERNEL_BLOCKS = 64
BEGIN_PARAMETERS = ("state", "report", "limit", "kernel", "base", "index", "behind", "rank", "world", "done")
TELL_PARAMETERS = ("base", "index", "flag")
FINISH_PARAMETERS = ("base", "index", "is_last", "rank", "world", "peers", "done")
_MOST_COURSES = 256  # of different sizes, that are kept


def cut(size: int, largest: int) -> tuple[tuple[int, int], ...]:
    """(begin, bytes) of a chunk's pieces, multiples of 16 but for the last: large ones, and a small one at the end."""
    pieces, begin = [], 0
    while begin < size:
        left = size - begin
        piece = min(left if left <= 2 * SMALLEST_PIECE else left * 3 // 4, largest)
        piece = left if piece == left else -(-piece // 16) * 16
        pieces.append((begin, piece))
        begin += piece
    return tuple(pieces)


class _Copy(NamedTuple):
    """A push: from a buffer's offset to an address; `tells`: to the receiver's flag."""

    buffer: int
    offset: int
    num_bytes: int
    target: int
    tells: "_Launch"


class _Launch(NamedTuple):
    """A kernel, of so many blocks and threads, and the parameters that change from launch to launch."""

    kernel: Launchable
    blocks: int
    threads: int
    values: tuple[tuple[str, int], ...]

    def run(self, stream: int) -> None:
        for name, value in self.values:
            self.kernel.set(name, value)
        self.kernel.launch(self.blocks, self.threads, stream=stream)


class _Step(NamedTuple):
    """A level of a piece: what is launched and copied for it, in this order; the others are names of events.

    begun: after `begins`; overwrites: after what the kernel writes over has been sent; done: after the kernel, where
    pushes need it; pushed: after the pushes, where a later kernel writes over what they send; is_last: of the call.
    """

    begins: _Launch | None
    begun: Hashable
    overwrites: Hashable
    kernel: _Launch | None
    done: Hashable
    pushes: tuple[_Copy, ...]
    pushed: Hashable
    finishes: _Launch | None
    is_last: bool


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
        self.collective = self.lanes.collective
        every = [lower_to_copies(program, schedule.name) for program in self.lanes.ranks]  # all ranks refuse, or none
        self._levels = every[workspace.rank]
        self._depth = max(len(levels) for levels in every)
        self._overwriting = find_overwriting(self._levels, is_one=self.collective.in_place)
        self._itemsize = getattr(torch, variant.dtype).itemsize
        self.block_chunks = find_layout(self.collective, 0, None).block_chunks
        self.needs_even = moves_chunks(self.collective, self.block_chunks)
        self._slots = max(SLOTS, self._depth + 1)
        self._area = workspace.copy_area()
        messages = self._slots * self.lanes.mailboxes
        if FLAGS + 8 * messages > HEAD:
            raise ValueError(f"{self.name} has {self.lanes.mailboxes} messages to a rank: there are no flags for these")
        largest = (self._area.size - HEAD) // max(messages, 1) // 256 * 256
        self._largest_piece = min(LARGEST_PIECE, largest)
        self._courses: dict[tuple[int, int | None], tuple[_Step, ...]] = {}
        program = self.lanes.ranks[workspace.rank]
        self._senders = {receive.message: receive.peer for level in program.levels for receive in level.receives}
        self._load(program)

    def _load(self, program: LaneProgram) -> None:
        workspace, area = self.workspace, self._area
        fixed = {
            "state": workspace.state.data_ptr(),
            "report": workspace.report.data_ptr(),
            "limit": workspace.limit,
            "kernel": workspace.register(self),
            "base": area.base,
            "rank": workspace.rank,
            "world": workspace.world_size,
        }
        mine = area.addresses[workspace.rank]
        compiled = replace(self.variant, protocol="Simple")  # in mailboxes lies what Simple would have stored
        self._kernels: list[Launchable | None] = []
        for number, level in enumerate(self._levels):
            if level.kernel is None:
                self._kernels.append(None)
                continue
            source = write_level_source(self.lanes, program, number, level.kernel, self.block_chunks, compiled)
            kernel = workspace.load(source, [name for _, name in LEVEL_PARAMETERS])
            for name in ("state", "report", "limit", "kernel", "base"):
                kernel.set(name, fixed[name])
            kernel.set("stride", self._largest_piece)
            self._kernels.append(kernel)
        source = write_macros(self.lanes, workspace.rank, compiled) + read_sources(
            "ptx.cu", "primitives.cu", "copied.cu"
        )
        self._begin = workspace.load(source, list(BEGIN_PARAMETERS), "begin")
        self._tell = workspace.load(source, list(TELL_PARAMETERS), "tell")
        self._finish = workspace.load(source, list(FINISH_PARAMETERS), "finish")
        self._tell.set("base", area.base)
        for name, value in fixed.items():
            self._begin.set(name, value)
            if name in FINISH_PARAMETERS:
                self._finish.set(name, value)
        self._begin.set("done", mine)
        self._begin.set("behind", self._slots)
        self._finish.set("done", 0)
        self._finish.set("peers", area.table)

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` is the one that holds both.

        ValueError for sizes that do not fit the collective, PeerError if an earlier call was given up.
        """
        workspace = self.workspace
        workspace.check()
        workspace.follow_stream()
        key = input.numel(), None if output is None else output.numel()
        course = self._courses.get(key)
        if course is None:
            if len(self._courses) == _MOST_COURSES:
                self._courses.clear()
            course = self._courses[key] = self._chart(find_sizes(self.collective, input, output))
        if not course:
            return
        buffers = input.data_ptr(), (input if output is None else output).data_ptr()
        for kernel in self._kernels:
            if kernel is not None:
                kernel.set("input", buffers[0])
                kernel.set("output", buffers[1])
        queues = workspace.queues()
        queues.fork()
        for step in course:
            self._take(step, queues, buffers)
        queues.join()

    def _take(self, step: _Step, queues: Queues, buffers: tuple[int, int]) -> None:
        if step.begins is not None:
            step.begins.run(queues.handle("watch"))
            queues.mark(step.begun, "watch")
            queues.follow(step.begun, "push")
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
            queues.mark("told", "tell")
            queues.follow("told", "caller")
        if step.finishes is not None:
            step.finishes.run(queues.handle("caller"))

    def _chart(self, sizes: tuple[int | None, int | None]) -> tuple[_Step, ...]:
        """What a call does in turn: a piece's next level when the piece after it has had this one."""
        layout = find_aligned_layout(self.collective, sizes, self._itemsize, needs_even=self.needs_even)
        chunk_bytes, block_bytes = layout.chunk_elements * self._itemsize, layout.block_elements * self._itemsize
        pieces = cut(chunk_bytes, self._largest_piece)
        return tuple(
            self._step(pieces, turn - level, level, chunk_bytes, block_bytes)
            for turn in range(len(pieces) + self._depth - 1)
            for level in range(self._depth)
            if 0 <= turn - level < len(pieces)
        )

    def _step(
        self, pieces: tuple[tuple[int, int], ...], piece: int, number: int, chunk_bytes: int, block_bytes: int
    ) -> _Step:
        level = self._levels[number] if number < len(self._levels) else CopiedLevel(None, ())
        slot, last = piece % self._slots, len(pieces) - 1
        begins = finishes = None
        if number == 0 and (piece == 0 or piece >= self._slots):  # the first one begins for all that have a slot
            begins = _Launch(self._begin, 1, 32, (("index", piece),))
        is_end = number == self._depth - 1
        if is_end and (piece == last or piece + self._slots <= last):  # somebody waits for it
            finishes = _Launch(self._finish, 1, 32, (("index", piece), ("is_last", int(piece == last))))
        needs_kernel = any(push.needs_kernel for push in level.pushes)
        return _Step(
            begins=begins,
            begun=("begun", slot),
            overwrites=("pushed", slot, number - 1) if number in self._overwriting else None,
            kernel=self._compute(pieces[piece], piece, number, chunk_bytes, block_bytes),
            done=("done", slot, number) if needs_kernel else None,
            pushes=tuple(
                self._push(push, pieces[piece], piece, chunk_bytes, block_bytes)
                for push in self._in_order(level.pushes)
            ),
            pushed=("pushed", slot, number) if number + 1 in self._overwriting else None,
            finishes=finishes,
            is_last=is_end and piece == last,
        )

    def _compute(
        self, part: tuple[int, int], piece: int, number: int, chunk_bytes: int, block_bytes: int
    ) -> _Launch | None:
        kernel = self._kernels[number] if number < len(self._kernels) else None
        if kernel is None:
            return None
        begin, size = part
        mailboxes, mine = piece % self._slots * self.lanes.mailboxes, self._area.addresses[self.workspace.rank]
        lanes = -(-size // 16)
        values = (
            ("mail", mine + HEAD + mailboxes * self._largest_piece),
            ("flags", mine + FLAGS + 8 * mailboxes),
            ("index", piece),
            ("block_bytes", block_bytes),
            ("chunk_bytes", chunk_bytes),
            ("begin", begin),
            ("slots", lanes),
        )
        # Half of the multiprocessors at most: what they wait for, kernels of one block tell.
        most = min(KERNEL_BLOCKS, max(self.workspace.multiprocessors // 2, 1))
        blocks = min(-(-lanes // (MAX_THREADS * self.variant.unroll)), most)
        return _Launch(kernel, blocks, MAX_THREADS, values)

    def _push(self, push: PushedChunk, part: tuple[int, int], piece: int, chunk_bytes: int, block_bytes: int) -> _Copy:
        block, chunk = divmod(push.place.chunk, self.block_chunks)
        begin, size = part
        start = chunk * chunk_bytes
        there = min(max(block_bytes - start, 0), chunk_bytes)  # of the chunk: a block's last ones may be cut short
        mailbox = piece % self._slots * self.lanes.mailboxes + push.message
        peer = self._area.addresses[push.peer]
        return _Copy(
            buffer=int(push.place.buffer is Buffer.OUT),
            offset=block * block_bytes + start + begin,
            num_bytes=min(max(there - begin, 0), size),
            target=peer + HEAD + mailbox * self._largest_piece,
            tells=_Launch(self._tell, 1, 32, (("index", piece), ("flag", peer + FLAGS + 8 * mailbox))),
        )

    def _in_order(self, pushes: tuple[PushedChunk, ...]) -> Iterator[PushedChunk]:
        """The next rank's first, so that a rank is sent to by one other at a time."""
        rank, world = self.workspace.rank, self.workspace.world_size
        return iter(sorted(pushes, key=lambda push: (push.peer - rank) % world))

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """See `Waiting`."""
        return f"rank {self._senders.get(message, '?')}'s message {message} (level {level})"
