# SPDX-License-Identifier: Apache-2.0
"""Places embedding tables on ranks, whole or cut; deterministic, so the same on every rank."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from stretto.quantities import require_least, show_bytes
from stretto.suggestions import name_known, require_fields

ShardingKind = Literal["table", "column", "row", "table-row", "replicated"]
"""The layout of a table: whole on one rank; cut by columns or by rows; by rows on ranks of one node; whole on all."""

QUANTUM = 4  # columns of a shard are a multiple of it where the table's are enough: the fused operator takes no others


@dataclass(frozen=True)
class Growth:
    """The way in which a table gives its rows to ids, from 0 to below `ids`, such as hashes (`growing`).

    min_count: look-ups after which an id gets a row. evicts: whose row is taken for a new one: the id that was looked
    up longest ago, or least often.
    """

    ids: int = 2**63 - 1
    min_count: int = 1
    evicts: Literal["least-recent", "least-frequent"] = "least-recent"

    def __post_init__(self) -> None:
        require_fields(self)
        if not 1 <= self.ids < 2**63 or self.min_count < 1:
            raise ValueError(f"{self}: ids are 1 to {2**63 - 1}, and min_count is at least 1")


@dataclass(frozen=True)
class TableSize:
    """An embedding table, and how many of its rows a sample looks up on average. growth: of one that grows."""

    rows: int
    dim: int
    pooling: float = 1.0
    growth: Growth | None = None

    def __post_init__(self) -> None:
        require_fields(self, "a table's ")
        require_least(1, "a table's ", rows=self.rows, dim=self.dim)
        require_least(0, "a table's ", pooling=self.pooling)

    @property
    def ids(self) -> int:
        """Ids are from 0 to below this."""
        return self.rows if self.growth is None else self.growth.ids

    @property
    def numbers(self) -> int:
        """Count of the table's numbers."""
        return self.rows * self.dim

    @property
    def work(self) -> float:
        """Count of numbers that a sample reads and writes: the rows of its bag, and the pooled vector."""
        return (self.pooling + 1) * self.dim


