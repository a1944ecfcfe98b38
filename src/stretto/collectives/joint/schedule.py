# SPDX-License-Identifier: Apache-2.0
"""Joint schedules: a collective's instructions and a GEMM's tiles over the same chunks of rows.

A rank's instructions are moves: a sum of rows (of its input, and of what has come) goes to places of ranks. Its tiles
are rows of the product. Both name the signals that they wait for and that they give, all derived from a collective's
schedule and the sizes of a call (`join`):

    all-gather + GEMM                            GEMM + reduce-scatter, GEMM + all-reduce

    x --move--> gathered rows ...                tile --> product --move--> a peer's mailbox
                  | signal                         | signal                   | signal
                  v                                v                          v
          tile of these rows --> out              moves of these rows       sum with own product --move--> ...

A message has memory of its own, where nothing else is written in the call, so no move waits for a place. A chunk that
is gathered lies in its place among the gathered rows, and moves on from there. Element i of a chunk depends on element
i of others alone: a program does the same elements of all of a rank's moves, in their order.

`rewrite` has other forms of a joint schedule. Between nodes rows are put (`cross_nodes`): the receiver stores them in
their place, and gives the move's signal to itself. Waits cannot form a cycle: moves of all ranks follow one order, the
verified schedule's, level by level. `verify_joint` proves it, and that every tile and every move has its data, of the
tables that will run.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.collective import AllGather, AllReduce, AllToAll, Buffer, Collective, ReduceScatter
from stretto.collectives.executor.cuda.fused.program import (
    ChunkPlace,
    FusedRankProgram,
    ReduceChunks,
    SendChunk,
    lower_to_fused_program,
)
from stretto.collectives.executor.layout import count_block_chunks
from stretto.collectives.schedule import Schedule
from stretto.suggestions import name_known

COLLECTIVES = {
    "all_gather_matmul": "allgather",
    "all_gather_attention": "allgather",
    "matmul_reduce_scatter": "reducescatter",
    "matmul_all_reduce": "allreduce",
    "matmul_all_to_all": "alltoall",
    "dispatch_grouped_matmul": "alltoall",
    "embedding_all_to_all": "alltoall",
}
"""The collective of each operator that takes a schedule."""
ROUTED = ("dispatch_grouped_matmul", "embedding_all_to_all")
"""The operators whose chunks' sizes are known at run time alone: see `routed`."""

INPUT, LANDED, OUTPUT, NOWHERE = range(4)
"""Areas of a rank's memory: what the collective begins with (x, or the product), what moves have brought, and the
output of a reduction. NOWHERE: nothing is written, and the receiver is only told that the rows may be pulled."""
NOBODY = -1


class Rows(NamedTuple):
    """Rows from start to stop of an area."""

    area: int
    start: int
    stop: int


class Source(NamedTuple):
    """Rows that a move adds, and the signal that says they are there: `sender`'s on `channel`, or NOBODY's.

    Where it waits for none, they were there at the beginning, or an earlier move of the same rank has written them.
    rank: in whose memory they are; NOBODY: the mover's own.
    """

    rows: Rows
    sender: int = NOBODY
    channel: int = NOBODY
    rank: int = NOBODY


class Destination(NamedTuple):
    """Rows of a rank's memory that a move writes, and the channel that it signals there; NOBODY: no one waits."""

    rank: int
    rows: Rows
    channel: int = NOBODY


class Move(NamedTuple):
    """The sum of its sources, in fp32 from left to right and rounded once, goes to all destinations."""

    sources: tuple[Source, ...]
    destinations: tuple[Destination, ...]


class RowTile(NamedTuple):
    """Rows of the product, of one chunk. A gather's waits for `sender`'s signal on `channel`, or, of x, for NOBODY's;
    others signal there."""

    start: int
    stop: int
    sender: int
    channel: int


class Receive(NamedTuple):
    """Rows that `sender`, of another node, puts to this rank, which stores them in their place and signals itself."""

    sender: int
    rows: Rows
    channel: int


class RankPlan(NamedTuple):
    """A rank's moves, tiles and receives, in the order in which programs take them."""

    moves: tuple[Move, ...]
    tiles: tuple[RowTile, ...]
    receives: tuple[Receive, ...] = ()


