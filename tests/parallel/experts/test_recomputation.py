# SPDX-License-Identifier: Apache-2.0
"""Modes of recomputation with experts: the same gradients to the bit, with losses, capacity and frozen experts."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.models import GPT
from stretto.parallel import Grid, no_sync, parallelize
from stretto.parallel.comm.gradient_reducer import GradientReducer
from tests.parallel.experts.training import gpt
from tests.parallel.test_recomputation import MODES, differences, gradients
from tests.parallel.training import SEED, my_rows

CONFIG = gpt(
    layers=4, dropout=0.1, moe_layers="every:2", balance="switch", z_loss=0.1, capacity_factor=0.8, shared_ffn=16,
    shared_expert_gate=True,
)  # fmt: skip


def train(sizes: dict[str, Any], recompute: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of two micro-batches, the first within no_sync, with frozen experts in a block; and the counts."""
    grid = Grid(**sizes)
    torch.manual_seed(SEED)
    model = parallelize(GPT(CONFIG), grid, recompute=recompute, **options)
    model.blocks[1].mlp.experts.requires_grad_(False)
    text = torch.randint(61, (8, 17))[my_rows(grid, 8)]
    torch.manual_seed(SEED + 1)
    first, second = text.chunk(2)
    with no_sync(model):
        model(first[:, :-1], first[:, 1:], num_targets=128).backward()
    model(second[:, :-1], second[:, 1:], num_targets=128).backward()
    return gradients(model), [block.mlp.router.statistics for block in (model.blocks[1], model.blocks[3])]


def compare_modes(sizes: dict[str, Any], options: dict[str, Any], modes: Sequence[str] = MODES) -> list[str]:
    right, counts = train(sizes, "none", options)
    assert not any("blocks.1.mlp.experts" in name for name in right)
    found = {mode: train(sizes, mode, options) for mode in modes}
    wrong = [mode for mode, (_, seen) in found.items() if not all(map(torch.equal, seen, counts))]
    return [f"{mode}: counts" for mode in wrong] + differences(right, {mode: seen for mode, (seen, _) in found.items()})


@pytest.mark.long
def test_recomputation_gives_bitwise_equal_gradients_and_counts(ranks):
    print(f"seed {SEED}")
    found = ranks(2).run(compare_modes, {"z": 2, "expert": 2}, {}, ("full", "communication"))
    assert found == [[]] * 2


def count_models_in_memory(sizes: dict[str, Any]) -> int:
    """Return how many trained models are there after one was dropped,
    whose routers' sums began within computed blocks.
    """
    train(sizes, "full", {})
    for _ in range(3):  # what one collection frees may hold, in C++, what the next one finds
        gc.collect()
    return sum(type(each) is GradientReducer for each in gc.get_objects())


def test_a_model_whose_blocks_are_recomputed_is_freed(ranks):
    assert ranks(2).run(count_models_in_memory, {"data": 2}) == [0, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param({"x": 2}, {}, marks=pytest.mark.long),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ({"data": 2, "x": 2, "expert": 2}, {}),
                ({"data": 2, "x": 2, "expert": 2}, {"drop_duplicates": False, "reshard": "after_forward"}),
                ({"x": 2, "z": 2, "expert": 2}, {"shard_sequence": True}),
                ({"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"}, {}),
                ({"y": 2, "z": 2, "expert": 2}, {}),
                ({"data": 2, "z": 2, "expert": 2}, {"reshard": "gradients_after_step"}),
                ({"x": 2, "z": 2}, {}),
                ({"data": 2, "expert": 2}, {"expert_rows": 256}),
            )
        ),
    ],
    ids=str,
)
def test_all_modes_give_the_same_gradients_and_counts_to_the_bit(ranks, sizes, options):
    print(f"seed {SEED}")
    count = 1
    for axis in ("data", "x", "y", "z"):
        count *= sizes.get(axis, 1)
    assert ranks(count).run(compare_modes, sizes, options) == [[]] * count
