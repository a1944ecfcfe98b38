"""The documented example, all-gather + GEMM, on real processes."""

import inspect

import pytest
import torch
from tests.tiles import all_gather_gemm

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
SHAPES = [(40, 48, 40), (16, 32, 32), (33, 40, 24)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_multiplies_what_it_gathers(interpret, ranks, dtype):
    errors = interpret(ranks, "multiply_gathered", SHAPES, dtype, 3)
    assert max(errors) < TOLERANCES[dtype], errors


def test_it_is_as_short_as_the_docs_say():
    source = inspect.getsource(all_gather_gemm)
    assert len([line for line in source.splitlines() if line.strip()]) < 75
