# SPDX-License-Identifier: Apache-2.0
"""Indices of what is left of a pruned tensor: one for its gradient, its fp32 weight and its moments.

    FullIndex       of what is not pruned: no memory
    BitmapIndex     a bit a number, and an int32 prefix sum for every 1,024: 0.129 bytes a dense number
    PositionIndex   the paper's (section 4.1.2): int32 positions in a one-dimensional view, 4 bytes each

Dense tensors are flat and contiguous. On GPUs kernels compress and expand by bitmaps; all else torch does.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from stretto.execution import SparseIndexKind
from stretto.optim.sparse.masks import pack, unpack
from stretto.suggestions import require_one_of

if TYPE_CHECKING:
    from stretto.optim.sparse import kernels

_BLOCK = 1024  # of the kernels, which need Triton
MAX_POSITIONS = 1 << 31


def runs_kernels(tensor: Tensor) -> bool:
    """True where kernels compress and expand by bitmaps."""
    return tensor.is_cuda


class SparseIndex(ABC):
    """The places of `count` numbers that are left of `size`.

    Arguments `first` and `last` choose some of those that are left; by default all.
    """

    size: int
    count: int
    num_bytes = 0

    def compress(
        self, dense: Tensor, out: Tensor, *, first: int = 0, last: int | None = None, adds: bool = False
    ) -> Tensor:
        """Write the numbers of `dense` [size] that are left to `out` [last - first], or add them; returns `out`.

        Sums of 16-bit numbers are made in fp32 and rounded, as torch's are.
        """
        last = self.count if last is None else last
        if first < last:
            self._compress(dense, out, first, last, adds)
        return out

    def expand(
        self,
        left: Tensor,
        dense: Tensor,
        *,
        first: int = 0,
        last: int | None = None,
        skip: Tensor | None = None,
        failed: Tensor | None = None,
    ) -> Tensor:
        """Write `left` [last - first] to its places in `dense` [size], which has zeros elsewhere; returns `dense`.

        skip, failed: int32 [1], or None; while one is not 0, nothing is written.
        """
        last = self.count if last is None else last
        if first < last:
            self._expand(left, dense, first, last, [flag for flag in (skip, failed) if flag is not None])
        return dense

    def fill(self, left: Tensor, dense: Tensor) -> Tensor:
        """Write all of `dense` [size], which may hold anything: `left` [count], and zeros. Returns `dense`."""
        return self.expand(left, dense.zero_())

    @abstractmethod
    def _places(self, first: int, last: int) -> "slice | Tensor":
        """Return their places, as torch indexes by them."""

    def _compress(self, dense: Tensor, out: Tensor, first: int, last: int, adds: bool) -> None:
        values = dense[self._places(first, last)]
        (out.add_ if adds else out.copy_)(values)

    def _expand(self, left: Tensor, dense: Tensor, first: int, last: int, flags: list[Tensor]) -> None:
        places = self._places(first, last)
        for flag in flags:  # on a GPU the host does not wait for it
            left = torch.where(flag == 0, left, dense[places])
        dense[places] = left.to(dense.dtype)


class FullIndex(SparseIndex):
    """The index of a tensor that is not pruned: all of its numbers are left."""

    def __init__(self, size: int) -> None:
        self.size = self.count = size

    def _places(self, first: int, last: int) -> slice:
        return slice(first, last)


class BitmapIndex(SparseIndex):
    """A bit a number: uint8, the lowest bit first; and how many are left before each block of 1,024 numbers."""

    def __init__(self, bits: Tensor, size: int) -> None:
        self.size = size
        missing = -(-size // _BLOCK) * _BLOCK // 8 - bits.numel()
        self.bits = torch.cat((bits, bits.new_zeros(missing))) if missing else bits
        blocks = _count_bits(self.bits).view(-1, _BLOCK // 8).sum(1, dtype=torch.int64)
        ends = blocks.cumsum(0)
        self.count = int(ends[-1]) if len(ends) else 0
        wide = torch.int64 if size >= MAX_POSITIONS else torch.int32
        self.move(self.bits, (ends - blocks).to(wide), 0)

    def move(self, bits: Tensor, prefix: Tensor, first: int) -> None:
        """Have the bitmap in other memory, with prefix sums that count the first number that is left as `first`."""
        self.bits, self.prefix, self._first = bits, prefix, first
        self.num_bytes = bits.nbytes + prefix.nbytes

    def fill(self, left: Tensor, dense: Tensor) -> Tensor:
        # The kernel writes the zeros, too.
        return self.expand(left, dense) if runs_kernels(dense) and self.count else super().fill(left, dense)

    def launch_compress(self, dense: Tensor, out: Tensor, adds: bool, **shape: Any) -> None:
        """`compress` all on a GPU. shape: `turns` of the kernel."""
        from stretto.optim.sparse import kernels  # imported here, since Triton comes with GPUs

        part = kernels.LeftRange(self._first, self._first + self.count, 0, len(self.prefix), False)
        kernels.launch_compress(dense, self.bits, self.prefix, out, part, adds=adds, **shape)

    def launch_expand(self, left: Tensor, dense: Tensor, flags: list[Tensor], **shape: Any) -> None:
        """`expand` all on a GPU, unless one of at most two flags is not 0; and zeros where nothing is left."""
        from stretto.optim.sparse import kernels

        part = kernels.LeftRange(self._first, self._first + self.count, 0, len(self.prefix), False)
        kernels.launch_expand(left, self.bits, self.prefix, dense, part, flags, **shape)

    def _places(self, first: int, last: int) -> Tensor:
        return unpack(self.bits, self.size).nonzero().squeeze(1)[first:last]

    def _compress(self, dense: Tensor, out: Tensor, first: int, last: int, adds: bool) -> None:
        if runs_kernels(dense) and (first, last) == (0, self.count):
            self.launch_compress(dense, out, adds)
        else:
            super()._compress(dense, out, first, last, adds)

    def _expand(self, left: Tensor, dense: Tensor, first: int, last: int, flags: list[Tensor]) -> None:
        if runs_kernels(dense) and (first, last) == (0, self.count):
            self.launch_expand(left, dense, flags)
        else:
            super()._expand(left, dense, first, last, flags)


class PositionIndex(SparseIndex):
    """int32 positions, ascending. ValueError for a tensor of more than 2^31 numbers."""

    def __init__(self, bits: Tensor, size: int) -> None:
        if size > MAX_POSITIONS:
            raise ValueError(
                f"a layer has {size:,} numbers, but index='int32' takes at most 2^31 = {MAX_POSITIONS:,}; "
                "index='bitmap' would do"
            )
        self.size = size
        self.positions = unpack(bits, size).nonzero().squeeze(1).int()
        self.count = len(self.positions)
        self.num_bytes = self.positions.nbytes

    def _places(self, first: int, last: int) -> Tensor:
        return self.positions[first:last]


def make_index(bits: Tensor, size: int, kind: SparseIndexKind = "bitmap") -> SparseIndex:
    """The index of a mask, packed by `masks.pack`, of `size` numbers. ValueError for a kind that there is not, and for
    a tensor of more than 2^31 numbers with int32 positions."""
    require_one_of(get_args(SparseIndexKind), index=kind)
    return BitmapIndex(bits, size) if kind == "bitmap" else PositionIndex(bits, size)


def make_table(indices: Sequence[SparseIndex], firsts: Sequence[int], dense: Sequence[Tensor]) -> "BitmapTable | None":
    """The table of these, where kernels run; None elsewhere, for int32 positions, where nothing is left of any, and for
    tensors that do not begin at multiples of 16 bytes, as a user's views may not."""
    if any(isinstance(index, PositionIndex) for index in indices) or not any(index.count for index in indices):
        return None
    if any(each.data_ptr() % 16 for each in dense):
        return None
    return BitmapTable(indices, firsts, dense) if runs_kernels(dense[0]) else None


