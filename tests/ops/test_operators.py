# SPDX-License-Identifier: Apache-2.0
"""The operators between real processes, whose kernels are interpreted, against fp64."""

import pytest
import torch

CASES = [
    (2, (64, 64, 64), torch.bfloat16, False, True),
    (4, (37, 41, 33), torch.float32, False, False),
    (4, (32, 72, 40), torch.bfloat16, False, False),
    (3, (5, 72, 40), torch.bfloat16, True, True),
    (2, (50, 24, 16), torch.float16, True, False),
]
"""(ranks, (rows of a rank, n, k), dtype, whether the weight is a transpose, whether there is a bias): whole tiles; odd
sizes, which TMA refuses; few rows, so that tiles have several ranks'."""

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def ran_kernels(operator, calls=3):
    return {(operator, "kernel"): calls}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "plan", ["copies", "pushes", "pulls", "unshifted", "odd tiles", "odd tiles, pushes", "odd tiles, copies"]
)
@pytest.mark.parametrize("case", CASES)
def test_gathered_rows_are_multiplied_as_they_come(interpret, case, plan):
    ranks, shape, dtype, *rest = case
    for error, is_gathered, is_same, ran in interpret(ranks, "gather_and_multiply", shape, dtype, *rest, plan):
        assert error <= ROUNDING[dtype]
        assert is_gathered
        assert is_same
        assert ran == ran_kernels("all_gather_matmul")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "plan",
    [
        "tiles",
        "tiles, unshifted",
        "copies",
        "copies, unshifted",
        "packets",
        "shared steps",
        "odd tiles",
        "odd tiles, pushes",
        "odd tiles, copies",
    ],
)
@pytest.mark.parametrize("case", CASES)
def test_partial_sums_are_added_by_the_owner_of_their_rows(interpret, case, plan):
    ranks, shape, dtype, *rest = case
    for error, is_same, ran in interpret(ranks, "multiply_and_scatter", shape, dtype, *rest, plan):
        assert error <= 2 * ROUNDING[dtype]  # rounded before they travel, and after
        assert is_same
        assert ran == ran_kernels("matmul_reduce_scatter")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("plan", ["copies", "pushes", "tiles"])
@pytest.mark.parametrize(
    ("ranks", "shape"), [(2, (32, 64, 264)), (4, (30, 20, 296)), (2, (19, 33, 267)), (2, (30, 32, 480))]
)
def test_tiles_of_the_last_wave_are_shared_by_steps_over_k(interpret, ranks, shape, plan):
    """By three programs: the fourth of four tiles, with odd sizes as well; or two tiles, each in three parts."""
    what = "multiply_and_scatter" if plan == "tiles" else "gather_and_multiply"
    shared = interpret(ranks, "share", what, shape, plan)
    assert all(more > 0 for more, *_ in shared)
    for _, error, *is_right, _ in shared:
        assert error <= 2 * ROUNDING[torch.bfloat16]
        assert all(is_right)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "plan", ["one shot", "two shots", "shared steps", "odd tiles", "odd tiles, two shots", "tiles", "auto"]
)
@pytest.mark.parametrize(
    "case",
    [
        (4, (1, 72, 64), torch.bfloat16, False, True),
        (3, (3, 41, 33), torch.float32, True, True),
        (2, (16, 65, 40), torch.float16, False, False),
        (2, (36, 50, 24), torch.bfloat16, True, True),
    ],
)
def test_few_rows_are_summed_alike_on_all_ranks(interpret, case, plan):
    ranks, shape, dtype, *rest = case
    results = interpret(ranks, "multiply_and_reduce", shape, dtype, *rest, plan)
    for error, bits, is_same, ran in results:
        assert error <= 2 * ROUNDING[dtype]
        assert bits == results[0][1]
        assert is_same
        assert ran == ran_kernels("matmul_all_reduce")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_library_does_the_same_and_says_so(interpret, dtype):
    accuracy = ROUNDING.get(dtype, 1e-15)
    for error, is_gathered, _, ran in interpret(3, "gather_and_multiply", (5, 24, 16), dtype, False, True, "library"):
        assert error <= accuracy
        assert is_gathered
        assert ran == {("all_gather_matmul", "library"): 3}
    for error, _, ran in interpret(3, "multiply_and_scatter", (5, 24, 16), dtype, True, True, "library"):
        assert error <= 3 * accuracy
        assert ran == {("matmul_reduce_scatter", "library"): 3}
    for error, _, _, ran in interpret(3, "multiply_and_reduce", (5, 24, 16), dtype, True, True, "library"):
        assert error <= 4 * accuracy
        assert ran == {("matmul_all_reduce", "library"): 3}


