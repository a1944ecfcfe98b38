"""Symbolic execution: what every chunk holds in the end, as the tree of additions that made it.

A value is a number: an input chunk, or the sum of two values. Equal trees, up to the order of an addition's two sides,
have equal numbers, so that ranks that add in the same order can be told from those that do not. Nothing is added to
numbers: a chunk that was counted twice is twice in the multiset that its tree has as leaves.
"""

from collections import Counter
from dataclasses import dataclass, field

from stretto.collectives.collective import Buffer, Collective, Expected
from stretto.collectives.schedule import StepType
from stretto.collectives.verifier.graph import Graph

EMPTY = -1


@dataclass
class Values:
    """All values so far. left, right: the sides of a sum (EMPTY: an input chunk); depth: additions one upon another."""

    inputs: dict[tuple[int, int], int] = field(default_factory=dict)
    names: list[tuple[int, int] | None] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    depth: list[int] = field(default_factory=list)
    _sums: dict[tuple[int, int], int] = field(default_factory=dict)

    def input(self, rank: int, index: int) -> int:
        """The value of an input chunk."""
        found = self.inputs.get((rank, index))
        if found is None:
            found = self.inputs[rank, index] = self._add(EMPTY, EMPTY, 0, (rank, index))
        return found

    def sum(self, one: int, other: int) -> int:
        """The value of a sum, whose sides may be swapped."""
        key = (one, other) if one <= other else (other, one)
        found = self._sums.get(key)
        if found is None:
            depth = max(self.depth[one], self.depth[other]) + 1
            found = self._sums[key] = self._add(*key, depth, None)
        return found

    def _add(self, left: int, right: int, depth: int, name: tuple[int, int] | None) -> int:
        self.left.append(left)
        self.right.append(right)
        self.depth.append(depth)
        self.names.append(name)
        return len(self.names) - 1

    def leaves(self, value: int) -> Counter[tuple[int, int]]:
        """The input chunks of a value, each with how often it was added."""
        inside = {value}
        stack = [value]
        while stack:
            at = stack.pop()
            for side in (self.left[at], self.right[at]):
                if side != EMPTY and side not in inside:
                    inside.add(side)
                    stack.append(side)
        times = Counter({value: 1})
        result: Counter[tuple[int, int]] = Counter()
        # A sum's number is larger than those of its sides.
        for at in sorted(inside, reverse=True):
            name = self.names[at]
            if name is not None:
                result[name] += times[at]
            else:
                times[self.left[at]] += times[at]
                times[self.right[at]] += times[at]
        return result

    def describe(self, value: int) -> str:
        """A value, for messages."""
        if value == EMPTY:
            return "nothing"
        leaves = sorted(self.leaves(value).items())
        listed = " + ".join(
            (f"{times} x " if times > 1 else "") + f"in[{index}] of rank {rank}" for (rank, index), times in leaves[:6]
        )
        return listed + (f" + {len(leaves) - 6} more" if len(leaves) > 6 else "")


@dataclass(frozen=True)
class Outcome:
    """What the outputs hold. right: whether the postcondition holds; consistent: whether all ranks added in one order
    wherever the collective asks for it; roundings: the most additions, one upon another, in an output."""

    right: bool
    consistent: bool
    roundings: int


def execute(graph: Graph, order: list[int], collective: Collective, errors: list[str]) -> Outcome:
    """Run the steps in this order on symbols, and compare what the outputs hold with the collective's conditions."""
    values = Values()
    memory = _start(graph, collective, values)
    messages: dict[int, list[int]] = {}
    uninitialized: set[int] = set()
    for number in order:
        step = graph.steps[number]
        if step.type is StepType.NOP:
            continue
        rank = graph.places[number][0]
        buffers = memory[rank]
        size = step.size
        result: list[int] = []
        if step.type.receives:
            result = messages.pop(graph.sender[number], [])
            result = (result + [EMPTY] * size)[:size]
        if step.type.reads_source:
            buffer, start = collective.place(rank, step.source_buffer, step.source)
            local = buffers[buffer][start : start + size]
            if EMPTY in local:
                uninitialized.add(number)
            result = _add_all(values, result, local) if step.type.receives else local
        if step.type.writes_destination:
            buffer, start = collective.place(rank, step.destination_buffer, step.destination)
            target = buffers[buffer]
            if step.type is StepType.REDUCE:
                present = target[start : start + size]
                if EMPTY in present:
                    uninitialized.add(number)
                result = _add_all(values, present, result)
            target[start : start + size] = result
        if step.type.sends and graph.receiver[number] >= 0:
            messages[number] = result
    errors.extend(f"{graph.name(number)} reads a chunk that holds nothing yet" for number in sorted(uninitialized))
    return _compare(graph, collective, values, memory, errors)


