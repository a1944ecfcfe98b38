# SPDX-License-Identifier: Apache-2.0
"""Profiles show a call that a schedule runs as c10d's backends show theirs."""

from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from tests.collectives.backend import operations

from stretto.collectives.backend import native
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
    return [(e.name, e.is_async, e.input_shapes) for e in profile.events() if e.name.startswith(("stretto:", "gloo:"))]


@pytest.mark.parametrize("installed", [True, False])
def test_a_call_that_a_schedule_runs_has_a_range_of_its_name(ranks, installed):
    by = "stretto" if installed else "gloo"
    another = ("stretto:another", True, [[4]])
    for found in ranks(2).run(profile_calls, installed):
        names = [name for name, *_ in found]
        assert names == [f"{by}:all_reduce", f"{by}:all_gather", "stretto:another"], found
        assert found[0] == (f"{by}:all_reduce", True, [[4]])
        assert found[1] == (f"{by}:all_gather", True, [[4]])
        assert found[2] == another


def profile_a_barrier():
    """The ranges of a profile of a barrier that waits for schedules, too."""
    group = dist.new_group(backend="stretto")
    operations.install_all(group)
    dist.all_reduce(torch.ones(4), group=group)
    with torch.profiler.profile() as profile:
        dist.barrier(group)
    return [event.name for event in profile.events() if event.name.startswith(("stretto:", "gloo:"))]


def test_a_barrier_has_one_range(ranks):
    assert ranks(2).run(profile_a_barrier) == [["gloo:barrier"]] * 2


def test_a_call_on_a_gpu_has_the_range_of_its_launch_alone():
    x = torch.ones(4)
    with (
        torch.profiler.profile() as profile,
        profiled("all_reduce", [x]),
        suppress(RuntimeError),  # its event: a CPU has none
    ):
        native.make_enqueued_work(0, "all_reduce", [x], [x])
    assert [event.name for event in profile.events() if event.name.startswith("stretto:")] == ["stretto:all_reduce"]


def test_without_a_profiler_there_is_no_range():
    assert profiled("all_reduce", []) is profiled("all_gather", [])
