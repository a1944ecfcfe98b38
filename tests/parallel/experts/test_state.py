# SPDX-License-Identifier: Apache-2.0
"""State of models with experts: initial weights, state dicts, checkpoints on other grids, and optimizers' state."""

from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from stretto.execution import StateOptions
from stretto.models import GPT, GPTConfig
from stretto.optim import AdamW
from stretto.parallel import (
    Grid,
    SegmentLoadPlanner,
    SegmentSavePlanner,
    clip_grad_norm_,
    gather,
    layout_of,
    no_sync,
    parallelize,
)
from stretto.parallel.low_precision_weights import copy_of
from stretto.train.checkpoint import checkpoint_path, load_checkpoint
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.optimizer import ShardOptimizer
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update
from tests.parallel.training import SEED
from tests.train.saving import save_checkpoint

CONFIG = GPTConfig(
    layers=2, hidden=16, heads=4, vocab=61, max_seq_len=8, activation="swiglu", num_experts=4, expert_ffn=8,
    moe_layers="every:2", balance="none",
)  # fmt: skip
GRIDS: list[dict[str, Any]] = [
    {},
    {"data": 2, "x": 2, "expert": 2},
    {"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"},
    {"pipe": 2, "z": 2, "expert": 2},
    {"x": 2, "y": 2},
    {"z": 4, "expert": 2},
]


def make(seed: int, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(replace(CONFIG, **changes))


def tokens_of(grid: Grid, step: int) -> Tensor:
    """This rank's rows of a batch of 8."""
    whole = torch.randint(61, (8, 8), generator=torch.Generator().manual_seed(SEED + step))
    return whole.chunk(grid.size("batch"))[grid.coordinate("batch")]


def optimizer_of(model: nn.Module) -> ShardOptimizer:
    return ShardOptimizer(model, lambda groups: torch.optim.AdamW(groups, lr=0.1), weight_decay=0.1)


def save_trained(sizes: dict[str, Any], out: Path) -> dict[str, Tensor]:
    """Train two steps and save. Returns the whole weights."""
    grid = Grid(**sizes)
    model = parallelize(make(1), grid)
    optimizer = optimizer_of(model)
    for step in range(2):
        model.zero_grad()
        model(tokens_of(grid, step), tokens_of(grid, step)).backward()
        optimizer.step(0.1)
    save_checkpoint(out, 2, model, optimizer, model_config=CONFIG, run={}, data={}, keep=1)
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


def load_and_save(sizes: dict[str, Any], source: Path, out: Path) -> dict[str, Tensor]:
    """Load into a model with other weights, and save again. Returns the whole weights of this rank's stage."""
    model = parallelize(make(2), Grid(**sizes))
    optimizer = optimizer_of(model)
    load_checkpoint(source, model, optimizer)
    save_checkpoint(out, 2, model, optimizer, model_config=CONFIG, run={}, data={}, keep=1)
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "others"),
    [
        (GRIDS[1], GRIDS[3:4]),
        *(
            pytest.param(first, others, marks=pytest.mark.exhaustive)
            for first in GRIDS[1:3]
            for others in (GRIDS[::2], GRIDS[1::2])
        ),
    ],
)
def test_a_checkpoint_is_read_on_every_other_grid(ranks, tmp_path, first, others):
    (weights, *_) = ranks(4).run(save_trained, first, tmp_path / "first")
    source = checkpoint_path(tmp_path / "first", 2)
    for number, grid in enumerate(others):
        out = tmp_path / f"again-{number}"
        for seen in ranks(4 if grid else 1).run(load_and_save, grid, source, out):
            assert all(torch.equal(weight, weights[name]) for name, weight in seen.items())
        (again,) = ranks(1).run(load_and_save, {}, checkpoint_path(out, 2), tmp_path / f"back-{number}")
        assert again.keys() == weights.keys()
        assert all(torch.equal(again[name], weight) for name, weight in weights.items())
        assert moments(tmp_path / f"back-{number}") == moments(tmp_path / "first")


