# SPDX-License-Identifier: Apache-2.0
"""`python -m lab dlrm`: a DLRM's training step with fused look-up and all-to-all, and with PyTorch's functions.

Both run in one job, interleaved, with the same model, batches and optimizers; only `implementation` differs. "library"
is the baseline of Punniyamurthy et al.: nn.functional.embedding_bag a table, all_to_all_single and cat, with row-wise
Adagrad on the sparse gradients. "kernel" updates the tables in the fused backward pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.pictures import draw_result
from lab.training.settings import DlrmWorkload
from stretto.bench.harness import (
    FAILURES,
    Column,
    empty_memory,
    in_one_line,
    peak_memory_gib,
    print_table,
    run_ranks,
    time_steps,
    write_result,
)
from stretto.models import DLRM
from stretto.parallel import Grid, ShardedTables, distribute_tables
from stretto.parallel.recsys.pooled_exchange import Implementation
from stretto.train.data import rank_rows
from stretto.train.data.clicks import SyntheticClicks
from stretto.train.optimizer import TableOptimizer

COLUMNS = (
    Column("name", "look-up and exchange"),
    Column("step_milliseconds", "step (ms)", "{:.2f}"),
    Column("samples_per_second", "samples/s", "{:,.0f}"),
    Column("less_time", "less time than library", "{:.1%}"),
    Column("forward_milliseconds", "look-up and exchange (ms)", "{:.2f}"),
    Column("indices_milliseconds", "indices' exchange (ms)", "{:.2f}"),
    Column("peak_memory_gib", "peak memory (GiB)", "{:.1f}"),
    Column("loss", "loss", "{:.6f}"),
    Column("last_loss", "last loss", "{:.6f}"),
    Column("error", "error"),
)
BATCHES = 4  # used in turn, since a single one would stay in the caches


@dataclass(frozen=True)
class _ClicksBatch:
    dense: Tensor
    indices: Tensor
    offsets: Tensor  # on the CPU
    labels: Tensor


def bench_dlrm(workload: DlrmWorkload, ranks: int, out: Path) -> list[dict[str, Any]]:
    """Measure, print the table, and write dlrm.json (after every run of every round) and dlrm.png to `out`."""
    if workload.batch % ranks:
        raise ValueError(f"a batch of {workload.batch} cannot be cut into {ranks} parts")
    rows = run_ranks(ranks, measure_dlrm, workload, ranks, out)
    tables = workload.model.tables
    print_table(f"DLRM of {tables} tables, global batch {workload.batch}, {ranks} ranks", _columns(rows), rows)
    draw_result(_write(workload, ranks, out, rows))
    return rows


def measure_dlrm(workload: DlrmWorkload, ranks: int, out: Path) -> list[dict[str, Any]]:
    """The job of each rank; returns a row an implementation."""
    grid = Grid(data=ranks)
    batches = _make_batches(workload, grid)
    rows: dict[str, dict[str, Any]] = {name: {"name": name} for name in workload.implementations}
    for _ in range(workload.rounds):
        for name in workload.implementations:
            row = rows[name]
            if "error" not in row:
                try:
                    _measure_once(row, name, workload, grid, batches)
                except FAILURES as error:
                    rows[name] = {"name": name, "error": in_one_line(error)}
            _compare(rows)
            if grid.coordinate("world") == 0:
                print(_describe(rows[name]), flush=True)
                _write(workload, ranks, out, list(rows.values()))
    return list(rows.values())


def _measure_once(
    row: dict[str, Any], name: Implementation, workload: DlrmWorkload, grid: Grid, batches: list[_ClicksBatch]
) -> None:
    """Measure one round of one implementation: build the model, time its steps, and drop it."""
    empty_memory()
    step, tables = _build(name, workload, grid, batches)
    losses = [step()]
    seconds = time_steps(lambda: losses.append(step()), warm_up=workload.warm_up, repeats=workload.repeats)
    row.setdefault("seconds", []).append(seconds)
    times = {"warm_up": workload.warm_up, "repeats": workload.repeats}
    with torch.no_grad():
        exchange = time_steps(lambda: tables.exchange(batches[0].indices, batches[0].offsets), **times)
        lookups = tables.exchange(batches[0].indices, batches[0].offsets)
        forward = time_steps(lambda: tables.pool(lookups), **times)
    if seconds == min(row["seconds"]):
        row |= {
            "step_milliseconds": seconds * 1e3,
            "samples_per_second": workload.batch / seconds,
            "forward_milliseconds": forward * 1e3,
            "indices_milliseconds": exchange * 1e3,
            "peak_memory_gib": peak_memory_gib(grid.device),
            "loss": _sum_over_ranks(losses[0]),
            "last_loss": _sum_over_ranks(losses[-1]),
        }


def _build(
    name: Implementation, workload: DlrmWorkload, grid: Grid, batches: list[_ClicksBatch]
) -> tuple[Callable[[], Tensor], ShardedTables]:
    """Build a training step, which returns this rank's part of the loss, and the model's tables."""
    config = workload.model
    with torch.device("meta"):
        model = DLRM(config)
    distribute_tables(model, grid, pooling=config.pooling, implementation=name)
    assert isinstance(model.tables, ShardedTables)
    mlps = nn.ModuleList([model.bottom, model.top])
    fused = grid.device.type == "cuda"
    optimizer = torch.optim.AdamW(mlps.parameters(), lr=1e-3, fused=fused)
    table_optimizer = TableOptimizer(model.tables, "rowwise-adagrad", eps=1e-8, device=grid.device)
    table_optimizer.set_lr(0.02)
    turn = 0

    def step() -> Tensor:
        nonlocal turn
        batch = batches[turn % len(batches)]
        turn += 1
        loss = model(batch.dense, batch.indices, batch.offsets, labels=batch.labels, num_samples=workload.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        table_optimizer.step()
        return loss.detach()

    return step, model.tables


def _make_batches(workload: DlrmWorkload, grid: Grid) -> list[_ClicksBatch]:
    """Make this rank's parts of a few global batches, on its device."""
    config = workload.model
    clicks = SyntheticClicks(
        BATCHES * workload.batch,
        config.rows,
        config.pooling,
        dense=config.dense,
        seed=0,
        is_jagged=workload.is_jagged,
    )
    rows = rank_rows(workload.batch, grid.coordinate("data"), grid.size("data"))
    batches = []
    for number in range(BATCHES):
        read = clicks.read(number * workload.batch + np.arange(rows.start, rows.stop))
        dense, indices, labels = (
            torch.from_numpy(array).to(grid.device) for array in (read.dense, read.indices, read.labels)
        )
        batches.append(_ClicksBatch(dense, indices, torch.from_numpy(read.offsets), labels))
    return batches


def _compare(rows: Mapping[str, dict[str, Any]]) -> None:
    """Add to each row how much less time than the library its best round took."""
    library = rows.get("library", {}).get("step_milliseconds")
    for row in rows.values():
        if library is not None and "step_milliseconds" in row and row["name"] != "library":
            row["less_time"] = 1 - row["step_milliseconds"] / library


def _columns(rows: list[dict[str, Any]]) -> tuple[Column, ...]:
    return COLUMNS if any("error" in row for row in rows) else COLUMNS[:-1]


def _write(workload: DlrmWorkload, ranks: int, out: Path, rows: list[dict[str, Any]]) -> Path:
    return write_result(out, "dlrm", _columns(rows), rows, ranks=ranks, setting=asdict(workload))


def _describe(row: Mapping[str, Any]) -> str:
    return f"{row['name']}: " + (row["error"] if "error" in row else f"{row['seconds'][-1] * 1e3:,.2f} ms a step")


def _sum_over_ranks(loss: Tensor) -> float:
    total = loss.double()
    dist.all_reduce(total)
    return float(total)
