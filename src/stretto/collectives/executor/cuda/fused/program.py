"""A schedule as straight-line code for one lane, the form in which one kernel runs it without thread blocks.

Chunks of one size are copied and added element by element, so lane i of every chunk depends on lane i of other chunks
alone. One thread can therefore run all of a rank's steps for its own lanes, with no wait for another thread block: what
MSCCLang (section 6) orders by semaphores is plain program order here, and only messages are waited for.

Steps fall into levels by the messages that lie before them: level 0 needs none, level n one that was sent in level
n - 1. Ranks go through the levels in order, so a receive waits only for sends of an earlier level, and nobody waits for
ever. Every message has a mailbox of its own, so there are no slots to wait for either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.executor.layout import count_block_chunks
from stretto.collectives.schedule import Schedule, Step, StepType
from stretto.collectives.verifier.graph import build_graph, linear_order

MAX_OPERATIONS = 4096
"""Of a rank: beyond it the code of one thread is longer than an instruction cache, and its registers run out."""


class ChunkPlace(NamedTuple):
    """A chunk of a rank's memory, under the name that both buffers share in place."""

    buffer: Buffer
    chunk: int


class LoadChunk(NamedTuple):
    """`value` is what `place` holds before the collective."""

    value: int
    place: ChunkPlace


class ReceiveChunk(NamedTuple):
    """`value` is what comes into this rank's mailbox `message` from `peer`."""

    value: int
    message: int
    peer: int


class ReduceChunks(NamedTuple):
    """`value` = `left` + `right`. completes: whether it is the sum of all ranks' inputs (an average divides then)."""

    value: int
    left: int
    right: int
    completes: bool


class StoreChunk(NamedTuple):
    """`place` holds `value` after the collective.

    is_whole: whether `place` holds all of the value for every size of tensors. It does not where a chunk goes to a
    place further behind in a block, which is shorter where the elements do not divide evenly (see `layout`).
    """

    value: int
    place: ChunkPlace
    is_whole: bool = True


class SendChunk(NamedTuple):
    """`value` goes into `peer`'s mailbox `message`."""

    value: int
    peer: int
    message: int


@dataclass(frozen=True)
class Level:
    """What a lane does once the messages before it have come, in this order."""

    receives: tuple[ReceiveChunk, ...]
    loads: tuple[LoadChunk, ...]
    reduces: tuple[ReduceChunks, ...]
    sends: tuple[SendChunk, ...]
    stores: tuple[StoreChunk, ...]

    @property
    def operations(self) -> int:
        """How many operations a lane does in it."""
        return len(self.receives) + len(self.loads) + len(self.reduces) + len(self.sends) + len(self.stores)


@dataclass(frozen=True)
class FusedRankProgram:
    """What one rank does with a lane.

    mailboxes: how many messages come; rounded: the sums that are rounded to the dtype before they are used again,
    those that travel or all; the others stay in fp32 until they are stored.
    """

    rank: int
    levels: tuple[Level, ...]
    mailboxes: int
    rounded: frozenset[int]


@dataclass(frozen=True)
class FusedProgram:
    """All ranks' lane programs. meets: whether no rank can end before all have begun, by the messages alone."""

    collective: Collective
    ranks: tuple[FusedRankProgram, ...]
    meets: bool

    @property
    def mailboxes(self) -> int:
        """Those of the rank that has most."""
        return max(program.mailboxes for program in self.ranks)

    @property
    def levels(self) -> int:
        """The messages, one upon another, that the collective waits for."""
        return max(len(program.levels) for program in self.ranks) - 1


def lower_to_fused_program(schedule: Schedule, *, in_place: bool) -> FusedProgram:
    """Lower a verified schedule, as it is called. ValueError for one that cannot run, or is too long for one thread."""
    errors: list[str] = []
    graph = build_graph(schedule, errors)
    order, left = linear_order(graph)
    if errors or left:
        raise ValueError(f"{schedule.name} cannot run: {errors[0] if errors else 'it deadlocks'}")
    collective = schedule.collective.aliased() if in_place else schedule.collective.out_of_place()
    made: list[_ValueOrigin] = []
    makers = [_RankLowering(rank, schedule, collective, made) for rank in range(collective.ranks)]
    posted: dict[int, list[_Message]] = {}
    for number in order:
        step, rank = graph.steps[number], graph.places[number][0]
        if step.type is StepType.NOP:
            continue
        block = schedule.ranks[rank].thread_blocks[graph.places[number][1]]
        values = makers[rank].run(step, posted.pop(graph.sender[number], None) if step.type.receives else None)
        if step.type.sends:
            assert block.send_peer is not None
            posted[number] = makers[rank].post(values, makers[block.send_peer])
    rounds_all = collective.replicated and not _replicas_agree(makers, made)
    meets = all(len(maker.entered()) == collective.ranks for maker in makers)
    return FusedProgram(collective, tuple(maker.finish(rounds_all) for maker in makers), meets)