@dataclass(frozen=True)
class TableShard:
    """A box of a table: `rows` rows from `row` on, and `columns` columns from `column` on. part: its number."""

    table: int
    part: int
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True)
class TablePlacement:
    """Tables on ranks: `owned[rank]` are the ascending numbers of the tables that a rank has, whole or a part of them.

    kinds: of each table; () where all are "table". A table that is cut has equal parts (up to a row, or `QUANTUM`
    columns), in order of its ranks. Replicated tables are in no rank's `owned`. A rank may own none.
    cached: for each table, how many rows of each of its parts the GPU keeps, as a cache of host memory (`table_cache`);
    0, or as many as the part has, for a table that is on the GPU. () if all are.
    """

    tables: tuple[TableSize, ...]
    owned: tuple[tuple[int, ...], ...]
    kinds: tuple[ShardingKind, ...] = ()
    cached: tuple[int, ...] = ()

    def cache_of(self, shard: TableShard) -> int:
        """The rows of a part that its rank's GPU keeps as a cache; 0 if it keeps all."""
        rows = self.cached[shard.table] if self.cached else 0
        return rows if rows < shard.rows else 0

    def kind(self, table: int) -> ShardingKind:
        """Return the layout of a table on its ranks."""
        return self.kinds[table] if self.kinds else "table"

    @property
    def is_whole(self) -> bool:
        """True if each table is whole on one rank."""
        return set(self.kinds) <= {"table"}

    @property
    def order(self) -> tuple[int, ...]:
        """The order of tables in the vectors that `ShardedTables` returns.

        If all are whole on one rank, the exchange's, by rank, then number. Else by number alone: vectors are moved
        anyway where parts are added up.
        """
        if self.is_whole:
            return tuple(table for of_rank in self.owned for table in of_rank)
        return tuple(range(len(self.tables)))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The tables that every rank has."""
        return tuple(table for table, kind in enumerate(self.kinds) if kind == "replicated")

    def owners(self, table: int) -> tuple[int, ...]:
        """The ranks that have a part of a table, in order of its parts."""
        return tuple(rank for rank, of_rank in enumerate(self.owned) if table in of_rank)

    def owner(self, table: int) -> int:
        """The rank that owns a table, or its first part."""
        return self.owners(table)[0]

    @cached_property
    def shards(self) -> tuple[tuple[TableShard, ...], ...]:
        """The parts of tables that each rank has, in order of table, without replicated tables."""
        owners = {table: self.owners(table) for of_rank in self.owned for table in of_rank}
        return tuple(
            tuple(self._cut(table, owners[table].index(rank), len(owners[table])) for table in of_rank)
            for rank, of_rank in enumerate(self.owned)
        )

    def whole(self, table: int) -> TableShard:
        """All of a table, as one part."""
        return TableShard(table, 0, 0, self.tables[table].rows, 0, self.tables[table].dim)

    def _cut(self, table: int, part: int, parts: int) -> TableShard:
        size = self.tables[table]
        if self.kind(table) == "column":
            quantum = QUANTUM if size.dim % QUANTUM == 0 and size.dim >= QUANTUM * parts else 1
            start, stop = (size.dim // quantum * end // parts * quantum for end in (part, part + 1))
            return TableShard(table, part, 0, size.rows, start, stop - start)
        start, stop = (size.rows * end // parts for end in (part, part + 1))
        return TableShard(table, part, start, stop - start, 0, size.dim)

    def check(self, shapes: Sequence[tuple[int, int]], ranks: int, nodes: Sequence[Hashable] | None = None) -> None:
        """ValueError unless it places tables of these shapes on so many ranks. nodes: each rank's, if known."""
        found = sorted({table for of_rank in self.owned for table in of_rank} | set(self.replicated))
        if len(self.owned) != ranks or found != list(range(len(shapes))):
            raise ValueError(
                f"the placement puts tables {found} on {len(self.owned)} ranks, but there are {len(shapes)} tables and "
                f"{ranks} ranks"
            )
        if self.kinds and len(self.kinds) != len(shapes):
            raise ValueError(f"the placement has {len(self.kinds)} kinds for {len(shapes)} tables: give one for each")
        if (planned := [(size.rows, size.dim) for size in self.tables]) != list(shapes):
            raise ValueError(f"the placement is for tables of shapes {planned}, but they have {list(shapes)}")
        if self.cached and len(self.cached) != len(shapes):
            raise ValueError(f"the placement has {len(self.cached)} caches for {len(shapes)} tables: give one for each")
        for table, size in enumerate(self.tables):
            kind, owners = self.kind(table), self.owners(table)
            if self.cached and not 0 <= self.cached[table] < 2**31 - 1:
                raise ValueError(f"table {table} has a cache of {self.cached[table]} rows: 0 to {2**31 - 2} would do")
            if self.cached and self.cached[table] and kind == "replicated":
                raise ValueError(
                    f"table {table} is replicated, so it has no cache: kind 'row' would do, or 0 cached rows"
                )
            if size.growth is not None and (kind != "table" or (self.cached and self.cached[table]) or size.rows < 2):
                raise ValueError(
                    f"table {table} grows, so it is whole on one rank's GPU and has two rows or more: kind 'table' "
                    f"would do, not {kind!r} with {self.cached[table] if self.cached else 0} cached of {size.rows} rows"
                )
            parts = size.dim if kind == "column" else size.rows
            if kind not in get_args(ShardingKind):
                raise ValueError(
                    f"there is no sharding {kind!r} of table {table}{name_known(kind, get_args(ShardingKind))}"
                )
            if sum(of_rank.count(table) for of_rank in self.owned) != len(owners):
                raise ValueError(f"table {table} is placed on a rank twice: name it once")
            if kind == "table" and len(owners) != 1:
                raise ValueError(
                    f"table {table} is whole, but placed on ranks {list(owners)}: one of them, or kind 'row', would do"
                )
            if kind == "replicated" and owners:
                raise ValueError(f"table {table} is replicated, so it is in no rank's owned: leave it out there")
            if len(owners) > parts:
                raise ValueError(
                    f"table {table} has {parts} {'columns' if kind == 'column' else 'rows'}, which are cut for "
                    f"{len(owners)} ranks: {parts} ranks would do, or kind 'replicated'"
                )
            if kind == "table-row" and nodes is not None and len({nodes[rank] for rank in owners}) > 1:
                raise ValueError(
                    f"table {table} is cut inside a node ('table-row'), but its ranks {list(owners)} are on several: "
                    "ranks of one node would do, or kind 'row'"
                )

    def work_shares(self) -> tuple[float, ...]:
        """The part of all look-ups that each rank does, by the numbers that they move."""
        shared = sum(self.tables[table].work for table in self.replicated) / len(self.owned)
        work = [shared + sum(map(self._work_of, of_rank)) for of_rank in self.shards]
        return tuple(numbers / sum(work) for numbers in work)

    def _work_of(self, shard: TableShard) -> float:
        """The numbers that a sample reads and writes of a shard: of its part of the bag, and a pooled vector."""
        size = self.tables[shard.table]
        return (size.pooling * shard.rows / size.rows + 1) * shard.columns

    def explain(self, itemsize: int = 4) -> str:
        """A line a rank: its tables (`3/0 of 4 by row` is a part of table 3), their bytes, its part of the look-ups."""
        lines = []
        for rank, (of_rank, work) in enumerate(zip(self.shards, self.work_shares(), strict=True)):
            size = sum((self.cache_of(shard) or shard.rows) * shard.columns for shard in of_rank) * itemsize
            size += sum(self.tables[table].numbers for table in self.replicated) * itemsize
            names = ", ".join(map(self._name, of_rank)) or "none"
            lines.append(f"rank {rank}: {show_bytes(size)}, {work:.1%} of the look-ups; tables {names}")
        if self.replicated:
            lines.append(f"every rank: tables {', '.join(map(str, self.replicated))}")
        return "\n".join(lines)

    def _name(self, shard: TableShard) -> str:
        kind, rows = self.kind(shard.table), self.cache_of(shard)
        cache = f" (cache of {rows / shard.rows:.1%})" if rows else ""
        if kind == "table":
            return f"{shard.table}{cache}"
        return f"{shard.table}/{shard.part} of {len(self.owners(shard.table))} by {kind}{cache}"


