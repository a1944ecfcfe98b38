# SPDX-License-Identifier: Apache-2.0
"""Calls of the operators one after another: in other shapes and groups, late, in disagreement, after a failure."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops.operands import PLANS, find_plan, gather_module, random_of, relative_error
from torch.distributed.distributed_c10d import _get_process_group_store

from stretto import ops
from stretto.ops import small_m
from stretto.ops.joint import launch as joint_module
from stretto.ops.operator import _caches


def poison(group):
    """Fill this rank's workspaces with NaN, between two barriers; those of packets must be empty."""
    dist.barrier(group)
    for cache in _caches.values():
        for (purpose, size, _), found in cache.workspaces.items():
            memory = found.channel.tensor((found.slots * size,), torch.uint8)
            if purpose == "packets":
                assert not memory.any(), "packets were left"
            else:
                memory.fill_(0xFF)
    dist.barrier(group)


def call_in_many_shapes(calls, seed):
    """The operators in turn, in subgroups as well, past stragglers; what is wrong, of numbers that are exact."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, (first + 1) % world]) for first in range(0, world - 1, 2)]
    generator = torch.Generator().manual_seed(seed)
    wrong = []
    for call in range(calls):
        rows, n, k = (int(size) for size in torch.randint(1, 70, (3,), generator=generator))
        gathers, scatters, reduces = (
            names[int(torch.randint(len(names), (1,), generator=generator))]
            for names in (("copies", "pushes"), ("copies", "packets"), ("one shot", "two shots"))
        )
        group = pairs[rank // 2] if call % 2 and rank // 2 < len(pairs) else None
        if call % 2 and group is None:
            continue
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        place = members.index(rank)
        xs = [random_of(peer, rows, k, seed=call).round() for peer in members]
        inputs = [random_of(peer, rows * len(members), k, seed=call).round() for peer in members]
        weights = [random_of(10 + peer, n, k, seed=call).round() for peer in members]
        poison(group)
        time.sleep(0.02 * ((call + rank) % world))
        out = ops.all_gather_matmul(xs[place], weights[place], group, implementation=PLANS[gathers])
        if not torch.equal(out, torch.cat(xs) @ weights[place].T):
            wrong.append((gathers, call, rows, n, k))
        summed = sum(x @ weight.T for x, weight in zip(inputs, weights, strict=True))
        out = ops.matmul_reduce_scatter(inputs[place], weights[place], group, implementation=PLANS[scatters])
        if not torch.equal(out, summed[place * rows : (place + 1) * rows]):
            wrong.append((scatters, call, rows, n, k))
        poison(group)
        out = ops.matmul_all_reduce(inputs[place], weights[place], group, implementation=PLANS[reduces])
        if not torch.equal(out, summed):
            wrong.append((reduces, call, rows, n, k))
    return wrong


@pytest.mark.long
@pytest.mark.parametrize("calls", [2, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_calls_of_any_shape_and_subgroup_follow_each_other(interpret, calls):
    assert interpret(4, call_in_many_shapes, calls, 5) == [[]] * 4


def disagree(debugs):
    """Each rank's error where rank 1 calls with another shape, or, if it `debugs`, in another order."""
    rank = dist.get_rank()
    weight, calls = random_of(0, 16, 16), [random_of(1, rows, 16) for rows in (4, 8)]
    if debugs:
        for x in calls:
            ops.all_gather_matmul(x, weight)
    else:
        calls = [random_of(1, 5 if rank == 1 else 6, 16)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_DEBUG", str(int(debugs)))
        with pytest.raises(ValueError, match="same shapes") as error:
            ops.all_gather_matmul(calls[-1 if rank == 1 else 0], weight)
    after = ops.all_gather_matmul(calls[0] if debugs else calls[0][:4], weight)
    store = _get_process_group_store(dist.group.WORLD)
    left = sum(store.check([f"strings of stretto ops cpu {number} {rank}"]) for number in range(1, 20))
    return str(error.value), list(after.shape), left


@pytest.mark.parametrize(("debugs", "rows"), [(False, (18, 15)), (True, (12, 24))])
def test_ranks_that_make_different_calls_raise_before_a_launch(interpret, debugs, rows):
    """Always at calls of a new kind; of known ones with STRETTO_DEBUG=1. The group is as good as before."""
    found = interpret(3, disagree, debugs)
    for rank, (message, shape, left) in enumerate(found):
        assert f"rank {rank} calls all_gather_matmul m={rows[rank == 1]} " in message
        assert f"rank {0 if rank == 1 else 1} calls all_gather_matmul m={rows[rank != 1]} " in message
        assert shape == [12, 16]
        assert left == 1  # of this rank's keys in the store


def fall_behind(name, plan, calls):
    """Rank 1 launches its kernels late, when others are in their next call; the calls whose product is wrong."""
    rank, world, wrong = dist.get_rank(), dist.get_world_size(), []
    module, kernel = {
        ("gather", "copies"): (joint_module, "joint_gemm_by_copies"),
        ("gather", "pushes"): (gather_module, "all_gather_gemm_by_programs"),
        ("scatter", "copies"): (joint_module, "add_rows"),
        ("scatter", "packets"): (small_m, "gemm_exchange"),
    }[name, plan]
    launch = getattr(module, kernel)

    class Late:
        def __getitem__(self, grid):
            time.sleep(0.3)
            return launch[grid]

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(module, kernel, Late())
        for call in range(calls):
            shards = [random_of(100 * call + peer, 32, 32) for peer in range(world)]
            weight = random_of(call, 32, 32)
            if name == "gather":
                out = ops.all_gather_matmul(shards[rank], weight, implementation=find_plan(plan))
                expected = torch.cat(shards).double() @ weight.double().T
            else:
                whole = torch.cat([shards[rank]] * world)
                out = ops.matmul_reduce_scatter(whole, weight, implementation=find_plan(plan))
                expected = sum(shard.double() for shard in shards) @ weight.double().T
            if not relative_error(out, expected) < 1e-5:
                wrong.append(call)
    return wrong


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "plan"),
    [("gather", "copies"), ("gather", "pushes"), ("scatter", "copies"), ("scatter", "packets")],
)
def test_a_rank_that_is_a_call_behind_receives_its_calls_data(interpret, name, plan):
    assert interpret(2, fall_behind, name, plan, 5) == [[], []]


