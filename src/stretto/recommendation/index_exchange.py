# SPDX-License-Identifier: Apache-2.0
"""Exchanges look-up indices: the first all-to-all of a distributed DLRM, from a rank's samples to tables' owners."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import group_timeout
from stretto.memory.shared_groups import SharedGroups
from stretto.parallel.comm.collectives import Pending, all_to_all, start_all_to_all
from stretto.recommendation.placement import TablePlacement
from stretto.recommendation.pooled_exchange import TableLookups, exchange_parts
from stretto.recommendation.sharded_lookup import cut_bags, select_tables

if TYPE_CHECKING:
    from stretto.recommendation.tables import ShardedTables

_REFUSED, _ENDED = -1, -2  # sent in place of the number of samples by a rank that refuses its batch, or has none left
_MAX_BY_32_BITS = torch.iinfo(torch.int32).max


class EndOfBatches(Exception):
    """No rank has a batch left."""


class IndexExchange:
    """An exchange of a batch's indices that has begun; `wait` returns the look-ups.

    indices [total] and offsets [tables x local batch + 1] are feature-major; offsets may be on the CPU, which saves
    waiting for a GPU. The local batch is as large on all ranks. Making it sends how large that is and how many indices
    there are for each shard (over `host_group`, if the indices are on a GPU, so that the host knows without waiting for
    it). `issue`, for which the host waits for those numbers, sends the bags' lengths and the indices, both as 32 bits
    if the tables' rows allow it. All ranks make, and issue, their exchanges in one order.

    weights: [total], a factor for each index, which is sent along; on all ranks or on none. If those of any rank need
    gradients, all get them. names: of the tables, for errors. checks_device: check indices on a GPU, too, for which the
    host waits. refused: why this rank has no batch to send, which is raised once the other ranks know; `EndOfBatches`
    if it has none left. fetch: called with the look-ups, on the stream, for what is sent with them (rows of caches).
    stream: of a GPU, on which the exchange runs beside the current one; None: the current one.

    `wait` raises what was refused, and on all ranks ValueError: for offsets that are not such (of another count,
    falling, or not those of `indices`), for an index on a CPU that is outside of its table (on a GPU the look-up
    refuses it), with table, sample and rank; where the ranks' batches differ in size; and where only some have one.
    """

    def __init__(
        self,
        indices: Tensor,
        offsets: Tensor,
        placement: TablePlacement,
        group: dist.ProcessGroup,
        *,
        host_group: dist.ProcessGroup | None = None,
        weights: Tensor | None = None,
        names: Sequence[str] | None = None,
        checks_device: bool = False,
        refused: Exception | None = None,
        stream: "torch.cuda.Stream | None" = None,
        fetch: Callable[[TableLookups], TableLookups] | None = None,
    ) -> None:
        self._placement, self._group, self._stream, self._fetch = placement, group, stream, fetch
        self._refused, self._found, self._ready = refused, None, None
        self._is_issued = is_local = group.size() == 1 and placement.is_whole  # then nothing is sent
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            for tensor in (indices, offsets, weights):
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(stream)
        with on_stream(stream):
            if refused is None:
                try:
                    batch, ends = _check(indices, offsets, placement, group.rank(), names, checks_device)
                except ValueError as error:
                    self._refused = error
            if is_local:
                if self._refused is None:
                    offsets = offsets.to(indices.device, non_blocking=True).to(indices.dtype)
                    self._found = TableLookups(indices, offsets, tuple(ends), batch, weights)
                return
            if self._refused is None:
                # The same dtype on all ranks: what the tables need.
                is_short = all(size.ids <= _MAX_BY_32_BITS for size in placement.tables)
                indices = _shorten(indices) if is_short else indices.long()
                lengths = _to_device(offsets.diff().to(indices.dtype), indices.device).view(len(ends) - 1, batch)
            else:  # the others are notified in the exchange in which they wait for this rank
                batch = _ENDED if isinstance(refused, EndOfBatches) else _REFUSED
                ends, lengths = [0] * (1 + len(placement.tables)), indices.new_zeros(len(placement.tables), 0)
                indices, weights = indices[:0], None if weights is None else weights[:0]
            self._indices, self._lengths, self._ends, self._weights = indices, lengths, ends, weights
            self._bags = cut_bags(indices, lengths, ends, placement, weights)
        counts = [[shard.total for shard in of_rank] for of_rank in self._bags]
        header = batch, int(weights is not None and weights.requires_grad)
        there = torch.tensor([number for of_rank in counts for number in (*header, *of_rank)], device="cpu")
        here = there.new_empty(group.size() * (2 + len(placement.shards[group.rank()])))
        receives, sends = [len(here) // group.size()] * group.size(), [2 + len(of_rank) for of_rank in counts]
        self._header = Pending(there)
        if group.size() > 1:
            self._header = start_all_to_all(here, there, receives, sends, host_group or group)

    def wait(self) -> TableLookups:
        """The look-ups, once, which the current stream may use; a GPU's stream waits for them, and not the host."""
        self.issue()
        refused, found = self._refused, self._found
        self._refused = self._found = None
        if refused is not None:
            raise refused
        assert found is not None, "these look-ups were taken already"
        if self._ready is not None:
            current = torch.cuda.current_stream(self._ready.device)
            current.wait_event(self._ready)
            found.record_stream(current)
        return found

    def issue(self) -> None:
        """Send the indices, unless they were sent already. Errors are raised by `wait`."""
        fetch, self._fetch, is_sent, self._is_issued = self._fetch, None, self._is_issued, True
        if not is_sent or fetch is not None:
            try:
                with on_stream(self._stream):
                    self._found = self._found if is_sent else self._send()
                    if fetch is not None and self._found is not None:
                        self._found = fetch(self._found)
            except Exception as error:
                if error is not self._refused and not isinstance(error, (ValueError, EndOfBatches)):
                    raise
                self._refused = error
            self._indices = self._lengths = self._weights = self._bags = None  # type: ignore[assignment]
        if self._stream is not None and self._ready is None:
            self._ready = self._stream.record_event()

    def _send(self) -> TableLookups:
        placement, group, bags, lengths = self._placement, self._group, self._bags, self._lengths
        world, mine = group.size(), placement.shards[group.rank()]
        batches, need_gradients, *by_table = self._header.wait().view(world, -1).T.tolist()
        if self._refused and not isinstance(self._refused, EndOfBatches):
            raise self._refused
        _compare(batches)
        batch = batches[0]
        counts = [[of_table[rank] for of_table in by_table] for rank in range(world)]
        owned = [len(of_rank) for of_rank in placement.shards]
        leaving = torch.cat([lengths.new_empty(0), *(shard.lengths for of_rank in bags for shard in of_rank)])
        arrived = leaving.new_empty(world * len(mine) * batch)
        all_to_all(arrived, leaving, [len(mine) * batch] * world, [count * batch for count in owned], group)
        by_source = arrived.view(world, len(mine), batch)

        leaving = torch.cat([self._indices[:0], *(shard.indices for of_rank in bags for shard in of_rank)])
        arrived = leaving.new_empty(sum(map(sum, counts)))
        sent = [sum(shard.total for shard in of_rank) for of_rank in bags]
        all_to_all(arrived, leaving, [sum(of_source) for of_source in counts], sent, group)
        if len(arrived) > _MAX_BY_32_BITS:  # offsets need 64 bits, and PyTorch's functions take both of one dtype
            arrived, by_source = arrived.long(), by_source.long()
        found = _feature_major(arrived, by_source, counts)
        weights, ends = self._weights, self._ends
        if weights is not None:
            leaving = torch.cat([weights[:0], *(shard.weights for of_rank in bags for shard in of_rank)])
            arrived = exchange_parts(leaving, [*map(sum, counts)], sent, group, needs_grad=any(need_gradients))
            weights = torch.cat([arrived[:0], *_by_table(arrived, counts)])
        sizes = tuple(stop - start for start, stop in pairwise(ends))
        replicated = None
        if placement.replicated:
            replicated = select_tables(self._indices, lengths, ends, placement.replicated)
        return replace(found, weights=weights, counts=tuple(map(tuple, counts)), sizes=sizes, replicated=replicated)


