# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that a user turns on by transformers' own methods, before `parallelize` and after it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.parallel import Grid, parallelize
from stretto.parallel.blocks import find_blocks
from tests.parallel import zoo
from tests.parallel.training import Sizes

SEED = 31
METHODS = ("gradient_checkpointing_enable", "activation_checkpointing_enable")


def train(sizes: Sizes, turn_on: str, when: str, kind: bool | None, blocks: bool) -> tuple[dict[str, Tensor], int]:
    """The gradients on this rank, and how often the first layer's norm ran."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    torch.manual_seed(SEED)
    model: Any = zoo.build("llama", "causal")
    calls = []
    norm: nn.Module = model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda *_: calls.append(1))
    options = () if kind is None else ({"use_reentrant": kind},)
    if when == "before":
        getattr(model, turn_on)(*options)
    model = parallelize(model, grid, blocks=find_blocks(model) if blocks else None)
    if when == "after":
        getattr(model, turn_on)(*options)
    rows, count = grid.coordinate("batch"), grid.size("batch")
    batch = {name: value.chunk(count)[rows] for name, value in zoo.make_batch("causal").items()}
    model(**batch).loss.backward()
    found = {name: p.grad.to_local().clone() for name, p in model.named_parameters() if p.grad is not None}
    return found, len(calls)


def compare(sizes: Sizes, blocks: bool) -> list[str]:
    right, once = train(sizes, "", "never", None, blocks)
    wrong = []
    for turn_on in METHODS:
        for when in ("before", "after"):
            for kind in (None, True, False):
                found, calls = train(sizes, turn_on, when, kind, blocks)
                names = [name for name in right if name not in found or not torch.equal(found[name], right[name])]
                wrong += [f"{turn_on} {when}, use_reentrant={kind}: {calls} calls, {names}"] * (
                    calls != once + 1 or names != []
                )
    return wrong


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [((1, 1, 1, 2), True), pytest.param((1, 2, 1, 1), False, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_checkpointing_by_transformers_methods_gives_the_same_gradients(ranks, sizes, blocks):
    print(f"seed {SEED}")
    assert ranks(2).run(compare, sizes, blocks) == [[]] * 2
