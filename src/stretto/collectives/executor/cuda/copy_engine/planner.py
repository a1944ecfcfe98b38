# SPDX-License-Identifier: Apache-2.0
"""Plans the operations of a call by copy engines and their order: an immutable list of steps, made once per size.

Schedules that forward what they have received are pipelined: each chunk is split into pieces, and piece p + 1 is sent
while piece p is reduced. A step is one level of one piece. Three pieces of two levels (two-shot all-reduce: level 0
sends inputs, level 1 reduces them and sends the sums; the list is read from left to right):

    turn         0         1                   2                   3
                 |         |                   |                   |
    level 0      piece 0   piece 1             piece 2
    level 1                piece 0             piece 1             piece 2

    what each stream executes of it, from left to right:

    wait stream  wait 0                                                        (and wait 3: for mailbox set 0)
    copy stream  send 0.0    send 1.0    send 0.1    send 2.0    send 1.1    send 2.1
    flag stream          signal 0.0  signal 1.0  signal 0.1  signal 2.0  signal 1.1  signal 2.1
    caller's                       kernel 0.1            kernel 1.1            kernel 2.1            release 2

- `wait_for_peers` (flags.cu; "wait" above) waits until peers have begun the call, and later until they have released
  the set of mailboxes that a piece uses again: pieces p and p + (number of sets) share a mailbox set.
- A send is a copy into a peer's mailbox, then `signal_arrival` ("signal"), a kernel that puts the piece's number, its
  epoch, into the receiver's flag. It has its own stream: a copy of 4 bytes would queue behind all copies that wait
  for the same engine.
- A level's kernel waits for its messages' flags, reduces and stores.
- `release_mailboxes` ("release") signals to the peers that this rank is done with the piece's mailbox set.

CUDA graphs: streams that are captured become the branches of a graph, which CUDA may execute in any order, one after
another. A kernel that waits for peers must then not precede the operations for which peers wait, or all ranks wait
for each other. So a captured call has three more kinds of dependencies: a level's kernel goes after this rank's signals
of the level before, a release after all signals that were issued before it, and a wait for released mailboxes after
this rank's own release of them (docs/decisions/018-copies-in-cuda-graphs.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from stretto.collectives.collective import Buffer
from stretto.collectives.executor.cuda.copy_engine.lowering import (
    CopyLevel,
    OutgoingChunk,
    ZeroCopy,
    find_overwriting,
    lower_to_copies,
)
from stretto.collectives.executor.cuda.fused.codegen import LEVEL_PARAMETERS, write_level_source
from stretto.collectives.executor.cuda.fused.program import ChunkPlace, FusedProgram, Level, ReceiveChunk
from stretto.collectives.executor.cuda.nvrtc import Function
from stretto.collectives.executor.cuda.variant import MAX_THREADS, Variant
from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace, SymmetricView

MAX_PARTS = 16  # of a message: with pieces as `split_into_pieces` makes them, enough for any memory
MIN_MAILBOX_SETS = 3  # of a pipelined call: the pieces that a peer may be ahead by
LARGEST_PIECE = 64 << 20  # bytes of a chunk, where the memory suffices: the larger, the nearer to a link's speed
PIECE_SHARE = 3 / 4  # of the bytes that are left, which a piece takes
SMALLEST_PIECE = 4 << 20  # about the size of the last piece: nothing hides the work after its messages
ENTRY_FLAGS = 8 << 10
FLAGS = 16 << 10
HEAD = 256 << 10
"""Bytes before the mailboxes: the last piece that each peer is done with, 64 bits a rank; from ENTRY_FLAGS on the
call that each has begun; and from FLAGS on a flag for each message, or part of one."""
KERNEL_BLOCKS = 64


class ByteLayout(NamedTuple):
    """The sizes of a chunk and of a block of a call's tensors, in bytes."""

    chunk: int
    block: int


class ChunkSlice(NamedTuple):
    """The same bytes of each chunk. begin: where they begin in the chunk; mailbox_offset: where in the mailboxes; part:
    which of a message's parts they are, 0 if it has one.
    """

    begin: int
    size: int
    mailbox_offset: int = 0
    part: int = 0


