# SPDX-License-Identifier: Apache-2.0
"""Explains why a thread block cannot execute a program's requests: which lines request what."""

from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from stretto.collectives.compiler.instructions import Instruction, InstructionDag


class CompileError(ValueError):
    """A program that cannot be compiled to a schedule as it was asked for."""


class PlacementErrors:
    """Raises CompileErrors that name the two lines of the program whose wishes exclude each other.

    block_of: the thread block of each instruction that was placed so far, which grows while instructions are placed.
    """

    def __init__(self, dag: InstructionDag, block_of: Mapping[int, int]) -> None:
        self._dag = dag
        self._block_of = block_of

    def raise_for_second_block(self, number: int, first: int, what: str) -> NoReturn:
        """An instruction that would use a connection from a second thread block. first: the one that has it."""
        instruction = self._dag.instructions[number]
        other = next(iter(self._others(number, first)))
        raise CompileError(
            f"{self._line(number)}: {self._name(number)} on rank {instruction.rank} {what} over a channel on which "
            f"{self._name(other)} does already ({self._line(other)}): ask for that one, or for another channel"
        )

    def raise_for_two(self, number: int, block: int, what: str, is_cause: Callable[[Instruction], bool]) -> NoReturn:
        """An instruction that would give its thread block a second channel, or peer, beside that of `is_cause`'s."""
        instruction = self._dag.instructions[number]
        other = next(
            other
            for other in self._others(number, block)
            if is_cause(self._dag.instructions[other]) and not self._dag.instructions[other].is_local
        )
        raise CompileError(
            f"{self._line(number)}: {self._name(other)} on rank {instruction.rank} would need {what}; "
            f"the other is asked for at {self._line(other)}"
        )

    def _others(self, number: int, block: int) -> Iterator[int]:
        """The instructions of this one's rank that were placed in a thread block."""
        rank = self._dag.instructions[number].rank
        return (
            other
            for other, found in self._block_of.items()
            if found == block and other != number and self._dag.instructions[other].rank == rank
        )

    def _name(self, number: int) -> str:
        asked = self._dag.instructions[number].thread_block
        return "a thread block" if asked is None else f"thread block {asked}"

    def _line(self, number: int) -> str:
        return self._dag.chunk_dag.parts.operations[self._dag.instructions[number].message].line
