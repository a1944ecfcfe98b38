# SPDX-License-Identifier: Apache-2.0
"""The collectives of msccl-tools, for its scripts: contents of buffers at the start, and a check of the end."""

from collections.abc import Callable
from itertools import product
from typing import Any

from stretto.collectives import collective
from stretto.collectives.collective import Collective
from stretto.collectives.msccl.values import MscclBuffer, MscclChunk, ReduceChunk

Buffers = list[dict[Any, Any]]


class MscclCollective:
    """A collective over `num_ranks` ranks; scripts make their own by giving `init_buffers` and `check`.

    chunk_factor: the chunks of the smaller buffer, or of the only one; inplace: whether both buffers share memory.
    """

    name = "custom"

    def __init__(self, num_ranks: int, chunk_factor: int, inplace: bool) -> None:
        self.num_ranks = num_ranks
        self.chunk_factor = chunk_factor
        self.inplace = inplace

    def init_buffers(self) -> Buffers:
        """Return for each rank what its input and output buffers hold at the start: lists of chunks or None."""
        raise NotImplementedError(f"{type(self).__name__} gives no init_buffers()")

    def check(self, prog: Any) -> bool | None:
        """Check whether `prog.buffers` satisfies the postcondition."""
        return None

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        """The place's name in memory, for collectives whose buffers share memory."""
        return buffer, index


class KnownCollective(MscclCollective):
    """A collective whose conditions are one of ours."""

    make: Callable[[int, int, bool], Collective]

    def find_ours(self) -> Collective:
        """Our collective with the same conditions."""
        return type(self).make(self.num_ranks, self.chunk_factor, self.inplace)

    def check(self, prog: Any) -> bool:
        """Check whether each output chunk holds its chunk or sum; prints the ones that do not."""
        correct, ours = True, self.find_ours()
        for rank, index in product(range(ours.ranks), range(ours.output_chunks)):
            buffer, at = self.get_buffer_index(rank, MscclBuffer.output, index)
            chunks = [MscclChunk(*each) for each in ours.expected(rank, index) or ()]
            wanted = chunks[0] if len(chunks) == 1 else ReduceChunk(-1, chunks)
            found = prog.buffers[rank][buffer][at]
            if found != wanted:
                print(f"rank {rank}'s output chunk {index} holds {found}, not {wanted}")
                correct = False
        return correct


class AllToAll(KnownCollective):
    """Rank r's output is every rank's r-th block of `chunk_factor` chunks."""

    name = "alltoall"
    make = staticmethod(collective.AllToAll)

    def init_buffers(self) -> Buffers:
        size, block = self.num_ranks * self.chunk_factor, self.chunk_factor
        ranks = []
        for rank in range(self.num_ranks):
            held = [MscclChunk(rank, index, index // block, rank * block + index % block) for index in range(size)]
            ranks.append({MscclBuffer.input: held, MscclBuffer.output: held if self.inplace else [None] * size})
        return ranks


class AllGather(KnownCollective):
    """Every rank's output is all ranks' inputs of `chunk_factor` chunks. In place, the input is a part of it."""

    name = "allgather"
    make = staticmethod(collective.AllGather)

    def init_buffers(self) -> Buffers:
        ranks = []
        for rank in range(self.num_ranks):
            start = rank * self.chunk_factor
            held = [MscclChunk(rank, index, -1, start + index) for index in range(self.chunk_factor)]
            output: list[MscclChunk | None] = [None] * (self.num_ranks * self.chunk_factor)
            if self.inplace:
                output[start : start + self.chunk_factor] = held
            ranks.append({MscclBuffer.input: held, MscclBuffer.output: output})
        return ranks

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        if self.inplace and buffer is MscclBuffer.input:
            return MscclBuffer.output, rank * self.chunk_factor + index
        return buffer, index


class AllReduce(KnownCollective):
    """Every rank's `chunk_factor` output chunks are the sums of all ranks' input chunks."""

    name = "allreduce"
    make = staticmethod(collective.AllReduce)

    def init_buffers(self) -> Buffers:
        ranks = []
        for rank in range(self.num_ranks):
            held = [MscclChunk(rank, index, -1, index) for index in range(self.chunk_factor)]
            ranks.append(
                {MscclBuffer.input: held, MscclBuffer.output: held if self.inplace else [None] * self.chunk_factor}
            )
        return ranks

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        return (MscclBuffer.input if self.inplace and buffer is MscclBuffer.output else buffer), index


class ReduceScatter(KnownCollective):
    """Rank r's output is the sum of the r-th blocks of `chunk_factor` chunks. In place, it is a part of the input."""

    name = "reduce_scatter"
    make = staticmethod(collective.ReduceScatter)

    def init_buffers(self) -> Buffers:
        size, block = self.num_ranks * self.chunk_factor, self.chunk_factor
        ranks = []
        for rank in range(self.num_ranks):
            buffers: dict[Any, Any] = {
                MscclBuffer.input: [MscclChunk(rank, index, index // block, index % block) for index in range(size)]
            }
            if not self.inplace:
                buffers[MscclBuffer.output] = [None] * block
            ranks.append(buffers)
        return ranks

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        if self.inplace and buffer is MscclBuffer.output:
            return MscclBuffer.input, rank * self.chunk_factor + index
        return buffer, index