def moments(out: Path) -> dict[str, list[float]]:
    """The optimizer's tensors of a checkpoint."""
    from stretto.train.checkpoint.storage import read_tensor

    path = checkpoint_path(out, 2)
    entries = read_metadata(path).tensors
    return {name: read_tensor(path, entries[name]).flatten().tolist() for name in entries if "optimizer" in name}


def whole_tensors(sizes: dict[str, Any], folder: str, **changes: Any) -> dict[str, bool]:
    """State dicts: whole tensors in, by torch.distributed.checkpoint out and in again."""
    grid = Grid(**sizes)
    plain = {name: tensor.clone() for name, tensor in make(3, **changes).state_dict().items()}
    model = parallelize(make(1, **changes), grid)
    model.load_state_dict(plain)
    found = {name: torch.equal(gather(p), plain[name]) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if name.endswith("down_proj"):
            found[f"{name} by torch"] = torch.equal(parameter.full_tensor(), plain[name])
    dcp.save(model.state_dict(), checkpoint_id=folder, planner=SegmentSavePlanner())
    other = parallelize(make(2, **changes), grid)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder, planner=SegmentLoadPlanner())
    other.load_state_dict(state)
    found |= {f"{name} again": torch.equal(gather(p), plain[name]) for name, p in other.named_parameters()}
    double = model.double()
    layouts = {name: layout_of(p).splits != () for name, p in double.named_parameters() if "experts" in name}
    return {name: right for name, right in (found | layouts).items() if not right}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "experts"),
    [(GRIDS[1], 4), (GRIDS[2], 4), (GRIDS[5], 4), ({"data": 2, "z": 2, "expert": 2}, 6), ({"x": 2, "z": 4}, 6)],
    ids=str,
)
def test_state_dicts_take_whole_tensors_and_distributed_checkpoints(ranks, tmp_path, sizes, experts):
    count = prod(size for axis, size in sizes.items() if "expert" not in axis)
    assert ranks(count).run(whole_tensors, sizes, str(tmp_path / "dcp"), num_experts=experts) == [{}] * count


def initial_weights(sizes: dict[str, Any]) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = GPT(CONFIG)
    model = parallelize(model, Grid(**sizes), seed=SEED)
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", GRIDS[1:], ids=str)
def test_a_model_on_the_meta_device_has_the_same_experts_on_every_grid(ranks, sizes):
    (expected,) = ranks(1).run(initial_weights, {})
    assert expected["blocks.1.mlp.experts.gate_up_proj"].std() > 0
    for seen in ranks(4).run(initial_weights, sizes):
        assert all(torch.equal(weight, expected[name]) for name, weight in seen.items())


def accumulate(sizes: dict[str, Any], options: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """The norm, and whole gradients, of two micro-batches."""
    grid = Grid(**sizes)
    model = parallelize(make(1).double(), grid, **options)
    for step in range(2):
        with no_sync(model) if step == 0 else nullcontext():
            tokens = tokens_of(grid, step)
            model(tokens, tokens, num_targets=128).backward()
    norm = float(clip_grad_norm_(model.parameters(), None, grid))
    return norm, {name: gather(p.grad, layout_of(p)) for name, p in model.named_parameters()}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [GRIDS[1], GRIDS[2], GRIDS[5], {"data": 2, "z": 2, "expert": 2}], ids=str)
@pytest.mark.parametrize("reshard", ["after_backward", "gradients_after_step"])
def test_micro_batches_accumulate(ranks, sizes, reshard):
    ((norm, expected),) = ranks(1).run(accumulate, {}, {})
    assert norm == pytest.approx(float(torch.stack([grad.norm() for grad in expected.values()]).norm()), rel=1e-12)
    for own, gradients in ranks(4).run(accumulate, sizes, {"reshard": reshard}):
        assert own == pytest.approx(norm, rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-13)


