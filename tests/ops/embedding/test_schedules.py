# SPDX-License-Identifier: Apache-2.0
"""Look-ups whose vectors move by a schedule, interpreted: the bits of the kernels' own exchange, on 1 to 4 ranks."""

import random

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.random_algorithms import random_all_to_all
from tests.ops.embedding.jagged import look_up_case, make_case, own_rows

from stretto import ops
from stretto.collectives.algorithms import find
from stretto.ops.embedding import forward, scheduled

SEED = random.randrange(10**6)


def make_schedule(which, seed):
    """A schedule of this session's ranks: an algorithm's name, a two-step one of two nodes, or a random one."""
    world = dist.get_world_size()
    match which:
        case "two-step":
            return find("two-step-all-to-all").compile(nodes=2, gpus=world // 2)
        case "random":
            return random_all_to_all(random.Random(seed), world, 2)
    return which


def compare_with_direct(first, which):
    """Seeds of look-ups by schedules that have other bits than without, or other gradients."""
    rank, wrong = dist.get_rank(), []
    for seed, name in enumerate(which, first):
        case, schedule = make_case(seed, dist.get_world_size()), make_schedule(name, seed)
        found = []
        for options in ({"schedule": schedule}, {"schedule": schedule}, {}):
            tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
            out = look_up_case(case, tables, **options)
            grad = own_rows(case, case.grad).to(out.dtype)
            out.backward(grad)
            found.append([out.detach(), *(table.grad for table in tables)])
        with torch.no_grad():
            found.append([look_up_case(case, schedule=schedule), *found[0][1:]])
        if not all(torch.equal(one, right) for each in found for one, right in zip(each, found[2], strict=True)):
            wrong.append((seed, name))
    return wrong


@pytest.mark.parametrize(
    ("ranks", "which"),
    [
        (1, ["direct-all-to-all"]),
        (2, ["direct-all-to-all", "random"]),
        (3, ["random"]),
        (4, ["two-step", "random", "two-step"]),
    ],
)
def test_vectors_that_move_by_a_schedule_have_the_bits_of_the_direct_exchange(interpret, ranks, which):
    print("seed", SEED)
    assert interpret(ranks, compare_with_direct, SEED, which) == [[]] * ranks
