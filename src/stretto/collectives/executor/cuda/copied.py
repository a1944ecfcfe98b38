"""A schedule whose messages copy engines push, and whose sums are kernels: the fastest way for large arrays.

A copy engine sends to one peer at a link's full speed, faster than stores of all multiprocessors together, and leaves
these to others. Messages are then chunks that lie in memory, so this takes schedules that send what they have loaded or
stored: `lower_to_copies` says which cannot.

A call goes in pieces of its chunks. For each piece and level (see `lanes`) one kernel waits for the messages before it,
sums and stores, and copies push what the level sends, each followed by a copy of the piece's tick, eight bytes, into
the receiver's flag: copies of one stream arrive in order. Kernels are on the caller's stream, pushes on one of their
own, and on a third is who waits until the peers are done with the slot that a piece will use. Pieces overlap: while one
is summed, the next is pushed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
from stretto.collectives.executor.cuda.lanes import LaneProgram, Lanes, Level, Load, Place, Send, lower_to_lanes
from stretto.collectives.executor.cuda.queues import Queues
from stretto.collectives.executor.cuda.source import (
    LEVEL_PARAMETERS,
    MAX_THREADS,
    Variant,
    read_sources,
    write_level_source,
    write_macros,
)
from stretto.collectives.executor.cuda.workspace import COPY_SLOTS, Workspace
from stretto.collectives.executor.plan import find_layout
from stretto.collectives.schedule import Schedule

PROTOCOL = "Copy"
SLOTS = 4  # pieces that a peer may be ahead by
LARGEST_PIECE = 16 << 20  # bytes of a chunk: large enough for a link's speed, small enough that the last one is short
SMALLEST_PIECE = 1 << 20
FLAGS = 16 << 10
HEAD = 64 << 10
"""Bytes before the mailboxes: what each peer is done with, 64 bits a rank, and from FLAGS on a flag a message."""
KERNEL_BLOCKS = 64
BEGIN_PARAMETERS = ("state", "report", "limit", "kernel", "base", "index", "behind", "rank", "world", "done", "word")
FINISH_PARAMETERS = ("base", "index", "is_last", "rank", "world", "peers", "done")


@dataclass(frozen=True)
class PushedChunk:
    """A message: the chunk of the user's memory that goes into the mailbox `message` of `peer`.

    needs_kernel: it is there only after this level's kernel.
    """

    place: Place
    peer: int
    message: int
    needs_kernel: bool


@dataclass(frozen=True)
class CopiedLevel:
    """One level as a kernel, which sends nothing, and the pushes after it. kernel None: there is nothing for one."""

    kernel: Level | None
    pushes: tuple[PushedChunk, ...]


def lower_to_copies(program: LaneProgram, name: str) -> tuple[CopiedLevel, ...]:
    """A rank's lane program by levels. ValueError for a schedule whose messages are not chunks of its buffers."""
    loads = {load.value: load.place for level in program.levels for load in level.loads}
    stored = {
        store.value: (store.place, number) for number, level in enumerate(program.levels) for store in level.stores
    }
    overwritten: dict[Place, int] = {}
    for number, level in enumerate(program.levels):
        for store in level.stores:
            overwritten.setdefault(store.place, number)
    return tuple(
        CopiedLevel(
            _kernel_of(program, number, level, loads, stored, overwritten, name),
            tuple(_push_of(send, number, loads, stored, overwritten, name) for send in level.sends),
        )
        for number, level in enumerate(program.levels)
    )


def _push_of(
    send: Send,
    number: int,
    loads: dict[int, Place],
    stored: dict[int, tuple[Place, int]],
    overwritten: dict[Place, int],
    name: str,
) -> PushedChunk:
    if send.value in loads and overwritten.get(loads[send.value], number + 1) > number:
        return PushedChunk(loads[send.value], send.peer, send.message, needs_kernel=False)
    if send.value in stored and stored[send.value][1] <= number:
        return PushedChunk(stored[send.value][0], send.peer, send.message, needs_kernel=True)
    raise ValueError(f"{name} cannot go by copy engines: it sends what is in none of its buffers")


def _kernel_of(
    program: LaneProgram,
    number: int,
    level: Level,
    loads: dict[int, Place],
    stored: dict[int, tuple[Place, int]],
    overwritten: dict[Place, int],
    name: str,
) -> Level | None:
    """The level alone: what earlier levels knew is read again from where it lies."""
    if not (level.receives or level.reduces or level.stores):
        return None
    here = {receive.value for receive in level.receives} | {reduce.value for reduce in level.reduces}
    used = {side for reduce in level.reduces for side in (reduce.left, reduce.right)}
    used |= {store.value for store in level.stores}
    again = []
    for value in sorted(used - here):
        if value in loads and overwritten.get(loads[value], number) >= number:
            again.append(Load(value, loads[value]))
        elif value in stored and stored[value][1] < number and _is_exact(value, program):
            again.append(Load(value, stored[value][0]))
        else:
            raise ValueError(f"{name} cannot go by copy engines: it uses again what is in none of its buffers")
    return replace(level, loads=tuple(again), sends=())