class BitmapTable:
    """The bitmaps of several tensors as one, so that one launch compresses or expands many of them.

    indices: of the tensors, in order; bitmaps, which become parts of the table's, or full. firsts: of each, the number
    of its first that is left, ascending: its place among what is left of all. dense: the tensors that `expand` writes.
    """

    def __init__(self, indices: Sequence[SparseIndex], firsts: Sequence[int], dense: Sequence[Tensor]) -> None:
        from stretto.optim.sparse import kernels

        device = dense[0].device
        parts = [
            index
            if isinstance(index, BitmapIndex)
            else BitmapIndex(pack(torch.ones(index.size, dtype=torch.bool, device=device)), index.size)
            for index in indices
        ]
        self.stop, self._like = firsts[-1] + parts[-1].count, dense[0]
        self._bits = torch.cat([part.bits for part in parts])
        wide = torch.int64 if self.stop >= MAX_POSITIONS else torch.int32
        self._prefix = torch.cat([part.prefix.to(wide) + first for part, first in zip(parts, firsts, strict=True)])
        blocks = [len(part.prefix) for part in parts]
        self._first_blocks = [0, *accumulate(blocks)]
        bits, prefix = self._bits.view(-1, _BLOCK // 8).split(blocks), self._prefix.split(blocks)
        for number, part in enumerate(parts):
            part.move(bits[number].view(-1), prefix[number], firsts[number])
        ends = [block * _BLOCK + part.size for block, part in zip(self._first_blocks, parts, strict=False)]
        self._addresses = [self._address(number, each) for number, each in enumerate(dense)]
        columns = (self._first_blocks[:-1], ends, self._addresses)
        self._all = kernels.TensorPlaces(*[torch.tensor(column, device=device) for column in columns])
        read, some = self._all.ends.new_zeros(2, len(parts) + kernels.NOTED)
        self._read, self._some = (self._all._replace(addresses=noted) for noted in (read, some))
        self._written = self._all
        self._parts: dict[tuple[int, int], list[kernels.LeftRange]] = {}

    def compress(self, dense: Mapping[int, Tensor], out: Tensor, *, adds: bool) -> None:
        """Compress flat tensors of one dtype, by their numbers, to their places in `out`, or add them there."""
        from stretto.optim.sparse import kernels

        numbers = sorted(dense)
        while numbers:
            first = numbers[0]
            last = max(number for number in numbers if number < first + kernels.NOTED) + 1
            addresses = [
                self._address(number, dense[number]) if number in dense else kernels.ABSENT
                for number in range(first, last)
            ]
            begin, end = self._first_blocks[first], self._first_blocks[last]
            part = kernels.LeftRange(0, self.stop, begin, end - begin, False, first, last)
            if part.blocks:
                kernels.note_addresses(self._read.addresses, first, addresses)
                kernels.launch_compress(
                    dense[first], self._bits, self._prefix, out, part, adds=adds, tensors=self._read
                )
            numbers = [number for number in numbers if number >= last]

    def read(self, out: Tensor, first: int, last: int) -> None:
        """Compress the dense tensors to `out`: the numbers `first` to `last` of what is left of all."""
        from stretto.optim.sparse import kernels

        parts = self._find_parts(first, last)
        part = parts[0]._replace(blocks=sum(part.blocks for part in parts), last_tensor=parts[-1].last_tensor)
        kernels.launch_compress(self._like, self._bits, self._prefix, out, part, adds=False, tensors=self._all)

    def leave_out(self, absent: Collection[int]) -> None:
        """Have `expand` write all dense tensors but these from now on, in the order of the current stream."""
        from stretto.optim.sparse import kernels

        self._written = self._some if absent else self._all
        for first in range(0, len(self._addresses) if absent else 0, kernels.NOTED):
            own = enumerate(self._addresses[first : first + kernels.NOTED], first)
            addresses = [kernels.ABSENT if number in absent else address for number, address in own]
            kernels.note_addresses(self._some.addresses, first, addresses)

    def expand(self, left: Tensor, first: int, last: int, flags: Sequence[Tensor] = ()) -> None:
        """Write the numbers `first` to `last` of what is left of all to their places in the dense tensors.

        flags: as the kernel's.
        """
        from stretto.optim.sparse import kernels

        for part in self._find_parts(first, last):
            kernels.launch_expand(left, self._bits, self._prefix, self._like, part, flags, tensors=self._written)

    def _address(self, number: int, dense: Tensor) -> int:
        """Return the address at which block 0 would be, if the tensor's blocks followed it."""
        return dense.data_ptr() - self._first_blocks[number] * _BLOCK * dense.itemsize

    def _find_parts(self, first: int, last: int) -> "list[kernels.LeftRange]":
        """The kernels' arguments for some of the numbers that are left: a launch for all their blocks, but one each for
        those at both ends that have others, too. The host waits for the device at the first call with these numbers."""
        if (first, last) not in self._parts:
            self._parts[first, last] = list(self._list_parts(first, last))
        return self._parts[first, last]

    def _list_parts(self, first: int, last: int) -> "Iterator[kernels.LeftRange]":
        from stretto.optim.sparse.kernels import LeftRange

        prefix = self._prefix
        asked = torch.tensor([first, last - 1], dtype=prefix.dtype, device=prefix.device)
        begins, ends = torch.searchsorted(prefix, asked, right=True) - 1
        after = (ends + 1).clamp(max=len(prefix) - 1)
        begin, end, before, behind = torch.stack((begins, ends, prefix[begins], prefix[after])).tolist()
        stop = self.stop if end + 1 == len(prefix) else behind
        low, high = begin + (before < first), end + 1 - (last < stop)
        for start, until in ((begin, low), (low, high), (max(low, high), end + 1)):
            if start < until:
                tensor = bisect_right(self._first_blocks, start) - 1
                last_tensor = bisect_left(self._first_blocks, until)
                is_part = start < low or start >= high
                yield LeftRange(first, last, start, until - start, is_part, tensor, last_tensor)


def _count_bits(packed: Tensor) -> Tensor:
    """Count the bits of each byte that are 1, uint8."""
    pairs = packed - ((packed >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F
