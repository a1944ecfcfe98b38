# SPDX-License-Identifier: Apache-2.0
"""Ranks' functions in the tests of tables that are cut or replicated, in a module, so that a pool can import them."""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from stretto.parallel import Grid
from stretto.recommendation import ShardedTables, TablePlacement, TableSize, distribute_tables, distributed_state
from stretto.recommendation.table_state import table_state
from stretto.train.checkpoint import load_state
from stretto.train.checkpoint.metadata import read_metadata
from tests.recommendation import dlrm
from tests.train.saving import save_state

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"weight_decay": 0.1, "max_norm": 0.02},
    "rowwise-adagrad": {},
    "full-adagrad": {"lr_factors": {0: 0.5, 4: 2.0}},
    "adam": {"eps": 1e-30, "weight_decay": 0.01},
}


def place(kinds: str, world: int) -> TablePlacement:
    """Tables of `dlrm.CONFIG` by a letter each: table, row, column, node (rows in a node of 2), everywhere."""
    owned: list[list[int]] = [[] for _ in range(world)]
    names: dict[str, Any] = {"t": "table", "r": "row", "c": "column", "n": "table-row", "e": "replicated"}
    for table, kind in enumerate(kinds):
        ranks = {
            "t": [table % world],
            "r": range(min(world, dlrm.CONFIG.rows[table])),
            "c": range(world),
            "n": (range(world - world % 2)[-2:] or [0])[: dlrm.CONFIG.rows[table]],
            "e": [],
        }[kind]
        for rank in ranks:
            owned[rank].append(table)
    sizes = tuple(TableSize(rows, dlrm.CONFIG.dim) for rows in dlrm.CONFIG.rows)
    return TablePlacement(sizes, tuple(map(tuple, owned)), tuple(names[kind] for kind in kinds))


def make_tables(
    kinds: str,
    dtype: torch.dtype = torch.float64,
    implementation: Any = "auto",
    device: str = "cpu",
    **options: Any,
) -> ShardedTables:
    world = dist.get_world_size()
    with torch.device("meta"):
        model = dlrm.DLRM(dlrm.CONFIG).to(dtype)
    grid, placement = Grid(data=world, device=device), place(kinds, world // options.get("replicas", 1))
    distribute_tables(model, grid, placement=placement, implementation=implementation, seed=3, **options)
    assert isinstance(model.tables, ShardedTables)
    return model.tables


def gather(tables: ShardedTables) -> dict[str, Tensor]:
    """All tables and states, whole, from all ranks' boxes; replicas must have the same bits."""
    every: list[Any] = [None] * dist.get_world_size()
    boxes = {name: (state.shape, state.boxes[0]) for name, state in table_state(tables).items()}
    own = {name: (shape, box.offsets, box.values.cpu()) for name, (shape, box) in boxes.items()}
    dist.all_gather_object(every, own)
    whole: dict[str, Tensor] = {}
    for of_rank in every:
        for name, (shape, offsets, values) in of_rank.items():
            if not values.is_floating_point():  # of tables that grow, which are on one rank
                whole[name] = values
                continue
            into = whole.setdefault(name, torch.full(shape, math.nan, dtype=values.dtype))
            box = into[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))]
            assert box.isnan().all() or torch.equal(box, values), f"replicas of {name} differ"
            box.copy_(values)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def look_up(tables: ShardedTables, number: int, dtype: torch.dtype) -> Tensor:
    """The backward pass of a look-up, whose gradient does not depend on the tables; returns this rank's vectors."""
    rank, world = dist.get_rank(), dist.get_world_size()
    _, indices, offsets, _ = dlrm.local_part(dlrm.make_batch(number), rank, world)
    out = tables(indices.to(tables.device), offsets)
    assert out.dtype == dtype
    factors = torch.randn(
        dlrm.BATCH, dlrm.CONFIG.tables, dlrm.CONFIG.dim, generator=torch.Generator().manual_seed(number)
    )
    local = factors[rank * len(out) : (rank + 1) * len(out), list(tables.placement.order)].flatten(1)
    if out.requires_grad:
        out.backward(local.to(out))
    by_number = out.new_empty(len(out), dlrm.CONFIG.tables, dlrm.CONFIG.dim)
    by_number[:, list(tables.placement.order)] = out.detach().view_as(by_number)
    return by_number


def update(
    cases: list[tuple[str, str]],
    steps: int,
    dtype: torch.dtype = torch.float64,
    implementation: Any = "library",
    device: str = "cpu",
) -> list[tuple[dict[str, Tensor], list[Tensor]]]:
    """Tables and states after some steps, of each (kinds, optimizer), and the vectors of each step, of all samples."""
    found = []
    for kinds, kind in cases:
        tables = make_tables(kinds, dtype, implementation, device)
        optimizer = tables.fuse_update(kind.removesuffix("-plain"), **({"lr": 0.3} | OPTIONS.get(kind, {})))
        vectors = []
        for number in range(steps):
            own = look_up(tables, number, dtype)
            every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(every, own)
            vectors.append(torch.cat(every).cpu())
        assert all(weight.grad is None for weight in tables.weights)
        assert optimizer.clock.tolist() == [steps, 0]
        found.append((gather(tables), vectors))
    return found


