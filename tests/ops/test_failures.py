# SPDX-License-Identifier: Apache-2.0
"""Operators whose ranks lose each other, by interpreted kernels: which calls raise, and the state of the next one."""

import contextlib
import gc
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto import ops, tiles
from stretto.memory import PeerError
from stretto.ops.operator import list_channels
from stretto.tiles.launches import Launches


def make_group(limit):
    return dist.new_group(timeout=timedelta(seconds=limit))


def shorten_limits(group, seconds):
    """Give a group's workspaces another limit, once all ranks have met: a busy machine's may be late for that."""
    for _, channel in list_channels(group.group_name):
        channel.limit.seconds = seconds


BLOCKS = ops.Blocks(16, 32, 32, 2, 4, 2, 3)

CALLS = {
    "one shot": ("matmul_all_reduce", ops.KernelConfig(blocks=BLOCKS, exchange="packets")),
    "two shots": ("matmul_all_reduce", ops.KernelConfig(blocks=BLOCKS, exchange="packets", shots=2)),
    "scattered packets": ("matmul_reduce_scatter", ops.KernelConfig(blocks=BLOCKS, exchange="packets")),
    "tiles by copies": ("matmul_reduce_scatter", ops.KernelConfig(blocks=BLOCKS, transfer="copies", piece_bytes=512)),
    "pushes": ("all_gather_matmul", ops.KernelConfig(blocks=BLOCKS, transfer="programs", movers=2)),
    "copies": ("all_gather_matmul", ops.KernelConfig(blocks=BLOCKS, transfer="copies", piece_bytes=512)),
}


def numbers_of(rank, *shape):
    """Small whole numbers, so that sums are exact, the same on whichever rank asks for them."""
    made = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(rank))
    return made.float()


def run_call(way, group, rows=8):
    """True if this rank's result of one call is right to the bit."""
    operator, plan = CALLS[way]
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    every = [(numbers_of(peer, rows, 32), numbers_of(100 + peer, 32, 32)) for peer in range(world)]
    x, weight = every[rank]
    out = getattr(ops, operator)(x, weight, group, implementation=plan)
    if operator == "all_gather_matmul":
        return torch.equal(out, torch.cat([one for one, _ in every]) @ weight.t())
    whole = sum(one @ other.t() for one, other in every)
    return torch.equal(out, whole if operator == "matmul_all_reduce" else whole.chunk(world)[rank])


def leave(group):
    """End a group and what it has failed with."""
    with contextlib.suppress(PeerError):
        dist.destroy_process_group(group)


def miss_a_call(way):
    """Rank 1 misses a call. Rank 0's errors of that call, and of calls of other sizes, operators and groups."""
    group, other = make_group(5), make_group(60)
    rank = dist.get_rank()
    assert run_call(way, group)
    messages = []
    if rank == 0:
        with pytest.raises(PeerError) as error:
            run_call(way, group)
        messages.append(str(error.value))
        # Before anything is agreed with a rank that does not come.
        for call in ((way, group, 600), ("copies" if way != "copies" else "one shot", group), (way, other)):
            with pytest.raises(PeerError) as error:
                run_call(*call)
            messages.append(str(error.value))
        with pytest.raises(PeerError) as error:
            ops.check()
        messages.append(str(error.value))
        with pytest.raises(PeerError):
            ops.free_workspaces(group)
    dist.barrier()
    leave(group)
    call = error = group = None  # the last references to the group
    gc.collect()
    ops.check()  # the failure has gone with its group
    assert run_call(way, make_group(60)), "a group that was made afterwards is not harmed"
    leave(other)
    return messages


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [pytest.param("two shots", marks=pytest.mark.exhaustive), "pushes"])
def test_a_missed_call_is_raised_by_every_later_call_of_the_process_until_its_group_has_ended(interpret, way):
    messages, nothing = interpret(2, miss_a_call, way)
    assert nothing == []
    assert len(messages) == 5
    for text in messages:
        assert "waited in vain for rank 1" in text, messages
        assert "rank 0 of 2" in text
        assert ", 5 s" in text  # the limit of the group that failed


