# SPDX-License-Identifier: Apache-2.0
"""Operators of ranks that lose each other, by interpreted kernels: who is told, and what the next call finds."""

import pytest


@pytest.mark.parametrize("way", ["two shots", "pushes"])
def test_a_missed_call_is_raised_by_every_later_call_of_the_process_until_its_group_has_ended(interpret, way):
    said, nothing = interpret(2, "miss_a_call", way, module="failure_programs")
    assert nothing == []
    assert len(said) == 5
    for text in said:
        assert "waited in vain for rank 1" in text, said
        assert "rank 0 of 2" in text
        assert "1.5 s" in text  # the limit of the group that failed


def test_a_rank_may_be_as_late_as_its_group_allows_and_no_later(interpret):
    assert interpret(2, "come_late", 30.0, 2.0, module="failure_programs") == [True, True]
    first, second = interpret(2, "come_late", 1.0, 2.5, module="failure_programs")
    assert "waited in vain for rank 1" in first
    assert ", 1 s" in first
    assert second is not True  # what rank 0 gave up is not sent: rank 1 is told, and gets no sum


@pytest.mark.parametrize(
    "way",
    ["one shot", "two shots", "scattered packets", "tiles", "tiles by copies", "pushes", "pulls", "copies"],
)
def test_a_call_that_failed_half_way_on_all_ranks_does_not_harm_the_next(interpret, way):
    for results in interpret(2, "fail_half_way", way, module="failure_programs"):
        assert all(found == [True] * 3 for found in results.values()), results
        assert results


def test_programs_that_join_sums_have_a_counter_each(interpret):
    ((programs, arrivals),) = interpret(1, "launch_many_programs", module="failure_programs")
    assert arrivals == 0 or programs <= arrivals
