# SPDX-License-Identifier: Apache-2.0
"""Dense 16-bit weights beside optimizer state of what is left of them (Singh, section 4.1.1).

A step updates a bucket of what is left, in a buffer of one bucket, and expands it into the dense weights: the paper's
16-bit copy of all that is left (2 f phi bytes, section 4.1.3) is never made.

On GPUs, one launch expands a bucket, and one compresses the gradients of many parameters, which are kept for it.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.memory import failures
from stretto.optim.sparse.index import BitmapTable, FullIndex, SparseIndex, make_table
from stretto.optim.state.layout import Bucket, StateLayout
from stretto.optim.state.residence import FlatWeights

MAX_KEPT = 1 << 26
"""Dense numbers of gradients that wait to be compressed: 128 MiB in bf16."""


class _BucketPiece(NamedTuple):
    """The numbers `first` to `last` of a parameter's that are left, and where they are in their bucket."""

    parameter: int
    first: int
    last: int
    part: slice


class SparseWeights(FlatWeights):
    """Weights of which each parameter has a dense tensor of its own, and an index of what is left.

    indices: of each parameter of the layout, whose sizes are `count`. `attach` gives each its dense tensor.
    """

    def __init__(
        self, layout: StateLayout, dtype: torch.dtype, device: torch.device, indices: Sequence[SparseIndex]
    ) -> None:
        self.dtype, self.indices, self._places = dtype, indices, layout.places
        self.flat = torch.empty(0, dtype=dtype, device=device)  # there is no such tensor of what is left
        self._dense: dict[int, Tensor] = {}
        self._pieces = [list(_find_pieces(layout, bucket)) for bucket in layout.buckets]
        self._present: Collection[int] = ()
        self._flags: tuple[Tensor | None, Tensor | None] = (None, None)
        self._reads = False
        self._buffers: list[Tensor] = []
        self._table: BitmapTable | None = None
        self._numbers: dict[int, int] = {}  # in the table
        self._kept: dict[int, tuple[Tensor, bool]] = {}  # gradients that are not compressed yet, by these numbers
        self._gradients = self.flat

    def attach(self, index: int, dense: Tensor) -> None:
        """Make `dense`, flat, a parameter's weights."""
        self._dense[index] = dense

    def prepare(self, rows: int, sets: int, gradients: Tensor, *, reads: bool) -> None:
        self._reads, self._gradients = reads, gradients
        self._buffers = [self.flat.new_zeros(rows) for _ in range(sets)]
        order = sorted(range(len(self.indices)), key=lambda index: self._places[index].start)
        self._table = make_table(
            [self.indices[index] for index in order],
            [self._places[index].start for index in order],
            [self._dense[index] for index in order],
        )
        self._numbers = {index: number for number, index in enumerate(order)}

    def begin(self, present: Collection[int], skip: Tensor) -> None:
        self._present = present
        if self._table is not None:
            self._table.leave_out({number for index, number in self._numbers.items() if index not in present})
        self._flags = (None, None) if self._reads else (skip, failures.find_flag(skip.device))

    def buffer(self, bucket: Bucket, number: int = 0) -> Tensor:
        return self._buffers[number][: bucket.size]

    def open(self, bucket: Bucket, number: int = 0) -> Tensor:
        buffer = self.buffer(bucket, number)
        if self._reads and self._table is not None:
            self._table.read(buffer, bucket.start, bucket.stop)
        elif self._reads:
            for index, first, last, part in self._pieces[bucket.index]:
                self.indices[index].compress(self._dense[index], buffer[part], first=first, last=last)
        return buffer

    def close(self, bucket: Bucket, number: int = 0) -> None:
        buffer, (skip, failed) = self.buffer(bucket, number), self._flags
        if self._table is not None:
            flags = [flag for flag in self._flags if flag is not None]
            self._table.expand(buffer, bucket.start, bucket.stop, flags)
            return
        for index, first, last, part in self._pieces[bucket.index]:
            if index in self._present:
                own, dense = self.indices[index], self._dense[index]
                own.expand(buffer[part], dense, first=first, last=last, skip=skip, failed=failed)

    def read(self, index: int) -> Tensor:
        own, dense = self.indices[index], self._dense[index]
        return own.compress(dense, dense.new_empty(own.count))

    def write(self, index: int, weight: Tensor) -> None:
        self.indices[index].fill(weight, self._dense[index])

    def take_gradient(self, index: int, gradient: Tensor, out: Tensor, *, adds: bool) -> None:
        if isinstance(self.indices[index], FullIndex):
            super().take_gradient(index, gradient.view_as(out), out, adds=adds)
        else:
            self.indices[index].compress(gradient.reshape(-1), out, adds=adds)

    def keep_gradient(self, index: int, gradient: Tensor, out: Tensor, *, adds: bool) -> None:
        if self._table is None or isinstance(self.indices[index], FullIndex):
            self.take_gradient(index, gradient, out, adds=adds)
            return
        if (number := self._numbers[index]) in self._kept:
            self.flush()
        self._kept[number] = gradient.reshape(-1), adds
        if sum([kept.numel() for kept, _ in self._kept.values()]) >= MAX_KEPT:
            self.flush()

    def flush(self) -> None:
        if not self._kept:
            return
        assert self._table is not None
        kept, self._kept = self._kept, {}
        for dtype, adds in {(gradient.dtype, adds) for gradient, adds in kept.values()}:
            alike = {number: own[0] for number, own in kept.items() if (own[0].dtype, own[1]) == (dtype, adds)}
            self._table.compress(alike, self._gradients, adds=adds)

    def drop(self) -> None:
        self._kept.clear()


def _find_pieces(layout: StateLayout, bucket: Bucket) -> list[_BucketPiece]:
    found = []
    for index in layout.chunks[bucket.chunk].parameters:
        place = layout.places[index]
        start, stop = max(place.start, bucket.start), min(place.stop, bucket.stop)
        if start < stop:
            part = slice(start - bucket.start, stop - bucket.start)
            found.append(_BucketPiece(index, start - place.start, stop - place.start, part))
    return found
