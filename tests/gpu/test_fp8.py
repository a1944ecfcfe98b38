# SPDX-License-Identifier: Apache-2.0
"""float8 training on real GPUs: casts and products beside those of CPUs, and steps on a grid beside bf16's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from stretto.execution import Fp8
from stretto.models import GPT, GPTConfig
from stretto.ops.fp8_casts import E4M3, E5M2, ScaledMatrix, cast_scaled, find_largest, find_scale, multiply
from stretto.ops.scaled import all_gather_scaled_matmul_gathered
from stretto.parallel import Grid, gather, parallelize
from stretto.parallel.fp8.experts import multiply_columns
from tests.gpu.test_operators import Run

DIMS = ((-2, -1), (-1,), (-2,))
SHAPES = ((1000, 1048), (4096, 1024), (16, 64, 48), (1, 16))
"""Of matrices that are cast: each kind of size has kernels of its own, which take most of the time to compile."""
SAMPLED: list[tuple[Any, torch.dtype, Any]] = [
    ((1000, 1048), E4M3, DIMS[0]),
    ((1000, 1048), E5M2, DIMS[1]),
    ((1000, 1048), E4M3, DIMS[2]),
]
SAMPLED += [((16, 64, 48), E4M3, DIMS[1]), ((1, 16), E4M3, DIMS[2])]
EVERYTHING = [(shape, dtype, dims) for shape in SHAPES for dtype in (E4M3, E5M2) for dims in DIMS]


def cast_both_ways(cases: list[tuple[Any, torch.dtype, Any]]) -> list[str]:
    """Where a GPU's kernels have other bits than torch's operators on a CPU."""
    torch.manual_seed(0)
    wrong = []
    for shape, dtype, dims in cases:
        x = torch.randn(shape).bfloat16() * 3
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
    return wrong


def multiply_both_ways() -> list[str]:
    """Where products on a GPU have other numbers than on a CPU; scales may begin at any fp32 number of a tensor."""
    torch.manual_seed(0)
    wrong = []
    for m, n, k in ((512, 768, 1024), (1024, 512, 512), (16, 16, 16), (100, 48, 4096), (1, 16, 32), (7, 1040, 48)):
        left, right = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        for dims, kinds in (((-2, -1), (E4M3, E4M3)), ((-2, -1), (E5M2, E4M3)), ((-1,), (E4M3, E4M3))):
            operands = [_quantize(*each, dims) for each in zip((left, right), kinds, strict=True)]
            for dtype in (torch.bfloat16, torch.float32):
                expected = multiply(*operands, dtype).float()
                for first in range(3):
                    there = [ScaledMatrix(x.cuda(), _begin_at(scale.cuda(), first)) for x, scale in operands]
                    found = multiply(*there, dtype, is_fast=first == 1).cpu().float()
                    far = (expected - found).norm() / expected.norm()
                    if not far < 4e-3:
                        wrong.append(f"{m} x {n} x {k} {dims} {kinds} {dtype}, scales at {first}: {far}")
    return wrong


def _quantize(x: Tensor, dtype: torch.dtype, dims: Any) -> ScaledMatrix:
    scale = find_scale(find_largest(x, dims), dtype, is_power_of_two=len(dims) == 1)
    data, _ = cast_scaled(x, scale, None, dtype)
    assert data is not None
    return ScaledMatrix(data, scale)


def _begin_at(scale: Tensor, first: int) -> Tensor:
    return torch.cat([scale.new_zeros(first), scale.flatten()])[first:].view(scale.shape)


def differentiate_experts() -> list[str]:
    """Where weights' gradients of experts, of any number of tokens each, have other numbers than on a CPU."""
    torch.manual_seed(0)
    wrong = []
    for counts, out, inputs in (((100, 0, 64, 1, 333), 512, 256), ((0, 0), 32, 48), ((2000, 48), 1536, 2048)):
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        left, right = torch.randn(sum(counts) + 9, out).bfloat16(), torch.randn(sum(counts) + 9, inputs).bfloat16()
        expected = multiply_columns(left, right, offsets).float()
        there = multiply_columns(left.cuda(), right.cuda(), offsets.cuda()).cpu().float()
        for expert in range(len(counts)):
            far = (expected[expert] - there[expert]).norm() / expected[expert].norm().clamp(min=1)
            if not far < 4e-3:
                wrong.append(f"{counts}, {out} x {inputs}, {expert}: {far}")
    return wrong


def gather_gradients(implementations: list[str]) -> list[str]:
    """Where products of gathered fp8 rows, e5m2 among them, or the rows themselves are not right."""
    world, wrong = dist.get_world_size(), []
    Grid(data=world, device="cuda")
    torch.manual_seed(dist.get_rank())
    for implementation in implementations:
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


MODEL = {"layers": 3, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 512, "max_seq_len": 256}
MODEL |= {"positions": "rotary", "activation": "swiglu", "norm": "rmsnorm", "bias": False, "tie_embeddings": False}
EXPERTS = {"num_experts": 4, "expert_ffn": 256, "balance": "none", "moe_layers": (1,)}
Case = tuple[dict[str, int], dict[str, Any]]