class KernelLaunch(NamedTuple):
    """A launch of a kernel: its blocks and threads, and the parameters that change from launch to launch."""

    kernel: Function
    blocks: int
    threads: int
    values: tuple[tuple[str, int], ...]

    def run(self, stream: int) -> None:
        for name, value in self.values:
            self.kernel.set(name, value)
        self.kernel.launch(self.blocks, self.threads, stream=stream)


class PeerCopy(NamedTuple):
    """A copy to a peer, from an offset in the input (buffer 0) or output (1) to an address, and its signal after it.

    signalled: an event that is recorded after the signal while a graph is captured; None where no kernel needs it.
    """

    buffer: int
    offset: int
    num_bytes: int
    target: int
    signal_arrival: KernelLaunch
    signalled: Hashable = None


class CopyStep(NamedTuple):
    """Copies that are issued together, in the fields' order. Events order the streams; their names identify them.

    wait_for_peers: launched on the wait stream, and recorded as the event `peers_ready`, which the copies wait for.
    kernel: runs on the caller's stream, after the event `overwrites` where it writes over chunks that are being sent;
    `done` is recorded after it, if copies need its result. copies: go on the copy stream; `sent` is recorded after
    them, if a later kernel writes over what they send. release_mailboxes: runs on the caller's stream; is_last: it ends
    the call.

    Only while a graph is captured: `signalled` is recorded after the signals of all copies, and `released` after
    release_mailboxes; wait_for_peers goes after the event `after_release`, the kernel after `after_signals`, and
    release_mailboxes after `signalled`.
    """

    after_release: Hashable = None
    wait_for_peers: KernelLaunch | None = None
    peers_ready: Hashable = "peers ready"
    overwrites: Hashable = None
    after_signals: Hashable = None
    kernel: KernelLaunch | None = None
    done: Hashable = None
    copies: tuple[PeerCopy, ...] = ()
    signalled: Hashable = None
    sent: Hashable = None
    release_mailboxes: KernelLaunch | None = None
    released: Hashable = None
    is_last: bool = False


class FlagKernels(NamedTuple):
    """The kernels of flags.cu, which wait for peers and signal to them."""

    wait_for_peers: Function
    signal_arrival: Function
    release_mailboxes: Function


