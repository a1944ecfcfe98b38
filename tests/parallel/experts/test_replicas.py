# SPDX-License-Identifier: Apache-2.0
"""Training with replicas of hot experts is training without them."""

from typing import Any

import pytest
import torch

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, balance_experts, parallelize
from stretto.parallel.layers.experts import ParallelExperts
from stretto.parallel.layout import local
from tests.parallel.experts.training import gpt
from tests.parallel.training import SEED

STEPS, EXACT = 4, 1e-11


def train(config: GPTConfig, grid: Grid, options: dict[str, Any], replicas: int) -> tuple[list[float], list[Any], int]:
    """Losses, this rank's parameters, and how many replicas ranks held in the last step, of each module."""
    torch.manual_seed(SEED)
    model = parallelize(GPT(config).double(), grid, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    generator, losses = torch.Generator().manual_seed(100 + grid.coordinate("batch")), []
    for _ in range(STEPS):
        tokens = torch.randint(config.vocab, (2, 16), generator=generator) // 3  # few words, and so few experts
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        balance_experts(model, replicas)
    modules = [module for module in model.modules() if isinstance(module, ParallelExperts)]
    held = [
        0 if each.replicas.placement is None else sum(map(len, each.replicas.placement.replicas)) for each in modules
    ]
    return losses, [local(parameter).detach() for parameter in model.parameters()], min(held)


def compare(sizes: dict[str, int], options: dict[str, Any], config: GPTConfig) -> tuple[float, int]:
    """The largest difference of losses and parameters from those without replicas; the fewest replicas of a module."""
    grid = Grid(**sizes)
    expected, right, none = train(config, grid, options, 0)
    losses, found, held = train(config, grid, options, 2)
    assert none == 0
    pairs = [*zip(map(torch.tensor, losses), map(torch.tensor, expected), strict=True), *zip(found, right, strict=True)]
    return max((one - other).abs().max().item() for one, other in pairs if one.numel()), held


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"z": 2, "expert": 2}, {"recompute": "communication"}),
        pytest.param({"data": 2, "x": 2, "expert": 2}, {"shard_sequence": True}, marks=pytest.mark.long),
        pytest.param({"data": 2, "y": 2, "expert": 2}, {"expert_reduce": "choice"}, marks=pytest.mark.long),
        pytest.param(
            {"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"}, {"expert_rows": 256}, marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_losses_and_weights_are_those_without_replicas(ranks, sizes, options):
    count = 2 if sizes.get("z", sizes.get("data")) == 2 and len(sizes) == 2 else 4
    for difference, held in ranks(count).run(compare, sizes, options, gpt(balance="none")):
        assert difference < EXACT
        assert held > 0


def balance_early() -> list[dict[str, float]]:
    """What the first two calls return, and one that ends it, of a model that has run in between."""
    model = parallelize(GPT(gpt(balance="none")).double(), Grid(data=2, expert=2))
    tokens, found = torch.zeros(2, 16, dtype=torch.int64), [dict(balance_experts(model))]
    for replicas in (1, 0):
        model(tokens, tokens).backward()
        found.append(dict(balance_experts(model, replicas)))
    with pytest.raises(ValueError, match="0 or more replicas, not -1"):
        balance_experts(model, -1)
    return found


def test_loads_are_evened_out_from_the_second_call_on(ranks):
    for nothing, busiest, ended in ranks(2).run(balance_early):
        assert nothing == ended == {}
        assert list(busiest) == ["blocks.0.mlp.experts", "blocks.1.mlp.experts"]
        assert all(1 <= load < 1.1 for load in busiest.values())