def train_stored(sizes: dict[str, Any], options: StateOptions) -> dict[str, Tensor]:
    """Whole fp32 weights after three steps with optimizer state apart."""
    grid = Grid(**sizes)
    model = parallelize(make(1), grid, dtype=torch.float32)
    make_update = adamw_update(betas=(0.9, 0.95), eps=1e-8)
    stored = StoredOptimizer(
        model, grid, make_update, name="adamw", weight_decay=0.1, dtype=torch.float32, clip=0.5, options=options
    )
    for step in range(3):
        tokens = tokens_of(grid, step)
        model(tokens, tokens).backward()
        stored.step(1e-2)
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [GRIDS[1], GRIDS[2], {"data": 2, "z": 2, "expert": 2}], ids=str)
@pytest.mark.long
def test_optimizer_state_on_the_host_and_in_buckets_trains_as_on_one_rank(ranks, sizes):
    (expected,) = ranks(1).run(train_stored, {}, StateOptions("device"))
    options = StateOptions("host", bucket_size=512, coarsening=2)
    for seen in ranks(4).run(train_stored, sizes, options):
        for name, weight in seen.items():
            torch.testing.assert_close(weight, expected[name], rtol=2e-4, atol=2e-5)


def refuse_other_experts(sizes: dict[str, Any]) -> str:
    grid, model = Grid(**sizes), make(1)
    with torch.no_grad():
        model.blocks[1].mlp.experts.down_proj += grid.coordinate("expert")
    with pytest.raises(ValueError, match="hold different values") as error:
        parallelize(model, grid)
    return str(error.value)


def test_ranks_with_other_experts_are_refused(ranks):
    for message in ranks(2).run(refuse_other_experts, {"data": 2, "expert": 2}):
        assert "blocks.1.mlp.experts.down_proj" in message


def train_by_torch(sizes: dict[str, Any], kind: str) -> dict[str, Tensor]:
    grid = Grid(**sizes)
    model = parallelize(make(1), grid)
    makers = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = makers[kind](model.parameters(), lr=1e-2)
    tokens = tokens_of(grid, 0)
    model(tokens, tokens).backward()
    optimizer.step()
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_torchs_own_optimizers_step_parameters_of_both_meshes(ranks, kind):
    (expected,) = ranks(1).run(train_by_torch, {}, kind)
    for seen in ranks(4).run(train_by_torch, {"data": 2, "x": 2, "expert": 2}, kind):
        for name, weight in seen.items():
            torch.testing.assert_close(weight, expected[name], rtol=2e-4, atol=2e-5)


def train_in_bf16(sizes: dict[str, Any], options: dict[str, Any]) -> tuple[list[float], int]:
    """The losses of three steps, and of how many of the experts' weights an optimizer may write bf16 copies."""
    grid = Grid(**sizes)
    model = parallelize(make(1), grid, dtype=torch.bfloat16, **options)
    optimizer = AdamW(model.parameters(), lr=1e-2, writes_copies=True)
    losses = []
    for step in range(3):
        model.zero_grad()
        loss = model(tokens_of(grid, step), tokens_of(grid, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    experts = [parameter for name, parameter in model.named_parameters() if "experts" in name]
    return losses, sum(copy_of(parameter) is not None for parameter in experts)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "options", "copies"),
    [
        ({"data": 2, "x": 2, "expert": 2}, {}, 2),
        ({"z": 2, "x": 2, "expert": 2}, {"shard_sequence": True}, 2),
        ({"data": 2, "z": 2, "expert": 2}, {"reshard": "after_forward"}, 0),
    ],
    ids=str,
)
def test_mixed_precision_trains_as_on_one_rank_with_low_precision_weights(ranks, sizes, options, copies):
    ((expected, of_one),) = ranks(1).run(train_in_bf16, {}, {})
    assert of_one == 2
    for losses, found in ranks(4).run(train_in_bf16, sizes, options):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert found == copies
