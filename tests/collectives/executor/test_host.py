# SPDX-License-Identifier: Apache-2.0
"""The executor on real processes: the same results as torch.distributed, and an error where nothing goes on."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.collectives.executor import programs
from tests.collectives.executor.simulation import simulate
from tests.collectives.executor.test_simulation import SEED, exchange_of
from tests.pool import run_processes
from tests.processes import LIMIT, shared_server

from stretto.collectives.collective import AllGather
from stretto.collectives.executor import REDUCTIONS, ExecutionError, run_on_host, run_on_processes
from stretto.collectives.executor.plan import DTYPES
from stretto.memory import PeerError

OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


def run_in_torch(schedule, given, reduction, group):
    """Run torch.distributed's collective on this rank's input; None where the output may be anything."""
    carried = given.to(torch.int64) if given.dtype is torch.int16 else given.clone()  # gloo has no int16
    rank, size, operation = dist.get_rank(group), dist.get_world_size(group), OPERATIONS[reduction]
    root = dist.get_global_rank(group or dist.group.WORLD, schedule.collective.root)
    match schedule.collective.name:
        case "allreduce":
            output = carried
            dist.all_reduce(output, operation, group=group)
        case "allgather":
            output = carried.new_empty(len(given) * size)
            dist.all_gather_into_tensor(output, carried, group=group)
        case "reducescatter":
            output = carried.new_empty(len(given) // size)
            dist.reduce_scatter_tensor(output, carried, operation, group=group)
        case "alltoall":
            output = torch.empty_like(carried)
            dist.all_to_all_single(output, carried, group=group)
        case "broadcast":
            output = carried
            dist.broadcast(output, root, group=group)
        case "reduce":
            output = carried
            dist.reduce(output, root, operation, group=group)
            output = output if rank == schedule.collective.root else None
        case _:
            return None
    return None if output is None else output.to(given.dtype)


def run_here(schedule, given, group, **options):
    """Run the schedule as its caller would, in place or not; returns the output."""
    collective, rank = schedule.collective, dist.get_rank(group)
    block = len(given) // programs.input_blocks(schedule)
    outputs = {"allgather": collective.ranks * block, "reducescatter": block}.get(collective.name, len(given))
    if not schedule.in_place:
        kept, output = given.clone(), given.new_full((outputs,), 77)
        assert run_on_host(schedule, given, output, group, **options).data_ptr() == output.data_ptr()
        assert torch.equal(given, kept)
        return output
    whole = given.clone()
    if outputs > len(given):
        whole = given.new_full((outputs,), 77)
        whole[rank * block : (rank + 1) * block] = given
    return run_on_host(schedule, whole, None, group, **options)


def compare_with_torch(names, runs, members, seed):
    """Random calls of these collectives in a group; returns those that differ from torch's."""
    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return []
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    order = random.Random(seed)
    combinations = [(dtype, reduction) for dtype in DTYPES for reduction in REDUCTIONS]
    order.shuffle(combinations)
    wrong = []
    for number in range(runs):
        dtype, reduction = combinations[number % len(combinations)]
        name, elements = names[number % len(names)], order.choice((0, 1, 3, 12, 50, 1001))
        options = {"reduction": reduction, "tile_bytes": order.choice((64, 1 << 18)), "slots": order.choice((None, 3))}
        schedule = programs.compile_named(name, size, instances=order.choice((1, 2)))
        given = programs.make_inputs(schedule, elements, dtype, order.randrange(99))[rank]
        right = run_in_torch(schedule, given, reduction, group)
        output = run_here(schedule, given, group, **options)
        if right is not None and not torch.equal(output, right):
            wrong.append((name, dtype, elements, options, output, right))  # the other ranks go on, so this one does too
    return wrong


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("count", "members", "runs"), [(2, None, 40), (3, None, 40), (5, (4, 0, 2), 20), (4, None, 40)]
)
def test_results_are_those_of_torch_distributed(ranks, count, members, runs):
    print(f"seed {SEED}")
    names = [name for name in programs.PROGRAMS if name != "all-to-next"]
    assert ranks(count).run(compare_with_torch, names, runs, members, SEED) == [[]] * count