def _add_all(values: Values, one: list[int], other: list[int]) -> list[int]:
    return [
        EMPTY if left == EMPTY or right == EMPTY else values.sum(left, right)
        for left, right in zip(one, other, strict=True)
    ]


def _start(graph: Graph, collective: Collective, values: Values) -> list[dict[Buffer, list[int]]]:
    """Every rank's memory before the first step."""
    memory = []
    for rank, program in enumerate(graph.schedule.ranks):
        buffers: dict[Buffer, list[int]] = {Buffer.SCRATCH: [EMPTY] * program.scratch_chunks}
        for buffer in (Buffer.IN, Buffer.OUT):
            shared, _ = collective.place(rank, buffer, 0)
            buffers.setdefault(shared, [EMPTY] * collective.chunks(shared))
        for index in range(collective.input_chunks):
            if collective.initialized(rank, index):
                buffer, at = collective.place(rank, Buffer.IN, index)
                buffers[buffer][at] = values.input(rank, index)
        for source, destination in program.copies:
            from_buffer, from_index = collective.place(rank, Buffer.IN, source)
            to_buffer, to_index = collective.place(rank, Buffer.OUT, destination)
            buffers[to_buffer][to_index] = buffers[from_buffer][from_index]
        memory.append(buffers)
    return memory


def _compare(
    graph: Graph,
    collective: Collective,
    values: Values,
    memory: list[dict[Buffer, list[int]]],
    errors: list[str],
) -> Outcome:
    known: dict[tuple[int, Expected], bool] = {}
    wrong = differing = 0
    roundings = 0
    seen: dict[int, tuple[int, int]] = {}
    for rank in range(collective.ranks):
        for index in range(collective.output_chunks):
            expected = collective.expected(rank, index)
            if expected is None:
                continue
            buffer, at = collective.place(rank, Buffer.OUT, index)
            value = memory[rank][buffer][at]
            if value != EMPTY:
                roundings = max(roundings, values.depth[value])
            key = value, expected
            holds = known.get(key)
            if holds is None:
                holds = known[key] = _holds(values, value, expected)
            if not holds:
                wrong += 1
                if wrong <= 10:
                    errors.append(
                        f"postcondition: out[{index}] of rank {rank} holds {values.describe(value)}, "
                        f"but {_wanted(expected)} is wanted"
                    )
                continue
            if collective.replicated:
                other_rank, other = seen.setdefault(index, (rank, value))
                if other != value:
                    differing += 1
                    if differing <= 10:
                        errors.append(
                            f"replica consistency: ranks {other_rank} and {rank} add out[{index}] in different orders, "
                            "so that their bits may differ: reduce it on one rank, or in one order on all"
                        )
    if wrong > 10:
        errors.append(f"postcondition: {wrong - 10} more chunks are wrong")
    if differing > 10:
        errors.append(f"replica consistency: {differing - 10} more chunks differ")
    return Outcome(wrong == 0, differing == 0, roundings)


def _holds(values: Values, value: int, expected: Expected) -> bool:
    if value == EMPTY:
        return False
    if len(expected) == 1:
        return values.names[value] == expected[0]
    return values.leaves(value) == Counter(expected)


def _wanted(expected: Expected) -> str:
    listed = " + ".join(f"in[{index}] of rank {rank}" for rank, index in expected[:6])
    return listed + (f" + {len(expected) - 6} more" if len(expected) > 6 else "")