@dataclass(frozen=True, eq=False)
class JointSchedule:
    """A schedule joined with a product of `rows` rows (of this rank's for an all-gather, else of all ranks').

    landed_rows: of the area LANDED of each rank; channels: a rank's signals, of which one is of one chunk or message.
    needs: the gathered rows that each rank's tiles read, as ranges in order; None: all. pulls: receivers copy (`pull`).
    nodes: the number of each rank's node (`cross_nodes`); None: all are on one. reads_own: tiles of own rows read x
    itself, come first, and wait for no one (`read_own_rows`).
    """

    name: str
    operator: str
    rows: int
    block_rows: int
    ranks: tuple[RankPlan, ...]
    landed_rows: int
    channels: int
    needs: tuple[tuple[tuple[int, int], ...], ...] | None = None
    pulls: bool = False
    nodes: tuple[int, ...] | None = None
    reads_own: bool = False

    def list_near(self, rank: int) -> list[int]:
        """The ranks of a rank's node, itself among them."""
        nodes = self.nodes
        return [peer for peer in range(len(self.ranks)) if nodes is None or nodes[peer] == nodes[rank]]

    def find_giver(self, sender: int, receiver: int) -> int:
        """The rank that gives the signals of a sender's moves to a receiver: the receiver, if that is on another node.

        A receiver stores what was put to it, and then signals itself.
        """
        nodes = self.nodes
        return sender if nodes is None or sender == NOBODY or nodes[sender] == nodes[receiver] else receiver

    @property
    def is_gather(self) -> bool:
        """True if tiles read what has come; else moves send what tiles have made."""
        return is_gather(self.operator)

    @property
    def product_rows(self) -> int:
        """The rows of the product."""
        return self.rows * (len(self.ranks) if self.is_gather else 1)

    @property
    def output_rows(self) -> int:
        """The rows of a rank's output."""
        return self.rows // len(self.ranks) if self.operator == "matmul_reduce_scatter" else self.product_rows


