# SPDX-License-Identifier: Apache-2.0
"""Reads and writes schedules as MSCCL XML, the format of MSCCL, RCCL and msccl-tools.

Files are untrusted: no entities, no document types, no more bytes, ranks or chunks than the limits, and every attribute
is checked. An error is one line that says where.
"""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from xml.sax.saxutils import quoteattr

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser, ParseError

from stretto.atomic_files import write_atomically
from stretto.cluster import read_bounded
from stretto.collectives import collective as collectives
from stretto.collectives.collective import MAX_CHUNKS, MAX_PLACES, MAX_RANKS, Buffer, Collective
from stretto.collectives.schedule import PROTOCOLS, RankProgram, Schedule, Step, StepType, ThreadBlock

MAX_FILE_BYTES = 128 * 2**20
MAX_CHANNELS = 2**15
MAX_HANDLED = 2**24
"""The chunks that all steps of a file handle together."""
MAX_TOKEN_BYTES = 4 * 2**20
"""The longest tag or comment of a file: one that arrives piece by piece is looked at from its start each time."""
REDUCTIONS = ("sum", "max", "min", "prod")

_LETTERS = {Buffer.IN: "i", Buffer.OUT: "o", Buffer.SCRATCH: "s"}
_BUFFERS = {letter: buffer for buffer, letter in _LETTERS.items()}
_TYPES = {type.value: type for type in StepType}
_NO_XML = re.compile("[^\t\n\r\\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NUMBER = re.compile(r"-?[0-9]{1,19}")
_IS_JSON = (
    "it looks like JSON, as plans of MSCCL++ are, which are not supported: a schedule is MSCCL XML, which "
    "`stretto collective compile` makes of copy() and reduce(), and XML() in msccl-tools"
)
_KNOWN = {"name", "proto", "nchannels", "nchunksperloop", "ngpus", "coll", "inplace", "outofplace", "minBytes"}
_KNOWN |= {"maxBytes", "redop", "root"}


class ScheduleFileError(ValueError):
    """A file that is no schedule; the message says where and why, in one line."""


# ---------------------------------------------------------------------------------------------------------- writing


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write a schedule to a file that MSCCL, RCCL and `read_schedule` read."""
    write_atomically(path, to_xml(schedule))


def to_xml(schedule: Schedule) -> str:
    """Write a schedule as MSCCL XML. Of its `attributes`, those that the format has anyway are not repeated."""
    collective = schedule.collective
    algo = {
        "name": schedule.name,
        "proto": schedule.protocol,
        "nchannels": schedule.channels,
        "nchunksperloop": collective.chunks_per_loop,
        "ngpus": collective.ranks,
        "coll": collective.name,
        "inplace": int(schedule.in_place),
        "outofplace": int(schedule.out_of_place),
        "minBytes": schedule.min_bytes,
        "maxBytes": schedule.max_bytes,
    }
    if schedule.reduction is not None:
        algo["redop"] = schedule.reduction
    if collective.root:
        algo["root"] = collective.root
    algo |= {name: value for name, value in schedule.attributes if name not in algo}
    # RCCL's own parser takes one space between attributes, double quotes, and a tag a line.
    lines = [f"<algo{_attributes(algo)}>"]
    for rank, program in enumerate(schedule.ranks):
        sizes = {
            "id": rank,
            "i_chunks": program.input_chunks,
            "o_chunks": program.output_chunks,
            "s_chunks": program.scratch_chunks,
        }
        lines.append(f"  <gpu{_attributes(sizes)}>")
        lines += [f'    <copy i_off="{source}" o_off="{destination}"/>' for source, destination in program.copies]
        for number, block in enumerate(program.thread_blocks):
            peers = {
                "id": number,
                "send": -1 if block.send_peer is None else block.send_peer,
                "recv": -1 if block.receive_peer is None else block.receive_peer,
                "chan": block.channel,
            }
            lines.append(f"    <tb{_attributes(peers)}>")
            lines += [_step_line(at, step) for at, step in enumerate(block.steps)]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    lines.append("</algo>\n")
    return "\n".join(lines)


def _attributes(values: dict[str, Any]) -> str:
    for name, value in values.items():
        if found := _NO_XML.search(str(value)):
            raise ValueError(f"{name} {str(value)[:40]!r} has a character that XML does not: {found[0]!r}")
    return "".join(f" {name}={quoteattr(str(value), {chr(34): '&quot;'})}" for name, value in values.items())


def _step_line(at: int, step: Step) -> str:
    block, awaited = (-1, -1) if step.waits_for is None else step.waits_for
    return (
        f'      <step s="{at}" type="{step.type.value}" srcbuf="{_LETTERS[step.source_buffer]}" srcoff="{step.source}" '
        f'dstbuf="{_LETTERS[step.destination_buffer]}" dstoff="{step.destination}" cnt="{step.size}" '
        f'depid="{block}" deps="{awaited}" hasdep="{int(step.awaited)}"/>'
    )


# ---------------------------------------------------------------------------------------------------------- reading


def read_schedule(
    path: str | Path, *, max_bytes: int = MAX_FILE_BYTES, collective: Collective | None = None
) -> Schedule:
    """Read a schedule from a file, as `from_xml` does from text. Raises OSError if the file cannot be read, and
    ScheduleFileError for more than `max_bytes`. collective: the conditions of one that the file does not name."""
    try:
        text = read_bounded(Path(path), max_bytes, "a schedule")
    except ValueError as error:
        raise ScheduleFileError(str(error)) from None
    return from_xml(text, str(path), collective=collective)


def from_xml(text: bytes | str, origin: str = "schedule", *, collective: Collective | None = None) -> Schedule:
    """Read a schedule from MSCCL XML.

    origin: what errors call it; collective: the conditions to take, where the file has no name for them ("coll") or
    not one that is known here. ScheduleFileError for anything but a schedule.
    """
    reader = _Reader(origin, collective)
    parser = DefusedXMLParser(target=reader, forbid_dtd=True)
    reader.line = lambda: parser.parser.CurrentLineNumber
    source = io.BytesIO(text.encode() if isinstance(text, str) else text)
    try:
        while piece := source.read(2**20):
            parser.feed(piece)
            if source.tell() - parser.parser.CurrentByteIndex > MAX_TOKEN_BYTES + len(piece):
                raise ScheduleFileError(f"{origin}:{reader.line()}: a tag or comment of over {MAX_TOKEN_BYTES} bytes")
        parser.close()
    except DefusedXmlException:
        raise ScheduleFileError(f"{origin}:{reader.line()}: a schedule has no document type and no entities") from None
    except ParseError as error:
        line, _ = error.position
        beginning = source.getvalue()[:64].lstrip()
        why = _IS_JSON if beginning.startswith((b"{", b"[")) else str(error).split(":")[0]
        raise ScheduleFileError(f"{origin}:{line}: not XML: {why}") from None
    except (LookupError, UnicodeError, ValueError) as error:
        if isinstance(error, ScheduleFileError):
            raise
        # expat raises this for an encoding that it does not know.
        raise ScheduleFileError(f"{origin}:{reader.line()}: not XML: {str(error).splitlines()[0][:200]}") from None
    return reader.schedule()


def read_ranks(path: Path) -> int | None:
    """The number of ranks that a file's first element gives, from the file's first 64 KiB; None where it gives none.

    The rest is not looked at: a schedule for hundreds of ranks has many megabytes. Raises OSError as `read_schedule`.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        beginning = file.read(2**16)
    head = _AlgoHeader()
    with contextlib.suppress(DefusedXmlException, ParseError, LookupError, ValueError):
        DefusedXMLParser(target=head, forbid_dtd=True).feed(beginning)
    text = head.attributes.get("ngpus", "")
    return int(text) if _NUMBER.fullmatch(text) else None


class _AlgoHeader:
    """Takes the attributes of a file's first element, if that is <algo>."""

    def __init__(self) -> None:
        self.attributes: dict[str, str] = {}
        self._has_begun = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """An element begins."""
        if not self._has_begun and tag == "algo":
            self.attributes = attributes
        self._has_begun = True


class _Reader:
    """Reads a file's elements one by one, and keeps only what belongs to a schedule."""

    def __init__(self, origin: str, collective: Collective | None) -> None:
        self.line: Callable[[], int] = lambda: 1
        self._origin = origin
        self._given = collective
        self._open: list[str] = []
        self._algo: dict[str, str] = {}
        self._ranks: dict[int, RankProgram] = {}
        self._rank = 0
        self._scratch = 0
        self._handled = 0
        self._sizes = (0, 0, 0)
        self._copies: list[tuple[int, int]] = []
        self._blocks: dict[int, ThreadBlock] = {}
        self._block = 0
        self._peers: tuple[int | None, int | None, int] = (None, None, 0)
        self._steps: list[Step] = []
        self._collective: Collective | None = None

    # Callbacks of the parser.

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        """An element begins."""
        match self._open, tag:
            case [], "algo":
                self._start_algo(attributes)
            case ["algo"], "gpu":
                self._start_gpu(attributes)
            case ["algo", "gpu"], "copy":
                self._add_copy(attributes)
            case ["algo", "gpu"], "tb":
                self._start_block(attributes)
            case ["algo", "gpu", "tb"], "step":
                self._add_step(attributes)
            case _:
                inside = f" inside <{self._open[-1]}>" if self._open else ""
                self._refuse(f"<{tag[:40]}>{inside} is no part of a schedule")
        self._open.append(tag)

    def end(self, tag: str) -> None:
        """An element ends."""
        self._open.pop()
        if tag == "tb":
            send, receive, channel = self._peers
            self._blocks[self._block] = ThreadBlock(send, receive, channel, tuple(self._steps))
            self._steps = []
        elif tag == "gpu":
            count = len(self._blocks)
            for number in range(count):
                if number not in self._blocks:
                    self._refuse(f"gpu {self._rank} has {count} thread blocks, but none with id {number}")
            blocks = tuple(self._blocks[number] for number in range(count))
            self._ranks[self._rank] = RankProgram(*self._sizes, blocks, tuple(self._copies))
            self._blocks, self._copies = {}, []

    def data(self, text: str) -> None:
        """Text between elements."""
        if not text.isspace():
            self._refuse(f"{text.strip()[:40]!r} is no part of a schedule")

    def comment(self, text: str) -> None:
        """A comment."""

    def close(self) -> None:
        """The text ends."""

    # The elements.

    def _start_algo(self, attributes: dict[str, str]) -> None:
        self._algo = attributes
        ranks = self._number(attributes, "ngpus", 1, MAX_RANKS)
        chunks = self._number(attributes, "nchunksperloop", 0, MAX_CHUNKS)
        self._number(attributes, "nchannels", 0, MAX_CHANNELS)
        for name in ("inplace", "outofplace"):
            self._number(attributes, name, 0, 1, default=0)
        for name in ("minBytes", "maxBytes"):
            self._number(attributes, name, 0, 2**63 - 1, default=0)
        self._number(attributes, "root", 0, ranks - 1, default=0)
        if self._word(attributes, "proto") not in PROTOCOLS:
            self._refuse(f"proto is one of {', '.join(PROTOCOLS)}, not {attributes['proto'][:40]!r}")
        # Some write a "nop" for collectives that add nothing.
        if attributes.get("redop", "nop") not in (*REDUCTIONS, "nop"):
            self._refuse(f"redop is one of {', '.join(REDUCTIONS)} or nop, not {attributes['redop'][:40]!r}")
        self._word(attributes, "name", anything=True)
        self._collective = self._find_collective(ranks, chunks)

    def _find_collective(self, ranks: int, chunks: int) -> Collective:
        if self._given is not None:
            if (self._given.ranks, self._given.chunks_per_loop) != (ranks, chunks):
                self._refuse(
                    f"the collective that was given has {self._given.ranks} ranks and {self._given.chunks_per_loop} "
                    f"chunks, but the file {ranks} and {chunks}"
                )
            try:
                self._given.require_conditions()
            except ValueError as error:
                self._refuse(str(error))
            return self._given
        name = self._algo.get("coll")
        if not name:
            self._refuse("algo: coll is missing: give the collective that it is")
        root = int(self._algo.get("root", "0"))
        try:
            return named_collective(name, ranks, chunks, root)
        except ValueError as error:
            self._refuse(str(error))

    def _start_gpu(self, attributes: dict[str, str]) -> None:
        assert self._collective is not None
        self._rank = self._number(attributes, "id", 0, self._collective.ranks - 1)
        if self._rank in self._ranks:
            self._refuse(f"gpu {self._rank} is there twice")
        sizes = [self._number(attributes, f"{letter}_chunks", 0, MAX_CHUNKS) for letter in "ios"]
        self._sizes = sizes[0], sizes[1], sizes[2]
        self._scratch += sizes[2]
        if self._scratch > MAX_PLACES:
            self._refuse(f"gpu {self._rank}: more than {MAX_PLACES} chunks of scratch in all")

    def _add_copy(self, attributes: dict[str, str]) -> None:
        self._copies.append(
            (
                self._number(attributes, "i_off", 0, max(0, self._sizes[0] - 1)),
                self._number(attributes, "o_off", 0, max(0, self._sizes[1] - 1)),
            )
        )

    def _start_block(self, attributes: dict[str, str]) -> None:
        assert self._collective is not None
        self._block = self._number(attributes, "id", 0, MAX_CHUNKS)
        if self._block in self._blocks:
            self._refuse(f"gpu {self._rank} has thread block {self._block} twice")
        peers: list[int | None] = []
        for name in ("send", "recv"):
            peer = self._number(attributes, name, -1, self._collective.ranks - 1)
            if peer == self._rank:
                self._refuse(f"gpu {self._rank}, thread block {self._block}: {name} is the gpu itself")
            peers.append(None if peer < 0 else peer)
        self._peers = peers[0], peers[1], self._number(attributes, "chan", 0, MAX_CHANNELS - 1)

    def _add_step(self, attributes: dict[str, str]) -> None:
        at = len(self._steps)
        if (number := self._number(attributes, "s", 0, MAX_CHUNKS)) != at:
            self._refuse(f"{self._here()}: s is {number}, but this is its step {at}")
        type = _TYPES.get(self._word(attributes, "type"))
        if type is None:
            self._refuse(f"{self._here()}: type is one of {', '.join(_TYPES)}, not {attributes['type'][:40]!r}")
        size = self._number(attributes, "cnt", 0, MAX_CHUNKS)
        self._handled += size
        if self._handled > MAX_HANDLED:
            self._refuse(f"{self._here()}: the steps so far handle more than {MAX_HANDLED} chunks")
        block = self._number(attributes, "depid", -1, MAX_CHUNKS)
        step = self._number(attributes, "deps", -1, MAX_CHUNKS)
        if (block < 0) != (step < 0):
            self._refuse(f"{self._here()}: depid and deps are both -1 or both not: {block}, {step}")
        self._steps.append(
            Step(
                type,
                self._buffer(attributes, "srcbuf"),
                self._number(attributes, "srcoff", -1, MAX_CHUNKS),
                self._buffer(attributes, "dstbuf"),
                self._number(attributes, "dstoff", -1, MAX_CHUNKS),
                size,
                None if block < 0 else (block, step),
                bool(self._number(attributes, "hasdep", 0, 1)),
            )
        )

    def schedule(self) -> Schedule:
        """The schedule, once the whole text was read."""
        collective = self._collective
        if collective is None:
            raise ScheduleFileError(f"{self._origin}: there is no <algo>")
        for rank in range(collective.ranks):
            if rank not in self._ranks:
                raise ScheduleFileError(f"{self._origin}: there is no gpu {rank}: ngpus is {collective.ranks}")
        algo = self._algo
        in_place = algo.get("inplace", "0") == "1"
        # Files from before there was an "outofplace" say with "inplace" alone which of the two they are for.
        out_of_place = algo["outofplace"] == "1" if "outofplace" in algo else not in_place
        if not in_place and not out_of_place:
            raise ScheduleFileError(f"{self._origin}: neither inplace nor outofplace is 1: it is meant for no call")
        return Schedule(
            algo["name"],
            collective,
            algo["proto"],
            tuple(self._ranks[rank] for rank in range(collective.ranks)),
            in_place=in_place,
            out_of_place=out_of_place,
            min_bytes=int(algo.get("minBytes", "0")),
            max_bytes=int(algo.get("maxBytes", "0")),
            reduction=None if algo.get("redop") == "nop" else algo.get("redop"),
            attributes=tuple((name, value) for name, value in algo.items() if name not in _KNOWN),
        )

    # Attributes.

    def _number(self, attributes: dict[str, str], name: str, low: int, high: int, default: int | None = None) -> int:
        text = attributes.get(name)
        if text is None:
            if default is not None:
                return default
            self._refuse(f"{self._here()}: {name} is missing")
        if _NUMBER.fullmatch(text) is None:
            self._refuse(f"{self._here()}: {name} is a whole number, not {text[:40]!r}")
        number = int(text)
        if not low <= number <= high:
            self._refuse(f"{self._here()}: {name} is {number}, but must be from {low} to {high}")
        return number

    def _word(self, attributes: dict[str, str], name: str, anything: bool = False) -> str:
        text = attributes.get(name)
        if text is None or (not text and not anything):
            self._refuse(f"{self._here()}: {name} is missing")
        return text

    def _buffer(self, attributes: dict[str, str], name: str) -> Buffer:
        buffer = _BUFFERS.get(self._word(attributes, name))
        if buffer is None:
            self._refuse(f"{self._here()}: {name} is one of {', '.join(_BUFFERS)}, not {attributes[name][:40]!r}")
        return buffer

    def _here(self) -> str:
        match len(self._open):
            case 0:
                return "algo"
            case 1:
                return "gpu"
            case 2:
                return f"gpu {self._rank}"
            case _:
                return f"gpu {self._rank}, thread block {self._block}, step {len(self._steps)}"

    def _refuse(self, why: str) -> NoReturn:
        raise ScheduleFileError(f"{self._origin}:{self.line()}: {why}")


def named_collective(name: str, ranks: int, chunks: int, root: int = 0) -> Collective:
    """The collective with this name in files, its larger buffer divided into `chunks` chunks.

    An unknown name gives one with unknown conditions: every output chunk may hold anything. Raises ValueError for
    chunks that the ranks cannot share.
    """
    match name.replace("_", "").lower():
        case "allreduce":
            return collectives.AllReduce(ranks, chunks)
        case "broadcast":
            return collectives.Broadcast(ranks, chunks, root)
        case "reduce":
            return collectives.Reduce(ranks, chunks, root)
        case "alltonext":
            return collectives.AllToNext(ranks, chunks)
        case "allgather" | "reducescatter" | "alltoall" as known:
            if chunks % ranks:
                raise ValueError(f"{name} over {ranks} ranks needs a multiple of {ranks} chunks a loop, not {chunks}")
            make = {
                "allgather": collectives.AllGather,
                "reducescatter": collectives.ReduceScatter,
                "alltoall": collectives.AllToAll,
            }[known]
            return make(ranks, chunks // ranks)
        case _:
            return Collective(name, ranks, chunks, chunks, lambda rank, index: None, is_unknown=True)
