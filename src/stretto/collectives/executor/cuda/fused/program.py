# SPDX-License-Identifier: Apache-2.0
"""Lowers a schedule to straight-line code for one thread: the form in which a fused kernel runs it.

All chunks have one size and are copied and reduced element by element, so element i of a chunk depends on element i of
other chunks alone. One thread therefore runs all of a rank's steps on its own elements and waits for no other thread
block: the order that MSCCLang (section 6) enforces with semaphores is program order here, and only messages from other
ranks have to be awaited.

Operations fall into levels by the messages that they need: level 0 needs none, level n one that was sent in level
n - 1. All ranks go through the levels in order, so a receive waits only for sends of an earlier level, and no wait can
last for ever. Every message has its own mailbox, so no send has to wait. Two-shot all-reduce, 2 ranks:

               level 0             level 1                          level 2
             |                   |                                |
    rank 0   | v0 = in[1]        | v1 = mailbox 0   (from rank 1) | v4 = mailbox 1   (from rank 1)
             | v0 -> rank 1's 0  | v3 = in[0] + v1                | out[1] = v4
             |        \\         /| v3 -> rank 1's 1   \\           /|
             |         \\       / | out[0] = v3         \\         / |
             |          \\     /  |                      \\       /  |
             |           `---'   |                       `-----'  |
    rank 1   |  (the mirror image: it sends its half of in, adds rank 0's half, sends the sum)

The passes are functions over one immutable list of operations, in an order in which all ranks can execute them:

    schedule --trace_schedule--> operations --sum_inputs--> which input chunks each value is the sum of
                                    --_find_levels--> the level in which each value is there
                                    --_has_implicit_barrier--> whether the messages alone separate calls
                                    --_find_sent_sums, _replicas_agree--> which sums are rounded
                                    --_assemble--> one rank's program, level by level
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.executor.layout import count_block_chunks
from stretto.collectives.schedule import Schedule, Step, StepType
from stretto.collectives.verifier.graph import build_graph, linear_order

MAX_OPERATIONS = 4096
"""The most operations of a rank: beyond it a thread's code outgrows an instruction cache, and its registers run out."""


class ChunkPlace(NamedTuple):
    """A chunk of a rank's memory, under the name that both buffers share in place."""

    buffer: Buffer
    chunk: int


class LoadChunk(NamedTuple):
    """`value` is the content of `place` before the collective."""

    value: int
    place: ChunkPlace


class ReceiveChunk(NamedTuple):
    """`value` arrives from `peer` in this rank's mailbox `message`."""

    value: int
    message: int
    peer: int


class ReduceChunks(NamedTuple):
    """`value` = `left` + `right`.

    completes: whether it is the sum of all ranks' inputs; adds_inputs: whether left and right are each one rank's
    input, and not a sum. An average divides the one or the other (`divides_inputs`).
    """

    value: int
    left: int
    right: int
    completes: bool = False
    adds_inputs: tuple[bool, bool] = (False, False)


class StoreChunk(NamedTuple):
    """`place` holds `value` after the collective.

    is_whole: whether `place` holds all of the value for every size of tensors. It does not where a chunk goes to a
    place further behind in a block, which is shorter where the elements do not divide evenly (see `executor.layout`).
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
    """A thread's work once the messages before it have arrived, in this order."""

    receives: tuple[ReceiveChunk, ...]
    loads: tuple[LoadChunk, ...]
    reduces: tuple[ReduceChunks, ...]
    sends: tuple[SendChunk, ...]
    stores: tuple[StoreChunk, ...]

    @property
    def operations(self) -> int:
        return len(self.receives) + len(self.loads) + len(self.reduces) + len(self.sends) + len(self.stores)


@dataclass(frozen=True)
class FusedRankProgram:
    """The program of one rank's threads.

    mailboxes: the number of messages that it receives; rounded: the sums that are rounded to the dtype before they are
    used again, either those that are sent or all; the others are kept in fp32 until they are stored.
    """

    rank: int
    levels: tuple[Level, ...]
    mailboxes: int
    rounded: frozenset[int]


