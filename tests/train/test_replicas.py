# SPDX-License-Identifier: Apache-2.0
"""Silent corruption: a hash that any flipped bit changes, and ranks that find whose weights differ."""

import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Ranks
from tests.launch import launch_entries
from tests.train import runs
from torch import Tensor

from stretto.launch.supervisor import StopTimeouts
from stretto.train.bit_hash import hash_bits
from stretto.train.checkpoint import checkpoint_path, find_checkpoint
from stretto.train.config import TrainConfig
from stretto.train.gpt.task import GPTTask
from stretto.train.job import launch
from stretto.train.observe.metrics import CorruptionError
from stretto.train.optimizer import local_shard
from stretto.train.replicas import ReplicaCheck, Vote, judge
from stretto.train.trainer import train

MakeRanks = Callable[[int], Ranks]
SEED = random.randrange(2**31)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]


def flip(tensor: Tensor, bit: int) -> None:
    """Flip one bit of a contiguous tensor's memory."""
    tensor.detach().view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_single_bit_changes_the_hash_of_its_tensor_alone(dtype: torch.dtype) -> None:
    print(f"seed {SEED}")
    generator = torch.Generator().manual_seed(SEED)
    for shape in ((5, 3), (7,), (2, 4)):
        tensors = [torch.randint(-100, 100, shape, generator=generator).to(dtype) for _ in range(2)]
        before = hash_bits(tensors)
        for bit in range(tensors[1].numel() * dtype.itemsize * 8):
            flip(tensors[1], bit)
            after = hash_bits(tensors)
            assert after[0] == before[0]
            assert after[1] != before[1], bit
            flip(tensors[1], bit)
        assert torch.equal(hash_bits(tensors), before)


def test_the_hash_sees_order_and_equal_flips_across_blocks() -> None:
    print(f"seed {SEED}")
    numbers = torch.randn(600_000, generator=torch.Generator().manual_seed(SEED))
    (before,) = hash_bits([numbers])
    for first, second in ((0, 1), (5, 300_005), (17, 599_999)):
        swapped = numbers.clone()
        swapped[[first, second]] = numbers[[second, first]]
        assert hash_bits([swapped])[0] != before
        for bit in (0, 22, 31):
            flipped = numbers.clone()
            flip(flipped[first:], bit)
            flip(flipped[second:], bit)
            assert hash_bits([flipped])[0] != before
    assert hash_bits([numbers[:0]]).tolist() == [0]
    assert hash_bits([numbers[1:4].view(3, 1)]) == hash_bits([numbers[1:4].clone()])  # of a view that is not aligned


def hash_by_kernel(seed: int) -> None:
    """The interpreted kernel finds the same hashes as torch's operators."""
    from stretto.train import bit_hash_kernel

    generator = torch.Generator().manual_seed(seed)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        bounds = torch.iinfo(dtype)
        for count in (1, 4096, 10_001):
            words = torch.randint(bounds.min, bounds.max + 1, (count,), generator=generator).to(dtype)
            total = torch.zeros(1, dtype=torch.int64)
            bit_hash_kernel.launch(words, total)
            positions = torch.arange(count)
            mixed = positions * -7046029254386353131
            expected = (words.long() * ((mixed ^ (mixed >> 32)) | 1)).sum()
            assert total[0] == expected, (dtype, count)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_the_kernel_finds_the_same_hashes(interpret: Callable[..., Any]) -> None:
    print(f"seed {SEED}")
    interpret(1, hash_by_kernel, SEED)


def train_with_flipped_bit(config: TrainConfig, rank: int, name: str, bit: int, step: int) -> tuple[str, Any]:
    """Train; after `step`, a bit of this rank's shard of a parameter flips. Returns the error of this rank.

    Of a parameter with an fp32 master on the device, in the master: the next step writes the weight anew from it.
    """
    run_step = GPTTask.step

    def flip_after(task: GPTTask, number: int, lr: float) -> Any:
        result = run_step(task, number, lr)
        if number == step and dist.get_rank() == rank:
            shard = task.masters().get(name, local_shard(task.model.get_parameter(name)))
            flip(shard, bit % (shard.numel() * shard.element_size() * 8))
        return result

    with mock.patch.object(GPTTask, "step", flip_after):
        try:
            train(config, display="none")
        except CorruptionError as error:
            return str(error), error.ranks
    return "", ()


LONG = ["train.steps=45", "train.schedule=constant", "train.lr=1e-3", "train.batch=4"]
NORM, WEIGHT = "blocks.0.mlp_norm.weight", "blocks.1.mlp.up.weight"


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "step", "every", "name", "culprits", "replicas"),
    [
        (["grid.data=4"], 30, 7, WEIGHT, [2], "ranks 0, 1 and 3"),
        (["grid.data=2", "grid.x=2"], 5, 4, WEIGHT, [0, 2], ""),
        (["grid.x=2", "grid.z=2"], 5, 1, NORM, [2], "ranks 0, 1 and 3"),  # norms are on all ranks
        (["grid.data=2"], 30, 10, "embedding.weight", [0, 1], ""),
        (["grid.data=2", "grid.y=2"], 5, 4, NORM, [0, 2], ""),
        (["grid.data=2", "grid.pipe=2"], 5, 4, WEIGHT, [2, 3], ""),
        (["grid.data=4", "train.dtype=bf16", "train.optimizer_state=device"], 5, 4, WEIGHT, [2], "ranks 0, 1 and 3"),
        (["grid.data=4", "train.dtype=bf16", "train.optimizer_state=host"], 5, 4, WEIGHT, [2], "ranks 0, 1 and 3"),
        (["grid.data=4", "train.optimizer=sgd", "train.micro_batch=1"], 5, 4, WEIGHT, [2], "ranks 0, 1 and 3"),
    ],
    ids=str,
)
def test_a_bit_that_flips_in_a_replica_is_found_within_n_steps_and_its_rank_named(
    ranks: MakeRanks,
    tmp_path: Path,
    options: list[str],
    step: int,
    every: int,
    name: str,
    culprits: list[int],
    replicas: str,
) -> None:
    saved = 20 if step == 30 else 4
    config = runs.configure(
        tmp_path / "run", *LONG, f"train.checkpoint_every={saved}", *options, f"train.verify_steps={every}"
    )
    bit = random.Random(SEED).randrange(1 << 40)
    print(f"seed {SEED}, bit {bit}")
    flipped_on = 2 if config.ranks == 4 else 1
    found = ranks(config.ranks).run(train_with_flipped_bit, config, flipped_on, name, bit, step, timeout=240)
    assert len(set(found)) == 1, "all ranks raise the same error"
    message, named = found[0]
    assert list(named) == culprits, message
    assert f": {name} after step " in message, message
    found_at = int(message.partition(" after step ")[2].partition(",")[0])
    assert step <= found_at <= step + every, message
    if replicas:
        assert message.startswith("rank 2 (host ")
        assert f"holds other weights than {replicas}: {name}" in message
    assert f"the weights of {checkpoint_path(config.out, saved)} were verified before they were saved" in message
    assert find_checkpoint(config.out, "latest") == checkpoint_path(config.out, saved)


X2 = [(0,), (1,), (0,), (1,)]  # coordinates on x of ranks 0 to 3 of a grid of x=2, z=2


@pytest.mark.parametrize(
    ("hashes", "shards", "culprits", "names"),
    [
        ([{0: 1, 1: 1, 2: 5, 3: 1}], [()] * 4, [2], ["p0"]),
        ([{0: 1, 1: 5}], [()] * 2, [0, 1], ["p0"]),
        # The faulty rank's neighbours along x have changed too, but alike: rank 1 is 3, and 0 is not 2.
        ([{0: 1, 1: 7, 2: 5, 3: 7}], X2, [0, 2], ["p0"]),
        # Another parameter has outvoted rank 2, and what it names comes first.
        ([{0: 1, 1: 7, 2: 1, 3: 7}, {0: 1, 1: 7, 2: 5, 3: 7}, {0: 1, 1: 1, 2: 5, 3: 1}], X2, [2], ["p2", "p1", "p0"]),
        # No two ranks that sum gradients: all of a parameter's ranks vote.
        ([{0: 1, 1: 1, 2: 5}], [(0,), (1,), (2,)], [2], ["p0"]),
        # Two faulty ranks of different replicas.
        ([{0: 1, 2: 5}, {1: 3, 3: 4}, {0: 1, 1: 1, 2: 5, 3: 9}], X2, [0, 1, 2, 3], None),
    ],
)
def test_the_ranks_are_judged_by_majority_where_gradients_are_summed(
    hashes: list[dict[int, int]], shards: list[tuple[int, ...]], culprits: list[int], names: list[str] | None
) -> None:
    votes = [Vote(f"p{number}", found) for number, found in enumerate(hashes)]
    found, named = judge(votes, shards)
    assert found == culprits
    assert names is None or named == names


@pytest.mark.exhaustive
def test_neighbours_along_x_whose_gradients_have_changed_meanwhile_are_not_suspected(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    """After a few steps the neighbours' norms differ too, but not from their replicas along z."""
    config = runs.configure(tmp_path / "run", *LONG, "grid.x=2", "grid.z=2", "train.verify_steps=9")
    message, named = ranks(4).run(train_with_flipped_bit, config, 2, NORM, 23, 4, timeout=240)[0]
    assert 2 in named, message
    assert set(named) <= {0, 2}, message
    assert "after step 9" in message


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ["grid.data=2", "grid.x=2", "train.verify_steps=1", "train.shard_sequence=true"],
        pytest.param(
            ["grid.x=2", "grid.y=2", "train.verify_steps=1", "train.dtype=bf16", "model.dropout=0.1"],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(["grid.x=2", "grid.z=2", "grid.data=2", "train.verify_steps=1"], marks=pytest.mark.exhaustive),
        pytest.param(
            ["grid.data=2", "grid.z=2", "grid.expert=2", "model.num_experts=4", "train.verify_steps=1"],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_a_sound_run_is_never_suspected_and_checks_change_no_loss(
    ranks: MakeRanks, tmp_path: Path, options: list[str]
) -> None:
    plain = runs.configure(tmp_path / "plain", *options, "train.verify_steps=none")
    checked = runs.configure(tmp_path / "checked", *options)
    for config in (plain, checked):
        ranks(config.ranks).run(runs.train_quietly, config, timeout=240)
    losses = [[line["loss"] for line in runs.metrics_of(config.out)] for config in (plain, checked)]
    assert losses[0] == losses[1]


@pytest.mark.long
def test_a_checkpoint_is_verified_before_it_is_written(ranks: MakeRanks, tmp_path: Path) -> None:
    config = runs.configure(
        tmp_path / "run", "grid.data=2", "train.steps=4", "train.checkpoint_every=2", "train.verify_steps=1000"
    )
    message, _ = ranks(2).run(train_with_flipped_bit, config, 1, WEIGHT, 77, 3)[0]
    assert "after step 4, which were equal at step 2" in message
    assert find_checkpoint(config.out, "latest") == checkpoint_path(config.out, 2)


@pytest.mark.long
def test_weights_that_make_the_loss_infinite_are_named_and_not_the_loss(ranks: MakeRanks, tmp_path: Path) -> None:
    """The flipped bit is the exponent's highest: the next step's loss is not finite, before the check is due."""
    config = runs.configure(tmp_path / "run", "grid.data=4", "train.steps=4", "train.verify_steps=1000")
    message, named = ranks(4).run(train_with_flipped_bit, config, 2, "norm.weight", 30, 2)[0]
    assert named == (2,), message
    assert "norm.weight after step 3" in message


def test_a_grid_without_replicas_has_a_note_that_nothing_is_compared(tmp_path: Path, caplog: Any) -> None:
    runs.train_quietly(runs.configure(tmp_path / "run", "train.steps=1", "train.verify_steps=1"))
    assert "no two ranks hold the same weights" in caplog.text


def test_masters_of_low_precision_weights_are_compared_too(ranks: MakeRanks, tmp_path: Path) -> None:
    config = runs.configure(
        tmp_path, "grid.data=2", "train.optimizer_state=device", "train.dtype=bf16", "train.verify_steps=1"
    )
    for message in ranks(2).run(flip_master, config):
        assert f"different weights, and either may be right: {WEIGHT} after step 7" in message


def flip_master(config: TrainConfig) -> str:
    """Flip the lowest bit of an fp32 weight, which its bf16 weight does not show. Returns what the check says."""
    from stretto.parallel import Grid

    task = GPTTask(config, Grid(**config.grid.sizes(), device="cpu"))
    task.start()
    check = ReplicaCheck(task)
    check.check(6)
    if dist.get_rank() == 1:
        flip(task.masters()[WEIGHT], 0)
    try:
        check.check(7)
    except CorruptionError as error:
        return str(error)
    finally:
        task.close()
    return ""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("forks_processes")
def test_a_run_restarts_automatically_from_verified_weights_with_the_losses_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    options = ["grid.data=3", "train.batch=6", "train.steps=8", "train.checkpoint_every=2", "train.verify_steps=3"]
    config = runs.configure(tmp_path / "run", *options, "train.max_restarts=1")
    config.out.mkdir()
    assert launch(launch_entries.train_with_corruption, config, StopTimeouts(report=0.3, end=1.0)) is None
    (failure,) = [json.loads(line) for line in (config.out / "restarts.jsonl").read_text().splitlines()]
    assert (failure["kind"], failure["rank"]) == ("corrupted", 2)
    assert "norm.weight after step 6, which were equal at step 4" in failure["reason"]
    plain = runs.configure(tmp_path / "plain", *options, "grid.data=1")
    runs.train_quietly(plain)
    lines, expected = runs.metrics_of(config.out), runs.metrics_of(plain.out)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], abs=1e-6)
