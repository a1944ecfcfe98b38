# SPDX-License-Identifier: Apache-2.0
"""Ranks that are slow on GPUs: by NCCL's times where each rank has a GPU, by the host's view where they share one."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from stretto import counters
from stretto.train.config import TrainConfig, make_config
from stretto.train.data import Sampler
from stretto.train.gpt.task import GPTTask
from stretto.train.job import launch
from stretto.train.trainer import train

pytestmark = pytest.mark.ranks(2, own=(2,), among=(2,))
FAULT = "STRETTO_TEST_SLOW"  # what is slow on rank 1: "gpu", "data" or "none"
SLEEP = 0.05  # seconds of a step, which takes a few milliseconds without
CYCLES = 2_000_000_000 * SLEEP  # of the GPU's clock, which is about 2 GHz
VIEWS = "views-of-rank-{rank}.json"


def train_slowly(config: TrainConfig) -> None:
    """Train, slowly on rank 1, in its data or on its GPU; write by what the windows were measured."""
    fault, rank = os.environ[FAULT], int(os.environ["RANK"])
    owner, name = (Sampler, "indices") if fault == "data" else (GPTTask, "_update")
    original = getattr(owner, name)

    def slow_down(*arguments: Any, **options: Any) -> Any:
        if fault == "data" and rank == 1:
            time.sleep(SLEEP)
        if fault == "gpu" and rank == 1:
            torch.cuda._sleep(int(CYCLES))
        if fault == "none":  # steps of the same length, that all ranks have in common
            time.sleep(SLEEP)
        return original(*arguments, **options)

    with mock.patch.object(owner, name, slow_down):
        train(config, display="none")
    folder = counters.shared_folder()
    assert folder is not None
    windows = [asdict(window) for window in counters.Reader(folder / f"rank-{rank}.counters").read().windows]
    (config.out / VIEWS.format(rank=rank)).write_text(json.dumps(windows))


def run(folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch, world: int) -> dict[str, Any]:
    """Train by the launcher. Returns the summary, with what both ranks have measured as "windows"."""
    monkeypatch.setenv(FAULT, fault)
    (folder / "text.txt").write_text("It was a bright cold day in April. " * 2_000)
    values = {
        "out": str(folder / "out"),
        "device": "cuda",
        "ranks": world,
        "grid": {"data": world},
        "data": {"path": str(folder / "text.txt")},
        "model": {"layers": 2, "hidden": 128, "heads": 8, "positions": "rotary"},
        "train": {"steps": 220, "batch": 8, "seq_len": 64, "lr": 1e-3, "timeout": 60.0},
    }
    assert launch(train_slowly, make_config(values, [])) is None
    summary: dict[str, Any] = json.loads((folder / "out" / "summary.json").read_text())
    measured = [json.loads((folder / "out" / VIEWS.format(rank=rank)).read_text()) for rank in range(world)]
    return summary | {"windows": measured}


def views(summary: dict[str, Any]) -> set[str]:
    return {window["view"] for windows in summary["windows"] for window in windows}


@pytest.mark.own_gpus("a rank that is slow on a shared GPU keeps the others' kernels from running, too")
def test_a_slow_gpu_is_reported_by_nccls_times(tmp_path, monkeypatch, caplog, world):
    summary = run(tmp_path, "gpu", monkeypatch, world)
    assert views(summary) == {"nccl"}, summary["windows"]
    assert summary["slow_rank"]["rank"] == 1, summary["windows"]
    assert "slowest rank 1: " in caplog.text
    assert "x the median for 50 steps" in caplog.text


def test_slow_data_are_reported_if_a_gpu_computes(tmp_path, monkeypatch, caplog, world):
    summary = run(tmp_path, "data", monkeypatch, world)
    assert views(summary) == {"nccl" if torch.cuda.device_count() >= world else "host"}, summary["windows"]
    assert summary["slow_rank"]["rank"] == 1, summary["windows"]
    assert "slowest rank 1: " in caplog.text


@pytest.mark.exhaustive
def test_ranks_that_are_equally_fast_are_not_reported(tmp_path, monkeypatch, caplog, world):
    summary = run(tmp_path, "none", monkeypatch, world)
    assert all(len(windows) >= 3 for windows in summary["windows"]), summary["windows"]
    assert "slow_rank" not in summary, (summary["slow_rank"], summary["windows"])
    assert "slowest rank" not in caplog.text
