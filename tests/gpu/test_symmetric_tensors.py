# SPDX-License-Identifier: Apache-2.0
"""Symmetric tensors on GPUs: peers' writes are seen, and memory is given back when the tensors die."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.selection import find_choices
from stretto.memory import empty, peer_tensor
from stretto.parallel import Grid

Run = Callable[..., list[Any]]
ATTEMPTS = 60
PAUSE = 0.5
"""Seconds between attempts: other tests may take memory of the GPU or give it back meanwhile, for seconds when they
start or end. What leaks is missing each time."""


def meet() -> None:
    """All ranks' GPUs have done what was asked of them."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()


def free_bytes() -> int:
    meet()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def write_to_peers(folder: Path) -> None:
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, wrong = dist.get_rank(), []
    empty((8,), torch.int32, device="cuda")  # what the driver keeps for itself is there from now on
    for _ in range(ATTEMPTS):
        amiss = hold_and_give_back(wrong)
        every: list[str] = [""] * world
        dist.all_gather_object(every, amiss)
        if not any(every):
            break
        time.sleep(PAUSE)
    else:
        wrong.append(amiss)
    for round in range(20):  # ranks let go in different orders
        first, second = empty((1000,), device="cuda"), empty((1000,), device="cuda")
        peer_tensor(second, (rank + 1) % world).fill_(round + rank)
        meet()
        if not (second == round + (rank - 1) % world).all() or first.any():
            wrong.append(f"round {round}")
        meet()
        if rank % 2:
            del first
        else:
            del second
    try:
        empty((4 + rank,), device="cuda")
        wrong.append("different sizes were taken")
    except ValueError as error:
        if "all ranks must allocate the same" not in str(error):
            wrong.append(str(error))
    (folder / f"tensors-{rank}.json").write_text(json.dumps(wrong))


def hold_and_give_back(wrong: list[str]) -> str:
    """Allocate, write to peers, and free; what is amiss with the GPU's free memory, if anything."""
    world, rank = dist.get_world_size(), dist.get_rank()
    before = free_bytes()
    mine = empty((world, 1 << 20), torch.int32, device="cuda")
    if mine.any():
        wrong.append("it does not begin with zeros")
    meet()
    for peer in range(world):
        peer_tensor(mine, peer)[rank] = rank + 1
    meet()
    if not all((mine[writer] == writer + 1).all() for writer in range(world)):
        wrong.append("a peer's writes are not there")
    if not torch.equal(peer_tensor(mine, (rank + 1) % world), mine):
        wrong.append("a peer's tensor is not read")
    held = before - free_bytes()
    del mine
    left = before - free_bytes()
    return f"{held} bytes were taken and {left} not given back" if held < world << 22 or left > world << 20 else ""


def run_into_symmetric(folder: Path) -> None:
    """By copy engines, into tensors and parts of them: the numbers of the library, with graphs too."""
    world = dist.get_world_size()
    Grid(data=world, device="cuda")
    rank, wrong = dist.get_rank(), []
    communicator = CudaCommunicator(timeout=10.0)
    part = 3_000_000
    x = torch.randn(world * part, device="cuda").bfloat16()
    room = empty((world * part + 64,), torch.bfloat16, device="cuda")
    for collective, given in (("allgather", x[:part]), ("alltoall", x), ("allreduce", x), ("reducescatter", x)):
        way = find_choices(collective, has_nvlink=True)[-1]
        assert way.protocol == "Copy"
        kernel = communicator.kernel(way, "bfloat16", in_place=False)
        count = part if collective == "reducescatter" else world * part
        ordinary = torch.empty(count, dtype=torch.bfloat16, device="cuda")
        kernel(given, ordinary)
        for offset in (0, 64):
            target = room[offset : offset + count]
            target.zero_()
            if communicator.workspace.find_symmetric(target) is None:
                wrong.append("it is not found to be symmetric")
            kernel(given, target)
            if not torch.equal(target, ordinary):
                wrong.append(f"{collective} into a symmetric tensor from {offset} on")
        target.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel(given, target)
        for _ in range(3):
            target.zero_()
            graph.replay()
        if not torch.equal(target, ordinary):
            wrong.append(f"{collective} in a graph")
    communicator.workspace.check()
    communicator.close()
    (folder / f"straight-{rank}.json").write_text(json.dumps(wrong))
    dist.destroy_process_group()


@pytest.mark.ranks(3)
def test_collectives_go_straight_into_symmetric_tensors(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, run_into_symmetric, tmp_path)
    assert [json.loads((tmp_path / f"straight-{rank}.json").read_text()) for rank in range(world)] == [[]] * world


@pytest.mark.ranks(3)
def test_peers_write_into_each_others_tensors_which_are_given_back(run_ranks: Run, tmp_path: Path, world: int) -> None:
    run_ranks(world, write_to_peers, tmp_path)
    assert [json.loads((tmp_path / f"tensors-{rank}.json").read_text()) for rank in range(world)] == [[]] * world
