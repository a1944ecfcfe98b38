# SPDX-License-Identifier: Apache-2.0
"""Embedding look-ups between real processes, whose kernels are interpreted, against fp64."""

import random

import pytest
import torch

MODULE = "embedding_programs"
SEED = random.randrange(10**6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "calls"), [(1, 6), (2, 12), (2, 40), (3, 12), (4, 8)])
def test_random_jagged_batches_are_pooled_where_they_belong(interpret, ranks, calls):
    print("seed", SEED)
    assert interpret(ranks, "look_up_random_batches", SEED, calls, module=MODULE) == [[]] * ranks


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "calls"), [(2, 4), (3, 2)])
def test_gradients_dense_and_sparse_are_the_unfused_ones(interpret, ranks, calls):
    print("seed", SEED)
    assert interpret(ranks, "differentiate", SEED, calls, module=MODULE) == [[]] * ranks


def test_gradients_of_more_numbers_than_32_bits_count_are_found_by_64(interpret):
    print("seed", SEED)
    assert interpret(2, "differentiate_by_64_bits", SEED, 2, module=MODULE) == [[]] * 2


@pytest.mark.parametrize(("optimizer", "bound"), [("sgd", 0.0), ("adagrad", 1e-5)])
def test_the_fused_update_is_the_unfused_one(interpret, optimizer, bound):
    print("seed", SEED)
    for is_equal, difference in interpret(3, "train_in_two_ways", SEED, optimizer, 2, torch.float32, module=MODULE):
        assert is_equal or difference <= bound


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_table_of_several_features_gets_one_step_of_all_its_lookups(interpret, ranks):
    # Rows 0 and 2 are looked up once by each rank's samples, row 1 twice, by two features.
    for sgd, adagrad, state in interpret(ranks, "update_a_table_of_two_features", module=MODULE):
        assert sgd == [-ranks, -2 * ranks, -ranks, 0]
        assert adagrad == [-1, -1, -1, 0]
        assert state == [ranks**2, 4 * ranks**2, ranks**2, 0]


def test_a_bad_index_or_offset_is_named_by_its_rank_and_harms_nobody(interpret):
    (silent, out), (said, other) = interpret(2, "look_up_with_faults", module=MODULE)
    assert silent == [""] * 4
    assert out == [[2.0, 1.0] * 2, [1.0, 1.0] * 2]
    assert other == [[1.0, 0.0] * 2, [1.0, 1.0] * 2]
    index, negative, falling, beyond = said
    assert "rank 1: indices[5] is 3, but table 1 of this rank has 3 rows: 0 to 2 will do" in index
    assert "rank 1: indices[1] is -7, but table 0 of this rank has 5 rows" in negative
    assert "rank 1: the offsets of bag" in falling
    assert "never fall" in falling
    assert "the offsets of bag 7 (table 1 of this rank) go from 7 to 12" in beyond


def test_an_index_out_of_range_is_read_as_zeros_and_gets_no_gradient(interpret):
    assert interpret(1, "read_rows_out_of_range_as_zeros", module=MODULE) == [[1.0, 0.0, 0.0, 0.0, 1.0]]


def test_an_output_is_not_written_over_while_it_lives_however_many_do(interpret):
    for is_right, inside in interpret(2, "hold_outputs", 7, module=MODULE):
        assert is_right
        assert inside >= 2


def test_a_view_keeps_its_output_and_a_dead_output_gives_its_place_back(interpret):
    assert interpret(1, "keep_a_part", module=MODULE) == [[True] * 4]


def test_ranks_that_see_other_tables_say_so(interpret):
    assert interpret(2, "look_up_other_tables_under_one_name", module=MODULE) == [[[1.0] * 8]] * 2


def test_a_rank_that_does_not_come_is_named(interpret):
    assert interpret(2, "wait_for_nobody", module=MODULE) == ["named", "late"]


def test_a_module_moves_to_other_dtypes_and_from_the_meta_device(interpret):
    interpret(2, "move_modules", module=MODULE)


def test_what_cannot_be_looked_up_is_refused_before_anything_runs(interpret):
    interpret(2, "ask_wrongly", module=MODULE)


def test_the_operators_are_registered_as_torch_asks(interpret):
    interpret(2, "check_registration", module=MODULE, timeout=200.0)


def test_torch_compile_takes_a_look_up_without_a_graph_break(interpret):
    assert interpret(2, "compile_a_look_up", module=MODULE, timeout=200.0) == [[True] * 3] * 2


def test_torch_compile_takes_other_batches_ranks_without_tables_and_sparse_gradients(interpret):
    assert interpret(2, "compile_more_look_ups", module=MODULE, timeout=200.0) == [[True] * 8] * 2


def test_tables_that_change_between_calls_are_seen_as_they_are(interpret):
    assert interpret(1, "change_tables_between_calls", module=MODULE) == [[[float(n)] for n in range(1, 7)]]


def test_what_replays_of_a_cuda_graph_read_is_never_freed_and_else_what_is_kept_is_bounded(interpret):
    ((living, of_all),) = interpret(1, "look_up_many_sets_of_tables", True, module=MODULE)
    assert living == of_all >= 4
    ((living, of_all),) = interpret(1, "look_up_many_sets_of_tables", False, module=MODULE)
    assert living < of_all


def test_an_output_needs_gradients_as_its_tables_do_and_may_be_changed_in_place(interpret):
    interpret(2, "look_up_in_all_modes_of_autograd", module=MODULE)


def test_torch_sees_the_operators_where_it_watches_or_exports(interpret):
    name = "stretto.embedding_all_to_all"
    seen = [f"{name}.default", f"{name}_gradients.default", f"{name}_update.default"]
    assert interpret(2, "watch_operators", module=MODULE) == [(True, 1, seen, seen[:1])] * 2


def test_the_fastest_way_is_measured_and_kept(interpret, tmp_path):
    assert interpret(2, "tune", str(tmp_path), module=MODULE) == [(True, True, True)] * 2
