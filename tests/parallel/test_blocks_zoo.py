# SPDX-License-Identifier: Apache-2.0
"""Families of transformers, found by walking its registry, train on a grid as in one process, with no roles given."""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from stretto.parallel import Grid, parallelize
from tests.parallel import zoo
from tests.parallel.training import Sizes, my_rows

TOLERANCE = 1e-5


def train_on(sizes: Sizes, families: list[tuple[str, str]]) -> dict[str, Any]:
    """Each family's largest relative difference in five losses from one process's, or what was raised."""
    found: dict[str, Any] = {}
    for family, task in families:
        model, batch, grid = zoo.build(family, task), zoo.make_batch(task), Grid(*sizes)
        mine = {key: value[my_rows(grid, zoo.BATCH)] for key, value in batch.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parallelize(model, grid)
                losses = torch.tensor(zoo.train(model, mine), dtype=torch.float64)
        except Exception as error:  # noqa: BLE001 - the test shows it
            found[family] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
            dist.barrier()
            continue
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        expected = torch.tensor(zoo.train(zoo.build(family, task), batch), dtype=torch.float64)
        found[family] = float(((losses - expected) / expected).abs().max())
    return found
