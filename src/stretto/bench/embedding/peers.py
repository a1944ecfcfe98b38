# SPDX-License-Identifier: Apache-2.0
"""The peers of the fused embedding look-up: library operators, one batched kernel, and that kernel on two streams."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.ops.embedding.backward import LookupInput, TableUpdate, choose_backward_config, reduce_rows, sort_lookups
from stretto.ops.embedding.forward import look_up_alone
from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.embedding.placement import EmbeddingPlacement


@dataclass(frozen=True)
class LookupBatch:
    """This rank's tables, and the look-ups of the global batch in them."""

    placement: EmbeddingPlacement
    tables: list[Tensor]
    indices: Tensor
    offsets: Tensor

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(table.shape[0] for table in self.tables)

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(table.shape[1] for table in self.tables)

    def count_distinct_numbers(self) -> int:
        """Count the numbers of all rows that are looked up at least once."""
        bounds = self.offsets[:: self.placement.batch].tolist()
        parts = zip(itertools.pairwise(bounds), self.dims, strict=True)
        return sum(self.indices[first:last].unique().numel() * dim for (first, last), dim in parts)

    def lookups(self) -> LookupInput:
        """The look-ups in the form that the backward pass expects."""
        return LookupInput(self.indices, self.offsets, None, "sum", self.rows, self.dims)


class EmbeddingBags:
    """The paper's baseline: an nn.EmbeddingBag a table, all-to-all, and concatenation."""

    def __init__(self, batch: LookupBatch) -> None:
        self._batch = batch
        self._bags = [nn.EmbeddingBag.from_pretrained(t, mode="sum", include_last_offset=True) for t in batch.tables]
        count, bounds = batch.placement.batch, batch.offsets.tolist()
        self._parts = []
        for table in range(len(batch.tables)):
            first, last = bounds[table * count], bounds[(table + 1) * count]
            offsets = batch.offsets[table * count : (table + 1) * count + 1] - first
            self._parts.append((batch.indices[first:last], offsets))

    def look_up(self) -> list[Tensor]:
        """[global batch, dim] of each table."""
        return [bag(*part) for bag, part in zip(self._bags, self._parts, strict=True)]

    def forward(self) -> Tensor:
        """[global batch / world, width]."""
        placement = self._batch.placement
        pooled = torch.cat(self.look_up(), 1)
        return _exchange_rows(pooled, placement)


def _split_sizes(placement: EmbeddingPlacement) -> tuple[list[int], list[int]]:
    """Numbers that this rank receives from each rank in the all-to-all of pooled vectors, and sends to each."""
    received = [placement.local_batch * width for width in placement.widths]
    return received, [received[placement.rank]] * placement.world_size


def _exchange_rows(pooled: Tensor, placement: EmbeddingPlacement) -> Tensor:
    """All-to-all of pooled [global batch, this rank's columns]; returns [global batch / world, all columns]."""
    received = pooled.new_empty(placement.local_batch * placement.width)
    sizes, sent = _split_sizes(placement)
    dist.all_to_all_single(received, pooled.view(-1), sizes, sent)
    return torch.cat([part.view(placement.local_batch, -1) for part in received.split(sizes)], 1)


