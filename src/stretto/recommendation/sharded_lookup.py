# SPDX-License-Identifier: Apache-2.0
"""Look-ups in tables that are cut or replicated: their bags for each shard, and one vector a table of shards' vectors.

cut_bags           a rank's bags for every shard: whole ones, or those of its rows
CombineShards      adds up the vectors of tables that are cut by rows, and puts columns in the tables' order
look_up_replicated local look-ups in tables that every rank has; their gradients are summed over ranks in fp32
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.parallel.comm.collectives import gather_rows
from stretto.recommendation.placement import TablePlacement
from stretto.recommendation.pooled_exchange import TableLookups


class ShardBags(NamedTuple):
    """A rank's bags for one shard: lengths [local batch], and the indices, in rows of the shard; total: how many.

    weights: a factor for each index, if there are any.
    """

    lengths: Tensor
    indices: Tensor
    total: int
    weights: Any = None


def cut_bags(
    indices: Tensor, lengths: Tensor, ends: Sequence[int], placement: TablePlacement, weights: Tensor | None = None
) -> list[list[ShardBags]]:
    """Return each rank's shards' bags of this rank's samples.

    indices: of all tables, and their weights. lengths: [tables, local batch], on their device. ends: where each table's
    indices begin. Shards of columns get the whole bags, those of rows the indices of their rows. If indices of tables
    that are cut by rows are on a GPU, the host waits for it once.
    """
    by_rows = [table for table in range(len(placement.tables)) if placement.kind(table) in ("row", "table-row")]
    cut: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for table in by_rows:
        starts = [placement.shards[rank][placement.owned[rank].index(table)].row for rank in placement.owners(table)]
        cut[table] = _cut_rows(indices[ends[table] : ends[table + 1]], lengths[table], starts)
    # [parts, local batch] each; one copy to the host for all.
    counts = torch.cat([of_parts.sum(1) for of_parts, *_ in cut.values()]).tolist() if cut else []
    totals, position = dict[int, list[int]](), 0
    for table, (of_parts, *_) in cut.items():
        totals[table] = counts[position : position + len(of_parts)]
        position += len(of_parts)
    parts = {table: moved.split(totals[table]) for table, (_, moved, _) in cut.items()}
    factors = {}
    if weights is not None:
        for table, (*_, order) in cut.items():
            factors[table] = weights[ends[table] : ends[table + 1]][order].split(totals[table])

    def bags(table: int, part: int) -> ShardBags:
        if table in cut:
            own = None if weights is None else factors[table][part]
            return ShardBags(cut[table][0][part], parts[table][part], totals[table][part], own)
        start, stop = ends[table : table + 2]
        own = None if weights is None else weights[start:stop]
        return ShardBags(lengths[table], indices[start:stop], stop - start, own)

    return [[bags(shard.table, shard.part) for shard in of_rank] for of_rank in placement.shards]


def _cut_rows(indices: Tensor, lengths: Tensor, starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lengths of each part's bags, [parts, local batch], a table's indices in order of parts, in their rows,
    and which index stands where. A part's indices keep their order. One below 0 goes to the first part, one above the
    rows to the last."""
    firsts = torch.tensor(starts, dtype=indices.dtype, device="cpu").to(indices.device, non_blocking=True)
    part = torch.bucketize(indices, firsts[1:], right=True)
    samples = torch.arange(len(lengths), device=indices.device)
    bag = part * len(lengths) + samples.repeat_interleave(lengths, output_size=len(indices))
    counts = lengths.new_zeros(len(starts) * len(lengths)).index_add_(0, bag, torch.ones_like(bag, dtype=lengths.dtype))
    order = part.argsort(stable=True)
    return counts.view(len(starts), -1), (indices - firsts[part])[order], order


