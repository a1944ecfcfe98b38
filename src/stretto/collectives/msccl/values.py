# SPDX-License-Identifier: Apache-2.0
"""Buffers, chunks and sums as msccl-tools has them, for its scripts."""

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

OURS = __name__.rpartition(".")[0]
_NAMED = 8


class ScriptError(ValueError):
    """A script did what is not allowed or not supported; the message is one line that names the script's line.

    printed: the script's standard output, once `import_msccl` has raised the error.
    """

    printed = ""


def script_line() -> str:
    """The file and line that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class MscclBuffer(Enum):
    """The two buffers of a collective. Anything else that names a buffer is a scratch buffer of that name."""

    input = "i"
    output = "o"
    scratch = "s"

    def __str__(self) -> str:
        return self.value

    def __lt__(self, other: "MscclBuffer") -> bool:
        return self.value < other.value


class ThreadblockPolicy(Enum):
    """Thread blocks are chosen by the compiler, or by the program's `sendtb` and `recvtb`."""

    auto = "auto"
    manual = "manual"

    def __str__(self) -> str:
        return self.value


@dataclass(order=True, unsafe_hash=True)
class MscclChunk:
    """An input chunk: where it starts, which identifies it, and where it is to end (-1: in several places)."""

    origin_rank: int
    origin_index: int
    dst_rank: int = field(default=-1, compare=False)
    dst_index: int = field(default=-1, compare=False)

    def reduce(self, dst: int, chunk: "MscclChunk | ReduceChunk") -> "ReduceChunk":
        """The sum of both, made on rank `dst`."""
        if isinstance(chunk, ReduceChunk):
            return ReduceChunk(chunk.creation_rank, [*chunk.chunks, self])
        return ReduceChunk(dst, [self, chunk])

    def __str__(self) -> str:
        return f"({self.origin_rank}, {self.origin_index})"


@dataclass(eq=False)
class ReduceChunk:
    """A sum of input chunks. Two are equal if they sum the same chunks, each as often."""

    creation_rank: int
    chunks: list[MscclChunk]

    def reduce(self, dst: int, chunk: "MscclChunk | ReduceChunk") -> "ReduceChunk":
        """The sum of both."""
        more = chunk.chunks if isinstance(chunk, ReduceChunk) else [chunk]
        return ReduceChunk(self.creation_rank, self.chunks + more)

    def sort(self) -> None:
        """Put the chunks in the order of where they started."""
        self.chunks.sort()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReduceChunk) and sorted(self.chunks) == sorted(other.chunks)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.chunks)))

    def __str__(self) -> str:
        named = " + ".join(map(str, sorted(self.chunks)[:_NAMED]))
        return named if len(self.chunks) <= _NAMED else f"{named} + {len(self.chunks) - _NAMED} more"


class ScratchBuffer(list[Any]):
    """A rank's scratch buffer of one name. It grows to hold what is written."""

    def __init__(self, name: Hashable, held: Sequence[Any] = ()) -> None:
        super().__init__(held)
        self.name = name

    def __setitem__(self, index: Any, value: Any) -> None:
        if index >= len(self):
            self.extend([None] * (index + 1 - len(self)))
        super().__setitem__(index, value)

    def instance_size(self) -> int:
        """Number of its chunks."""
        return len(self)
