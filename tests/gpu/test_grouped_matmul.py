# SPDX-License-Identifier: Apache-2.0
"""Grouped kernels on Hopper: layers of experts and their gradients beside fp64, captured graphs, and no host waits."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stretto.ops import moe
from tests.differences import largest
from tests.gpu.sharing import GpuRanks, sampled
from tests.gpu.test_moe import BF16, no_host_waits, poison, relative_error

# tokens, hidden, intermediate, experts, top-k: the issue's, with fewer tokens and features, and ragged ones.
SCALED = [(512, 512, 896, 8, 2), (512, 256, 176, 60, 4), (512, 256, 176, 64, 6), (512, 256, 96, 128, 8)]
RAGGED = [(1, 64, 8, 3, 1), (77, 200, 136, 5, 3), (300, 264, 72, 2, 1)]
WHOLE = [(8192, 4096, 14336, 8, 2), (8192, 2048, 768, 128, 8)]
pytestmark = pytest.mark.ranks(1, own=(1,), among=(1,))


def run(pool: GpuRanks, world: int, function: Callable[..., list[float]], *arguments: object) -> float:
    """The largest error that a function returns on any rank. Skips the test on other GPUs."""
    if not all(pool.run(world, is_hopper)):
        pytest.skip("grouped kernels are for GPUs of compute capability 9.0")
    return largest(largest(errors) for errors in pool.run(world, function, *arguments))


def is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    numbers = torch.empty(*shape, dtype=dtype, device="cuda")
    return numbers.normal_(0, shape[-1] ** -0.5, generator=generator)


def choose_experts(tokens: int, experts: int, k: int, routing: str) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    if routing == "skewed":
        scores += 0.5 / (1 + torch.arange(experts))
        scores[:, experts // 2] = -1.0
    elif routing == "to the first":
        scores[:, :k] += 1.0
    return scores.topk(k).indices.cuda()


def compare(shape: tuple[int, ...], routing: str, dtype: torch.dtype) -> list[float]:
    """Errors of a layer of experts by kernels and of its gradients, beside the same in fp64 by the library."""
    tokens, hidden, inner, experts, k = shape
    x, grad = draw(1, tokens, hidden, dtype=dtype), draw(2, tokens, hidden, dtype=dtype)
    gate_up, down = draw(3, experts, 2 * inner, hidden, dtype=dtype), draw(4, experts, hidden, inner, dtype=dtype)
    ids, weights = choose_experts(tokens, experts, k, routing), draw(5, tokens, k).float().abs()
    results = []
    for implementation in ("kernel", "library"):
        kind = dtype if implementation == "kernel" else torch.float64
        leaves = [one.detach().to(kind).requires_grad_() for one in (x, gate_up, down)]
        leaves.append(weights.to(torch.float32 if kind == dtype else kind).requires_grad_())
        *given, factors = leaves
        for _ in range(2 if implementation == "kernel" else 1):
            poison()
            out = moe.routed_experts(given[0], ids, factors, *given[1:], implementation=implementation)
            found = [out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))]
        results.append(found)
    return [relative_error(one, right) for one, right in zip(*results, strict=True)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    sampled(
        [(SCALED[0], torch.float16), *((shape, torch.bfloat16) for shape in SCALED + RAGGED)],
        list(itertools.product(SCALED + RAGGED, (torch.bfloat16, torch.float16))),
    ),
    ids=str,
)
@pytest.mark.parametrize("routing", ["uniform", "skewed", "to the first"])
def test_experts_by_kernels_are_those_of_the_library_in_fp64(
    gpu_pool: GpuRanks, world: int, shape: tuple[int, ...], routing: str, dtype: torch.dtype
) -> None:
    assert run(gpu_pool, world, compare, shape, routing, dtype) < BF16


def check_whole(shape: tuple[int, ...]) -> list[float]:
    """Errors of some experts' results, of whole shapes."""
    tokens, hidden, inner, experts, k = shape
    x, gate_up = draw(1, tokens, hidden), draw(2, experts, 2 * inner, hidden)
    order = moe.permutation.sort_by_expert(choose_experts(tokens, experts, k, "uniform"), experts)
    named, offsets = order.tokens, order.offsets
    poison()
    out = moe.grouped_matmul(x, gate_up, offsets, tokens=named, implementation="kernel")
    rows = moe.grouped_matmul(out, gate_up.mT, offsets, implementation="kernel")
    of_weight = moe.grouped_weight_gradient(out, x, offsets, tokens=named, implementation="kernel")
    errors, ends = [], offsets.tolist()
    for expert in (0, experts // 2, experts - 1):
        part = slice(ends[expert], ends[expert + 1])
        given, weight, product = x[named[part].long()].double(), gate_up[expert].double(), out[part].double()
        errors += [
            relative_error(out[part], given @ weight.T),
            relative_error(rows[part], product @ weight),
            relative_error(of_weight[expert], product.T @ given),
        ]
    return errors


@pytest.mark.parametrize("shape", WHOLE, ids=str)
def test_products_of_whole_shapes_are_those_in_fp64(gpu_pool: GpuRanks, world: int, shape: tuple[int, ...]) -> None:
    assert run(gpu_pool, world, check_whole, shape) < 2**-7


def capture_and_reroute(dtype: torch.dtype) -> list[float]:
    """Errors of replays of a captured step, for routings that the capture has not seen."""
    implementation = "kernel" if dtype == torch.bfloat16 else "auto"
    tokens, hidden, inner, experts, k = 256, 256, 128, 8, 2
    leaves = [draw(1, tokens, hidden), draw(3, experts, 2 * inner, hidden), draw(4, experts, hidden, inner)]
    x, gate_up, down = leaves = [one.to(dtype).requires_grad_() for one in leaves]
    weights, grad = draw(5, tokens, k).float().abs(), draw(2, tokens, hidden).to(dtype)
    ids = choose_experts(tokens, experts, k, "uniform")

    def step(implementation: str) -> list[Tensor]:
        out = moe.routed_experts(x, ids, weights, gate_up, down, implementation=implementation)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(implementation)
    torch.cuda.synchronize()
    if implementation == "kernel":
        with no_host_waits():
            step("kernel")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(implementation)
    errors = []
    for routing in ("skewed", "to the first", "uniform"):
        ids.copy_(choose_experts(tokens, experts, k, routing))
        graph.replay()
        errors += [relative_error(one, right) for one, right in zip(found, step("library"), strict=True)]
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_captured_step_follows_the_routing(gpu_pool: GpuRanks, world: int, dtype: torch.dtype) -> None:
    assert run(gpu_pool, world, capture_and_reroute, dtype) < (BF16 if dtype == torch.bfloat16 else 1e-5)
