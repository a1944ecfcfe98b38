# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's mixtures of experts train on grids, with no roles given, as the plain model does on one rank."""

import warnings
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.axes import NAMES
from stretto.parallel import Grid, Pipeline, gather, parallelize
from stretto.train.checkpoint.model_tensors import saved_tensors
from tests.parallel import moe_families
from tests.parallel.moe_families import FAMILIES, VOCAB, build
from tests.parallel.training import IGNORED, my_rows

SEED = 67
BATCH, SEQ_LEN, STEPS = 4, 10, 5
TOLERANCE = 1e-5

GRIDS: dict[str, dict[str, Any]] = {
    "x2": {"x": 2},
    "expert2": {"data": 2, "expert": 2},
    "x2-expert2": {"data": 2, "x": 2, "expert": 2},
    "z2": {"z": 2},
    "z2-expert2": {"z": 2, "expert": 2},
    "y2": {"y": 2},
    "x2-y2-expert2": {"x": 2, "y": 2, "z": 2, "expert": 2},
    "pipe2-expert2": {"pipe": 2, "data": 2, "expert": 2},
    "x2-fold": {"x": 2, "expert": 2, "expert_tensor": "fold"},
}
ONE_GRID = "x2-expert2"


@dataclass(frozen=True)
class Trace:
    """Logits before training [batch, seq, vocab], the losses of the steps, and all tensors after them."""

    logits: Tensor | None
    losses: list[float]
    tensors: dict[str, Tensor]


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels; the labels of some tokens are ignored, of other numbers of them in each row."""
    tokens = torch.randint(3, VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(SEED))
    labels = tokens.clone()
    for row in range(BATCH):
        labels[row, : 2 * row] = IGNORED
    return tokens, labels


def train(model: nn.Module, rows: slice = slice(None)) -> Trace:
    tokens, labels = (each[rows] for each in batch())
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trace(logits, losses, whole_tensors(model))


def train_by_pipeline(model: nn.Module, grid: Grid, rows: slice) -> Trace:
    """The same with the stages of a pipeline, which makes no logits; tensors are those of this rank's stages."""
    tokens, labels = (each[rows] for each in batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    with Pipeline(model, grid, micro_batch_size=1) as pipeline:
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(pipeline.step(input_ids=tokens, labels=labels, use_cache=False).item())
            optimizer.step()
    return Trace(None, losses, whole_tensors(model))


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: gather(tensor).detach() for name, tensor in saved_tensors(model).items()}


@cache
def trained_plainly(family: str) -> Trace:
    return train(build(family))


def trained_on_grid(family: str, sizes: dict[str, Any]) -> tuple[Trace, slice]:
    grid = Grid(**sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is sharded over z alone")
        warnings.filterwarnings("error", message=".*of the parameters of .* are split neither over")
        model = parallelize(build(family), grid)
    rows = my_rows(grid, BATCH)
    return (train_by_pipeline(model, grid, rows) if grid.size("pipe") > 1 else train(model, rows)), rows


def check(ranks: Any, family: str, sizes: dict[str, Any]) -> None:
    print(f"seeds {moe_families.SEED} {SEED}")
    expected = trained_plainly(family)
    assert expected.losses[-1] < expected.losses[0]
    count = prod(sizes.get(axis, 1) for axis in NAMES)
    for found, rows in ranks(count).run(trained_on_grid, family, sizes):
        if "pipe" not in sizes:
            torch.testing.assert_close(found.logits, expected.logits[rows], rtol=TOLERANCE, atol=TOLERANCE)
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert found.tensors.keys() == expected.tensors.keys() or "pipe" in sizes
        for name, tensor in found.tensors.items():
            torch.testing.assert_close(
                tensor,
                expected.tensors[name],
                rtol=TOLERANCE,
                atol=TOLERANCE,
                msg=lambda text, n=name: f"{n}: {text}",
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_with_divided_experts_as_on_one_rank(ranks, family):
    check(ranks, family, GRIDS[ONE_GRID])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in GRIDS if name != ONE_GRID])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_on_other_grids_as_on_one_rank(ranks, family, name):
    check(ranks, family, GRIDS[name])
