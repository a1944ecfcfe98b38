# SPDX-License-Identifier: Apache-2.0
"""Tables that are cut and replicated, and their fused optimizers, on GPUs: whole tables' results, by both paths."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto import ops
from stretto.optim.row_update import STATE_NAMES
from stretto.parallel import Grid
from tests.gpu.sharing import GpuRanks
from tests.ops.embedding.test_optimizers import CASES, update_by_kernels
from tests.recommendation import sharding

pytestmark = pytest.mark.ranks(2, own=(1, 2, 4), among=(1, 2, 4, 8))
KINDS = ("tttttt", "rrtrte", "rnetrr")


def update_on_gpus(dtype: torch.dtype) -> dict[str, list[Any]]:
    """Tables, states and vectors after two steps, by PyTorch's functions and by kernels."""
    cases = [(kinds, optimizer) for kinds, optimizer in itertools.product(KINDS, STATE_NAMES)]
    return {name: sharding.update(cases, 2, dtype, name, "cuda") for name in ("library", "kernel")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_sharding_and_optimizer_gives_whole_tables_results(
    gpu_pool: GpuRanks, world: int, dtype: torch.dtype
) -> None:
    found = gpu_pool.run(world, update_on_gpus, dtype, timeout=300)[0]
    count = len(STATE_NAMES)
    # Sums of bf16 parts are rounded once more, and an ulp may decide to which neighbour a number is rounded.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    for number, (kinds, optimizer) in enumerate(itertools.product(KINDS, STATE_NAMES)):
        for path in ("library", "kernel"):
            tensors, vectors = found[path][number]
            expected, expected_vectors = found["library"][number % count]
            for name, value in expected.items():
                torch.testing.assert_close(tensors[name], value, **tolerance, msg=f"{path} {kinds} {optimizer} {name}")
            for one, other in zip(vectors, expected_vectors, strict=True):
                torch.testing.assert_close(one, other, **tolerance)


def update_in_graphs() -> tuple[list[list[float]], list[int]]:
    """Adam with stochastic rounding, eagerly and as a CUDA graph that is replayed: rows, and the clock, after three."""
    world, device = dist.get_world_size(), torch.device("cuda")
    indices, offsets = torch.arange(4 * world, device=device) % 7, torch.arange(4 * world + 1, device=device)
    grad = torch.randn(4, 16 * world, device=device, generator=torch.Generator(device).manual_seed(1)).bfloat16()
    found = []
    for captured in (False, True):
        table = torch.linspace(-1, 1, 7 * 16, device=device).view(7, 16).bfloat16()
        update = ops.TableUpdate(
            "adam", ops.table_settings(1, learning_rate=0.1, weight_decay=0.01, device=device),
            [torch.zeros(7, 16, device=device) for _ in range(2)], torch.tensor([0, 9], device=device),
            [ops.TableBlock(dist.get_rank())], True,
        )  # fmt: skip

        def step(table: torch.Tensor = table, update: ops.TableUpdate = update) -> None:
            ops.embedding_all_to_all(indices, offsets, [table], name="graph")
            ops.embedding_all_to_all_update(grad, indices, offsets, [table], update=update, name="graph")

        step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            graph.replay()
            graph.replay()
        else:
            step()
            step()
        torch.cuda.synchronize()
        assert update.clock is not None
        found.append((table.float().flatten().tolist(), update.clock.tolist()))
    assert found[0] == found[1]
    return [one[0] for one in found], found[0][1]


def test_steps_of_a_graph_count_and_round_as_eager_ones(gpu_pool: GpuRanks, world: int) -> None:
    for rows, clock in gpu_pool.run(world, update_in_graphs, timeout=120):
        assert clock == [3, 9]
        assert rows[0] == rows[1]


def run_cases() -> list[tuple[float, int]]:
    Grid(data=dist.get_world_size(), device="cuda")
    return update_by_kernels(CASES, 2, "cuda")


def test_every_optimizer_of_the_kernel_is_that_of_rows(gpu_pool: GpuRanks, world: int) -> None:
    for of_rank in gpu_pool.run(world, run_cases, timeout=300):
        for (optimizer, dtype, _), (worst, wrong) in zip(CASES, of_rank, strict=True):
            assert worst < (1e-5 if dtype == torch.float32 else 2**-7), optimizer
            assert dtype == torch.float32 or wrong <= 4, optimizer
