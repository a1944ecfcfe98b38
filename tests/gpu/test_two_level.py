# SPDX-License-Identifier: Apache-2.0
"""Two-level collectives on GPUs, over NCCL where each rank has one, of ranks that are declared to be several nodes."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives import call_counts, set_two_level
from stretto.collectives.two_level import TwoLevelGroup
from stretto.execution import TwoLevel
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, parallelize
from tests.differences import largest

pytestmark = pytest.mark.ranks(4, own=(2, 4), among=(4,))
SIZES = (1, 257, 1_000_003)
SEED = 20261129

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def whole_numbers(size: int, dtype: torch.dtype, rank: int) -> Tensor:
    """Small whole numbers, the sums of which every dtype has."""
    generator = torch.Generator().manual_seed(SEED + rank)
    return torch.randint(0, 8, (size,), generator=generator).to("cuda", dtype)


def two_nodes(world: int) -> str:
    return f"2x{world // 2}"


def compare_with_the_library(nodes: str) -> int:
    """Compare all three collectives with torch.distributed's own, by each algorithm, in one part and in three."""
    checked = 0
    with mock.patch.dict(os.environ, STRETTO_NODES=nodes):
        groups = [TwoLevelGroup(parts=parts, timeout=60.0) for parts in (1, 3)]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in SIZES:
            world, rank = groups[0].world, groups[0].rank
            mine, large = whole_numbers(size, dtype, rank), whole_numbers(world * size, dtype, rank)
            gathered, scattered, summed = large.new_empty(world * size), mine.new_empty(size), large.clone()
            _all_gather(gathered, mine)
            _reduce_scatter(scattered, large)
            dist.all_reduce(summed)
            for two in groups:
                for algorithm in ("ring", "recursive"):
                    out, part, total = torch.zeros_like(gathered), torch.zeros_like(scattered), large.clone()
                    works = [
                        two.all_gather(out, mine, algorithm=algorithm, async_op=True),
                        two.reduce_scatter(part, large, algorithm=algorithm, async_op=True),
                        two.all_reduce(total, algorithm=algorithm, async_op=True),
                    ]
                    for work in works:
                        work.wait()
                    case = (dtype, size, algorithm)
                    assert torch.equal(out, gathered), case
                    assert torch.equal(part, scattered), case
                    assert torch.equal(total, summed), case
                    checked += 1
    return checked


def test_two_levels_give_the_librarys_results(run_ranks: Callable[..., list[Any]], world: int) -> None:
    for nodes in {two_nodes(world), f"{world}x1"}:
        assert run_ranks(world, compare_with_the_library, nodes) == [36] * world


def train(sizes: dict[str, int], nodes: str, two_level: TwoLevel) -> tuple[list[float], list[Tensor], int]:
    """Losses of three steps, the weights after them, and how many collectives ran in two levels."""
    with mock.patch.dict(os.environ, STRETTO_NODES=nodes):
        grid = Grid(**sizes)
        torch.manual_seed(SEED)
        model = GPT(GPTConfig(layers=2, hidden=64, heads=4, vocab=128, max_seq_len=16)).double()
        model = parallelize(model.to(grid.device), grid, two_level=two_level)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(3):
        text = torch.randint(128, (8, 17), generator=generator).to(grid.device)
        rows = text.chunk(grid.size("batch"))[grid.coordinate("batch")]
        optimizer.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    levels = grid.two_levels.get(two_level)
    calls = 0 if levels is None else sum(sum(two.calls.values()) for two in levels.groups.values())
    weights = [gather(parameter).detach().cpu() for parameter in model.parameters()]
    grid.close()
    return losses, weights, calls


def compare_training(sizes: dict[str, int], nodes: str) -> float:
    """The largest difference from training with flat collectives; two runs have the same bits."""
    flat, (first, second) = train(sizes, nodes, False), [train(sizes, nodes, True) for _ in range(2)]
    assert flat[2] == 0
    assert first[2] > 0
    assert first[0] == second[0]
    assert all(torch.equal(one, other) for one, other in zip(first[1], second[1], strict=True))
    return largest((one - other).abs().max().item() for one, other in zip(first[1], flat[1], strict=True))


@pytest.mark.parametrize("axes", ["z", "data", "both"])
def test_training_in_two_levels_is_that_of_flat_collectives(
    run_ranks: Callable[..., list[Any]], world: int, axes: str
) -> None:
    sizes, nodes = {axes: world}, two_nodes(world)
    if axes == "both":
        sizes, nodes = {"z": 2, "data": world // 2}, f"{world}x1"
    assert largest(run_ranks(world, compare_training, sizes, nodes)) < 1e-10


def use_the_backend() -> None:
    group = dist.new_group(backend="stretto", timeout=timedelta(seconds=60))
    world, rank = dist.get_world_size(), dist.get_rank()
    with mock.patch.dict(os.environ, STRETTO_NODES=two_nodes(world)):
        assert set_two_level(True, group)
    for is_async in (False, True):
        tensor = torch.full((100_003,), float(rank), device="cuda")
        work = dist.all_reduce(tensor, group=group, async_op=is_async)
        if is_async:
            work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, world * (world - 1) / 2))
    assert call_counts(group)["allreduce", "two levels, recursive"] == 2
    dist.destroy_process_group(group)


@pytest.mark.own_gpus("the backend's inner groups are NCCL's")
def test_the_backend_runs_calls_on_gpus_in_two_levels(run_ranks: Callable[..., list[Any]], world: int) -> None:
    run_ranks(world, use_the_backend)