def _is_exact(value: int, program: LaneProgram) -> bool:
    """Whether a stored value is the value itself: sums that are not rounded are wider than what is stored."""
    is_sum = any(reduce.value == value for level in program.levels for reduce in level.reduces)
    return not is_sum or value in program.rounded


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
        self._itemsize = getattr(torch, variant.dtype).itemsize
        self.block_chunks = find_layout(self.collective, 0, None).block_chunks
        self.needs_even = moves_chunks(self.collective, self.block_chunks)
        self._slots = max(SLOTS, self._depth + 1)
        if self._slots > COPY_SLOTS:
            raise ValueError(f"{self.name} has {self._depth} levels: copy engines take up to {COPY_SLOTS - 1}")
        self._area = workspace.copy_area()
        messages = self._slots * self.lanes.mailboxes
        if FLAGS + 8 * messages > HEAD:
            raise ValueError(f"{self.name} has {self.lanes.mailboxes} messages to a rank: there are no flags for these")
        largest = (self._area.size - HEAD) // max(messages, 1) // 256 * 256
        self._largest_piece = min(LARGEST_PIECE, largest)
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
            self._kernels.append(kernel)
        source = write_macros(self.lanes, workspace.rank, compiled) + read_sources(
            "ptx.cu", "primitives.cu", "copied.cu"
        )
        self._begin = workspace.load(source, list(BEGIN_PARAMETERS), "begin")
        self._finish = workspace.load(source, list(FINISH_PARAMETERS), "finish")
        for name, value in fixed.items():
            self._begin.set(name, value)
            if name in FINISH_PARAMETERS:
                self._finish.set(name, value)
        self._begin.set("done", mine)
        self._finish.set("done", 0)
        self._finish.set("peers", area.table)

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` is the one that holds both.

        ValueError for sizes that do not fit the collective, PeerError if an earlier call was given up.
        """
        self.workspace.check()
        self.workspace.follow_stream()
        sizes = find_sizes(self.collective, input, output)
        layout = find_aligned_layout(self.collective, sizes, self._itemsize, needs_even=self.needs_even)
        self._chunk_bytes = layout.chunk_elements * self._itemsize
        self._block_bytes = layout.block_elements * self._itemsize
        if self._chunk_bytes == 0:
            return
        wanted = max(-(-self._chunk_bytes // SLOTS), SMALLEST_PIECE)
        self._piece = min(-(-wanted // 16) * 16, self._largest_piece)
        self._pieces = -(-self._chunk_bytes // self._piece)
        self._buffers = input.data_ptr(), (input if output is None else output).data_ptr()
        queues = self.workspace.queues()
        queues.fork()
        for turn in range(self._pieces + self._depth - 1):
            for level in range(self._depth):
                piece = turn - level
                if 0 <= piece < self._pieces:
                    self._run_level(queues, piece, level)
        queues.join()

    def _run_level(self, queues: Queues, piece: int, number: int) -> None:
        level = self._levels[number] if number < len(self._levels) else CopiedLevel(None, ())
        kernel = self._kernels[number] if number < len(self._levels) else None
        if number == 0:
            with queues.on("watch"):
                self._begin.set("index", piece)
                self._begin.set("behind", self._slots)
                self._begin.set("word", self._area.word(piece % self._slots))
                self._begin.launch(1, 32)
                queues.mark(("begun", piece))
        if kernel is not None:
            if number:
                queues.follow(("pushed", piece, number - 1))  # what a kernel writes over has been sent
            self._launch(kernel, piece)
            queues.mark(("done", piece, number))
        with queues.on("push"):
            if number == 0:
                queues.follow(("begun", piece))
            if any(push.needs_kernel for push in level.pushes):
                queues.follow(("done", piece, number))
            for push in self._in_order(level.pushes):
                self._push(queues, piece, push)
            queues.mark(("pushed", piece, number))
        if number == self._depth - 1:
            queues.follow(("pushed", piece, number))
            self._finish.set("index", piece)
            self._finish.set("is_last", int(piece == self._pieces - 1))
            self._finish.launch(1, 32)

    def _in_order(self, pushes: tuple[PushedChunk, ...]) -> Iterator[PushedChunk]:
        """The next rank's first, so that a rank is sent to by one other at a time."""
        rank, world = self.workspace.rank, self.workspace.world_size
        return iter(sorted(pushes, key=lambda push: (push.peer - rank) % world))

    def _push(self, queues: Queues, piece: int, push: PushedChunk) -> None:
        slot, begin = piece % self._slots, piece * self._piece
        mailbox = slot * self.lanes.mailboxes + push.message
        peer, base = self._area.addresses[push.peer], self._buffers[push.place.buffer is Buffer.OUT]
        block, chunk = divmod(push.place.chunk, self.block_chunks)
        start = chunk * self._chunk_bytes
        there = min(max(self._block_bytes - start, 0), self._chunk_bytes)
        num_bytes = min(max(there - begin, 0), self._piece)
        if num_bytes:
            source = base + block * self._block_bytes + start + begin
            queues.copy(peer + HEAD + mailbox * self._largest_piece, source, num_bytes)
        queues.copy(peer + FLAGS + 8 * mailbox, self._area.word(slot), 8)

    def _launch(self, kernel: Launchable, piece: int) -> None:
        slot, begin = piece % self._slots, piece * self._piece
        here = min(self._piece, self._chunk_bytes - begin)
        slots = -(-here // 16)
        mine = self._area.addresses[self.workspace.rank]
        values = {
            "input": self._buffers[0],
            "output": self._buffers[1],
            "mail": mine + HEAD + slot * self.lanes.mailboxes * self._largest_piece,
            "flags": mine + FLAGS + 8 * slot * self.lanes.mailboxes,
            "index": piece,
            "stride": self._largest_piece,
            "block_bytes": self._block_bytes,
            "chunk_bytes": self._chunk_bytes,
            "begin": begin,
            "slots": slots,
        }
        for name, value in values.items():
            kernel.set(name, value)
        kernel.launch(min(-(-slots // (MAX_THREADS * self.variant.unroll)), KERNEL_BLOCKS), MAX_THREADS)

    def describe_wait(self, block: int, level: int, message: int) -> str:
        """See `Waiting`."""
        return f"rank {self._senders.get(message, '?')}'s message {message} (level {level})"