class Batched:
    """The strongest baseline: the fused operator's kernel without communication, one launch for all tables."""

    def __init__(self, batch: LookupBatch) -> None:
        self._batch = batch
        device = batch.offsets.device
        placement = batch.placement
        self._faults = IndexErrors(placement.rank, device)
        width = placement.widths[placement.rank]
        self._shape = (placement.world_size, placement.local_batch, width)
        self._out = torch.empty(self._shape, dtype=placement.dtype, device=device)

    def look_up(self) -> Tensor:
        """[world, global batch / world, this rank's columns]."""
        batch = self._batch
        world = batch.placement.world_size
        if not batch.tables:
            return self._out
        return look_up_alone(batch.indices, batch.offsets, batch.tables, None, world, "sum", self._out, self._faults)

    def forward(self) -> Tensor:
        """[global batch / world, width]."""
        return _exchange_rows(self.look_up().view(self._batch.placement.batch, -1), self._batch.placement)

    def push(self, grad: Tensor) -> Tensor:
        """All-to-all of the gradient [global batch / world, width]; returns [global batch, this rank's columns]."""
        placement = self._batch.placement
        parts = grad.split(list(placement.widths), 1)
        sent = torch.cat([part.reshape(-1) for part in parts])
        sizes, counts = _split_sizes(placement)
        received = grad.new_empty(sum(counts))
        dist.all_to_all_single(received, sent, counts, sizes)
        return received.view(placement.batch, -1)

    def update(self, grad: Tensor, settings: Tensor) -> None:
        """All-to-all of the gradient, then a fused SGD step."""
        batch = self._batch
        addresses = [table.data_ptr() for table in batch.tables]
        reduce_rows(self._stage(grad), batch.dims, addresses, [0] * len(addresses), TableUpdate("sgd", settings))

    def _stage(self, grad: Tensor) -> Any:
        batch = self._batch
        block = 1 << (max(batch.dims) - 1).bit_length()
        config = choose_backward_config(block * grad.element_size(), grad.device)
        return sort_lookups(batch.lookups(), batch.placement, self.push(grad), config, self._faults)


class Chunked:
    """The batched kernel over some tables at a time; each part's all-to-all overlaps the next part's look-up."""

    def __init__(self, batch: LookupBatch, chunks: int) -> None:
        self._placement = placement = batch.placement
        self._batched, self._parts = [], []
        for number in range(chunks):  # ranks may have unequally many tables, and none in a chunk
            ranges = [slice(len(d) * number // chunks, len(d) * (number + 1) // chunks) for d in placement.dims]
            dims = tuple(of_rank[taken] for of_rank, taken in zip(placement.dims, ranges, strict=True))
            own = ranges[placement.rank]
            offsets = batch.offsets[own.start * placement.batch : own.stop * placement.batch + 1]
            part = LookupBatch(replace(placement, dims=dims), batch.tables[own], batch.indices, offsets)
            self._batched.append(Batched(part))
            self._parts.append(part)

    def forward(self) -> Tensor:
        """[global batch / world, width]."""
        received, works = [], []
        for batched, part in zip(self._batched, self._parts, strict=True):
            pooled, placement = batched.look_up(), part.placement
            buffer = pooled.new_empty(placement.local_batch * placement.width)
            works.append(dist.all_to_all_single(buffer, pooled.view(-1), *_split_sizes(placement), async_op=True))
            received.append((buffer, placement))
        for work in works:
            work.wait()
        columns = []
        for rank in range(self._placement.world_size):
            for buffer, placement in received:
                part = buffer.split(_split_sizes(placement)[0])[rank]
                columns.append(part.view(placement.local_batch, placement.widths[rank]))
        return torch.cat(columns, 1)


def exchange_alone(batch: LookupBatch) -> Callable[[], Tensor]:
    """The library's all-to-all of pooled vectors by itself."""
    placement = batch.placement
    pooled = torch.zeros(
        placement.batch, placement.widths[placement.rank], dtype=placement.dtype, device=batch.offsets.device
    )
    received, sizes = pooled.new_empty(placement.local_batch * placement.width), _split_sizes(placement)

    def run() -> Tensor:
        dist.all_to_all_single(received, pooled.view(-1), *sizes)
        return received

    return run


def draw_lookups(
    poolings: Sequence[int], rows: Sequence[int], batch: int, device: torch.device, seed: int, *, is_fixed: bool
) -> tuple[Tensor, Tensor]:
    """Draw random indices and offsets. Bags have `pooling` indices if is_fixed, else that many on average."""
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths, indices = [], []
    for pooling, count in zip(poolings, rows, strict=True):
        if is_fixed:
            length = torch.full((batch,), pooling, device=device)
        else:
            length = torch.randint(0, 2 * pooling + 1, (batch,), device=device, generator=generator)
        lengths.append(length)
        indices.append(torch.randint(0, count, (int(length.sum()),), device=device, generator=generator))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), torch.cat(lengths).cumsum(0)])
    return torch.cat(indices), offsets
