# SPDX-License-Identifier: Apache-2.0
"""The chunk language: traces programs that move and add chunks of ranks' buffers (MSCCLang, sections 2 and 3).

    with trace(AllGather(ranks=3)) as program:
        for rank in range(3):
            c = chunk(rank, "out", rank)
            for step in range(1, 3):
                c = c.copy((rank + step) % 3, "out", rank)

A program manipulates references: (rank, buffer, index, count). It may use only the latest reference to a chunk, and no
chunk before something was written there, so a program that runs to its end has no race. The result of a trace is a
`Program`, an immutable value.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from stretto.collectives.collective import MAX_CHUNKS, Buffer, Collective
from stretto.quantities import to_whole

MAX_INSTANCES = 256
_current: ContextVar["Trace | None"] = ContextVar("the program that is traced", default=None)


class ProgramError(ValueError):
    """A program did what the language does not allow; the message names its line."""


class Chunks(NamedTuple):
    """`size` chunks of a rank's buffer, from `start` on."""

    rank: int
    buffer: Buffer
    start: int
    size: int

    def __str__(self) -> str:
        last = f"..{self.start + self.size - 1}" if self.size > 1 else ""
        return f"rank {self.rank}'s {self.buffer}[{self.start}{last}]"


class OperationKind(StrEnum):
    """An operation copies the chunks at its source to its destination, or adds them there."""

    COPY = "copy"
    REDUCE = "reduce"


class Operation(NamedTuple):
    """One copy or reduce: its source and destination, its channel, and its number of parallel instances.

    channel: None if the compiler chooses; instances: the number of copies of it that share the data (`parallelize`);
    thread_blocks: those of the sender and of the receiver that the program asks for, None if it does not; line: the
    line of the program, for messages; part: the number of this instance, once the compiler has made the instances
    (those of different numbers share no channel).
    """

    kind: OperationKind
    source: Chunks
    destination: Chunks
    channel: int | None
    instances: int
    thread_blocks: tuple[int | None, int | None]
    line: str
    part: int = 0


@dataclass(frozen=True)
class Program:
    """A traced program: its collective, its operations in order, and the number of scratch chunks of each rank."""

    collective: Collective
    operations: tuple[Operation, ...]
    scratch_chunks: tuple[int, ...]


class Reference:
    """Chunks that a program may copy and reduce, until something is written over them."""

    __slots__ = ("_trace", "_versions", "buffer", "count", "index", "rank")

    def __init__(self, trace: "Trace", chunks: Chunks, versions: list[int]) -> None:
        self._trace = trace
        self._versions = versions
        self.rank, self.buffer, self.index, self.count = chunks

    def copy(
        self,
        rank: int,
        buffer: Buffer | str | None = None,
        index: int | None = None,
        ch: int | None = None,
        *,
        thread_blocks: tuple[int | None, int | None] = (None, None),
    ) -> "Reference":
        """Copy these chunks to `rank`'s buffer at `index` (default: their own buffer and index) over channel `ch`.

        Returns the reference to the copies. A copy onto itself, as between the two buffers of a collective that is in
        place, does nothing. ProgramError for a stale reference, a place that is not there, or one that overlaps.
        """
        return self._trace.copy(self, rank, buffer, index, ch, thread_blocks)

    def reduce(
        self, other: "Reference", ch: int | None = None, *, thread_blocks: tuple[int | None, int | None] = (None, None)
    ) -> "Reference":
        """Add the chunks of `other` to these, in place, over channel `ch`; returns the reference to the sums.

        ProgramError for a stale reference, counts that differ, or chunks that overlap.
        """
        return self._trace.reduce(self, other, ch, thread_blocks)

    def split(self, parts: int) -> "list[Reference]":
        """These chunks as `parts` references of equal counts."""
        return self._trace.split(self, parts)

    def group(self, other: "Reference") -> "Reference":
        """One reference to these chunks, those of `other` on the same rank and buffer, and all chunks between them."""
        return self._trace.group(self, other)

    @property
    def chunks(self) -> Chunks:
        """The place of these chunks."""
        return Chunks(self.rank, self.buffer, self.index, self.count)

    def __repr__(self) -> str:
        return f"Reference({self.chunks})"


