# SPDX-License-Identifier: Apache-2.0
"""Divides tensors into chunks, whatever their number of elements.

A buffer is a row of blocks, and a block a row of chunks: an all-gather's output, a reduce-scatter's input and both
buffers of an all-to-all are one block a rank, as torch.distributed lays them out; other buffers are one block. All
blocks of a call have the same number n of elements. Each is divided on its own, into k chunks of ceil(n / k) elements,
of which the last ones are shorter or empty.

All executors follow one rule, whatever the sizes and whether a schedule runs in place or not:

1. A program may move any chunk through any place, so a full chunk may pass through a place where a short one belongs.
   It keeps all its elements: a schedule gives what it would give on tensors whose chunks are all full, and only the
   elements behind the end of a short chunk are dropped in the end.
2. Called out of place, no executor writes to the caller's input, even where the schedule does.
3. Memory without a postcondition (`Collective.expected` gives None, and in place what is outside
   of the output) may hold anything afterwards, and differ from executor to executor.

How they follow it:
- The host executor runs an uneven call on copies with full chunks, and on a copy of an input that the schedule writes
  (`Buffers`).
- The interpreter on GPUs does the same, but only where a longer chunk passes through a shorter place
  (`find_narrowing_writes`) or the schedule writes its input: other calls run on the caller's own tensors.
- The fused kernel keeps full chunks in registers and in mailboxes and stores nothing but outputs.
- Copy engines send from buffers: they never send a value from, or write it to, a place that may be shorter than the
  value (`StoreChunk.is_whole`).
"""

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from stretto.collectives.collective import Buffer, Collective
from stretto.collectives.schedule import RankProgram, Schedule

ALIGNMENT = 16
"""The bytes of one access of a CUDA thread."""


