"""Hugging Face GPT-2, Llama and Qwen2 on a grid train as they do on one rank, and give whole logits when asked."""

from contextlib import AbstractContextManager, nullcontext
from math import prod

import pytest
import torch
from torch import Tensor

from stretto.parallel import Grid, parallelize
from tests.parallel import hugging_face
from tests.parallel.training import (
    PRECISIONS,
    SEED,
    Case,
    Precision,
    Sizes,
    Trace,
    batches,
    build,
    disagreements,
    distance,
    my_rows,
    train_plainly,
)

CASES = {
    "gpt2": Case(hugging_face.gpt2, (True,), is_hugging_face=True),
    "gpt2, untied": Case(hugging_face.gpt2, (False,), is_hugging_face=True, has_ignored_targets=True),
    "llama, grouped-query": Case(hugging_face.llama, (False,), is_hugging_face=True, has_ignored_targets=True),
    "qwen2, biases": Case(hugging_face.qwen2, (False,), is_hugging_face=True),
    "qwen2, biases, tied": Case(hugging_face.qwen2, (True,), is_hugging_face=True, has_ignored_targets=True),
    "llama, checkpointed, gathered twice": Case(
        hugging_face.llama, (True,), is_hugging_face=True, checkpoints_activations=True, keep_gathered=False
    ),
}
GRIDS = [(2, 2, 1, 1), (1, 2, 2, 2), (2, 1, 2, 2)]


def exactly(precision: Precision) -> AbstractContextManager[object]:
    return hugging_face.Fp32IsFp64() if precision.dtype == torch.float64 else nullcontext()


def disagreements_of(sizes: Sizes, case: Case, precision: Precision, expected: Trace) -> dict[str, float | str]:
    with exactly(precision):
        return disagreements(sizes, case, precision, expected)


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
@pytest.mark.parametrize("model", list(CASES))
def test_five_steps_on_a_grid_equal_those_of_one_rank(ranks, model, sizes, precision):
    print(f"seed {SEED}")
    case, chosen = CASES[model], PRECISIONS[precision]
    with exactly(chosen):
        expected = train_plainly(case, chosen)
    assert ranks(prod(sizes)).run(disagreements_of, sizes, case, chosen, expected) == [{}] * prod(sizes)


def logits_and_loss(sizes: Sizes, case: Case, precision: Precision, expected: Tensor) -> tuple[float, bool, bool]:
    """How far this rank's logits are; whether asking for a loss leaves them unmade, and whether tuples work."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    with exactly(precision):
        model = parallelize(build(case, precision), grid)
        rows = my_rows(grid, case.batch)
        tokens, _ = next(batches(case))
        with torch.no_grad():
            logits = model(input_ids=tokens[rows]).logits
            as_tuple = model(input_ids=tokens[rows], return_dict=False)
            with_loss = model(input_ids=tokens[rows], labels=tokens[rows])
    made = with_loss.logits is not None and with_loss.logits.shape == logits.shape
    return distance(logits, expected[rows]), made, torch.equal(as_tuple[0], logits)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gpt2", (1, 2, 2, 2)),
        ("gpt2", (2, 2, 1, 1)),
        ("llama, grouped-query", (2, 1, 2, 2)),
        ("qwen2, biases, tied", (1, 2, 2, 2)),
    ],
    ids=str,
)
def test_whole_logits_come_without_labels_and_are_never_made_with_them(ranks, model, sizes):
    print(f"seed {SEED}")
    case, precision = CASES[model], PRECISIONS["fp64-adamw"]
    tokens, _ = next(batches(case))
    with torch.no_grad(), exactly(precision):
        expected = build(case, precision)(input_ids=tokens).logits
    for far, made, tuple_agrees in ranks(prod(sizes)).run(logits_and_loss, sizes, case, precision, expected):
        assert far < 1e-12
        assert not made
        assert tuple_agrees
