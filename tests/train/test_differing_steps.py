# SPDX-License-Identifier: Apache-2.0
"""Steps that differ from the first one, in which a model and its optimizer learn: on grids, and in plain PyTorch."""

from typing import Any

import pytest
import torch
from tests.differences import largest
from tests.train.differing_steps import MIXED_STEPS, STEPS, THAWED_STEPS, train_on_grid, train_plain
from torch import nn

from stretto.parallel import Grid, gather, parallelize
from stretto.train.optimizer import ShardOptimizer

Case = tuple[str, bool, dict[str, Any]]
SUMMED: list[Case] = [
    ("torch", True, {"reshard": "gradients_after_step"}),
    ("torch", False, {"reshard": "after_forward"}),
]
SHARDS: list[Case] = [("shards", False, {"recompute": "full"}), ("shards", True, {"recompute": "communication"})]
STORED: list[Case] = [
    ("device", True, {}),
    ("host", False, {"reshard": "after_forward"}),
    ("host, tiled", True, {"recompute": "full"}),
    ("host, tiled", False, {}),
]


GRIDS = ({"data": 2}, {"z": 2}, {"data": 2, "z": 2})


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        (GRIDS[0], slice(1)),
        pytest.param(GRIDS[1], slice(1, None, 2), marks=pytest.mark.exhaustive),
        *(pytest.param(sizes, slice(None), marks=pytest.mark.exhaustive) for sizes in GRIDS),
    ],
    ids=str,
)
def test_steps_that_differ_from_the_first_give_the_norms_and_weights_of_one_process(
    ranks: Any, sizes: dict[str, int], part: slice
) -> None:
    """Other numbers of micro-batches and of sums, other rows and modules, evaluations, parameters frozen and thawed."""
    for cases, steps in ((SUMMED, STEPS), (SHARDS, THAWED_STEPS), (STORED, MIXED_STEPS)):
        right_norms, right_weights = train_plain(steps)
        for kind, has_roles, options in cases[part]:
            for norms, weights in ranks(2 ** len(sizes)).run(
                train_on_grid, sizes, kind, has_roles=has_roles, steps=steps, **options
            ):
                assert norms == pytest.approx(right_norms, rel=1e-5), (kind, has_roles, options)
                for name, right in right_weights.items():
                    assert float((weights[name] - right).abs().max()) <= 1e-5, (kind, has_roles, options, name)


class Exits(nn.Module):
    """Its forward may end early, where the order of gathers goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, exits: bool) -> torch.Tensor:
        x = self.up(x)
        return x if exits else self.down(x)


def error_after_an_early_exit(options: dict[str, Any]) -> float:
    """The error of a submodule's output after a fused step, which counts no versions of the weights that it writes."""
    torch.manual_seed(0)
    model = parallelize(Exits(), Grid(z=2), **options)
    optimizer = ShardOptimizer(model, lambda groups: torch.optim.AdamW(groups, fused=True), weight_decay=0.0)
    x = torch.ones(2, 8)
    for exits in (False, True):
        model(x, exits).square().mean().backward()
    optimizer.step(0.1)
    right = x @ gather(model.down.weight).T + gather(model.down.bias)
    return float((model.down(x) - right).detach().abs().max())


def test_weights_that_were_gathered_ahead_in_a_pass_that_ended_early_are_not_used_after_a_step(ranks: Any) -> None:
    for options in ({"roles": {"up": "colwise", "down": "rowwise"}}, {"blocks": ["up", "down"]}):
        assert largest(ranks(2).run(error_after_an_early_exit, options)) < 1e-6
