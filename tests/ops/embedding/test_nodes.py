# SPDX-License-Identifier: Apache-2.0
"""Look-ups of ranks that are declared to be several nodes, which put to each other: the bits of one node's."""

import random

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.random_algorithms import random_all_to_all
from tests.ops.embedding.jagged import look_up_case, make_case, own_rows
from tests.ops.joint.test_nodes import on_nodes

from stretto.ops.operator import list_put_channels

SEED = random.randrange(10**6)


def look_up(group, seed, schedule=None):
    """Vectors and gradients of two calls."""
    case, found = make_case(seed, dist.get_world_size()), []
    for _ in range(2):
        tables = [table.clone().requires_grad_() for table in case.owners[dist.get_rank()].tables]
        out = look_up_case(case, tables, group=group, schedule=schedule)
        out.backward(own_rows(case, case.grad).to(out.dtype))
        found += [out.detach().clone(), *(table.grad for table in tables)]
    return found


def compare(group, seeds):
    """Seeds of look-ups with other bits, or gradients, than in one node."""
    wrong = []
    for seed in seeds:
        schedule = random_all_to_all(random.Random(seed), dist.get_world_size(), 2) if seed % 2 else None
        found, right = look_up(group, seed, schedule), look_up(None, seed)
        if not all(torch.equal(*pair) for pair in zip(found, right, strict=True)):
            wrong.append(seed)
    assert list_put_channels(group.group_name)
    return wrong


@pytest.mark.parametrize(
    ("ranks", "nodes", "count"),
    [
        (4, "2x2", 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((2, "1,1", 6), (3, "2,1", 6), (4, "2x2", 6), (4, "4x1", 4))
        ),
    ],
)
def test_vectors_and_gradients_between_nodes_have_the_bits_of_one_node(interpret, ranks, nodes, count):
    print("seed", SEED)
    seeds = list(range(SEED, SEED + count))
    assert interpret(ranks, on_nodes, nodes, "auto", compare, seeds, timeout=300.0) == [[]] * ranks
