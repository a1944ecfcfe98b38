# SPDX-License-Identifier: Apache-2.0
"""The backend runs a group's collectives in two levels, where its ranks are on several nodes."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.collectives import call_counts, install, set_two_level, uninstall
from stretto.collectives.algorithms import find

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def sum_up(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """Make three collectives, check their results, and return what ran them."""
    before, rank = call_counts(group), dist.get_rank()
    tensor = torch.arange(10.0) + rank
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert tensor.tolist() == [4.0 * i + 6 for i in range(10)]
    whole = torch.empty(12)
    _all_gather(whole, torch.full((3,), float(rank)), group=group)
    assert whole.tolist() == [float(other) for other in range(4) for _ in range(3)]
    part = torch.empty(3)
    _reduce_scatter(part, torch.arange(12.0), group=group)
    assert part.tolist() == [4.0 * (3 * rank + i) for i in range(3)]
    now = call_counts(group)
    return sorted(key for key in now if now[key] > before.get(key, 0) and key[0] != "barrier")


def switch_levels() -> None:
    group = dist.new_group(backend="stretto", timeout=timedelta(seconds=60))
    by_gloo = [("_allgather_base", "gloo"), ("_reduce_scatter_base", "gloo"), ("allreduce", "gloo")]
    assert sum_up(group) == by_gloo
    assert not set_two_level("auto", group)  # one node
    with mock.patch.dict(os.environ, STRETTO_NODES="2x2"):
        assert set_two_level(True, group)
    levels = [(operation, "two levels, recursive") for operation, _ in by_gloo]
    assert sum_up(group) == levels
    with torch.inference_mode():
        assert sum_up(group) == levels
    tensor = torch.full((4,), True)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)  # of no dtype that two levels reduce
    dist.broadcast(tensor, 0, group=group)
    assert call_counts(group)["allreduce", "gloo"] == 2
    installed = install(find("ring-all-reduce").compile(ranks=4), group)
    assert sum_up(group)[2] == ("allreduce", f"schedule {installed.schedule.name}")
    uninstall(installed, group)
    assert sum_up(group) == levels
    assert not set_two_level(False, group)
    assert sum_up(group) == by_gloo
    known = len(dist.distributed_c10d._world.pg_map)
    for mode in (True, True, False, True):
        with mock.patch.dict(os.environ, STRETTO_NODES="2x2"):
            assert set_two_level(mode, group) is mode
        assert sum_up(group) == (levels if mode else by_gloo)
    assert len(dist.distributed_c10d._world.pg_map) <= known + 2  # those of the former mode are used again
    with mock.patch.dict(os.environ, STRETTO_NODES="3,1"):
        assert not set_two_level("auto", group)
        with pytest.raises(ValueError, match="the group's nodes have 3, 1 ranks, and two levels need equally many"):
            set_two_level(True, group)
    with pytest.raises(ValueError, match="two_level is 'on', but must be 'auto', True or False"):
        set_two_level("on", group)
    with pytest.raises(ValueError, match=r"inter is 'glue', but must be a backend of torch.distributed"):
        set_two_level(True, group, inter="glue")
    with pytest.raises(ValueError, match="all ranks must ask for the same"):
        set_two_level(dist.get_rank() > 0, group)
    assert sum_up(group) == by_gloo


def test_calls_run_in_two_levels_where_that_was_asked_for(ranks):
    ranks(4).run(switch_levels)
