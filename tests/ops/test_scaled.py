# SPDX-License-Identifier: Apache-2.0
"""The operators of fp8 operands between real processes, whose kernels are interpreted, against fp64."""

import random

import pytest
import torch

from stretto import ops

GATHERS = ["copies", "pushes", "pulls", "unshifted", "wide, pushes", "auto", "library"]
SCATTERS = ["tiles", "copies", "packets", "wide", "auto", "library"]
REDUCES = ["one shot", "two shots", "wide, two shots", "shared", "tiles", "auto", "library"]
CASES = [
    (2, (64, 64, 64), ("rows", "rows"), torch.bfloat16, False),
    (4, (36, 41, 48), ("column", "number"), torch.float32, True),
    (3, (6, 72, 112), ("one", "column"), torch.float16, True),
]
"""(ranks, (rows, n, k), the scales' shapes, dtype, whether there is a bias): whole tiles; odd sizes; few rows, so that
tiles have several ranks'."""

ERRORS = {
    "dtype": "x is of torch.float8_e4m3fn, not torch.float32",
    "weight's dtype": "weight is of torch.float8_e4m3fn, not torch.bfloat16",
    "e5m2": "x is of torch.float8_e4m3fn, not torch.float8_e5m2",
    "plain": "all_gather_matmul takes no fp8, whose operators have scales: all_gather_scaled_matmul",
    "transposed": "takes a contiguous fp8 weight",
    "k": "differ in k",
    "odd k": "k of fp8 operands is a multiple of 16, not 24",
    "dims": "of two dims each, not [32] and [6, 32]",
    "blocks of scales": "x_scale is one number, or one for each of 4 rows, not [4, 2]",
    "number of scales": "weight_scale is one number, or one for each of 6 rows, not [5]",
    "scale's dtype": "x_scale is of torch.float32 on cpu, not of torch.bfloat16",
    "bias": "a bias is [6] of torch.bfloat16 on cpu, not [6] of torch.float32",
    "out_dtype": "returns torch.bfloat16, torch.float16, torch.float32, not torch.float64",
    "reduce_dtype": "partial sums of torch.bfloat16 travel in torch.bfloat16 or torch.float32, not torch.float16",
    "rows": "2 ranks do not divide x's 3 rows",
    "gradients": "has no gradients",
    "steps": "k of blocks for fp8 is 32 or more, not 16",
    "tuned k": "scaled_matmul_all_reduce: k of fp8 operands is a multiple of 16, not 24",
    "tuned weight": "scaled_matmul_all_reduce takes a contiguous fp8 weight [n, k], not strides (1, 8)",
}


@pytest.fixture
def run(interpret):
    def run(ranks, name, *arguments):
        return interpret(ranks, name, *arguments, module="scaled_programs")

    return run


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("operator", "plan"),
    [
        *(("gather", plan) for plan in GATHERS),
        *(("scatter", plan) for plan in SCATTERS),
        *(("reduce", plan) for plan in REDUCES),
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_products_are_scaled_by_row_and_by_column(run, case, operator, plan):
    ranks, shape, *options = case
    found = run(ranks, "multiply", operator, shape, plan, *options)
    for is_right, bits, is_same, ran in found:
        assert is_right
        assert is_same
        assert bits == found[0][1]
        assert [how for (_, how), count in ran.items() if count] == ["library" if plan == "library" else "kernel"]


@pytest.mark.parametrize("calls", [5, pytest.param(16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_calls(run, ranks, calls):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    assert run(ranks, "multiply_random", calls, seed) == [[]] * ranks


def test_operands_that_tma_refuses_have_the_same_product(run):
    assert run(2, "multiply_misaligned") == [True, True]


def test_a_compiled_block_is_the_eager_one_without_a_graph_break(run):
    assert run(2, "compile_block") == [(True, 0)] * 2


def test_forward_mode_derivatives_are_refused_of_the_product_alone(run):
    assert run(1, "differentiate_others") == [True]


def test_wrong_input_is_refused_with_its_name(run):
    for messages in run(2, "find_errors"):
        assert {name: message for name, message in messages.items() if ERRORS[name] not in message} == {}
        assert set(messages) == set(ERRORS)


def test_products_without_numbers_are_empty_or_the_bias(run):
    for shapes in run(2, "find_empty"):
        assert shapes == [(0, 3), [[0.0, 1.0, 2.0]] * 2, (2, 0)]


def test_scales_that_are_gigabytes_apart_are_found(run, tmp_path):
    assert run(1, "multiply_by_far_scales", str(tmp_path / "scales")) == [[True] * 3]


def test_times_are_measured_and_the_fastest_plan_is_taken(run, tmp_path):
    for count, is_fastest in run(2, "tune_gather", str(tmp_path)):
        assert count > 2
        assert is_fastest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantized_by_their_largest_number(dtype):
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] *= 1e30
    x[2] = 0
    x[3] *= 1e-30
    quantized, scale = ops.quantize_rows(x)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert quantized.float().abs().amax(1).tolist() == [448, 448, 0, 448, 448]
    # Three bits of mantissa: within a sixteenth, or half of the smallest step.
    error = (quantized.double() * scale.double()[:, None] - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() / 16, scale.double()[:, None] * 2**-10)).all()


def test_a_transposed_matrix_is_quantized_into_rows_as_operators_take_them():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)).t()
    for quantized, expected in zip(ops.quantize_rows(x), ops.quantize_rows(x.contiguous()), strict=True):
        assert quantized.is_contiguous()
        assert torch.equal(quantized.float(), expected.float())


def test_what_has_no_rows_or_is_of_integers_or_fp8_is_not_quantized():
    for x in (torch.zeros(3), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4).to(torch.float8_e4m3fn)):
        with pytest.raises(ValueError, match="quantize_rows takes"):
            ops.quantize_rows(x)
    assert ops.quantize_rows(torch.zeros(3, 0))[0].shape == (3, 0)