def stop_and_go_on():
    """A deadlock is an error on every rank, soon, and the group can still be used."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    given = torch.tensor([5.0 + rank])
    assert run_on_host(exchange_of(3), given, torch.empty(1), slots=3) == 5 + other  # which imports what it needs
    worked = time.thread_time()
    with pytest.raises(ExecutionError) as caught:
        run_on_host(exchange_of(3), given, torch.empty(1), slots=2, timeout=2.0)
    assert time.thread_time() - worked < 0.8  # who waits leaves the core to others
    message = (
        f"rank {rank}, thread block 0, step 2 (s), tile 0 of 1 waits for one of 2 slots to rank {other} over channel 0"
    )
    assert message in str(caught.value)
    del caught
    assert run_on_host(exchange_of(3), given, torch.empty(1), slots=3) == 5 + other
    assert "memfd:stretto" not in Path("/proc/self/maps").read_text()


def disagree():
    rank = dist.get_rank()
    given = torch.zeros(4)
    for options, message in (
        ({"tile_bytes": 4 + 4 * rank}, "elements of a tile is . on rank . and . on rank ."),
        ({"reduction": ("sum", "max")[rank]}, "reduction is"),
    ):
        with pytest.raises(ValueError, match=message):
            run_on_host(exchange_of(1), given, torch.zeros(4), **options)
    with pytest.raises(ValueError, match="schedule is"):
        run_on_host(exchange_of(1 + rank), given, torch.zeros(4))
    if rank == 0:
        with pytest.raises(PeerError, match="Rank 1 failed"):
            run_on_host(exchange_of(1), given, torch.zeros(4), timeout=0.3)


def refuse():
    """A call that cannot run is refused on the spot, without the other ranks."""
    given, outside = torch.zeros(4), exchange_of(1)
    inside = programs.compile_collective(programs.ring_all_gather, AllGather(2, 2))
    group = dist.new_group([0])
    for schedule, tensors, message in (
        (outside, (given, None), "runs out of place: give input and output"),
        (inside, (given, torch.zeros(8)), "runs in place: give one tensor"),
        (inside, (torch.zeros(7), None), "the output of allgather on 2 ranks is 2 blocks of one size: 7 elements"),
        (outside, (given, torch.zeros(5)), "takes an output of 1 x 4 elements, not 1 x 5"),
        (outside, (given, torch.zeros(4).half()), "one dtype, not float32 and float16"),
        (outside, (given, given), "share memory"),
        (outside, (torch.zeros(4, 2)[:, 0], given), "input is not contiguous"),
        (outside, (torch.zeros(4, device="meta"), given), "takes CPU tensors: the input is on meta"),
        (outside, (given, torch.zeros(4), group), "is for 2 ranks, and the group has 1"),
    ):
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match=message):
                run_on_host(schedule, *tensors)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="not in the group"):
            run_on_host(outside, given, torch.zeros(4), group)


@pytest.mark.long
def test_ranks_that_stop_disagree_or_pass_invalid_arguments_raise(ranks):
    ranks(2).run(stop_and_go_on)
    ranks(2).run(refuse)
    ranks(2).run(disagree)


def die_once_written(tensor):
    while not (tensor[:10] != 1).any():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def run_beside_a_rank_that_is_killed(rank, folder):
    """Rank 1 is killed in the middle of a run; its peers write down what they got."""
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    schedule = programs.compile_named("ring all-reduce", 3)
    given = torch.ones(3_000_000)
    if rank == 1:
        threading.Thread(target=die_once_written, args=(given,)).start()
    try:
        run_on_host(schedule, given, tile_bytes=4, timeout=LIMIT)
    except ExecutionError as error:
        text = str(error)
    maps = Path("/proc/self/maps").read_text().count("memfd:stretto")
    Path(folder, f"rank-{rank}").write_text(f"{maps} {text}")


def test_a_rank_that_is_killed_stops_its_peers_by_name_and_leaves_nothing(ranks, tmp_path):
    ranks(1).run(int)  # the pool is up, and so is the server that processes are forked from
    run_processes(run_beside_a_rank_that_is_killed, tmp_path)
    texts = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 2)]
    for text in texts:
        assert text.startswith("0 ring all-reduce stops on rank"), text
        assert "thread block 0, step " in text
    assert any("the process of rank 1 has ended" in text for text in texts), texts


@pytest.mark.long
def test_processes_of_their_own_run_a_schedule(ranks):
    ranks(1).run(int)  # as above
    before = multiprocessing.active_children()
    for name in ("ring all-gather", "reduce-scatter out of place"):
        schedule = programs.compile_named(name, 3, instances=2)
        inputs = programs.make_inputs(schedule, 101, torch.bfloat16)
        outputs = run_on_processes(schedule, inputs, reduction="max", tile_bytes=16)
        assert all(map(torch.equal, outputs, simulate(schedule, inputs, reduction="max")))
    with pytest.raises(ExecutionError, match=r"thread block 0, step 1 \(s\)"):
        run_on_processes(exchange_of(2), [torch.ones(1)] * 2, slots=1, timeout=0.5)
    with pytest.raises(ValueError, match="not 'mean'"):
        run_on_processes(exchange_of(2), [torch.ones(1)] * 2, reduction="mean")
    assert set(multiprocessing.active_children()) == set(before)


def test_a_process_whose_caller_has_heard_of_another_ranks_failure_ends_without_a_traceback(tmp_path):
    program = (
        "import multiprocessing, sys; from stretto.collectives.executor.processes import _work; "
        "ours, theirs = multiprocessing.Pipe(); ours.close(); _work(theirs, 0, 1, sys.argv[1])"
    )
    done = subprocess.run(
        [shared_server().python, "-c", program, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
