# SPDX-License-Identifier: Apache-2.0
"""Integers that count what x splits are named by the user, or refused: code that read them would go wrong silently."""

from ast import literal_eval
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.parallel import Grid, parallelize, validate


class Attention(nn.Module):
    """Attention over the features of 6 heads of 4, whose code splits them as OPT's does: tokens take what is left."""

    def __init__(self, layer: int, heads: int = 6, head_dim: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.heads = heads
        self.head_dim = head_dim
        self.hidden = heads * head_dim
        self.q, self.out = nn.Linear(self.hidden, self.hidden), nn.Linear(self.hidden, self.hidden)

    def forward(self, x: Tensor, cache: dict[int, Tensor] | None = None) -> Tensor:
        q = self.q(x).view(len(x), -1, self.heads, self.head_dim)
        if cache is not None:
            cache[self.layer] = q
        q = q.transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(*x.shape[:2], -1))


class DividesFeatures(Attention):
    def forward(self, x: Tensor, cache: dict[int, Tensor] | None = None) -> Tensor:
        return self.q(x).view(len(x), -1, self.heads, self.hidden // self.heads)


class ReadsNothing(Attention):
    def forward(self, x: Tensor, cache: dict[int, Tensor] | None = None) -> Tensor:
        return self.out(self.q(x).unflatten(-1, (-1, self.head_dim)).softmax(-1).flatten(-2))


def model_of(kind: type[Attention] = Attention, layers: int = 8, **sizes: int) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(kind(layer, **sizes) for layer in range(layers))})


Q, OUT = "blocks.*.q", "blocks.*.out"
WITH_UNIT = {Q: {"role": "colwise", "unit": 4, "unit_name": "attention heads"}, OUT: "rowwise"}
WITHOUT_UNIT = {Q: "colwise", OUT: "rowwise"}


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        (WITH_UNIT, r"the number of attention heads of blocks\.0\.q"),
        (WITHOUT_UNIT, r"by its name the number of heads that blocks\.0\.q makes"),
    ],
)
def test_a_number_of_heads_that_is_not_named_raises(roles: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=rf"^blocks\.0\.heads is 6, {why}.*x=2 splits what they count") as caught:
        validate(model_of(), {"x": 2}, roles=roles)
    named = literal_eval(str(caught.value).partition("local_attributes=")[2].partition(", with None")[0])
    assert named == {"blocks.*.heads": "x"}
    validate(model_of(), {"x": 2}, roles=roles, local_attributes=named)
    validate(model_of(), {"x": 2}, roles=roles, local_attributes={"blocks.*.heads": None})
    validate(model_of(), {"y": 2, "z": 2}, roles=roles)


def test_one_layers_number_that_is_not_named_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^blocks\.3\.heads is 6"):
        validate(
            model_of(layers=4), {"x": 2}, roles=WITH_UNIT, local_attributes={f"blocks.{i}.heads": "x" for i in range(3)}
        )


def test_a_number_of_features_that_is_divided_by_heads_is_refused_too() -> None:
    with pytest.raises(ValueError, match=r"blocks\.0\.hidden is 24, the number of output features of blocks\.0\.q"):
        validate(model_of(DividesFeatures), {"x": 2}, roles=WITH_UNIT, local_attributes={"blocks.*.heads": "x"})


def test_a_number_of_the_whole_model_is_found_by_its_name() -> None:
    class Model(nn.Module):
        n_head = 6

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([ReadsNothing(0)])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x).unflatten(-1, (self.n_head, -1))

    with pytest.raises(ValueError, match=r"^n_head is 6"):
        validate(Model(), {"x": 2}, roles=WITH_UNIT)


@pytest.mark.parametrize(
    ("model", "roles"),
    [
        (model_of(ReadsNothing), WITH_UNIT),  # what no code reads does no harm
        (model_of(ReadsNothing, heads=4), WITH_UNIT),  # a head's size that equals the number of heads
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"0": {"role": "colwise", "unit": 2}, "1": "rowwise"}),
    ],
)
def test_other_integers_are_let_be(model: nn.Module, roles: dict[str, Any]) -> None:
    validate(model, {"x": 2}, roles=roles)


def losses(attributes: dict[str, str | None]) -> tuple[float, float]:
    """Of the plain model, and of one on two ranks."""
    torch.manual_seed(5)
    model, x = model_of(layers=1).double(), torch.randn(2, 6, 24, dtype=torch.float64)
    plain = model["blocks"][0](x).square().sum().item()
    parallelize(model, Grid(x=2), roles=WITH_UNIT, local_attributes=attributes)
    return plain, model["blocks"][0](x).square().sum().item()


def test_a_named_number_is_divided_and_one_named_whole_is_not(ranks) -> None:
    for plain, loss in ranks(2).run(losses, {"blocks.*.heads": "x"}):
        assert loss == pytest.approx(plain, rel=1e-12)
    for plain, loss in ranks(2).run(losses, {"blocks.*.heads": None}):  # why it is refused: no shape shows it
        assert loss != pytest.approx(plain, rel=1e-3)