def come_late(limit, pause):
    """Rank 1 is the given seconds late for a group's call: whether the results are right, or the ranks' errors."""
    group = make_group(30.0)
    assert run_call("two shots", group)
    shorten_limits(group, limit)
    if dist.get_rank() == 1:
        time.sleep(pause)
    try:
        return run_call("two shots", group)
    except PeerError as error:
        return str(error)
    finally:
        dist.barrier()
        leave(group)


@pytest.mark.long
def test_a_rank_may_be_as_late_as_its_group_allows_and_no_later(interpret):
    assert interpret(2, come_late, 30.0, 2.0) == [True, True]
    first, second = interpret(2, come_late, 1.0, 2.5)
    assert "waited in vain for rank 1" in first
    assert ", 1 s" in first
    assert second is not True  # rank 0 sends nothing after it gave up: rank 1 raises, and gets no sum


# What the host does of a call, step by step: each may raise, and what came before it is done.
STEPS = ((Launches, "__call__"), (tiles, "rank_copy_data"), (tiles, "rank_notify"))


@contextlib.contextmanager
def failing_at(broken):
    """Have the broken-th step of a call raise (None: none of them); yields a list of the steps that were taken."""
    taken = []

    def wrap(step):
        def run(*arguments, **options):
            taken.append(step)
            if len(taken) - 1 == broken:
                raise RuntimeError("no memory for this step")
            return step(*arguments, **options)

        return run

    with contextlib.ExitStack() as stack:
        for place, name in STEPS:
            stack.enter_context(mock.patch.object(place, name, wrap(getattr(place, name))))
        yield taken


def fail_half_way(way):
    """A call fails on all ranks at one of its steps: for each, whether the next calls are right, or what they raise."""
    group = make_group(60)
    run_call(way, group)
    with failing_at(None) as taken:
        run_call(way, group)
    results = {}
    for broken in range(len(taken)):
        name = f"step {broken + 1} of {len(taken)}"
        with failing_at(broken), pytest.raises(RuntimeError, match="no memory for this step"):
            run_call(way, group)
        dist.barrier()
        try:
            results[name] = [run_call(way, group) for _ in range(3)]  # both slots, and one again
        except PeerError as error:
            results[name] = [str(error)]
        harmed = [None] * dist.get_world_size()
        dist.all_gather_object(harmed, results[name] != [True] * 3)
        if any(harmed):
            break
    leave(group)
    return results


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["one shot", "two shots", "scattered packets", "tiles by copies", "pushes", "copies"])
def test_a_call_that_failed_half_way_on_all_ranks_does_not_harm_the_next(interpret, way):
    for results in interpret(2, fail_half_way, way):
        assert all(found == [True] * 3 for found in results.values()), results
        assert results


def launch_many_programs():
    """(programs, arrivals) of a call that joins the sums of many programs; nothing is run."""
    seen = []

    def note(self, kernel, key, programs, arguments, **options):
        seen.append((programs, [one for one in arguments if hasattr(one, "arrivals")]))

    blocks = ops.Blocks(16, 16, 16, 1, 4, 2, 2000)
    plan = ops.KernelConfig(blocks=blocks, exchange="packets")
    with mock.patch.object(Launches, "__call__", note):
        ops.matmul_all_reduce(torch.ones(16, 80), torch.ones(16_000, 80), make_group(60), implementation=plan)
    ((programs, (stream_k,)),) = seen
    return programs, 0 if stream_k.partials is None else stream_k.arrivals.numel()


def test_programs_that_join_sums_have_a_counter_each(interpret):
    ((programs, arrivals),) = interpret(1, launch_many_programs)
    assert arrivals == 0 or programs <= arrivals
