# SPDX-License-Identifier: Apache-2.0
"""Operators' workspaces: what is reported of them, and that they can be freed and made again."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops.operands import find_plan, random_of

from stretto import ops
from stretto.memory import PeerError, groups


def call_all(group):
    rank = dist.get_rank()
    x, weight = random_of(rank, 16, 16).round(), random_of(10 + rank, 24, 16).round()
    plans = (
        (ops.all_gather_matmul, "copies"),
        (ops.all_gather_matmul, "pushes"),
        (ops.matmul_reduce_scatter, "copies"),
        (ops.matmul_all_reduce, "two shots"),
    )
    return [operator(x, weight, group, implementation=find_plan(plan)) for operator, plan in plans]


def look_up(group):
    """An embedding's output and its tables' gradient, whose channels are kept by other keys."""
    table = random_of(dist.get_rank(), 10, 8).round().requires_grad_()
    out = ops.embedding_all_to_all(torch.arange(8) % 10, torch.arange(9), [table], group)
    out.sum().backward()
    return out.detach(), table.grad


def free_and_call_again():
    group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
    call_all(other)
    others = ops.workspaces(other)
    assert ops.workspaces(group) == []
    assert ops.free_workspaces(group) == 0
    expected, (out, grad) = call_all(group), look_up(group)
    kept_out = out.clone()
    purposes = ["copy_engine", "double_buffered", "embedding gradients", "embedding outputs", "packets"]
    for _ in range(2):
        found = ops.workspaces(group)
        assert sorted(one.purpose for one in found) == purposes
        assert all(one.group == group.group_name and one.device.type == "cpu" for one in found)
        assert all(one.num_bytes >= 1 << 16 for one in found)
        assert set(found) < set(ops.workspaces())
        assert ops.free_workspaces(group) == sum(one.num_bytes for one in found)
        assert ops.workspaces(group) == []
        assert ops.workspaces(other) == others
        assert torch.equal(out, kept_out)  # outputs that are alive keep their memory
        assert all(map(torch.equal, call_all(group), expected))
        assert all(map(torch.equal, look_up(group), (kept_out, grad)))
    assert all(map(torch.equal, call_all(other), expected))


def test_workspaces_are_reported_freed_and_made_again(interpret):
    interpret(2, free_and_call_again)


def free_alone():
    """Rank 1 does not free: rank 0 raises and frees nothing; then both do."""
    group = dist.new_group([0, 1])
    call_all(group)
    count = len(ops.workspaces(group))
    if dist.get_rank() == 0:
        with mock.patch.object(groups, "group_timeout", return_value=0.5):
            with pytest.raises(PeerError, match="free_workspaces, and rank 1 has called nothing like it"):
                ops.free_workspaces(group)
    dist.barrier()
    assert len(ops.workspaces(group)) == count
    assert ops.free_workspaces(group) > 0
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            with pytest.raises(ValueError, match="CUDA graph is captured"):
                ops.free_workspaces(group)
            with pytest.raises(ValueError, match="CUDA graph is captured"):
                ops.check()
    alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="not in the group"):
            ops.free_workspaces(alone)


@pytest.mark.long
def test_a_rank_frees_nothing_alone_or_while_a_graph_is_captured(interpret):
    interpret(2, free_alone)
