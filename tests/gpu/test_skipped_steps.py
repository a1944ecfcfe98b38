# SPDX-License-Identifier: Apache-2.0
"""On GPUs: steps that are not finite change nothing, in CUDA graphs too; the hash of weights, and whom it names."""

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.memory import shared_gpus
from stretto.parallel import Grid
from stretto.train.bit_hash import hash_bits
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.storage import read_tensor
from stretto.train.config import make_config
from stretto.train.gpt.task import GPTTask
from stretto.train.observe.metrics import CorruptionError
from stretto.train.optimizer import local_shard
from stretto.train.trainer import train
from tests.gpu.sharing import GpuRanks

pytestmark = pytest.mark.ranks(2, own=(1, 2, 4), among=(1, 2, 3, 4))
BAD = 5  # the step whose loss is NaN; graphs are captured in step 4
RUNS = {
    "adamw": "",
    "copies": "train.dtype=bf16 train.writes_copies=true",
    "sgd": "train.optimizer=sgd train.momentum=0.9 train.lr=0.1",
    "device": "train.optimizer_state=device train.dtype=bf16",
    "host": "train.optimizer_state=host train.dtype=bf16 train.step_on=device",
    "averages": "train.ema=0.9",
    "averages graph": "train.ema=0.9 train.cuda_graph=true",
    "adamw graph": "train.cuda_graph=true",
    "copies graph": "train.dtype=bf16 train.writes_copies=true train.cuda_graph=true",
    "muon": "train.optimizer=muon train.dtype=bf16",
    "muon graph": "train.optimizer=muon train.dtype=bf16 train.cuda_graph=true",
    "sgd graph": "train.optimizer=sgd train.momentum=0.9 train.lr=0.1 train.cuda_graph=true",
}
NORM = "blocks.1.mlp_norm.weight"
SEED = random.randrange(2**31)


def configure(folder: Path, name: str, *options: str) -> Any:
    world = dist.get_world_size()
    values = {
        "out": str(folder / name.replace(" ", "-")),
        "device": "cuda",
        "ranks": world,
        "grid": {"data": world},
        "data": {"path": str(folder / "text.txt")},
        "model": {"layers": 2, "hidden": 64, "heads": 8, "positions": "rotary"},
        "train": {"steps": 7, "batch": 12, "seq_len": 64, "lr": 1e-3},
    }
    return make_config(values, list(options))


def train_with_nan(folder: Path) -> None:
    """Train as RUNS say, each with a step whose loss is NaN, since a weight is NaN for the time of that step."""
    Grid(data=dist.get_world_size(), device="cuda")  # one process group for all runs
    (folder / "text.txt").write_text("It was a bright cold day in April. " * 200)
    step = GPTTask.step

    def spoil(task: GPTTask, number: int, lr: float) -> Any:
        if number != BAD:
            return step(task, number, lr)
        weight = local_shard(task.model.get_parameter(NORM))
        before = weight.clone()
        weight.fill_(torch.nan)
        result = step(task, number, lr)
        weight.copy_(before)
        return result

    for name, options in RUNS.items():
        if shared_gpus.is_enabled() and "graph" in name:  # which would have to hold collectives
            continue
        kept = ["train.checkpoint_every=1", "train.keep_checkpoints=9", "train.on_nonfinite=skip"]
        with mock.patch.object(GPTTask, "step", spoil):
            train(configure(folder, name, *kept, *options.split()), display="none")


@pytest.fixture(scope="module")
def folder(gpu_pool: GpuRanks, tmp_path_factory: pytest.TempPathFactory, world: int) -> Path:
    folder = tmp_path_factory.mktemp("skipped")
    gpu_pool.run(world, train_with_nan, folder, timeout=150)
    return folder


def state_after(folder: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    path = folder / name.replace(" ", "-") / "checkpoints" / f"step-{step:08d}"
    return {key: read_tensor(path, entry) for key, entry in read_metadata(path).tensors.items()}


@pytest.mark.parametrize("name", RUNS)
def test_a_skipped_step_changes_no_bit(folder: Path, world: int, name: str) -> None:
    if not (folder / name.replace(" ", "-")).exists():
        pytest.skip("ranks that share a GPU capture no graphs: they would have to hold collectives")
    lines = [json.loads(line) for line in (folder / name.replace(" ", "-") / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("skipped")] == [BAD]
    before, after, then = (state_after(folder, name, step) for step in (BAD - 1, BAD, BAD + 1))
    assert before.keys() == after.keys()
    for key, values in before.items():
        assert torch.equal(values, after[key]), key
    assert any(not torch.equal(values, then[key]) for key, values in after.items()), "later steps must train"


def hash_on_the_device(seed: int) -> None:
    """The kernel's hashes are those of torch's operators on the CPU, without a wait, and each flip changes them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(shape, generator=generator).to(dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        for shape in ((1,), (4096,), (33, 77), (1 << 20, 5))
    ]
    on_device = [tensor.cuda() for tensor in tensors]
    hash_bits(on_device)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    found = hash_bits(on_device)
    torch.cuda.set_sync_debug_mode("default")
    assert found.is_cuda
    assert torch.equal(found.cpu(), hash_bits(tensors))
    choose = random.Random(seed)
    for number, tensor in enumerate(on_device):
        words = tensor.view(-1).view(torch.uint8)
        for _ in range(20):
            bit = choose.randrange(words.numel() * 8)
            words[bit // 8] ^= 1 << bit % 8
            assert hash_bits([tensor])[0] != found[number], (tensor.shape, tensor.dtype, bit)
            words[bit // 8] ^= 1 << bit % 8


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_the_hash_on_the_device_is_the_hash(run_ranks: Any, world: int) -> None:
    print(f"seed {SEED}")
    run_ranks(world, hash_on_the_device, SEED)


def train_with_flipped_bit(folder: Path, seed: int) -> tuple[str, tuple[int, ...]]:
    """Train, sound grids first; then a bit of rank 1's weight flips after step 3. Returns what is raised."""
    world = dist.get_world_size()
    (folder / "text.txt").write_text("It was a bright cold day in April. " * 200)
    for number, axes in enumerate(({"data": world}, {"x": world} if world != 3 else {"data": 3}, {"y": world})):
        if world == 3 and number:
            continue
        grid = [f"grid.{axis}={axes.get(axis, 1)}" for axis in ("data", "x", "y")]
        config = configure(folder, f"sound-{number}", *grid, "train.verify_steps=1", "train.dtype=bf16")
        train(config, display="none")
    step = GPTTask.step
    bit = random.Random(seed).randrange(1 << 30)

    def flip(task: GPTTask, number: int, lr: float) -> Any:
        result = step(task, number, lr)
        if number == 3 and dist.get_rank() == 1:
            words = local_shard(task.model.get_parameter("blocks.0.mlp.up.weight")).view(-1).view(torch.uint8)
            words[bit // 8 % words.numel()] ^= 1 << bit % 8
        return result

    with mock.patch.object(GPTTask, "step", flip):
        try:
            train(configure(folder, "flipped", "train.verify_steps=2"), display="none")
        except CorruptionError as error:
            return str(error), error.ranks
    return "", ()


@pytest.mark.ranks(4, own=(2, 4), among=(2, 3, 4))
def test_a_flipped_bit_is_found_and_sound_replicas_are_equal(run_ranks: Any, world: int, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    for message, ranks in run_ranks(world, train_with_flipped_bit, tmp_path, SEED):
        assert ranks == ((0, 1) if world == 2 else (1,)), message
        assert "blocks.0.mlp.up.weight after step 4" in message
