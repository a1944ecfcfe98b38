# SPDX-License-Identifier: Apache-2.0
"""Families of transformers, found by walking its registry, train in pipeline stages as in one process."""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from stretto.parallel import Grid, Pipeline, parallelize
from tests.parallel import zoo
from tests.parallel.training import my_rows


def train_in_stages(sizes: dict[str, int], families: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    """Each family's largest relative difference in five losses from one process's, or what was raised."""
    found: dict[str, Any] = {}
    grid = Grid(**sizes)
    for family, task in families:
        model, batch = zoo.build(family, task), make_batch(task)
        mine = {key: value[my_rows(grid, zoo.BATCH)] for key, value in batch.items()}
        expected = torch.tensor(zoo.train(zoo.build(family, task), batch), dtype=torch.float64)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses = torch.tensor(_train(parallelize(model, grid, **options), grid, mine), dtype=torch.float64)
        except Exception as error:  # noqa: BLE001 - the test shows it
            found[family] = f"{type(error).__name__}: {error}".split("\n")[0]
            dist.barrier()
            continue
        found[family] = float(((losses - expected) / expected).abs().max())
    return found


def make_batch(task: str) -> dict[str, torch.Tensor]:
    """Inputs of a step; rows have different numbers of labels that count."""
    batch = zoo.make_batch(task)
    for row in range(zoo.BATCH):
        batch["labels"][row, : 3 * row] = -100
    return batch


def _train(model: torch.nn.Module, grid: Grid, batch: dict[str, torch.Tensor], steps: int = 5) -> list[float]:
    """The losses of some steps with SGD, in micro-batches of a row."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    with Pipeline(model, grid, schedule="1f1b", micro_batch_size=1) as pipeline:
        for _ in range(steps):
            losses.append(float(pipeline.step(**batch)))
            optimizer.step()
            optimizer.zero_grad()
    return losses
