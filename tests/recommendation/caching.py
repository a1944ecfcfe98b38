# SPDX-License-Identifier: Apache-2.0
"""Ranks' functions in the tests of cached tables, in a module, so that a pool can import them."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.parallel import Grid
from stretto.recommendation import DLRM, DLRMConfig, ShardedTables, TablePlacement, TableSize, distribute_tables
from tests.recommendation.sharding import gather

CONFIG = DLRMConfig(rows=(300, 7, 120), dim=8, bottom=(8,), top=(1,), dense=2)
BATCH = 24
KINDS: dict[str, Any] = {"t": "table", "r": "row", "c": "column"}


class Case(NamedTuple):
    """kinds: a letter for each table. cached: rows of each that stay, () for none. prefetches: look-ups of the next
    batch are exchanged before this one's backward pass."""

    kinds: str
    optimizer: str
    cached: tuple[int, ...] = ()
    prefetches: bool = False
    options: dict[str, Any] = {}


def make(case: Case, dtype: torch.dtype, implementation: Any, device: str = "cpu") -> ShardedTables:
    world = dist.get_world_size()
    owned = tuple(
        tuple(table for table, kind in enumerate(case.kinds) if kind != "t" or table % world == rank)
        for rank in range(world)
    )
    sizes = tuple(TableSize(rows, CONFIG.dim) for rows in CONFIG.rows)
    placement = TablePlacement(sizes, owned, tuple(KINDS[kind] for kind in case.kinds), case.cached)
    with torch.device("meta"):
        model = DLRM(CONFIG).to(dtype)
    grid = Grid(data=world, device=device)
    distribute_tables(model, grid, placement=placement, implementation=implementation, seed=3)
    assert isinstance(model.tables, ShardedTables)
    # The random numbers of a GPU are not those of a CPU: rows start from numbers that every placement agrees on.
    for place, (shard, weight) in enumerate(zip(model.tables.shards, model.tables.weights, strict=True)):
        caches = model.tables.caches
        held = weight.detach() if caches is None or place not in caches else caches[place].held[0]
        whole = torch.randn(CONFIG.rows[shard.table], CONFIG.dim, generator=torch.Generator().manual_seed(shard.table))
        held.copy_(whole[shard.row :, shard.column :][: shard.rows, : shard.columns])
    if case.optimizer:
        model.tables.fuse_update(case.optimizer, **({"lr": 0.3} | case.options))
    return model.tables


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A rank's indices and offsets: hot rows, some in many bags, and a window that moves over the table and returns."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(step)
    bags = []
    for rows in CONFIG.rows:
        for _ in range(BATCH):
            hot = torch.randint(min(rows, 5), (2,), generator=random)
            window = (torch.randint(12, (1,), generator=random) + step % 5 * 23) % rows
            bags.append(torch.cat([hot, window])[: int(torch.randint(4, (), generator=random))])
    own = [bag for number, bag in enumerate(bags) if number % BATCH * world // BATCH == rank]
    return torch.cat(own), torch.tensor([0, *map(len, own)]).cumsum(0)


def update(
    cases: list[Case], steps: int, dtype: torch.dtype, implementation: Any, device: str = "cpu"
) -> list[tuple[dict[str, Tensor], list[Tensor], dict[int, float]]]:
    """Tables and states after some steps, of each case, this rank's vectors of each step, and hit rates."""
    found = []
    for case in cases:
        tables = make(case, dtype, implementation, device)

        def exchange(step: int, tables: ShardedTables = tables) -> Any:
            indices, offsets = batch(step)
            return tables.exchange(indices.to(tables.device), offsets)

        side = torch.cuda.Stream() if device == "cuda" else None
        vectors, lookups = [], exchange(0)
        for step in range(steps):
            if case.prefetches:
                with torch.cuda.stream(side):  # nothing on a CPU
                    following = exchange(step + 1)
            if step == steps // 2:  # an evaluation in between
                with torch.no_grad():
                    assert not tables.pool(lookups).requires_grad
            out = tables.pool(lookups)
            factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
            if tables.placement.order == tuple(range(len(CONFIG.rows))) or dist.get_world_size() == 1:
                out.backward(factors.to(out))
            else:
                by_table = factors.view(len(out), len(CONFIG.rows), -1)
                out.backward(by_table[:, list(tables.placement.order)].reshape(out.shape).to(out))
            vectors.append(out.detach().cpu().clone())
            lookups = following if case.prefetches else exchange(step + 1)
        rates = {} if tables.caches is None else tables.caches.hit_rates()
        found.append((gather(tables), vectors, rates))
    return found
