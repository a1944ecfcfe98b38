# SPDX-License-Identifier: Apache-2.0
"""Places embedding tables on ranks, balanced by memory and by work; deterministic, so the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.quantities import show_bytes


@dataclass(frozen=True)
class TableSize:
    """An embedding table, and how many of its rows a sample looks up on average."""

    rows: int
    dim: int
    pooling: float = 1.0

    @property
    def numbers(self) -> int:
        """Count of the table's numbers."""
        return self.rows * self.dim

    @property
    def work(self) -> float:
        """Count of numbers that a sample reads and writes: the rows of its bag, and the pooled vector."""
        return (self.pooling + 1) * self.dim


@dataclass(frozen=True)
class TablePlacement:
    """Tables on ranks: `owned[rank]` are the ascending indices of the rank's tables. A rank may own none."""

    tables: tuple[TableSize, ...]
    owned: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All tables in order of rank, then number: the order of pooled vectors after their exchange."""
        return tuple(table for of_rank in self.owned for table in of_rank)

    def owner(self, table: int) -> int:
        """The rank that owns a table."""
        return next(rank for rank, of_rank in enumerate(self.owned) if table in of_rank)

    def memory_shares(self) -> tuple[float, ...]:
        """The part of all numbers that each rank keeps."""
        return _shares(self.owned, [table.numbers for table in self.tables])

    def work_shares(self) -> tuple[float, ...]:
        """The part of all look-ups that each rank does, by the numbers that they move."""
        return _shares(self.owned, [table.work for table in self.tables])

    def explain(self, itemsize: int = 4) -> str:
        """A line a rank: its tables, their bytes, and its part of the look-ups."""
        lines = []
        for rank, (of_rank, work) in enumerate(zip(self.owned, self.work_shares(), strict=True)):
            size = sum(self.tables[table].numbers for table in of_rank) * itemsize
            names = ", ".join(map(str, of_rank)) or "none"
            lines.append(f"rank {rank}: {show_bytes(size)}, {work:.1%} of the look-ups; tables {names}")
        return "\n".join(lines)


def place_tables(tables: Sequence[TableSize], ranks: int) -> TablePlacement:
    """Assign tables to ranks such that memory and work are balanced.

    Greedy: tables are sorted by their fraction of all memory plus their fraction of all work, the largest first; each
    is assigned to the rank where the larger of the rank's two fractions is then smallest. Ties go to the lower sum,
    then to the lower rank. A table larger than 1/ranks of the total cannot be balanced, because tables are not split.
    ValueError without tables or ranks.
    """
    if not tables or ranks < 1:
        raise ValueError(f"{len(tables)} tables on {ranks} ranks: there must be at least one of each")
    for number, size in enumerate(tables):
        if size.rows < 1 or size.dim < 1 or size.pooling < 0:
            raise ValueError(f"table {number} is {size}, but has at least 1 row of at least 1 number")
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


def _shares(owned: Sequence[Sequence[int]], sizes: Sequence[float]) -> tuple[float, ...]:
    return tuple(sum(sizes[table] for table in of_rank) / sum(sizes) for of_rank in owned)
