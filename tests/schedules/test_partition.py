# SPDX-License-Identifier: Apache-2.0
"""Cuts of a model into stages, beside all cuts there are."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.schedules import partition


def costs_of(cuts, costs, first, last):
    stages = [sum(costs[start:end]) for start, end in itertools.pairwise(cuts)]
    stages[0] += first
    stages[-1] += last
    return stages


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9), st.sampled_from([0.1, 0.7, 1e-9, 1e9])), min_size=1, max_size=9),
    st.integers(1, 9),
    st.sampled_from([0, 0.5, 4]),
    st.sampled_from([0, 0.5, 4]),
)
def test_the_largest_stage_is_as_small_as_of_all_cuts(costs, stages, first, last):
    stages = min(stages, len(costs))
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(max(costs_of((0, *cuts, len(costs)), costs, first, last)) for cuts in every)
    cuts = partition(costs, stages, first, last)
    assert max(costs_of(cuts, costs, first, last)) == pytest.approx(best, rel=1e-12)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(costs), stages + 1)
    assert all(start < end for start, end in itertools.pairwise(cuts))


def test_equal_items_are_spread_evenly():
    assert partition([1] * 10, 4) == (0, 2, 5, 7, 10)
    assert partition([1] * 12, 4) == (0, 3, 6, 9, 12)


def test_sums_that_differ_by_their_last_bit_alone_are_distinguished():
    """0.7 + 0.7 and (0.7 + 0.7 + 0.7) - 0.7 are neighbouring numbers, with no other between them to try."""
    assert partition([0.7] * 3, 2) in ((0, 1, 3), (0, 2, 3))


def test_embedding_and_head_take_blocks_off_the_ends():
    assert partition([1] * 16, 4, first=1, last=3) == (0, 4, 9, 14, 16)


def test_a_thousand_items_are_cut():
    rng = random.Random(7)
    costs = [rng.random() for _ in range(1000)]
    cuts = partition(costs, 64)
    assert max(costs_of(cuts, costs, 0, 0)) < 1.05 * sum(costs) / 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], 3), "2 items cannot be cut into 3 stages, each with at least one; 2 would do"),
        (([1, 2], 0), "2 items cannot be cut into 0 stages"),
        (([], 1), "0 items cannot be cut into 1 stages"),
        (([1, -2], 1), r"costs\[1\] is -2, but must be at least 0 and finite"),
        (([1, float("nan")], 1), r"costs\[1\] is nan"),
        (([1], 1, -1), "first is -1"),
        (([1], 1, 0, float("inf")), "last is inf"),
    ],
)
def test_impossible_partitions_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition(*arguments)
