# SPDX-License-Identifier: Apache-2.0
"""Plans of a model with experts (GPT-OSS): x and y split its attention, and every rank of them computes its experts."""

import warnings
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from tests.huggingface.test_config_json import config_of, model_of
from tests.planner.test_blocks import MACHINE

import stretto
from stretto.axes import GridSizes
from stretto.parallel import Grid, count_collectives, parallelize
from stretto.planner import predict, read_architecture
from stretto.planner.memory import local_parameters, memory
from stretto.planner.workload import StepConfig, StepWorkload

BATCH, SEQ_LEN, HIDDEN, FFN, VOCAB, EXPERTS, ACTIVE = 8, 16, 32, 48, 256, 4, 2
OPTIONS: dict[str, Any] = {
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE,
    "sliding_window": 8,
    "vocab_size": VOCAB,
}
MODEL = read_architecture(config_of("gpt_oss", **OPTIONS), SEQ_LEN)
# The router, and gate, up and down of each expert, with biases.
OF_EXPERTS = EXPERTS * (HIDDEN + 1) + EXPERTS * (HIDDEN * 2 * FFN + 2 * FFN + FFN * HIDDEN + HIDDEN)
GRIDS = [{"data": 2, "z": 2}, {"x": 2, "z": 2}, {"x": 2, "y": 2}, {"data": 2, "x": 2}]


def held_and_sent(sizes: dict[str, int], **options: Any) -> tuple[int, dict[tuple[str, str], int]]:
    """Parameters of this rank, and bytes that it sends in a step, by axis."""
    grid = Grid(**sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parallelize(model_of(config_of("gpt_oss", **OPTIONS), "CausalLM"), grid, **options)
    text = torch.randint(VOCAB, (BATCH // grid.size("batch"), SEQ_LEN), generator=torch.Generator().manual_seed(0))
    model(input_ids=text, labels=text, use_cache=False).loss.backward()  # the first one compares orders over ranks
    with count_collectives(grid) as counts:
        model(input_ids=text, labels=text, use_cache=False).loss.backward()
    return sum(parameter.to_local().numel() for parameter in model.parameters()), dict(counts.bytes_by_axis())


@pytest.mark.sampled(2, quick=1)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("options", [{}, {"reshard": "after_forward"}], ids=str)
def test_predictions_equal_what_ranks_hold_and_send(ranks, grid, options):
    held, sent = ranks(prod(grid.values())).run(held_and_sent, grid, **options)[0]
    assert local_parameters(MODEL, GridSizes(**grid)) == held
    predicted = predict(MODEL, MACHINE, grid=grid, batch=BATCH, seq_len=SEQ_LEN, dtype="fp32", **options).communication
    of_z = predicted["all_gather_z"] + predicted["reduce_scatter_z"]
    assert of_z * 1e9 == pytest.approx(sent.get("z", 0))
    # Norms, biases and sinks, which z does not cut, are summed over data x z, and not counted.
    of_data = sent.get("data", 0) + sent.get("batch", 0) * ("data" in grid)
    assert predicted["all_reduce_data"] * 1e9 == pytest.approx(of_data, rel=0.03)
    for axis in ("x", "y"):  # norms' statistics take a little less than is counted
        assert predicted[f"all_reduce_{axis}"] * 1e9 == pytest.approx(sent.get(axis, 0), rel=0.03)


def test_x_and_y_do_not_split_experts_whose_features_y_gathers():
    alone, by_x, by_y = (
        predict(MODEL, MACHINE, grid=grid, batch=BATCH, seq_len=SEQ_LEN, cost="paper").communication
        for grid in ({"z": 2}, {"x": 2, "z": 2}, {"y": 2, "z": 2})
    )
    of_experts = 2 * OF_EXPERTS / 2 * 2e-9  # of two layers and bf16, half of it to the other rank
    of_linears = alone["all_gather_z"] - of_experts
    assert by_x["all_gather_z"] == pytest.approx(of_experts + of_linears / 2)
    linears = sum(linear.weights for linear in MODEL.linears)
    assert of_linears == pytest.approx(2 * linears / 2 * 2e-9)
    tokens = BATCH * SEQ_LEN / 2
    partial_sums = sum(linear.inputs if linear.is_rowwise else linear.outputs for linear in MODEL.linears)
    assert by_y["all_reduce_y"] == pytest.approx(2 * tokens * 2e-9 * (partial_sums + 2 * HIDDEN / 2))


@pytest.mark.parametrize("grid", [{}, {"x": 2}, {"z": 2}, {"x": 2, "y": 2}], ids=str)
def test_a_rank_computes_all_experts_of_its_tokens(grid):
    cut = grid.get("x", 1) * grid.get("y", 1)
    tokens = BATCH * SEQ_LEN // grid.get("z", 1)
    linears = 2 * sum(linear.weights for linear in MODEL.linears) / cut + VOCAB * HIDDEN / cut
    experts = 2 * (EXPERTS * HIDDEN + ACTIVE * 3 * HIDDEN * FFN)
    # Two products of attention with all keys, at 0.6 of the rate, and 2.5 times as much in the backward pass.
    attention = 2 * (4 * tokens * SEQ_LEN * 32 / grid.get("x", 1)) * 3.5 / 0.6
    assert MODEL.active_weights == MODEL.linear_weights + experts  # of which FLOPs a token are counted
    found = predict(MODEL, MACHINE, grid=grid, batch=BATCH, seq_len=SEQ_LEN).compute_time
    assert found == pytest.approx((6 * (linears + experts) * tokens + attention) * 1e-12)


def test_plain_attention_keeps_a_score_of_each_key_and_head():
    def activations(seq_len: int, **grid: int) -> float:
        """Bytes a token, in bf16."""
        config = StepConfig(GridSizes(**grid), 1)
        return memory(StepWorkload(MODEL, 1, seq_len), config)["activations"] / seq_len

    assert activations(3000) - activations(2000) == pytest.approx(2 * 2 * 4 * 1000, rel=0.01)  # layers, bytes, heads
    assert activations(3000, x=2) - activations(2000, x=2) == pytest.approx(2 * 2 * 2 * 1000, rel=0.01)


def test_a_plan_names_what_is_computed_by_all_ranks():
    plans = stretto.plan(config_of("gpt_oss", **OPTIONS), MACHINE, gpus=4, batch=BATCH, seq_len=SEQ_LEN)
    assert all("every rank of x and y computes its router and all of its experts" in plan.notes[0] for plan in plans)


def test_experts_that_do_not_fit_are_advised_ranks_of_z():
    small = replace(MACHINE, gpu=replace(MACHINE.gpu, memory=2e5))
    plans = stretto.plan(MODEL, small, gpus=4, batch=BATCH, seq_len=SEQ_LEN)
    assert not any(plan.fits for plan in plans)
    assert all("along z" in plan.why or "from data to z" in plan.why for plan in plans if plan.is_possible)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 5}, "a token goes to 5 of 4 experts"),
        ({"num_local_experts": "4"}, "num_local_experts is '4'"),
        (
            {"model_type": "llama"},
            "'llama', a mixture of experts that the planner does not support; supported: gpt_oss",
        ),
    ],
)
def test_experts_that_cannot_be_counted_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_architecture(config_of("gpt_oss", **OPTIONS).to_dict() | change, SEQ_LEN)
