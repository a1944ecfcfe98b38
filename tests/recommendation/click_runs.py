# SPDX-License-Identifier: Apache-2.0
"""Ranks' functions in the tests of a DLRM's training, in a module, so that a pool can import them."""

import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from stretto.recommendation import pooled_exchange
from stretto.recommendation.data import ClickBatch
from stretto.recommendation.training.config import DLRMTrainConfig
from stretto.recommendation.training.task import DLRMTask
from stretto.train.config import make_config
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


def train_with_a_bad_disk(config: DLRMTrainConfig, step: int, rank: int) -> str:
    """The error of this rank where `rank` cannot read the samples of `step`."""
    own_read = DLRMTask._read_step

    def read(run: DLRMTask, number: int) -> ClickBatch:
        if number == step and rank == torch.distributed.get_rank():
            raise OSError("the disk is gone")
        return own_read(run, number)

    with mock.patch.object(DLRMTask, "_read_step", read), pytest.raises((OSError, ValueError)) as error:
        train(config, display="none")
    return str(error.value)


def train_and_stop(config: DLRMTrainConfig, step: int, rank: int) -> None:
    """Train; `rank` gets SIGTERM while it works on `step`."""
    own_step = DLRMTask.step

    def step_and_signal(run: DLRMTask, number: int, lr: float) -> tuple[torch.Tensor, torch.Tensor]:
        if number == step and rank == torch.distributed.get_rank():
            os.kill(os.getpid(), signal.SIGTERM)
        return own_step(run, number, lr)

    with mock.patch.object(DLRMTask, "step", step_and_signal):
        train(config, display="none")


def train_with_kernels(config: DLRMTrainConfig) -> int:
    """Train on ranks whose kernels are interpreted. Returns how often the operator updated tables."""
    from stretto import ops

    assert pooled_exchange.choose_operators("kernel", torch.float32, torch.device("cpu"), [4]) is ops
    updating = sys.modules[ops.embedding_all_to_all_updating.__module__]
    update, calls = updating.update_tables, []

    def counted(*arguments: Any) -> None:
        calls.append(arguments[5].optimizer)
        update(*arguments)

    with mock.patch.object(updating, "update_tables", counted):
        train(config, display="none")
    assert set(calls) == {"adagrad"}
    return len(calls)
