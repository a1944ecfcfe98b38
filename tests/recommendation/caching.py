# SPDX-License-Identifier: Apache-2.0
"""Ranks' functions in the tests of cached tables, in a module, so that a pool can import them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from stretto.parallel import Grid
from stretto.recommendation import (
    DLRM,
    DLRMConfig,
    Growth,
    ShardedTables,
    TablePlacement,
    TableSize,
    begin_exchange,
    distribute_tables,
    distributed_state,
)
from stretto.recommendation.index_exchange import IndexExchange
from stretto.recommendation.table_cache import RowCache
from stretto.recommendation.table_state import table_state
from stretto.train.checkpoint import checkpoint_path, load_state
from stretto.train.checkpoint.metadata import read_metadata
from tests.recommendation.sharding import gather
from tests.train.saving import save_state

CONFIG = DLRMConfig(rows=(300, 7, 120, 24), dim=8, bottom=(8,), top=(1,), dense=2)
BATCH = 24
KINDS: dict[str, Any] = {"t": "table", "r": "row", "c": "column"}


class Case(NamedTuple):
    """kinds: a letter for each table. cached: rows of each that stay, () for none. prefetches: look-ups of the next
    batch are exchanged before this one's backward pass. growth: of the last table."""

    kinds: str
    optimizer: str
    cached: tuple[int, ...] = ()
    prefetches: bool = False
    options: dict[str, Any] = {}
    growth: Growth | None = None


def make(case: Case, dtype: torch.dtype, implementation: Any, device: str = "cpu") -> ShardedTables:
    world = dist.get_world_size()
    owned = tuple(
        tuple(table for table, kind in enumerate(case.kinds) if kind != "t" or table % world == rank)
        for rank in range(world)
    )
    sizes = tuple(
        TableSize(rows, CONFIG.dim, growth=case.growth if rows == CONFIG.rows[-1] else None) for rows in CONFIG.rows
    )
    placement = TablePlacement(sizes, owned, tuple(KINDS[kind] for kind in case.kinds), case.cached)
    with torch.device("meta"):
        model = DLRM(CONFIG).to(dtype)
    grid = Grid(data=world, device=device)
    distribute_tables(model, grid, placement=placement, implementation=implementation, seed=3)
    assert isinstance(model.tables, ShardedTables)
    # The random numbers of a GPU are not those of a CPU: rows start from numbers that every placement agrees on.
    for place, (shard, weight) in enumerate(zip(model.tables.shards, model.tables.weights, strict=True)):
        caches = model.tables.caches
        cache = None if caches is None else caches.find(place)
        held = cache.held[0] if isinstance(cache, RowCache) else weight.detach()
        whole = torch.randn(CONFIG.rows[shard.table], CONFIG.dim, generator=torch.Generator().manual_seed(shard.table))
        held.copy_(whole[shard.row :, shard.column :][: shard.rows, : shard.columns])
    if case.optimizer:
        model.tables.fuse_update(case.optimizer, **({"lr": 0.3} | case.options))
    return model.tables


def batch(step: int, *, grows: bool = False) -> tuple[Tensor, Tensor]:
    """A rank's indices and offsets: hot rows, some in many bags, and a window that moves over the table and returns.

    grows: the last table has ids of 63 bits.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(step)
    bags = []
    for table, rows in enumerate(CONFIG.rows):
        for _ in range(BATCH):
            hot = torch.randint(min(rows, 5), (2,), generator=random)
            window = torch.randint(12, (1,), generator=random) + step % 5 * 23
            ids = torch.cat([hot, window])[: int(torch.randint(4, (), generator=random))]
            bags.append((ids + 1) * (2**56 + 12345) if grows and table == len(CONFIG.rows) - 1 else ids % rows)
    own = [bag for number, bag in enumerate(bags) if number % BATCH * world // BATCH == rank]
    return torch.cat(own), torch.tensor([0, *map(len, own)]).cumsum(0)


def step(tables: ShardedTables, number: int, lookups: Any) -> Tensor:
    """Look up, and make a backward pass whose gradients do not depend on the tables; returns this rank's vectors."""
    out = tables.pool(lookups)
    factors = torch.randn(BATCH, len(CONFIG.rows), CONFIG.dim, generator=torch.Generator().manual_seed(number))
    own = factors[dist.get_rank() * len(out) :][: len(out), list(tables.placement.order)]
    out.backward(own.reshape(out.shape).to(out))
    return out.detach()


def exchange(tables: ShardedTables, number: int) -> Any:
    """The look-ups of a batch."""
    indices, offsets = batch(number, grows=tables.placement.tables[-1].growth is not None)
    return tables.exchange(indices.to(tables.device), offsets)