class ShardColumns(NamedTuple):
    """Maps the exchanged vectors' columns to their places.

    targets: int64 [columns of all shards], each one's column in the tables' vectors. firsts: int64 [columns of all
    tables], the column of the first part that has it. later: for the second parts, the third ones and so on of tables
    that are cut by rows, (columns of the tables' vectors, columns of the shards') to be added up.
    """

    targets: Tensor
    firsts: Tensor
    later: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, placement: TablePlacement, device: torch.device) -> "ShardColumns":
        """The columns of exchanged vectors by rank and shard, then those of replicated tables."""
        begins, column = [], 0
        for size in placement.tables:
            begins.append(column)
            column += size.dim
        targets = list[int]()
        parts: dict[int, list[tuple[int, int]]] = {}  # by number among the parts of a row
        for of_rank in placement.shards:
            for shard in of_rank:
                first = begins[shard.table] + shard.column
                number = 0 if placement.kind(shard.table) == "column" else shard.part
                for place in range(shard.columns):
                    parts.setdefault(number, []).append((first + place, len(targets)))
                    targets.append(first + place)
        for table in placement.replicated:
            for place in range(begins[table], begins[table] + placement.tables[table].dim):
                parts.setdefault(0, []).append((place, len(targets)))
                targets.append(place)

        def put(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        firsts = [source for _, source in sorted(parts[0])]
        later = tuple(
            (put([to for to, _ in parts[number]]), put([source for _, source in parts[number]]))
            for number in sorted(parts)[1:]
        )
        return cls(put(targets), put(firsts), later)


class CombineShards(torch.autograd.Function):
    """[samples, columns of all shards] to [samples, columns of all tables], and back: each part gets the gradient.

    Parts of a bag are added in rank order, in fp32 (fp64 for fp64), and rounded once.
    """

    @staticmethod
    def forward(ctx: Any, exchanged: Tensor, columns: ShardColumns) -> Tensor:
        ctx.targets = columns.targets
        total = exchanged.index_select(1, columns.firsts)
        if columns.later:
            total = total.to(torch.promote_types(total.dtype, torch.float32))
        for to, source in columns.later:
            total.index_add_(1, to, exchanged.index_select(1, source).to(total.dtype))
        return total.to(exchanged.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(1, ctx.targets), None


class RowGradients(NamedTuple):
    """The gradient of a replicated table, fp32 [rows, dim], and which of its rows any rank has looked up, [rows]."""

    values: Tensor
    is_touched: Tensor


def look_up_replicated(
    lookups: TableLookups,
    tables: Sequence[Tensor],
    group: dist.ProcessGroup,
    update: Callable[[list[RowGradients]], None] | None = None,
) -> Tensor:
    """Add up this rank's samples' rows of tables that all ranks have: [local batch, their dims].

    The backward pass sums the gradients of all ranks in fp32 (fp64 for fp64), in rank order, so that replicas keep the
    same bits. It calls `update` with them, which then changes the tables; without it they are the tables' gradients.
    Collective in the backward pass.
    """
    # Autograd calls the backward pass although the tables need no gradient: the output depends on this tensor.
    anchor = torch.empty(0, device=lookups.indices.device, requires_grad=True)
    return _LookUpReplicated.apply(anchor, lookups, group, update, *tables)


class _LookUpReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookups: TableLookups, group: Any, update: Any, *tables: Tensor) -> Tensor:
        ctx.lookups, ctx.group, ctx.update, ctx.dtype = lookups, group, update, tables[0].dtype
        ctx.leaves, ctx.pooled, parts = [], [], []
        for number, table in enumerate(tables):
            # Tables are small here. Gradients of fp32 copies of fp16 and bf16 ones are fp32.
            with torch.enable_grad():
                leaf = table.detach().to(torch.promote_types(table.dtype, torch.float32)).requires_grad_()
                pooled = lookups.pool(number, leaf)
            ctx.leaves.append(leaf)
            ctx.pooled.append(pooled)
            parts.append(pooled.detach().to(table.dtype))
        return torch.cat(parts, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        lookups, flat = ctx.lookups, []
        of_tables = gradients[0].split([leaf.shape[1] for leaf in ctx.leaves], 1)
        for number, (leaf, pooled, of_table) in enumerate(zip(ctx.leaves, ctx.pooled, of_tables, strict=True)):
            (dense,) = torch.autograd.grad(pooled, leaf, of_table.to(leaf.dtype))
            touched = dense.new_zeros(len(leaf))
            touched[lookups.indices[lookups.ends[number] : lookups.ends[number + 1]]] = 1.0
            flat += [dense.reshape(-1), touched]
        ctx.pooled = []
        sizes, own = [part.numel() for part in flat], torch.cat(flat).unsqueeze(0)
        total, *others = gather_rows(own, ctx.group.size(), ctx.group)
        total = total.clone()
        for other in others:
            total += other
        sums = total.split(sizes)
        found = [
            RowGradients(values.view_as(leaf), touched > 0)
            for leaf, values, touched in zip(ctx.leaves, sums[::2], sums[1::2], strict=True)
        ]
        nothing = (None,) * 4
        if ctx.update is not None:
            ctx.update(found)
            return *nothing, *[None] * len(found)
        return *nothing, *[one.values.to(ctx.dtype) for one in found]


def select_tables(indices: Tensor, lengths: Tensor, ends: Sequence[int], tables: Sequence[int]) -> TableLookups:
    """Return the look-ups of this rank's samples in some tables. Arguments as in `cut_bags`."""
    sizes = [stop - start for start, stop in pairwise(ends)]
    found = [0]
    for table in tables:
        found.append(found[-1] + sizes[table])
    chosen = torch.cat([indices[ends[table] : ends[table + 1]] for table in tables])
    offsets = lengths.new_zeros(len(tables) * lengths.shape[1] + 1)
    torch.cumsum(torch.cat([lengths[table] for table in tables]), 0, out=offsets[1:])
    return TableLookups(chosen, offsets, tuple(found), lengths.shape[1])