def split_into_pieces(size: int, largest: int, share: float = PIECE_SHARE) -> tuple[tuple[int, int], ...]:
    """Split a chunk's bytes into (begin, bytes), the largest pieces first; all begin at multiples of 16."""
    pieces, begin = [], 0
    while begin < size:
        left = size - begin
        piece = min(left if left <= 2 * SMALLEST_PIECE else int(left * share), largest)
        piece = left if piece == left else -(-piece // 16) * 16
        pieces.append((begin, piece))
        begin += piece
    return tuple(pieces)


def order_by_distance(sends: Iterable[OutgoingChunk], rank: int, world: int) -> list[OutgoingChunk]:
    """A rank's sends, those to the next rank first, so that only one rank sends to another at a time."""
    return sorted(sends, key=lambda send: (send.peer - rank) % world)


def require_copyable(fused: FusedProgram, name: str) -> None:
    """Raise ValueError for a schedule that copy engines cannot run, before the group allocates memory for it."""
    for program in fused.ranks:
        lower_to_copies(program, name, {})
    if FLAGS + 8 * max(count_mailbox_sets(fused), MAX_PARTS) * fused.mailboxes > HEAD:
        raise ValueError(f"{name} has {fused.mailboxes} messages to a rank: there are no flags for these")


def count_mailbox_sets(fused: FusedProgram) -> int:
    """The mailbox sets of a pipelined call: one more than its levels."""
    return max(MIN_MAILBOX_SETS, fused.num_hops + 2)


class CopyPlanner(ABC):
    """Plans calls of one schedule on one rank: loads its kernels, and makes the steps for tensors of any size.

    all_levels: all ranks' levels, of `lower_to_copies`; zero_copy: the messages that they send without a mailbox.
    """

    def __init__(
        self,
        fused: FusedProgram,
        all_levels: list[tuple[CopyLevel, ...]],
        workspace: CollectiveWorkspace,
        variant: Variant,
        block_chunks: int,
        flag_kernels: FlagKernels,
        fixed: Mapping[str, int],
        zero_copy: ZeroCopy,
    ) -> None:
        self._fused, self._all_levels = fused, all_levels
        self._levels = all_levels[workspace.rank]
        self._overwriting = find_overwriting(self._levels)
        self._workspace, self._area, self._variant = workspace, workspace.copy_area(), variant
        self._block_chunks, self._mailboxes, self._flag_kernels = block_chunks, fused.mailboxes, flag_kernels
        self._fixed = fixed
        self._num_mailbox_sets = sets = self._count_mailbox_sets()
        room = (self._area.size - HEAD) // max(sets * self._mailboxes, 1) // 256 * 256
        self._largest = min(LARGEST_PIECE, room) if sets > 1 else room  # the largest piece: a round takes all
        # Messages that are neither reduced nor moved are sent in one piece.
        self._is_whole = len(zero_copy) == sum(program.mailboxes for program in fused.ranks)
        self.kernels: list[Function | None] = []
        self._load_kernels()

    @abstractmethod
    def build(self, layout: ByteLayout, symmetric: SymmetricView | None) -> tuple[CopyStep, ...]:
        """The steps of a call. symmetric: the tensor that zero-copy messages go into, None if there are none."""

    @abstractmethod
    def _count_mailbox_sets(self) -> int:
        """Count the mailbox sets."""

    @abstractmethod
    def _load_kernels(self) -> None:
        """Compile `self.kernels`."""

    def _load(self, number: int, level: Level, awaits: tuple[ReceiveChunk, ...]) -> Function:
        fused = self._fused
        program = fused.ranks[self._workspace.rank]
        source = write_level_source(fused, program, number, level, self._block_chunks, self._variant, awaits)
        kernel = self._workspace.load(source, [name for _, name in LEVEL_PARAMETERS])
        for parameter in ("state", "report", "failed", "limit", "kernel", "base"):
            kernel.set(parameter, self._fixed[parameter])
        kernel.set("stride", self._largest)
        return kernel

    def _wait_for_peers(self, piece: int, symmetric: SymmetricView | None) -> KernelLaunch | None:
        """The wait before a piece; None where its mailbox set was free: the first piece waits for all that have one."""
        if 0 < piece < self._num_mailbox_sets:
            return None
        key = 0 if symmetric is None else symmetric.key
        values = (("index", piece), ("tensor_key", key), ("num_mailbox_sets", self._num_mailbox_sets))
        return KernelLaunch(self._flag_kernels.wait_for_peers, 1, 32, values)

    def _release_mailboxes(self, piece: int, last: int) -> KernelLaunch | None:
        """The release of a piece's mailbox set; None if no rank waits for it."""
        if last - self._num_mailbox_sets < piece < last:
            return None
        values = (("index", piece), ("is_last", int(piece == last)))
        return KernelLaunch(self._flag_kernels.release_mailboxes, 1, 32, values)

    def _compute(
        self, kernel: Function | None, level: Level, part: ChunkSlice, piece: int, layout: ByteLayout
    ) -> KernelLaunch:
        """The launch of a level's kernel on a slice of the chunks."""
        assert kernel is not None
        own_memory = self._area.addresses[self._workspace.rank]
        mailboxes = piece % self._num_mailbox_sets * self._mailboxes
        vectors = -(-part.size // 16)
        values = (
            ("mail", own_memory + HEAD + mailboxes * self._largest + part.mailbox_offset),
            ("flags", own_memory + FLAGS + 8 * (mailboxes + part.part * self._mailboxes)),
            ("index", piece),
            ("block_bytes", layout.block),
            ("chunk_bytes", layout.chunk),
            ("begin", part.begin),
            ("num_vectors", vectors),
        )
        # At most half of the multiprocessors: the signalling kernels for which they wait must be able to run, too.
        half = max(self._workspace.multiprocessors // 2, 1)
        most = min(KERNEL_BLOCKS, half, self._workspace.max_blocks) if level.operations else 1
        blocks = min(-(-vectors // (MAX_THREADS * self._variant.unroll)), most)
        return KernelLaunch(kernel, blocks, MAX_THREADS, values)

    def _copy(
        self, send: OutgoingChunk, part: ChunkSlice, piece: int, layout: ByteLayout, symmetric: SymmetricView | None
    ) -> PeerCopy:
        """The copy of a slice of a message, into the peer's mailbox or its tensor."""
        mailbox = piece % self._num_mailbox_sets * self._mailboxes + send.message
        peer = self._area.addresses[send.peer]
        target = peer + HEAD + mailbox * self._largest + part.mailbox_offset
        flag = peer + FLAGS + 8 * (mailbox + part.part * self._mailboxes)
        end = self._length(send.place, layout)
        if send.zero_copy is not None:
            assert symmetric is not None
            target = symmetric.addresses[send.peer] + self._find(send.zero_copy, layout) + part.begin
            end = min(end, self._length(send.zero_copy, layout))
        return PeerCopy(
            buffer=int(send.place.buffer is Buffer.OUT),
            offset=self._find(send.place, layout) + part.begin,
            num_bytes=min(max(end - part.begin, 0), part.size),
            target=target,
            signal_arrival=KernelLaunch(self._flag_kernels.signal_arrival, 1, 32, (("index", piece), ("flag", flag))),
        )

    def _length(self, place: ChunkPlace, layout: ByteLayout) -> int:
        """The bytes of a chunk: the last ones of a block may be shorter."""
        start = place.chunk % self._block_chunks * layout.chunk
        return min(max(layout.block - start, 0), layout.chunk)

    def _find(self, place: ChunkPlace, layout: ByteLayout) -> int:
        """The offset of a chunk in its buffer, in bytes."""
        block, chunk = divmod(place.chunk, self._block_chunks)
        return block * layout.block + chunk * layout.chunk


class PipelinedCopyPlanner(CopyPlanner):
    """Plans schedules that forward what they have received: piece by piece, as drawn above."""

    def build(self, layout: ByteLayout, symmetric: SymmetricView | None) -> tuple[CopyStep, ...]:
        """The steps of a call: a piece has its next level when the piece after it has had this one."""
        pieces = tuple(ChunkSlice(*piece) for piece in split_into_pieces(layout.chunk, self._largest))
        if self._is_whole and pieces:
            pieces = (ChunkSlice(0, layout.chunk),)
        depth = max(len(levels) for levels in self._all_levels)
        return tuple(
            self._step(pieces, piece, level, depth, layout, symmetric)
            for piece, level in order_pieces(len(pieces), depth)
        )

    def _count_mailbox_sets(self) -> int:
        return count_mailbox_sets(self._fused)

    def _load_kernels(self) -> None:
        for number, level in enumerate(self._levels):
            self.kernels.append(None if level.kernel is None else self._load(number, level.kernel, level.awaits))

    def _step(
        self,
        pieces: tuple[ChunkSlice, ...],
        piece: int,
        number: int,
        depth: int,
        layout: ByteLayout,
        symmetric: SymmetricView | None,
    ) -> CopyStep:
        """Level `number` of a piece; a rank may have fewer levels than the deepest of all."""
        level = self._levels[number] if number < len(self._levels) else CopyLevel(None, (), ())
        sets = self._num_mailbox_sets
        mailbox_set, last, is_end = piece % sets, len(pieces) - 1, number == depth - 1
        sends = order_by_distance(level.sends, self._workspace.rank, self._workspace.world_size)
        kernel = None
        if level.kernel is not None:
            kernel = self._compute(self.kernels[number], level.kernel, pieces[piece], piece, layout)
        return CopyStep(
            after_release=("released", mailbox_set) if piece >= sets else None,
            wait_for_peers=self._wait_for_peers(piece, symmetric) if number == 0 else None,
            peers_ready=("peers ready", mailbox_set),
            overwrites=("sent", mailbox_set, number - 1) if number in self._overwriting else None,
            after_signals=("signalled", mailbox_set, number - 1) if number else None,
            kernel=kernel,
            done=("done", mailbox_set, number) if any(send.needs_kernel for send in sends) else None,
            copies=tuple(self._copy(send, pieces[piece], piece, layout, symmetric) for send in sends),
            signalled=("signalled", mailbox_set, number),
            sent=("sent", mailbox_set, number) if number + 1 in self._overwriting else None,
            release_mailboxes=self._release_mailboxes(piece, last) if is_end else None,
            released=("released", mailbox_set),
            is_last=is_end and piece == last,
        )


def order_pieces(pieces: int, depth: int) -> Iterator[tuple[int, int]]:
    """The (piece, level) pairs of a pipelined call in the order in which they are issued, turn by turn."""
    for turn in range(pieces + depth - 1):
        for level in range(depth):
            if 0 <= turn - level < pieces:
                yield turn - level, level