def replicate(kinds: str, kind: str, every: int, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Tables and states of two groups that average them, and their drift after each step."""
    tables = make_tables(kinds, implementation="library", replicas=2, sync_every=every)
    tables.fuse_update(kind, lr=0.3)
    assert tables.replicas is not None
    assert tables.group.size() == dist.get_world_size() // 2
    drifts = []
    for number in range(steps):
        look_up(tables, number, torch.float64)
        drifts.append(float(tables.replicas.drift))
    return gather(tables), drifts  # which averages once more, or replicas would differ


def gradients(kinds: str) -> dict[str, Tensor]:
    """Each parameter's dense gradient without an optimizer that is fused, and where its box begins."""
    tables = make_tables(kinds)
    look_up(tables, 0, torch.float64)
    return {
        f"{shard.table} {shard.row} {shard.column}": (weight.grad.to_dense() if weight.grad.is_sparse else weight.grad)
        for shard, weight in zip(tables.shards, tables.weights, strict=True)
        if weight.grad is not None
    }


def save(kinds: str, kind: str, folder: Path) -> dict[str, Tensor]:
    """Train for two steps, and save by both kinds of checkpoints; returns all of it after a third step."""
    tables = make_tables(kinds)
    optimizer = tables.fuse_update(kind, lr=0.3, **OPTIONS[kind])
    for number in range(2):
        look_up(tables, number, torch.float64)
    save_state(folder / "own", 2, table_state(tables), {"optimizer": kind, "model": {}, "run": {}, "data": {}}, keep=1)
    dcp.save(distributed_state(tables), checkpoint_id=str(folder / "dcp"))
    look_up(tables, 2, torch.float64)
    assert optimizer.clock[0] == 3
    return gather(tables)


def resume(kinds: str, kind: str, folder: Path, checkpoint: Path | None) -> dict[str, Tensor]:
    """Load on any placement, and make the third step. checkpoint: the house's, or None for torch's."""
    tables = make_tables(kinds)
    optimizer = tables.fuse_update(kind, lr=0.3, **OPTIONS[kind])
    if checkpoint is None:
        dcp.load(distributed_state(tables), checkpoint_id=str(folder / "dcp"))
        assert optimizer.clock[0] == 2
    else:
        load_state(checkpoint, read_metadata(checkpoint), table_state(tables))
        optimizer.set_steps(2)
    look_up(tables, 2, torch.float64)
    return gather(tables)


def refuse(kinds: str, kind: str, options: dict[str, Any]) -> str:
    """The error of an optimizer; no state is allocated then."""
    tables = make_tables(kinds)
    with pytest.raises(ValueError) as error:
        tables.fuse_update(kind, **options)
    assert tables.optimizer is None
    return str(error.value)


def refuse_replicas() -> list[str]:
    """The errors of groups that cannot be."""
    words = []
    for replicas, every, cached in ((3, 0, ()), (2, 1, (5,) * 6)):
        with torch.device("meta"):
            model = dlrm.DLRM(dlrm.CONFIG)
        placement = replace(place("tttttt", 2), cached=cached)
        with pytest.raises(ValueError) as error:
            distribute_tables(
                model, Grid(data=4, device="cpu"), placement=placement, replicas=replicas, sync_every=every
            )
        words.append(str(error.value))
    return words


def refuse_placement(placement: TablePlacement, nodes: str) -> str:
    """The error of a placement on declared nodes."""
    with torch.device("meta"):
        model = dlrm.DLRM(dlrm.CONFIG).double()
    with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes}), pytest.raises(ValueError) as error:
        distribute_tables(model, Grid(data=dist.get_world_size(), device="cpu"), placement=placement)
    assert all(parameter.is_meta for parameter in model.parameters())
    return str(error.value)


def train(steps: int, kinds: str) -> list[float]:
    """Losses of the whole model, whose tables have row-wise Adagrad."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = dlrm.meta_dlrm()
    distribute_tables(model, Grid(data=world, device="cpu"), placement=place(kinds, world), seed=3)
    assert isinstance(model.tables, ShardedTables)
    model.tables.fuse_update("rowwise-adagrad", lr=0.3)
    sgd = torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], lr=0.5)
    losses = []
    for number in range(steps):
        loss = dlrm.step(model, [sgd], dlrm.local_part(dlrm.make_batch(number), rank, world))
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses
