# SPDX-License-Identifier: Apache-2.0
"""STRETTO_DEBUG=1: ranks that call different things all raise at once, and what is right is never refused."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.collectives.backend import operations

from stretto.collectives import install
from stretto.collectives.algorithms import find
from stretto.collectives.backend import debug_check
from stretto.memory import PeerError
from stretto.memory.groups import set_timeout


def make_group(debug="1", **options):
    """A group of the backend that is made with STRETTO_DEBUG set so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_DEBUG", debug)
        return dist.new_group(backend="stretto", **options)


def call_different_things(by_schedule):
    """A rank's errors, call by call; the call after each is right. by_schedule: small all-reduces run by one."""
    rank = dist.get_rank()
    group = make_group()
    if by_schedule:
        install(find("ring-all-reduce").compile(ranks=2), group, max_bytes=16)
    four = torch.ones(4)
    cases = (
        (lambda: dist.all_reduce(four, group=group), lambda: dist.broadcast(four, 0, group)),
        (lambda: dist.all_reduce(four, group=group), lambda: dist.all_reduce(torch.ones(6), group=group)),
        (lambda: dist.all_reduce(four, group=group), lambda: dist.all_reduce(torch.ones(2, 2), group=group)),
        (lambda: dist.all_reduce(four, group=group), lambda: dist.all_reduce(four.int(), group=group)),
        (lambda: dist.all_reduce(four, group=group), lambda: dist.all_reduce(four, dist.ReduceOp.MAX, group)),
        (lambda: dist.broadcast(four, 0, group), lambda: dist.broadcast(four, 1, group)),
        (lambda: dist.barrier(group), lambda: dist.all_gather([four, four.clone()], four, group)),
        (
            lambda: dist.all_to_all_single(torch.empty(4), four, group=group),
            lambda: dist.all_to_all_single(torch.empty(4, 1), torch.ones(4, 1), [2, 2], [2, 2], group),
        ),
    )
    messages = []
    for calls in cases:
        with pytest.raises(ValueError, match="same calls, with the same shapes and in the same order") as error:
            calls[rank]()
        assert four.tolist() == [1.0] * 4
        messages.append(str(error.value).partition("differs: ")[2])
        right = torch.full((3,), 1.0 + rank)
        dist.all_reduce(right, group=group)
        assert right.tolist() == [3.0] * 3
    return messages


@pytest.mark.parametrize("by_schedule", [False, True])
def test_ranks_that_make_different_calls_all_raise_with_the_call_of_each(ranks, by_schedule):
    messages, other = ranks(2).run(call_different_things, by_schedule)
    assert messages == other
    mine = "allreduce sum of [4] float32 on cpu on rank 0; "
    assert messages == [
        mine + "broadcast with root 0 of [4] float32 on cpu on rank 1",
        mine + "allreduce sum of [6] float32 on cpu on rank 1",
        mine + "allreduce sum of [2, 2] float32 on cpu on rank 1",
        mine + "allreduce sum of [4] int32 on cpu on rank 1",
        mine + "allreduce max of [4] float32 on cpu on rank 1",
        "broadcast with root 0 of [4] float32 on cpu on rank 0; broadcast with root 1 of [4] float32 on cpu on rank 1",
        "barrier on cpu on rank 0; allgather of [4], [4] float32 on cpu on rank 1",
        "alltoall_base of [4] float32 on cpu on rank 0; alltoall_base of [*, 1] float32 on cpu on rank 1",
    ]


def call_in_another_order():
    """A rank's error where rank 2 makes the second call first."""
    group = make_group()
    calls = [lambda: dist.all_reduce(torch.ones(4), group=group), lambda: dist.barrier(group)]
    with pytest.raises(ValueError, match="differs: ") as error:
        calls[dist.get_rank() == 2]()
    return str(error.value).partition("differs: ")[2]


def test_ranks_with_equal_calls_are_named_together(ranks):
    message = "allreduce sum of [4] float32 on cpu on rank 0, 1; barrier on cpu on rank 2"
    assert ranks(3).run(call_in_another_order) == [message] * 3


def stay_away():
    """Rank 0's error where a rank calls nothing; rank 1 only waits."""
    group = make_group()
    set_timeout(group, timedelta(seconds=1))  # once all are connected
    if dist.get_rank() == 0:
        with pytest.raises(PeerError, match=r"calls allreduce sum of \[4\] .* rank 1 has called nothing .* within 1 s"):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


@pytest.mark.long
def test_a_rank_that_calls_nothing_is_named_within_the_limit(ranks):
    ranks(2).run(stay_away)


def call_everything():
    """Every operation, and all-to-alls of which one rank alone gives sizes, is as right as without the variable."""
    group, reference = make_group(), dist.new_group(backend="gloo")
    every = [*operations.SCHEDULED, *operations.OTHERS, (operations.barrier_and_objects,)]
    for operation, *_ in every:
        for found, right in zip(
            operation(group, torch.float32, 5), operation(reference, torch.float32, 5), strict=True
        ):
            assert torch.equal(found, right), operation.__name__
    sizes = [1, 1] if dist.get_rank() == 0 else None
    taken = torch.empty(2)
    dist.all_to_all_single(taken, torch.ones(2), sizes, sizes, group)
    assert taken.tolist() == [1.0, 1.0]


def test_nothing_that_is_right_is_refused(ranks):
    ranks(2).run(call_everything)


def call_without_the_variable(debug):
    """Nobody says anything where the group was made without STRETTO_DEBUG."""
    group = make_group(debug)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debug_check, "store_all_gather", lambda *_: pytest.fail("ranks compared their calls"))
        patch.setenv("STRETTO_DEBUG", "1")
        dist.all_reduce(torch.ones(4), group=group)


@pytest.mark.parametrize("debug", ["", "0"])
def test_calls_are_not_compared_unless_asked_for(ranks, debug):
    ranks(2).run(call_without_the_variable, debug)
