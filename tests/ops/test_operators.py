"""The operators between real processes, whose kernels are interpreted, against fp64."""

import pytest
import torch

SHAPES = [(32, 64, 64), (37, 41, 33), (5, 72, 40), (50, 24, 16)]
"""(rows of a rank, n, k): whole tiles; odd sizes, which TMA refuses; few rows, so that tiles have several ranks'."""

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


@pytest.mark.parametrize(("reduce_dtype", "total"), [(None, 0.0), (torch.bfloat16, 0.0), (torch.float32, 1.0)])
def test_partial_sums_in_fp32_lose_nothing_on_the_wire(interpret, reduce_dtype, total):
    assert interpret(2, "cancel", reduce_dtype) == [([total], torch.bfloat16)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [("x", "weight", "bias"), ("x",), ("weight",)])
@pytest.mark.parametrize("way", ["saved", "gathered again", "both outputs used"])
def test_gradients_of_all_gather_matmul_are_the_unfused_layers(interpret, way, needs, dtype):
    arguments = ((21, 40, 24), dtype, needs, way == "saved", way == "both outputs used")
    for errors in interpret(3, "differentiate_gather", *arguments):
        assert max(errors.values()) <= 3 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [("x", "weight", "bias"), ("x",), ("weight",)])
def test_gradients_of_matmul_reduce_scatter_are_the_unfused_layers(interpret, needs, dtype):
    for errors in interpret(3, "differentiate_scatter", (21, 40, 24), dtype, needs):
        assert max(errors.values()) <= 3 * ROUNDING[dtype]


def test_calls_of_any_shape_and_subgroup_follow_each_other(interpret):
    assert interpret(4, "call_in_many_shapes", 6, 5) == [[]] * 4


def test_sizes_of_zero_are_no_special_case_to_the_caller(interpret):
    interpret(2, "call_with_nothing")


def test_what_cannot_be_computed_is_refused_before_anything_runs(interpret):
    interpret(2, "ask_wrongly")


def test_the_operators_are_registered_as_torch_asks(interpret):
    interpret(2, "check_registration", (8, 16, 16), timeout=200.0)


def test_torch_compile_takes_them_without_a_graph_break(interpret):
    assert interpret(2, "compile_an_mlp", (16, 32, 16), timeout=200.0) == [[True] * 4] * 2
