# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients of any order, and clipping by them."""

import math

import pytest
import torch
from torch import nn

from stretto.parallel import Grid, clip_grad_norm_, gather, gradient_norm, parallelize
from tests.conftest import Ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


def clip_on_grid(sizes: dict[str, int], has_roles: bool) -> None:
    grid = Grid(**sizes)
    model = parallelize(build(), grid, **({"roles": {"0": "colwise", "1": "rowwise"}} if has_roles else {}))
    plain = build()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(grid.size("batch"))[grid.coordinate("batch")]
    for order in (1.0, 2.0, 3.5, math.inf):
        model.zero_grad()
        plain.zero_grad()
        model(mine).square().mean().backward()
        plain(x).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.02, grid, norm_type=order, error_if_nonfinite=True)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.02, norm_type=order))
        for parameter, right in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(gather(parameter.grad), right.grad)
    if grid.coordinate("world") == 0:
        model[0].weight.grad.to_local().fill_(math.nan)
    for order in (2.0, math.inf):
        with pytest.raises(RuntimeError, match=f"the {order}-norm of the gradients is nan, so they cannot be clipped"):
            clip_grad_norm_(model.parameters(), 1.0, grid, norm_type=order, error_if_nonfinite=True)
    assert gradient_norm(model.parameters(), grid, math.inf).isnan()
    with pytest.raises(ValueError, match=r"norm_type is 0, but must be positive"):
        gradient_norm(model.parameters(), grid, 0)
    model[0].bias = nn.Parameter(torch.ones(5))
    model[0].bias.grad = torch.ones(5)
    with pytest.raises(ValueError, match=r"parallelize has returned, and one of shape \[5\] is none"):
        clip_grad_norm_(model.parameters(), 1.0, grid)


@pytest.mark.parametrize(
    ("sizes", "has_roles"), [({"z": 4}, False), ({"data": 2, "z": 2}, True), ({"data": 2, "x": 2}, True)], ids=str
)
def test_norms_of_any_order_and_clipping_by_them_are_those_of_one_process(
    ranks: Ranks, sizes: dict[str, int], has_roles: bool
) -> None:
    """On z=4, two ranks have no row of the second weight."""
    ranks(4).run(clip_on_grid, sizes, has_roles)