class Trace:
    """The state of one trace: the operation that wrote each chunk last, and the operations so far."""

    def __init__(self, collective: Collective) -> None:
        collective.require_conditions()
        self.collective = collective
        self._operations: list[Operation] = []
        self._instances = [1]
        # The number of the operation that wrote a chunk last: 0 for none, 1 for the collective's input.
        self._versions: list[dict[Buffer, list[int]]] = []
        for rank in range(collective.ranks):
            buffers: dict[Buffer, list[int]] = {Buffer.SCRATCH: []}
            for buffer in (Buffer.IN, Buffer.OUT):
                shared, _ = collective.place(rank, buffer, 0)
                buffers.setdefault(shared, [0] * collective.chunks(shared))
            self._versions.append(buffers)
            for index in range(collective.input_chunks):
                if collective.initialized(rank, index):
                    place, at = collective.place(rank, Buffer.IN, index)
                    buffers[place][at] = 1

    @property
    def program(self) -> Program:
        scratch = tuple(len(buffers[Buffer.SCRATCH]) for buffers in self._versions)
        return Program(self.collective, tuple(self._operations), scratch)

    def chunk(self, rank: int, buffer: Buffer | str, index: int, count: int) -> Reference:
        """A reference to the current content of chunks."""
        chunks, versions = self._find(rank, buffer, index, count)
        if 0 in versions:
            missing = Chunks(rank, chunks.buffer, chunks.start + versions.index(0), 1)
            raise ProgramError(f"{_line()}: {missing} holds nothing yet: copy a chunk there first")
        return Reference(self, chunks, versions)

    def copy(
        self,
        reference: Reference,
        rank: int,
        buffer: Buffer | str | None,
        index: int | None,
        channel: int | None,
        thread_blocks: tuple[int | None, int | None],
    ) -> Reference:
        """Record a copy; returns the reference to the copies."""
        self._require_current(reference)
        if buffer is None:
            buffer, index = reference.buffer, reference.index if index is None else index
        elif index is None:
            if buffer in tuple(Buffer) and Buffer(buffer) is not Buffer.SCRATCH:
                raise ProgramError(f'{_line()}: a copy to "{buffer}" needs an index')
            index = len(self._versions_of(rank)[Buffer.SCRATCH])
        destination, _ = self._find(rank, buffer, index, reference.count)
        if destination == reference.chunks:
            return reference
        return self._do(OperationKind.COPY, reference.chunks, destination, channel, thread_blocks)

    def reduce(
        self, reference: Reference, other: Reference, channel: int | None, thread_blocks: tuple[int | None, int | None]
    ) -> Reference:
        """Record a reduction of `other` into `reference`; returns the reference to the sums."""
        self._require_current(reference)
        self._require_current(other)
        if other.count != reference.count:
            raise ProgramError(f"{_line()}: {reference.chunks} and {other.chunks} differ in their counts")
        return self._do(OperationKind.REDUCE, other.chunks, reference.chunks, channel, thread_blocks)

    def split(self, reference: Reference, parts: int) -> list[Reference]:
        """Split a reference into `parts` of equal counts."""
        self._require_current(reference)
        parts = to_whole(parts)
        if not isinstance(parts, int) or parts < 1 or reference.count % parts:
            raise ProgramError(f"{_line()}: {reference.count} chunks cannot be split into {parts!r} equal parts")
        count = reference.count // parts
        return [
            Reference(
                self,
                Chunks(reference.rank, reference.buffer, reference.index + part * count, count),
                reference._versions[part * count : (part + 1) * count],
            )
            for part in range(parts)
        ]

    def group(self, reference: Reference, other: Reference) -> Reference:
        """One reference to both references' chunks, and those between them."""
        self._require_current(reference)
        self._require_current(other)
        if (reference.rank, reference.buffer) != (other.rank, other.buffer):
            raise ProgramError(f"{_line()}: {reference.chunks} and {other.chunks} are not in one buffer")
        first = min(reference.index, other.index)
        end = max(reference.index + reference.count, other.index + other.count)
        return self.chunk(reference.rank, reference.buffer, first, end - first)

    @contextmanager
    def parallel(self, instances: int) -> Iterator[None]:
        """Record all operations inside with so many times more instances."""
        instances = to_whole(instances)
        if not isinstance(instances, int) or not 1 <= instances <= MAX_INSTANCES:
            raise ProgramError(f"{_line()}: parallelize takes 1 to {MAX_INSTANCES} instances, not {instances!r}")
        if self._instances[-1] * instances > MAX_INSTANCES:
            raise ProgramError(f"{_line()}: nested parallelize gives more than {MAX_INSTANCES} instances")
        self._instances.append(self._instances[-1] * instances)
        try:
            yield
        finally:
            self._instances.pop()

    def _versions_of(self, rank: int) -> dict[Buffer, list[int]]:
        if not isinstance(rank, int) or not 0 <= rank < self.collective.ranks:
            raise ProgramError(f"{_line()}: there is no rank {rank!r}: there are 0 to {self.collective.ranks - 1}")
        return self._versions[rank]

    def _find(self, rank: int, buffer: Buffer | str, index: int, count: int) -> tuple[Chunks, list[int]]:
        """The place of these chunks, under one name for shared memory, and the versions of their contents."""
        rank, index, count = map(to_whole, (rank, index, count))
        versions = self._versions_of(rank)
        try:
            buffer = Buffer(buffer)
        except ValueError:
            names = ", ".join(f'"{name}"' for name in Buffer)
            raise ProgramError(f"{_line()}: there is no buffer {buffer!r}: there are {names}") from None
        if not isinstance(index, int) or not isinstance(count, int) or count < 1 or index < 0:
            raise ProgramError(f"{_line()}: chunks are counted from 0, at least one of them: not {index!r}, {count!r}")
        size = MAX_CHUNKS if buffer is Buffer.SCRATCH else self.collective.chunks(buffer)
        if index + count > size:
            raise ProgramError(
                f"{_line()}: {Chunks(rank, buffer, index, count)} is out of bounds: {buffer} has {size} chunks"
            )
        buffer, index = self.collective.place(rank, buffer, index)
        index = to_whole(index)  # of a user's function
        there = versions[buffer]
        if buffer is Buffer.SCRATCH and index + count > len(there):
            there.extend([0] * (index + count - len(there)))
        return Chunks(rank, buffer, index, count), there[index : index + count]

    def _require_current(self, reference: Reference) -> None:
        if not isinstance(reference, Reference):
            raise ProgramError(f"{_line()}: {reference!r} is no reference: take one with chunk()")
        if reference._trace is not self or _current.get() is not self:
            raise ProgramError(f"{_line()}: {reference.chunks} is a reference of another program")
        now = self._versions[reference.rank][reference.buffer]
        if now[reference.index : reference.index + reference.count] != reference._versions:
            raise ProgramError(
                f"{_line()}: the reference to {reference.chunks} is stale: it was written to since; "
                "take a new one with chunk(), or use what the later copy or reduce returned"
            )

    def _do(
        self,
        kind: OperationKind,
        source: Chunks,
        destination: Chunks,
        channel: int | None,
        thread_blocks: tuple[int | None, int | None],
    ) -> Reference:
        channel = to_whole(channel)
        if channel is not None and (not isinstance(channel, int) or channel < 0):
            raise ProgramError(f"{_line()}: a channel is a number from 0, not {channel!r}")
        if source[:2] == destination[:2] and abs(source.start - destination.start) < source.size:
            raise ProgramError(f"{_line()}: {source} and {destination} overlap")
        operation = Operation(kind, source, destination, channel, self._instances[-1], thread_blocks, _line())
        self._operations.append(operation)
        version = [len(self._operations) + 1] * destination.size
        written = self._versions[destination.rank][destination.buffer]
        written[destination.start : destination.start + destination.size] = version
        return Reference(self, destination, version)


