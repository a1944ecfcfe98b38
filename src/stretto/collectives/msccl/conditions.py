# SPDX-License-Identifier: Apache-2.0
"""The collectives of msccl-tools, for its scripts: contents of buffers at the start, and a check of the end."""

from typing import Any

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
        """For each rank, what its input and output buffers hold at the start: lists of chunks or None."""
        raise NotImplementedError(f"{type(self).__name__} gives no init_buffers()")

    def check(self, prog: Any) -> bool | None:
        """Check whether `prog.buffers` satisfies the postcondition."""
        return None

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        """The place's name in memory, for collectives whose buffers share memory."""
        return buffer, index

    def _is_as_expected(self, prog: Any, expected: dict[tuple[int, int], Any]) -> bool:
        """Check whether each (rank, output index) holds that chunk or sum; prints the ones that do not."""
        correct = True
        for (rank, index), wanted in expected.items():
            buffer, at = self.get_buffer_index(rank, MscclBuffer.output, index)
            found = prog.buffers[rank][buffer][at]
            if found != wanted:
                print(f"rank {rank}'s output chunk {index} holds {found}, not {wanted}")
                correct = False
        return correct


class AllToAll(MscclCollective):
    """Rank r's output is every rank's r-th block of `chunk_factor` chunks."""

    name = "alltoall"

    def init_buffers(self) -> Buffers:
        size, block = self.num_ranks * self.chunk_factor, self.chunk_factor
        ranks = []
        for rank in range(self.num_ranks):
            held = [MscclChunk(rank, index, index // block, rank * block + index % block) for index in range(size)]
            ranks.append({MscclBuffer.input: held, MscclBuffer.output: held if self.inplace else [None] * size})
        return ranks

    def check(self, prog: Any) -> bool:
        size, block = self.num_ranks * self.chunk_factor, self.chunk_factor
        return self._is_as_expected(
            prog,
            {
                (rank, index): MscclChunk(index // block, rank * block + index % block)
                for rank in range(self.num_ranks)
                for index in range(size)
            },
        )


class AllGather(MscclCollective):
    """Every rank's output is all ranks' inputs of `chunk_factor` chunks. In place, the input is a part of it."""

    name = "allgather"

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

    def check(self, prog: Any) -> bool:
        block = self.chunk_factor
        return self._is_as_expected(
            prog,
            {
                (rank, index): MscclChunk(index // block, index % block)
                for rank in range(self.num_ranks)
                for index in range(self.num_ranks * block)
            },
        )

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        if self.inplace and buffer is MscclBuffer.input:
            return MscclBuffer.output, rank * self.chunk_factor + index
        return buffer, index


class AllReduce(MscclCollective):
    """Every rank's `chunk_factor` output chunks are the sums of all ranks' input chunks."""

    name = "allreduce"

    def init_buffers(self) -> Buffers:
        ranks = []
        for rank in range(self.num_ranks):
            held = [MscclChunk(rank, index, -1, index) for index in range(self.chunk_factor)]
            ranks.append(
                {MscclBuffer.input: held, MscclBuffer.output: held if self.inplace else [None] * self.chunk_factor}
            )
        return ranks

    def check(self, prog: Any) -> bool:
        sums = [_sum_of_all(self.num_ranks, index) for index in range(self.chunk_factor)]
        return self._is_as_expected(
            prog, {(rank, index): wanted for rank in range(self.num_ranks) for index, wanted in enumerate(sums)}
        )

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        return (MscclBuffer.input if self.inplace and buffer is MscclBuffer.output else buffer), index


class ReduceScatter(MscclCollective):
    """Rank r's output is the sum of the r-th blocks of `chunk_factor` chunks. In place, it is a part of the input."""

    name = "reduce_scatter"

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

    def check(self, prog: Any) -> bool:
        block = self.chunk_factor
        return self._is_as_expected(
            prog,
            {
                (rank, index): _sum_of_all(self.num_ranks, rank * block + index)
                for rank in range(self.num_ranks)
                for index in range(block)
            },
        )

    def get_buffer_index(self, rank: int, buffer: Any, index: int) -> tuple[Any, int]:
        if self.inplace and buffer is MscclBuffer.output:
            return MscclBuffer.input, rank * self.chunk_factor + index
        return buffer, index


def _sum_of_all(ranks: int, index: int) -> ReduceChunk:
    return ReduceChunk(-1, [MscclChunk(rank, index) for rank in range(ranks)])
