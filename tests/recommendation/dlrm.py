# SPDX-License-Identifier: Apache-2.0
"""Ranks' functions in the tests of distributed tables, in a module, so that a pool can import them."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stretto.optim import RowWiseAdagrad
from stretto.parallel import Grid
from stretto.recommendation import DLRM, DLRMConfig, ShardedTables, TablePlacement, TableSize, distribute_tables
from stretto.recommendation.pooled_exchange import TableLookups
from stretto.recommendation.tables import ReplicatedGradients

# Six tables: a long one, one of a single row, and the one that is looked up most is not the longest.
CONFIG = DLRMConfig(
    rows=(50, 7, 1, 20, 3, 11), dim=8, bottom=(12, 8), top=(10, 1), pooling=(3, 1, 2, 20, 1, 4), dense=5
)
BATCH = 24


def make_batch(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers, indices, offsets and labels of a global batch, with empty bags and rows that repeat."""
    random = np.random.default_rng(step)
    lengths = random.integers(0, 5, size=(CONFIG.tables, BATCH))
    lengths[1] = 0  # a table that nobody asks
    indices = [
        random.integers(0, rows, size=of_table.sum()) for rows, of_table in zip(CONFIG.rows, lengths, strict=True)
    ]
    offsets = np.concatenate(([0], lengths.reshape(-1).cumsum()))
    dense, labels = random.standard_normal((BATCH, CONFIG.dense)), random.integers(0, 2, size=BATCH)
    return (
        torch.from_numpy(dense),
        torch.from_numpy(np.concatenate(indices)),
        torch.from_numpy(offsets),
        torch.from_numpy(labels),
    )


def local_part(
    batch: tuple[Tensor, Tensor, Tensor, Tensor], rank: int, world: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rank's samples of a global batch."""
    dense, indices, offsets, labels = batch
    size = BATCH // world
    rows = slice(rank * size, (rank + 1) * size)
    bags = [
        indices[offsets[table * BATCH + sample] : offsets[table * BATCH + sample + 1]]
        for table in range(CONFIG.tables)
        for sample in range(rows.start, rows.stop)
    ]
    lengths = torch.tensor([len(bag) for bag in bags])
    return dense[rows], torch.cat(bags), torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))), labels[rows]


def meta_dlrm() -> DLRM:
    with torch.device("meta"):
        return DLRM(CONFIG).double()


def step(model: DLRM, optimizers: list[torch.optim.Optimizer], batch: Any) -> Tensor:
    dense, indices, offsets, labels = batch
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = model(dense, indices, offsets, labels=labels, num_samples=BATCH)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def optimizers_of(model: DLRM) -> list[torch.optim.Optimizer]:
    tables = list(model.tables.parameters())
    rest = [*model.bottom.parameters(), *model.top.parameters()]
    sgd = torch.optim.SGD(rest, lr=0.5)
    return [sgd, RowWiseAdagrad(tables, lr=0.3)] if tables else [sgd]


def train(steps: int, owned: tuple[tuple[int, ...], ...] | None = None) -> dict[str, Any]:
    """Train a distributed model. Returns losses of the global batch, this rank's parameters, and who owns what."""
    world = torch.distributed.get_world_size()
    grid = Grid(data=world, device="cpu")
    model = meta_dlrm()
    sizes = tuple(TableSize(rows, CONFIG.dim) for rows in CONFIG.rows)
    placement = distribute_tables(
        model, grid, pooling=CONFIG.pooling, placement=None if owned is None else TablePlacement(sizes, owned), seed=3
    )
    assert isinstance(model.tables, ShardedTables)
    assert [len(table.weight) for table in model.tables.values()] == [
        CONFIG.rows[table] for table in placement.owned[torch.distributed.get_rank()]
    ]
    optimizers = optimizers_of(model)
    losses = []
    for number in range(steps):
        loss = step(model, optimizers, local_part(make_batch(number), torch.distributed.get_rank(), world))
        torch.distributed.all_reduce(loss)
        losses.append(loss.item())
    return {
        "losses": losses,
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "owned": placement.owned,
    }


def exchange(dtype: torch.dtype) -> Any:
    """This rank's lookups of batch 0, and what its tables were asked for, sample by sample."""
    grid = Grid(data=torch.distributed.get_world_size(), device="cpu")
    model = meta_dlrm()
    placement = distribute_tables(model, grid, pooling=CONFIG.pooling)
    _, indices, offsets, _ = local_part(make_batch(0), torch.distributed.get_rank(), grid.size("data"))
    assert isinstance(model.tables, ShardedTables)
    lookups = model.tables.exchange(indices.to(dtype), offsets)
    return placement.owned[torch.distributed.get_rank()], lookups


def exchange_batches_of(samples: tuple[int, ...]) -> tuple[str, int]:
    """A rank's error where rank r has samples[r] of them; then, of a batch of 2 each, the global one's size."""
    model = meta_dlrm()
    distribute_tables(model, Grid(data=len(samples), device="cpu"))
    assert isinstance(model.tables, ShardedTables)

    def exchange(count: int) -> TableLookups:
        bags = CONFIG.tables * count
        return model.tables.exchange(torch.zeros(bags, dtype=torch.int64), torch.arange(bags + 1))

    with pytest.raises(ValueError) as error:
        exchange(samples[torch.distributed.get_rank()])
    return str(error.value), exchange(2).batch


def exchange_bad_index(index: int) -> tuple[str, int]:
    """Rank 1's second sample has an index that table 3 does not have: a rank's error. Then, as above."""
    rank = torch.distributed.get_rank()
    model = meta_dlrm()
    distribute_tables(model, Grid(data=2, device="cpu"))
    assert isinstance(model.tables, ShardedTables)
    bags = BATCH // 2
    offsets = torch.zeros(CONFIG.tables * bags + 1, dtype=torch.int64)
    offsets[3 * bags + 2 :] = 1
    offsets[5 * bags :] = 2
    with pytest.raises(ValueError) as error:
        model.tables(torch.tensor([index if rank == 1 else 0, 0]), offsets)
    return str(error.value), model.tables.exchange(torch.zeros(2, dtype=torch.int64), offsets).batch


def fail_and_go_on() -> tuple[Tensor, Tensor]:
    """A pass that an exception ends half-way, then two that do not: the gradients that should be, and that are."""
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    sums = ReplicatedGradients([[first], [second]], torch.distributed.group.WORLD)
    scale = torch.distributed.get_rank() + 1.0

    def fail(_: Tensor) -> None:
        raise RuntimeError("half-way")

    hook = first.register_hook(fail)
    with contextlib.suppress(RuntimeError):
        (scale * first * second.detach() + second).sum().backward()
    hook.remove()
    first.grad = second.grad = None
    for _ in range(2):
        (scale * first + 2 * second).sum().backward()
    assert sums is not None
    assert first.grad is not None
    assert second.grad is not None
    return torch.tensor([6.0, 6.0, 8.0, 8.0]), torch.cat((first.grad, second.grad))
