# SPDX-License-Identifier: Apache-2.0
"""Tables larger than the GPU: all rows in pinned host memory, the hot ones on the GPU too, exactly.

RowCache        a table's (or a shard's) rows in host memory, and a cache of them with the optimizer's states
CachedTables    a rank's caches: fetches a batch's rows, for which its look-ups then name slots
measure_hit_rates   of batches' ids, for `plan_tables`

A batch is fetched when its indices are there (`ShardedTables.exchange`), so that the next batch's rows come while this
one is computed. Rows of these two batches stay; others leave when their slots are needed, the longest unused first, and
are written back with their states. Look-ups and updates work on the cache in place: a row has one copy that counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory.pinned import allocate_pinned
from stretto.parallel.comm.autograd import at_end_of_backward
from stretto.parallel.comm.collectives import Pending, start_all_reduce
from stretto.recommendation.growing import GrowingRows
from stretto.recommendation.pooled_exchange import FusedUpdate, TableLookups
from stretto.recommendation.table_planner import HitRates


class RowCache:
    """A table in host memory, and a cache of its rows on the device.

    weight: [slots, dim] on the device, the cached rows. slots: int32 [rows] on the device, 1 plus a row's slot, or 0.
    rows: int64 [slots], the row in each slot. hits, looked_up: counts of look-ups since the last `hit_rates`.
    """

    def __init__(self, rows: int, dim: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """A table of zeros, in memory that the device reads; fill `held[0]`. slots: how many rows the device keeps."""
        self.weight = torch.zeros(slots, dim, dtype=dtype, device=device)
        self.slots = torch.zeros(rows, dtype=torch.int32, device=device)
        self.rows = torch.zeros(slots, dtype=torch.int64, device=device)
        self._last_used = torch.zeros(slots, dtype=torch.int64, device=device)
        self._filled = 0  # slots from here on were never used
        self.hits = self.looked_up = 0
        self._pairs: list[tuple[Tensor, Tensor]] = []  # in host memory, on the device
        self._add(self.weight, rows)

    def add_states(self, states: Sequence[Tensor]) -> None:
        """Keep an optimizer's states of the slots, zeros so far, for all rows."""
        for state in states:
            self._add(state, len(self.slots))

    @property
    def held(self) -> list[Tensor]:
        """The whole table and its states, in host memory; up to date after `flush`."""
        return [there for there, _ in self._pairs]

    def fetch(self, ids: Tensor, number: int, kept: int) -> Tensor:
        """Bring the rows of batch `number` into the cache; those of batches from `kept` on stay.

        Returns their slots; an id out of range stays as it is.
        """
        rows = ids.clamp(0, len(self.slots) - 1).long()
        found = self.slots[rows]
        missing = rows[found == 0]
        self.looked_up, self.hits = self.looked_up + len(rows), self.hits + len(rows) - len(missing)
        if len(missing):
            self._last_used.index_fill_(0, found[found > 0].long() - 1, number)
            self._load(missing.unique(), number, kept)
            found = self.slots[rows]
        slots = found.long() - 1
        self._last_used.index_fill_(0, slots, number)
        return torch.where(rows == ids, slots, ids).to(ids.dtype)

    def flush(self) -> None:
        """Write all cached rows back, and empty the cache: host memory then has the table, which may be replaced."""
        every = torch.arange(self._filled, device=self.rows.device)
        self._write_back(every)
        self._filled = 0

    def _add(self, here: Tensor, rows: int) -> None:
        size = (rows, *here.shape[1:])
        num_bytes = rows * here[0].numel() * here.element_size()
        there = allocate_pinned(num_bytes, here.device).view(here.dtype).view(size)
        self._pairs.append((there, here))

    def _load(self, rows: Tensor, number: int, kept: int) -> None:
        """Load rows that are not here, each once; others leave for them."""
        count, capacity = len(rows), len(self.rows)
        fresh = min(count, capacity - self._filled)
        chosen = torch.arange(self._filled, self._filled + fresh, device=rows.device)
        if count > fresh:
            free = int((self._last_used[: self._filled] < kept).sum())
            if count > fresh + free:
                needed, batches = capacity - fresh - free + count, "a batch" if kept == number else "two batches"
                raise ValueError(
                    f"a cache of {capacity} rows is too small for {batches} of {needed} different rows: a cache of "
                    f"{needed} would do (the next batch is fetched while one is computed)"
                )
            _, oldest = self._last_used[: self._filled].topk(count - fresh, largest=False, sorted=False)
            self._write_back(oldest)
            chosen = torch.cat([chosen, oldest])
        for there, here in self._pairs:
            _move(there, here, rows, chosen)
        self.rows[chosen], self.slots[rows] = rows, (chosen + 1).int()
        self._last_used.index_fill_(0, chosen, number)
        self._filled += fresh

    def _write_back(self, slots: Tensor) -> None:
        rows = self.rows[slots]
        for there, here in self._pairs:
            _move(here, there, slots, rows)
        self.slots[rows] = 0