def find_host_group(
    device: torch.device, group: dist.ProcessGroup, partition: Sequence[list[int]] | None = None
) -> dist.ProcessGroup | None:
    """A group of the same ranks for an exchange's numbers; None where `group` reaches the host, or is of one rank.

    partition: of all ranks into such groups (None: only the group's own make it). Collective.
    """
    if device.type != "cuda" or group.size() == 1:
        return None
    parts, limit = partition or [dist.get_process_group_ranks(group)], timedelta(seconds=group_timeout(group))
    return SharedGroups().get(parts, "table indices", backend="gloo", timeout=limit)


@cache
def side_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """The stream of a GPU on which exchanges run beside a step; None for a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def begin_exchange(
    tables: "ShardedTables", indices: Tensor, offsets: Tensor, refused: Exception | None = None
) -> IndexExchange:
    """Begin `tables.exchange(indices, offsets)` beside the current stream; `tables` takes it in place of indices."""
    return IndexExchange(
        indices,
        offsets,
        tables.placement,
        tables.group,
        host_group=tables._host_group,
        refused=refused,
        stream=side_stream(tables.device),
        fetch=None if tables.caches is None else tables.caches.fetch,
    )


def on_stream(stream: "torch.cuda.Stream | None") -> AbstractContextManager[object]:
    """Run what a `with` statement launches on this stream; on a CPU, nothing."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _compare(batches: Sequence[int]) -> None:
    """ValueError unless all ranks have equally large batches, and EndOfBatches if none has any."""
    if _REFUSED in batches:
        raise ValueError(f"rank {batches.index(_REFUSED)} has rejected its own batch: see its error")
    if set(batches) == {_ENDED}:
        raise EndOfBatches
    if _ENDED in batches:
        first = next(rank for rank, batch in enumerate(batches) if batch != _ENDED)
        raise ValueError(
            f"rank {batches.index(_ENDED)} has no batch left, but rank {first} has one: give all ranks equally many "
            "batches, some of them empty"
        )
    if len(set(batches)) > 1:  # before anything is split by them: backends abort, or wait forever
        raise ValueError(
            f"the ranks' batches have {', '.join(map(str, batches))} samples, but must all have as many: share the "
            "global batch out equally, and leave out or fill up a last one that the ranks do not divide"
        )


def _shorten(indices: Tensor) -> Tensor:
    """The same as int32. What no table has stays outside of all tables: the least, and the largest number."""
    if indices.dtype == torch.int32:
        return indices
    return indices.clamp(-1, _MAX_BY_32_BITS).to(torch.int32)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy for which the host does not wait."""
    is_sent = device.type == "cuda" and tensor.device.type == "cpu"
    return tensor.pin_memory().to(device, non_blocking=True) if is_sent else tensor.to(device)


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
    if (ends[0], ends[-1]) != (0, len(indices)):  # of offsets on a GPU
        raise ValueError(f"offsets go from {ends[0]} to {ends[-1]}, but there are {len(indices)} indices")
    if indices.device.type != "cpu" and not checks_device:
        return batch, ends
    sizes = torch.tensor(ends, device="cpu").diff()
    limits = torch.tensor([table.ids for table in placement.tables], device="cpu").repeat_interleave(sizes)
    bad = (indices < 0) | (indices >= limits.to(indices.device, non_blocking=True))
    if not bool(bad.any()):
        return batch, ends
    place = int(bad.nonzero()[0])
    table, sample = divmod(int((offsets <= place).sum()) - 1, batch)
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