class _ChunkRows(NamedTuple):
    """Maps a collective's chunks to rows: chunk i is the (i % per_block)-th of a block of so many rows."""

    per_block: int
    block_rows: int

    def rows(self, index: int) -> tuple[int, int]:
        """The first row of a chunk, and the one after its last."""
        chunk_rows = -(-self.block_rows // self.per_block)
        block, within = divmod(index, self.per_block)
        start, stop = (min(at * chunk_rows, self.block_rows) for at in (within, within + 1))
        return block * self.block_rows + start, block * self.block_rows + stop


def is_gather(operator: str) -> bool:
    """True if the operator gathers rows, rather than sums."""
    return COLLECTIVES[operator] == "allgather"


def require_operator(operator: str) -> None:
    """ValueError for an operator that takes no schedule."""
    if operator not in COLLECTIVES:
        raise ValueError(f"{operator!r} takes no schedule{name_known(operator, COLLECTIVES, 'these operators do')}")


def require_collective(operator: str, schedule: Schedule, ranks: int) -> None:
    """ValueError unless the schedule does the operator's collective, on so many ranks."""
    given, kind = schedule.collective, COLLECTIVES[operator]
    if not (schedule.in_place or schedule.out_of_place):  # of which `verify` proves nothing
        raise ValueError(f"{operator}: {schedule.name} is meant for no call: make in_place or out_of_place true")
    if kind not in ("allgather", "alltoall") and schedule.reduction not in (None, "sum"):
        raise ValueError(
            f"{operator} adds up, and {schedule.name} is a schedule of {schedule.reduction!r}: give one of a sum"
        )
    if given.ranks != ranks:
        raise ValueError(
            f"{operator}: {schedule.name} is a schedule of {given.ranks} ranks, and the group has {ranks}: compile it "
            "for as many"
        )
    wanted = _make_collective(kind, ranks, given)
    if wanted is None or any(
        sorted(given.expected(rank, index) or ()) != sorted(wanted.expected(rank, index) or ())
        for rank in range(ranks)
        for index in range(given.output_chunks)
    ):
        would_do = ", ".join(name for name in ALGORITHMS if name.replace("-", "").endswith(kind))
        raise ValueError(
            f"{operator} takes a schedule of an {kind}, and {schedule.name} is one of {given.name!r}: "
            f"of the algorithms these would do: {would_do}"
        )


def _make_collective(kind: str, ranks: int, like: Collective) -> Collective | None:
    """The collective of this kind with as many chunks as another one; None if there is none."""
    inputs, outputs = like.input_chunks, like.output_chunks
    match kind:
        case "allgather" if inputs >= 1 and outputs == ranks * inputs:
            return AllGather(ranks, inputs)
        case "reducescatter" if outputs >= 1 and inputs == ranks * outputs:
            return ReduceScatter(ranks, outputs)
        case "allreduce" if inputs == outputs >= 1:
            return AllReduce(ranks, inputs)
        case "alltoall" if inputs == outputs >= 1 and inputs % ranks == 0:
            return AllToAll(ranks, inputs // ranks)
    return None


@lru_cache(maxsize=256)
def join(operator: str, schedule: Schedule, rows: int, block_rows: int) -> JointSchedule:
    """Join a verified schedule of the operator's collective with a product in tiles of `block_rows` rows.

    rows: of x, on this rank. ValueError for a schedule that adds what it cannot keep exact (two sums of a rank's own).
    """
    collective = schedule.collective
    ranks = collective.ranks
    gathers = is_gather(operator)
    of_block = rows // ranks if operator in ("matmul_reduce_scatter", "matmul_all_to_all") else rows
    chunks = _ChunkRows(count_block_chunks(collective), of_block)
    fused = lower_to_fused_program(schedule, in_place=schedule.in_place)
    gathered = rows * ranks if gathers else 0
    lowerings = [
        _Lowering(schedule.name, fused.collective, program, chunks, gathered, is_gather=gathers)
        for program in fused.ranks
    ]
    plans = _lower(lowerings, max(len(program.levels) for program in fused.ranks))
    count = collective.output_chunks if gathers else collective.input_chunks
    channels = count + max(len(lowering.landing) for lowering in lowerings)
    orders = _order_chunks(plans, count, is_gather=gathers)
    tiles = tuple(
        tuple(_cut_tiles(chunks, order, lowering.arrivals if gathers else {}, lowering.rank, block_rows))
        for lowering, order in zip(lowerings, orders, strict=True)
    )
    landed = max(lowering.landed_rows for lowering in lowerings)
    return JointSchedule(
        schedule.name, operator, rows, block_rows, tuple(map(RankPlan, plans, tiles)), landed, channels
    )


class _Lowering:
    """One rank's moves while they are made.

    landing: the rows and the channel of each message that comes; arrivals: who brings each gathered chunk here.
    """

    def __init__(
        self,
        name: str,
        collective: Collective,
        program: FusedRankProgram,
        chunks: _ChunkRows,
        gathered_rows: int,
        *,
        is_gather: bool,
    ) -> None:
        self.rank, self.program = program.rank, program
        self.moves: list[Move] = []
        self.arrivals: dict[int, int] = {}
        self.landed_rows = gathered_rows
        self._name, self._chunks, self._is_gather = name, chunks, is_gather
        self._places = {
            buffer: {ChunkPlace(*collective.place(self.rank, buffer, index)): index for index in range(count)}
            for buffer, count in ((Buffer.IN, collective.input_chunks), (Buffer.OUT, collective.output_chunks))
        }
        self._index: dict[int, int] = {}  # of the chunk that each value is of
        self._sources: dict[int, tuple[Source, ...]] = {}
        levels = program.levels
        self._stores: dict[int, list[int]] = defaultdict(list)
        for store in (store for level in levels for store in level.stores):
            self._stores[store.value].append(self._places[Buffer.OUT][store.place])
        self._keep_in_place()
        operands = {side for level in levels for one in level.reduces for side in (one.left, one.right)}
        self._kept = operands & program.rounded  # sums that are added again as memory holds them
        self.landing = self._place_messages(collective.output_chunks if is_gather else collective.input_chunks)

    def _keep_in_place(self) -> None:
        """Add stores of the output chunks that, in place, hold their value from the beginning."""
        stored = {index for indices in self._stores.values() for index in indices}
        loads = {load.place: load.value for level in self.program.levels for load in level.loads}
        self._untouched: list[tuple[int, int]] = []  # (input chunk, output chunk)
        for place, index in self._places[Buffer.OUT].items():
            if index in stored:
                continue
            if place in loads:
                self._stores[loads[place]].append(index)
            else:
                self._untouched.append((self._places[Buffer.IN][place], index))

    def _place_messages(self, chunks: int) -> dict[int, tuple[int, int]]:
        """(first row, channel) of each message: that of the gathered chunk that it is, or memory of its own."""
        places = {}
        chunk_rows = -(-self._chunks.block_rows // self._chunks.per_block)
        for receive in (receive for level in self.program.levels for receive in level.receives):
            stored = self._stores.get(receive.value)
            if self._is_gather and stored:
                places[receive.message] = self._chunks.rows(stored[0])[0], stored[0]
            else:
                places[receive.message] = self.landed_rows, chunks + receive.message
                self.landed_rows += chunk_rows
        return places

    def lower_level(self, level: int, lowerings: "list[_Lowering]", sent: dict[tuple[int, int], int]) -> None:
        """Make the moves of a level; sent: the chunk that each (receiver, message) is of."""
        if level == 0:
            for index, output in self._untouched:
                self._move((self._load(index),), [self._keep(output)])
        if level >= len(self.program.levels):
            return
        of_level = self.program.levels[level]
        sends = defaultdict(list)
        for send in of_level.sends:
            sends[send.value].append(send)
        for receive in of_level.receives:
            index = sent[self.rank, receive.message]
            start, channel = self.landing[receive.message]
            source = Source(Rows(LANDED, start, start + self._count(index)), receive.peer, channel)
            self._define(receive.value, index, (source,), sends[receive.value], lowerings, sent)
        for load in sorted(of_level.loads, key=lambda load: self._measure_way(sends[load.value], len(lowerings))):
            index = self._places[Buffer.IN].get(load.place, NOBODY)
            if index == NOBODY:
                raise ValueError(f"{self._name}: rank {self.rank} reads a place that nothing was written to")
            self._define(load.value, index, (self._load(index),), sends[load.value], lowerings, sent)
        for reduce in of_level.reduces:
            added = self._add(reduce)
            self._define(reduce.value, self._index[reduce.left], added, sends[reduce.value], lowerings, sent)

    def _measure_way(self, sends: list[SendChunk], ranks: int) -> int:
        """Count how many ranks ahead a chunk goes first: all ranks begin with the next one, and never meet at one."""
        return min(((send.peer - self.rank) % ranks for send in sends), default=0)

    def _define(
        self,
        value: int,
        index: int,
        sources: tuple[Source, ...],
        sends: list[SendChunk],
        lowerings: "list[_Lowering]",
        sent: dict[tuple[int, int], int],
    ) -> None:
        """Note a value, and move it to where it is needed."""
        self._index[value], self._sources[value] = index, sources
        count, destinations = self._count(index), []
        here = sources[0].rows if len(sources) == 1 else None
        kept = [self._keep(output) for output in self._stores.get(value, ())]
        destinations += [one for one in kept if one.rows != here]
        if value in self._kept:
            rows = Rows(LANDED, self.landed_rows, self.landed_rows + count)
            self.landed_rows += count
            destinations.append(Destination(self.rank, rows))
            self._sources[value] = (Source(rows),)
        for send in sends:
            peer = lowerings[send.peer]
            start, channel = peer.landing[send.message]
            destinations.append(Destination(send.peer, Rows(LANDED, start, start + count), channel))
            sent[send.peer, send.message] = index
            peer.arrivals.setdefault(channel, self.rank)
        destinations.sort(key=lambda one: (one.rank - self.rank) % len(lowerings))
        if len(sources) > 1:  # it is added up once
            self._move(sources, destinations)
        for destination in destinations if len(sources) == 1 else ():  # the nearest rank has it first
            self._move(sources, [destination])

    def _add(self, reduce: ReduceChunks) -> tuple[Source, ...]:
        """Return the sources of a sum, which are added one by one: one side of it must lie in memory."""
        left, right = self._sources[reduce.left], self._sources[reduce.right]
        if len(right) > 1:
            left, right = right, left
        if len(right) > 1:
            raise ValueError(
                f"{self._name}: rank {self.rank} adds two sums of its own, neither of which memory holds: add one "
                "chunk at a time"
            )
        return left + right

    def _load(self, index: int) -> Source:
        """An input chunk: rows of x, or of the product, which its tiles signal."""
        rows = Rows(INPUT, *self._chunks.rows(index))
        return Source(rows) if self._is_gather else Source(rows, self.rank, index)

    def _keep(self, output: int) -> Destination:
        """The place of an output chunk: among the gathered rows, or of the output."""
        rows = self._chunks.rows(output)
        if not self._is_gather:
            return Destination(self.rank, Rows(OUTPUT, *rows))
        self.arrivals.setdefault(output, self.rank)
        return Destination(self.rank, Rows(LANDED, *rows), output)

    def _move(self, sources: tuple[Source, ...], destinations: list[Destination]) -> None:
        if destinations and sources[0].rows.start < sources[0].rows.stop:  # chunks of few rows may be empty
            self.moves.append(Move(sources, tuple(destinations)))

    def _count(self, index: int) -> int:
        start, stop = self._chunks.rows(index)
        return stop - start


def _lower(lowerings: list[_Lowering], levels: int) -> list[tuple[Move, ...]]:
    """All ranks' moves: level by level, since a message is sent in an earlier level than it is received in."""
    sent: dict[tuple[int, int], int] = {}
    for level in range(levels):
        for lowering in lowerings:
            lowering.lower_level(level, lowerings, sent)
    return [tuple(lowering.moves) for lowering in lowerings]


class Times(NamedTuple):
    """The times when moves begin, by rank, and when each channel signals; in rows that a rank has written."""

    begins: list[list[int]]
    signals: dict[tuple[int, int, int], int]


def find_times(plans: list[tuple[Move, ...]]) -> Times:
    """Find when each move would begin if tiles took no time: a rank writes a row at a time."""
    begins: list[list[int]] = [[] for _ in plans]
    signals: dict[tuple[int, int, int], int] = {}
    clocks, has_moved = [0] * len(plans), True
    while has_moved:
        has_moved = False
        for rank, moves in enumerate(plans):
            for move in moves[len(begins[rank]) :]:
                waits = [(rank, one.sender, one.channel) for one in move.sources if one.sender not in (NOBODY, rank)]
                if any(wait not in signals for wait in waits):
                    break
                begins[rank].append(max([clocks[rank], *(signals[wait] for wait in waits)]))
                clocks[rank] = begins[rank][-1]
                for one in move.destinations:
                    clocks[rank] += one.rows.stop - one.rows.start
                    signals[one.rank, rank, one.channel] = clocks[rank]
                has_moved = True
    assert all(len(begun) == len(moves) for begun, moves in zip(begins, plans, strict=True))
    return Times(begins, signals)


def _order_chunks(plans: list[tuple[Move, ...]], chunks: int, *, is_gather: bool) -> Iterator[list[int]]:
    """Order for each rank its tiles' chunks: as they arrive, or the most urgent first.

    The urgency of a chunk is the time from the beginning of the first move that needs it to the end of all that
    follows: its critical path.
    """
    times = find_times(plans)
    if is_gather:
        for rank in range(len(plans)):
            arrival = {channel: at for (receiver, _, channel), at in times.signals.items() if receiver == rank}
            yield sorted(range(chunks), key=lambda index: (arrival.get(index, 0), index))
        return
    rest = _find_critical_paths(plans, times)
    for rank, moves in enumerate(plans):
        urgency: dict[int, int] = {}
        for number, move in enumerate(moves):
            for source in move.sources:
                if source.sender == rank:
                    urgency[source.channel] = max(urgency.get(source.channel, 0), rest[rank, number])
        yield sorted(range(chunks), key=lambda index: (-urgency.get(index, 0), index))


def _find_critical_paths(plans: list[tuple[Move, ...]], times: Times) -> dict[tuple[int, int], int]:
    """Find by (rank, number of a move) the time from its begin to the end of the last move that depends on it."""
    needs = defaultdict(list)
    for rank, moves in enumerate(plans):
        for number, move in enumerate(moves):
            for source in move.sources:
                needs[rank, source.sender, source.channel].append((rank, number))
    rest: dict[tuple[int, int], int] = {}
    begun = [(begin, rank, number) for rank, list_ in enumerate(times.begins) for number, begin in enumerate(list_)]
    for _, rank, number in sorted(begun, reverse=True):  # what depends on a move begins after it
        move = plans[rank][number]
        taken, after = 0, 0
        for one in move.destinations:
            taken += one.rows.stop - one.rows.start
            after = max([after, *(taken + rest[late] for late in needs.get((one.rank, rank, one.channel), ()))])
        rest[rank, number] = max(after, taken + rest.get((rank, number + 1), 0))
    return rest


def _cut_tiles(
    chunks: _ChunkRows, order: list[int], arrivals: dict[int, int], rank: int, block_rows: int
) -> Iterator[RowTile]:
    """The rows of tiles of the chunks in this order; arrivals: who brings each chunk, if not this rank's tiles."""
    for index in order:
        start, stop = chunks.rows(index)
        for low in range(start, stop, block_rows):
            yield RowTile(low, min(low + block_rows, stop), arrivals.get(index, rank), index)
