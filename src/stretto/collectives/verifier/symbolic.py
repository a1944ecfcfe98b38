# SPDX-License-Identifier: Apache-2.0
"""Executes a schedule on symbols: finds what every chunk holds in the end, as the tree of additions that made it.

A value is a number: an input chunk, or the sum of two values. Equal trees, up to the order of an addition's two sides,
have equal numbers, so that ranks that add in different orders are detected. A chunk that was added twice is twice in
the multiset of its tree's leaves.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from stretto.collectives.collective import Buffer, Collective, Expected
from stretto.collectives.schedule import StepType
from stretto.collectives.verifier.graph import Graph

EMPTY = -1
MAX_WRONG = 1000
"""The check stops after this many wrong chunks."""
_MAX_LEAVES = 2**62  # a chunk may be added to itself without end, and no collective asks for so many


class Values:
    """All values so far: input chunks have negative numbers, sums are numbered from 0 on, each with its two sides."""

    def __init__(self, input_chunks: int) -> None:
        self._input_chunks = input_chunks
        self._sums: dict[tuple[int, int], int] = {}
        self._sides: list[tuple[int, int]] = []
        self._depths: list[int] = []
        self._sizes: list[int] = []

    def input(self, rank: int, index: int) -> int:
        """The value of an input chunk: a number below EMPTY."""
        return EMPTY - 1 - (rank * self._input_chunks + index)

    def name(self, value: int) -> tuple[int, int]:
        """The (rank, index) of an input chunk's value."""
        return divmod(EMPTY - 1 - value, self._input_chunks)

    def sum(self, one: int, other: int) -> int:
        """The value of a sum, whose sides may be swapped: a number from 0 on, larger than those of its sides."""
        key = (one, other) if one <= other else (other, one)
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = len(self._sides)
            self._sides.append(key)
            self._depths.append(max(self.depth(one), self.depth(other)) + 1)
            self._sizes.append(min(self.size(one) + self.size(other), _MAX_LEAVES))
        return found

    def depth(self, value: int) -> int:
        """The depth of the tree of additions that made it."""
        return self._depths[value] if value >= 0 else 0

    def size(self, value: int) -> int:
        """The number of input chunks that were added, with repetitions, up to _MAX_LEAVES."""
        return self._sizes[value] if value >= 0 else 1

    def leaves(self, value: int) -> Counter[tuple[int, int]]:
        """The input chunks of a value, each with the number of times that it was added."""
        inside = {value}
        stack = [value]
        while stack:
            at = stack.pop()
            for side in self._sides[at] if at >= 0 else ():
                if side not in inside:
                    inside.add(side)
                    stack.append(side)
        times = Counter({value: 1})
        result: Counter[tuple[int, int]] = Counter()
        for at in sorted(inside, reverse=True):  # a sum before its sides
            if at < 0:
                result[self.name(at)] += times[at]
            else:
                for side in self._sides[at]:
                    times[side] += times[at]
        return result

    def describe(self, value: int) -> str:
        if value == EMPTY:
            return "nothing"
        if self.size(value) == _MAX_LEAVES:
            return f"a sum of {_MAX_LEAVES} input chunks or more"
        leaves = sorted(self.leaves(value).items())
        listed = " + ".join(
            (f"{times} x " if times > 1 else "") + f"in[{index}] of rank {rank}" for (rank, index), times in leaves[:6]
        )
        return listed + (f" + {len(leaves) - 6} more" if len(leaves) > 6 else "")


@dataclass(frozen=True)
class SymbolicOutcome:
    """Outcome of a run. right: whether the postcondition holds; consistent: whether all ranks added in one order
    wherever the collective asks for it; roundings: the most additions, one upon another, in an output."""

    right: bool
    consistent: bool
    roundings: int


def execute(graph: Graph, order: list[int], collective: Collective, errors: list[str]) -> SymbolicOutcome:
    """Execute the steps in this order on symbols, and compare the outputs with the collective's conditions."""
    values = Values(max(1, collective.input_chunks))
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
    graph: Graph, collective: Collective, values: Values, memory: list[dict[Buffer, list[int]]], errors: list[str]
) -> SymbolicOutcome:
    # By index: most ranks expect the same there, and hashing the expected values would dominate the time.
    wanted: dict[int, _Wanted] = {}
    wrong = differing = 0
    roundings = 0
    seen: dict[int, tuple[int, int]] = {}
    for rank, index in product(range(collective.ranks), range(collective.output_chunks)):
        expected = collective.expected(rank, index)
        if expected is None:
            continue
        buffer, at = collective.place(rank, Buffer.OUT, index)
        value = memory[rank][buffer][at]
        if value != EMPTY:
            roundings = max(roundings, values.depth(value))
        here = wanted.get(index)
        if here is None or (here.expected is not expected and here.expected != expected):
            here = wanted[index] = _Wanted(expected, values)
        if not here.is_in(value):
            wrong += 1
            if wrong == MAX_WRONG:
                break
            if wrong <= 10:
                errors.append(
                    f"postcondition: out[{index}] of rank {rank} holds {values.describe(value)}, but {here} is wanted"
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
    if wrong == MAX_WRONG:
        errors.append(f"postcondition: {wrong - 10} or more chunks are wrong besides")
    elif wrong > 10:
        errors.append(f"postcondition: {wrong - 10} more chunks are wrong")
    if differing > 10:
        errors.append(f"replica consistency: {differing - 10} more chunks differ")
    return SymbolicOutcome(wrong == 0, differing == 0, roundings)


class _Wanted:
    """The required value of an output chunk, and a cache of the values that match it."""

    def __init__(self, expected: Expected, values: Values) -> None:
        self.expected = expected
        self._values = values
        self._found: dict[int, bool] = {}

    def is_in(self, value: int) -> bool:
        """Check whether a value is that sum, or that chunk."""
        if len(self.expected) == 1:
            return value < EMPTY and self._values.name(value) == self.expected[0]
        found = self._found.get(value)
        if found is None:
            found = self._found[value] = (
                value != EMPTY
                and self._values.size(value) == len(self.expected)
                and self._values.leaves(value) == self._leaves
            )
        return found

    @cached_property
    def _leaves(self) -> Counter[tuple[int, int]]:
        return Counter(self.expected)

    def __str__(self) -> str:
        listed = " + ".join(f"in[{index}] of rank {rank}" for rank, index in self.expected[:6])
        return listed + (f" + {len(self.expected) - 6} more" if len(self.expected) > 6 else "")