@dataclass(frozen=True)
class FusedProgram:
    """All ranks' programs.

    has_implicit_barrier: whether, by the messages alone, no rank can end before all have begun.
    """

    collective: Collective
    ranks: tuple[FusedRankProgram, ...]
    has_implicit_barrier: bool

    @property
    def mailboxes(self) -> int:
        """The most mailboxes of any rank."""
        return max(program.mailboxes for program in self.ranks)

    @property
    def num_hops(self) -> int:
        """The most messages in a chain in which each needs the one before it: the deepest rank's levels less one."""
        return max(len(program.levels) for program in self.ranks) - 1


def lower_to_fused_program(schedule: Schedule, *, in_place: bool) -> FusedProgram:
    """Lower a verified schedule, in place or not. Raises ValueError if it cannot run or is too long for one thread."""
    collective = schedule.collective.aliased() if in_place else schedule.collective.out_of_place()
    trace = trace_schedule(schedule, collective)
    inputs = sum_inputs(trace)
    levels = _find_levels(trace)
    sent_sums = _find_sent_sums(trace)
    rounds_all = collective.replicated and not _replicas_agree(trace, sent_sums)
    return FusedProgram(
        collective,
        tuple(
            _assemble(schedule.name, collective, rank, trace, inputs, levels, None if rounds_all else sent_sums)
            for rank in range(collective.ranks)
        ),
        _has_implicit_barrier(trace, levels, collective.ranks),
    )


Value = tuple[int, int]
"""A value, by its rank and its number there: each rank numbers the values that it obtains, in order."""
StepPlace = tuple[int, int, int]
"""A step: its rank, its thread block and its number there."""


class _Operation(NamedTuple):
    """An operation of a rank."""

    rank: int
    what: LoadChunk | ReceiveChunk | ReduceChunks | SendChunk

    @property
    def value(self) -> Value:
        """The value that it makes, or sends."""
        return self.rank, self.what.value


class ScheduleTrace(NamedTuple):
    """A schedule's operations, as values.

    operations: of all ranks, in an order in which they can be executed; a value is made once, before its uses. senders:
    the value that each (rank, message) brings. names: for each loaded value, its input chunk, or its place where that
    is none. outputs: by rank, the values that its output chunks hold in the end, -1 where nothing was written. steps:
    each step's values, one for each of its chunks. writes: all writes to input and output buffers, as the value and the
    index of the chunk in its buffer.
    """

    operations: tuple[_Operation, ...]
    senders: Mapping[tuple[int, int], Value]
    names: Mapping[Value, tuple[Any, ...]]
    outputs: tuple[tuple[int, ...], ...]
    steps: Mapping[StepPlace, list[int]]
    writes: tuple[tuple[Value, int], ...]


def trace_schedule(schedule: Schedule, collective: Collective) -> ScheduleTrace:
    """Execute a schedule's steps on value ids: copies through scratch memory disappear."""
    errors: list[str] = []
    graph = build_graph(schedule, errors)
    order, left = linear_order(graph)
    if errors or left:
        raise ValueError(f"{schedule.name} cannot run: {errors[0] if errors else 'it deadlocks'}")
    tracer = _Tracer(collective)
    for rank, program in enumerate(schedule.ranks):
        for source, destination in program.copies:
            value = tracer.read(rank, Buffer.IN, source)
            tracer.write(rank, Buffer.OUT, destination, value)
    in_flight: dict[int, list[int]] = {}  # by the number of the sending step: its messages
    steps: dict[StepPlace, list[int]] = {}
    for number in order:
        step, (rank, block, _) = graph.steps[number], graph.places[number]
        if step.type is StepType.NOP:
            continue
        messages = in_flight.pop(graph.sender[number], None) if step.type.receives else None
        values = steps[graph.places[number]] = tracer.execute(rank, step, messages)
        if step.type.sends:
            peer = schedule.ranks[rank].thread_blocks[block].send_peer
            assert peer is not None
            in_flight[number] = [tracer.send(rank, value, peer) for value in values]
    return tracer.finish(steps)


