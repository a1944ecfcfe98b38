# SPDX-License-Identifier: Apache-2.0
"""Every operation gives what gloo gives, by a schedule where one is installed, and the counter says by what."""

from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.collectives.backend import operations

from stretto.collectives import Collective, algorithm, call_counts, chunk, install, run_collective, uninstall
from stretto.collectives.algorithms import find
from stretto.collectives.backend.dispatcher import find_dispatcher
from stretto.collectives.xml import write_schedule
from stretto.memory import group_timeout


def counts_of(group, function):
    """Count the implementations that a function's calls in the group ran as."""
    before = Counter(call_counts(group))
    result = function()
    return result, dict(Counter(call_counts(group)) - before)


def compare(operation, dtype, n, group, reference):
    """Count the implementations of the operation's calls; its results must be gloo's."""
    found, ran_as = counts_of(group, lambda: operation(group, dtype, n))
    right = operation(reference, dtype, n)
    assert len(found) == len(right)
    for number, (one, other) in enumerate(zip(found, right, strict=True)):
        assert torch.equal(one, other), (operation.__name__, dtype, n, number, one, other)
    return ran_as


def compare_all(in_place):
    group, reference = dist.new_group(backend="stretto"), dist.new_group(backend="gloo")
    operations.install_all(group, in_place)
    assert call_counts(group) == {}  # Stretto's own messages are not the job's
    for dtype, sizes in (
        (torch.float32, (0, 1, 5, 1001)),
        (torch.bfloat16, (7,)),
        (torch.float64, (3,)),
        (torch.int64, (4,)),
        (torch.uint8, (33,)),
    ):
        for n in sizes:
            for operation, name, calls in operations.SCHEDULED:
                ran_as = compare(operation, dtype, n, group, reference)
                assert [(ran[0], ran[1].split()[0], count) for ran, count in ran_as.items()] == [
                    (name, "schedule", calls)
                ], (operation.__name__, dtype, n, ran_as)
    for operation, ran in operations.OTHERS:
        expected = {(name, "gloo"): count for name, count in ran.items()}
        assert compare(operation, torch.float32, 5, group, reference) == expected
    ran_as = compare(operations.barrier_and_objects, torch.float32, 5, group, reference)
    assert ran_as.pop(("barrier", "gloo")) == ran_as.pop(("monitored_barrier", "gloo")) == 1
    assert {ran for _, ran in ran_as} == {"schedule ring-all-gather", "schedule binomial-broadcast"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("count", "in_place"), [(2, None), (3, True), (3, False)])
def test_schedules_give_gloos_results_for_every_operation(ranks, count, in_place):
    ranks(count).run(compare_all, in_place)


def wait_by_a_barrier():
    """As with gloo, what was begun before a barrier has ended when the barrier has."""
    group = dist.new_group(backend="stretto")
    operations.install_all(group)
    for barrier in (lambda: dist.barrier(group), lambda: dist.barrier(group, async_op=True).wait()):
        tensors = [torch.full((50_000,), number, dtype=torch.int32) for number in range(10)]
        for tensor in tensors:
            dist.all_reduce(tensor, group=group, async_op=True)
        barrier()
        assert [tensor.unique().tolist() for tensor in tensors] == [[2 * number] for number in range(10)]
    began = torch.ones(3)
    barrier_work = dist.barrier(group, async_op=True)
    dist.all_reduce(began, group=group)  # a barrier that nobody waits for is in nobody's way
    assert began.tolist() == [2.0] * 3
    assert barrier_work.wait()


def test_a_barrier_waits_for_the_schedules_that_were_begun_before(ranks):
    ranks(2).run(wait_by_a_barrier)


