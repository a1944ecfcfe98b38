# SPDX-License-Identifier: Apache-2.0
"""float8 training on real GPUs: casts and products beside those of CPUs, and steps on a grid beside bf16's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from stretto.models import GPT, GPTConfig
from stretto.ops.fp8_casts import E4M3, E5M2, ScaledMatrix, cast_scaled, find_largest, find_scale, multiply
from stretto.ops.scaled import all_gather_scaled_matmul_gathered
from stretto.parallel import Grid, parallelize
from tests.gpu.test_operators import Run

DIMS = ((-2, -1), (-1,), (-2,))


def cast_everywhere() -> list[str]:
    """Where a GPU's kernels have other bits than torch's operators on a CPU, or products other numbers."""
    torch.manual_seed(0)
    wrong = []
    for shape in ((4096, 1024), (1000, 1048), (16, 64, 48), (1, 16)):
        x = torch.randn(shape).bfloat16() * 3
        for dtype in (E4M3, E5M2):
            for dims in DIMS:
                found = []
                for device in ("cpu", "cuda"):
                    there = x.to(device)
                    scale = find_scale(find_largest(there, dims), dtype, is_power_of_two=len(dims) == 1)
                    casts = cast_scaled(there, scale, scale, dtype)
                    again = find_scale(find_largest(casts[0], (-2,), scale), dtype, is_power_of_two=True)
                    casts += cast_scaled(casts[0], None, again, dtype, scale=scale)[1:]
                    found.append([each.cpu().view(torch.uint8) for each in (scale, again, *casts)])
                if not all(torch.equal(one, other) for one, other in zip(*found, strict=True)):
                    wrong.append(f"{shape} {dtype} {dims}")
    for m, n, k in ((512, 768, 1024), (16, 16, 16), (100, 48, 4096)):
        left, right = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        for dims, kinds in (((-2, -1), (E5M2, E4M3)), ((-2, -1), (E4M3, E5M2)), ((-1,), (E4M3, E4M3))):
            for dtype in (torch.bfloat16, torch.float32):
                expected = _multiply(left, right, dims, kinds, dtype).float()
                there = _multiply(left.cuda(), right.cuda(), dims, kinds, dtype).cpu().float()
                far = (expected - there).norm() / expected.norm()
                if not far < 4e-3:
                    wrong.append(f"{m} x {n} x {k} {dims} {kinds} {dtype}: {far}")
    return wrong


def _multiply(left: Tensor, right: Tensor, dims: Any, kinds: Any, dtype: torch.dtype) -> Tensor:
    operands = []
    for x, kind in zip((left, right), kinds, strict=True):
        scale = find_scale(find_largest(x, dims), kind, is_power_of_two=len(dims) == 1)
        operands.append(ScaledMatrix(cast_scaled(x, scale, None, kind)[0], scale))
    return multiply(*operands, dtype, is_fast=False)


def gather_gradients() -> list[str]:
    """Where products of gathered fp8 rows, e5m2 among them, or the rows themselves are not right."""
    world, wrong = dist.get_world_size(), []
    Grid(data=world, device="cuda")
    torch.manual_seed(dist.get_rank())
    for implementation in ("library", "kernel", "auto"):
        for dtype in (E4M3, E5M2):
            x, weight = torch.randn(256, 512, device="cuda").to(dtype), torch.randn(384, 512, device="cuda").to(E4M3)
            scales = torch.full((1,), 0.5, device="cuda"), torch.full((1,), 2.0, device="cuda")
            product, rows = all_gather_scaled_matmul_gathered(
                x, weight, *scales, has_one_scale=True, implementation=implementation
            )
            parts = [torch.empty_like(x.view(torch.uint8)) for _ in range(world)]
            dist.all_gather(parts, x.view(torch.uint8))
            whole = torch.cat(parts).view(dtype)
            far = (product.double() - whole.double() @ weight.double().t()).norm() / product.double().norm()
            if not torch.equal(rows.view(torch.uint8), whole.view(torch.uint8)) or not far < 4e-3:
                wrong.append(f"{implementation} {dtype}: {far}")
    torch.cuda.synchronize()
    return wrong


def train(sizes: dict[str, int], options: dict[str, Any], compiles: bool) -> list[float]:
    """Losses of a few steps; each rank of a batch has the same rows."""
    torch.manual_seed(1)
    config = GPTConfig(
        layers=3, hidden=512, heads=8, kv_heads=4, ffn=1024, vocab=512, max_seq_len=256, positions="rotary",
        activation="swiglu", norm="rmsnorm", bias=False, tie_embeddings=False, **options.pop("model", {}),
    )  # fmt: skip
    grid = Grid(**sizes, device="cuda")
    model = parallelize(GPT(config), grid, dtype=torch.bfloat16, sharded_loss=False, **options)
    run = torch.compile(model) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = torch.randint(512, (4, 257), generator=torch.Generator().manual_seed(3)).cuda()
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(run(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_casts_have_the_bits_of_a_cpu_and_products_its_numbers(run_ranks: Run, world: int) -> None:
    assert run_ranks(world, cast_everywhere) == [[]]


@pytest.mark.ranks(2, own=(2, 4), among=(2,))
def test_gathered_products_take_gradients_in_e5m2(run_ranks: Run, world: int) -> None:
    assert run_ranks(world, gather_gradients) == [[]] * world


EXPERTS = {"num_experts": 4, "expert_ffn": 256, "balance": "none", "moe_layers": (1,)}


@pytest.mark.ranks(2, own=(1, 2, 4), among=(2,))
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_losses_are_near_those_of_bf16(run_ranks: Run, world: int, recipe: str, compiles: bool) -> None:
    """The last case has experts."""
    cases: list[tuple[dict[str, int], dict[str, Any]]] = [({"z": world}, {}), ({"x": world}, {})]
    cases += [({"x": world}, {"shard_sequence": True})] * (world > 1)
    cases += [({"z": world}, {"reshard": "after_forward"}), ({"z": world}, {"model": EXPERTS})]
    for sizes, options in cases:
        (expected, *_) = run_ranks(world, train, sizes, dict(options), False)
        (found, *_) = run_ranks(world, train, sizes, options | {"fp8": recipe}, compiles)
        assert found == pytest.approx(expected, rel=0.01), (sizes, options)
        assert found != expected
