# SPDX-License-Identifier: Apache-2.0
"""The schedule: what every thread block of every rank does, step by step. It is verified, stored and run.

MSCCL-IR of MSCCLang, section 5, as its runtimes read it. A step with a receive takes the next message of
the connection (receive peer, channel); one with a send adds the next message to the connection (send peer, channel).
"source" is the local chunk that a step reads, "destination" the local chunk that it writes:

    s    send source                       rrs   send received + source
    r    store received at destination     rrc   store received + source at destination
    rcs  as r, and send it on              rrcs  as rrc, and send it on
    cpy  store source at destination       re    store destination + source at destination
    nop  nothing but wait
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from stretto.collectives.collective import Buffer, Collective

PROTOCOLS = {"Simple": 2, "LL": 8, "LL128": 8}
"""The protocols, each with its FIFO slots a connection: the messages that may be in flight."""


class StepType(StrEnum):
    """The kinds of steps, by their names in schedule files."""

    SEND = "s"
    RECEIVE = "r"
    RECEIVE_COPY_SEND = "rcs"
    RECEIVE_REDUCE_SEND = "rrs"
    RECEIVE_REDUCE_COPY = "rrc"
    RECEIVE_REDUCE_COPY_SEND = "rrcs"
    COPY = "cpy"
    REDUCE = "re"
    NOP = "nop"

    @property
    def sends(self) -> bool:
        """True if it adds a message to its thread block's send connection."""
        return self in _SENDS

    @property
    def receives(self) -> bool:
        """True if it takes a message from its thread block's receive connection."""
        return self in _RECEIVES

    @property
    def reads_source(self) -> bool:
        """True if it reads the local chunks at its source."""
        return self in _READS_SOURCE

    @property
    def writes_destination(self) -> bool:
        """True if it writes the local chunks at its destination."""
        return self in _WRITES

    @property
    def reduces(self) -> bool:
        """True if it adds two chunks."""
        return self in _REDUCES


_T = StepType
_SENDS = frozenset({_T.SEND, _T.RECEIVE_COPY_SEND, _T.RECEIVE_REDUCE_SEND, _T.RECEIVE_REDUCE_COPY_SEND})
_RECEIVES = frozenset(
    {_T.RECEIVE, _T.RECEIVE_COPY_SEND, _T.RECEIVE_REDUCE_SEND, _T.RECEIVE_REDUCE_COPY, _T.RECEIVE_REDUCE_COPY_SEND}
)
_REDUCES = frozenset({_T.RECEIVE_REDUCE_SEND, _T.RECEIVE_REDUCE_COPY, _T.RECEIVE_REDUCE_COPY_SEND, _T.REDUCE})
_READS_SOURCE = _REDUCES | {_T.SEND, _T.COPY}
_WRITES = frozenset(
    {_T.RECEIVE, _T.RECEIVE_COPY_SEND, _T.RECEIVE_REDUCE_COPY, _T.RECEIVE_REDUCE_COPY_SEND, _T.COPY, _T.REDUCE}
)


class Step(NamedTuple):
    """One step: its type, its chunks and the step that it waits for.

    source, destination and size are in chunks; -1 where the type does not use one. waits_for: the thread
    block of the same rank and the step there that must have ended before; awaited: whether another step waits for
    this one, so that its end must be published.
    """

    type: StepType
    source_buffer: Buffer = Buffer.IN
    source: int = -1
    destination_buffer: Buffer = Buffer.OUT
    destination: int = -1
    size: int = 0
    waits_for: tuple[int, int] | None = None
    awaited: bool = False


class ThreadBlock(NamedTuple):
    """A thread block: at most one peer to send to and one to receive from, over one channel, and its steps."""

    send_peer: int | None
    receive_peer: int | None
    channel: int
    steps: tuple[Step, ...]


class RankProgram(NamedTuple):
    """One rank's part of a schedule, with the numbers of chunks of its three buffers.

    copies: the (input chunk, output chunk) pairs that are copied before any step runs.
    """

    input_chunks: int
    output_chunks: int
    scratch_chunks: int
    thread_blocks: tuple[ThreadBlock, ...]
    copies: tuple[tuple[int, int], ...] = ()

    def chunks(self, buffer: Buffer) -> int:
        """The number of chunks of a buffer."""
        match buffer:
            case Buffer.IN:
                return self.input_chunks
            case Buffer.OUT:
                return self.output_chunks
            case Buffer.SCRATCH:
                return self.scratch_chunks


@dataclass(frozen=True)
class Schedule:
    """A collective's schedule on every rank.

    in_place, out_of_place: which of the two it is meant for (with buffers that share memory, or that do not);
    min_bytes, max_bytes: the sizes that it is meant for (max_bytes 0: any); protocol: a key of PROTOCOLS; reduction:
    "sum", "max", "min" or "prod", None if the caller chooses; attributes: further attributes of its file.
    """

    name: str
    collective: Collective
    protocol: str
    ranks: tuple[RankProgram, ...]
    in_place: bool = True
    out_of_place: bool = False
    min_bytes: int = 0
    max_bytes: int = 0
    reduction: str | None = None
    attributes: tuple[tuple[str, str], ...] = field(default=())

    @property
    def channels(self) -> int:
        """The number of channels that it uses."""
        return max((block.channel for rank in self.ranks for block in rank.thread_blocks), default=0) + 1

    @property
    def steps(self) -> int:
        """The number of steps of all thread blocks."""
        return sum(len(block.steps) for rank in self.ranks for block in rank.thread_blocks)

    @property
    def slots(self) -> int:
        """The FIFO slots of its protocol."""
        return PROTOCOLS[self.protocol]
