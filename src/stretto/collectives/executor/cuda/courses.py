"""What a call by copy engines does in turn: it depends on the tensors' sizes, and is written down once for each."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from stretto.collectives.collective import Buffer
from stretto.collectives.executor.cuda.function import Launchable
from stretto.collectives.executor.cuda.lanes import Lanes, Place
from stretto.collectives.executor.cuda.pushes import PushedChunk, find_overwriting, lower_to_copies
from stretto.collectives.executor.cuda.source import LEVEL_PARAMETERS, MAX_THREADS, Variant, write_level_source
from stretto.collectives.executor.cuda.workspace import Symmetric, Workspace

SLOTS = 3  # pieces that a peer may be ahead by
LARGEST_PIECE = 64 << 20  # bytes of a chunk, where the memory suffices: the larger, the nearer to a link's speed
SMALLEST_PIECE = 4 << 20  # about as small as the last one is: what comes after its messages is hidden by nothing
ENTERS = 8 << 10
FLAGS = 16 << 10
HEAD = 64 << 10
"""Bytes before the mailboxes: what each peer is done with, 64 bits a rank; from ENTERS on the call that each has begun;
and from FLAGS on a flag a message."""
KERNEL_BLOCKS = 64


class Layout(NamedTuple):
    """Of a call's tensors, in bytes."""

    chunk: int
    block: int


class Copy(NamedTuple):
    """A push: from a buffer's offset to an address; `tells`: to the receiver's flag."""

    buffer: int
    offset: int
    num_bytes: int
    target: int
    tells: "Launch"


class Launch(NamedTuple):
    """A kernel, of so many blocks and threads, and the parameters that change from launch to launch."""

    kernel: Launchable
    blocks: int
    threads: int
    values: tuple[tuple[str, int], ...]

    def run(self, stream: int) -> None:
        """Launch it there."""
        for name, value in self.values:
            self.kernel.set(name, value)
        self.kernel.launch(self.blocks, self.threads, stream=stream)


class Step(NamedTuple):
    """A level of a piece: what is launched and copied for it, in this order; the others are names of events.

    begun: after `begins`; overwrites: after what the kernel writes over has been sent; done: after the kernel, where
    pushes need it; pushed: after the pushes, where a later kernel writes over what they send; is_last: of the call.
    """

    begins: Launch | None
    begun: Hashable
    overwrites: Hashable
    kernel: Launch | None
    done: Hashable
    pushes: tuple[Copy, ...]
    pushed: Hashable
    finishes: Launch | None
    is_last: bool


class Sentinels(NamedTuple):
    """The kernels of copied.cu."""

    begin: Launchable
    tell: Launchable
    finish: Launchable


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


def require_copyable(lanes: Lanes, name: str) -> None:
    """ValueError for a schedule that cannot go by copies: before it has memory, which the group keeps."""
    for program in lanes.ranks:
        lower_to_copies(program, name, {})
    if FLAGS + 8 * _find_slots(lanes) * lanes.mailboxes > HEAD:
        raise ValueError(f"{name} has {lanes.mailboxes} messages to a rank: there are no flags for these")


def _find_slots(lanes: Lanes) -> int:
    return max(SLOTS, lanes.levels + 2)  # one more than its levels


