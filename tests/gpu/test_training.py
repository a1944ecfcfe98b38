"""On GPUs, under NCCL: what the CPU tests show of `parallelize`, and what only a GPU can show."""

import itertools
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.models import GPT, GPTConfig
from stretto.parallel import AXES, Grid, clip_grad_norm_, gather, parallelize
from tests.pool import Pool

RANKS = max((n for n in (1, 2, 4) if n <= torch.cuda.device_count()), default=0)
CONFIG = GPTConfig(
    layers=2, hidden=256, heads=8, kv_heads=4, vocab=1003, max_seq_len=128, positions="rotary", activation="swiglu"
)
STEPS, BATCH, SEQ_LEN = 5, 8, 64


def grids() -> list[dict[str, int]]:
    sizes = range(1, RANKS + 1)
    return [dict(zip(AXES, f, strict=True)) for f in itertools.product(sizes, repeat=4) if prod(f) == RANKS]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, CONFIG.vocab, (BATCH, SEQ_LEN + 1), generator=generator)
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


def new_model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def train_on_all_grids() -> dict[str, Any]:
    first = Grid(data=RANKS)
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict[str, Any] = {"plain": train(new_model().to(first.device), None)}
    for sizes in grids():
        grid = Grid(**sizes)
        name = str(sizes)
        results[name] = train(parallelize(new_model(), grid), grid)
        for again in ("", " again"):
            results[f"bf16 {name}{again}"] = train(parallelize(new_model(), grid, dtype=torch.bfloat16), grid)
        if sizes["x"] > 1:
            results[f"sequence {name}"] = train(parallelize(new_model(), grid, shard_sequence=True), grid)
        model = parallelize(new_model(), grid)
        results[f"share {name}"] = {
            key: p.to_local().numel() / p.numel() for key, p in model.named_parameters() if ".qkv.weight" in key
        }
    return results if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def trained(gpu_pool: Pool) -> dict[str, Any]:
    results: dict[str, Any] = gpu_pool.run(RANKS, train_on_all_grids, timeout=150)[0]
    return results


SHARDED = [f"sequence {sizes}" for sizes in grids() if sizes["x"] > 1]


@pytest.mark.parametrize("name", [*map(str, grids()), *SHARDED])
def test_every_grid_trains_like_one_gpu_in_fp32(trained: dict[str, Any], name: str) -> None:
    plain, actual = trained["plain"], trained[name]
    assert actual["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert actual["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    for name, weight in plain["weights"].items():
        assert (actual["weights"][name] - weight).norm() / weight.norm() < 1e-5, name


@pytest.mark.parametrize("sizes", grids(), ids=str)
def test_bf16_stays_near_fp32_and_repeats_bit_for_bit(trained: dict[str, Any], sizes: dict[str, int]) -> None:
    once, again = trained[f"bf16 {sizes}"], trained[f"bf16 {sizes} again"]
    assert once["losses"] == pytest.approx(trained["plain"]["losses"], rel=1e-2)
    assert once["losses"] == again["losses"]
    for name, weight in once["weights"].items():
        assert torch.equal(weight, again["weights"][name]), name


@pytest.mark.parametrize("sizes", grids(), ids=str)
def test_each_gpu_holds_its_share_of_the_linears(trained: dict[str, Any], sizes: dict[str, int]) -> None:
    share = 1 / (sizes["x"] * sizes["y"] * sizes["z"])
    assert set(trained[f"share {sizes}"].values()) == {share}
