# SPDX-License-Identifier: Apache-2.0
"""Training with two-level collectives: ranks of this machine, declared to be several nodes, train as one rank does."""

import os
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stretto.collectives.two_level import GroupTransport
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, parallelize
from tests.differences import largest
from tests.parallel.training import PRECISIONS, SEED, Case, Sizes, Trace, distance, train_on_grid, train_plainly

FP64 = PRECISIONS["fp64-adamw"]
CASE = Case(GPT, (GPTConfig(layers=1, hidden=32, heads=8, vocab=64, max_seq_len=16),), two_level=True, batch=16)


def train_on_nodes(sizes: Sizes, case: Case, expected: Trace) -> tuple[float, bool, int]:
    """How far this is from one rank's training, whether a second run has the same bits, and bytes to other nodes."""
    sent, start = [], GroupTransport.start

    def count(transport, outgoing, incoming):
        sent.extend(message.data.numel() for message in outgoing)
        return start(transport, outgoing, incoming)

    with mock.patch.dict(os.environ, STRETTO_NODES="4x2"), mock.patch.object(GroupTransport, "start", count):
        first, second = (train_on_grid(sizes, case, FP64, optimizes_shards=True) for _ in range(2))
    pairs = [(first.weights[name], weight) for name, weight in expected.weights.items()]
    far = largest(distance(*pair) for pair in (*pairs, *zip(first.losses, expected.losses, strict=True)))
    same = all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    return far, same and first.losses == second.losses, sum(sent)


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param({"z": 8}, {}, marks=pytest.mark.long),
        pytest.param({"data": 8}, {}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"z": 4, "data": 2}, {"reshard": "after_forward", "micro_batches": 2}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_on_four_nodes_of_two_ranks_training_equals_that_of_one_rank(ranks, sizes, options):
    print(f"seed {SEED}")
    case = replace(CASE, **options)
    found = ranks(8).run(train_on_nodes, sizes, case, train_plainly(case, FP64))
    assert largest(far for far, *_ in found) < FP64.tolerance
    assert all(same for _, same, _ in found)
    traffic = {total for *_, total in found}
    assert len(traffic) == 1  # as many bytes through each rank's network interface
    assert traffic.pop() > 0


def make_plain_blocks() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3))).double()


def gradients_on(sizes: Sizes, nodes: str, **options: object) -> tuple[list[torch.Tensor], Counter[str]]:
    """The whole gradients of a model without roles, and how many collectives ran in two levels, by what they did."""
    with mock.patch.dict(os.environ, STRETTO_NODES=nodes):
        grid = Grid(**sizes)
        model = parallelize(make_plain_blocks(), grid, blocks=["*"], **options)
    x = torch.arange(4 * 24.0, dtype=torch.float64).view(4, 24).sin()
    model(x[dist.get_rank() :: dist.get_world_size()]).square().sum().backward()
    gradients = [gather(parameter.grad) for parameter in model.parameters()]
    levels = grid.two_levels.get(options["two_level"])
    calls = Counter[str]()
    for two in () if levels is None else levels.groups.values():
        for call, count in two.calls.items():
            calls[call.collective] += count
    grid.close()
    return gradients, calls


def compare_modes() -> None:
    flat, none = gradients_on({"z": 2, "data": 2}, "2x2", two_level=False)
    assert not none
    for nodes, collectives in (
        ("2x2", {"all_reduce"}),  # z is inside the nodes
        ("4x1", {"all_gather", "reduce_scatter", "all_reduce"}),
        ("1x4", set()),
    ):
        leveled, calls = gradients_on({"z": 2, "data": 2}, nodes, two_level=True)
        assert set(calls) == collectives, nodes
        for mine, expected in zip(leveled, flat, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
    # All four ranks are on unequal nodes, ranks 0 and 1 on one, and ranks 2 and 3 on two of equal size.
    with pytest.raises(ValueError, match=r"two_level is True, and of batch the group's nodes have 3, 1 ranks"):
        gradients_on({"z": 2, "data": 2}, "3,1", two_level=True)
    for mine, expected in zip(gradients_on({"z": 2, "data": 2}, "3,1", two_level="auto")[0], flat, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="STRETTO_NODES is '3x1', which declares nodes for 3 ranks"):
        gradients_on({"z": 2, "data": 2}, "3x1", two_level=True)


def test_a_group_has_two_levels_where_its_ranks_are_on_equal_nodes(ranks):
    ranks(4).run(compare_modes)
