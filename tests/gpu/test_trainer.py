# SPDX-License-Identifier: Apache-2.0
"""Training runs on GPUs: the loop, its checkpoints, and that it never waits for the device."""

import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.memory import shared_gpus
from stretto.parallel import Grid
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.storage import read_tensor
from stretto.train.config import make_config
from stretto.train.gpt.task import GPTTask
from stretto.train.trainer import train
from tests.gpu.sharing import GpuRanks

GRIDS = {1: ["", ""], 2: ["grid.x=2", "grid.z=2"], 4: ["grid.x=2 grid.z=2", "grid.data=2 grid.y=2"]}
GRIDS[8] = ["grid.data=2 grid.x=2 grid.z=2", "grid.x=2 grid.y=2 grid.z=2"]
UNCUT = {1: "", 2: "grid.x=2", 4: "grid.data=2 grid.y=2", 8: "grid.data=2 grid.x=2 grid.y=2"}  # by z
pytestmark = pytest.mark.ranks(2, own=(1, 2, 4), among=(1, 2, 4, 8))
RUNS = {
    "whole": "train.checkpoint_every=3 {first}",
    "again": "train.resume=whole/checkpoints/step-00000003 {first}",
    "other": "train.resume=whole/checkpoints/step-00000003 {second}",
    "bf16": "train.dtype=bf16 {first}",
    "sgd": "train.optimizer=sgd train.lr=0.1 train.momentum=0.9 train.micro_batch=1 {second}",
    "graph": "train.cuda_graph=true train.checkpoint_every=3 {first}",
}
RUNS["sequence"] = "train.shard_sequence=true {first}"
RUNS["sequence graph"] = "train.cuda_graph=true " + RUNS["sequence"]
RUNS["uncut"] = "train.dtype=bf16 train.checkpoint_every=3 {uncut}"
RUNS["copies"] = "train.writes_copies=true " + RUNS["uncut"]
RUNS["copies again"] = "train.resume=whole/checkpoints/step-00000003 " + RUNS["copies"]
RUNS["uncut again"] = "train.resume=whole/checkpoints/step-00000003 " + RUNS["uncut"]
RUNS["copies graph"] = "train.cuda_graph=true " + RUNS["copies"]
RUNS["sgd graph"] = "train.cuda_graph=true " + RUNS["sgd"]
RUNS["skips"] = "train.on_nonfinite=skip {first}"
RUNS["skips copies"] = "train.on_nonfinite=skip " + RUNS["copies"]
RUNS["skips sgd"] = "train.on_nonfinite=skip " + RUNS["sgd"]
RUNS["verified"] = "train.dtype=bf16 train.verify_steps=1 {second}"


