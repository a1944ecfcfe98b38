# SPDX-License-Identifier: Apache-2.0
"""A DLRM trained on GPUs has the losses of the same run on the CPU, by the operator and by PyTorch's functions."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stretto.parallel import Grid
from stretto.recommendation.pooled_exchange import _find_operators
from stretto.recommendation.training.config import DLRMTrainConfig
from stretto.train.config import make_config
from stretto.train.trainer import train
from tests.gpu.sharing import GpuRanks, is_shared

pytestmark = pytest.mark.ranks(2, own=(1, 2, 4), among=(1, 2, 4, 8))
IMPLEMENTATIONS = ("library", "kernel") if _find_operators() is not None else ("library",)
FIXED = ["data.jagged=false", "train.implementation=kernel"]  # bags of one size, so that a step can be captured


def configure(out: Path, device: str, *overrides: str) -> DLRMTrainConfig:
    values = {
        "out": str(out),
        "device": device,
        "model": {"kind": "dlrm", "name": "small"},
        "data": {"format": "synthetic", "samples": 4000, "evaluation_samples": 500, "jagged": True},
        "train": {"steps": 8, "batch": 64, "lr": 3e-3, "table_lr": 0.1, "checkpoint_every": 2, "keep_checkpoints": 9},
    }
    config = make_config(values, list(overrides))
    assert isinstance(config, DLRMTrainConfig)
    return config


def train_on_gpus(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")  # one process group for all runs
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in IMPLEMENTATIONS:
        checkpoint = folder / "cpu" / "checkpoints" / "step-00000002"
        options = [f"ranks={world}", f"train.implementation={name}", f"train.resume={checkpoint}"]
        train(configure(folder / name, "cuda", *options), display="none")
        train(configure(folder / f"{name} again", "cuda", *options), display="none")
    if is_shared(world) or "kernel" not in IMPLEMENTATIONS:  # gloo's collectives cannot be captured
        return
    checkpoint = folder / "fixed cpu" / "checkpoints" / "step-00000002"
    options = [f"ranks={world}", f"train.resume={checkpoint}", *FIXED]
    train(configure(folder / "fixed", "cuda", *options), display="none")
    train(configure(folder / "graph", "cuda", *options, "train.cuda_graph=true"), display="none")


@pytest.fixture(scope="module")
def folder(gpu_pool: GpuRanks, tmp_path_factory: pytest.TempPathFactory, world: int) -> Path:
    folder = tmp_path_factory.mktemp("dlrm")
    train(configure(folder / "cpu", "cpu"), display="none")
    train(configure(folder / "fixed cpu", "cpu", FIXED[0]), display="none")
    gpu_pool.run(world, train_on_gpus, folder, timeout=150)
    return folder


def metrics_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_losses_and_auc_are_those_of_the_cpu(folder: Path, name: str) -> None:
    ours, expected = metrics_of(folder / name), metrics_of(folder / "cpu")[2:]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in expected], abs=1e-4)
    assert ours[-1]["auc"] == pytest.approx(expected[-1]["auc"], abs=1e-3)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_same_run_has_the_same_bits(folder: Path, name: str) -> None:
    once, again = metrics_of(folder / name), metrics_of(folder / f"{name} again")
    assert [line["loss"] for line in once] == [line["loss"] for line in again]


def test_a_replayed_step_has_the_bits_of_a_launched_one(folder: Path, world: int) -> None:
    if is_shared(world):
        pytest.skip("ranks that share a GPU have gloo, which no graph captures")
    expected, launched, replayed = (metrics_of(folder / name) for name in ("fixed cpu", "fixed", "graph"))
    assert [line["loss"] for line in launched] == pytest.approx([line["loss"] for line in expected[2:]], abs=1e-4)
    assert [line["loss"] for line in replayed] == [line["loss"] for line in launched]
    assert replayed[-1]["auc"] == launched[-1]["auc"]
