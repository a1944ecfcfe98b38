# SPDX-License-Identifier: Apache-2.0
"""Attention to keys that a schedule gathers, between real processes, against plain attention of the whole in fp64."""

import random
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.named_algorithms import make_schedule
from tests.collectives.joint.random_algorithms import random_schedule
from tests.differences import largest
from tests.ops.attention.whole import Case, draw_whole, find_differences

from stretto import ops
from stretto.collectives.algorithms import find
from stretto.ops import choices
from stretto.ops.joint.copies import CopiedRows

EXACT = 1e-10
NAMED = "direct-all-gather", "ring-all-gather", "recursive-doubling-all-gather"


def list_cases(ranks):
    total = 7 * ranks
    documents = (0, 3, total // 2 + 1, total // 2 + 2, total - 2, total)
    plain = Case(length=7, layout="contiguous")
    yield replace(plain, causal=False, has_sinks=True)
    yield replace(plain, documents=documents, has_sinks=True)
    yield replace(plain, window=5)
    yield Case(sizes=(8, 4), scale=0.3)
    yield Case(window=13, documents=(0, 5, 8 * ranks - 3, 8 * ranks))
    yield replace(plain, layout="balanced", documents=documents)


def differ(ranks, seed):
    """The cases and schedules whose results or gradients are wrong."""
    rng, found = random.Random(seed), []
    for case in list_cases(ranks):
        for schedule in (
            *NAMED,
            make_schedule("a user's", "all_gather_attention", ranks),
            random_schedule(rng, "all_gather_matmul", ranks, 3),
        ):
            differences = find_differences(case, "all_gather", schedule=schedule)
            if not largest(differences) <= EXACT:
                found.append((schedule if isinstance(schedule, str) else schedule.name, case, differences))
    return found


SEED = random.randrange(2**31)


@pytest.mark.long
@pytest.mark.parametrize("count", [*(pytest.param(count, marks=pytest.mark.exhaustive) for count in (2, 3)), 4])
def test_attention_by_any_schedule_is_that_of_the_whole_sequence(interpret, count):
    print(f"seed {SEED}")
    for rank, found in enumerate(interpret(count, differ, count, SEED)):
        assert not found, (rank, found)


MAKE_OTHERS = CopiedRows.make_others


def make_late(copied):
    """Send so late that whoever does not wait for it reads what was there before."""
    time.sleep(0.3 * dist.get_rank())
    MAKE_OTHERS(copied)


def check_calls():
    """Differences of a compiled call, one without atomic operations, what is refused, and whether a schedule ran."""
    case, found, ran = Case(sizes=(8, 4), has_sinks=True, length=6), [], []
    *inputs, _ = draw_whole(case, 12, torch.float32)
    *parts, sinks = inputs
    leaves = [*(each.chunk(2, 2)[dist.get_rank()].clone().requires_grad_() for each in parts), sinks.requires_grad_()]

    def wrap(kind, make):
        ran.append(kind)
        return make()

    def attend(q, k, v, sinks, schedule="ring-all-gather", **options):
        return ops.all_gather_attention(q, k, v, sinks=sinks, schedule=schedule, **case.options() | options)

    def run(function, **options):
        out = function(*leaves, **options)
        return torch.cat([one.flatten() for one in (out, *torch.autograd.grad(out.square().sum(), leaves))])

    plain = run(attend, schedule=None)
    found += [run(torch.compile(attend, backend="aot_eager", fullgraph=True)), run(attend, wrap_collective=wrap)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(choices.COPIES_VARIABLE, "1")
        choices.clear_choices()
        found.append(run(attend))
    with mock.patch.object(CopiedRows, "make_others", make_late):
        for instances in (1, 2):  # two schedules of one name
            schedule = find("direct-all-gather").compile(ranks=2, instances=instances)
            leaves[2] = (leaves[2] * 2).detach().requires_grad_()  # or what was there before would do
            late, right = (run(attend, schedule=one, causal=False) for one in (schedule, None))
            found.append(plain + late - right)
    refusals = []
    for schedule in ("ring-reduce-scatter", find("ring-all-gather").compile(ranks=3), 4):
        with pytest.raises(ValueError) as refusal:
            ops.all_gather_attention(*leaves[:3], schedule=schedule)
        refusals.append(str(refusal.value))
    return [float((one - plain).abs().max()) for one in found], ran, refusals


@pytest.mark.long
def test_calls_with_a_schedule_are_compiled_wrapped_and_refused(interpret):
    for differences, ran, refusals in interpret(2, check_calls):
        assert len(differences) == 5
        assert largest(differences) < 1e-4
        assert ran == ["all_gather", "all_to_all", "all_to_all"]  # forward by the schedule; backward as without one
        for refusal, words in zip(
            refusals,
            ("takes a schedule of an allgather", "a schedule of 3 ranks", "an algorithm's name or a Schedule"),
            strict=True,
        ):
            assert words in refusal


def refuse_where_nothing_is_interpreted():
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="cannot move keys by a schedule: on CPUs kernels are interpreted"):
        ops.all_gather_attention(q, q, q, schedule="ring-all-gather")


def test_a_schedule_where_no_kernel_runs_is_refused(ranks):
    ranks(2).run(refuse_where_nothing_is_interpreted)