def _move(source: Tensor, target: Tensor, rows: Tensor, places: Tensor) -> None:
    if rows.device.type == "cpu":
        target[places] = source[rows]
        return
    from stretto.ops.embedding.move_rows import move_rows  # takes Triton

    move_rows(source.detach(), target.detach(), rows, places)


@dataclass(frozen=True)
class CachedLookups:
    """A batch that was fetched. slots: its indices, those in caches as slots. ready: once the rows are there.

    refused: why they are not on this rank. refusing: becomes the last rank on which they are not, or -1.
    """

    number: int
    slots: Tensor
    ready: torch.cuda.Event | None
    refused: ValueError | None
    refusing: Pending

    def agree(self) -> None:
        """ValueError on all ranks if one of them could not fetch its rows: the others would wait for its vectors."""
        rank = int(self.refusing.wait())
        if self.refused is not None:
            raise self.refused
        if rank >= 0:
            raise ValueError(f"rank {rank} has refused this batch, which is too large for its caches: see its error")


class CachedTables:
    """The caches of a rank's tables, and the rows of those that grow, by their places among its shards.

    All ranks have one if any has such tables, as they agree on whether a batch's rows could be fetched. These are
    fetched on the stream that is current then. It waits for what earlier batches do with slots that it needs, and not
    for the batch before: `ShardedTables.exchange` on a side stream overlaps with that one's step.
    """

    def __init__(
        self, caches: Mapping[int, RowCache | GrowingRows], tables: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        """tables: of the rank's shards, those that are no caches included. group: sends CPU tensors between ranks."""
        self._device, self._group = device, group
        self._caches = {place: cache for place, cache in caches.items() if isinstance(cache, RowCache)}
        self._growing = {place: table for place, table in caches.items() if isinstance(table, GrowingRows)}
        self._slots = tuple(self._caches[place].slots if place in self._caches else None for place in range(tables))
        self._number = 0  # the last batch that was fetched
        self._kept = 0  # the first batch that has all of its rows for certain
        self._ended = 0  # the last batch that needs its rows no more
        self._done: dict[int, torch.cuda.Event] = {}  # when the last kernel of a batch ends that uses its rows

    def find(self, place: int) -> RowCache | GrowingRows | None:
        """The cache of a table, or its rows, if it grows; None for another one."""
        return self._caches.get(place) or self._growing.get(place)

    def rows_of(self, place: int, slots: Tensor) -> Tensor:
        """The rows of the whole table that are in these slots."""
        return self._caches[place].rows[slots] if place in self._caches else slots

    def fetch(self, lookups: TableLookups) -> TableLookups:
        """Fetch the rows of a batch; collective. `agree` raises if a cache is too small for it and the batch before."""
        self._refuse_capture()
        number = self._number = self._number + 1
        kept = self._kept = max(self._kept, number if self._ended == number - 1 else number - 1)
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            for batch, event in self._done.items():
                if batch < kept:
                    stream.wait_event(event)
        slots, refused = lookups.indices.clone(), None
        try:
            for place, cache in self._caches.items():
                part = slice(*lookups.ends[place : place + 2])
                slots[part] = cache.fetch(lookups.indices[part], number, kept)
        except ValueError as error:
            refused = error
        own = torch.tensor(-1 if refused is None else self._group.rank(), device="cpu")
        refusing = start_all_reduce(own, self._group, dist.ReduceOp.MAX)
        ready = None
        if self._device.type == "cuda":
            ready = self._done[-1] = stream.record_event()  # the next fetch may be on another stream
        return replace(lookups, cached=CachedLookups(number, slots, ready, refused, refusing))

    def use(self, lookups: TableLookups, update: FusedUpdate | None) -> tuple[TableLookups, FusedUpdate | None]:
        """The look-ups by slots, and an update of these; they are fetched again if newer ones may have taken slots.

        Tables grow, unless gradients are disabled. ValueError where `agree` raises, and in a CUDA graph.
        """
        self._refuse_capture()
        if lookups.cached is None or self._is_stale(lookups.cached.number):
            lookups = self.fetch(lookups)
        cached = lookups.cached
        assert cached is not None
        cached.agree()
        if cached.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(cached.ready)
            for tensor in (cached.slots, lookups.indices, lookups.offsets):
                tensor.record_stream(stream)
        rows = lookups.indices.clone() if self._growing else lookups.indices
        for place, table in self._growing.items():
            part = slice(*lookups.ends[place : place + 2])
            rows[part] = cached.slots[part] = table.fetch(rows[part], grows=torch.is_grad_enabled())
        if update is not None and (self._caches or self._growing):
            from stretto.ops.embedding.backward import CachedRows  # takes Triton, as what made the update does

            update = replace(update, cached=CachedRows(rows, self._slots))
        return replace(lookups, indices=cached.slots), update

    def begin_update(self, number: int) -> None:
        """RuntimeError if rows of a batch that is going to be updated may have left the caches."""
        if self._is_stale(number):
            raise RuntimeError(
                f"{self._number - number} batches were looked up in cached tables, or a checkpoint was made, since the "
                "one of this backward pass: only the next batch's exchange may come between"
            )
        at_end_of_backward(partial(self.end, number, is_last=True))

    def end(self, number: int, *, is_last: bool) -> None:
        """Note that kernels that use the rows of a batch are enqueued on the current stream; is_last: all of them."""
        self._ended = max(self._ended, number) if is_last else self._ended
        if self._device.type == "cuda":
            self._done = {key: event for key, event in self._done.items() if key >= number - 1 or key < 0}
            self._done[number] = torch.cuda.current_stream(self._device).record_event()

    def flush(self) -> None:
        """Write all rows back and empty the caches; the host waits."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for cache in self._caches.values():
            cache.flush()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._kept = self._number + 1

    def hit_rates(self) -> dict[int, float]:
        """The part of look-ups that found their row in the cache, by place, since the last call."""
        found = {}
        for place, cache in self._caches.items():
            found[place] = cache.hits / max(cache.looked_up, 1)
            cache.hits = cache.looked_up = 0
        return found

    def _refuse_capture(self) -> None:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a CUDA graph would look up the rows of the batch of its capture, as rows are fetched by the host: "
                "look up tables that are cached or grow before the graph, and capture what follows"
            )

    def _is_stale(self, number: int) -> bool:
        return number < self._kept


def measure_hit_rates(batches: Sequence[Tensor]) -> HitRates:
    """Hit rates of caches of a table's hottest rows, from its ids in two or more successive global batches.

    The first half of the batches tells which rows are hot, and the second half is looked up.
    """
    if len(batches) < 2:
        raise ValueError(f"{len(batches)} batches: the first half tells what is hot, so give at least two")
    half = len(batches) // 2
    ids, counts = torch.cat(list(batches[:half])).unique(return_counts=True)
    asked = torch.cat(list(batches[half:]))
    places = torch.empty_like(ids)
    places[counts.argsort(descending=True, stable=True)] = torch.arange(len(ids), device=ids.device)
    at = torch.searchsorted(ids, asked).clamp(max=len(ids) - 1)
    found = places[at][ids[at] == asked].sort().values
    sizes = [1 << power for power in range(len(ids).bit_length()) if 1 << power < len(ids)] + [len(ids)]
    hits = torch.searchsorted(found, torch.tensor(sizes, device=found.device)) / max(len(asked), 1)
    return HitRates(tuple(sizes), tuple(hits.tolist()), max(len(batch.unique()) for batch in batches))