class _Tracer:
    """The ranks' buffers while a schedule is traced, and the operations so far."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._operations: list[_Operation] = []
        self._senders: dict[tuple[int, int], Value] = {}
        self._names: dict[Value, tuple[Any, ...]] = {}
        self._held: list[dict[ChunkPlace, int]] = [{} for _ in range(collective.ranks)]
        self._writes: list[tuple[Value, int]] = []
        self._values = [0] * collective.ranks
        self._mailboxes = [0] * collective.ranks
        self._inputs = [
            {self._place(rank, Buffer.IN, index): (rank, index) for index in range(collective.input_chunks)}
            for rank in range(collective.ranks)
        ]

    def execute(self, rank: int, step: Step, messages: list[int] | None) -> list[int]:
        """Execute a step; returns the values that it made or read, one for each chunk."""
        values = []
        for at in range(step.size):
            value = -1 if messages is None else self._receive(rank, messages[at])
            if step.type.reads_source:
                source = self.read(rank, step.source_buffer, step.source + at)
                if step.type is StepType.REDUCE:
                    value = self.read(rank, step.destination_buffer, step.destination + at)
                value = self._reduce(rank, value, source) if step.type.reduces else source
            values.append(value)
        if step.type.writes_destination:
            for at, value in enumerate(values):
                self.write(rank, step.destination_buffer, step.destination + at, value)
        return values

    def read(self, rank: int, buffer: Buffer, chunk: int) -> int:
        """The value of a chunk: its value before the collective if nothing was written yet."""
        place = self._place(rank, buffer, chunk)
        if place not in self._held[rank]:
            value = self._new_value(rank)
            self._operations.append(_Operation(rank, LoadChunk(value, place)))
            self._names[rank, value] = self._inputs[rank].get(place) or (rank, place)
            self._held[rank][place] = value
        return self._held[rank][place]

    def write(self, rank: int, buffer: Buffer, chunk: int, value: int) -> None:
        if buffer is not Buffer.SCRATCH:
            self._writes.append(((rank, value), chunk))
        self._held[rank][self._place(rank, buffer, chunk)] = value

    def send(self, rank: int, value: int, peer: int) -> int:
        """Send a value to the next mailbox of a peer; returns the message's number there."""
        message = self._mailboxes[peer]
        self._mailboxes[peer] += 1
        self._operations.append(_Operation(rank, SendChunk(value, peer, message)))
        self._senders[peer, message] = rank, value
        return message

    def finish(self, steps: Mapping[StepPlace, list[int]]) -> ScheduleTrace:
        """The trace, once all steps were executed."""
        outputs = tuple(
            tuple(held.get(self._place(rank, Buffer.OUT, index), -1) for index in range(self._collective.output_chunks))
            for rank, held in enumerate(self._held)
        )
        return ScheduleTrace(tuple(self._operations), self._senders, self._names, outputs, steps, tuple(self._writes))

    def _receive(self, rank: int, message: int) -> int:
        value = self._new_value(rank)
        sender, _ = self._senders[rank, message]
        self._operations.append(_Operation(rank, ReceiveChunk(value, message, sender)))
        return value

    def _reduce(self, rank: int, left: int, right: int) -> int:
        value = self._new_value(rank)
        self._operations.append(_Operation(rank, ReduceChunks(value, left, right)))
        return value

    def _new_value(self, rank: int) -> int:
        self._values[rank] += 1
        return self._values[rank] - 1

    def _place(self, rank: int, buffer: Buffer, chunk: int) -> ChunkPlace:
        return ChunkPlace(*self._collective.place(rank, buffer, chunk))


Inputs = Mapping[Value, frozenset[tuple[int, int]]]
"""The input chunks (rank, index) that each value is the sum of."""