class _Unlaunchable:
    """A kernel that takes more than the GPU has, which its launch says."""

    def __getitem__(self, grid):
        raise RuntimeError("out of resources")


def call_after_a_failed_launch(operator, plan):
    """True if a call is what it was after one whose kernel could be launched on no rank."""
    module, kernel = {
        ("all_gather_matmul", "copies"): (joint_module, "joint_gemm_by_copies"),
        ("all_gather_matmul", "pushes"): (gather_module, "all_gather_gemm_by_programs"),
        ("matmul_reduce_scatter", "copies"): (joint_module, "joint_gemm_by_copies"),
    }[operator, plan]
    rank, call = dist.get_rank(), getattr(ops, operator)
    x, weight = random_of(rank, 40, 32), random_of(10 + rank, 24, 32)
    before = call(x, weight, implementation=find_plan(plan))
    with mock.patch.object(module, kernel, _Unlaunchable()), pytest.raises(RuntimeError, match="out of resources"):
        call(x, weight, implementation=find_plan(plan))
    return torch.equal(before, call(x, weight, implementation=find_plan(plan)))


@pytest.mark.parametrize(
    ("operator", "plan"),
    [
        ("all_gather_matmul", "copies"),
        ("all_gather_matmul", "pushes"),
        ("matmul_reduce_scatter", "copies"),
    ],
)
def test_a_kernel_that_cannot_be_launched_costs_its_own_call_alone(interpret, operator, plan):
    assert interpret(2, call_after_a_failed_launch, operator, plan) == [True] * 2
