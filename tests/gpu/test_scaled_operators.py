# SPDX-License-Identifier: Apache-2.0
"""Operators of fp8 operands on real GPUs: random shapes and scales past stragglers and poison, and graphs."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stretto import ops
from stretto.memory import shared_gpus
from stretto.ops.operands import FP8
from stretto.parallel import Grid
from tests.gpu.test_operators import SEED, Run, error, gather, poison, read, scatter, takes

# Of bf16, in which partial sums travel, too; and tensor cores add up fp8 with some 14 bits.
ROUNDING = 2**-6
BLOCKS = ops.Blocks(64, 128, 128, 2, 4, 3, 132)
WIDE = ops.Blocks(128, 256, 128, 2, 8, 4, 132)
ODD = ops.Blocks(64, 96, 128, 1, 4, 3, 132)  # of three parts
PLANS: dict[str, list[str | ops.KernelConfig]] = {
    "gather": [
        "auto",
        "library",
        ops.KernelConfig(transfer="programs", movers=132),
        ops.KernelConfig(transfer="programs", blocks=ODD),
        ops.KernelConfig(transfer="copies", piece_bytes=1 << 16, blocks=BLOCKS),
        ops.KernelConfig(transfer="copies", blocks=WIDE),
    ],
    "scatter": [
        "auto",
        "library",
        ops.KernelConfig(exchange="packets", blocks=ODD),
        ops.KernelConfig(blocks=BLOCKS),
        ops.KernelConfig(blocks=WIDE._replace(programs=5)),  # the last wave's tiles are split
        ops.KernelConfig(transfer="copies", blocks=WIDE, piece_bytes=1 << 18),
    ],
    "reduce": ["auto", "library", *(ops.KernelConfig(exchange="packets", shots=shots, blocks=ODD) for shots in (1, 2))],
}
OPERATORS = {
    "gather": ops.all_gather_scaled_matmul,
    "scatter": ops.scaled_matmul_reduce_scatter,
    "reduce": ops.scaled_matmul_all_reduce,
}


def multiply_in_random_shapes(folder: Path, seed: int, calls: int) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rng, rank = random.Random(seed), dist.get_rank()
    torch.manual_seed(seed + rank)
    wrong = []
    for call in range(calls):
        rows, n, k = rng.randint(1, 700), rng.randint(1, 1500), 16 * rng.randint(1, 90)
        x, whole = (torch.randn(rows, k, device="cuda").to(FP8), torch.randn(rows * world, k, device="cuda").to(FP8))
        weight = torch.randn(n, k, device="cuda").to(FP8)
        columns = torch.rand(n if rng.random() < 0.7 else 1, device="cuda") * (1 + rank)
        if rng.random() < 0.3:
            x, whole, weight, columns = (misalign(one) for one in (x, whole, weight, columns))
        few = whole[: rng.randint(1, min(64, whole.shape[0]))].contiguous()
        for name, operand in (("gather", x), ("scatter", whole), ("reduce", few)):
            factors = torch.rand(operand.shape[0] if rng.random() < 0.7 else 1, device="cuda") * (1 + rank)
            plan = rng.choice(PLANS[name])
            if isinstance(plan, ops.KernelConfig) and not takes(plan, operand):
                plan = "kernel"
            late, cycles = rng.randrange(world), rng.choice([0, 100_000, 2_000_000])
            poison()
            if late == rank:
                torch.cuda._sleep(cycles)
            out, *others = (OPERATORS[name](operand, weight, factors, columns, implementation=plan) for _ in range(4))
            left = operand.double() * factors.double().reshape(-1, 1)
            product = (gather(left) if name == "gather" else left) @ (weight.double() * columns.double()[:, None]).T
            if name == "scatter":
                product = scatter(product)
            elif name == "reduce":
                dist.all_reduce(product)
                first = out.clone()
                dist.broadcast(first, 0)
                others.append(first)
            is_same = all(torch.equal(out, one) for one in others)
            if not is_same or not error(out, product) <= ROUNDING:
                wrong.append((call, name, str(plan), rows, n, k, error(out, product), is_same))
    torch.cuda.synchronize()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def misalign(matrix: torch.Tensor) -> torch.Tensor:
    """The same numbers where neither TMA nor torch's own products take them."""
    return torch.cat([matrix.new_zeros(1), matrix.flatten()])[1:].view(matrix.shape)


def replay(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, (rows, n, k) = dist.get_rank(), (256, 1024, 512)
    x = torch.randn(rows, k, device="cuda")
    (up, up_scale), (down, down_scale) = (
        ops.quantize_rows(torch.randn(*size, device="cuda")) for size in ((n, k), (k, n))
    )

    def mlp() -> torch.Tensor:
        outs = []
        # The library's collectives go by way of the host where ranks share a GPU, and no graph holds them.
        is_shared = shared_gpus.is_enabled()
        others = "kernel" if is_shared else "auto"
        for plan in PLANS["gather"][2 if is_shared else 0 :]:
            hidden = ops.all_gather_scaled_matmul(*_pair(x, up, up_scale), implementation=plan).relu()
            outs.append(
                ops.scaled_matmul_reduce_scatter(*_pair(hidden, down, down_scale), implementation=others).flatten()
            )
            outs.append(
                ops.scaled_matmul_all_reduce(*_pair(hidden[:4], down, down_scale), implementation=others).flatten()
            )
        return torch.cat(outs)

    mlp()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mlp()
    wrong = []
    for call in range(20):
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        replayed = out.clone()
        if not torch.equal(replayed, mlp()):
            wrong.append(call)
    torch.cuda.synchronize()
    dist.barrier()
    (folder / f"wrong-{rank}.json").write_text(json.dumps(wrong))


def _pair(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    quantized, scale = ops.quantize_rows(x)
    return quantized, weight, scale, weight_scale


@pytest.mark.ranks(4)
@pytest.mark.parametrize("calls", [3, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_random_shapes_and_scales_are_right_and_the_same_twice(
    run_ranks: Run, tmp_path: Path, calls: int, world: int
) -> None:
    run_ranks(world, multiply_in_random_shapes, tmp_path, SEED, calls, timeout=100.0 + 5 * calls)
    assert read(tmp_path) == [[]] * world, SEED


@pytest.mark.ranks(4)
def test_a_captured_graph_replays_all_operators(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, replay, tmp_path)
    assert read(tmp_path) == [[]] * world
