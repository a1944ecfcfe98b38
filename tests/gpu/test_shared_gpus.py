# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a GPU: training goes by way of the host, and kernels have a part of the multiprocessors each."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto import ops
from stretto.memory import shared_gpus
from stretto.memory.gpus import find_obstacle
from stretto.memory.mps import has_mps
from stretto.parallel import Grid
from stretto.train.config import make_config
from stretto.train.trainer import train
from tests.gpu.sharing import is_shared

Run = Callable[..., list[Any]]
pytestmark = pytest.mark.ranks(4)


def train_five_steps(folder: Path, *overrides: str) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    values = {
        "out": str(folder / f"of-{world}"),
        "device": "cuda",
        "ranks": world,
        "data": {"path": str(folder / "text.txt")},
        "model": {"layers": 2, "hidden": 128, "heads": 8, "positions": "rotary"},
        "train": {"steps": 5, "batch": 8, "seq_len": 64, "lr": 1e-3},
    }
    train(make_config(values, list(overrides)), display="none")


@pytest.mark.exhaustive
@pytest.mark.ranks(4, own=(4,), among=(4,))
def test_five_steps_on_x_2_and_z_2_have_the_losses_of_one_rank(run_ranks: Run, tmp_path: Path, world: int) -> None:
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 200)
    run_ranks(1, train_five_steps, tmp_path)
    run_ranks(world, train_five_steps, tmp_path, "grid.x=2", "grid.z=2")
    alone, together = (
        [json.loads(line)["loss"] for line in (tmp_path / f"of-{count}" / "metrics.jsonl").read_text().splitlines()]
        for count in (1, world)
    )
    assert len(alone) == 5
    assert alone[0] - alone[-1] > 0.1, "the model does not learn: the comparison says little"
    assert together == pytest.approx(alone, rel=1e-5)


def multiply_by_the_library() -> list[str]:
    """Products by cuBLAS that differ from those in fp64."""
    torch.manual_seed(dist.get_rank())
    sizes = (512, 1152, 1024), (384, 512, 1024), (256, 256, 1024)
    wrong = []
    for m, k, n in sizes:
        for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-4)):
            for is_a_transposed, is_b_transposed in itertools.product((False, True), repeat=2):
                a = torch.randn((k, m) if is_a_transposed else (m, k), device="cuda").to(dtype)
                b = torch.randn((n, k) if is_b_transposed else (k, n), device="cuda").to(dtype)
                a, b = a.t() if is_a_transposed else a, b.t() if is_b_transposed else b
                out = torch.full((m, n), float("nan"), dtype=dtype, device="cuda")
                torch.mm(a, b, out=out)
                expected = a.double() @ b.double()
                if not (out - expected).abs().max() < tolerance * expected.abs().max():
                    wrong.append(f"{m} x {k} x {n}, {dtype}: {out.isnan().float().mean().item():.0%} were not written")
    return wrong


@pytest.mark.ranks(2, 3, 4)
def test_the_librarys_products_are_right_on_a_ranks_share_of_the_gpu(run_ranks: Run, world: int) -> None:
    assert run_ranks(world, multiply_by_the_library) == [[]] * world


def look_at_the_gpu() -> dict[str, Any]:
    """Return what this rank knows of its GPU and its group, with the switch and without."""
    device = Grid(data=dist.get_world_size(), device="cuda").device
    properties = torch.cuda.get_device_properties(device)
    with_switch = find_obstacle(dist.group.WORLD, device)  # type: ignore[arg-type]
    switch = os.environ.pop(shared_gpus.SWITCH)
    try:
        without = find_obstacle(dist.group.WORLD, device)  # type: ignore[arg-type]
    finally:
        os.environ[shared_gpus.SWITCH] = switch
    return {
        "gpu": str(properties.uuid),
        "multiprocessors": properties.multi_processor_count,
        "with the switch": with_switch,
        "without": without,
    }


def test_ranks_share_a_gpu_with_the_switch_alone_and_have_equal_parts_of_it(run_ranks: Run, world: int) -> None:
    if not is_shared(world):
        pytest.skip("each rank has a GPU here")
    found = run_ranks(world, look_at_the_gpu)
    assert all(one["with the switch"] is None for one in found), found
    assert {one["without"] for one in found} == {"several of its ranks share a GPU"}
    parts = {one["multiprocessors"] for one in found}
    assert len(parts) == 1, "ranks of one group divide their work by the number of multiprocessors"
    if has_mps():
        assert parts.pop() <= 160 // world, "MPS gives each rank a part"


def call_collectives() -> list[str]:
    """Every kind of collective on GPU tensors, with what is right; and an operator by kernels and by the library."""
    world, rank = dist.get_world_size(), dist.get_rank()
    device = Grid(data=world, device="cuda").device
    group, wrong = dist.group.WORLD, []
    assert group is not None
    functional, total = torch.ops._c10d_functional, world * (world + 1) // 2

    def expect(name: str, found: torch.Tensor, right: list[int]) -> None:
        if found.tolist() != right:
            wrong.append(f"{name}: {found.tolist()}, not {right}")

    dtypes = [torch.float32, torch.bfloat16, torch.int64]
    if is_shared(world):  # where each rank has a GPU, NCCL carries them, which has no int16
        dtypes.append(torch.int16)
    for dtype in dtypes:
        mine = torch.full((2,), rank + 1, device=device).to(dtype)
        numbers = [value for peer in range(world) for value in (peer + 1, peer + 1)]
        x = mine.clone()
        dist.all_reduce(x)
        expect("all_reduce", x, [total] * 2)
        work = dist.broadcast(x, 0, async_op=True)
        work.wait()
        whole = torch.empty(2 * world, dtype=dtype, device=device)
        dist.all_gather_into_tensor(whole, mine)
        expect("all_gather_into_tensor", whole, numbers)
        part = torch.empty(2, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, whole)
        expect("reduce_scatter_tensor", part, [world * (rank + 1)] * 2)
        taken = torch.empty_like(whole)
        dist.all_to_all_single(taken, torch.cat([mine] * world))
        expect("all_to_all_single", taken, numbers)
        name = group.group_name
        expect("functional all_reduce", functional.wait_tensor(functional.all_reduce(mine, "sum", name)), [total] * 2)
        gathered = functional.wait_tensor(functional.all_gather_into_tensor(mine, world, name))
        expect("functional all_gather", gathered, numbers)
        scattered = functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", world, name))
        expect("functional reduce_scatter", scattered, [world * (rank + 1)] * 2)
        received = torch.zeros_like(mine)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % world)
        for message in dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, mine, (rank + 1) % world)]):
            message.wait()
        expect("messages", received, [(rank - 1) % world + 1] * 2)
    x, weight = torch.ones(8, 64, device=device).bfloat16(), torch.ones(32, 64, device=device).bfloat16()
    for implementation in ("library", "kernel"):
        out = ops.matmul_all_reduce(x, weight, implementation=implementation)
        if not out.eq(64 * world).all():
            wrong.append(f"matmul_all_reduce by {implementation}")
    dist.barrier()
    return wrong


@pytest.mark.ranks(3)
def test_collectives_of_gpu_tensors_are_right_on_every_path(run_ranks: Run, world: int) -> None:
    assert run_ranks(world, call_collectives) == [[]] * world
