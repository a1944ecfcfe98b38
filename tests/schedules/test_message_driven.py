# SPDX-License-Identifier: Apache-2.0
"""Message-driven order: the policy step by step, and the times that it leads to."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.schedules import (
    MessageDrivenPolicy,
    PipelineOperation,
    ScheduleError,
    StageCosts,
    StageLinks,
    build_schedule,
    live_micro_batches,
    simulate,
    simulate_message_driven,
    verify,
)

F, B = PipelineOperation.FORWARD, PipelineOperation.BACKWARD


def take(policy):
    action = policy.next()
    return None if action is None else str(action)


def test_the_first_stage_lets_in_as_many_micro_batches_as_the_limit_and_one_more_for_each_gradient():
    policy = MessageDrivenPolicy(0, 3, micro_batches=4, limit=2)
    assert [take(policy) for _ in range(3)] == ["0F0", "0F1", None]
    policy.arrive(B, 0)
    assert [take(policy) for _ in range(3)] == ["0B0", "0F2", None]
    policy.arrive(B, 1)
    policy.arrive(B, 2)
    assert [take(policy) for _ in range(4)] == ["0B1", "0F3", "0B2", None]  # line 24 finds none left
    policy.arrive(B, 3)
    assert (take(policy), take(policy), policy.is_done, policy.live) == ("0B3", None, True, 0)


@pytest.mark.parametrize(
    ("serve_first", "order"),
    [("arrival", "1B0 1F2 1B1 1F3"), ("backward", "1B0 1B1 1F2 1F3"), ("forward", "1F2 1F3 1B0 1B1")],
)
def test_an_inner_stage_serves_messages_in_the_order_that_was_asked_for(serve_first, order):
    policy = MessageDrivenPolicy(1, 3, micro_batches=4, limit=4, serve_first=serve_first)
    for n in (0, 1):
        policy.arrive(F, n)
        assert take(policy) == f"1F{n}"
    for operation, n in ((B, 0), (F, 2), (B, 1), (F, 3)):
        policy.arrive(operation, n)
    assert " ".join(take(policy) for _ in range(4)) == order
    assert take(policy) is None


@pytest.mark.parametrize(
    ("serve_first", "order"),
    [("arrival", "0B0 0F2 0B1 0F3"), ("backward", "0B0 0B1 0F2 0F3"), ("forward", "0B0 0F2 0B1 0F3")],
)
def test_the_first_stage_lets_in_before_or_after_the_gradients_that_wait(serve_first, order):
    policy = MessageDrivenPolicy(0, 3, micro_batches=4, limit=2, serve_first=serve_first)
    assert [take(policy), take(policy)] == ["0F0", "0F1"]
    policy.arrive(B, 0)
    policy.arrive(B, 1)
    assert " ".join(take(policy) for _ in range(4)) == order


def test_the_last_stage_computes_a_backward_pass_right_after_its_forward_pass():
    policy = MessageDrivenPolicy(2, 3, micro_batches=2, limit=3, serve_first="forward")
    policy.arrive(F, 0)
    policy.arrive(F, 1)
    assert [take(policy) for _ in range(5)] == ["2F0", "2B0", "2F1", "2B1", None]
    assert policy.is_done


def test_one_stage_needs_no_messages():
    policy = MessageDrivenPolicy(0, 1, micro_batches=2, limit=1)
    assert [take(policy) for _ in range(5)] == ["0F0", "0B0", "0F1", "0B1", None]


@pytest.mark.parametrize(
    ("stage", "message", "error"),
    [
        (0, (F, 0), "stage 0 gets no message F0"),
        (2, (B, 0), "stage 2 gets no message B0"),
        (1, (F, 4), "stage 1 gets no message F4"),
        (1, (F, -1), "stage 1 gets no message F-1"),
        (1, (PipelineOperation.BACKWARD_WEIGHT, 0), "stage 1 gets no message W0"),
    ],
)
def test_messages_that_a_stage_does_not_get_are_refused(stage, message, error):
    with pytest.raises(ScheduleError, match=error):
        MessageDrivenPolicy(stage, 3, micro_batches=4, limit=4).arrive(*message)


def test_a_duplicate_message_raises():
    policy = MessageDrivenPolicy(1, 3, micro_batches=4, limit=4)
    policy.arrive(F, 0)
    with pytest.raises(ScheduleError, match="stage 1 gets message F0 a second time"):
        policy.arrive(F, 0)


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ((0, 0, 1, 1), "stages is 0, but must be at least 1"),
        ((3, 3, 1, 1), "stage is 3, but stages are 0 to 2"),
        ((0, 3, 0, 1), "micro_batches is 0, but must be at least 1"),
        ((0, 3, 1, 0), "limit is 0, but must be at least 1"),
        ((0, 3, 1, 1, "random"), "serve_first is 'random', but must be one of arrival, backward, forward"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(numbers, error):
    with pytest.raises(ScheduleError, match=error):
        MessageDrivenPolicy(*numbers)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from(["arrival", "backward", "forward"]),
    st.sampled_from(["backward", "forward"]),
    st.integers(0, 2**32).map(random.Random),
)
def test_the_resulting_order_is_a_schedule_with_the_same_times(stages, count, limit, serve_first, ties, rng):
    costs = StageCosts(*(tuple(float(rng.randint(1, 5)) for _ in range(stages)) for _ in range(3)))
    options = {"jitter": rng.choice([0, 0.5]), "seed": rng.randrange(100)}
    links = StageLinks(rng.randint(0, 3), rng.randint(0, 2))
    timeline = simulate_message_driven(count, costs, links, limit=limit, serve_first=serve_first, ties=ties, **options)
    verify(timeline.schedule, max_live=min(limit, count), delivery="matched")
    again = simulate(timeline.schedule, costs, links, **options)
    assert again.starts == timeline.starts
    assert again.ends == timeline.ends


def message_driven(micro_batches, latency=0.0, **options):
    """The issue's model: eight stages, F = 1, B = 2."""
    return simulate_message_driven(micro_batches, StageCosts.uniform(8), StageLinks(latency), **options)


def test_order_of_arrival_is_slower_than_1f1b_and_backward_first_is_not():
    assert simulate(build_schedule("1f1b", 8, 32), StageCosts.uniform(8)).makespan == 117
    assert message_driven(32, ties="backward").makespan == 126
    assert message_driven(32, ties="forward").makespan == 124
    assert message_driven(32, serve_first="backward").makespan == 117


def test_where_chance_breaks_ties_order_of_arrival_is_still_slower():
    """Messages that would arrive at the same moment arrive in either order where units differ by a millionth."""
    spans = [message_driven(32, jitter=1e-6, seed=seed).makespan for seed in range(20)]
    assert 120.9 < min(spans) < max(spans) < 136
    assert len({round(span) for span in spans}) > 3


@pytest.mark.parametrize("serve_first", ["arrival", "backward", "forward"])
def test_twice_the_limit_hides_latency(serve_first):
    timeline = message_driven(64, 0.25, limit=16, serve_first=serve_first)
    assert timeline.makespan == 216.5
    assert max(live_micro_batches(timeline.schedule).ranks) <= 16


def test_with_one_micro_batch_at_a_time_the_pipeline_is_sequential():
    assert message_driven(5, limit=1).makespan == 5 * 8 * 3


def test_costs_of_no_stage_are_refused():
    with pytest.raises(ValueError, match="the costs are of no stage"):
        simulate_message_driven(1, StageCosts((), (), ()))
