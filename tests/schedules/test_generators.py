# SPDX-License-Identifier: Apache-2.0
"""Generated schedules, beside those that torch generates."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.torch_oracle import build_with_torch

from stretto.schedules import (
    SCHEDULES,
    Action,
    PipelineOperation,
    PipelineSchedule,
    ScheduleError,
    StageCosts,
    add_unshard_actions,
    buffers_needed,
    build_schedule,
    live_micro_batches,
    peak_activations,
    simulate,
    verify,
)


@st.composite
def numbers(draw):
    """The arguments of `build_schedule`, such that a schedule takes them."""
    name = draw(st.sampled_from(SCHEDULES))
    pipe = draw(st.integers(1, 6))
    least = 2 * pipe if name == "dualpipe-v" else 1
    micro_batches = draw(st.integers(least, least + 14))
    virtual_stages = None
    if name == "interleaved":
        virtual_stages = draw(st.integers(2, 4))
        micro_batches -= micro_batches % max(1, micro_batches // pipe)
    extra = draw(st.integers(0, 2 * pipe)) if name == "1f1b" else 0
    return name, pipe, micro_batches, virtual_stages, extra


@settings(max_examples=50, deadline=None)
@given(numbers())
def test_every_generated_schedule_verifies_with_few_buffers_a_channel(arguments):
    name, pipe, micro_batches, _, extra = arguments
    schedule = build_schedule(*arguments)
    buffers = 1
    if name == "interleaved":  # rounds of more micro-batches than ranks
        buffers += max(0, micro_batches // max(1, micro_batches // pipe) - pipe)
    if extra >= pipe > 1:  # more than twice the warm-up
        buffers += math.ceil((extra - (pipe - 1)) / (2 * (pipe - 1)))
    verify(schedule, buffers=buffers, max_live=live_micro_batches(schedule).ranks)
    verify(add_unshard_actions(schedule), buffers=buffers, delivery="matched")
    assert buffers_needed(schedule) <= buffers


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2)])
@pytest.mark.parametrize("pipe", [2, 4, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_takes_longer_than_torchs(name, pipe, times):
    virtual_stages = {"interleaved": 3, "zb-v": 2, "dualpipe-v": 2}.get(name, 1)
    ours = build_schedule(name, pipe, 4 * pipe, virtual_stages)
    theirs = PipelineSchedule(
        "torch", ours.stage_ranks, ours.micro_batches, build_with_torch(name, pipe, 4 * pipe, virtual_stages)
    )
    verify(theirs)
    costs = StageCosts.uniform(ours.stages, *times)
    assert simulate(ours, costs).makespan <= simulate(theirs, costs).makespan
    assert max(live_micro_batches(ours).ranks) <= max(live_micro_batches(theirs).ranks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "dualpipe-v"])
def test_orders_are_torchs(name):
    virtual_stages = {"interleaved": 2, "dualpipe-v": 2}.get(name, 1)
    assert build_schedule(name, 4, 16, virtual_stages).ranks == build_with_torch(name, 4, 16, virtual_stages)


def test_1f1b_computes_what_the_papers_picture_shows():
    """Singh, figure 4.3: three stages, five micro-batches."""
    schedule = build_schedule("1f1b", 3, 5)
    assert [" ".join(map(str, actions)) for actions in schedule.ranks] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ]


def test_extra_warm_up_falls_with_the_distance_to_the_last_rank():
    def leading_forwards(extra):
        schedule = build_schedule("1f1b", 4, 32, extra_warm_up=extra)
        first = (next(i for i, action in enumerate(own) if action.operation == "B") for own in schedule.ranks)
        return list(first)

    assert leading_forwards(0) == [4, 3, 2, 1]
    assert leading_forwards(3) == [7, 5, 3, 1]  # the warm-up doubled
    assert leading_forwards(1) == [5, 4, 3, 1]
    assert leading_forwards(1000) == [32, 32, 32, 1]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("gpipe", [16] * 4),
        ("1f1b", [4, 3, 2, 1]),
        ("interleaved", [11, 9, 7, 5]),  # of half as large stages
        ("zb-h1", [4] * 4),
        ("zb-v", [8] * 4),  # of half as large stages: 1F1B's most, on every rank
        ("dualpipe-v", [9] * 4),
    ],
)
def test_schedules_keep_as_many_micro_batches_as_in_their_papers(name, most):
    assert list(live_micro_batches(build_schedule(name, 4, 16)).ranks) == most


def test_live_micro_batches_are_counted_by_stage_and_until_their_weight_gradients():
    schedule = build_schedule("zb-v", 2, 8)
    live = live_micro_batches(schedule)
    assert live.stages == (4, 3, 2, 1)
    split = PipelineSchedule(
        "split", (0,), 2, (tuple(Action(0, PipelineOperation(x), n) for x in "FIW" for n in (0, 1)),)
    )
    assert live_micro_batches(split).ranks == (2,)


def test_activations_kept_for_weight_gradients_may_be_fewer():
    schedule = build_schedule("zb-h1", 4, 16)
    assert peak_activations(schedule, [10, 10, 10, 100]) == (40, 40, 40, 400)
    # Rank r keeps 4 - r micro-batches whole, and r that wait for their weight gradients.
    assert peak_activations(schedule, [10] * 4, [3] * 4) == (40, 33, 26, 19)
    assert peak_activations(build_schedule("1f1b", 4, 16), [10] * 4, [3] * 4) == (40, 30, 20, 10)
    with pytest.raises(ValueError, match="for_weights has the sizes of 1 stages, but the schedule has 4"):
        peak_activations(schedule, [10] * 4, [3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1p", 4, 8), "'1f1p' is not known; did you mean '1f1b'"),
        (("1f1b", 0, 8), "pipe is 0, but must be at least 1"),
        (("1f1b", 4, 0), "micro_batches is 0, but must be at least 1"),
        (("1f1b", 4, 8, 2), "1f1b has 1 stages on each rank, not 2; 1 would do, or schedule interleaved"),
        (("1f1b", 4, 8, 1, -1), "extra_warm_up is -1, but must be at least 0"),
        (("gpipe", 4, 8, 1, 2), "extra_warm_up is 2, but gpipe takes none; schedule 1f1b would do, or 0"),
        (
            ("interleaved", 4, 8, 1),
            "interleaved has 2 or more stages on each rank, not 1; 2 would do, or schedule 1f1b",
        ),
        (("interleaved", 4, 9), "which 9 micro-batches are not; 8 or 10 would do"),
        (("zb-v", 4, 8, 3), "zb-v has 2 stages on each rank, not 3; 2 would do"),
        (("dualpipe-v", 4, 7), "at least as many micro-batches as stages, 8, not 7; 8 would do, or pipe 3"),
        (("zb-h1", 64, 10**9), "are more than 16777216 actions; 87381 micro-batches would do"),
    ],
)
def test_errors_of_invalid_numbers_name_valid_ones(arguments, message):
    with pytest.raises(ValueError) as error:
        build_schedule(*arguments)
    assert message in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 60))
def test_the_numbers_that_would_do_for_interleaved_do(pipe, micro_batches):
    try:
        build_schedule("interleaved", pipe, micro_batches)
    except ScheduleError as error:
        text = str(error).rpartition("; ")[2].removesuffix(" would do")
        fewer, more = map(int, text.split(" or "))
        assert fewer < micro_batches < more
        for each in (fewer, more):
            verify(build_schedule("interleaved", pipe, each))


def test_weights_are_gathered_once_a_step_under_the_actions_before_their_first_use():
    schedule = add_unshard_actions(build_schedule("interleaved", 2, 4), ahead=1)
    words = " ".join(map(str, schedule.ranks[0]))
    assert words.startswith("0UNSHARD 0F0 2UNSHARD 0F1 2F0")
    assert words.count("UNSHARD") == words.count("RESHARD") == 2
    assert words.endswith("0B3 0RESHARD")
    with pytest.raises(ScheduleError, match="has UNSHARD or RESHARD actions already"):
        add_unshard_actions(schedule)
    with pytest.raises(ValueError, match="ahead is -1, but must be at least 0"):
        add_unshard_actions(build_schedule("1f1b", 2, 4), ahead=-1)
