# SPDX-License-Identifier: Apache-2.0
"""Replicas of hot experts: where they are, and that they compute what experts without replicas do."""

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.moe.oracle import differentiate_dense, draw, make_layer
from tests.ops.moe.test_exchange import part

from stretto.ops import moe

SEED, EXACT = 680, 1e-12


@pytest.mark.parametrize(
    ("loads", "ranks", "spare", "most"),
    [
        ([9, 1, 1, 1], 2, 1, 1.02),  # of the mean that the busiest rank has
        ([40, 1, 1, 1, 1, 1, 1, 1], 4, 1, 1.1),
        ([40, 30, 1, 1, 1, 1, 1, 1], 4, 2, 1.05),
        ([6, 3, 2, 4, 1, 2, 5, 1], 4, 2, 1.1),
        ([3, 3, 3, 3], 2, 2, 1.0),
        ([0, 0, 0, 0], 2, 1, 1.0),
        ([9, 1, 1, 1], 2, 0, 10 / 6),
    ],
    ids=str,
)
def test_replicas_even_out_the_ranks_loads(loads, ranks, spare, most):
    placement = moe.place_replicas(loads, ranks, spare)
    found, local = placement.loads(loads), len(loads) // ranks
    assert sum(found) == pytest.approx(sum(loads))
    assert largest(found) <= most * sum(loads) / ranks + 1e-9
    for rank, held in enumerate(placement.replicas):
        assert len(held) <= spare
        assert len(set(held)) == len(held)
        assert all(expert // local != rank for expert in held)


def find_differences(sizes, loads, spare, reduce):
    """Largest differences of this rank's output and gradients from the oracle's, and the rows of each rank."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    layer = make_layer(SEED, sum(sizes), 2, len(loads))
    layer.ids[::2, 0], layer.ids[::2, 1] = 0, 1 + layer.ids[::2, 1] % (len(loads) - 1)  # expert 0 is hot
    placement = moe.place_replicas(loads, world, spare)
    grad = draw(SEED + 9, *layer.x.shape)
    expected = differentiate_dense(layer, grad)
    parts = [sizes, sizes, [placement.local] * world, [placement.local] * world]
    leaves = [part(one, each, rank).clone().requires_grad_() for one, each in zip(layer.leaves, parts, strict=True)]
    x, weights, gate_up, down = leaves
    slots = placement.spread(part(layer.ids, sizes, rank))
    sent = moe.dispatch(x, slots, placement.num_slots, group, reduce=reduce)
    gate_up, down = (moe.replicate(one, placement, group) for one in (gate_up, down))
    rows = moe.experts_mlp(sent.rows, sent.offsets, gate_up, down)
    out = moe.combine(rows, sent.handle, weights, group)
    found = [out, *torch.autograd.grad(out, leaves, part(grad, sizes, rank))]
    wanted = [part(one, each, rank) for one, each in zip(expected, [sizes, *parts], strict=True)]
    return [(one - other).abs().max().item() for one, other in zip(found, wanted, strict=True)], len(sent.rows)


@pytest.mark.parametrize(
    ("sizes", "loads", "spare", "reduce"),
    [([70, 66], [9, 1, 1, 1], 1, "rank"), ([5, 70, 40], [50, 2, 3, 1, 1, 4], 2, "choice")],
    ids=str,
)
def test_experts_with_replicas_compute_what_those_without_do(ranks, sizes, loads, spare, reduce):
    results = ranks(len(sizes)).run(find_differences, sizes, loads, spare, reduce)
    for differences, _ in results:
        assert largest(differences) < EXACT
    without = ranks(len(sizes)).run(find_differences, sizes, loads, 0, reduce)
    assert max(rows for _, rows in results) < max(rows for _, rows in without)


def test_no_rank_has_places_for_more_replicas_than_there_are_experts_elsewhere():
    loads = [9, 1, 1, 1]
    assert moe.place_replicas(loads, 2, 1000) == moe.place_replicas(loads, 2, 2)


def refuse():
    placement = moe.place_replicas([3, 1, 1, 1], 2, 1)
    with pytest.raises(ValueError) as error:
        moe.replicate(torch.ones(3, 2), placement)
    return str(error.value)


def test_what_cannot_be_placed_is_refused(ranks):
    for message in ranks(2).run(refuse):
        assert "the placement is of 2 experts on each of 2 ranks, and weight is [3, 2] on 2" in message
    for arguments, part_of_message in (
        (([1, 1, 1], 2, 1), "2 ranks do not divide 3 experts"),
        (([1, -1], 2, 1), "finite loads of 0 or more, not .1, -1."),
        (([1, float("nan")], 2, 1), "finite loads of 0 or more, not .1, nan."),
        (([1, 1], 2, 1.5), "spare is 1.5, but must be a whole number"),
        (([1, 1], 2.0, 1), "ranks is 2.0, but must be a whole number"),
    ):
        with pytest.raises(ValueError, match=part_of_message):
            moe.place_replicas(*arguments)
    placement = moe.place_replicas([3, 1, 1, 1], 2, 1)
    for ids in ([[-1]], [[4]], [[1.0]]):
        with pytest.raises(ValueError, match="spread takes ids from 0 to 3, not"):
            placement.spread(torch.tensor(ids))
