# SPDX-License-Identifier: Apache-2.0
"""Experts on GPUs: torch's grouped GEMM beside poisoned memory, calls that never wait for the host, and ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import shared_gpus
from stretto.ops import moe
from stretto.ops.moe import activation, permutation
from tests.differences import largest
from tests.gpu.sharing import GpuRanks, sampled

TOKENS, HIDDEN, INNER, EXPERTS, K = 96, 256, 128, 8, 2
BF16 = 2**-5  # relative to the largest number: three products, rounded to bf16 between them
pytestmark = pytest.mark.ranks(1, own=(1, 2, 4), among=(1, 2, 4))


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16().cuda()


def poison() -> None:
    """Leave NaN in memory that the allocator will hand out again."""
    blocks = [torch.full((1 << size,), torch.nan, device="cuda") for size in range(8, 22) for _ in range(4)]
    del blocks


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Make what waits for the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number; infinite with NaN, which Python's max would pass over."""
    return ((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)).nan_to_num(torch.inf).item()


def multiply_experts(numbers: list[int]) -> list[float]:
    """Errors of a product and its gradients; nan where memory shines through."""
    offsets = torch.tensor(numbers, dtype=torch.int32, device="cuda")
    rows, weight, grad = draw(1, TOKENS, HIDDEN), draw(2, len(numbers) - 1, INNER, HIDDEN), draw(3, TOKENS, INNER)
    expected = [
        torch.zeros(TOKENS, INNER, dtype=torch.float64, device="cuda"),
        torch.zeros_like(rows).double(),
        torch.zeros_like(weight).double(),
    ]
    for expert, (begin, end) in enumerate(pairwise(numbers)):
        part, other, matrix = rows[begin:end].double(), grad[begin:end].double(), weight[expert].double()
        expected[0][begin:end], expected[1][begin:end], expected[2][expert] = (
            part @ matrix.T,
            other @ matrix,
            other.T @ part,
        )
    leaves = [rows.requires_grad_(), weight.requires_grad_()]
    moe.grouped_matmul(*leaves, offsets).backward(grad)  # kernels are compiled
    poison()
    with no_host_waits():
        out = moe.grouped_matmul(*leaves, offsets)
        found = [out, *torch.autograd.grad(out, leaves, grad)]
    return [relative_error(one, other) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("numbers", [[0, 30, 30, 96], [0, 1, 2, 96], [0, 0, 0, 70], [0, 0, 0, 0]], ids=str)
def test_grouped_products_are_right_and_wait_for_nothing(gpu_pool: GpuRanks, world: int, numbers: list[int]) -> None:
    for errors in gpu_pool.run(world, multiply_experts, numbers):
        assert largest(errors) < 2**-7  # NaN is not less


def run_layer(
    leaves: list[Tensor], ids: Tensor, group: dist.ProcessGroup | None, max_rows: int | None = None
) -> list[Tensor]:
    """The output, and gradients of its sum of squares."""
    x, weights, gate_up, down = leaves
    sent = moe.dispatch(x, ids, EXPERTS, group, max_rows=max_rows)
    out = moe.combine(moe.experts_mlp(sent.rows, sent.offsets, gate_up, down), sent.handle, weights, group)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def run_dense(leaves: list[Tensor], ids: Tensor) -> list[Tensor]:
    """The same in fp64, without sorting anything: every expert computes every token."""
    x, weights, gate_up, down = leaves = [one.detach().double().requires_grad_() for one in leaves]
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (x @ gate_up[expert].T).chunk(2, 1)
        share = (weights * (ids == expert)).sum(1, keepdim=True)
        out = out + share * ((torch.nn.functional.silu(gate) * up) @ down[expert].T)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def compare_with_dense() -> list[list[float]]:
    """Errors of output and gradients: of as many rows as there are, of a fixed number, and of repeated calls."""
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    whole = [draw(1, TOKENS * world, HIDDEN), draw(2, TOKENS * world, K).float().abs()]
    whole += [draw(3, EXPERTS, 2 * INNER, HIDDEN), draw(4, EXPERTS, HIDDEN, INNER)]
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(TOKENS * world, EXPERTS, generator=generator).topk(K).indices.cuda()
    expected = [one.chunk(world)[rank] for one in run_dense(whole, ids)]
    leaves = [one.chunk(world)[rank].clone().requires_grad_() for one in whole]
    mine = ids.chunk(world)[rank]
    results = []
    for max_rows in (None, TOKENS * world * K, TOKENS * world * K):
        if world == 1 and max_rows is None:
            run_layer(leaves, mine, group)
            poison()
            with no_host_waits():
                found = run_layer(leaves, mine, group)
        else:
            poison()
            found = run_layer(leaves, mine, group, max_rows)
        results.append([relative_error(one, other) for one, other in zip(found, expected, strict=True)])
    if world > 1 and not shared_gpus.is_enabled():  # collectives of ranks that share a GPU pass through the host
        with no_host_waits():
            run_layer(leaves, mine, group, TOKENS * world * K)
    moe.check_rows(group)
    return results


@pytest.mark.ranks(2, own=(1, 2, 4), among=(1, 2, 4))
def test_a_layer_is_that_of_every_expert_on_every_token(gpu_pool: GpuRanks, world: int) -> None:
    for results in gpu_pool.run(world, compare_with_dense):
        for errors in results:
            assert largest(errors) < BF16


def exceed() -> str:
    """The message of the error for too many rows, which the host gets later."""
    group, world = dist.group.WORLD, dist.get_world_size()
    x, ids = draw(1, TOKENS, HIDDEN), torch.zeros(TOKENS, 1, dtype=torch.int64, device="cuda")
    sent = moe.dispatch(x, ids, EXPERTS, group, max_rows=TOKENS * world - 1)
    assert sent.rows.isnan().all() == (dist.get_rank() == 0)
    with pytest.raises(ValueError, match=f"needs {TOKENS * world} rows") as caught:
        moe.check_rows(group)
    moe.check_rows(group)
    return str(caught.value)


@pytest.mark.ranks(2, own=(2, 4), among=(2,))
def test_too_many_rows_are_an_error_at_the_next_look(gpu_pool: GpuRanks, world: int) -> None:
    for message in gpu_pool.run(world, exceed):
        assert "rank 0 of the group" in message


def compare_copies(tokens: int, k: int, columns: int, dtype: torch.dtype) -> list[float]:
    """Errors of sums, products and gradients of copies, in units of their dtype's rounding; nan for other bits.

    Sums and weighed rows have the bits of torch's operators on this GPU, which add in the same order.
    """
    generator = torch.Generator().manual_seed(7)
    spare = 3  # rows without a position
    positions = torch.randperm(tokens * k + spare, generator=generator)[: tokens * k].view(tokens, k).cuda()
    is_valid = (torch.rand(tokens, k, generator=generator) < 0.6).cuda()
    x, rows = draw(1, tokens, columns).to(dtype), draw(2, tokens * k + spare, columns).to(dtype)
    weights = draw(3, tokens, k).float()
    named = torch.where(is_valid, is_valid.view(-1).cumsum(0).view(tokens, k) - 1, 0)
    number = is_valid.sum()
    calls = [
        lambda: permutation.sum_copies(rows, positions),
        lambda: permutation.sum_copies(rows, positions, weights, is_valid),
        lambda: permutation.spread_tokens(x, named, weights, is_valid, tokens * k, number),
        lambda: permutation.spread_tokens(x, positions, rows=tokens * k + spare),
        lambda: permutation.weigh_and_multiply(x, rows, positions, weights)[0],
    ]
    products = [
        lambda: permutation.multiply_copies(x, rows, positions),
        lambda: permutation.multiply_copies(x, rows, positions, is_valid),
        lambda: permutation.weigh_and_multiply(x, rows, positions, weights)[1],
    ]
    for one in calls + products:  # kernels are compiled
        one()
    poison()
    with no_host_waits():
        found, dots = [one() for one in calls], [one() for one in products]
    with mock.patch.object(permutation, "suits_kernels", return_value=False):
        expected = [one() for one in calls]
    errors = [0.0 if torch.equal(*pair) else torch.nan for pair in zip(found, expected, strict=True)]
    exact = (x.double()[:, None] * rows.double()[positions]).sum(2)
    sizes = (x.double()[:, None] * rows.double()[positions]).abs().sum(2).clamp(min=1e-30)
    for one, right in zip(dots, (exact, exact * is_valid, exact), strict=True):
        errors.append(((one.double() - right).abs() / sizes).max().item() / 2**-23)
    again = [one() for one in products]
    return errors + [0.0 if torch.equal(*pair) else torch.nan for pair in zip(dots, again, strict=True)]


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16], [torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize(("tokens", "k", "columns"), [(500, 8, 4096), (33, 6, 1537), (7, 11, 40), (3, 1, 1)])
def test_sums_and_products_of_copies_are_right(
    gpu_pool: GpuRanks, world: int, tokens: int, k: int, columns: int, dtype: torch.dtype
) -> None:
    for errors in gpu_pool.run(world, compare_copies, tokens, k, columns, dtype):
        assert largest(errors) < 16
        assert not any(error != error for error in errors), errors


def compare_gates(tokens: int, inner: int, dtype: torch.dtype) -> list[float]:
    """Errors of gated SiLU and of its gradient beside fp64, in units of their dtype's rounding of each number."""
    x = (draw(1, tokens, 2 * inner) * inner**0.5).to(dtype).requires_grad_()
    grad = draw(2, tokens, inner).to(dtype)
    moe.gated_activation(x).backward(grad)
    poison()
    with no_host_waits():
        out = moe.gated_activation(x)
        (of_x,) = torch.autograd.grad(out, x, grad)
    assert out.grad_fn is not None
    assert "GatedSilu" in out.grad_fn.name()
    wide = x.detach().double().requires_grad_()
    gate, up = wide.chunk(2, 1)
    expected = gate * gate.sigmoid() * up
    (right,) = torch.autograd.grad(expected, wide, grad.double())
    unit = torch.finfo(dtype).eps / 2
    small = 8 * 2**-24 * max(expected.abs().max().item(), right.abs().max().item())  # sums in fp32
    return [
        (((one.double() - other).abs() - small) / (unit * other.abs() + 1e-30)).max().item()
        for one, other in ((out.detach(), expected.detach()), (of_x, right))
    ]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1.02), (torch.float32, 64)], ids=str)
@pytest.mark.parametrize(("tokens", "inner"), [(300, 1408), (33, 1537), (5, 1)])
def test_gated_silu_is_rounded_once(
    gpu_pool: GpuRanks, world: int, tokens: int, inner: int, dtype: torch.dtype, bound: float
) -> None:
    for errors in gpu_pool.run(world, compare_gates, tokens, inner, dtype):
        assert largest(errors) <= bound


def keep_out_of_range() -> None:
    """Kernels take gradients of gradients no more than tensors that need them."""
    x = draw(1, 4, 8).float().requires_grad_()
    assert not permutation.suits_kernels(x)
    with torch.no_grad():
        assert permutation.suits_kernels(x, None)
    assert activation.suits_kernel(x)
    assert torch.autograd.gradgradcheck(moe.gated_activation, x.detach().double().requires_grad_())


def test_gradients_of_gradients_are_right(gpu_pool: GpuRanks, world: int) -> None:
    gpu_pool.run(world, keep_out_of_range)