@dataclass(frozen=True)
class BlockLayout:
    """Blocks of `block_elements` elements, in `block_chunks` chunks of up to `chunk_elements` each."""

    block_elements: int
    block_chunks: int
    chunk_elements: int

    @property
    def is_even(self) -> bool:
        """True if all chunks are full."""
        return self.block_elements == self.block_chunks * self.chunk_elements

    def chunk_length(self, index: int) -> int:
        """The elements of the buffer's chunk `index`."""
        start = index % self.block_chunks * self.chunk_elements
        return min(max(self.block_elements - start, 0), self.chunk_elements)

    def elements(self, chunks: int) -> int:
        """The elements of so many chunks from a block's start on. Raises ValueError for a part of an uneven block."""
        if self.is_even:
            return chunks * self.chunk_elements
        blocks, rest = divmod(chunks, self.block_chunks)
        if rest:
            raise ValueError(
                f"{self.block_elements} elements are not {self.block_chunks} chunks of one size, and this collective "
                f"begins a buffer {rest} chunks after a block's start: use a multiple of {self.block_chunks} elements"
            )
        return blocks * self.block_elements

    def cut(self, tensor: Tensor, chunks: int) -> Tensor:
        """A flat tensor as [chunks, chunk_elements]: a view of it, or a copy with full chunks if it is not even."""
        if self.is_even:
            return tensor.view(chunks, self.chunk_elements)
        blocks = tensor.view(chunks // self.block_chunks, self.block_elements)
        full = blocks.new_zeros(len(blocks), self.block_chunks * self.chunk_elements)
        full[:, : self.block_elements] = blocks
        return full.view(chunks, self.chunk_elements)

    def uncut(self, chunks: Tensor, tensor: Tensor) -> None:
        """Write a copy of `cut` back to `tensor`; nothing if that was a view."""
        if not self.is_even:
            blocks = tensor.view(-1, self.block_elements)  # uneven ones are not empty
            blocks.copy_(chunks.view(len(blocks), -1)[:, : self.block_elements])


def find_layout(collective: Collective, input_elements: int | None, output_elements: int | None) -> BlockLayout:
    """The layout of tensors with so many elements; None for the one that a call in place does not have.

    Raises ValueError for numbers that do not fit the collective's chunks.
    """
    chunks = count_block_chunks(collective)
    sizes = []
    for what, elements, buffer in (("input", input_elements, Buffer.IN), ("output", output_elements, Buffer.OUT)):
        if elements is None:
            continue
        blocks = collective.chunks(buffer) // chunks
        if elements % blocks if blocks else elements:
            nearest = round(elements / blocks) * blocks if blocks else 0
            raise ValueError(
                f"the {what} of {collective.name} on {collective.ranks} ranks is {blocks} blocks of one size: "
                f"{elements} elements are not, {nearest} would be"
            )
        if blocks:
            sizes.append((what, elements // blocks))
    if len({size for _, size in sizes}) > 1:
        of_input, of_output = sizes[0][1], sizes[1][1]
        output_blocks = collective.output_chunks // chunks
        raise ValueError(
            f"an input of {of_input} elements a block takes an output of {output_blocks} x {of_input} elements, "
            f"not {output_blocks} x {of_output}"
        )
    block_elements = sizes[0][1] if sizes else 0
    layout = BlockLayout(block_elements, chunks, -(-block_elements // chunks))
    if not layout.is_even:
        _require_own_places(collective, layout)
    if collective.in_place:
        _require_inside(collective, layout)
    return layout


def count_block_chunks(collective: Collective) -> int:
    """The number of chunks of a block, for tensors of any size."""
    if collective.name == "alltoall" and collective.input_chunks % collective.ranks == 0:
        return max(collective.input_chunks // collective.ranks, 1)
    return gcd(collective.input_chunks, collective.output_chunks) or 1


def _require_own_places(collective: Collective, layout: BlockLayout) -> None:
    """Refuse a collective that moves a chunk of one length to a place of another length."""
    length = layout.chunk_length
    for rank in range(collective.ranks):
        for index in range(collective.output_chunks):
            for giver, given in collective.expected(rank, index) or ():
                if length(given) != length(index):
                    raise ValueError(
                        f"{layout.block_elements} elements are not {layout.block_chunks} chunks of one size, and "
                        f"{collective.name} takes rank {giver}'s chunk {given} of {length(given)} elements to chunk "
                        f"{index} of {length(index)}: use a multiple of {layout.block_chunks} elements"
                    )


def _require_inside(collective: Collective, layout: BlockLayout) -> None:
    """Raise an error for a collective in place if one buffer is not inside the other, or begins inside a block."""
    for rank in range(collective.ranks):
        for start in collective.starts(rank):
            layout.elements(start)
    collective.require_inside()


def find_aligned_layout(
    collective: Collective, sizes: tuple[int | None, int | None], itemsize: int, *, needs_even: bool
) -> BlockLayout:
    """A layout whose chunks begin at multiples of 16 bytes, if the collective permits it; sizes: of `find_sizes`."""
    layout = find_layout(collective, *sizes)
    per_access = ALIGNMENT // itemsize
    rounded = -(-layout.chunk_elements // per_access) * per_access
    return layout if needs_even else replace(layout, chunk_elements=rounded)


def find_sizes(collective: Collective, input: Tensor, output: Tensor | None) -> tuple[int | None, int | None]:
    """The elements of a call's input and output buffer; in place only those of the larger one, `input`."""
    if output is not None:
        return input.numel(), output.numel()
    return (None, input.numel()) if collective.output_chunks > collective.input_chunks else (input.numel(), None)


def depends_on_chunk_length(collective: Collective, block_chunks: int) -> bool:
    """Check whether outputs depend on where chunks begin, so that chunks cannot be made longer for aligned accesses.

    They do if a chunk goes to another place of a block, or if a block's chunks are not all made of the same ranks'
    blocks: where some are sums and others are not, say, or where the collective promises only some of them.
    """
    for rank in range(collective.ranks):
        made_of: dict[int, list[tuple[int, int]] | None] = {}
        for index in range(collective.output_chunks):
            terms = collective.expected(rank, index)
            if any(given % block_chunks != index % block_chunks for _, given in terms or ()):
                return True
            blocks = None if terms is None else sorted((giver, given // block_chunks) for giver, given in terms)
            if made_of.setdefault(index // block_chunks, blocks) != blocks:
                return True
    return False


def writes_input(program: RankProgram) -> bool:
    """Check whether a rank's steps write to its input buffer."""
    return any(
        step.type.writes_destination and step.destination_buffer is Buffer.IN
        for block in program.thread_blocks
        for step in block.steps
    )


class Buffers:
    """One rank's three buffers while its schedule runs, each as [chunks, chunk_elements].

    `input` and `output` are flat tensors; output is None in place, where input is the one that holds both.
    """

    def __init__(
        self,
        schedule: Schedule,
        collective: Collective,
        layout: BlockLayout,
        rank: int,
        input: Tensor,
        output: Tensor | None,
    ) -> None:
        self._layout = layout
        program = schedule.ranks[rank]
        first = layout.cut(input, collective.chunks_per_loop if output is None else collective.input_chunks)
        scratch = first.new_empty(program.scratch_chunks, layout.chunk_elements)
        if output is None:
            start_in, start_out = collective.starts(rank)
            start, chunks = layout.elements(start_out), collective.output_chunks
            self._whole, self._target = first, input
            self.result = input[start : start + layout.elements(chunks)]
            given, taken = first[start_in : start_in + collective.input_chunks], first[start_out : start_out + chunks]
        else:
            given = first.clone() if writes_input(program) else first
            taken = self._whole = layout.cut(output, collective.output_chunks)
            self._target = self.result = output
        self.chunks = {Buffer.IN: given, Buffer.OUT: taken, Buffer.SCRATCH: scratch}
        for source, destination in program.copies:
            taken[destination] = given[source]

    def finish(self) -> Tensor:
        """The output, once all steps have ended."""
        self._layout.uncut(self._whole, self._target)
        return self.result


def poisoned(elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor of unwritten memory, filled with NaN, or an unlikely integer."""
    return torch.full((elements,), float("nan") if dtype.is_floating_point else 0x5A, dtype=dtype, device="cpu")


def overlap(first: Tensor, second: Tensor) -> bool:
    """Check whether two contiguous tensors share memory."""
    return first.data_ptr() < second.data_ptr() + second.nbytes and second.data_ptr() < first.data_ptr() + first.nbytes