def hand_everything_on():
    """Without a schedule, and with those for other sizes, dtypes and reductions: gloo runs it, and says so."""
    group, reference = dist.new_group(backend="stretto"), dist.new_group(backend="gloo")
    for operation, name, calls in operations.SCHEDULED:
        assert compare(operation, torch.float32, 5, group, reference) == {(name, "gloo"): calls}
    for operation, ran in operations.OTHERS:
        expected = {(name, "gloo"): count for name, count in ran.items()}
        assert compare(operation, torch.float32, 5, group, reference) == expected
    installed = install(
        find("ring-all-reduce").compile(ranks=2), group, min_bytes=40, max_bytes=80, dtypes=[torch.float32]
    )
    by_schedule, by_gloo = {("allreduce", "schedule ring-all-reduce"): 1}, {("allreduce", "gloo"): 1}
    for tensor, op, expected in (
        (torch.ones(9), dist.ReduceOp.SUM, by_gloo),
        (torch.ones(10), dist.ReduceOp.SUM, by_schedule),
        (torch.ones(20), dist.ReduceOp.SUM, by_schedule),
        (torch.ones(21), dist.ReduceOp.SUM, by_gloo),
        (torch.ones(5).double(), dist.ReduceOp.SUM, by_gloo),
        (torch.ones(10, dtype=torch.int32), dist.ReduceOp.BOR, by_gloo),
    ):
        _, ran_as = counts_of(group, lambda tensor=tensor, op=op: dist.all_reduce(tensor, op, group))
        assert ran_as == expected, (tensor, op)
    uninstall(installed, group)
    assert counts_of(group, lambda: dist.all_reduce(torch.ones(10), group=group))[1] == by_gloo
    with pytest.raises(ValueError, match="is not installed in this group"):
        uninstall(installed, group)


def test_calls_without_a_schedule_run_on_gloo(ranks):
    ranks(2).run(hand_everything_on)


