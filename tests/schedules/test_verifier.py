# SPDX-License-Identifier: Apache-2.0
"""The verifier against ranks that really wait for each other, on correct and on broken schedules."""

import random
from collections import Counter, defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.schedules.test_generators import numbers

from stretto.schedules import (
    Action,
    PipelineOperation,
    PipelineSchedule,
    ScheduleError,
    add_unshard_actions,
    buffers_needed,
    build_schedule,
    parse_csv,
    verify,
)


def runs(schedule, rng, buffers=None, in_order=True):
    """Check whether ranks that take turns at random compute everything once, with queues of so many messages."""
    queues, waiting = defaultdict(list), [deque() for _ in schedule.ranks]
    left = [deque(actions) for actions in schedule.ranks]
    done = Counter()
    owners, last = schedule.stage_ranks, schedule.stages - 1

    def step(rank):
        if waiting[rank]:
            channel, message = waiting[rank][0]
            if len(queues[channel]) == buffers:
                return False
            queues[channel].append(message)
            waiting[rank].popleft()
            return True
        if not left[rank]:
            return False
        stage, operation, n, _ = left[rank][0]
        forward = operation == "F"
        before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        kind = "F" if forward else "B"
        if operation == "W":
            if (stage, "I", n) not in done:
                return False
        else:
            if not forward and (stage, "F", n) not in done:
                return False
            if 0 <= before <= last and owners[before] == rank:
                if (before, kind, n) not in done and (before, "I" if kind == "B" else kind, n) not in done:
                    return False
            elif 0 <= before <= last:
                queue = queues[owners[before], rank, kind]
                if (stage, n) not in (queue[:1] if in_order else queue):
                    return False
                queue.remove((stage, n))
            if 0 <= after <= last and owners[after] != rank:
                waiting[rank].append(((rank, owners[after], kind), (after, n)))
        left[rank].popleft()
        done[stage, str(operation), n] += 1
        return True

    ranks = list(range(schedule.pipe))
    while any(step(rank) for rank in rng.sample(ranks, len(ranks))):
        pass
    return (
        not any(left)
        and not any(waiting)
        and not any(queues.values())
        and all(
            [done[s, x, n] for x in "FBIW"] in ([1, 1, 0, 0], [1, 0, 1, 1])
            for s in range(schedule.stages)
            for n in range(schedule.micro_batches)
        )
    )


def replace_rank(schedule, rank, actions):
    ranks = [*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]]
    return replace(schedule, ranks=tuple(ranks))


def is_verified(schedule, **limits):
    try:
        verify(schedule, **limits)
    except ScheduleError:
        return False
    return True


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(numbers(), st.integers(0, 2**32).map(random.Random), st.sampled_from(["delete", "duplicate", "swap", "move"]))
def test_a_changed_schedule_is_refused_exactly_if_it_cannot_run(arguments, rng, change):
    schedule = build_schedule(*arguments)
    # Overlapped pairs need their neighbours, so that a change of one would be refused for that alone.
    alone = (tuple(action._replace(overlaps_next=False) for action in actions) for actions in schedule.ranks)
    schedule = replace(schedule, ranks=tuple(alone))
    rank = rng.randrange(schedule.pipe)
    actions = list(schedule.ranks[rank])
    place, other = rng.randrange(len(actions)), rng.randrange(len(actions))
    match change:
        case "delete":
            del actions[place]
        case "duplicate":
            actions.insert(other, actions[place])
        case "swap":
            actions[place], actions[other] = actions[other], actions[place]
        case "move":
            actions.insert(other, actions.pop(place))
    changed = replace_rank(schedule, rank, actions)
    for buffers, delivery in ((None, "matched"), (None, "in_order"), (1, "in_order"), (2, "matched")):
        expected = runs(changed, rng, buffers, in_order=delivery == "in_order")
        assert is_verified(changed, buffers=buffers, delivery=delivery) == expected
        assert not (expected and change in ("delete", "duplicate"))


@settings(max_examples=50, deadline=None)
@given(numbers(), st.integers(0, 2**32).map(random.Random))
def test_an_action_on_another_rank_is_refused(arguments, rng):
    schedule = build_schedule(*arguments)
    source, target = rng.randrange(schedule.pipe), rng.randrange(schedule.pipe)
    actions = list(schedule.ranks[source])
    action = actions.pop(rng.randrange(len(actions)))._replace(overlaps_next=False)
    moved = replace_rank(schedule, source, actions)
    moved = replace_rank(moved, target, [action, *moved.ranks[target]])
    if source != target:
        with pytest.raises(ScheduleError):
            verify(moved)


TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock: rank 1, action 1 (1F1) waits for 0F1 on rank 0; rank 0"),
        ("0B0,0F0\n1F0,1B0", "rank 0, action 0 (0B0): it comes before 0F0, which it needs"),
        ("0F0,0W0,0I0\n1F0,1B0", "rank 0, action 1 (0W0): it comes before 0I0, which it needs"),
        ("0F0,0I0\n1F0,1B0", "rank 0: 0W0 is missing after 0I0"),
        ("0F0,0W0\n1F0,1B0", "rank 0, action 1 (0W0): it comes before 0I0"),
        ("0F0,0I0,0W0,0W0\n1F0,1B0", "rank 0, action 3 (0W0): it comes a second time"),
        ("0F0,0B0,0W0\n1F0,1B0", "rank 0, action 2 (0W0): 0B0 has computed the weights' gradients already"),
        ("0F0,0B0,0I0\n1F0,1B0", "(0I0): the input's gradient is computed a second time, after 0B0"),
        ("0F0,0I0,0B0\n1F0,1B0", "(0B0): the input's gradient is computed a second time, after 0I0"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0", "rank 1: 1F1 is missing"),
        ("0F0,0B0\n1F0,1B0,1F1,1B1", "rank 0: 0F1 is missing, and 1F1 waits for its output"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1", "1B1, or 1I1 and 1W1, is missing, and stage 0 waits for its gradient"),
        ("0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0", "rank 1, action 0 (1F1): the next activations from rank 0 are for "
         'stage 1, micro-batch 0, since messages come in the order sent; delivery="matched" would do'),
        ("0UNSHARD,0F0,0RESHARD,0B0", "(0B0): the weights of stage 0 are not gathered here: it needs UNSHARD before"),
        ("0UNSHARD,0F0,0UNSHARD,0B0", "(0UNSHARD): the weights of stage 0 are gathered already"),
        ("0UNSHARD,0F0,0B0", "rank 0: the weights of stage 0 are not freed: it needs RESHARD"),
        ("0RESHARD,0F0,0B0", "(0RESHARD): the weights of stage 0 are not gathered"),
    ],
)  # fmt: skip
def test_errors_name_the_rank_the_action_and_the_rule(text, message):
    with pytest.raises(ScheduleError) as error:
        verify(parse_csv(text))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_ranks": (1, 0)}, "rank 0, action 0 (0F0): stage 0 is on rank 1"),
        ({"stage_ranks": (0,)}, "rank 1, action 0 (1F0): stages are 0 to 0"),
        ({"stage_ranks": (0, 2)}, "stage 1 is on rank 2, but ranks are 0 to 1"),
        ({"micro_batches": 1}, "rank 0, action 1 (0F1): micro-batches are 0 to 0"),
        ({"micro_batches": 3}, "rank 0: 0F2 is missing"),
        ({"micro_batches": 0}, "0 micro-batches, but must have at least 1 of each"),
        ({"ranks": ()}, "has 0 ranks"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ScheduleError) as error:
        verify(replace(parse_csv(TWO), **change))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((Action(0, "F"),), "micro-batches are 0 to 0"),
        ((Action(0, "UNSHARD", 0),), "UNSHARD is for all micro-batches"),
        ((Action(0, "F", 0, True), Action(0, "W", 0)), "an overlapped pair is an F and then a B"),
        ((Action(0, "F", 0), Action(0, "B", 0, True)), "an overlapped pair is an F and then a B"),
    ],
)
def test_actions_that_make_no_sense_are_refused(actions, message):
    typed = tuple(action._replace(operation=PipelineOperation(action.operation)) for action in actions)
    with pytest.raises(ScheduleError, match=message):
        verify(PipelineSchedule("odd", (0,), 1, (typed,)))


def test_deadlock_for_want_of_buffers_is_found():
    """Each rank computes two forward passes more than 1F1B before it takes a gradient."""
    schedule = build_schedule("1f1b", 2, 8, extra_warm_up=2)
    verify(schedule, buffers=2)
    assert buffers_needed(schedule) == 2
    with pytest.raises(ScheduleError, match=r"rank 1, action 3 \(1B1\) waits for one of 1 buffer for gradients"):
        verify(schedule, buffers=1)


def test_both_messages_of_an_overlapped_pair_must_be_there_before_it_starts():
    """The gradient of 1B0 depends on 0F1, of the pair that it would be in."""
    text = "0F0,{}\n1F0,1F1,1B0,1B1"
    verify(parse_csv(text.format("0F1,0B0,0B1")))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 1, action 1 \(1F1\) waits for 0F1 on rank 0; rank 0"):
        verify(parse_csv(text.format("(0F1;0B0)OVERLAP_F_B,0B1")))


def test_more_live_micro_batches_than_memory_are_refused():
    schedule = build_schedule("1f1b", 4, 8)
    verify(schedule, max_live=4)
    verify(schedule, max_live=(4, 3, 2, 1))
    with pytest.raises(ScheduleError, match=r"action 2 \(1F2\): 3 micro-batches would be live, but max_live is 2"):
        verify(schedule, max_live=(4, 2, 2, 1))
    with pytest.raises(ValueError, match="max_live has 1 limits, but the schedule has 4 ranks"):
        verify(schedule, max_live=(4,))


def test_limits_that_make_no_sense_are_refused():
    schedule = parse_csv(TWO)
    with pytest.raises(ValueError, match="buffers is 0, but a channel needs at least 1"):
        verify(schedule, buffers=0)
    with pytest.raises(ValueError, match="delivery is 'random', but must be one of in_order, matched"):
        verify(schedule, delivery="random")


def test_weights_that_are_gathered_once_verify():
    schedule = add_unshard_actions(build_schedule("dualpipe-v", 3, 7), ahead=random.Random(1).randrange(5))
    verify(schedule, buffers=1)
