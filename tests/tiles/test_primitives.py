# SPDX-License-Identifier: Apache-2.0
"""The primitives between real processes, whose kernels are interpreted: what is there when a wait returns."""

import re

import pytest


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rows", [16, 37])
def test_every_static_mapping_gathers_by_push_and_by_pull(interpret, ranks, rows):
    assert interpret(ranks, "gather_in_all_ways", rows) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_tiles_sent_to_their_owners_are_added_in_rank_order_as_they_come(interpret, ranks):
    assert interpret(ranks, "scatter_some", [16, 21, 5]) == [[True, True, True]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("mode", ["p2p", "broadcast"])
def test_tables_that_are_filled_at_run_time_send_tiles_anywhere(interpret, ranks, mode):
    assert interpret(ranks, "route", mode, 4) == [[]] * ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_peers_signal_each_other_one_by_one_and_all_at_once(interpret, ranks):
    assert interpret(ranks, "use_peers", 3) == [[(True, True)] * 3] * ranks


def test_descriptors_store_and_load_tiles_too(interpret):
    interpret(1, "move_by_descriptors")


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_the_host_copies_signals_and_waits(interpret, direction):
    assert interpret(3, "copy_by_the_host", direction, 4) == [[]] * 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("start", [0, 2**31 - 20, -20])
def test_counters_serve_call_after_call_past_stragglers_and_around_their_end(interpret, start):
    assert interpret(3, "mix_calls", 24, start) == [[]] * 3


@pytest.mark.parametrize("slots", [[0, 1] * 6, [0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0]])
def test_slots_are_written_over_only_when_all_have_read_them(interpret, slots):
    assert interpret(3, "take_turns", slots) == [[]] * 3


@pytest.mark.parametrize("calls", [100, 2**30, 2**31 + 10, 2**32 - 1])
def test_a_slot_may_lie_idle_for_any_number_of_calls(interpret, calls):
    interpret(2, "use_a_slot_again", calls)


@pytest.mark.parametrize("calls", [100, 2**31 + 10, 2**32 - 2**21])
def test_a_tile_between_peers_may_lie_idle_for_many_calls(interpret, calls):
    assert interpret(2, "use_peers_after", calls) == [[True, True]] * 2


def test_packets_may_lie_further_apart_than_32_bits_count(interpret):
    interpret(1, "sum_packets_of_large_products")


def test_who_is_ahead_by_a_call_waits_for_nobody(interpret):
    assert interpret(2, "run_ahead") == [True] * 2


def test_a_poll_that_gave_up_is_reported_even_if_its_signal_has_come(interpret):
    for rank, said in enumerate(interpret(2, "give_up_a_poll")):
        assert said.startswith(f"rank {rank} of 2: late, call 1: waited in vain for rank 1, tile 2 (channel 2)")


def test_two_groups_have_calls_under_way_at_once(interpret):
    assert interpret(4, "use_groups_at_once", 3) == [[]] * 4


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("begin", r"rank 1, the beginning of the call"),
        ("producer", r"rank 1, tile (2 \(channel 2|3 \(channel 3)\)"),  # whichever program's time is over first
        ("peer", r"rank 1, tile 0 between peers"),
        ("host", r"rank 1, channel 3 \(rank_wait\)"),
    ],
)
def test_a_rank_that_never_arrives_is_named_with_operator_and_tile(interpret, what, words):
    outcomes = interpret(3, "lose", what, 1)
    for rank in (0, 2):
        first, second = outcomes[rank]
        assert re.match(f"rank {rank} of 3: first, call 1: waited in vain for {words}, 3 s: its signal is at ", first)
        assert second == first  # the channel is broken


def test_a_channel_whose_wait_ended_with_another_groups_failure_stays_broken_when_that_is_over(interpret):
    for rank, said in enumerate(interpret(2, "follow_another_failure")):
        awaited = f"ended without what it waited for from rank {1 - rank}, since a wait of another group had failed"
        assert said.startswith(f"rank {rank} of 2: first, call 1: {awaited}")


def test_programs_of_a_channel_that_give_up_together_do_not_take_each_other_for_another_group(interpret):
    for rank, text in enumerate(interpret(2, "give_up_beside_another_program")):
        assert text.startswith(f"rank {rank} of 2: first, call 1: waited in vain for rank {1 - rank}, tile ")


def test_polls_of_a_call_that_begins_after_a_failure_give_up_on_a_tile_that_there_is(interpret):
    assert interpret(2, "begin_after_another_failure") == [1, 1]


def test_misuse_is_refused_before_anything_runs(interpret):
    interpret(2, "ask_wrongly")


def test_a_kernel_that_names_what_there_is_not_is_told_so(interpret):
    interpret(2, "launch_wrongly")


def test_packets_may_be_a_block_of_two_dims(interpret):
    assert interpret(3, "exchange_blocks", 4) == [[]] * 3
