# SPDX-License-Identifier: Apache-2.0
"""Plans which table is whole, cut or replicated, and where, from a GPU's rates of rows; imports no torch.

plan_tables     searches for the placement whose slowest rank is the fastest, within a limit of memory
TableRates      rows a second by their size, and links; `TableRates.of_cluster` of a machine
HitRates        how often a cache of a table's hottest rows has what is looked up; `measure_hit_rates` of batches
TablePlan       the placement, each rank's load, and what the search has changed and why
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

from stretto.quantities import show_bytes
from stretto.recommendation.placement import QUANTUM, ShardingKind, TablePlacement, TableSize, check_sizes

if TYPE_CHECKING:
    from stretto.cluster import Cluster

_FP32, _INDEX = 4, 8  # bytes
_SLOT, _TRACKED = 4, 16  # bytes on the GPU: of a cached table's row, and of a row in the cache besides its numbers
_BATCHES = 3  # of whose rows a cache has room for at least: two are in flight, and batches differ
_FILLED = 0.9  # the part of the ranks' memory that caches fill: shards are of unequal sizes
STATE_SIZES = {"sgd": (0, 0), "rowwise-adagrad": (1, 0), "full-adagrad": (0, 1), "adam": (0, 2)}
"""The number of states that an optimizer has of a row, and of a number."""

_GAIN = 0.002  # the least part of `_Placed.key` by which a change has to lower it


_TRIED = 4  # tables of the slowest rank whose other kinds are tried, and how many of these are tried with swaps


@dataclass(frozen=True)
class RowRate:
    """Measured rows a second of a size: looked up, and updated (gradients summed, an optimizer's step)."""

    row_bytes: int
    looked_up: float
    updated: float


# lab/results/embedding, 8192 x 64 x 128 x 70 and 8192 x 256 x 256 x 70: the look-up alone, and the batched backward
# pass with its update less its exchange.
H200_ROWS = (RowRate(512, 11.77e9, 2.57e9), RowRate(1024, 4.99e9, 1.33e9))


@dataclass(frozen=True)
class HitRates:
    """Measured of a table: the part of look-ups that find their row in a cache of so many rows, both ascending.

    distinct: different rows of a global batch. A cache holds those of two batches at least (`table_cache`).
    """

    rows: tuple[int, ...]
    hits: tuple[float, ...]
    distinct: int

    def at(self, rows: float, of: int) -> float:
        """The hit rate of a cache of `rows` of a table's `of` rows: on a line between those measured."""
        points = [(0, 0.0), *((one, hit) for one, hit in zip(self.rows, self.hits, strict=True) if one < of), (of, 1.0)]
        low, high = next((two for two in pairwise(points) if two[1][0] >= rows), points[-2:])
        return low[1] + (high[1] - low[1]) * (rows - low[0]) / max(high[0] - low[0], 1)


@dataclass(frozen=True)
class TableRates:
    """Rates of a GPU and its links: rows a second, ascending by size; bytes/s of memory, of a GPU's links in its node
    and between nodes, and of its link to host memory, both ways together."""

    rows: tuple[RowRate, ...] = H200_ROWS
    memory: float = 4.8e12
    in_node: float = 325e9
    between_nodes: float = 50e9
    host: float = 101e9
    source: str = "4x H200, lab/results/embedding"

    @classmethod
    def of_cluster(cls, cluster: "Cluster") -> "TableRates":
        """Rates of a machine. Rows are H200's, measured, by the ratio of the memories' bandwidths."""
        memory = cluster.require("gpu.memory_bandwidth")
        of_node = cluster.measured_in_node_bandwidth(1, min(4, cluster.gpus_per_node)) or cluster.in_node.bandwidth
        between = (cluster.inter_node_bandwidth or 0.0) / cluster.gpus_per_node
        ratio = memory / cls.memory
        rows = tuple(RowRate(one.row_bytes, one.looked_up * ratio, one.updated * ratio) for one in H200_ROWS)
        measured = cls.source if ratio == 1 else f"{cls.source}, times {ratio:.2f} for its memory's bandwidth"
        links = of_node or between or cluster.require("in_node.bandwidth")
        host = cluster.host_link_or_default.duplex_bandwidth or cls.host
        return cls(rows, memory, links, between or links, host, measured)

    def seconds_a_row(self, row_bytes: float) -> tuple[float, float]:
        """Seconds to look a row up, and to update it.

        Between measured sizes along a line; longer rows take as many bytes a second as the longest measured ones, and
        shorter ones as long as a quarter of the shortest one at least: a row is a transaction.
        """
        first, last = self.rows[0], self.rows[-1]
        if row_bytes <= first.row_bytes or len(self.rows) == 1:
            part = max(row_bytes / first.row_bytes, 0.25)
            return part / first.looked_up, part / first.updated
        if row_bytes >= last.row_bytes:
            part = row_bytes / last.row_bytes
            return part / last.looked_up, part / last.updated
        low, high = next(two for two in pairwise(self.rows) if two[1].row_bytes >= row_bytes)
        part = (row_bytes - low.row_bytes) / (high.row_bytes - low.row_bytes)
        return ((1 - part) / low.looked_up + part / high.looked_up, (1 - part) / low.updated + part / high.updated)


class RankLoad(NamedTuple):
    """A rank's load in a step. memory: bytes of tables and states. sent: bytes to ranks of its node, and of others,
    of the forward pass; the backward pass brings as many back. shared: seconds of replicated tables. host: bytes of
    cached tables' rows from host memory and back, which are fetched under the step before."""

    memory: float = 0.0
    look_up: float = 0.0
    update: float = 0.0
    sent: float = 0.0
    sent_between: float = 0.0
    shared: float = 0.0
    host: float = 0.0

    def plus(self, other: "RankLoad") -> "RankLoad":
        """The load with another one."""
        return RankLoad(*map(add, self, other))

    def minus(self, other: "RankLoad") -> "RankLoad":
        """The load without another one."""
        return RankLoad(*map(sub, self, other))

    def seconds(self, rates: TableRates) -> float:
        """Return the seconds of a step: the exchange hides under the look-up, its way back comes before the update."""
        exchange = self.sent / rates.in_node + self.sent_between / rates.between_nodes
        return max(max(self.look_up, exchange) + exchange + self.update + self.shared, self.host / rates.host)


@dataclass(frozen=True)
class _Choice:
    """The placement of a table: its kind, on so many ranks."""

    kind: ShardingKind = "table"
    ranks: int = 1

    def __str__(self) -> str:
        return self.kind if self.kind in ("table", "replicated") else f"{self.kind} x {self.ranks}"


@dataclass(frozen=True)
class TablePlan:
    """A placement with each rank's load, and the changes that the search made from whole tables, with reasons."""

    placement: TablePlacement
    loads: tuple[RankLoad, ...]
    rates: TableRates
    reasons: tuple[str, ...]

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Predicted seconds of each rank's tables in a step."""
        return tuple(load.seconds(self.rates) for load in self.loads)

    @property
    def imbalance(self) -> float:
        """The part by which the slowest rank is above the mean: 0 if all are even."""
        return max(self.seconds) * len(self.seconds) / sum(self.seconds) - 1

    def explain(self) -> str:
        """The placement, a line a rank with its time, and the reasons."""
        lines = self.placement.explain().splitlines()
        lines = [
            f"{line}; {seconds * 1e3:.3g} ms, {show_bytes(load.sent + load.sent_between)} sent"
            + (f", {show_bytes(load.host)} from host memory and back" if load.host else "")
            for line, load, seconds in zip(lines, self.loads, self.seconds, strict=False)
        ] + lines[len(self.loads) :]
        return "\n".join(
            [*lines, f"slowest rank {self.imbalance:.1%} above the mean; rates: {self.rates.source}", *self.reasons]
        )

    def as_json(self) -> dict[str, Any]:
        """The plan for machines."""
        placement = self.placement
        kinds = [placement.kind(table) for table in range(len(placement.tables))]
        ranks = [
            {
                "tables": list(placement.owned[rank]), "seconds": seconds, "memory_bytes": load.memory,
                "sent_bytes": load.sent + load.sent_between, "look_up_seconds": load.look_up,
                "update_seconds": load.update, "host_bytes": load.host,
            }
            for rank, (load, seconds) in enumerate(zip(self.loads, self.seconds, strict=True))
        ]  # fmt: skip
        return {
            "kinds": kinds, "cached_rows": list(placement.cached), "ranks": ranks, "imbalance": self.imbalance,
            "reasons": list(self.reasons), "rates": self.rates.source,
        }  # fmt: skip


def plan_tables(
    tables: Sequence[TableSize],
    ranks: int,
    *,
    batch: int = 65536,
    itemsize: int = 4,
    optimizer: str = "rowwise-adagrad",
    clips: bool = False,
    rates: TableRates | None = None,
    ranks_per_node: int | None = None,
    memory: float | None = None,
    hit_rates: Mapping[int, HitRates] | None = None,
) -> TablePlan:
    """Search for the kinds and ranks of tables with which the slowest rank is the fastest. Deterministic.

    batch: global. itemsize: bytes of a number. optimizer, clips (rows' gradients): what needs whole rows excludes cuts
    by columns. memory: bytes of a rank for tables and states; default: twice an even share. Starts from whole tables,
    the longest first to the rank where it adds least; then, while it gains, changes the kind of a table of the slowest
    rank and places all anew. hit_rates: of tables that may be cached: if all tables take more than the ranks' memory,
    some are in host memory with a cache, such that the fewest bytes move. ValueError without tables or ranks, and if
    not even cut tables and the smallest caches fit into the memory.
    """
    check_sizes(tables, ranks)
    if batch < 1 or optimizer not in STATE_SIZES:
        raise ValueError(
            f"batch is {batch} and optimizer {optimizer!r}: at least 1, and one of {', '.join(STATE_SIZES)}"
        )
    search = _TableSearch(
        tuple(tables), ranks, batch, itemsize, optimizer, rates or TableRates(), ranks_per_node or ranks
    )
    limit = 2 * search.even_memory() if memory is None else memory
    reasons = list[str]()
    if hit_rates and memory is not None:
        search, reasons = search.with_caches(hit_rates, memory)
    choices = [_Choice()] * len(tables)
    best = search.place(choices, limit, swaps=True)
    rows_only = optimizer == "rowwise-adagrad" or clips
    while True:
        options = [
            [*choices[:table], choice, *choices[table + 1 :]]
            for table in best.first_tables()[:_TRIED]
            for choice in search.options(table, rows_only=rows_only)
            if choice != choices[table]
        ]
        options.sort(key=lambda option: search.place(option, limit, swaps=False).key)
        tried = [(search.place(option, limit, swaps=True), option) for option in options[:_TRIED]]
        found, option = min(tried, key=lambda one: one[0].key, default=(best, choices))
        if not found.is_better(best):
            break
        table = next(number for number, choice in enumerate(option) if choice != choices[number])
        where = "fullest" if best.excess else "slowest"
        reasons.append(
            f"table {table}: {choices[table]} -> {option[table]}, for it was on the {where} rank: "
            f"{best.seconds * 1e3:.3g} ms -> {found.seconds * 1e3:.3g} ms"
        )
        best, choices = found, option
    if memory is not None and best.excess > 0:
        raise ValueError(
            f"the tables and their states do not fit into {show_bytes(memory)} a rank, even if they are cut: "
            f"{show_bytes(max(load.memory for load in best.loads))} a rank would do, or more ranks"
            + ("" if search.caches else ", or hit_rates=, with which tables are cached")
        )
    kinds = tuple(choice.kind for choice in choices)
    cached = tuple(
        math.ceil(search.caches[table][0] / (choices[table].ranks if choices[table].kind != "column" else 1))
        if table in search.caches
        else 0
        for table in range(len(tables))
    )
    placement = TablePlacement(
        tuple(tables), best.owned, () if set(kinds) == {"table"} else kinds, cached if any(cached) else ()
    )
    return TablePlan(placement, best.loads, search.rates, tuple(reasons))


@dataclass(frozen=True)
class _Placed:
    """Tables with choices, placed on ranks."""

    owned: tuple[tuple[int, ...], ...]
    loads: tuple[RankLoad, ...]
    times: tuple[float, ...]
    excess: float  # bytes above the limit, of all ranks
    parts: dict[int, float]  # seconds of each table's shards
    sizes: dict[int, float]  # bytes of each table's shards

    @property
    def seconds(self) -> float:
        return max(self.times)

    @property
    def slowest(self) -> int:
        return self.times.index(self.seconds)

    @property
    def key(self) -> tuple[float, float]:
        """Nearly the slowest rank's time; of two that are equally slow, making one faster counts, too."""
        return self.excess, sum(seconds**8 for seconds in self.times) ** 0.125

    def is_better(self, other: "_Placed") -> bool:
        is_faster = self.key[1] < (1 - _GAIN) * other.key[1]
        return self.excess < other.excess or (self.excess == other.excess and is_faster)

    def first_tables(self) -> list[int]:
        """Tables of the slowest rank, those that take longest first; if one has too much, of the fullest, by memory."""
        if self.excess:
            fullest = max(range(len(self.loads)), key=lambda rank: self.loads[rank].memory)
            return sorted(self.owned[fullest], key=lambda table: (-self.sizes[table], table))
        return sorted(self.owned[self.slowest], key=lambda table: (-self.parts[table], table))


@dataclass(frozen=True)
class _TableSearch:
    tables: tuple[TableSize, ...]
    ranks: int
    batch: int
    itemsize: int
    optimizer: str
    rates: TableRates
    ranks_per_node: int
    caches: Mapping[int, tuple[int, float]] = field(default_factory=dict)  # a table's: rows, part of look-ups that miss

    def with_caches(self, hit_rates: Mapping[int, HitRates], memory: float) -> tuple["_TableSearch", list[str]]:
        """The search with the caches with which tables fit, and why; the memory goes where it saves the most misses."""
        whole = [self._memory(size.rows, size.dim) for size in self.tables]
        budget = _FILLED * self.ranks * memory
        if sum(whole) <= budget:
            return self, []
        rows = {
            table: min(_BATCHES * rates.distinct, self.tables[table].rows) for table, rates in sorted(hit_rates.items())
        }
        used = sum(whole[table] for table in range(len(whole)) if table not in rows)
        used += sum(self._cache_memory(table, count) for table, count in rows.items())

        def gain(table: int, to: int) -> float:
            """Look-ups of a sample that a larger cache saves, for each byte that it takes."""
            size, rates = self.tables[table], hit_rates[table]
            saved = rates.at(to, size.rows) - rates.at(rows[table], size.rows)
            return saved * size.pooling * size.dim / self._memory(to - rows[table], size.dim)

        while True:
            left = {
                table: int((budget - used) / (self._memory(1, self.tables[table].dim) + _TRACKED)) for table in rows
            }
            steps = [
                (gain(table, to), table, to)
                for table, rates in hit_rates.items()
                for to in (*rates.rows, rows[table] + left[table], self.tables[table].rows)
                if rows[table] < to <= self.tables[table].rows
                and used + self._cache_memory(table, to) - self._cache_memory(table, rows[table]) <= budget
            ]
            if not steps:
                break
            _, table, to = max(steps)
            used += self._cache_memory(table, to) - self._cache_memory(table, rows[table])
            rows[table] = to
        caches = {
            table: (count, 1 - hit_rates[table].at(count, self.tables[table].rows))
            for table, count in rows.items()
            if count < self.tables[table].rows
        }
        found = replace(self, caches=caches)
        reasons = [
            f"table {table}: in host memory with a cache of {count:,} of its {self.tables[table].rows:,} rows, for all "
            f"tables take {show_bytes(sum(whole))} and the ranks have {show_bytes(self.ranks * memory)}: "
            f"{1 - misses:.1%} of its look-ups hit, {show_bytes(found._host(table))} a step move to the GPUs and back"
            for table, (count, misses) in caches.items()
        ]
        return found, reasons

    def _cache_memory(self, table: int, rows: int) -> float:
        """Return the GPU memory, in bytes, of a cache of so many rows and of its index."""
        size = self.tables[table]
        return self._memory(rows, size.dim) + (_SLOT * size.rows + _TRACKED * rows if rows < size.rows else 0)

    def _host(self, table: int) -> float:
        """Bytes of a step that a cached table's rows and states move, to the GPU and back."""
        size, (_, misses) = self.tables[table], self.caches.get(table, (0, 0.0))
        return 2 * misses * self.batch * size.pooling * self._memory(1, size.dim)

    def even_memory(self) -> float:
        """Bytes of a rank if all tables and states were shared out evenly."""
        return sum(self._memory(size.rows, size.dim) for size in self.tables) / self.ranks

    def options(self, table: int, *, rows_only: bool) -> list[_Choice]:
        """All ways to place a table."""
        size, counts = self.tables[table], range(2, self.ranks + 1)
        if self.ranks > 8:
            counts = sorted({1 << power for power in range(1, self.ranks.bit_length())} | {self.ranks})  # type: ignore[assignment]
        found = [_Choice(), *([] if table in self.caches else [_Choice("replicated", self.ranks)])]
        for count in counts:
            if count <= min(self.ranks, size.rows):
                found.append(_Choice("row", count))
                if count <= self.ranks_per_node < self.ranks:
                    found.append(_Choice("table-row", count))
            if count <= min(self.ranks, size.dim // QUANTUM) and not rows_only:
                found.append(_Choice("column", count))
        return found

    def place(self, choices: Sequence[_Choice], limit: float, *, swaps: bool) -> _Placed:
        """Place tables: those that take longest first, each shard on another rank, where the rank's time is least.

        swaps: then swap shards of the slowest rank for others', while that helps.
        """
        base = RankLoad()
        shards: dict[int, RankLoad] = {}
        for table, choice in enumerate(choices):
            if choice.kind == "replicated":
                base = base.plus(self._replica(table))
            else:
                shards[table] = self._shard(table, choice)
        loads, owned = [base] * self.ranks, [list[int]() for _ in range(self.ranks)]
        parts = {table: load.seconds(self.rates) for table, load in shards.items()}
        for table in sorted(shards, key=lambda table: (-parts[table], -shards[table].memory, table)):
            after = [load.plus(shards[table]) for load in loads]
            keys = [(max(one.memory - limit, 0), one.seconds(self.rates), one.memory) for one in after]
            chosen = sorted(range(self.ranks), key=lambda rank: (keys[rank], rank))[: choices[table].ranks]
            if choices[table].kind == "table-row":
                chosen = self._in_node(keys, choices[table].ranks)
            for rank in chosen:
                loads[rank] = after[rank]
                owned[rank].append(table)
        # Each rank also receives its samples' vectors of all shards, and waits for them.
        width = sum(self._columns(table, choices[table]) * choices[table].ranks for table in shards)
        is_free = [choice.kind != "table-row" for choice in choices]
        while swaps and self._swap(shards, loads, owned, width, limit, is_free):
            pass
        times = tuple(self._seconds(load, width) for load in loads)
        excess = sum(max(load.memory - limit, 0) for load in loads)
        found = tuple(tuple(sorted(of_rank)) for of_rank in owned)
        sizes = {table: load.memory for table, load in shards.items()}
        return _Placed(found, tuple(loads), times, excess, parts, sizes)

    def _swap(
        self,
        shards: Mapping[int, RankLoad],
        loads: list[RankLoad],
        owned: list[list[int]],
        width: float,
        limit: float,
        is_free: Sequence[bool],
    ) -> bool:
        """Swap a shard of the slowest rank for a smaller one, or none, of another, if both are then faster than it was.

        The longest first; False if none is found.
        """
        times = [self._seconds(load, width) for load in loads]
        slowest = times.index(max(times))
        for rank in sorted(range(self.ranks), key=lambda rank: (times[rank], rank)):
            for table in sorted(owned[slowest], key=lambda table: (-shards[table].update, table)):
                for other in (None, *owned[rank]):
                    if table in owned[rank] or other in owned[slowest] or not is_free[table]:
                        continue
                    given = RankLoad() if other is None else shards[other]
                    if other is not None and not is_free[other]:
                        continue
                    there = loads[rank].plus(shards[table]).minus(given)
                    here = loads[slowest].plus(given).minus(shards[table])
                    most = max(self._seconds(there, width), self._seconds(here, width))
                    if most < (1 - _GAIN) * times[slowest] and max(there.memory, here.memory) <= limit:
                        loads[rank], loads[slowest] = there, here
                        owned[slowest].remove(table)
                        owned[rank].append(table)
                        if other is not None:
                            owned[rank].remove(other)
                            owned[slowest].append(other)
                        return True
        return False

    def _in_node(self, keys: Sequence[tuple[float, ...]], count: int) -> list[int]:
        """The ranks of one node whose slowest is the fastest."""
        nodes = [
            sorted(range(first, min(first + self.ranks_per_node, self.ranks)), key=lambda rank: (keys[rank], rank))
            for first in range(0, self.ranks, self.ranks_per_node)
        ]
        return min((node[:count] for node in nodes if len(node) >= count), key=lambda node: keys[node[-1]])

    def _seconds(self, load: RankLoad, width: float) -> float:
        received = self._spread(self.batch / self.ranks * width * self.itemsize)
        most = RankLoad(
            load.memory, load.look_up, load.update, max(load.sent, received[0]), max(load.sent_between, received[1]),
            load.shared, load.host,
        )  # fmt: skip
        return most.seconds(self.rates)

    def _columns(self, table: int, choice: _Choice) -> float:
        return self.tables[table].dim / (choice.ranks if choice.kind == "column" else 1)

    def _spread(self, num_bytes: float) -> tuple[float, float]:
        """The bytes of all samples that go to other ranks of the node, and to other nodes."""
        inside = min(self.ranks_per_node, self.ranks)
        return num_bytes * (inside - 1) / self.ranks, num_bytes * (self.ranks - inside) / self.ranks

    def _memory(self, rows: float, columns: float) -> float:
        of_row, of_number = STATE_SIZES[self.optimizer]
        return rows * columns * (self.itemsize + of_number * _FP32) + rows * of_row * _FP32

    def _shard(self, table: int, choice: _Choice) -> RankLoad:
        """The load of one of a table's equal shards."""
        size, columns = self.tables[table], self._columns(table, choice)
        part = 1 / choice.ranks if choice.kind in ("row", "table-row") else 1.0
        look_up, update = self.rates.seconds_a_row(columns * self.itemsize)
        rows = self.batch * size.pooling * part
        vectors = self.batch * columns * self.itemsize
        inside, between = self._spread(vectors + rows * _INDEX)
        kept = self._cache_memory(table, self.caches.get(table, (size.rows, 0.0))[0]) * part * columns / size.dim
        return RankLoad(
            kept,
            rows * look_up + vectors / self.rates.memory,
            rows * update + vectors / self.rates.memory,
            inside,
            between,
            host=self._host(table) / choice.ranks,
        )

    def _replica(self, table: int) -> RankLoad:
        """The load of a replicated table: its part of the batch, and its gradient of all ranks, summed and applied."""
        size = self.tables[table]
        look_up, update = self.rates.seconds_a_row(size.dim * self.itemsize)
        rows = self.batch / self.ranks * size.pooling
        gradient = size.rows * (size.dim + 1) * _FP32
        link = self.rates.in_node if self.ranks_per_node >= self.ranks else self.rates.between_nodes
        shared = gradient * ((self.ranks - 1) / link + (self.ranks + 4) / self.rates.memory)
        return RankLoad(self._memory(size.rows, size.dim), rows * look_up, rows * update, 0.0, 0.0, shared)
