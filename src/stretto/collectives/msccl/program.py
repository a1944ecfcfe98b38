# SPDX-License-Identifier: Apache-2.0
"""The language of msccl-tools, for its scripts: traces a program inside `with MSCCLProgram(...)`.

A reference names a place: a rank, a buffer, an index and a size. It reads the place's content when it is used, so
there are no stale references here. Reading an empty place is an error.
"""

import operator
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from stretto.collectives.collective import MAX_CHUNKS
from stretto.collectives.compiler import compile_program
from stretto.collectives.language import OperationKind
from stretto.collectives.msccl.conditions import MscclCollective
from stretto.collectives.msccl.lowering import ChunkRange, Recorded, is_index_wise, lower
from stretto.collectives.msccl.values import MscclBuffer, ScratchBuffer, ScriptError, ThreadblockPolicy, script_line
from stretto.collectives.schedule import PROTOCOLS, Schedule
from stretto.collectives.xml import to_xml

_MSCCLPP = "is an operation of MSCCL++: only copy() and reduce() are supported"


@dataclass
class ScriptRun:
    """One run of a script: its programs, and the one whose `with` is open."""

    programs: "list[MSCCLProgram]" = field(default_factory=list)
    current: "MSCCLProgram | None" = None


current_run: ContextVar[ScriptRun | None] = ContextVar("the run of a script for msccl-tools", default=None)


class Ref:
    """`size` chunks from `index` on in a rank's buffer, whatever they hold when they are used."""

    __slots__ = ("buffer", "index", "prog", "rank", "size")
    __hash__ = None  # type: ignore[assignment]  # as in msccl-tools: two that are equal may read different contents

    def __init__(self, rank: int, buffer: Hashable, index: int, size: int, prog: "MSCCLProgram") -> None:
        self.rank = rank
        self.buffer = buffer
        self.index = index
        self.size = size
        self.prog = prog

    def copy(
        self, dst: int, buffer: Hashable = None, index: int = -1, sendtb: int = -1, recvtb: int = -1, ch: int = -1
    ) -> "Ref":
        """Copy these chunks to rank `dst`'s buffer at `index`; returns the reference to the copies.

        Without buffer and index: to their own place; without an index: to the end of a scratch buffer.
        """
        if index == -1 and buffer is None:
            buffer, index = self.buffer, self.index
        elif index == -1 and buffer not in (MscclBuffer.input, MscclBuffer.output):
            index = self.prog.end_of_scratch(dst, buffer)
        # As in msccl-tools: a collective's own rule for places is applied for the sender's rank first. By that of an
        # all-gather in place, -1 may be the chunk before the sender's own.
        asked = buffer
        buffer, index = self.prog.collective.get_buffer_index(self.rank, buffer, index)
        if index == -1:
            raise ScriptError(f"{script_line()}: a copy to {asked!r} needs an index")
        destination = self.prog.get_ref(dst, buffer, index, self.size)
        self.prog.perform(OperationKind.COPY, self, destination, sendtb, recvtb, ch)
        return destination

    def reduce(self, other_chunkref: "Ref", sendtb: int = -1, recvtb: int = -1, ch: int = -1) -> "Ref":
        """Add other chunks to these, in place; returns this reference."""
        if not isinstance(other_chunkref, Ref):
            raise ScriptError(f"{script_line()}: reduce() takes what chunk() returns, not {other_chunkref!r}")
        if other_chunkref.size != self.size:
            raise ScriptError(f"{script_line()}: {other_chunkref} and {self} differ in size")
        self.prog.perform(OperationKind.REDUCE, other_chunkref, self, sendtb, recvtb, ch)
        return self

    def split(self, num: int) -> "list[Ref]":
        """These chunks as `num` references of equal sizes."""
        if num < 1 or self.size % num:
            raise ScriptError(f"{script_line()}: {self.size} chunks cannot be split into {num} equal parts")
        size = self.size // num
        return [Ref(self.rank, self.buffer, self.index + part * size, size, self.prog) for part in range(num)]

    def group(self, other: "Ref") -> "Ref":
        """One reference to these chunks, those of `other` in the same buffer, and all chunks between them."""
        if (self.rank, self.buffer) != (other.rank, other.buffer):
            raise ScriptError(f"{script_line()}: {self} and {other} are not in one buffer")
        first = min(self.index, other.index)
        end = max(self.index + self.size, other.index + other.size)
        return Ref(self.rank, self.buffer, first, end - first, self.prog)

    def get_origin_rank(self, index: int = 0) -> int:
        """The rank on which the chunk there started."""
        return self._held(index).origin_rank

    def get_origin_index(self, index: int = 0) -> int:
        """The input index at which the chunk there started."""
        return self._held(index).origin_index

    def get_dst_rank(self, index: int = 0) -> int:
        """The rank on which the chunk there is to end."""
        return self._held(index).dst_rank

    def get_dst_index(self, index: int = 0) -> int:
        """The output index at which the chunk there is to end."""
        return self._held(index).dst_index

    def print_chunk_info(self, index: int = 0) -> None:
        """Print what one place holds."""
        print(self._held(index))

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("put", "get", "signal", "wait"):
            raise ScriptError(f"{script_line()}: {name}() {_MSCCLPP}")
        raise AttributeError(f"a reference to chunks has no {name}")

    @property
    def place(self) -> ChunkRange:
        return ChunkRange(self.rank, self.buffer, self.index, self.size)

    def _held(self, index: int) -> Any:
        (held,) = self.prog.read(ChunkRange(self.rank, self.buffer, self.index + index, 1))
        return held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and self.place == other.place and self.prog is other.prog

    def __repr__(self) -> str:
        return str(self.place)


