"""What a call by copy engines does in turn: it depends on the tensors' sizes, and is written down once for each."""

from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from stretto.collectives.collective import Buffer
from stretto.collectives.executor.cuda.copy_engine.lowering import (
    CopyLevel,
    OutgoingChunk,
    find_overwriting,
    lower_to_copies,
)
from stretto.collectives.executor.cuda.fused.codegen import LEVEL_PARAMETERS, write_level_source
from stretto.collectives.executor.cuda.fused.program import ChunkPlace, FusedProgram, Level, ReceiveChunk
from stretto.collectives.executor.cuda.nvrtc import Launchable
from stretto.collectives.executor.cuda.variant import MAX_THREADS, Variant
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace, SymmetricView

PARTS = 16  # of a message, at most: with pieces as `cut` makes them, enough for any memory
SLOTS = 3  # pieces that a peer may be ahead by
LARGEST_PIECE = 64 << 20  # bytes of a chunk, where the memory suffices: the larger, the nearer to a link's speed
SHARE = 3 / 4  # of what is left, that a piece takes
SMALLEST_PIECE = 4 << 20  # about as small as the last one is: what comes after its messages is hidden by nothing
ENTERS = 8 << 10
FLAGS = 16 << 10
HEAD = 256 << 10
"""Bytes before the mailboxes: what each peer is done with, 64 bits a rank; from ENTERS on the call that each has begun;
and from FLAGS on a flag a message, or a part of one."""
KERNEL_BLOCKS = 64


class ByteLayout(NamedTuple):
    """Of a call's tensors, in bytes."""

    chunk: int
    block: int


class ChunkSlice(NamedTuple):
    """Of each chunk, in bytes: where it begins there and in the mailboxes; flag: 0, or which of a message's parts."""

    begin: int
    size: int
    inside: int = 0
    flag: int = 0


class PeerCopy(NamedTuple):
    """A push: from a buffer's offset to an address; `tells`: to the receiver's flag."""

    buffer: int
    offset: int
    num_bytes: int
    target: int
    tells: "KernelLaunch"


class KernelLaunch(NamedTuple):
    """A kernel, of so many blocks and threads, and the parameters that change from launch to launch."""

    kernel: Launchable
    blocks: int
    threads: int
    values: tuple[tuple[str, int], ...]

    def run(self, stream: int) -> None:
        """KernelLaunch it there."""
        for name, value in self.values:
            self.kernel.set(name, value)
        self.kernel.launch(self.blocks, self.threads, stream=stream)


class CopyStep(NamedTuple):
    """A part of a call: what is launched and copied in it, in this order; the others are names of events.

    begun: after `begins`, for pushes, and at a call's start for its kernels; overwrites: after what the kernel writes
    over has been sent; done: after the kernel, where pushes need it; pushed: after the pushes, where a later kernel
    writes over what they send; is_last: of the call.
    """

    begins: KernelLaunch | None
    begun: Hashable
    overwrites: Hashable
    kernel: KernelLaunch | None
    done: Hashable
    pushes: tuple[PeerCopy, ...]
    pushed: Hashable
    finishes: KernelLaunch | None
    is_last: bool


class FlagKernels(NamedTuple):
    """The kernels of copied.cu."""

    begin: Launchable
    tell: Launchable
    finish: Launchable