def place_tables(tables: Sequence[TableSize], ranks: int) -> TablePlacement:
    """Assign tables to ranks such that memory and work are balanced.

    Greedy: tables are sorted by their fraction of all memory plus their fraction of all work, the largest first; each
    is assigned to the rank where the larger of the rank's two fractions is then smallest. Ties go to the lower sum,
    then to the lower rank. A table larger than 1/ranks of the total cannot be balanced, because tables are not split.
    ValueError without tables or ranks.
    """
    check_sizes(tables, ranks)
    all_numbers = sum(size.numbers for size in tables)
    all_work = sum(size.work for size in tables)
    parts = [(size.numbers / all_numbers, size.work / all_work) for size in tables]
    loads = [(0.0, 0.0)] * ranks
    owned: list[list[int]] = [[] for _ in range(ranks)]

    def after(rank: int, table: int) -> tuple[float, float, int]:
        memory, work = loads[rank][0] + parts[table][0], loads[rank][1] + parts[table][1]
        return max(memory, work), memory + work, rank

    for table in sorted(range(len(tables)), key=lambda number: (-sum(parts[number]), number)):
        rank = min(range(ranks), key=lambda rank: after(rank, table))
        owned[rank].append(table)
        loads[rank] = loads[rank][0] + parts[table][0], loads[rank][1] + parts[table][1]
    return TablePlacement(tuple(tables), tuple(tuple(sorted(of_rank)) for of_rank in owned))


def check_sizes(tables: Sequence[TableSize], ranks: int) -> None:
    """ValueError without tables or ranks."""
    if not tables or ranks < 1:
        raise ValueError(f"{len(tables)} tables on {ranks} ranks: there must be at least one of each")
