# SPDX-License-Identifier: Apache-2.0
"""Tests of what real ranks hold and send of mixtures of experts, beside the planner's predictions."""

import warnings
from math import prod
from typing import Any

import pytest
import torch
from tests.planner.test_blocks import MACHINE

from stretto.axes import GridSizes
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, parallelize
from stretto.planner import read_architecture
from stretto.planner.memory import local_parameters

SEQ_LEN, BATCH = 16, 8
SIZES: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "max_seq_len": SEQ_LEN, "expert_ffn": 48}
CASES = [
    ({"data": 4, "expert": 4}, 4),
    ({"data": 2, "x": 2, "expert": 2}, 4),
    ({"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"}, 4),
    ({"z": 4, "expert": 2}, 8),
    ({"z": 4}, 2),  # fewer experts than ranks of z
]


def held(sizes: dict[str, Any], experts: int) -> int:
    """Parameters of this rank, after a step that ran."""
    grid = Grid(**sizes)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parallelize(GPT(GPTConfig(**SIZES, num_experts=experts)), grid)
    text = torch.randint(64, (BATCH // grid.size("batch"), SEQ_LEN), generator=torch.Generator().manual_seed(0))
    model(text, text).sum().backward()
    return sum(parameter.to_local().numel() for parameter in model.parameters())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("sizes", "experts"), CASES, ids=str)
def test_the_rank_that_holds_most_parameters_holds_what_is_predicted(ranks, sizes, experts):
    count = prod(size for axis, size in sizes.items() if axis in ("data", "x", "y", "z"))
    most = max(ranks(count).run(held, sizes, experts))
    model = read_architecture(GPTConfig(**SIZES, num_experts=experts), SEQ_LEN)
    assert local_parameters(model, GridSizes(**sizes)) == pytest.approx(most)
    assert MACHINE.gpus_per_node >= count
