"""Symmetric tensors on GPUs: peers' writes are seen, and memory is given back when the tensors die."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.memory import empty, peer_tensor
from stretto.parallel import Grid

Run = Callable[..., list[Any]]
RANKS = max((n for n in (1, 2, 3, 4) if n <= torch.cuda.device_count()), default=0)


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
    Grid(data=RANKS, device="cuda")
    rank, wrong = dist.get_rank(), []
    empty((8,), torch.int32, device="cuda")  # what the driver keeps for itself is there from now on
    before = free_bytes()
    mine = empty((RANKS, 1 << 20), torch.int32, device="cuda")
    if mine.any():
        wrong.append("it does not begin with zeros")
    meet()
    for peer in range(RANKS):
        peer_tensor(mine, peer)[rank] = rank + 1
    meet()
    if not all((mine[writer] == writer + 1).all() for writer in range(RANKS)):
        wrong.append("a peer's writes are not there")
    if not torch.equal(peer_tensor(mine, (rank + 1) % RANKS), mine):
        wrong.append("a peer's tensor is not read")
    held = before - free_bytes()
    del mine
    left = before - free_bytes()
    if held < RANKS << 22 or left > RANKS << 20:
        wrong.append(f"{held} bytes were taken and {left} not given back")
    for round in range(20):  # ranks let go in different orders
        first, second = empty((1000,), device="cuda"), empty((1000,), device="cuda")
        peer_tensor(second, (rank + 1) % RANKS).fill_(round + rank)
        meet()
        if not (second == round + (rank - 1) % RANKS).all() or first.any():
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


@pytest.mark.alone
@pytest.mark.skipif(RANKS < 2, reason="one GPU has nobody to write to: this needs two")
def test_peers_write_into_each_others_tensors_which_are_given_back(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(RANKS, write_to_peers, tmp_path)
    assert [json.loads((tmp_path / f"tensors-{rank}.json").read_text()) for rank in range(RANKS)] == [[]] * RANKS