def sum_inputs(trace: ScheduleTrace) -> Inputs:
    """The input chunks that each value is the sum of; none for memory that the collective promises nothing about."""
    found: dict[Value, frozenset[tuple[int, int]]] = {}
    for operation in trace.operations:
        rank, what = operation
        match what:
            case LoadChunk(value, place):
                name = trace.names[rank, value]
                found[rank, value] = frozenset() if name == (rank, place) else frozenset((name,))
            case ReceiveChunk(value, message):
                found[rank, value] = found[trace.senders[rank, message]]
            case ReduceChunks(value, left, right):
                found[rank, value] = found[rank, left] | found[rank, right]
    return found


def _find_levels(trace: ScheduleTrace) -> dict[Value, int]:
    """The level in which each value is available: the length of the longest chain of messages to it."""
    found: dict[Value, int] = {}
    for rank, what in trace.operations:
        match what:
            case LoadChunk(value):
                found[rank, value] = 0
            case ReceiveChunk(value, message):
                found[rank, value] = found[trace.senders[rank, message]] + 1
            case ReduceChunks(value, left, right):
                found[rank, value] = max(found[rank, left], found[rank, right])
    return found


def _has_implicit_barrier(trace: ScheduleTrace, levels: Mapping[Value, int], ranks: int) -> bool:
    """Check whether each rank knows at its end, from the messages that it has received, that all ranks have begun.

    A message shows that its sender has begun, and all ranks of which the sender knew it by the level of the send. A
    send of a level is not held up by messages of later levels, even where the schedule's step was.
    """
    # By rank and level: the ranks that messages of this level have shown to have begun.
    shown: list[dict[int, set[int]]] = [{} for _ in range(ranks)]
    carried: dict[tuple[int, int], frozenset[int]] = {}  # by (receiver, message)

    def known(rank: int, level: int | None) -> set[int]:
        return {rank}.union(*(begun for at, begun in shown[rank].items() if level is None or at <= level))

    for operation in trace.operations:
        rank, what = operation
        match what:
            case SendChunk(_, peer, message):
                carried[peer, message] = frozenset(known(rank, levels[operation.value]))
            case ReceiveChunk(_, message):
                shown[rank].setdefault(levels[operation.value], set()).update(carried[rank, message])
    return all(len(known(rank, None)) == ranks for rank in range(ranks))


def _find_sent_sums(trace: ScheduleTrace) -> frozenset[Value]:
    """The sums that some rank sends on: they are rounded to the dtype on their way."""
    sums = {operation.value for operation in trace.operations if isinstance(operation.what, ReduceChunks)}
    return frozenset(
        operation.value
        for operation in trace.operations
        if isinstance(operation.what, SendChunk) and operation.value in sums
    )


def _replicas_agree(trace: ScheduleTrace, sent_sums: frozenset[Value]) -> bool:
    """Check whether all ranks' outputs are the same sums of the same sums, rounded at the same places."""
    numbers: dict[object, int] = {}
    found: dict[Value, int] = {}  # the expression of each value as it is used on its rank
    for operation in trace.operations:
        rank, what = operation
        expression: object
        match what:
            case ReceiveChunk(_, message):
                found[operation.value] = found[trace.senders[rank, message]]
                continue
            case LoadChunk():
                expression = trace.names[operation.value]
            case ReduceChunks(_, left, right):
                expression = ("sum", *sorted((found[rank, left], found[rank, right])))
            case SendChunk():
                continue
        if operation.value in sent_sums:
            expression = ("rounded", numbers.setdefault(expression, len(numbers)))
        found[operation.value] = numbers.setdefault(expression, len(numbers))
    for values in zip(*trace.outputs, strict=True):
        if len({found.get((rank, value)) for rank, value in enumerate(values)}) > 1:
            return False
    return True


