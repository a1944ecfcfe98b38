"""What ranks do in the tests of a DLRM's training: functions of a module, so that a pool can import them."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.parallel import pooled_exchange
from stretto.train.config import DLRMTrainConfig, make_config
from stretto.train.dlrm_run import DLRMRun
from stretto.train.trainer import train


def configure(out: Path, *overrides: str) -> DLRMTrainConfig:
    """A small run on samples that are computed."""
    values = {
        "out": str(out),
        "device": "cpu",
        "model": {
            "kind": "dlrm", "rows": [30, 3, 1, 12, 40], "dim": 4, "bottom": [8, 4], "top": [8, 1],
            "pooling": [2, 1, 1, 5, 1], "dense": 3,
        },
        "data": {"format": "synthetic", "samples": 200, "evaluation_samples": 37, "jagged": True},
        "train": {"steps": 6, "batch": 16, "lr": 1e-2, "table_lr": 0.1, "warmup_steps": 2, "dtype": "fp64", "seed": 5},
    }  # fmt: skip
    config = make_config(values, list(overrides))
    assert isinstance(config, DLRMTrainConfig)
    return config


def train_quietly(config: DLRMTrainConfig) -> None:
    train(config, display="none")


def train_and_stop(config: DLRMTrainConfig, step: int, rank: int) -> None:
    """Train; `rank` gets SIGTERM while it works on `step`."""
    own_step = DLRMRun.step

    def step_and_signal(run: DLRMRun, number: int, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        if number == step and rank == torch.distributed.get_rank():
            os.kill(os.getpid(), signal.SIGTERM)
        return own_step(run, number, lr)

    with mock.patch.object(DLRMRun, "step", step_and_signal):
        train(config, display="none")


def train_with_stand_in(config: DLRMTrainConfig) -> int:
    """Train with the operator replaced by slow, plain code of its signature. Returns how often it updated tables."""
    StandIn.updates = 0
    with mock.patch.object(pooled_exchange, "_find_operators", return_value=StandIn):
        train(config, display="none")
    return StandIn.updates


class StandIn:
    """What `stretto.ops` has, by the definition: every rank's pooled vectors and gradients are gathered whole."""

    updates = 0

    @staticmethod
    def embedding_all_to_all(
        indices: Tensor, offsets: Tensor, tables: list[Tensor], group: dist.ProcessGroup, *, batch: int, name: str,
        sparse: bool,
    ) -> Tensor:  # fmt: skip
        assert sparse
        assert name
        pooled = torch.zeros(batch, sum(table.shape[1] for table in tables))
        column = 0
        for number, table in enumerate(tables):
            for sample in range(batch):
                bag = slice(*offsets[number * batch + sample :][:2].tolist())
                pooled[sample, column : column + table.shape[1]] = table[indices[bag]].sum(0)
            column += table.shape[1]
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, pooled, group=group)
        return torch.cat(every, dim=1).chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    def embedding_all_to_all_update(
        grad: Tensor, indices: Tensor, offsets: Tensor, tables: list[Tensor], group: dist.ProcessGroup, *,
        optimizer: str, settings: Tensor, states: list[Tensor], batch: int, name: str,
    ) -> None:  # fmt: skip
        StandIn.updates += 1
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, (grad, sum(table.shape[1] for table in tables)), group=group)
        whole = torch.cat([part for part, _ in every])
        column = sum(width for _, width in every[: group.rank()])
        assert optimizer == "adagrad"
        lr, eps = settings.tolist()
        for number, (table, state) in enumerate(zip(tables, states, strict=True)):
            gradient = torch.zeros_like(table)
            for sample in range(batch):
                bag = slice(*offsets[number * batch + sample :][:2].tolist())
                for row in indices[bag].tolist():
                    gradient[row] += whole[sample, column : column + table.shape[1]]
            column += table.shape[1]
            state += gradient.square().mean(dim=1)
            with torch.no_grad():
                table -= lr * gradient / (state.sqrt() + eps)[:, None]