class _Message(NamedTuple):
    """A chunk on its way: its mailbox, what it is, the level in which it comes, and who has entered before it."""

    mailbox: int
    sender: int
    value: int
    inputs: frozenset[tuple[int, int]]
    level: int
    entered: frozenset[int]


class _ValueOrigin(NamedTuple):
    """How a rank got a value: from values that (rank, value) names, or from nothing but `name`."""

    rank: int
    value: int
    parts: tuple[tuple[int, int], ...]
    name: object = None


class _RankLowering:
    """Makes one rank's program by running its steps on names of values instead of numbers."""

    def __init__(self, rank: int, schedule: Schedule, collective: Collective, made: list[_ValueOrigin]) -> None:
        self.rank = rank
        self.name = schedule.name
        self.collective = collective
        self._entered_by: dict[int, set[int]] = {}
        self.mailboxes = 0
        self.sums_sent: set[int] = set()
        self._made = made
        self._held: dict[ChunkPlace, int] = {}
        self._levels: list[int] = []
        self._inputs: list[frozenset[tuple[int, int]]] = []
        self._loads: dict[int, ChunkPlace] = {}
        self._receives: list[ReceiveChunk] = []
        self._reduces: dict[int, ReduceChunks] = {}
        self._sends: list[SendChunk] = []
        self._names = {self._place(Buffer.IN, index): (rank, index) for index in range(collective.input_chunks)}
        for source, destination in schedule.ranks[rank].copies:
            self._held[self._place(Buffer.OUT, destination)] = self._read(self._place(Buffer.IN, source))

    def run(self, step: Step, received: list[_Message] | None) -> list[int]:
        """Do a step; returns the values that it made or read, a chunk each."""
        values = []
        for at in range(step.size):
            value = -1 if received is None else self._receive(received[at])
            if step.type.reads_source:
                source = self._read(self._place(step.source_buffer, step.source + at))
                if step.type is StepType.REDUCE:
                    value = self._read(self._place(step.destination_buffer, step.destination + at))
                value = self._reduce(value, source) if step.type.reduces else source
            values.append(value)
        if step.type.writes_destination:
            for at, value in enumerate(values):
                self._held[self._place(step.destination_buffer, step.destination + at)] = value
        return values

    def post(self, values: Sequence[int], receiver: "_RankLowering") -> list[_Message]:
        """SendChunk values to another rank, each into the next of its mailboxes."""
        messages = []
        for value in values:
            self._sends.append(SendChunk(value, receiver.rank, receiver.mailboxes))
            if value in self._reduces:
                self.sums_sent.add(value)
            level = self._levels[value]
            entered = frozenset(self.entered(level))
            messages.append(_Message(receiver.mailboxes, self.rank, value, self._inputs[value], level + 1, entered))
            receiver.mailboxes += 1
        return messages

    def entered(self, level: int | None = None) -> set[int]:
        """The ranks that have begun for certain once this one is in that level (None: at its end).

        A send of a level is not held up by messages of later levels, even where the schedule's step was.
        """
        before = [ranks for at, ranks in self._entered_by.items() if level is None or at <= level]
        return {self.rank}.union(*before)

    def outputs(self) -> list[int]:
        """For each output chunk the value that it holds in the end, -1 where nobody wrote it."""
        return [self._held.get(self._place(Buffer.OUT, index), -1) for index in range(self.collective.output_chunks)]

    def finish(self, rounds_all: bool) -> FusedRankProgram:
        """The program; rounds_all: whether all sums are rounded, not only those that travel."""
        copied = [
            StoreChunk(value, self._place(Buffer.OUT, index), self._fits(value, index))
            for index, value in enumerate(self.outputs())
            if value >= 0 and self._loads.get(value) != self._place(Buffer.OUT, index)
        ]
        first = self._first_reads({store.value for store in copied})
        # A chunk is read into a register before another is written over it.
        stores = [(max(self._levels[store.value], first.get(store.place, 0)), store) for store in copied]
        count = max((*self._levels, *(level for level, _ in stores)), default=0) + 1
        kinds: list[list[list[Any]]] = [[[] for _ in range(5)] for _ in range(count)]
        for receive in self._receives:
            kinds[self._levels[receive.value]][0].append(receive)
        for value, place in self._loads.items():
            if place in first:
                kinds[first[place]][1].append(LoadChunk(value, place))
        for reduce in self._reduces.values():
            kinds[self._levels[reduce.value]][2].append(reduce)
        for send in self._sends:
            kinds[self._levels[send.value]][3].append(send)
        for level, store in stores:
            kinds[level][4].append(store)
        levels = tuple(Level(*(tuple(kind) for kind in level)) for level in kinds)
        operations = sum(level.operations for level in levels)
        if operations > MAX_OPERATIONS:
            raise ValueError(
                f"rank {self.rank} of {self.name} does {operations} operations a lane: one thread takes up to "
                f"{MAX_OPERATIONS}"
            )
        rounded = set(self._reduces) if rounds_all else self.sums_sent
        return FusedRankProgram(self.rank, levels, self.mailboxes, frozenset(rounded))

    def _fits(self, value: int, index: int) -> bool:
        """Whether an output chunk's place is as long as the value, for every size: chunks get shorter along a block."""
        chunks = count_block_chunks(self.collective)
        return all(given % chunks >= index % chunks for _, given in self._inputs[value])

    def _first_reads(self, copied: set[int]) -> dict[ChunkPlace, int]:
        """The level in which a chunk's first content is first used, for each that is used at all."""
        first: dict[ChunkPlace, int] = {}
        used = [(side, self._levels[reduce.value]) for reduce in self._reduces.values() for side in reduce[1:3]]
        used += [(send.value, self._levels[send.value]) for send in self._sends]
        used += [(value, 0) for value in copied]
        for value, level in used:
            if value in self._loads:
                place = self._loads[value]
                first[place] = min(first.get(place, level), level)
        return first

    def _place(self, buffer: Buffer, chunk: int) -> ChunkPlace:
        return ChunkPlace(*self.collective.place(self.rank, buffer, chunk))

    def _read(self, place: ChunkPlace) -> int:
        if place not in self._held:
            name = self._names.get(place)
            value = self._value(0, frozenset() if name is None else frozenset((name,)))
            self._made.append(_ValueOrigin(self.rank, value, (), name or (self.rank, place)))
            self._loads[value] = place
            self._held[place] = value
        return self._held[place]

    def _receive(self, message: _Message) -> int:
        self._entered_by.setdefault(message.level, set()).update(message.entered)
        value = self._value(message.level, message.inputs)
        self._made.append(_ValueOrigin(self.rank, value, ((message.sender, message.value),)))
        self._receives.append(ReceiveChunk(value, message.mailbox, message.sender))
        return value

    def _reduce(self, left: int, right: int) -> int:
        inputs = self._inputs[left] | self._inputs[right]
        value = self._value(max(self._levels[left], self._levels[right]), inputs)
        self._made.append(_ValueOrigin(self.rank, value, ((self.rank, left), (self.rank, right))))
        ranks, indices = {rank for rank, _ in inputs}, {index for _, index in inputs}
        completes = len(ranks) == len(inputs) == self.collective.ranks and len(indices) == 1
        self._reduces[value] = ReduceChunks(value, left, right, completes)
        return value

    def _value(self, level: int, inputs: frozenset[tuple[int, int]]) -> int:
        self._levels.append(level)
        self._inputs.append(inputs)
        return len(self._levels) - 1


def _replicas_agree(makers: Sequence[_RankLowering], made: Sequence[_ValueOrigin]) -> bool:
    """Whether all ranks' outputs are the same sums of the same sums, rounded at the same places."""
    names: dict[object, int] = {}
    exact: dict[tuple[int, int], int] = {}  # of (rank, value): the expression as it is used on its rank
    for rank, value, parts, name in made:
        if len(parts) == 1:
            exact[rank, value] = exact[parts[0]]
            continue
        expression: object = name if not parts else ("sum", *sorted(exact[part] for part in parts))
        if value in makers[rank].sums_sent:
            expression = ("rounded", names.setdefault(expression, len(names)))
        exact[rank, value] = names.setdefault(expression, len(names))

    outputs = [maker.outputs() for maker in makers]
    for values in zip(*outputs, strict=True):
        if len({exact.get((rank, value)) for rank, value in enumerate(values)}) > 1:
            return False
    return True