def _assemble(
    name: str,
    collective: Collective,
    rank: int,
    trace: ScheduleTrace,
    inputs: Inputs,
    levels: Mapping[Value, int],
    sent_sums: frozenset[Value] | None,
) -> FusedRankProgram:
    """One rank's program: its operations by levels. sent_sums: those that are rounded, None to round all sums."""
    own = [operation.what for operation in trace.operations if operation.rank == rank]
    loads = {what.value: what.place for what in own if isinstance(what, LoadChunk)}
    stores = tuple(_list_stores(collective, rank, trace.outputs[rank], loads, inputs))
    first_reads = _find_first_reads(rank, own, loads, stores, levels)
    # A chunk is read into a register before another is written over it.
    stored_in = [max(levels[rank, store.value], first_reads.get(store.place, 0)) for store in stores]
    own_levels = [level for (of_rank, _), level in levels.items() if of_rank == rank]
    by_level: list[tuple[list[Any], ...]] = [
        ([], [], [], [], []) for _ in range(max((*own_levels, *stored_in), default=0) + 1)
    ]
    for what in own:
        at = levels[rank, what.value]
        match what:
            case ReceiveChunk():
                by_level[at][0].append(what)
            case LoadChunk(place=place):
                if place in first_reads:
                    by_level[first_reads[place]][1].append(what)
            case ReduceChunks(value, left, right):
                is_complete = _is_complete(inputs[rank, value], collective.ranks)
                are_inputs = len(inputs[rank, left]) == 1, len(inputs[rank, right]) == 1
                by_level[at][2].append(what._replace(completes=is_complete, adds_inputs=are_inputs))
            case SendChunk():
                by_level[at][3].append(what)
    for at, store in zip(stored_in, stores, strict=True):
        by_level[at][4].append(store)
    program_levels = tuple(Level(*(tuple(kind) for kind in level)) for level in by_level)
    operations = sum(level.operations for level in program_levels)
    if operations > MAX_OPERATIONS:
        raise ValueError(
            f"rank {rank} of {name} does {operations} operations on each element: one thread takes up to "
            f"{MAX_OPERATIONS}"
        )
    sums = {what.value for what in own if isinstance(what, ReduceChunks)}
    rounded = sums if sent_sums is None else {value for value in sums if (rank, value) in sent_sums}
    return FusedRankProgram(
        rank, program_levels, sum(receiver == rank for receiver, _ in trace.senders), frozenset(rounded)
    )


def _list_stores(
    collective: Collective, rank: int, outputs: tuple[int, ...], loads: Mapping[int, ChunkPlace], inputs: Inputs
) -> Iterator[StoreChunk]:
    """The output chunks that are to be written: those that do not hold their value already."""
    chunks = count_block_chunks(collective)
    for index, value in enumerate(outputs):
        place = ChunkPlace(*collective.place(rank, Buffer.OUT, index))
        if value >= 0 and loads.get(value) != place:
            # Chunks get shorter along a block.
            is_whole = all(given % chunks >= index % chunks for _, given in inputs[rank, value])
            yield StoreChunk(value, place, is_whole)


def _find_first_reads(
    rank: int,
    operations: list[LoadChunk | ReceiveChunk | ReduceChunks | SendChunk],
    loads: Mapping[int, ChunkPlace],
    stores: tuple[StoreChunk, ...],
    levels: Mapping[Value, int],
) -> dict[ChunkPlace, int]:
    """Find for each chunk whose first content is used the level of its first use. A store uses it in level 0."""
    uses = [(store.value, 0) for store in stores]
    for what in operations:
        match what:
            case ReduceChunks(value, left, right):
                uses += [(left, levels[rank, value]), (right, levels[rank, value])]
            case SendChunk(value):
                uses.append((value, levels[rank, value]))
    found: dict[ChunkPlace, int] = {}
    for value, level in uses:
        if value in loads:
            found[loads[value]] = min(found.get(loads[value], level), level)
    return found


def _is_complete(inputs: frozenset[tuple[int, int]], ranks: int) -> bool:
    """Check whether a value is the sum of the same chunk of all ranks' inputs."""
    givers, indices = {rank for rank, _ in inputs}, {index for _, index in inputs}
    return len(givers) == len(inputs) == ranks and len(indices) == 1