class Courses:
    """One rank's, for a schedule: its levels' kernels, and of a call all that its tensors' sizes decide.

    straight: the messages that go into the peers' tensors, and where (see `find_straight`), instead of a mailbox.
    """

    def __init__(
        self,
        lanes: Lanes,
        name: str,
        workspace: Workspace,
        variant: Variant,
        block_chunks: int,
        sentinels: Sentinels,
        fixed: Mapping[str, int],
        straight: Mapping[tuple[int, int], Place],
    ) -> None:
        every = [lower_to_copies(program, name, straight) for program in lanes.ranks]
        self._levels = every[workspace.rank]
        self._depth = max(len(levels) for levels in every)
        self._overwriting = find_overwriting(self._levels, is_one=lanes.collective.in_place)
        self._workspace, self._area, self._variant = workspace, workspace.copy_area(), variant
        self._block_chunks, self._mailboxes, self._sentinels = block_chunks, lanes.mailboxes, sentinels
        self.slots = _find_slots(lanes)
        messages = self.slots * self._mailboxes
        self._largest = min(LARGEST_PIECE, (self._area.size - HEAD) // max(messages, 1) // 256 * 256)
        # What nobody adds up or puts elsewhere needs no pieces.
        self._is_whole = len(straight) == sum(program.mailboxes for program in lanes.ranks)
        self.kernels: list[Launchable | None] = []
        for number, level in enumerate(self._levels):
            if level.kernel is None:
                self.kernels.append(None)
                continue
            program = lanes.ranks[workspace.rank]
            source = write_level_source(lanes, program, number, level.kernel, block_chunks, variant, level.awaits)
            kernel = workspace.load(source, [name for _, name in LEVEL_PARAMETERS])
            for parameter in ("state", "report", "limit", "kernel", "base"):
                kernel.set(parameter, fixed[parameter])
            kernel.set("stride", self._largest)
            self.kernels.append(kernel)

    def chart(self, layout: Layout, symmetric: Symmetric | None) -> tuple[Step, ...]:
        """What a call does: a piece's next level when the piece after it has had this one."""
        pieces = cut(layout.chunk, self._largest)
        if self._is_whole and pieces:
            pieces = ((0, layout.chunk),)
        return tuple(
            self._step(pieces, turn - level, level, layout, symmetric)
            for turn in range(len(pieces) + self._depth - 1)
            for level in range(self._depth)
            if 0 <= turn - level < len(pieces)
        )

    def _step(
        self,
        pieces: tuple[tuple[int, int], ...],
        piece: int,
        number: int,
        layout: Layout,
        symmetric: Symmetric | None,
    ) -> Step:
        has_level = number < len(self._levels)
        pushes = self._levels[number].pushes if has_level else ()
        slot, last = piece % self.slots, len(pieces) - 1
        begins = finishes = None
        if number == 0 and (piece == 0 or piece >= self.slots):  # the first one begins for all that have a slot
            key = 0 if symmetric is None else symmetric.key
            begins = Launch(self._sentinels.begin, 1, 32, (("index", piece), ("key", key)))
        is_end = number == self._depth - 1
        if is_end and (piece == last or piece + self.slots <= last):  # somebody waits for it
            finishes = Launch(self._sentinels.finish, 1, 32, (("index", piece), ("is_last", int(piece == last))))
        return Step(
            begins=begins,
            begun=("begun", slot),
            overwrites=("pushed", slot, number - 1) if number in self._overwriting else None,
            kernel=self._compute(pieces[piece], piece, number, layout) if has_level else None,
            done=("done", slot, number) if any(push.needs_kernel for push in pushes) else None,
            pushes=tuple(
                self._push(push, pieces[piece], piece, layout, symmetric)
                # The next rank's first, so that a rank is sent to by one other at a time.
                for push in sorted(
                    pushes, key=lambda push: (push.peer - self._workspace.rank) % len(self._area.addresses)
                )
            ),
            pushed=("pushed", slot, number) if number + 1 in self._overwriting else None,
            finishes=finishes,
            is_last=is_end and piece == last,
        )

    def _compute(self, part: tuple[int, int], piece: int, number: int, layout: Layout) -> Launch | None:
        kernel, level = self.kernels[number], self._levels[number].kernel
        if kernel is None or level is None:
            return None
        begin, size = part
        mailboxes, mine = piece % self.slots * self._mailboxes, self._area.addresses[self._workspace.rank]
        lanes = -(-size // 16)
        values = (
            ("mail", mine + HEAD + mailboxes * self._largest),
            ("flags", mine + FLAGS + 8 * mailboxes),
            ("index", piece),
            ("block_bytes", layout.block),
            ("chunk_bytes", layout.chunk),
            ("begin", begin),
            ("slots", lanes),
        )
        # Half of the multiprocessors at most: what they wait for, kernels of one block tell.
        most = min(KERNEL_BLOCKS, max(self._workspace.multiprocessors // 2, 1)) if level.operations else 1
        return Launch(kernel, min(-(-lanes // (MAX_THREADS * self._variant.unroll)), most), MAX_THREADS, values)

    def _push(
        self, push: PushedChunk, part: tuple[int, int], piece: int, layout: Layout, symmetric: Symmetric | None
    ) -> Copy:
        begin, size = part
        mailbox = piece % self.slots * self._mailboxes + push.message
        peer = self._area.addresses[push.peer]
        target = peer + HEAD + mailbox * self._largest
        if push.straight is not None:
            assert symmetric is not None
            target = symmetric.addresses[push.peer] + self._find(push.straight, layout) + begin
        start = push.place.chunk % self._block_chunks * layout.chunk
        there = min(max(layout.block - start, 0), layout.chunk)  # of the chunk: a block's last ones may be cut short
        return Copy(
            buffer=int(push.place.buffer is Buffer.OUT),
            offset=self._find(push.place, layout) + begin,
            num_bytes=min(max(there - begin, 0), size),
            target=target,
            tells=Launch(self._sentinels.tell, 1, 32, (("index", piece), ("flag", peer + FLAGS + 8 * mailbox))),
        )

    def _find(self, place: Place, layout: Layout) -> int:
        """Where a chunk begins in its buffer."""
        block, chunk = divmod(place.chunk, self._block_chunks)
        return block * layout.block + chunk * layout.chunk
