# SPDX-License-Identifier: Apache-2.0
"""Writes the CUDA C++ of one rank's fused program: the whole program as one kernel, or a single level of it.

Each thread handles vectors of 16 bytes of a mailbox (8 of data by LL, 15 by LL128, 16 by Simple), `UNROLL` of them at a
time, and executes the whole program on each. primitives.cu defines the functions that the generated code calls: `take`,
`put`, `load`, `store`, `combine`.
"""

from collections.abc import Iterator, Sequence

from stretto.collectives.collective import Buffer
from stretto.collectives.executor.cuda.fused.program import (
    ChunkPlace,
    FusedProgram,
    FusedRankProgram,
    Level,
    ReceiveChunk,
)
from stretto.collectives.executor.cuda.variant import MAX_THREADS, Variant, read_sources, write_macros

MIN_THREADS = 128  # of a block of any of these kernels
WIDE_THREADS = 1024  # of a kernel whose threads need no more than 64 registers
_MAX_WIDE_OPERATIONS = 24  # of such a thread: two-shot all-reduce of four ranks has 23, and fills the 64 registers
_OF_KERNEL = (
    ("char*", "input"),
    ("char*", "output"),
    ("State*", "state"),
    ("Report*", "report"),
    ("u32*", "failed"),  # the process's failure flag
    ("u64", "limit"),  # nanoseconds that a wait may take
    ("u64", "kernel"),  # the kernel's number in the workspace, for the failure report
)
_OF_PIECE = (
    ("u64", "stride"),  # the bytes of one mailbox
    ("u64", "block_bytes"),
    ("u64", "chunk_bytes"),
    ("u64", "begin"),  # where in each chunk the piece of this launch begins, in bytes
    ("u64", "num_vectors"),  # the vectors of the piece, each 16 bytes of a mailbox
)
PARAMETERS = (
    *_OF_KERNEL,
    ("u64", "region"),  # where the mailboxes of this protocol begin in each half of a rank's memory
    ("u64", "half"),  # the bytes of such a half
    *_OF_PIECE,
)
LEVEL_PARAMETERS = (
    *_OF_KERNEL,
    ("const u64*", "base"),  # the number of pieces of all calls before this one
    ("u64", "index"),  # which piece of this call it is
    ("char*", "mail"),  # the piece's mailbox set
    ("u64*", "flags"),  # and their flags
    *_OF_PIECE,
)


def max_threads(fused: FusedProgram, variant: Variant) -> int:
    """The most threads of a block of the kernel, the same on all ranks."""
    is_narrow = variant.unroll > 1 or any(
        sum(level.operations for level in program.levels) > _MAX_WIDE_OPERATIONS for program in fused.ranks
    )
    return MAX_THREADS if is_narrow else WIDE_THREADS


def divides_inputs(fused: FusedProgram, variant: Variant) -> bool:
    """Check whether an average divides each rank's input before it is added, and not each sum once it is whole.

    It does where a rank rounds sums of some ranks' inputs to 16 bits, which may hold the average and not the sum.
    """
    return (
        variant.reduction == "avg"
        and variant.is_16_bit_float
        and any(
            reduce.value in program.rounded and not reduce.completes
            for program in fused.ranks
            for level in program.levels
            for reduce in level.reduces
        )
    )


def write_source(fused: FusedProgram, rank: int, block_chunks: int, variant: Variant) -> str:
    """The fused kernel `run` of a rank. block_chunks: the chunks of a block (see `BlockLayout`)."""
    writer = _Writer(fused, fused.ranks[rank], block_chunks, variant)
    return write_macros(variant, fused.collective.ranks, rank) + "\n".join(
        [read_sources("ptx.cu", "primitives.cu"), *writer.kernel(), ""]
    )


def write_level_source(
    fused: FusedProgram,
    program: FusedRankProgram,
    number: int,
    level: Level,
    block_chunks: int,
    variant: Variant,
    awaits: Sequence[ReceiveChunk] = (),
) -> str:
    """The kernel `run` of one level, which sends nothing: copy engines have put its messages into mailboxes.

    awaits: messages that are elsewhere, for which it only waits.
    """
    writer = _LevelWriter(fused, program, block_chunks, variant)
    return write_macros(variant, fused.collective.ranks, program.rank) + "\n".join(
        [read_sources("ptx.cu", "primitives.cu"), *writer.level_kernel(number, level, awaits), ""]
    )


def parameter_names(world: int) -> list[str]:
    """The kernel's parameters in order, all of 8 bytes."""
    return [name for _, name in PARAMETERS] + [f"peer_{rank}" for rank in range(world)]


def _divided(wide: str) -> str:
    return f"divide_by_ranks({wide})"


