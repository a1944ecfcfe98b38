# SPDX-License-Identifier: Apache-2.0
"""Tests of what real ranks hold and send of mixtures of experts, beside the planner's predictions."""

import warnings
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from tests.planner.test_blocks import MACHINE

from stretto.axes import GridSizes
from stretto.execution import ExecutionOptions
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, count_collectives, parallelize
from stretto.parallel.comm.collectives import running_collective
from stretto.parallel.comm.counting import CollectiveCall
from stretto.parallel.experts.module import ParallelExperts
from stretto.planner import read_architecture
from stretto.planner.experts.cost import expert_messages
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


LONG, ACTIVE, EXPERTS = 512, 3, 8


def sent_by_experts(sizes: dict[str, Any], options: dict[str, Any]) -> Counter[tuple[str, str]]:
    """Numbers that this rank sends in a step of one block, whose router draws experts, by kind and axis."""
    grid = Grid(**sizes)
    config = {**SIZES, "layers": 1, "hidden": 128, "max_seq_len": LONG}
    model = parallelize(
        GPT(GPTConfig(**config, num_experts=EXPERTS, experts_per_token=ACTIVE, balance="none")), grid, **options
    )
    seed = grid.coordinate("batch") * 8 + (grid.coordinate("x") if options.get("shard_sequence") else 0)
    (experts,) = (module for module in model.modules() if isinstance(module, ParallelExperts))

    def draw(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden, ids, weights = inputs
        drawn = torch.rand(len(ids), EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(ACTIVE).indices
        return hidden, drawn, weights

    experts.register_forward_pre_hook(draw)
    text = torch.zeros(1, LONG, dtype=torch.int64)
    sent = Counter[tuple[str, str]]()  # of large messages: others are choices, weights and their gradients

    def count(call: CollectiveCall) -> None:
        kind = running_collective() or call.kind  # CPUs reduce-scatter experts' rows by an all-to-all
        if call.bytes_sent > 40_000 and (call.axis == "expert" or kind in ("reduce_scatter", "all_gather")):
            sent[kind, call.axis] += call.bytes_sent // 4

    with count_collectives(grid, before=count):
        model(text, text).sum().backward()
    return Counter({each: number for each, number in sent.items() if each[1] in ("x", "expert")})


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 4, "expert": 4}, {}),
        ({"data": 4, "expert": 4}, {"expert_reduce": "choice"}),
        ({"data": 4, "expert": 4}, {"expert_rows": 3 * LONG}),  # CPUs have no kernels, as GPUs of several nodes
        ({"data": 2, "x": 2, "expert": 2}, {}),
        ({"data": 2, "x": 2, "expert": 2}, {"expert_reduce": "choice"}),
        ({"data": 2, "x": 2, "expert": 2}, {"expert_rows": 4 * LONG}),
        ({"data": 2, "x": 2, "expert": 2}, {"drop_duplicates": False}),
        ({"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"}, {}),
        ({"data": 2, "y": 2, "expert": 2}, {}),
    ],
    ids=str,
)
def test_experts_send_what_is_predicted_of_choices_that_are_equally_likely(ranks, sizes, options):
    shape = GPTConfig(**{**SIZES, "hidden": 128}, num_experts=EXPERTS, experts_per_token=ACTIVE)
    layer = read_architecture(shape, SEQ_LEN).kinds[-1].model.moe_layer
    assert layer is not None
    layer = replace(layer, shape=replace(layer.shape, imbalance=1.0))
    planned = Counter[tuple[str, str]]()
    for message in expert_messages(layer, GridSizes(**sizes), LONG, ExecutionOptions(**options), gpus_per_node=1):
        if message.kind != "all_reduce" and message.axis != "y":
            planned[message.kind, message.axis] += message.numbers
    found = sum(ranks(4).run(sent_by_experts, sizes, options), Counter())
    assert {each: number / 4 for each, number in found.items()} == pytest.approx(dict(planned), rel=0.03)
