# SPDX-License-Identifier: Apache-2.0
"""Collectives by their conditions: which input chunks exist before, and which sums each output chunk holds after.

MSCCLang, section 3.2. A buffer is a row of chunks of one size; an input chunk is named by the pair (rank,
index) that holds it at the start. In place, the smaller of a rank's two buffers is inside the larger one, as in
MSCCL and RCCL, which share our schedule files: an all-gather's input is a part of its output, a reduce-scatter's output
a part of its input, and otherwise both are the same memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache

from stretto.quantities import to_whole

InputChunk = tuple[int, int]
Expected = tuple[InputChunk, ...]
MAX_RANKS = 4096
MAX_CHUNKS = 2**20
MAX_PLACES = 2**23
"""The most chunks of all ranks' input and output buffers together, and of all scratch: checks visit each of them."""


class Buffer(StrEnum):
    """One of a rank's three buffers: "in", "out" or "scratch"."""

    IN = "in"
    OUT = "out"
    SCRATCH = "scratch"


def _always(rank: int, index: int) -> bool:
    return True


def _same_memory(rank: int) -> tuple[int, int]:
    return 0, 0


@dataclass(frozen=True)
class Collective:
    """A collective over `ranks` ranks, defined by a precondition and a postcondition; pass `expected` for your own.

    name: as in schedule files ("allreduce", "custom", ...); input_chunks, output_chunks: the chunks of a rank's
    buffers; expected(rank, index): the input chunks (rank, index) whose sum that output chunk must hold (one of them:
    a copy), None where it may hold anything; initialized(rank, index): whether that input chunk holds data;
    in_place: whether the buffers share memory; starts(rank): the offsets of "in" and "out" in it, in chunks; root: the
    root of a broadcast or a reduce; replicated: whether all ranks' outputs must be bitwise equal; is_unknown: whether
    its conditions are unknown. ValueError for invalid sizes.
    """

    name: str
    ranks: int
    input_chunks: int
    output_chunks: int
    expected: Callable[[int, int], Expected | None]
    initialized: Callable[[int, int], bool] = _always
    in_place: bool = False
    starts: Callable[[int], tuple[int, int]] = _same_memory
    root: int = 0
    replicated: bool = False
    is_unknown: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "input_chunks", "output_chunks", "root"):
            object.__setattr__(self, name, to_whole(getattr(self, name)))
        if not (isinstance(self.ranks, int) and 1 <= self.ranks <= MAX_RANKS):
            raise ValueError(f"a collective has 1 to {MAX_RANKS} ranks, not {self.ranks!r}")
        for what, count in (("input", self.input_chunks), ("output", self.output_chunks)):
            if not (isinstance(count, int) and 0 <= count <= MAX_CHUNKS):
                raise ValueError(f"a buffer has 0 to {MAX_CHUNKS} chunks, not {count!r} ({what} of {self.name})")
        if self.ranks * (self.input_chunks + self.output_chunks) > MAX_PLACES:
            raise ValueError(
                f"{self.ranks} ranks of {self.input_chunks} + {self.output_chunks} chunks are more than {MAX_PLACES} "
                f"chunks in all ({self.name})"
            )
        if not 0 <= self.root < self.ranks:
            raise ValueError(f"the root of {self.name} is a rank from 0 to {self.ranks - 1}, not {self.root}")

    def require_conditions(self) -> None:
        """ValueError where `expected` asks for anything but None or input chunks, or `starts` for places outside."""
        before: dict[int, Expected] = {}  # most give the same sum for all ranks, and a sum may be long
        for rank in range(self.ranks):
            for index in range(self.output_chunks):
                of = self.expected(rank, index)
                if of is None or of is before.get(index):
                    continue
                if not isinstance(of, tuple) or not of or not all(map(self._is_input, of)):
                    raise ValueError(
                        f"{self.name}: out[{index}] of rank {rank} is expected to hold {str(of)[:80]}, which is "
                        "neither None nor a tuple of input chunks (rank, index), as ((0, 0), (1, 0))"
                    )
                before[index] = of
        if self.in_place:
            self.require_inside()

    def require_inside(self) -> None:
        """ValueError if, in place, one of a rank's buffers is not inside the other."""
        for rank in range(self.ranks):
            for start, buffer in zip(self.starts(rank), (Buffer.IN, Buffer.OUT), strict=True):
                if not 0 <= start <= self.chunks_per_loop - self.chunks(buffer):
                    raise ValueError(
                        f"{self.name} in place: {buffer} of rank {rank} begins at chunk {start} of "
                        f"{self.chunks_per_loop}, and does not lie inside the other buffer"
                    )

    def _is_input(self, chunk: object) -> bool:
        match tuple(map(to_whole, chunk)) if isinstance(chunk, tuple) else None:
            case (int(rank), int(index)):
                return 0 <= rank < self.ranks and 0 <= index < self.input_chunks
        return False

    def out_of_place(self) -> "Collective":
        """The same collective with buffers that share no memory."""
        return replace(self, in_place=False)

    def aliased(self) -> "Collective":
        """The same collective in place."""
        return replace(self, in_place=True)

    def place(self, rank: int, buffer: Buffer, index: int) -> tuple[Buffer, int]:
        """The place of a chunk, under one name for memory that two buffers share."""
        if not self.in_place or buffer is Buffer.SCRATCH:
            return buffer, index
        start_in, start_out = self.starts(rank)
        shared = Buffer.OUT if self.output_chunks > self.input_chunks else Buffer.IN
        return shared, index + (start_in if buffer is Buffer.IN else start_out)

    def chunks(self, buffer: Buffer) -> int:
        """The number of chunks of "in" or "out"."""
        return self.input_chunks if buffer is Buffer.IN else self.output_chunks

    @property
    def chunks_per_loop(self) -> int:
        """The number of chunks of a rank's larger buffer."""
        return max(self.input_chunks, self.output_chunks)

    def refined(self, parts: int) -> "Collective":
        """The same with every chunk cut into `parts` chunks: chunk i becomes chunks i * parts and those after it."""
        if parts == 1:
            return self

        @lru_cache(maxsize=2 * self.chunks_per_loop * parts)
        def split(of_chunk: Expected, part: int) -> Expected:
            return tuple((rank, index * parts + part) for rank, index in of_chunk)

        def expected(rank: int, index: int) -> Expected | None:
            of_chunk = self.expected(rank, index // parts)
            return None if of_chunk is None else split(of_chunk, index % parts)

        def starts(rank: int) -> tuple[int, int]:
            start_in, start_out = self.starts(rank)
            return start_in * parts, start_out * parts

        return replace(
            self,
            input_chunks=self.input_chunks * parts,
            output_chunks=self.output_chunks * parts,
            expected=expected,
            initialized=lambda rank, index: self.initialized(rank, index // parts),
            starts=starts,
        )


def _sums(ranks: int) -> Callable[[int], Expected]:
    """The sums, by index, of all ranks' input chunks there; each is made when it is asked for, and once."""

    @cache
    def of_all(index: int) -> Expected:
        return tuple((rank, index) for rank in range(ranks))

    return of_all


def AllReduce(ranks: int, chunks: int, in_place: bool = True) -> Collective:
    """Every rank's `chunks` output chunks are the sums of all ranks' input chunks."""
    sums = _sums(ranks)
    return Collective(
        "allreduce", ranks, chunks, chunks, lambda rank, index: sums(index), in_place=in_place, replicated=True
    )


def AllGather(ranks: int, chunks: int = 1, in_place: bool = True) -> Collective:
    """Every rank's output is all ranks' inputs of `chunks` chunks, in rank order."""
    return Collective(
        "allgather",
        ranks,
        chunks,
        ranks * chunks,
        lambda rank, index: ((index // chunks, index % chunks),),
        in_place=in_place,
        starts=lambda rank: (rank * chunks, 0),
    )


def ReduceScatter(ranks: int, chunks: int = 1, in_place: bool = True) -> Collective:
    """Rank r's output is the sum of all ranks' r-th block of `chunks` input chunks."""
    sums = _sums(ranks)
    return Collective(
        "reducescatter",
        ranks,
        ranks * chunks,
        chunks,
        lambda rank, index: sums(rank * chunks + index),
        in_place=in_place,
        starts=lambda rank: (0, rank * chunks),
    )


def AllToAll(ranks: int, chunks: int = 1, in_place: bool = False) -> Collective:
    """Rank r's output is every rank's r-th block of `chunks` input chunks, in rank order."""
    return Collective(
        "alltoall",
        ranks,
        ranks * chunks,
        ranks * chunks,
        lambda rank, index: ((index // chunks, rank * chunks + index % chunks),),
        in_place=in_place,
    )


def Broadcast(ranks: int, chunks: int = 1, root: int = 0, in_place: bool = True) -> Collective:
    """Every rank's output is the root's input of `chunks` chunks."""
    return Collective(
        "broadcast",
        ranks,
        chunks,
        chunks,
        lambda rank, index: ((root, index),),
        initialized=lambda rank, index: rank == root,
        in_place=in_place,
        root=root,
    )


def Reduce(ranks: int, chunks: int = 1, root: int = 0, in_place: bool = True) -> Collective:
    """The root's `chunks` output chunks are the sums of all ranks' input chunks."""
    sums = _sums(ranks)
    return Collective(
        "reduce",
        ranks,
        chunks,
        chunks,
        lambda rank, index: sums(index) if rank == root else None,
        in_place=in_place,
        root=root,
    )


def AllToNext(ranks: int, chunks: int = 1) -> Collective:
    """Rank r + 1's output is rank r's input of `chunks` chunks; the last rank sends nothing (MSCCLang, section 7.4)."""
    return Collective(
        "alltonext", ranks, chunks, chunks, lambda rank, index: ((rank - 1, index),) if rank > 0 else None
    )