def refused_on_gloo():
    """gloo would send or write other bytes than the tensors', wait for a rank that is not there, or crash."""
    group = dist.new_group(backend="stretto")
    wide = torch.arange(12.0).view(3, 4)
    opts = dist.ReduceOptions()
    for call in (
        lambda: dist.all_reduce(wide[:, 1], group=group),
        lambda: dist.all_reduce(wide[:, 1], group=group, async_op=True),
        lambda: dist.reduce(wide[:, 1], 0, group=group),
        lambda: group.reduce([wide[:, ::2]], opts),
        lambda: dist.all_reduce_coalesced([wide[0], wide[:, 1]], group=group),
        lambda: dist.broadcast(wide[:, 1], 0, group=group),
        lambda: dist.scatter(wide[:, 1], [wide[0, :3]] * 2 if dist.get_rank() == 0 else None, 0, group=group),
    ):
        with pytest.raises(ValueError, match=r"with strides \(.*gloo.*pass tensor\.contiguous\(\)"):
            call()
    row, turned = torch.ones(2), torch.ones(3, 2).t()
    given = [turned] * 2 if dist.get_rank() == 0 else None
    for call, words in (
        (lambda: dist.all_to_all_single(wide[:2, 0], row, group=group), r"shape \(2,\) .*pass a contiguous output"),
        (lambda: dist.all_to_all_single(row, row, group=group), "pass an output of its own"),
        (lambda: dist.all_to_all_single(row, row, [3, -1], [3, -1], group=group), "size of all_to_all_single is -1"),
        (
            lambda: dist.scatter(turned, given, 0, group=group),
            "pass a contiguous output",
        ),
        (lambda: dist.reduce_scatter(turned, [turned] * 2, group=group), "pass a contiguous output"),
        (lambda: dist.reduce_scatter(wide[:2, :3], [turned] * 2, group=group), "pass a contiguous output"),
        (lambda: dist.reduce_scatter(torch.ones(2, 3), [turned] * 2, group=group), r"pass tensor\.contiguous\(\)"),
        (lambda: dist.reduce_scatter_tensor(row[0], row, group=group), r"pass tensor\.view\(1\)"),
        (lambda: group.send([row], 2, 0), "send to rank 2 of a group that has ranks 0 to 1"),
        (lambda: group.recv([row], -1, 0), "receive from rank -1 of a group"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert wide.tolist() == torch.arange(12.0).view(3, 4).tolist()
    scattered = torch.zeros(3)  # what is only sent is copied
    dist.scatter(scattered, [wide[:, 1], torch.ones(1).expand(3)] if dist.get_rank() == 0 else None, 0, group=group)
    assert scattered.tolist() == ([1, 5, 9] if dist.get_rank() == 0 else [1, 1, 1])
    turned = torch.arange(6.0).view(2, 3).t()  # without gaps
    dist.all_reduce(turned, group=group)
    assert turned.tolist() == [[0, 6], [2, 8], [4, 10]]
    dist.all_reduce(wide[:, 1:1], group=group)  # no elements, no gaps


def test_calls_that_gloo_would_do_wrongly_or_crash_in_are_refused(ranks):
    ranks(2).run(refused_on_gloo)


def average_and_stride():
    """Test what gloo has not: averages, and tensors with gaps between their elements."""
    group = dist.new_group(backend="stretto")
    operations.install_all(group)
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, wanted in ((torch.float32, 1.0), (torch.float16, 1.0), (torch.int32, 1)):
        tensor = torch.full((5,), rank, dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group)
        assert tensor.tolist() == [wanted] * 5
    given, taken = torch.arange(2.0 * size), torch.empty(2)
    dist.reduce_scatter_tensor(taken, given, dist.ReduceOp.AVG, group)
    assert taken.tolist() == [2.0 * rank, 2.0 * rank + 1]
    large = torch.full((2 * size,), 60000.0, dtype=torch.float16)  # of which 16 bits cannot hold the sum
    given, taken = large.clone(), torch.empty(2, dtype=torch.float16)
    dist.all_reduce(large, dist.ReduceOp.AVG, group)
    dist.reduce_scatter_tensor(taken, given, dist.ReduceOp.AVG, group)
    assert (large == 60000).all(), large
    assert (taken == 60000).all(), taken
    assert (given == 60000).all(), given
    wide = torch.arange(12.0).view(3, 4)
    opts = dist.AllreduceOptions()
    group.allreduce([wide[:, 1]], opts).wait()
    assert wide.tolist() == [[0, 3, 2, 3], [4, 15, 6, 7], [8, 27, 10, 11]]
    turned = torch.arange(6.0).view(2, 3).t()
    group.broadcast([turned]).wait()
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    columns = torch.zeros(2, size)
    group.allgather([[columns[:, peer] for peer in range(size)]], [torch.full((2, 3), float(rank))[:, 1]]).wait()
    assert columns.tolist() == [[0, 1, 2]] * 2
    assert {ran for _, ran in call_counts(group)} == {
        "schedule ring-all-reduce",
        "schedule ring-all-gather",
        "schedule ring-reduce-scatter",
        "schedule binomial-broadcast",
    }


def test_averages_and_strided_tensors_run_by_schedules(ranks):
    ranks(3).run(average_and_stride)


def exchange_lists(in_place):
    group = dist.new_group(backend="stretto")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    operations.install_all(group, in_place, even_sizes=True)
    for n in (0, 1, 5, 1001):
        given = [torch.full((n, 1), 10.0 * rank + peer) for peer in range(size)]
        taken = [torch.empty(n, 1) for _ in range(size)]
        _, ran_as = counts_of(group, lambda given=given, taken=taken: dist.all_to_all(taken, given, group))
        assert ran_as == {("alltoall", "schedule direct-all-to-all"): 1}
        assert all((tensor == 10 * peer + rank).all() for peer, tensor in enumerate(taken))
        assert all((tensor == 10 * rank + peer).all() for peer, tensor in enumerate(given))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_schedule_exchanges_lists_of_tensors_that_are_promised_to_be_even(ranks, in_place):
    ranks(3).run(exchange_lists, in_place)


def run_by_tiles():
    """The size of tiles is the user's."""
    group = dist.new_group(backend="stretto")
    with pytest.raises(ValueError, match="tile_bytes is at least 480, not 479"):
        install(find("ring-all-reduce").compile(ranks=2), group, tile_bytes=479)
    install(find("ring-all-reduce").compile(ranks=2), group, tile_bytes=960)
    runner = find_dispatcher(group).runner("cpu")
    tensor = torch.ones(5000)
    dist.all_reduce(tensor, group=group)
    assert (tensor == 2).all()
    (prepared,) = runner._prepared.values()
    assert [plan.tiles for plan, _ in prepared.plans.values()] == [-(-2500 * 4 // 960)]


def test_a_schedule_runs_by_tiles_of_the_size_that_install_is_given(ranks):
    ranks(2).run(run_by_tiles)


def run_own_collectives(file):
    """AllToNext, and one that nobody knows: every rank gets the sum of its neighbours, the two last ones nothing."""
    group = dist.new_group(backend="stretto")
    rank = dist.get_rank()
    install(find("all-to-next").compile(nodes=1, gpus=3), group)
    given, taken = torch.arange(6.0) + 10 * rank, torch.full((6,), 7.0)
    assert run_collective("alltonext", taken, given, group) is None
    assert taken.tolist() == ([7.0] * 6 if rank == 0 else (torch.arange(6.0) + 10 * (rank - 1)).tolist())
    assert given.tolist() == (torch.arange(6.0) + 10 * rank).tolist()
    own = Collective("both", 3, 1, 1, lambda rank, index: ((0, 0), (1, 0)) if rank == 2 else None)
    with pytest.raises(ValueError, match=r"no operation of torch.distributed is a 'both'.*collective="):
        install(file, group)
    install(file, group, collective=own)
    work = run_collective("both", taken, given, group, reduction="max", async_op=True)
    work.wait()
    assert rank != 2 or taken.tolist() == (torch.arange(6.0) + 10).tolist()
    with pytest.raises(ValueError, match="no installed schedule runs neither sum of 6 float32"):
        run_collective("neither", taken, given, group)
    with pytest.raises(ValueError, match="both has 1 input and 1 output chunks a rank, which 6 and 5 elements"):
        run_collective("both", taken[:5], given, group)
    with pytest.raises(ValueError, match=r"allreduce is an operation of torch.distributed"):
        run_collective("allreduce", taken, given, group)
    with pytest.raises(ValueError, match="reduction is 'avg', but must be one of sum, max, min, prod"):
        run_collective("both", taken, given, group, reduction="avg")
    assert call_counts(group) == {("alltonext", "schedule all-to-next"): 1, ("both", "schedule both-at-two"): 1}


def test_a_collective_of_the_users_own_is_installed_and_called_by_its_name(ranks, tmp_path):
    @algorithm(lambda: Collective("both", 3, 1, 1, lambda rank, index: ((0, 0), (1, 0)) if rank == 2 else None))
    def both_at_two():
        """The sum of ranks 0 and 1 on rank 2."""
        at_two = chunk(0, "in", 0).copy(2, "out", 0)
        at_two.reduce(chunk(1, "in", 0).copy(2, "scratch", 0))

    write_schedule(both_at_two.compile(), tmp_path / "both.xml")
    ranks(3).run(run_own_collectives, tmp_path / "both.xml")


def change_the_time_limit():
    """Calls are given the group's limit of now, unless they have their own."""
    group = dist.new_group(backend="stretto", timeout=timedelta(seconds=100))
    operations.install_all(group)
    dispatcher, found = find_dispatcher(group), []
    choose = dispatcher._choose
    dispatcher._choose = lambda call: (found.append(call.timeout), choose(call))[1]
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    group.set_timeout(timedelta(seconds=50))
    dist.all_reduce(tensor, group=group)
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=30)
    group.allreduce([tensor], options).wait()
    assert found == [100, 50, 30]
    assert group_timeout(group) == 50


def test_calls_are_given_the_time_limit_that_the_group_has_then(ranks):
    ranks(2).run(change_the_time_limit)


def infer():
    """Inference tensors, which no other thread may write into, outside of inference mode."""
    group, reference = dist.new_group(backend="stretto"), dist.new_group(backend="gloo")
    operations.install_all(group)
    with torch.inference_mode():
        for operation, name, calls in operations.SCHEDULED:
            ran_as = compare(operation, torch.float32, 5, group, reference)
            assert [(ran[0], ran[1].split()[0], count) for ran, count in ran_as.items()] == [(name, "schedule", calls)]
        tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3


def test_inference_tensors_run_by_schedules(ranks):
    ranks(2).run(infer)


def outcome(call, *arguments):
    """Return a call's first list after it, or the first line of its error, without gloo's time and line."""
    try:
        call(*arguments).wait()
    except RuntimeError as error:
        return str(error).split("\n")[0].rpartition("] ")[2]
    return [tensor.tolist() for tensor in arguments[0] if isinstance(tensor, torch.Tensor)]


def bring_odd_lists(group):
    """Calls of the group itself whose lists are no schedule's collective: (name, outcome)."""
    size = dist.get_world_size(group)
    for call in (group.allreduce, group.broadcast):
        yield call.__name__, outcome(call, [torch.ones(2), torch.full((2,), 10.0)])
        yield f"{call.__name__} of several sizes", outcome(call, [torch.ones(2), torch.ones(3)])
    yield "reduce", outcome(group.reduce, [torch.ones(2), torch.ones(2)])
    for call, options in ((group.broadcast, dist.BroadcastOptions()), (group.reduce, dist.ReduceOptions())):
        options.rootTensor = 1
        yield f"{call.__name__} of the second tensor", outcome(call, [torch.ones(2)], options)
    for name, parts in (
        ("one part", [torch.zeros(2 * size)]),
        ("halves", [torch.zeros(1) for _ in range(2 * size)]),
        ("other shapes", [torch.zeros(2, 1) for _ in range(size)]),
    ):
        yield f"allgather into {name}", outcome(group.allgather, [parts], [torch.ones(2)])
        yield f"reduce_scatter of {name}", outcome(group.reduce_scatter, [torch.ones(2)], [parts])


def compare_odd_lists():
    group, reference = dist.new_group(backend="stretto"), dist.new_group(backend="gloo")
    operations.install_all(group)
    right = dict(bring_odd_lists(reference))
    assert dict(bring_odd_lists(group)) == right
    assert right["allreduce"] == [[33.0] * 2] * 2  # the two tensors are summed up, too
    assert right["broadcast"] == [[1.0, 1.0]] * 2
    assert {ran for _, ran in call_counts(group)} == {"gloo"}


def test_lists_that_mean_something_else_to_c10d_run_on_gloo_or_are_refused_there(ranks):
    ranks(3).run(compare_odd_lists)


def call_back():
    """A future has its value when its work has been awaited, and its callback may wait for the next call."""
    group = dist.new_group(backend="stretto")
    operations.install_all(group)
    later = torch.ones(3)

    def add(future):
        dist.all_reduce(later, group=group, async_op=True).get_future().wait()
        return future.value()[0] + later

    for _ in range(20):
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        future = work.get_future()
        work.wait()
        assert future.value()[0].tolist() == [2.0] * 3
    future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
    assert future.then(add).wait().tolist() == [4.0] * 3
    given = torch.ones(3, requires_grad=True)
    version = given._version
    dist.all_reduce(given.detach(), group=group)
    assert given._version == version  # as gloo: written behind autograd's back
    assert given.tolist() == [2.0] * 3


def test_futures_may_be_chained_and_autograd_sees_no_write(ranks):
    ranks(2).run(call_back)


def split_up():
    world = dist.new_group(backend="stretto")
    half = dist.new_group([0, 2], backend="stretto")
    if dist.get_rank() != 1:
        install(find("ring-all-reduce").compile(ranks=2), half)
        tensor = torch.full((3,), 1.0 + dist.get_rank())
        dist.all_reduce(tensor, group=half)
        assert tensor.tolist() == [4.0] * 3
        assert call_counts(half) == {("allreduce", "schedule ring-all-reduce"): 1}
    part = world.split_group([0, 1], group_name="part")
    assert (part is None) == (dist.get_rank() == 2)
    if part is not None:
        tensor = torch.ones(3)
        part.allreduce([tensor]).wait()
        assert tensor.tolist() == [2.0] * 3
        assert call_counts(part) == {("allreduce", "gloo"): 1}
        part.shutdown()
    assert call_counts(world) == {}


def test_subgroups_and_splits_have_schedules_and_counts_of_their_own(ranks):
    ranks(3).run(split_up)