def train_all(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")  # one process group for all runs
    torch.backends.cuda.matmul.allow_tf32 = False
    (folder / "text.txt").write_text("It was a bright cold day in April. " * 200)
    first, second = GRIDS[world]
    step = GPTTask.step

    def step_without_waiting(run: GPTTask, number: int, lr: float) -> Any:
        # First steps set things up, and a graph is captured after three.
        if number == 1 or (number == 4 and (run.config.train.resume or run.config.train.cuda_graph)):
            return step(run, number, lr)
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            result = step(run, number, lr)
            torch.cuda.set_sync_debug_mode("default")
        places = [f"{wait.filename}:{wait.lineno}\n" for wait in waits if "called a synchronizing" in str(wait.message)]
        with open(folder / "waits.txt", "a") as file:
            file.writelines(places)
        return result

    for name, overrides in RUNS.items():
        if shared_gpus.is_enabled() and "cuda_graph" in overrides:  # which would have to hold collectives
            continue
        values = {
            "out": str(folder / name),
            "device": "cuda",
            "ranks": world,
            "data": {"path": str(folder / "text.txt")},
            "model": {"layers": 2, "hidden": 128, "heads": 8, "positions": "rotary"},
            "train": {"steps": 6, "batch": 16, "seq_len": 64, "lr": 1e-3},
        }
        options = (
            overrides.format(first=first, second=second, uncut=UNCUT.get(world))
            .replace("whole/", f"{folder}/whole/")
            .split()
        )
        # Collectives by way of the host wait for the GPU.
        with mock.patch.object(GPTTask, "step", step if shared_gpus.is_enabled() else step_without_waiting):
            train(make_config(values, options), display="none")


@pytest.fixture(scope="module")
def folder(gpu_pool: GpuRanks, tmp_path_factory: pytest.TempPathFactory, world: int) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    gpu_pool.run(world, train_all, folder, timeout=150)
    return folder


@pytest.mark.own_gpus("NCCL's collectives alone leave the host to go on")
def test_no_step_waits_for_the_gpu(folder: Path) -> None:
    assert set((folder / "waits.txt").read_text().splitlines()) == set()


def losses(folder: Path, name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_continues_bit_by_bit_on_the_same_grid(folder: Path) -> None:
    assert losses(folder, "again") == losses(folder, "whole")[3:]
    whole, again = (folder / name / "checkpoints" / "step-00000006" for name in ("whole", "again"))
    entries, differing = read_metadata(again).tensors, {}
    for name, entry in read_metadata(whole).tensors.items():
        one, other = read_tensor(whole, entry), read_tensor(again, entries[name])
        if not torch.equal(one, other):
            where = (one != other).nonzero().tolist()
            differing[name] = list(one.shape), len(where), where[:5], (one - other).abs().max().item()
    assert not differing


def test_a_sharded_sequence_changes_no_loss(folder: Path) -> None:
    assert losses(folder, "sequence") == pytest.approx(losses(folder, "whole"), abs=1e-5)


def test_a_resumed_run_continues_on_another_grid(folder: Path) -> None:
    assert losses(folder, "other") == pytest.approx(losses(folder, "whole")[3:], abs=1e-5)


@pytest.mark.own_gpus("the graph holds NCCL's collectives")
@pytest.mark.parametrize("name", ["whole", "sgd", "sequence"])
def test_a_captured_run_is_the_run_itself(folder: Path, name: str) -> None:
    captured = {"whole": "graph", "sgd": "sgd graph", "sequence": "sequence graph"}[name]
    assert losses(folder, captured) == pytest.approx(losses(folder, name), abs=1e-5)


def test_weights_that_the_optimizer_has_cast_change_no_bit(folder: Path) -> None:
    assert losses(folder, "copies") == losses(folder, "uncut")
    assert losses(folder, "copies again") == losses(folder, "uncut again")


@pytest.mark.parametrize("name", ["whole", "copies", "sgd"])
def test_a_run_that_would_skip_steps_is_the_run_itself(folder: Path, name: str) -> None:
    assert losses(folder, {"whole": "skips", "copies": "skips copies", "sgd": "skips sgd"}[name]) == losses(
        folder, name
    )


def test_replicas_of_a_sound_run_are_equal_in_every_step(folder: Path) -> None:
    assert len(losses(folder, "verified")) == 6


@pytest.mark.own_gpus("the graph holds NCCL's collectives")
def test_a_captured_run_follows_the_weights_that_the_optimizer_has_cast(folder: Path) -> None:
    assert losses(folder, "copies graph") == pytest.approx(losses(folder, "uncut"), rel=1e-3)


@pytest.mark.parametrize("name", ["whole", "bf16", "sgd"])
def test_every_run_learns(folder: Path, name: str) -> None:
    assert len(losses(folder, name)) == 6
    assert losses(folder, name)[-1] < losses(folder, name)[0] - 0.1


def test_bf16_stays_near_fp32(folder: Path) -> None:
    assert losses(folder, "bf16") == pytest.approx(losses(folder, "whole"), rel=1e-2)


def test_the_summary_names_the_gpu_and_what_it_held(folder: Path, world: int) -> None:
    summary = json.loads((folder / "whole" / "summary.json").read_text())
    assert summary["device"] == torch.cuda.get_device_name(0)
    assert summary["peak_memory_bytes"] > 4 * 4 * summary["parameters"] / world  # weights, gradients, two moments
    assert (sum(summary["bytes_sent"].values()) > 0) == (world > 1)