def cut(size: int, largest: int, share: float = SHARE) -> tuple[tuple[int, int], ...]:
    """(begin, bytes) of a chunk's pieces, multiples of 16 but for the last: large ones, and a small one at the end."""
    pieces, begin = [], 0
    while begin < size:
        left = size - begin
        piece = min(left if left <= 2 * SMALLEST_PIECE else int(left * share), largest)
        piece = left if piece == left else -(-piece // 16) * 16
        pieces.append((begin, piece))
        begin += piece
    return tuple(pieces)


def in_turn(pushes: Iterable[OutgoingChunk], rank: int, world: int) -> list[OutgoingChunk]:
    """A rank's, the next rank's first, so that a rank is sent to by one other at a time."""
    return sorted(pushes, key=lambda push: (push.peer - rank) % world)


def require_copyable(fused: FusedProgram, name: str) -> None:
    """ValueError for a schedule that cannot go by copies: before it has memory, which the group keeps."""
    for program in fused.ranks:
        lower_to_copies(program, name, {})
    if FLAGS + 8 * max(_find_slots(fused), PARTS) * fused.mailboxes > HEAD:
        raise ValueError(f"{name} has {fused.mailboxes} messages to a rank: there are no flags for these")


def _find_slots(fused: FusedProgram) -> int:
    return max(SLOTS, fused.levels + 2)  # one more than its levels


class CopyPlanner:
    """One rank's, for a schedule, piece by piece: its kernels, and of a call all that its tensors' sizes decide.

    every: all ranks' levels, of `lower_to_copies`; zero_copy: the messages that go into the peers' tensors, and where
    (see `find_zero_copy`), instead of a mailbox.
    """

    def __init__(
        self,
        fused: FusedProgram,
        every: list[tuple[CopyLevel, ...]],
        workspace: CollectiveWorkspace,
        variant: Variant,
        block_chunks: int,
        flag_kernels: FlagKernels,
        fixed: Mapping[str, int],
        zero_copy: Mapping[tuple[int, int], ChunkPlace],
    ) -> None:
        self._fused, self._every = fused, every
        self._levels = self._every[workspace.rank]
        self._depth = max(len(levels) for levels in self._every)
        self._overwriting = find_overwriting(self._levels)
        self._workspace, self._area, self._variant = workspace, workspace.copy_area(), variant
        self._block_chunks, self._mailboxes, self._flag_kernels = block_chunks, fused.mailboxes, flag_kernels
        self._fixed = fixed
        self._slots = self._count_slots()
        room = (self._area.size - HEAD) // max(self._slots * self._mailboxes, 1) // 256 * 256
        self._largest = min(LARGEST_PIECE, room) if self._slots > 1 else room  # a round takes all there is
        # What nobody adds up or puts elsewhere needs no pieces.
        self._is_whole = len(zero_copy) == sum(program.mailboxes for program in fused.ranks)
        self.kernels: list[Launchable | None] = []
        self._load_kernels()

    def _count_slots(self) -> int:
        return _find_slots(self._fused)

    def _load_kernels(self) -> None:
        for number, level in enumerate(self._levels):
            self.kernels.append(None if level.kernel is None else self._load(number, level.kernel, level.awaits))

    def _load(self, number: int, level: Level, awaits: tuple[ReceiveChunk, ...]) -> Launchable:
        fused = self._fused
        program = fused.ranks[self._workspace.rank]
        source = write_level_source(fused, program, number, level, self._block_chunks, self._variant, awaits)
        kernel = self._workspace.load(source, [name for _, name in LEVEL_PARAMETERS])
        for parameter in ("state", "report", "failed", "limit", "kernel", "base"):
            kernel.set(parameter, self._fixed[parameter])
        kernel.set("stride", self._largest)
        return kernel

    def build(self, layout: ByteLayout, symmetric: SymmetricView | None) -> tuple[CopyStep, ...]:
        """What a call does: a piece's next level when the piece after it has had this one."""
        pieces = tuple(ChunkSlice(*piece) for piece in cut(layout.chunk, self._largest))
        if self._is_whole and pieces:
            pieces = (ChunkSlice(0, layout.chunk),)
        return tuple(
            self._step(pieces, turn - level, level, layout, symmetric)
            for turn in range(len(pieces) + self._depth - 1)
            for level in range(self._depth)
            if 0 <= turn - level < len(pieces)
        )

    def _step(
        self,
        pieces: tuple[ChunkSlice, ...],
        piece: int,
        number: int,
        layout: ByteLayout,
        symmetric: SymmetricView | None,
    ) -> CopyStep:
        has_level = number < len(self._levels)
        pushes = self._levels[number].pushes if has_level else ()
        slot, last = piece % self._slots, len(pieces) - 1
        is_end = number == self._depth - 1
        level = self._levels[number].kernel if has_level else None
        return CopyStep(
            begins=self._begin(piece, symmetric) if number == 0 else None,
            begun=("begun", slot),
            overwrites=("pushed", slot, number - 1) if number in self._overwriting else None,
            kernel=self._compute(self.kernels[number], level, pieces[piece], piece, layout) if level else None,
            done=("done", slot, number) if any(push.needs_kernel for push in pushes) else None,
            pushes=tuple(
                self._push(push, pieces[piece], piece, layout, symmetric)
                for push in in_turn(pushes, self._workspace.rank, self._workspace.world_size)
            ),
            pushed=("pushed", slot, number) if number + 1 in self._overwriting else None,
            finishes=self._finish(piece, last) if is_end else None,
            is_last=is_end and piece == last,
        )

    def _begin(self, piece: int, symmetric: SymmetricView | None) -> KernelLaunch | None:
        """None where its slot was free before: the first piece begins for all that have one."""
        if 0 < piece < self._slots:
            return None
        key = 0 if symmetric is None else symmetric.key
        return KernelLaunch(self._flag_kernels.begin, 1, 32, (("index", piece), ("key", key), ("behind", self._slots)))

    def _finish(self, piece: int, last: int) -> KernelLaunch | None:
        """None where nobody waits for it."""
        if last - self._slots < piece < last:
            return None
        return KernelLaunch(self._flag_kernels.finish, 1, 32, (("index", piece), ("is_last", int(piece == last))))

    def _compute(
        self, kernel: Launchable | None, level: Level, part: ChunkSlice, piece: int, layout: ByteLayout
    ) -> KernelLaunch:
        assert kernel is not None
        mailboxes, mine = piece % self._slots * self._mailboxes, self._area.addresses[self._workspace.rank]
        vectors = -(-part.size // 16)
        values = (
            ("mail", mine + HEAD + mailboxes * self._largest + part.inside),
            ("flags", mine + FLAGS + 8 * (mailboxes + part.flag * self._mailboxes)),
            ("index", piece),
            ("block_bytes", layout.block),
            ("chunk_bytes", layout.chunk),
            ("begin", part.begin),
            ("slots", vectors),
        )
        # Half of the multiprocessors at most: what they wait for, kernels of one block tell.
        half = max(self._workspace.multiprocessors // 2, 1)
        most = min(KERNEL_BLOCKS, half, self._workspace.most_blocks) if level.operations else 1
        return KernelLaunch(kernel, min(-(-vectors // (MAX_THREADS * self._variant.unroll)), most), MAX_THREADS, values)

    def _push(
        self, push: OutgoingChunk, part: ChunkSlice, piece: int, layout: ByteLayout, symmetric: SymmetricView | None
    ) -> PeerCopy:
        begin = part.begin
        mailbox = piece % self._slots * self._mailboxes + push.message
        peer = self._area.addresses[push.peer]
        target = peer + HEAD + mailbox * self._largest + part.inside
        flag = peer + FLAGS + 8 * (mailbox + part.flag * self._mailboxes)
        there = self._length(push.place, layout)
        if push.zero_copy is not None:
            assert symmetric is not None
            target = symmetric.addresses[push.peer] + self._find(push.zero_copy, layout) + begin
            there = min(there, self._length(push.zero_copy, layout))
        return PeerCopy(
            buffer=int(push.place.buffer is Buffer.OUT),
            offset=self._find(push.place, layout) + begin,
            num_bytes=min(max(there - begin, 0), part.size),
            target=target,
            tells=KernelLaunch(self._flag_kernels.tell, 1, 32, (("index", piece), ("flag", flag))),
        )

    def _length(self, place: ChunkPlace, layout: ByteLayout) -> int:
        """The bytes of a chunk: a block's last ones may be cut short."""
        start = place.chunk % self._block_chunks * layout.chunk
        return min(max(layout.block - start, 0), layout.chunk)

    def _find(self, place: ChunkPlace, layout: ByteLayout) -> int:
        """Where a chunk begins in its buffer."""
        block, chunk = divmod(place.chunk, self._block_chunks)
        return block * layout.block + chunk * layout.chunk