def _is_thread(number: int) -> str:
    """A C++ condition: whether this thread does the block's number-th single task, of which there may be many."""
    return f"threadIdx.x == {number}" if number < MIN_THREADS else f"threadIdx.x == {number} % blockDim.x"


class _Writer:
    """Writes the lines of a fused kernel."""

    def __init__(self, fused: FusedProgram, program: FusedRankProgram, block_chunks: int, variant: Variant) -> None:
        self.program = program
        self.world = fused.collective.ranks
        self.has_implicit_barrier = fused.has_implicit_barrier
        self.in_place = fused.collective.in_place
        self.block_chunks = block_chunks
        self.max_threads = max_threads(fused, variant)
        self.is_simple = variant.protocol == "Simple"
        self.is_line = variant.protocol == "LL128"
        self.divides_inputs = divides_inputs(fused, variant)
        self.sums = {reduce.value for level in program.levels for reduce in level.reduces}

    def kernel(self) -> Iterator[str]:
        peers = ", ".join(f"char* peer_{rank}" for rank in range(self.world))
        parameters = ", ".join(f"{kind} {name}" for kind, name in PARAMETERS)
        yield f'extern "C" __global__ void __launch_bounds__({self.max_threads}) run({parameters}, {peers}) {{'
        yield "  const u32 epoch = next_epoch(state);"
        yield "  const u64 flag = (u64)epoch << 32 | epoch;"
        yield "  const u64 side = (epoch & 1) * half, mail = side + region;"
        yield "  Wait wait(state, report, failed, limit, kernel, epoch);"
        if not self.has_implicit_barrier:
            yield from self._send_tokens()
        yield "  u32 turn = 0;"
        yield from self._each_vector()
        yield "    ++turn;"
        for number, level in enumerate(self.program.levels):
            yield f"    // level {number}"
            yield from self._level(number, level)
        yield "  }"
        if not self.has_implicit_barrier:
            yield from self._await_tokens()
        yield f"  end_call(state, epoch, peer_{self.program.rank} + side, half, wait);"
        yield "}"

    def _each_vector(self) -> Iterator[str]:
        """The head of the loop over this thread's vectors."""
        yield "  const u64 span = (u64)gridDim.x * blockDim.x * UNROLL;"
        yield "  for (u64 start = (u64)blockIdx.x * blockDim.x * UNROLL; start < num_vectors; start += span) {"
        yield "    u64 vector[UNROLL], at[UNROLL]; int width[UNROLL];"
        yield "    EACH {"  # memory behind a piece belongs to the next piece
        yield "      vector[u] = start + u * blockDim.x + threadIdx.x;"
        if self.is_line:
            yield "      at[u] = begin + vector[u] / 8 * 120 + vector[u] % 8 * 16;"
            yield "      width[u] = vector[u] >= num_vectors ? 0 : vector[u] % 8 == 7 ? 8 : 16;"
        else:
            yield "      at[u] = begin + vector[u] * PACK_BYTES;"
            yield "      width[u] = vector[u] < num_vectors ? PACK_BYTES : 0;"
        yield "    }"

    def _level(self, number: int, level: Level) -> Iterator[str]:
        if level.receives:
            yield from self._receive(number, level)
        for load in level.loads:
            start, length = self._chunk(load.place)
            yield f"    Pack v{load.value}[UNROLL];"
            yield f"    EACH v{load.value}[u] = load({start} + at[u], valid({length}, at[u], width[u]));"
        for reduce in level.reduces:
            yield f"    Wide w{reduce.value}[UNROLL]; Pack v{reduce.value}[UNROLL];"
            yield "    EACH {"
            sides = [
                _divided(self._wide(value)) if self.divides_inputs and is_input else self._wide(value)
                for value, is_input in zip((reduce.left, reduce.right), reduce.adds_inputs, strict=True)
            ]
            total = f"combine({', '.join(sides)})"
            is_divided = reduce.completes and not self.divides_inputs
            yield f"      w{reduce.value}[u] = {_divided(total) if is_divided else total};"
            yield f"      v{reduce.value}[u] = narrow(w{reduce.value}[u]);"
            yield "    }"
        if level.sends:
            # If a message never arrived, its value is not forwarded.
            yield f"    const bool keeps_{number} = warp_any(wait.is_given_up);"
            yield "    converge();"
        for send in level.sends:
            mailbox = self._mailbox(send.peer, send.message)
            yield (
                f"    EACH if (vector[u] < num_vectors && !keeps_{number}) "
                f"put({mailbox}, vector[u], v{send.value}[u], flag);"
            )
        if self.is_simple and level.sends:
            yield "    wait.is_given_up = __syncthreads_or(wait.is_given_up);"
            for thread, send in enumerate(level.sends):
                flag = self._flag(f"peer_{send.peer}", send.message)
                yield (
                    f"    if ({_is_thread(thread)} && !wait.is_given_up) raise_flag({flag}, (u64)epoch << 32 | turn);"
                )
        for store in level.stores:
            start, length = self._chunk(store.place)
            yield f"    EACH store({start} + at[u], v{store.value}[u], valid({length}, at[u], width[u]));"

    def _receive(self, number: int, level: Level) -> Iterator[str]:
        names = ", ".join(f"v{receive.value}[UNROLL]" for receive in level.receives)
        yield f"    Pack {names};"
        if self.is_simple:
            for thread, receive in enumerate(level.receives):
                flag = self._flag(f"peer_{self.program.rank}", receive.message)
                yield (
                    f"    if ({_is_thread(thread)}) "
                    f"await_flag({flag}, (u64)epoch << 32 | turn, wait, {number}, {receive.message});"
                )
            yield "    wait.is_given_up = __syncthreads_or(wait.is_given_up);"
        # All messages are read together, so that memory latencies overlap.
        yield "    while (true) {"
        yield "      converge();"
        yield "      bool has_come = true; u32 missing = 0;"
        for receive in level.receives:
            mailbox = self._mailbox(self.program.rank, receive.message)
            yield (
                f"      EACH if (vector[u] < num_vectors && !take({mailbox}, vector[u], v{receive.value}[u], flag)) "
                f"{{ has_come = false; missing = {receive.message}; }}"
            )
        yield f"      if (warp_all(has_come || !wait.again({number}, missing))) break;"
        yield "    }"

    def _send_tokens(self) -> Iterator[str]:
        """Tell every other rank that this one has begun."""
        for peer in range(self.world):
            if peer != self.program.rank:
                yield (
                    f"  if (blockIdx.x == 0 && {_is_thread(peer)}) "
                    f"raise_flag((u64*)(peer_{peer} + side) + {self.program.rank}, (u64)epoch << 32);"
                )

    def _await_tokens(self) -> Iterator[str]:
        """Wait until all others have begun before this rank ends: calls use the two halves of the mailboxes in turn."""
        for peer in range(self.world):
            if peer != self.program.rank:
                yield (
                    f"  if (blockIdx.x == 0 && {_is_thread(peer)}) "
                    f"await_flag((u64*)(peer_{self.program.rank} + side) + {peer}, "
                    f"(u64)epoch << 32, wait, TO_BEGIN, {peer});"
                )

    def _chunk(self, place: ChunkPlace) -> tuple[str, str]:
        """C++ expressions for where a chunk begins and how many bytes it has."""
        base = "input" if place.buffer is Buffer.IN else "output"
        block, chunk = divmod(place.chunk, self.block_chunks)
        start = f"{base} + {block} * block_bytes + {chunk} * chunk_bytes"
        return start, f"chunk_length(block_bytes, {chunk} * chunk_bytes, chunk_bytes)"

    def _wide(self, value: int) -> str:
        """A value as an operand: a sum that was not sent is not rounded."""
        if value in self.sums and value not in self.program.rounded:
            return f"w{value}[u]"
        return f"widen(v{value}[u])"

    def _mailbox(self, rank: int, message: int) -> str:
        return f"peer_{rank} + mail + {message} * stride"

    def _flag(self, base: str, message: int) -> str:
        return f"(u64*)({base} + side + FLAGS) + {message} * MAX_BLOCKS + blockIdx.x"


