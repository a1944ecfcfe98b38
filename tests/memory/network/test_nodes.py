# SPDX-License-Identifier: Apache-2.0
"""Ranks of one machine that are declared to be several nodes put to each other, and run schedules so."""

import os
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.executor import programs

from stretto.collectives.executor import run_on_host
from stretto.memory import Reach, allocate

SEED = 63


def put_around():
    """Each rank puts to the ranks of other nodes, and stores to those of its own; what arrived from each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    size, found = 100_000, []
    with allocate(world * size, signals=2, timeout=60.0) as memory:
        own = memory.buffer()
        for call in range(3):
            own[rank * size : (rank + 1) * size] = 10 * call + rank + 1
            for peer in range(world):
                if memory.reach[peer] is Reach.PUTS:
                    memory.put(peer, rank * size, rank * size, size, 0)
                elif peer != rank:
                    memory.buffer(peer)[rank * size : (rank + 1) * size] = own[rank * size : (rank + 1) * size]
                    memory.signal(peer, 0)
            for peer in set(range(world)) - {rank}:
                memory.wait(peer, 0, call + 1, 60.0)
            found.append([int(part.unique()) for part in own.view(world, size)])
            for peer in set(range(world)) - {rank}:  # it has been read
                memory.signal(peer, 1)
            for peer in set(range(world)) - {rank}:
                memory.wait(peer, 1, call + 1, 60.0)
        return [reach.name for reach in memory.reach], found


def on_nodes(nodes, proxy, function, *arguments):
    with mock.patch.dict(os.environ, {"STRETTO_NODES": nodes, "STRETTO_PROXY": proxy}):
        return function(*arguments)


@pytest.mark.parametrize("proxy", ["python", "native"])
def test_ranks_reach_other_nodes_by_puts(ranks, proxy):
    for rank, (reach, found) in enumerate(ranks(3).run(on_nodes, "2,1", proxy, put_around)):
        near = (rank == 2,) * 2 + (rank < 2,)
        assert reach == ["PUTS" if is_far else "LOADS_AND_STORES" for is_far in near]
        assert found == [[10 * call + peer + 1 for peer in range(3)] for call in range(3)]


def run_schedules(count):
    """Schedules on random sizes, against the same ones within one node; the names of those whose bits differ."""
    wrong = []
    draw = random.Random(SEED)
    rank, world = dist.get_rank(), dist.get_world_size()
    names = sorted(programs.PROGRAMS)
    for _ in range(count):
        schedule = programs.PROGRAMS[draw.choice(names)](world)
        print(schedule)
    return wrong
