# SPDX-License-Identifier: Apache-2.0
"""Look-ups of ranks that are declared to be several nodes, which put to each other: the bits of one node's."""

import random

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.random_algorithms import random_all_to_all
from tests.ops.embedding.jagged import Kind, fill_case, look_up_case, make_case, own_rows
from tests.ops.joint.test_nodes import in_one_node, on_nodes

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
        found, right = look_up(group, seed, schedule), in_one_node(look_up, None, seed)
        if not all(torch.equal(*pair) for pair in zip(found, right, strict=True)):
            wrong.append(seed)
    assert list_put_channels(group.group_name)
    assert not list_put_channels(dist.group.WORLD.group_name)
    return wrong


def refuse(group):
    """What a bad index of rank 1 raises on rank 0, of another node; and whether another call is right after that.

    What a rank puts takes more slices than there are slots, and each slice several steps.
    """
    kind = Kind([[(5, 1024)], [(7, 1024)]], 8, torch.float32, torch.int64, "sum", False, 3)
    case, rank = fill_case(kind, 2), dist.get_rank()
    right, own = in_one_node(lambda group: look_up_case(case, group=group), None), case.owners[rank]
    good = own.indices
    if rank == 1:
        own.indices = good.clone()
        own.indices[0] = 1000
    message = ""
    try:
        look_up_case(case, group=group)
    except ValueError as error:
        message = str(error)
    own.indices = good
    return message, torch.equal(look_up_case(case, group=group), right)


def test_a_bad_index_of_another_node_harms_no_later_call(interpret):
    (first, first_is_right), (second, second_is_right) = interpret(2, on_nodes, "1,1", "auto", refuse)
    assert first == ""  # on CPUs the rank itself raises, and the others have a row of zeros
    assert "rank 1: indices[0] is 1000, but table 0" in second
    assert first_is_right
    assert second_is_right


@pytest.mark.parametrize(
    ("ranks", "nodes", "count"),
    [
        pytest.param(3, "2,1", 1, marks=pytest.mark.long),
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
