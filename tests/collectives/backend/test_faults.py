# SPDX-License-Identifier: Apache-2.0
"""Ranks that disagree, die or do not come, and schedules that cannot be: an error on every rank, in time, by name."""

import os
import re
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.collectives.executor.test_host import die_once_written
from tests.pool import run_processes

from stretto.collectives import Collective, ScheduleFileError, call_counts, install, uninstall, write_schedule
from stretto.collectives.algorithms import find
from stretto.memory import PeerError
from stretto.memory.groups import set_timeout


def ring(ranks=2):
    return find("ring-all-reduce").compile(ranks=ranks)


def disagree():
    """Each of these raises on both ranks, changes no input, and the next call is right."""
    rank = dist.get_rank()
    group = dist.new_group(backend="stretto")
    install(ring(), group)
    install(find("ring-reduce-scatter").compile(ranks=2), group)
    install(find("binomial-broadcast").compile(ranks=2), group)

    def reduce_scatter():
        dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(4), group=group)

    def all_reduce_coalesced(sizes):
        group.allreduce_coalesced([torch.ones(size) for size in sizes]).wait()

    def all_reduce(*arguments):
        tensor = torch.ones(4, *arguments)
        try:
            dist.all_reduce(tensor, group=group)
        finally:
            assert tensor.tolist() == [1] * 4

    for calls, message in (
        (
            (lambda: dist.all_reduce(torch.ones(4), group=group), lambda: dist.all_reduce(torch.ones(6), group=group)),
            r"all ranks must call the same: elements of a block is 4 on rank 0 and 6 on rank 1",
        ),
        (
            (all_reduce, lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64), group=group)),
            r"dtype is torch.float32 on rank 0 and torch.float64 on rank 1",
        ),
        ((all_reduce, reduce_scatter), "operation is allreduce on rank 0 and _reduce_scatter_base on rank 1"),
        (
            (lambda: dist.broadcast(torch.ones(4), 0, group), all_reduce),
            "operation is broadcast on rank 0 and allreduce on rank 1",
        ),
        (
            (lambda: all_reduce_coalesced([2, 3]), lambda: all_reduce_coalesced([3, 2])),
            r"its tensors' elements is 2\+3 \(2 tensors.* on rank 0 and 3\+2 \(2 tensors.* on rank 1",
        ),
        (
            (
                lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, group),
                lambda: dist.all_reduce(torch.ones(4), group=group),
            ),
            "asks for is max on rank 0 and sum on rank 1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            calls[rank]()
        right = torch.full((3,), 1.0 + rank)
        dist.all_reduce(right, group=group)
        assert right.tolist() == [3.0] * 3
    work = dist.all_reduce(torch.ones(4 + rank), group=group, async_op=True)
    with pytest.raises(ValueError, match="elements of a block"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    work = dist.all_reduce(torch.ones(4 + rank), group=group, async_op=True)
    with pytest.raises(RuntimeError, match="DisagreementError: all ranks must call the same"):
        work.get_future().wait()


def test_ranks_that_disagree_all_raise_and_may_go_on(ranks):
    ranks(2).run(disagree)


def bring_no_room():
    """Rank 0's output has one place for all its elements. No rank's output is touched, and the group goes on."""
    group = dist.new_group(backend="stretto")
    install(ring(), group)
    whole = torch.ones(1 if dist.get_rank() == 0 else 4)
    with pytest.raises(ValueError, match=r"rank 0 cannot run its part .*shape \[4\] and strides \[0\].*contiguous"):
        dist.all_reduce(whole.expand(4), group=group)
    assert whole.unique().tolist() == [1.0]
    dist.all_reduce(whole.expand(4).contiguous(), group=group)


def test_an_output_whose_elements_share_memory_is_refused_by_all_ranks(ranks):
    ranks(2).run(bring_no_room)


def stay_away():
    """A rank that does not come: the other one names it after the limit, and no schedule runs in the group again."""
    group = dist.new_group(backend="stretto")
    install(ring(), group)
    set_timeout(group, timedelta(seconds=1))  # once all are connected
    if dist.get_rank() == 0:
        started = time.monotonic()
        with pytest.raises(
            PeerError, match=r"rank 0 of 2 waits for rank 1 in allreduce sum of 4 float32 .* within 1 s"
        ):
            dist.all_reduce(torch.ones(4), group=group)
        assert time.monotonic() - started > 0.9
        with pytest.raises(RuntimeError, match=r"no schedule runs in this group any more.*waits for rank 1"):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(PeerError, match=r"rank 0 gave up: rank 0 of 2 waits for rank 1"):
            dist.all_reduce(torch.ones(4), group=group)
    dist.barrier()


@pytest.mark.long
def test_a_missing_rank_is_named_within_the_limit(ranks):
    ranks(2).run(stay_away)


def give_up_in_a_row():
    """A rank whose peers gave up reports why the first one did, and not the errors that each passed on."""
    group = dist.new_group(backend="stretto")
    install(ring(4), group)
    set_timeout(group, timedelta(seconds=1))
    for rank in (0, 1, 2):
        dist.barrier()
        if dist.get_rank() == rank:
            with pytest.raises(PeerError) as raised:
                dist.all_reduce(torch.ones(4), group=group)
            assert re.search(r"waits for rank .*3 in allreduce.*: it did not come within 1 s", str(raised.value))
            assert str(raised.value).count("gave up") == (rank > 0)


@pytest.mark.long
def test_a_reason_to_give_up_is_reported_once(ranks):
    ranks(4).run(give_up_in_a_row)


def run_beside_a_rank_that_is_killed(rank, folder):
    """Rank 2 is killed in the middle of a call; its peers write down what they got."""
    dist.init_process_group("stretto", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3)
    install(ring(3))
    given = torch.ones(30_000_000)
    if rank == 2:
        threading.Thread(target=die_once_written, args=(given,), daemon=True).start()
    texts = []
    while len(texts) < 2:
        try:
            dist.all_reduce(given)
        except Exception as error:  # noqa: BLE001  (whatever it is, the test reads it)
            texts.append(f"{type(error).__name__}: {error}")
    Path(folder, f"rank-{rank}").write_text("\n".join(texts))
    os._exit(0)


@pytest.mark.long
def test_a_rank_that_is_killed_in_a_call_is_named_by_all_others(ranks, tmp_path):
    ranks(1).run(int)  # the pool is up, and so is the server that processes are forked from
    run_processes(run_beside_a_rank_that_is_killed, tmp_path)
    for rank in (0, 1):
        text = (tmp_path / f"rank-{rank}").read_text()
        assert text.startswith(("ExecutionError", "PeerError")), text
        assert "the process of rank 2 has ended" in text
        assert "RuntimeError: no schedule runs in this group any more" in text


def refuse(folder):
    """Schedules that cannot be installed are refused, by all ranks where only one of them is wrong."""
    rank = dist.get_rank()
    group, plain = dist.new_group(backend="stretto"), dist.new_group(backend="gloo")
    right = ring()
    first = right.ranks[0]
    halved = first._replace(
        thread_blocks=tuple(block._replace(steps=block.steps[:-1]) for block in first.thread_blocks)
    )
    broken = replace(right, ranks=(halved, *right.ranks[1:]))
    mine = Collective("allreduce", 2, 2, 2, lambda rank, index: ((rank, index),), in_place=True)
    nothing = replace(right, collective=mine, ranks=tuple(each._replace(thread_blocks=()) for each in right.ranks))
    path = Path(folder) / "ring.xml"
    if rank == 0:
        write_schedule(right, path)
    dist.barrier()
    for schedule, options, message in (
        (ring(3), {}, "is for 3 ranks, and the group has 2"),
        (broken, {}, "not verified, and does not run:\n.*rank"),
        (nothing, {}, "not verified, and does not run:\n.*allreduce|postcondition"),
        (
            replace(right, collective=replace(right.collective, name="mine", is_unknown=True)),
            {},
            "no operation of torch.distributed is a 'mine'.* installed with its conditions",
        ),
        (
            replace(right, collective=replace(right.collective, name="mine", output_chunks=1)),
            {},
            "ring-all-reduce runs only in place, but input and output of mine have different sizes",
        ),
        (right, {"min_bytes": 9, "max_bytes": 3}, "0 <= min_bytes <= max_bytes: not 9 to 3"),
        (right, {"dtypes": [torch.complex64]}, "no executor here runs schedules on complex64"),
        (right, {"max_bytes": 100 + rank}, "all ranks must ask for the same: schedule ring-all-reduce"),
        ((right, find("two-shot-all-reduce").compile(ranks=2))[rank], {}, "all ranks must ask for the same"),
        ((right, broken)[rank], {}, "not verified"),
    ):
        with pytest.raises(ValueError, match=message):
            install(schedule, group, **options)
    with pytest.raises(ScheduleFileError if rank else ValueError, match="not XML"):
        install((path, __file__)[rank], group)
    with pytest.raises(FileNotFoundError):
        install("/nowhere/ring.xml", group)
    for asked in (lambda: install(right, plain), lambda: call_counts(plain), call_counts):
        with pytest.raises(ValueError, match=r"the group's backend is .*gloo.*, not stretto"):
            asked()
    if rank == 0:
        with pytest.raises(PeerError, match=r"did not meet all ranks within 0\.5 s"):
            install(right, dist.new_group([0, 1], backend="stretto", use_local_synchronization=True), timeout=0.5)
    else:
        dist.new_group([0, 1], backend="stretto", use_local_synchronization=True)
    assert call_counts(group) == {}
    installed = install(path, group, max_bytes=100)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3
    assert call_counts(group) == {("allreduce", f"schedule {installed.schedule.name}"): 1}
    uninstall(group=group)


def test_an_invalid_installation_raises_on_all_ranks(ranks, tmp_path):
    ranks(2).run(refuse, str(tmp_path))


def promise_even_sizes():
    """An all-to-all whose sizes are not equal, though the installation promised it."""
    group = dist.new_group(backend="stretto")
    install(find("direct-all-to-all").compile(ranks=2), group, even_sizes=True)
    sizes = [1, 3] if dist.get_rank() == 0 else [2, 2]
    taken = [1, 2] if dist.get_rank() == 0 else [3, 2]
    with pytest.raises(ValueError, match=r"rank 0 cannot run its part of alltoall_base .* even_sizes=True"):
        dist.all_to_all_single(torch.empty(sum(taken)), torch.ones(4), taken, sizes, group)
    parts = [torch.ones(size) for size in (sizes if dist.get_rank() == 0 else [2, 2])]
    with pytest.raises(ValueError, match=r"rank 0 cannot run its part of alltoall of .* even_sizes=True"):
        dist.all_to_all([torch.empty_like(part) for part in parts], parts, group)
    given = torch.tensor([1.0, 2.0]) + 2 * dist.get_rank()
    output = torch.empty(2)
    dist.all_to_all_single(output, given, [1, 1], [1, 1], group)
    assert output.tolist() == [[1, 3], [2, 4]][dist.get_rank()]


def test_sizes_that_are_not_equal_against_a_promise_raise_on_all_ranks(ranks):
    ranks(2).run(promise_even_sizes)
