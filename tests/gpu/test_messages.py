# SPDX-License-Identifier: Apache-2.0
"""Messages between pipeline ranks on GPUs: by copies and signals, by NCCL, and staged on the host for gloo."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.parallel.pipeline.messages import MessageKey
from stretto.parallel.pipeline.transports import TRANSPORTS, choose_transport
from tests.parallel.pipeline.test_messages import exchange_at_random

Run = Callable[..., list[Any]]
KINDS = ["gloo", "symmetric memory", pytest.param("nccl", marks=pytest.mark.own_gpus("NCCL carries the messages"))]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_random_messages_arrive_whole(kind: str, world: int, run_ranks: Run) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    assert run_ranks(world, exchange_at_random, kind, seed, 3, 60, 3_000_000, "cuda") == [[]] * world


def pass_around(kind: str) -> None:
    """A tensor goes around all ranks, each of which adds 1 right after it came, far more often than there are slots."""
    rank, world, rounds = dist.get_rank(), dist.get_world_size(), 12
    device = torch.device("cuda", torch.cuda.current_device())
    before, behind = (rank - 1) % world, (rank + 1) % world
    used = []
    with TRANSPORTS[kind](None, device=device) as transport:
        for step in range(4):
            transport.begin_step({before: rounds})
            value = torch.zeros(5 << 20, device=device)  # 20 MB: several slots
            for turn in range(rounds):
                if rank or turn:
                    (value,) = transport.take(MessageKey("F", rank, turn - (rank == 0)), before)
                value = value + 1
                transport.send(behind, MessageKey("F", behind, turn), [value])
            if rank == 0:
                (value,) = transport.take(MessageKey("F", 0, rounds - 1), before)
                assert value.eq(rounds * world).all(), value
            del value
            transport.end_step()
            torch.cuda.synchronize()
            if step:
                used.append(torch.cuda.memory_allocated())
    assert len(set(used)) == 1, used
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stretto-messages")]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_consumers_wait_for_what_they_take_and_memory_stays_flat(kind: str, world: int, run_ranks: Run) -> None:
    run_ranks(world, pass_around, kind)


def choose() -> str:
    return choose_transport(None, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.ranks(2)
def test_gpus_that_reach_each_other_use_symmetric_memory(world: int, run_ranks: Run) -> None:
    chosen = set(run_ranks(world, choose))
    assert chosen <= {"symmetric memory", "nccl"}
    assert len(chosen) == 1
