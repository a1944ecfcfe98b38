# SPDX-License-Identifier: Apache-2.0
"""Plans of GPT-OSS: experts that have biases, and attention of plain operations."""

import warnings
from math import prod
from typing import Any

import pytest
import torch
from tests.huggingface.test_config_json import config_of, model_of
from tests.planner.test_blocks import MACHINE

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
GRIDS = [{"data": 2, "z": 2}, {"data": 2, "x": 2, "expert": 2}, {"x": 2, "y": 2}, {"data": 2, "z": 2, "expert": 2}]


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


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_predictions_equal_what_ranks_hold_and_send(ranks, grid):
    count = prod(size for axis, size in grid.items() if axis != "expert")
    held, sent = ranks(count).run(held_and_sent, grid)[0]
    assert local_parameters(MODEL, GridSizes(**grid)) == held
    predicted = predict(MODEL, MACHINE, grid=grid, batch=BATCH, seq_len=SEQ_LEN, dtype="fp32").communication
    if "expert" not in grid:  # else tokens choose the ranks that they go to
        of_z = predicted["all_gather_z"] + predicted["reduce_scatter_z"]
        assert of_z * 1e9 == pytest.approx(sent.get("z", 0))


def test_a_token_is_multiplied_with_weights_and_no_biases():
    assert MODEL.active_weights == MODEL.linear_weights + 2 * (EXPERTS * HIDDEN + ACTIVE * 3 * HIDDEN * FFN)


def test_plain_attention_keeps_a_score_of_each_key_and_head():
    def activations(seq_len: int, **grid: int) -> float:
        """Bytes a token, in bf16."""
        config = StepConfig(GridSizes(**grid), 1)
        return memory(StepWorkload(MODEL, 1, seq_len), config)["activations"] / seq_len

    assert activations(3000) - activations(2000) == pytest.approx(2 * 2 * 4 * 1000, rel=0.01)  # layers, bytes, heads
    assert activations(3000, x=2) - activations(2000, x=2) == pytest.approx(2 * 2 * 2 * 1000, rel=0.01)


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