@pytest.mark.parametrize("transfer", ["programs", "copies"])
def test_tiles_that_are_stored_in_halves_are_whole(interpret, transfer):
    assert interpret(2, "scatter_in_halves", transfer) == [True] * 2


@pytest.mark.parametrize("plan", ["auto", "copies", "tiles"])
@pytest.mark.parametrize(("reduce_dtype", "total"), [(None, 0.0), (torch.bfloat16, 0.0), (torch.float32, 1.0)])
def test_partial_sums_in_fp32_lose_nothing_on_the_wire(interpret, reduce_dtype, total, plan):
    assert interpret(2, "cancel", reduce_dtype, plan) == [([total], torch.bfloat16)] * 2


@pytest.mark.parametrize(
    ("operator", "plan"),
    [
        ("matmul_reduce_scatter", "tiles"),
        ("matmul_reduce_scatter", "copies"),
        ("matmul_reduce_scatter", "copies, unshifted"),
        ("matmul_reduce_scatter", "packets"),
        ("matmul_all_reduce", "one shot"),
        ("matmul_all_reduce", "two shots"),
        ("matmul_all_reduce", "odd tiles"),
    ],
)
def test_partial_sums_are_added_in_rank_order(interpret, operator, plan):
    assert interpret(4, "add_in_order", operator, plan) == [[1.0]] * 4


@pytest.mark.sampled(6)
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


@pytest.mark.parametrize("needs", [("x", "weight", "bias"), ("x",), ("weight",)])
def test_gradients_of_matmul_all_reduce_are_the_unfused_layers(interpret, needs):
    for errors in interpret(3, "differentiate_all_reduce", (5, 40, 24), torch.float32, needs):
        assert max(errors.values()) <= 3 * ROUNDING[torch.float32]


@pytest.mark.parametrize(("activation", "is_gated"), [("gelu", False), ("silu", True), ("relu-squared", False)])
@pytest.mark.parametrize("needs_gradients", [True, False])
def test_an_mlp_is_the_whole_ones_rows(interpret, activation, is_gated, needs_gradients):
    for errors in interpret(2, "differentiate_an_mlp", (20, 32, 24), activation, is_gated, needs_gradients):
        assert max(errors.values()) <= 5e-6, errors


def test_calls_of_any_shape_and_subgroup_follow_each_other(interpret):
    assert interpret(4, "call_in_many_shapes", 6, 5) == [[]] * 4


def test_sizes_of_zero_are_no_special_case_to_the_caller(interpret):
    interpret(2, "call_with_nothing")


def test_what_cannot_be_computed_is_refused_before_anything_runs(interpret):
    interpret(2, "ask_wrongly")


def test_the_operators_are_registered_as_torch_asks(interpret):
    interpret(2, "check_registration", (8, 16, 16), timeout=200.0)


def test_a_trace_has_the_operators_and_not_what_they_do(interpret):
    assert interpret(2, "trace") == [["stretto::all_gather_matmul", "stretto::matmul_reduce_scatter"]] * 2


def test_torch_compile_takes_them_without_a_graph_break(interpret):
    assert interpret(2, "compile_an_mlp", (16, 32, 16), timeout=200.0) == [[True] * 4] * 2


@pytest.mark.parametrize(("debugs", "rows"), [(False, (18, 15)), (True, (12, 24))])
def test_ranks_that_call_different_things_are_told_so_before_a_launch(interpret, debugs, rows):
    """Always at calls of a new kind; of known ones with STRETTO_DEBUG=1. The group is as good as before."""
    said = interpret(3, "disagree", debugs)
    for rank, (message, shape, left) in enumerate(said):
        assert f"rank {rank} calls all_gather_matmul m={rows[rank == 1]} " in message
        assert f"rank {0 if rank == 1 else 1} calls all_gather_matmul m={rows[rank != 1]} " in message
        assert shape == [12, 16]
        assert left == 1  # of what this rank has said, in the store


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "plan"),
    [("gather", "copies"), ("gather", "pushes"), ("scatter", "tiles"), ("scatter", "copies"), ("scatter", "packets")],
)
def test_who_is_a_call_behind_has_what_its_call_was_sent(interpret, name, plan):
    assert interpret(2, "fall_behind", name, plan, 5) == [[], []]


@pytest.mark.parametrize(
    ("operator", "plan"),
    [
        ("all_gather_matmul", "copies"),
        ("all_gather_matmul", "pushes"),
        ("matmul_reduce_scatter", "copies"),
        ("matmul_reduce_scatter", "tiles"),
    ],
)
def test_a_kernel_that_cannot_be_launched_costs_its_own_call_alone(interpret, operator, plan):
    assert interpret(2, "call_after_a_failed_launch", operator, plan) == [True] * 2
