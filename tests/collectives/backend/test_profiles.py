# SPDX-License-Identifier: Apache-2.0
"""Profiles show a call that a schedule runs as c10d's backends show theirs."""

import pytest
import torch
import torch.distributed as dist
from tests.collectives.backend import operations

from stretto.collectives.backend.native import profiled


def profile_calls(installed):
    """(name, whether it is asynchronous, shapes) of each of c10d's ranges in a profile of two calls."""
    group = dist.new_group(backend="stretto")
    if installed:
        operations.install_all(group)
    x = torch.ones(4)
    parts = [torch.empty(4) for _ in range(2)]
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(x, group=group)
        dist.all_gather(parts, x, group=group)
        with profiled("another", [x]):  # as where schedules are enqueued on a GPU
            pass
    return [
        (e.name, e.is_async, e.input_shapes[0]) for e in profile.events() if e.name.startswith(("stretto:", "gloo:"))
    ]


@pytest.mark.parametrize("installed", [True, False])
def test_a_call_that_a_schedule_runs_has_a_range_of_its_name(ranks, installed):
    by = "stretto" if installed else "gloo"
    another = ("stretto:another", True, [4])
    for found in ranks(2).run(profile_calls, installed):
        names = [name for name, *_ in found]
        assert names == [f"{by}:all_reduce", f"{by}:all_gather", "stretto:another"], found
        assert found[0] == (f"{by}:all_reduce", True, [4])
        assert found[2] == another


def test_without_a_profiler_there_is_no_range():
    assert profiled("all_reduce", []) is profiled("all_gather", [])
