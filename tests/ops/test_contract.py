# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's users take for granted of any operator, asked of the overlapped ones."""

import random

import pytest


@pytest.fixture
def run(interpret):
    """`run(ranks, "name", *arguments)` runs a function of tests.ops.contract."""
    return lambda ranks, name, *arguments: interpret(ranks, name, *arguments, module="contract")


@pytest.mark.parametrize("calls", [4, pytest.param(24, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_elements_error_is_within_its_bound(run, ranks, calls):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    assert run(ranks, "measure_errors", calls, seed) == [[]] * ranks


def test_what_is_not_finite_stays_in_its_row(run):
    run(2, "keep_rows_apart")


@pytest.mark.parametrize(
    ("needs", "rows", "weights"),
    [("xwb", True, True), ("x", False, True), ("w", True, False), ("b", False, False)],
)
def test_only_what_a_gradient_takes_is_kept_for_it(run, needs, rows, weights):
    for kept in run(2, "save_for_backward", needs):
        for operator, shapes in kept.items():
            of_x = [(8, 8)] if "gather" in operator else [(4, 8)]
            assert shapes == of_x * rows + [(6, 8)] * weights, operator


def test_only_what_is_kept_may_not_be_modified(run):
    run(2, "modify_in_place")


def test_gradients_of_gradients_are_the_unfused_layers(run):
    for errors in run(2, "differentiate_twice"):
        assert max(errors.values()) <= 1e-13, errors


def test_layers_that_are_computed_again_have_the_same_gradients(run):
    run(2, "checkpoint_layers")


@pytest.mark.parametrize("implementation", ["kernel", "library"])
def test_autocast_casts_nothing_inside(run, implementation):
    run(2, "cast_nothing", implementation)


def test_forward_mode_is_refused(run):
    run(2, "derive_forward")


def test_modes_change_no_number(run):
    run(2, "call_in_every_mode")


@pytest.mark.parametrize("plan", ["auto", "copies", "packets"])
def test_a_group_that_has_inferred_may_train(run, plan):
    run(2, "infer_then_train", plan)


def test_a_plan_is_compiled_without_a_graph_break(run):
    run(2, "compile_with_a_plan")


def test_options_that_there_are_not_are_refused_by_name(run):
    run(2, "refuse_options")


def test_what_cannot_be_tuned_is_refused(run):
    run(2, "refuse_to_tune")


def test_an_mlp_is_refused_before_its_first_product(run):
    run(2, "refuse_mlps")


def test_an_mlps_biases_may_be_all_that_is_trained(run):
    run(2, "train_biases")


def test_threads_may_have_groups_of_their_own(run):
    assert run(2, "call_from_threads") == [6, 6]


def test_groups_that_are_gone_are_forgotten(run):
    assert run(2, "leave_groups", 4) == [0, 0]


def test_a_rank_with_nothing_to_multiply_has_the_shapes_of_the_others(run):
    assert run(2, "disagree_about_nothing") == [True, True]


def test_ranks_that_differ_in_a_bias_or_in_what_is_returned_are_told_so(run):
    run(2, "disagree_about_biases")


def test_a_rank_that_waited_in_vain_may_call_again(run):
    assert run(2, "miss_a_call") == [([4, 6], [6, 6])] * 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("plan", ["auto", "copies", "pushes", "pulls", "tiles", "packets"])
def test_ranks_operands_may_be_aligned_apart(run, plan):
    run(2, "align_apart", plan)


def test_one_ranks_alignment_is_no_choice_of_its_own(run):
    """Taken by TMA on all ranks, and not so at the first call of a kind; later calls of a kind are as its first."""
    assert run(2, "choose_apart") == [[True, False]] * 2


def test_flops_are_counted_as_the_unfused_layers(run):
    run(2, "count_flops")