class MSCCLProgram:
    """A program, traced while its `with` is open. The parameters are those of msccl-tools.

    check_xml and dependence_nop are accepted and ignored: our compiler always checks, and places waits itself.
    """

    def __init__(
        self,
        name: str,
        topo: Any,
        collective: MscclCollective,
        instances: int,
        protocol: str = "Simple",
        threadblock_policy: ThreadblockPolicy = ThreadblockPolicy.auto,
        interleaved_replication: bool = True,
        instr_fusion: bool = True,
        check_xml: bool = True,
        dependence_nop: bool = False,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise ScriptError(f"{script_line()}: the protocols are {', '.join(PROTOCOLS)}, not {protocol!r}")
        if not isinstance(collective, MscclCollective):
            raise ScriptError(f"{script_line()}: {collective!r} is no Collective of msccl.language.collectives")
        nodes, ranks = topo.num_nodes(), collective.num_ranks
        if nodes != ranks:
            raise ScriptError(f"{script_line()}: the topology has {nodes} nodes, the collective {ranks} ranks")
        self.name = name
        self.topo = topo
        self.collective = collective
        self.num_ranks = collective.num_ranks
        self.instances = instances
        self.protocol = protocol
        self.threadblock_policy = threadblock_policy
        self.interleaved_replication = interleaved_replication
        self.instr_fusion = instr_fusion
        self.check_xml = check_xml
        self.dependence_nop = dependence_nop
        self.buffers = collective.init_buffers()
        self.line = script_line()
        self.notes: tuple[str, ...] = ()
        self.was_left = False
        self._filled = tuple(
            tuple(chunk is not None for chunk in buffers.get(MscclBuffer.input, ())) for buffers in self.buffers
        )
        self._operations: list[Recorded] = []
        self._compiled: tuple[int, Schedule] | None = None

    def __enter__(self) -> "MSCCLProgram":
        run = current_run.get()
        if run is None:
            raise ScriptError(f"{script_line()}: a program is traced in a run of its script only")
        if run.current is not None:
            raise ScriptError(f"{script_line()}: the program {run.current.name!r} is still open")
        run.current = self
        if self not in run.programs:
            run.programs.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = current_run.get()
        assert run is not None
        run.current = None
        self.was_left = True
        if kind is not None and not issubclass(kind, SystemExit):
            # A program that an error cut short does not count, even if the script catches the error.
            run.programs.remove(self)

    def get_ref(self, rank: int, buffer: Hashable, index: int, size: int) -> Ref:
        """A reference to a place, under the name that the collective has for it."""
        rank = self._rank(rank)
        buffer, index = self.collective.get_buffer_index(rank, buffer, _number(index, "an index"))
        return Ref(rank, buffer, index, _number(size, "a size"), self)

    def end_of_scratch(self, rank: int, buffer: Hashable) -> int:
        """The index after the last chunk of a scratch buffer: 0 where there is none of that name."""
        return len(self.buffers[self._rank(rank)].get(buffer, ()))

    def read(self, place: ChunkRange) -> list[Any]:
        """The content of a place. Raises ScriptError if a chunk is missing."""
        held = self.buffers[place.rank].get(place.buffer, ())
        if place.start < 0 or place.size < 1:
            raise ScriptError(f"{script_line()}: chunks are counted from 0, at least one of them: not {place}")
        if place.buffer in (MscclBuffer.input, MscclBuffer.output) and place.start + place.size > len(held):
            raise ScriptError(f"{script_line()}: {place} is out of bounds: there are {len(held)} chunks")
        for index in range(place.start, place.start + place.size):
            if index >= len(held) or held[index] is None:
                missing = ChunkRange(place.rank, place.buffer, index, 1)
                raise ScriptError(f"{script_line()}: {missing} holds nothing yet: copy a chunk there first")
        return list(held[place.start : place.start + place.size])

    def perform(
        self, kind: OperationKind, source: Ref, destination: Ref, sendtb: int, recvtb: int, channel: int
    ) -> None:
        """Perform a copy or a reduce on the buffers, and record it."""
        sender, receiver = source.rank, destination.rank
        if sender != receiver and not self.topo.link(sender, receiver):
            name = getattr(self.topo, "name", "the topology")
            raise ScriptError(f"{script_line()}: {name} has no link from rank {sender} to rank {receiver}")
        chunks = self.read(source.place)
        if kind is OperationKind.REDUCE:
            there = self.read(destination.place)
            chunks = [chunk.reduce(receiver, sent) for chunk, sent in zip(there, chunks, strict=True)]
        written = self._written(destination)
        if sender == receiver and self.buffers[sender][source.buffer] is written:
            if kind is OperationKind.COPY and source.index == destination.index:
                return
            if abs(source.index - destination.index) < source.size:
                raise ScriptError(f"{script_line()}: {source} and {destination} overlap")
        for index, chunk in enumerate(chunks, destination.index):
            written[index] = chunk
        self._operations.append(
            Recorded(
                kind,
                source.place,
                destination.place,
                self._channel(channel),
                (self._thread_block(sendtb, "sendtb"), self._thread_block(recvtb, "recvtb")),
                script_line(),
            )
        )

    def compile(self) -> Schedule:
        """Compile the trace so far. Raises ScriptError if that is not possible."""
        if self._compiled is not None and self._compiled[0] == len(self._operations):
            return self._compiled[1]
        lowered = lower(
            self.collective, self.buffers, self._filled, tuple(self._operations), f"{self.line}: {self.name}"
        )
        self.notes = lowered.notes
        if not self.interleaved_replication and self.instances > 1 and not is_index_wise(lowered.program.collective):
            raise ScriptError(
                f"{self.line}: {self.name}: interleaved_replication=False with {self.instances} instances changes "
                "what a collective does unless it treats all chunks alike, as an all-reduce does: leave it out"
            )
        try:
            schedule = compile_program(
                lowered.program,
                name=str(self.name),
                protocol=self.protocol,
                instances=_number(self.instances, "instances"),
                fusion=self.instr_fusion,
            )
        except ScriptError:
            raise
        except ValueError as error:
            raise ScriptError(f"{self.line}: {self.name}: {error}") from error
        self._compiled = len(self._operations), schedule
        return schedule

    def check(self) -> bool | None:
        """The result of the collective's own check of the buffers."""
        return self.collective.check(self)

    def generate_xml(self) -> str:
        return to_xml(self.compile())

    def lower(self) -> None:
        """Not supported."""
        raise ScriptError(f"{script_line()}: lower() gives msccl-tools' own IR, which is not here: use generate_xml()")

    def _rank(self, rank: int) -> int:
        number = _number(rank, "a rank")
        if not 0 <= number < self.num_ranks:
            raise ScriptError(f"{script_line()}: there is no rank {rank}: there are 0 to {self.num_ranks - 1}")
        return number

    def _written(self, destination: Ref) -> Any:
        """The buffer that an operation writes to, extended to be long enough."""
        buffers = self.buffers[destination.rank]
        is_scratch = destination.buffer not in (MscclBuffer.input, MscclBuffer.output)
        if is_scratch and not isinstance(buffers.get(destination.buffer), ScratchBuffer):
            buffers[destination.buffer] = ScratchBuffer(destination.buffer, buffers.get(destination.buffer, ()))
        if is_scratch and destination.index + destination.size > MAX_CHUNKS:
            raise ScriptError(f"{script_line()}: {destination} is out of bounds: scratch has up to {MAX_CHUNKS} chunks")
        written = buffers.get(destination.buffer, ())
        if destination.index < 0 or (not is_scratch and destination.index + destination.size > len(written)):
            raise ScriptError(f"{script_line()}: {destination} is out of bounds: there are {len(written)} chunks")
        return written

    def _channel(self, channel: int) -> int | None:
        if _number(channel, "a channel") >= 0:
            return channel
        return 0 if self.threadblock_policy is ThreadblockPolicy.manual else None

    def _thread_block(self, number: int, what: str) -> int | None:
        if self.threadblock_policy is not ThreadblockPolicy.manual or _number(number, what) < 0:
            return None
        return number


def _number(value: Any, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ScriptError(f"{script_line()}: {what} is a whole number, not {value!r}") from None


def _program() -> MSCCLProgram:
    run = current_run.get()
    if run is None or run.current is None:
        raise ScriptError(f"{script_line()}: this is a statement of a program: use it inside `with MSCCLProgram(...)`")
    return run.current


def chunk(rank: int, buffer: Hashable, index: int, size: int = 1) -> Ref | None:
    """A reference to `size` chunks of a rank's buffer from `index` on; None if nothing is at `index`."""
    program = _program()
    reference = program.get_ref(rank, buffer, index, size)
    held = program.buffers[reference.rank].get(reference.buffer, ())
    if 0 <= reference.index < len(held) and held[reference.index] is None:
        return None
    program.read(reference.place)
    return reference


def XML() -> None:
    """Print the program's schedule as MSCCL XML."""
    print(_program().generate_xml())


def Check() -> bool | None:
    """Check that the buffers satisfy the collective's postcondition."""
    return _program().check()


def Json() -> None:
    """Not supported."""
    raise ScriptError(f"{script_line()}: Json() writes a plan for MSCCL++, which is not supported: use XML()")


def create_scratch(rank: int, name: Hashable) -> None:
    """Do nothing: a scratch buffer exists once something is copied to it."""
    _program()