def train(sizes: dict[str, int], given: dict[str, Any]) -> list[float]:
    """Losses of a few steps; each rank of a batch has the same rows, of which there are no multiple of 16."""
    torch.manual_seed(1)
    options = dict(given)
    compiles = options.pop("compiles", False)
    config = GPTConfig(**(MODEL | options.pop("model", {})))
    grid = Grid(**sizes, device="cuda")
    model = parallelize(GPT(config), grid, dtype=torch.bfloat16, sharded_loss=False, **options)
    run = torch.compile(model) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = torch.randint(512, (4, 251), generator=torch.Generator().manual_seed(3)).cuda()
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(run(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_all(cases: list[Case]) -> list[list[float]]:
    return [train(*case) for case in cases]


def compare_with_bf16(run_ranks: Run, world: int, cases: list[Case]) -> None:
    """Each case's losses are near, and not, those of bf16 of the same model on ranks that have parts of weights."""
    models = list({repr(options.get("model")): options.get("model", {}) for _, options in cases}.values())
    (found, *_) = run_ranks(world, train_all, [*(({"z": world}, {"model": model}) for model in models), *cases])
    for (sizes, options), losses in zip(cases, found[len(models) :], strict=True):
        of_bf16 = found[models.index(options.get("model", {}))]
        assert losses == pytest.approx(of_bf16, rel=0.01), (sizes, options)
        assert losses != of_bf16, (sizes, options)


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_products_have_the_numbers_of_a_cpu_wherever_scales_begin(run_ranks: Run, world: int) -> None:
    assert run_ranks(world, multiply_both_ways) == [[]]


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_experts_weight_gradients_have_the_numbers_of_a_cpu(run_ranks: Run, world: int) -> None:
    assert run_ranks(world, differentiate_experts) == [[]]


@pytest.mark.ranks(1, own=(1,), among=(1,))
@pytest.mark.parametrize("cases", [SAMPLED, pytest.param(EVERYTHING, marks=pytest.mark.exhaustive)], ids=["few", "all"])
def test_casts_have_the_bits_of_a_cpu(run_ranks: Run, world: int, cases: Any) -> None:
    assert run_ranks(world, cast_both_ways, cases) == [[]]


@pytest.mark.ranks(2, own=(2, 4), among=(2,))
@pytest.mark.parametrize(
    "implementations", [["library", "kernel"], pytest.param(["auto"], marks=pytest.mark.exhaustive)], ids="-".join
)
def test_gathered_products_take_gradients_in_e5m2(run_ranks: Run, world: int, implementations: list[str]) -> None:
    assert run_ranks(world, gather_gradients, implementations) == [[]] * world


@pytest.mark.ranks(2, own=(2, 4), among=(2,))
def test_losses_are_near_those_of_bf16(run_ranks: Run, world: int) -> None:
    z, x, sharded = {"z": world}, {"x": world}, {"shard_sequence": True}
    cases: list[Case] = [(z, {"fp8": "tensorwise"}), (z, {"fp8": "rowwise"}), (x, {"fp8": "tensorwise"})]
    cases += [(x, sharded | {"fp8": "tensorwise"}), (x, sharded | {"fp8": "rowwise"})]
    cases += [(z, {"reshard": "after_forward", "fp8": "tensorwise"}), (z, {"model": EXPERTS, "fp8": "rowwise"})]
    compare_with_bf16(run_ranks, world, cases)


def compare_gradients(recipes: list[str]) -> list[str]:
    """Where gradients of a compiled block, whose products are traced on one rank, are farther from those in bf16 than
    the same block's: each rounds other numbers to fp8, so they differ from each other by as much."""
    grid, wrong = Grid(z=1, device="cuda"), []
    text = torch.randint(512, (4, 256), generator=torch.Generator().manual_seed(3)).cuda()

    def find(fp8: Fp8 | None, *, compiles: bool = False) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = parallelize(GPT(GPTConfig(**(MODEL | {"layers": 1}))), grid, dtype=torch.bfloat16, fp8=fp8)
        if compiles:
            model.get_submodule("blocks.0").compile()
        F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten()).backward()
        return {name: gather(each.grad).float() for name, each in model.named_parameters()}

    exact = find(None)
    for recipe in recipes:
        plain, compiled = (find(Fp8(recipe, ("head",)), compiles=compiles) for compiles in (False, True))
        for name, each in exact.items():
            far, least = ((found[name] - each).norm() / each.norm() for found in (compiled, plain))
            if not far < 1.2 * least < 0.2:
                wrong.append(f"{recipe} {name}: {far}, not compiled {least}")
    return wrong


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_a_compiled_block_on_one_rank_has_the_gradients_of_the_same_block(run_ranks: Run, world: int) -> None:
    assert run_ranks(world, compare_gradients, ["tensorwise", "rowwise"]) == [[]]


@pytest.mark.exhaustive
@pytest.mark.ranks(2, own=(1, 2, 4), among=(2,))
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_losses_of_each_grid_are_near_those_of_bf16(run_ranks: Run, world: int, recipe: str, compiles: bool) -> None:
    z, x = {"z": world}, {"x": world}
    cases: list[Case] = [(z, {}), (x, {}), (z, {"reshard": "after_forward"}), (z, {"model": EXPERTS})]
    cases += [(x, {"shard_sequence": True})] * (world > 1)
    wanted = {"fp8": recipe, "compiles": compiles}
    compare_with_bf16(run_ranks, world, [(sizes, options | wanted) for sizes, options in cases])