def send(tables: ShardedTables, number: int) -> IndexExchange:
    """The look-ups of a batch, on their way beside the current stream."""
    indices, offsets = batch(number, grows=tables.placement.tables[-1].growth is not None)
    return begin_exchange(tables, indices.to(tables.device), offsets)


def update(
    cases: list[Case], steps: int, dtype: torch.dtype, implementation: Any, device: str = "cpu"
) -> list[tuple[dict[str, Tensor], list[Tensor], dict[int, float]]]:
    """Tables and states after some steps, of each case, this rank's vectors of each step, and hit rates."""
    found = []
    for case in cases:
        tables = make(case, dtype, implementation, device)
        vectors, lookups = [], exchange(tables, 0)
        for number in range(steps):
            if case.prefetches:
                following = send(tables, number + 1)
                following.issue()
            if number == steps // 2:  # an evaluation in between
                with torch.no_grad():
                    assert not tables.pool(lookups).requires_grad
            vectors.append(step(tables, number, lookups).cpu().clone())
            lookups = following.wait() if case.prefetches else exchange(tables, number + 1)
        rates = {} if tables.caches is None else tables.caches.hit_rates()
        found.append((gather(tables), vectors, rates))
    return found


def save(case: Case, folder: Path) -> dict[str, Tensor]:
    """Train for four steps, and save by both kinds of checkpoints; returns all of it after two more steps."""
    tables = make(case, torch.float64, "library")
    for number in range(4):
        step(tables, number, exchange(tables, number))
    ahead = exchange(tables, 4)  # its rows are fetched again after the checkpoint
    description = {"optimizer": case.optimizer, "model": {}, "run": {}, "data": {}}
    save_state(folder / "own", 4, table_state(tables), description, keep=1)
    dcp.save(distributed_state(tables), checkpoint_id=str(folder / "dcp"))
    step(tables, 4, ahead)
    step(tables, 5, exchange(tables, 5))
    return gather(tables)


def resume(case: Case, folder: Path, is_torch: bool) -> dict[str, Tensor]:
    """Load on any placement, and make the two steps."""
    tables = make(case, torch.float64, "library")
    assert tables.optimizer is not None
    if is_torch:
        dcp.load(distributed_state(tables), checkpoint_id=str(folder / "dcp"))
    else:
        checkpoint = checkpoint_path(folder / "own", 4)
        load_state(checkpoint, read_metadata(checkpoint), table_state(tables))
        tables.optimizer.set_steps(4)
    for number in (4, 5):
        step(tables, number, exchange(tables, number))
    return gather(tables)


def refusals() -> list[str]:
    """The errors of what is not served."""
    tables = make(Case("tttt", "", (40, 0, 0, 0)), torch.float32, "library")
    small = make(Case("tttt", "sgd", (10, 0, 0, 0)), torch.float32, "library")
    calls: list[Callable[[], Any]] = [
        lambda: tables.pool(exchange(tables, 0)),
        tables.state_dict,
        lambda: [exchange(small, number) for number in range(9)],
        late,
        lambda: check(Growth(), kind="row"),
        lambda: check(None, kind="replicated"),
        lambda: check(None, cached=(1, -1)),
        lambda: check(None, cached=(1,)),
        lambda: Growth(evicts="lru"),  # type: ignore[arg-type]
    ]
    words = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        words.append(str(error.value))
    return words


def refused_on_one_rank() -> list[str]:
    """What this rank's calls raise where a cache of rank 0 is too small, or there is no optimizer: none waits."""
    without, small = (make(Case("tttt", kind, (10, 0, 0, 0)), torch.float32, "library") for kind in ("", "sgd"))

    def prefetch() -> None:
        for number in range(9):
            ahead = send(small, number)
            ahead.issue()
            small.pool(ahead.wait())

    calls = [
        lambda: [exchange(small, number) for number in range(9)],
        prefetch,
        lambda: without.pool(exchange(without, 0)),
    ]
    words = []
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        words.append(str(error.value))
    return words


def late() -> None:
    """A backward pass of a batch whose rows others may have taken."""
    tables = make(Case("tttt", "sgd", (80, 0, 0, 0)), torch.float32, "library")
    out = tables.pool(exchange(tables, 0))
    for number in (1, 2):
        exchange(tables, number)
    out.sum().backward()


def check(growth: Growth | None, *, kind: Any = "table", cached: tuple[int, ...] = (1, 0)) -> None:
    sizes = (TableSize(8, 4, growth=growth), TableSize(8, 4))
    owned: tuple[tuple[int, ...], ...] = ((1,),) if kind == "replicated" else ((0, 1),)
    TablePlacement(sizes, owned, (kind, "table"), () if growth else cached).check([(8, 4)] * 2, 1)
