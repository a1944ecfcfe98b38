# SPDX-License-Identifier: Apache-2.0
"""Gradients that have come together: their norm, and what ranks must have in common to sum them."""

import pytest
import torch
from torch import Tensor, nn

from stretto.parallel import Grid, clip_grad_norm_, gather, layout_of, parallelize
from tests.parallel.training import Sizes, distance

GRIDS = [(2, 1, 1, 2), (1, 2, 2, 1)]


def on_grid(sizes: Sizes) -> Grid:
    return Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))


class MLP(nn.Module):
    """Linear, tanh, linear: one of two of them, as the call says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        return self.down[which](torch.tanh(self.up[which](x)))


ROLES = {"up.*": "colwise", "down.*": "rowwise"}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: gather(parameter.grad, layout_of(parameter)).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def clipped_alone(sizes: Sizes) -> list[float]:
    """How far one parameter's gradient, clipped by itself, and its norm are from what they should be."""
    grid = on_grid(sizes)
    model = parallelize(MLP().double(), grid, roles=ROLES)
    model(torch.ones(1, 8 // grid.size("y"), dtype=torch.float64)).square().sum().backward()
    weight = model.up[0].weight
    before = whole_gradients(model)["up.0.weight"]
    norm = clip_grad_norm_(weight, 0.1, grid)
    return [
        distance(norm, before.norm()),
        distance(whole_gradients(model)["up.0.weight"], before * 0.1 / before.norm()),
    ]


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_one_parameter_may_be_clipped_by_itself(ranks, sizes):
    for norm, gradient in ranks(4).run(clipped_alone, sizes):
        assert norm < 1e-12
        assert gradient < 1e-5  # the norm's 1e-6


def clipped_in_two_dtypes(sizes: Sizes) -> dict[str, float]:
    """By which factor clipping has scaled each gradient of a model in bf16 and fp32, over the right one, minus 1."""
    grid = on_grid(sizes)
    model = MLP()
    model.up.to(torch.bfloat16)
    model = parallelize(model, grid, roles=ROLES, dtype=torch.float32)
    model(torch.ones(1, 8 // grid.size("y"))).square().sum().backward()
    before = whole_gradients(model)
    norm = torch.stack([gradient.double().norm() for gradient in before.values()]).norm()
    clip_grad_norm_(model.parameters(), 0.3, grid)
    return {
        name: float((gradient.double() * before[name].double()).sum() / before[name].double().square().sum())
        / float(0.3 / norm)
        - 1
        for name, gradient in whole_gradients(model).items()
    }


@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_the_factor_is_not_rounded_to_the_first_gradients_dtype(ranks, sizes):
    for errors in ranks(4).run(clipped_in_two_dtypes, sizes):
        assert all(abs(error) < (1e-3 if "up" in name else 1e-5) for name, error in errors.items()), errors


def refusal_of_branches() -> str:
    """What is said where one rank goes through other linears than the other, of the same sizes."""
    grid = Grid(data=2)
    model = parallelize(MLP(), grid, roles=ROLES)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 8), which=grid.coordinate("data")).sum().backward()
    return str(caught.value)


def test_gradients_of_different_layers_are_never_added_up(ranks):
    assert all("the same submodules in the same order" in said for said in ranks(2).run(refusal_of_branches))


def refusals_of_hooks() -> tuple[list[str], bool]:
    """What is said to hooks on a weight, by kind of hook; and whether hooks on a bias, and none, are fine."""
    model = parallelize(MLP(), Grid(x=2), roles=ROLES)
    weight, bias, said = model.up[0].weight, model.up[0].bias, []
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        with pytest.raises(ValueError, match="has a hook") as caught:
            model(torch.ones(1, 8))
        said.append(str(caught.value))
        handle.remove()
    seen: list[bool] = []
    bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
    model(torch.ones(1, 8)).sum().backward()
    return said, seen == [True]


def test_a_hook_on_a_weight_is_refused_for_it_would_see_no_gradient(ranks):
    for said, has_seen in ranks(2).run(refusals_of_hooks):
        assert ["up.0.weight has a hook" in words for words in said] == [True, True]
        assert has_seen


def refusal_of_a_second_time() -> str:
    model = parallelize(MLP(), grid := Grid(x=2), roles=ROLES)
    with pytest.raises(ValueError, match="on a grid already") as caught:
        parallelize(model, grid, roles=ROLES)
    return str(caught.value)


def test_a_model_is_parallelized_once(ranks):
    assert len(set(ranks(2).run(refusal_of_a_second_time))) == 1
