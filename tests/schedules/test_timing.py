# SPDX-License-Identifier: Apache-2.0
"""The timing model, beside the papers' numbers, the closed forms and a clock that ticks."""

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.bubbles import bubble_time
from tests.schedules.test_generators import numbers

from stretto.schedules import SCHEDULES, ScheduleError, StageCosts, StageLinks, build_schedule, parse_csv, simulate


def uniform(schedule, *times, **options):
    return simulate(schedule, StageCosts.uniform(schedule.stages, *times, **options))


def test_figure_4_3_takes_21_units_of_which_each_rank_waits_6():
    timeline = uniform(build_schedule("1f1b", 3, 5))  # F = 1, B = 2
    assert timeline.makespan == 21
    assert timeline.idle == (6, 6, 6)
    assert timeline.bubble == pytest.approx(6 / 21)


def tick(schedule, costs, latency):
    """The makespan by a clock that ticks once a unit: whole numbers alone. Nothing is computed at once."""
    duration = {"F": costs.forward, "B": costs.whole_backward(), "I": costs.backward_input, "W": costs.backward_weight}
    ended, free, left = {}, [0] * schedule.pipe, [list(actions) for actions in schedule.ranks]
    now = 0
    while any(left):
        for rank in range(schedule.pipe):
            while left[rank] and free[rank] <= now:
                stage, operation, n, _ = left[rank][0]
                source = {"F": stage - 1, "B": stage + 1, "I": stage + 1, "W": -1}[operation]
                if 0 <= source < schedule.stages:
                    far = latency if schedule.stage_ranks[source] != rank else 0
                    kinds = "F" if operation == "F" else "BI"
                    if not any(ended.get((source, kind, n), now + 1) + far <= now for kind in kinds):
                        break
                left[rank].pop(0)
                free[rank] = now + duration[operation][stage]
                ended[stage, str(operation), n] = free[rank]
        now += 1
    return max(free)


@settings(max_examples=60, deadline=None)
@given(numbers(), st.integers(0, 2**32).map(random.Random))
def test_makespans_are_those_of_a_clock_that_ticks(arguments, rng):
    schedule = build_schedule(*arguments)
    costs = StageCosts(*(tuple(rng.randint(1, 5) for _ in range(schedule.stages)) for _ in range(3)))
    latency = rng.randint(0, 4)
    assert simulate(schedule, costs, StageLinks(latency)).makespan == tick(schedule, costs, latency)


@settings(max_examples=150, deadline=None)
@given(numbers(), st.integers(0, 2**32).map(random.Random))
def test_bubbles_are_the_closed_forms(arguments, rng):
    name, pipe, micro_batches, virtual_stages, _ = arguments
    f = i = w = rng.randint(1, 6)
    if name not in ("zb-v", "dualpipe-v"):
        f, i, w = (rng.randint(1, 6) for _ in range(3))
    elif name == "dualpipe-v":
        w = rng.randint(1, 6)
    schedule = build_schedule(*arguments)
    found = bubble_time(
        name, pipe, micro_batches, forward=f, backward_input=i, backward_weight=w, virtual_stages=virtual_stages
    )
    timeline = uniform(schedule, f, i, w)
    assert max(timeline.idle) == found
    assert timeline.makespan == micro_batches * schedule.virtual_stages * (f + i + w) + found


def test_interleaving_divides_the_bubble_by_the_virtual_stages():
    plain = uniform(build_schedule("1f1b", 4, 16), 6, 6, 6)
    interleaved = uniform(build_schedule("interleaved", 4, 16, 3), 2, 2, 2)
    assert plain.idle == (54,) * 4
    assert interleaved.idle == (18,) * 4


def test_zb_h1_waits_for_f_plus_input_gradient_minus_weight_gradient():
    assert max(uniform(build_schedule("zb-h1", 4, 16), 3, 4, 2).idle) == 3 * (3 + 4 - 2)


@pytest.mark.parametrize("pipe", [2, 4, 7])
def test_zb_v_has_no_bubble_between_a_ranks_first_and_last_unit(pipe):
    fewest = 2 * pipe - 1
    for micro_batches in (fewest, fewest + 5):
        timeline = uniform(build_schedule("zb-v", pipe, micro_batches))
        assert timeline.inner_idle == (0,) * pipe
        assert timeline.makespan == 6 * micro_batches + pipe - 1
        # Steps follow each other without a bubble, unless all ranks wait for the norm of all gradients.
        assert timeline.period == 6 * micro_batches
        assert timeline.makespan - timeline.period == pipe - 1
    assert max(uniform(build_schedule("zb-v", pipe, fewest - 1)).inner_idle) > 0


