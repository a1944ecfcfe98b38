# SPDX-License-Identifier: Apache-2.0
"""Indices of what is left of a pruned tensor: one for its gradient, its fp32 weight and its moments.

    FullIndex       of what is not pruned: no memory
    BitmapIndex     a bit a number, and an int32 prefix sum for every 1,024: 0.129 bytes a dense number
    PositionIndex   the paper's (section 4.1.2): int32 positions in a one-dimensional view, 4 bytes each

Dense tensors are flat and contiguous. On GPUs kernels compress and expand by bitmaps; all else torch does.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from stretto.execution import SparseIndexKind
from stretto.optim.sparse.masks import unpack

if TYPE_CHECKING:
    from stretto.optim.sparse import kernels

_BLOCK = 1024  # of the kernels, which need Triton
MAX_POSITIONS = 1 << 31


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
        """Where they are, for torch."""

    def _compress(self, dense: Tensor, out: Tensor, first: int, last: int, adds: bool) -> None:
        values = dense[self._places(first, last)]
        out.copy_(out + values if adds else values)

    def _expand(self, left: Tensor, dense: Tensor, first: int, last: int, flags: list[Tensor]) -> None:
        places = self._places(first, last)
        for flag in flags:  # on a GPU the host does not wait for it
            left = torch.where(flag == 0, left, dense[places])
        dense[places] = left.to(dense.dtype)


class FullIndex(SparseIndex):
    """Of a tensor that is not pruned: all of its numbers are left."""

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
        self.prefix = (ends - blocks).to(wide)
        self.num_bytes = self.bits.nbytes + self.prefix.nbytes
        self._parts: dict[tuple[int, int], tuple[int, int]] = {}

    def fill(self, left: Tensor, dense: Tensor) -> Tensor:
        # The kernel writes the zeros, too.
        return self.expand(left, dense) if dense.is_cuda and self.count else super().fill(left, dense)

    def ranges(self, first: int, last: int) -> "list[kernels.LeftRange]":
        """The kernels' arguments for some of the numbers that are left: one launch for all, and else one each for the
        blocks at both ends, which others share, and for those between. The host waits for the device at the first call
        with these numbers."""
        from stretto.optim.sparse.kernels import LeftRange  # imported here, since Triton comes with GPUs

        if (first, last) == (0, self.count):
            return [LeftRange(first, last, 0, len(self.prefix), False)]
        if (first, last) not in self._parts:
            asked = torch.tensor([first, last - 1], dtype=self.prefix.dtype, device=self.prefix.device)
            begin, end = (torch.searchsorted(self.prefix, asked, right=True) - 1).tolist()
            self._parts[first, last] = begin, end
        begin, end = self._parts[first, last]
        found = [LeftRange(first, last, begin, 1, True)]
        if end > begin + 1:
            found.append(LeftRange(first, last, begin + 1, end - begin - 1, False))
        return [*found, LeftRange(first, last, end, 1, True)] if end > begin else found

    def launch_compress(self, dense: Tensor, out: Tensor, first: int, last: int, adds: bool, **shape: int) -> None:
        """`compress` on a GPU. shape: `turns` of the kernel."""
        from stretto.optim.sparse import kernels

        parts = self.ranges(first, last)
        part = parts[0]._replace(blocks=sum(part.blocks for part in parts))
        kernels.launch_compress(dense, self.bits, self.prefix, out, part, adds=adds, **shape)

    def launch_expand(
        self, left: Tensor, dense: Tensor, first: int, last: int, flags: list[Tensor], **shape: int
    ) -> None:
        """`expand` on a GPU, unless one of at most two flags is not 0; and zeros where nothing is left."""
        from stretto.optim.sparse import kernels

        for part in self.ranges(first, last):
            kernels.launch_expand(left, self.bits, self.prefix, dense, part, flags, **shape)

    def _places(self, first: int, last: int) -> Tensor:
        return unpack(self.bits, self.size).nonzero().squeeze(1)[first:last]

    def _compress(self, dense: Tensor, out: Tensor, first: int, last: int, adds: bool) -> None:
        (self.launch_compress if dense.is_cuda else super()._compress)(dense, out, first, last, adds)

    def _expand(self, left: Tensor, dense: Tensor, first: int, last: int, flags: list[Tensor]) -> None:
        (self.launch_expand if dense.is_cuda else super()._expand)(left, dense, first, last, flags)


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
    if kind not in get_args(SparseIndexKind):
        raise ValueError(f"index is {kind!r}, but must be one of {', '.join(get_args(SparseIndexKind))}")
    return BitmapIndex(bits, size) if kind == "bitmap" else PositionIndex(bits, size)


def _count_bits(packed: Tensor) -> Tensor:
    """How many bits of each byte are 1, uint8."""
    pairs = packed - ((packed >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F