class _LevelWriter(_Writer):
    """Writes the kernel of one level. A message has arrived once its flag has reached the piece's epoch."""

    def level_kernel(self, number: int, level: Level, awaits: Sequence[ReceiveChunk]) -> Iterator[str]:
        parameters = ", ".join(f"{kind} {name}" for kind, name in LEVEL_PARAMETERS)
        yield f'extern "C" __global__ void __launch_bounds__({MAX_THREADS}) run({parameters}) {{'
        yield "  const u64 epoch = *base + index + 1;"
        yield "  Wait wait(state, report, failed, limit, kernel, (u32)epoch);"
        for thread, receive in enumerate((*level.receives, *awaits)):
            yield (
                f"  if ({_is_thread(thread)}) "
                f"await_epoch(flags + {receive.message}, epoch, wait, {number}, {receive.message});"
            )
        yield "  __syncthreads();"
        if level.operations:
            yield from self._each_vector()
            yield from self._level(number, level)
            yield "  }"
        yield "  wait.conclude();"
        yield "}"

    def _receive(self, number: int, level: Level) -> Iterator[str]:
        names = ", ".join(f"v{receive.value}[UNROLL]" for receive in level.receives)
        yield f"    Pack {names};"
        for receive in level.receives:
            mailbox = f"mail + {receive.message} * stride"
            yield f"    EACH if (vector[u] < num_vectors) take({mailbox}, vector[u], v{receive.value}[u], 0);"
