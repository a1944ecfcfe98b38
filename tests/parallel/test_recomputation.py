# SPDX-License-Identifier: Apache-2.0
"""Modes of recomputation: the same gradients to the bit, and what each mode sends and keeps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, no_sync, parallelize
from tests.parallel.training import Sizes, my_rows

SEED = 11
BATCH, SEQ_LEN = 8, 8
MODES = ("full", "every:2", "every:3", "products", "communication", "host")
CONFIG = GPTConfig(
    layers=4, hidden=32, heads=4, kv_heads=2, vocab=61, max_seq_len=SEQ_LEN, dropout=0.1, activation="swiglu",
    positions="rotary",
)  # fmt: skip


def make_grid(sizes: Sizes) -> Grid:
    return Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))


def gradients_of(sizes: Sizes, recompute: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's gradients of two micro-batches, the first within no_sync."""
    grid = make_grid(sizes)
    torch.manual_seed(SEED)
    model = parallelize(GPT(CONFIG), grid, recompute=recompute, **options)
    model.blocks[1].requires_grad_(False)
    text = torch.randint(CONFIG.vocab, (BATCH, SEQ_LEN + 1))[my_rows(grid, BATCH)]
    torch.manual_seed(SEED + 1)
    first, second = text.chunk(2)
    with no_sync(model):
        model(first[:, :-1], first[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
    model(second[:, :-1], second[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
    return {
        name: parameter.grad.to_local() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def modes_that_differ(sizes: Sizes, options: dict[str, Any]) -> list[str]:
    """Modes whose gradients are not those of no recomputation, to the bit."""
    right = gradients_of(sizes, "none", options)
    assert len(right) > 20
    return [
        f"{mode}: {name}"
        for mode in MODES
        for name, found in gradients_of(sizes, mode, options).items()
        if not torch.equal(found, right[name])
    ]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 1, 1), {}),
        pytest.param((1, 2, 1, 2), {"keep_gathered": False}, marks=pytest.mark.sampled(1)),
        ((1, 1, 2, 1), {}),
        pytest.param((2, 1, 1, 2), {}, marks=pytest.mark.sampled(1)),
        ((1, 2, 1, 1), {"shard_sequence": True}),
        pytest.param((1, 2, 2, 1), {"shard_sequence": True}, marks=pytest.mark.sampled(1)),
    ],
    ids=str,
)
def test_all_modes_give_the_same_gradients_to_the_bit(ranks, sizes, options):
    print(f"seed {SEED}")
    count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert ranks(count).run(modes_that_differ, sizes, options) == [[]] * count
