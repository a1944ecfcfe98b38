# SPDX-License-Identifier: Apache-2.0
"""Exchanges look-up indices: the first all-to-all of a distributed DLRM, from a rank's samples to tables' owners."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.parallel.comm.collectives import all_to_all
from stretto.recommendation.placement import TablePlacement
from stretto.recommendation.pooled_exchange import TableLookups, exchange_parts
from stretto.recommendation.sharded_lookup import cut_bags, select_tables

_REFUSED = -1  # sent in place of the number of samples by a rank that refuses its batch


def exchange_indices(
    indices: Tensor,
    offsets: Tensor,
    placement: TablePlacement,
    group: dist.ProcessGroup,
    *,
    host_group: dist.ProcessGroup | None = None,
    weights: Tensor | None = None,
    names: Sequence[str] | None = None,
    checks_device: bool = False,
    refused: ValueError | None = None,
) -> TableLookups:
    """Exchange bags of this rank's samples for all tables for those of all samples for this rank's shards. Collective.

    indices [total] and offsets [tables x local batch + 1] are feature-major; offsets may be on the CPU, which saves
    waiting for a GPU. The local batch is as large on all ranks. Sends how large it is and how many indices there are
    for each shard (over `host_group`, if the indices are on a GPU, so that the host knows without waiting for it), then
    the bags' lengths, then the indices.

    weights: [total], a factor for each index, which is sent along; on all ranks or on none. If those of any rank need
    gradients, all get them. names: of the tables, for errors. checks_device: check indices on a GPU, too, for which the
    host waits. refused: why this rank has no batch to send, which is raised once the other ranks know.

    Raises ValueError on all ranks: for offsets that are not such (of another count, falling, or not those of
    `indices`), for an index on a CPU that is outside of its table (on a GPU the look-up refuses it), with table, sample
    and rank; and where the ranks' batches differ in size.
    """
    if weights is not None and not placement.is_whole:
        table = next(table for table, kind in enumerate(placement.kinds) if kind != "table")
        raise ValueError(f"weights of indices are for whole tables, but table {table} is {placement.kind(table)!r}")
    world, mine = group.size(), placement.shards[group.rank()]
    if weights is not None and not placement.is_whole:
        raise ValueError("weights are exchanged for whole tables only: place each table on one rank")
    if world == 1 and refused:
        raise refused
    if world == 1 and placement.is_whole:
        batch, ends = _check(indices, offsets, placement, 0, names, checks_device)
        offsets = offsets.to(indices.device, non_blocking=True)
        return TableLookups(indices, offsets.to(indices.dtype), tuple(ends), batch, weights)
    try:
        if refused:
            raise refused
        batch, ends = _check(indices, offsets, placement, group.rank(), names, checks_device)
        lengths = offsets.diff().to(indices.device, indices.dtype, non_blocking=True).view(len(ends) - 1, batch)
    except ValueError as error:  # the others are notified in the exchange in which they wait for this rank
        refused, batch, ends = error, _REFUSED, [0] * (1 + len(placement.tables))
        lengths = indices.new_zeros(len(placement.tables), 0)
    bags = cut_bags(indices, lengths, ends, placement)

    owned = [len(of_rank) for of_rank in placement.shards]
    header = batch, int(weights is not None and weights.requires_grad)
    there = torch.tensor([number for of_rank in bags for number in (*header, *(shard.total for shard in of_rank))])
    here = there.new_empty(world * (2 + len(mine)))
    all_to_all(here, there, [2 + len(mine)] * world, [2 + count for count in owned], host_group or group)
    batches, need_gradients, *by_table = here.view(world, 2 + len(mine)).T.tolist()
    if refused:
        raise refused
    if _REFUSED in batches:
        raise ValueError(f"rank {batches.index(_REFUSED)} has rejected its own batch: see its error")
    if len(set(batches)) > 1:  # before anything is split by them: backends abort, or wait forever
        raise ValueError(
            f"the ranks' batches have {', '.join(map(str, batches))} samples, but must all have as many: share the "
            "global batch out equally, and leave out or fill up a last one that the ranks do not divide"
        )
    counts = [[of_table[rank] for of_table in by_table] for rank in range(world)]

    leaving = torch.cat([lengths.new_empty(0), *(shard.lengths for of_rank in bags for shard in of_rank)])
    arrived = leaving.new_empty(world * len(mine) * batch)
    all_to_all(arrived, leaving, [len(mine) * batch] * world, [count * batch for count in owned], group)
    by_source = arrived.view(world, len(mine), batch)

    leaving = torch.cat([indices[:0], *(shard.indices for of_rank in bags for shard in of_rank)])
    arrived = leaving.new_empty(sum(map(sum, counts)))
    sent = [sum(shard.total for shard in of_rank) for of_rank in bags]
    all_to_all(arrived, leaving, [sum(of_source) for of_source in counts], sent, group)
    found = _feature_major(arrived, by_source, counts)
    if weights is not None:
        leaving = torch.cat([weights[ends[table] : ends[table + 1]] for table in placement.order])
        arrived = exchange_parts(leaving, [*map(sum, counts)], sent, group, needs_grad=any(need_gradients))
        weights = torch.cat([arrived[:0], *_by_table(arrived, counts)])
    sizes = tuple(stop - start for start, stop in pairwise(ends))
    found = replace(found, weights=weights, counts=tuple(map(tuple, counts)), sizes=sizes)
    if not placement.replicated:
        return found
    return replace(found, replicated=select_tables(indices, lengths, ends, placement.replicated))


def check_offsets(indices: Tensor, offsets: Tensor, tables: int, *, least: int = 1) -> int:
    """The number of samples. ValueError unless offsets divide indices into bags for each of them and each table.

    least: how many samples there have to be.
    """
    bags = len(offsets) - 1 if offsets.dim() == 1 else -1
    if bags < least * tables or bags % tables:
        raise ValueError(
            f"offsets have shape {list(offsets.shape)}, but need tables x batch + 1 numbers, and there are {tables} "
            "tables"
        )
    if offsets.device.type == "cpu":  # elsewhere this would wait for the device
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(indices):
            raise ValueError(
                f"offsets go from {int(offsets[0])} to {int(offsets[-1])}, but must go from 0 to the number of "
                f"indices, {len(indices)}"
            )
        if bool((falls := offsets.diff() < 0).any()):
            place = int(falls.nonzero()[0])
            raise ValueError(
                f"offsets fall from {int(offsets[place])} to {int(offsets[place + 1])} at position {place + 1}: a bag "
                "cannot end before it begins"
            )
    return bags // tables


def _check(
    indices: Tensor,
    offsets: Tensor,
    placement: TablePlacement,
    rank: int,
    names: Sequence[str] | None,
    checks_device: bool,
) -> tuple[int, list[int]]:
    """The number of samples, and where each table's indices begin and the last one's end. ValueError if bad."""
    batch = check_offsets(indices, offsets, len(placement.tables), least=0)
    ends = offsets[::batch].tolist() if batch else [0] * (len(placement.tables) + 1)
    if indices.device.type == "cpu" or checks_device:
        _check_indices(indices, offsets, ends, placement, rank, names)
    return batch, ends


def _check_indices(
    indices: Tensor,
    offsets: Tensor,
    ends: Sequence[int],
    placement: TablePlacement,
    rank: int,
    names: Sequence[str] | None,
) -> None:
    sizes = torch.tensor(ends).diff()
    limits = torch.tensor([table.ids for table in placement.tables]).repeat_interleave(sizes)
    bad = (indices < 0) | (indices >= limits.to(indices.device, non_blocking=True))
    if not bool(bad.any()):
        return
    place = int(bad.nonzero()[0])
    bag = int((offsets <= place).sum()) - 1
    table, sample = divmod(bag, (len(offsets) - 1) // len(placement.tables))
    name = names[table] if names else f"table {table}"
    raise ValueError(
        f"index {int(indices[place])} at position {place} ({name}, sample {sample} of rank {rank}) is outside "
        f"of the table, which has rows 0 to {placement.tables[table].ids - 1}"
    )


def _feature_major(arrived: Tensor, lengths: Tensor, counts: Sequence[Sequence[int]]) -> TableLookups:
    """Reorder received indices from rank-major (then by table) to table-major (then by rank).

    lengths: of the bags, [ranks, tables, local batch]. counts[rank][table]: how many indices were received.
    """
    world, tables, batch = lengths.shape
    offsets = lengths.new_zeros(tables * world * batch + 1)
    torch.cumsum(lengths.transpose(0, 1).reshape(-1), dim=0, out=offsets[1:])
    parts, ends = _by_table(arrived, counts), [0]
    for table in range(tables):
        ends.append(ends[-1] + sum(counts[rank][table] for rank in range(world)))
    return TableLookups(torch.cat(parts) if parts else arrived, offsets, tuple(ends), world * batch)


def _by_table(arrived: Tensor, counts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The parts of what was received, in order of table, then rank. counts: as in `_feature_major`."""
    parts = arrived.split([count for of_rank in counts for count in of_rank])
    tables = len(counts[0])
    return [parts[rank * tables + table] for table in range(tables) for rank in range(len(counts))]
