# SPDX-License-Identifier: Apache-2.0
"""On GPUs: what the CPU tests show of `parallelize`, and what only a GPU can show."""

import itertools
from contextlib import nullcontext
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.axes import NAMES
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, checkpoint_activations, clip_grad_norm_, gather, gather_once, no_sync, parallelize
from tests.gpu.sharing import SHARED, GpuRanks, is_shared
from tests.parallel import hugging_face

VOCAB = 1003
STEPS, BATCH, SEQ_LEN = 5, 8, 64
pytestmark = pytest.mark.ranks(4, own=(1, 2, 4), among=(1, *SHARED))


FEW = {
    3: ({"data": 3}, {"z": 3}),
    4: ({"x": 2, "z": 2}, {"data": 2, "y": 2}),
    5: ({"data": 5}, {"z": 5}),
    8: ({"data": 2, "x": 2, "z": 2}, {"x": 2, "y": 2, "z": 2}),
}
"""Grids of ranks that share a GPU, whose collectives go by way of the host."""


def grids(world: int) -> list[dict[str, int]]:
    if is_shared(world) and world in FEW:
        return [dict.fromkeys(NAMES, 1) | sizes for sizes in FEW[world]]
    sizes = range(1, world + 1)
    factors = (f for f in itertools.product(sizes, repeat=4) if prod(f) == world)
    return [dict.fromkeys(NAMES, 1) | dict(zip(("data", "x", "y", "z"), f, strict=True)) for f in factors]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    world = dist.get_world_size()
    sequences = BATCH if BATCH % world == 0 else 2 * world
    tokens = torch.randint(0, VOCAB, (sequences, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    return tokens[:, :-1].cuda(), targets.cuda()


def train(model: nn.Module, grid: Grid | None) -> dict[str, Any]:
    inputs, targets = batch()
    if grid is not None:
        part, parts = grid.coordinate("batch"), grid.size("batch")
        inputs, targets = inputs.chunk(parts)[part], targets.chunk(parts)[part]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        if grid is None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            norm = clip_grad_norm_(model.parameters(), 1.0, grid)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    weights = {name: gather(parameter).detach().double().cpu() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "weights": weights}


def train_in_parts(grid: Grid, *, gathers_once: bool) -> list[Tensor]:
    """The weights after steps of two micro-batches with activation checkpointing, in bf16."""
    model = parallelize(new_model(), grid, dtype=torch.bfloat16)
    checkpoint_activations(model)
    inputs, targets = batch()
    part, parts = grid.coordinate("batch"), grid.size("batch")
    rows = inputs.chunk(parts)[part], targets.chunk(parts)[part]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with gather_once(model) if gathers_once else nullcontext():
            with no_sync(model):
                model(*rows).backward()
            model(*rows).backward()
        optimizer.step()
    return [parameter.to_local().detach().cpu() for parameter in model.parameters()]


def make_config(world: int) -> GPTConfig:
    """Of a width that the number of ranks divides."""
    return GPTConfig(
        layers=2,
        hidden=240 if world in (3, 5) else 256,
        heads=8,
        kv_heads=4,
        vocab=VOCAB,
        max_seq_len=128,
        positions="rotary",
        activation="swiglu",
    )


def new_model() -> GPT:
    torch.manual_seed(0)
    return GPT(make_config(dist.get_world_size()))


def train_on_all_grids() -> dict[str, Any]:
    world = dist.get_world_size()
    first = Grid(data=world)
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict[str, Any] = {"plain": train(new_model().to(first.device), None)}
    for sizes in grids(world):
        grid = Grid(**sizes)
        name = str(sizes)
        results[name] = train(parallelize(new_model(), grid), grid)
        for again in ("", " again"):
            results[f"bf16 {name}{again}"] = train(parallelize(new_model(), grid, dtype=torch.bfloat16), grid)
        if sizes["x"] > 1:
            results[f"sequence {name}"] = train(parallelize(new_model(), grid, shard_sequence=True), grid)
        if sizes["z"] > 1:
            once, each_time = (train_in_parts(grid, gathers_once=once) for once in (True, False))
            results[f"once {name}"] = all(map(torch.equal, once, each_time))
        model = parallelize(new_model(), grid)
        results[f"share {name}"] = {
            key: p.to_local().numel() / p.numel() for key, p in model.named_parameters() if ".qkv.weight" in key
        }
    return results if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def trained(gpu_pool: GpuRanks, world: int) -> dict[str, Any]:
    results: dict[str, Any] = gpu_pool.run(world, train_on_all_grids, timeout=150)[0]
    return results


def test_every_grid_trains_like_one_gpu_in_fp32(trained: dict[str, Any], world: int) -> None:
    plain = trained["plain"]
    names = [name for sizes in grids(world) for name in (str(sizes), f"sequence {sizes}")]
    for name in names:
        if name not in trained:  # nothing to shard a sequence over
            assert name.startswith("sequence")
            continue
        actual = trained[name]
        assert actual["losses"] == pytest.approx(plain["losses"], rel=1e-5), name
        assert actual["norms"] == pytest.approx(plain["norms"], rel=1e-4), name
        for parameter, weight in plain["weights"].items():
            error = (actual["weights"][parameter] - weight).norm() / weight.norm()
            assert error < 1e-5, (name, parameter)


def test_bf16_stays_near_fp32_and_repeats_bit_for_bit(trained: dict[str, Any], world: int) -> None:
    for sizes in grids(world):
        once, again = trained[f"bf16 {sizes}"], trained[f"bf16 {sizes} again"]
        assert once["losses"] == pytest.approx(trained["plain"]["losses"], rel=1e-2), sizes
        assert once["losses"] == again["losses"], sizes
        for name, weight in once["weights"].items():
            assert torch.equal(weight, again["weights"][name]), (sizes, name)


def test_weights_that_are_gathered_once_a_step_train_the_same_to_the_bit(trained: dict[str, Any], world: int) -> None:
    for sizes in grids(world):
        assert trained.get(f"once {sizes}", sizes["z"] == 1), sizes


def test_each_rank_holds_its_share_of_the_linears(trained: dict[str, Any], world: int) -> None:
    for sizes in grids(world):
        share = 1 / (sizes["x"] * sizes["y"] * sizes["z"])
        held = trained[f"share {sizes}"].values()
        assert held
        assert all(part == pytest.approx(share, rel=1e-2) for part in held), sizes


def llama_with_a_sharded_sequence(compiles: bool) -> list[list[float]]:
    """Losses of a Llama on one GPU, and over x."""
    grid = Grid(x=dist.get_world_size())
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens = torch.randint(3, hugging_face.VOCAB, (4, SEQ_LEN), generator=torch.Generator().manual_seed(3)).cuda()
    options = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 1024, "max_position_embeddings": SEQ_LEN}
    losses: list[list[float]] = []
    for is_sharded in (False, True):
        torch.manual_seed(3)
        model: Any = hugging_face.causal_lm("llama", **options).train().to(grid.device)
        if is_sharded:
            model = parallelize(model, grid, shard_sequence=True)
        for layer in model.model.layers if compiles else ():
            layer.compile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(STEPS):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    return losses


@pytest.mark.parametrize("compiles", [False, True])
def test_a_transformers_model_with_a_sharded_sequence_trains_like_one_gpu(
    gpu_pool: GpuRanks, world: int, compiles: bool
) -> None:
    for plain, sharded in gpu_pool.run(world, llama_with_a_sharded_sequence, compiles, timeout=150):
        assert sharded == pytest.approx(plain, rel=1e-5)
        assert sharded[0] - sharded[-1] > 0.01