@pytest.mark.parametrize("saved", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize(("f", "w"), [(1, 1), (4, 1), (3, 2)])
def test_dualpipe_v_waits_as_long_as_in_its_paper(f, w, saved):
    backward = f + w
    overlapped = f + backward - saved * f
    for pipe in (1, 2, 4, 5):
        timeline = uniform(build_schedule("dualpipe-v", pipe, 2 * pipe + 3), f, f, w, overlapped=overlapped)
        expected = (pipe - 1) * (overlapped + backward - 3 * w)
        assert max(timeline.idle) == pytest.approx(expected)
        assert bubble_time(
            "dualpipe-v", pipe, 2 * pipe + 3, forward=f, backward_input=f, backward_weight=w, overlapped=overlapped
        ) == pytest.approx(expected)


def test_an_overlapped_pair_starts_with_both_messages_and_sends_when_both_passes_have_ended():
    schedule = parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1")
    at_once = uniform(schedule, overlapped=2.5)
    assert at_once.starts[0][1] == 4  # the gradient for 0B0 is there; the input of 0F1 was there before
    assert at_once.ends[0][2] == 4 + 2.5
    assert at_once.starts[1][2] == 4 + 2.5  # of 1F1, which needs the output of 0F1
    in_turn = uniform(schedule)
    assert (in_turn.starts[0][1], in_turn.starts[0][2], in_turn.starts[1][2]) == (1, 4, 4)


def test_extra_warm_up_hides_latency():
    """Eight stages, 64 micro-batches, F = 1, B = 2, a latency of a quarter of F."""
    costs, links = StageCosts.uniform(8), StageLinks(0.25)
    assert simulate(build_schedule("1f1b", 8, 64), costs, links).makespan == 244
    assert simulate(build_schedule("1f1b", 8, 64, extra_warm_up=7), costs, links).makespan == 216.5


def test_messages_of_a_channel_follow_each_other_and_do_not_occupy_the_rank():
    """Two forward passes of 1 unit, each message 3 on the link and 1 more until it is there."""
    schedule = parse_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")
    timeline = simulate(schedule, StageCosts((1, 1), (1, 1), (0, 0)), StageLinks(latency=1, transmission=3))
    assert timeline.starts[0][:2] == (0, 1)  # the second does not wait for the first message to leave
    assert timeline.starts[1][:2] == (1 + 3 + 1, 1 + 3 + 3 + 1)
    # The other direction is another channel.
    assert timeline.starts[1][2:] == (9, 10)
    assert timeline.starts[0][2:] == (10 + 3 + 1, 10 + 3 + 3 + 1)


def test_links_may_differ_and_stages_of_one_rank_need_none():
    schedule = build_schedule("zb-v", 2, 1)
    costs = StageCosts.uniform(4)
    plain = simulate(schedule, costs).makespan
    assert simulate(schedule, costs, StageLinks((10.0, 1000.0, 7.0))).makespan == plain + 2 * (10 + 7)
    with pytest.raises(ValueError, match="latency has 2 times, but 4 stages have 3 pairs of neighbours"):
        simulate(schedule, costs, StageLinks((1.0, 1.0)))
    with pytest.raises(ValueError, match="transmission is -1, but must be at least 0 and finite"):
        simulate(schedule, costs, StageLinks(transmission=-1))


def test_jitter_is_seeded_and_the_same_for_each_unit_whatever_the_order():
    costs = StageCosts.uniform(4, backward_weight=0)
    lengths = []
    for name in ("1f1b", "gpipe"):
        timeline = simulate(build_schedule(name, 4, 8), costs, jitter=0.5, seed=3)
        lengths.append(
            {
                action: end - start
                for rank, actions in enumerate(timeline.schedule.ranks)
                for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True)
            }
        )
    assert lengths[0].keys() == lengths[1].keys()
    assert all(lengths[0][action] == pytest.approx(lengths[1][action]) for action in lengths[0])
    spread = list(lengths[0].values())
    assert 0.5 <= min(spread) < 0.6 < 1.4 < max(spread) <= 1.5
    assert statistics.mean(spread) == pytest.approx(1, abs=0.15)
    other = simulate(build_schedule("1f1b", 4, 8), costs, jitter=0.5, seed=4)
    assert other.makespan != simulate(build_schedule("1f1b", 4, 8), costs, jitter=0.5, seed=3).makespan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StageCosts((1,), (1, 1), (1,)), "backward_input has the times of 2 stages, but forward those of 1"),
        (lambda: StageCosts((1, float("nan")), (1, 1), (1, 1)), "forward of stage 1 takes nan"),
        (lambda: StageCosts.uniform(2, backward=-1), "backward of stage 0 takes -1, but must be at least 0 and finite"),
        (lambda: simulate(build_schedule("1f1b", 2, 2), StageCosts.uniform(3)), "of 3 stages, but the schedule has 2"),
        (lambda: simulate(build_schedule("1f1b", 2, 2), StageCosts.uniform(2), jitter=2), "jitter is 2, but must be"),
    ],
)
def test_times_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_that_deadlocks_is_not_timed():
    with pytest.raises(ScheduleError, match=r"schedule deadlocks; verify\(\) lists"):
        uniform(parse_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))


def test_units_are_those_of_the_costs():
    for name in SCHEDULES:
        schedule = build_schedule(name, 4, 8)
        seconds = uniform(schedule, 0.25, 0.5, 0.125)
        assert uniform(schedule, 2, 4, 1).makespan == 8 * seconds.makespan
