# SPDX-License-Identifier: Apache-2.0
"""Tests of what is refused of experts and routers, with what would do."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from stretto.execution import ExecutionOptions
from stretto.huggingface.formulas import UnknownRolesError
from stretto.models import GPT
from stretto.parallel import Grid, parallelize, validate
from tests.parallel.experts.training import gpt


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        ({"num_experts": 6}, {"data": 4, "expert": 4}, "6 experts cannot be split over expert=4; .* is 8, or .*=3"),
        ({"expert_ffn": 20}, {"x": 8}, "20 inner features of an expert cannot be split over x=8; .* is 16, or .*=5"),
        ({"num_experts": None, "expert_ffn": None}, {"data": 2, "expert": 2}, "no submodule of GPT has the role 'exp"),
        ({}, {"data": 4, "expert": 3}, "data=4 and z=1 do not hold a group of 3 ranks for experts"),
        ({}, {"x": 4, "data": 2, "expert": 2, "expert_tensor": "fold"}, "must be a multiple of x; expert=4 would do"),
    ],
)  # fmt: skip
def test_a_grid_that_cannot_hold_the_experts_is_refused_with_what_would_do(config, sizes, words):
    with torch.device("meta"):
        model = GPT(gpt(balance="none" if config.get("num_experts", 8) else "switch", **config))
    with pytest.raises(ValueError, match=words):
        validate(model, sizes)


def test_a_folded_x_need_not_divide_the_experts_inner_features():
    with torch.device("meta"):
        model = GPT(gpt(expert_ffn=20))
    validate(model, {"x": 8, "expert": 8, "expert_tensor": "fold"})


class Block(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        shapes = {"gate_up_proj": (4, 16, 8), "down_proj": (4, 8, 8)} | changes
        self.experts = nn.Module()
        for name, shape in shapes.items():
            if shape is not None:
                self.experts.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self.experts.num_experts = 4
        self.experts.act_fn = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"gate_up_proj": None},
            r"down_proj \[4, 8, 8\] and num_experts=4, but .* has .* down_proj \[E, h, F\], and either",
        ),
        ({"bias": (4, 8)}, r"has the parameters bias \[4, 8\], down_proj \[4, 8, 8\], gate_up_proj \[4, 16, 8\] and"),
        (
            {"down_proj_bias": (4, 8)},
            r"has the parameters down_proj \[4, 8, 8\], down_proj_bias .* perhaps a bias of each",
        ),
        ({"gate_up_proj": (4, 8, 8)}, r"gate_up_proj \[4, 8, 8\] and .* has .* gate_up_proj \[E, 2F, h\]"),
        ({"gate_up_proj": None, "up_proj": (4, 9, 8)}, r"up_proj \[4, 9, 8\] and .* up_proj \[E, F, h\]"),
    ],
)
def test_a_module_without_the_interface_of_experts_is_refused(changes, words):
    with pytest.raises(UnknownRolesError, match=words):
        validate(Block(**changes), {}, roles={"experts": "experts"})
    block = Block()
    block.experts.act_fn = None
    with pytest.raises(UnknownRolesError, match="no act_fn, a function of a tensor"):
        validate(block, {}, roles={"experts": "experts"})


def refusals() -> list[str]:
    grid = Grid(data=2, x=2, expert=2)
    found = []
    for config, options in (
        (gpt(balance="sequence"), {"shard_sequence": True}),
        (gpt(num_experts=None, expert_ffn=None), {"blocks": ["blocks.*"]}),
        (gpt(), {"blocks": ["blocks.*"]}),
    ):
        with pytest.raises(ValueError) as error:
            parallelize(GPT(config), grid, **options)
        found.append(str(error.value))
    model = parallelize(GPT(gpt(layers=1, balance="none")), grid, expert_rows=8)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with pytest.raises(ValueError, match="expert_rows is 8, so x=2 must divide a rank's 15 tokens; 16 would do"):
        model(tokens[:1, :15])
    model(tokens)
    with pytest.raises(ValueError, match="needs") as error:
        model(tokens)
    return [*found, str(error.value)]


def test_errors_that_depend_on_the_grid_raise(ranks):
    for sequence, dense, blocks, rows in ranks(4).run(refusals):
        assert "blocks.0.mlp.router has a loss over each sequence" in sequence
        assert "a model that is sharded block by block has all experts on every rank" in dense
        assert blocks == dense
        assert "more than max_rows=8: give max_rows=" in rows


class Unknown(nn.Module):
    """A model without roles."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


def test_a_model_without_roles_is_not_sharded_by_blocks_where_experts_are_to_be_divided():
    with pytest.raises(UnknownRolesError, match=r"these submodules have no role: layers\.0"):
        validate(Unknown(), {"data": 2, "expert": 2})
    validate(Unknown(), {"data": 2})


def test_a_graph_does_not_hold_a_layer_that_waits_for_the_number_of_rows(ranks):
    ranks(2).run(refuse_capture)


def refuse_capture() -> None:
    model = parallelize(GPT(gpt(layers=1, balance="none")), Grid(data=2, expert=2))
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(ValueError, match=r"blocks\.0\.mlp\.experts: a CUDA graph cannot wait .* expert_rows="),
    ):
        model.blocks[0].mlp.experts._refuse_capture()


def test_options_that_no_step_could_run_with_are_refused():
    for rows in (0, -1, True):
        with pytest.raises(ValueError, match=f"expert_rows is {rows}, but must be (a whole number or None|at least 1)"):
            ExecutionOptions(expert_rows=rows)
    assert ExecutionOptions().replace(expert_rows=7, drop_duplicates=False).expert_rows == 7
