# SPDX-License-Identifier: Apache-2.0
"""Training with sequences cut over context is training on one rank: losses, gradient norms and weights."""

from math import prod
from typing import Any

import pytest

from stretto.models import GPT, GPTConfig
from tests.parallel.experts import training as experts
from tests.parallel.pipeline import training as pipelines
from tests.parallel.training import PRECISIONS, SEED, Case, disagreements, train_plainly

EXACTLY = PRECISIONS["fp64-adamw"]


def gpt(**options: Any) -> GPTConfig:
    return GPTConfig(**{"layers": 2, "hidden": 32, "heads": 8, "vocab": 61, "max_seq_len": 16, **options})


def llama_like(**options: Any) -> GPTConfig:
    return gpt(positions="rotary", activation="swiglu", norm="rmsnorm", bias=False, kv_heads=4, ffn=48, **options)


GPTS = {
    "gpt2-like": Case(GPT, (gpt(),), has_ignored_targets=True),
    "llama-like": Case(GPT, (llama_like(tie_embeddings=False),), has_ignored_targets=True),
    "gathered twice, micro-batched": Case(
        GPT, (llama_like(),), reshard="after_forward", micro_batches=2, batch=16, has_ignored_targets=True
    ),
    "checkpointed": Case(GPT, (gpt(),), checkpoints_activations=True, has_ignored_targets=True),
    "sharded sequence": Case(GPT, (llama_like(),), shards_sequence=True, has_ignored_targets=True),
}
LONG = pytest.mark.long
LARGE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("llama-like", {"context": 2, "x": 2}),
        ("gpt2-like", {"context": 2, "z": 2}),
        pytest.param("llama-like", {"context": 4}, marks=LONG),
        pytest.param("gathered twice, micro-batched", {"context": 2, "data": 2}, marks=LONG),
        pytest.param("checkpointed", {"context": 2, "y": 2}, marks=LONG),
        pytest.param("sharded sequence", {"context": 2, "x": 2}, marks=LONG),
        *(
            pytest.param(variant, sizes, marks=LARGE)
            for variant in GPTS
            for sizes in (
                {"context": 2},
                {"context": 8},
                {"context": 2, "data": 2, "z": 2},
                {"context": 2, "x": 2, "z": 2},
                {"context": 4, "data": 2},
                {"context": 2, "y": 2, "x": 2},
            )
        ),
    ],
    ids=str,
)
def test_five_steps_of_a_gpt_equal_those_of_one_rank(ranks, variant, sizes):
    print(f"seed {SEED}")
    case, count = GPTS[variant], prod(sizes.values())
    expected = train_plainly(case, EXACTLY)
    assert ranks(count).run(disagreements, sizes, case, EXACTLY, expected) == [{}] * count


@pytest.mark.parametrize(
    "run",
    [
        experts.Run({"context": 2, "data": 2, "expert": 2}),
        *(
            pytest.param(experts.Run(grid, options), marks=mark)
            for grid, options, mark in (
                ({"context": 2, "z": 2, "expert": 2}, {}, LONG),
                ({"context": 2, "x": 2}, {}, LONG),
                ({"context": 4}, {}, LARGE),
                ({"context": 2, "x": 2, "data": 2, "expert": 4, "expert_tensor": "fold"}, {}, LARGE),
                ({"context": 2, "x": 2, "z": 2, "expert": 2}, {"shard_sequence": True}, LARGE),
                ({"context": 2, "data": 2, "z": 2, "expert": 4}, {"recompute": "communication"}, LARGE),
            )
        ),
    ],
    ids=str,
)
def test_five_steps_with_experts_equal_those_of_one_rank(ranks, run):
    print(f"seed {SEED}")
    expected = experts.expected_of(run)
    assert ranks(run.ranks).run(experts.disagreements, run, experts.case_of(run), expected) == [{}] * run.ranks


@pytest.mark.parametrize(
    "run",
    [
        pipelines.Run({"pipe": 2, "context": 2}),
        *(
            pytest.param(pipelines.Run(*run), marks=LARGE)
            for run in (
                ({"pipe": 2, "context": 2}, "zb-h1"),
                ({"pipe": 2, "context": 2, "z": 2}, "1f1b", 2),
                ({"pipe": 2, "context": 2, "x": 2}, "interleaved"),
                ({"pipe": 2, "context": 2, "data": 2}, "message-driven"),
                ({"pipe": 2, "context": 4}, "zb-v"),
            )
        ),
    ],
    ids=str,
)
def test_five_steps_of_a_pipeline_equal_those_of_one_rank(ranks, run):
    print(f"seed {SEED}")
    case = Case(GPT, (llama_like(layers=4),), has_ignored_targets=True)
    expected = pipelines.expect(case, EXACTLY)
    count = prod(run.grid.values())
    found = ranks(count).run(pipelines.compare, run, case, EXACTLY, expected)
    assert list(pipelines.complaints(found, expected)) == []
