"""The operators between real processes, whose kernels are interpreted, against fp64."""

import pytest
import torch

SHAPES = [(32, 64, 64), (37, 41, 33), (5, 72, 40), (50, 24, 16)]
"""(rows of a rank, n, k): whole tiles, odd sizes (which TMA refuses), few rows (tiles of several ranks), few columns."""

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_gathered_rows_are_multiplied_as_they_come(interpret, ranks, shape, dtype):
    for by_columns, has_bias in ((False, True), (True, False)):
        for error, is_gathered, is_same in interpret(ranks, "gather_and_multiply", shape, dtype, by_columns, has_bias):
            assert error <= ROUNDING[dtype]
            assert is_gathered
            assert is_same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_partial_sums_are_added_by_the_owner_of_their_rows(interpret, ranks, shape, dtype):
    for by_columns, has_bias in ((False, True), (True, False)):
        for error, is_same in interpret(ranks, "multiply_and_scatter", shape, dtype, by_columns, has_bias):
            assert error <= 2 * ROUNDING[dtype]  # rounded before they travel, and after
            assert is_same