def _line() -> str:
    """The line of the program that called into this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "contextlib"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def trace(collective: Collective) -> Iterator[Trace]:
    """Trace the code inside as a program of `collective`; its `program` is the result."""
    traced = Trace(collective)
    token = _current.set(traced)
    try:
        yield traced
    finally:
        _current.reset(token)


def _traced(what: str) -> Trace:
    current = _current.get()
    if current is None:
        raise ProgramError(f"{_line()}: {what} is a statement of a program: use it inside one that is traced")
    return current


def chunk(rank: int, buffer: Buffer | str, index: int, count: int = 1) -> Reference:
    """A reference to `count` chunks that "in", "out" or "scratch" of `rank` holds now, from `index` on.

    ProgramError for chunks that are not there or hold nothing yet. MSCCLang, table 1.
    """
    return _traced("chunk()").chunk(rank, buffer, index, count)


def parallelize(instances: int):  # type: ignore[no-untyped-def]  # a context manager, as contextlib types it
    """Run each operation inside as `instances` copies, each on a part of the data.

    A copy or reduce of `count` chunks becomes `instances` of them on count / instances chunks each, on channels of
    their own. ProgramError for a count that is not from 1 to 256. MSCCLang, section 5.1.
    """
    return _traced("parallelize()").parallel(instances)
