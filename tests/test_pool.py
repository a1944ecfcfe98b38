# SPDX-License-Identifier: Apache-2.0
"""The pool of worker processes that every test of several ranks relies on."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, parallelize
from tests.conftest import names_gpu_tests
from tests.pool import Pool, RankError

ROOT = Path(__file__).parents[1]


def sum_of_ranks(scale: int = 1) -> tuple[int, int, float]:
    total = torch.full((3,), float(dist.get_rank() * scale))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total[0].item()


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"7 is not even, says rank {rank}")
    dist.all_reduce(torch.ones(3))


class UnpicklableError(Exception):
    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


def raise_unpicklable() -> None:
    raise UnpicklableError("no", "so")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)


def make_subgroups() -> list[float]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    sums = []
    for axis in ("a", "b"):
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total, group=mesh.get_group(axis))
        sums.append(total.item())
    return sums


def use_a_mesh(names: tuple[str, str]) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    matrix = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    (matrix @ matrix).redistribute(placements=[Replicate(), Replicate()])


def train_a_model() -> None:
    """Its groups are held by a graph of autograd that is in a cycle with the model."""
    grid = Grid(x=2, z=2)
    config = GPTConfig(layers=2, hidden=16, heads=2, vocab=31, max_seq_len=8)
    model = parallelize(GPT(config), grid, recompute="full")
    tokens = torch.randint(31, (2, 9))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    model.last_loss = loss


def number_of_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def visible_gpus() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def leave_a_different_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)


def default_dtype_and_threads() -> tuple[torch.dtype, int]:
    return torch.get_default_dtype(), torch.get_num_threads()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_results_are_in_rank_order_for_any_number_of_ranks(ranks, count):
    total = float(sum(range(count)) * 10)
    assert ranks(count).run(sum_of_ranks, scale=10) == [(rank, count, total) for rank in range(count)]


def test_jobs_share_the_same_processes_and_each_gets_fresh_groups(ranks):
    before = ranks(4).run(process_id)
    for _ in range(3):
        assert ranks(4).run(make_subgroups) == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]
        assert ranks(2).run(sum_of_ranks) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert ranks(4).run(process_id) == before


def test_one_jobs_settings_do_not_reach_the_next(ranks):
    ranks(2).run(leave_a_different_default_dtype)
    assert ranks(2).run(default_dtype_and_threads) == [(torch.float32, 1)] * 2


@pytest.mark.usefixtures("forks_processes")
def test_no_process_of_tests_of_cpus_sees_a_gpu(ranks):
    program = "import os; print(repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"
    forked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert [visible_gpus(), *ranks(2).run(visible_gpus), forked.strip()] == ["", "", "", "''"]


@pytest.mark.parametrize(
    ("arguments", "sees_gpus"),
    [
        (["tests"], False),
        (["tests/parallel/test_capture.py", "tests/test_gpu_sharing.py"], False),
        (["tests/gpu"], True),
        (["tests/parallel", str(ROOT / "tests/gpu/test_tiles.py::test_it[2-ranks]")], True),
    ],
)
def test_only_a_session_that_names_tests_of_gpus_sees_them(arguments, sees_gpus, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert names_gpu_tests(arguments) == sees_gpus


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_job_leaves_no_thread_of_its_process_groups_behind(ranks):
    ranks(4).run(train_a_model)  # a process keeps the threads that its first training starts
    before = ranks(4).run(number_of_threads)
    for turn in range(3):
        ranks(4).run(use_a_mesh, (f"a{turn}", f"b{turn}"))
        ranks(4).run(train_a_model)
    # A thread that was joined is counted until the kernel has ended it.
    counts = [ranks(4).run(number_of_threads) for _ in range(3)]
    assert all(min(found) <= at_first for *found, at_first in zip(*counts, before, strict=True)), (before, counts)


def test_a_raising_rank_raises_here_with_its_rank_and_traceback_and_the_pool_lives_on(ranks):
    before = ranks(8).run(process_id)
    with pytest.raises(ValueError, match="7 is not even, says rank 2") as caught:
        ranks(4).run(raise_on, 2)
    note = "".join(caught.value.__notes__)
    assert "raised on rank 2 of 4" in note
    assert "in raise_on" in note
    assert ranks(8).run(process_id) == before


def test_an_exception_that_cannot_be_pickled_is_reported_by_its_text(ranks):
    with pytest.raises(RankError, match="UnpicklableError: no because so"):
        ranks(2).run(raise_unpicklable)


def test_a_dying_rank_fails_the_job_by_name_and_the_next_job_gets_a_new_pool(ranks):
    before = ranks(4).run(process_id)
    with pytest.raises(RankError, match=r"rank 1 of 4 died \(signal SIGKILL\)"):
        ranks(4).run(die_on, 1)
    after = ranks(4).run(process_id)
    assert set(before).isdisjoint(after)


@pytest.mark.exhaustive
def test_a_hanging_rank_fails_the_job_with_its_stack_and_the_next_job_gets_a_new_pool(ranks):
    before = ranks(4).run(process_id)
    with pytest.raises(RankError, match=r"(?s)rank 1 of 3 did not end within 1 s.*in hang_on"):
        ranks(3).run(hang_on, 1, timeout=0.1)
    after = ranks(4).run(process_id)
    assert set(before).isdisjoint(after)


def test_a_function_that_workers_cannot_import_raises_with_what_to_pass(ranks):
    with pytest.raises(ValueError, match="top level of a module"):
        ranks(2).run(lambda: None)


def test_more_ranks_than_the_pool_has_are_refused(ranks):
    with pytest.raises(ValueError, match="9 ranks asked of a pool of 8"):
        ranks(9).run(process_id)


@pytest.mark.exhaustive
def test_closing_a_pool_leaves_no_process_and_no_file():
    children = set(multiprocessing.active_children())
    pool = Pool(2, modules=[])
    pool.run(2, process_id, timeout=60)
    pids, folder = pool.pids(), pool._folder
    pool.close()
    assert set(multiprocessing.active_children()) == children
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not folder.exists()


INTERRUPTED_TEST = """
import time

def test_hang(ranks, pool):
    ranks(2).run(time.sleep, 0)
    print("workers", *pool.pids(), pool._folder, flush=True)
    ranks(2).run(time.sleep, 3600)
"""


@pytest.fixture
def short_path():
    """Of a folder in which sockets have a place: a socket's whole name has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="st", dir="/tmp") as folder:
        yield folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pytest_leaves_no_process(ending, tmp_path, short_path):
    (tmp_path / "test_interrupted.py").write_text(INTERRUPTED_TEST)
    command = [sys.executable, "-m", "pytest", "-s", "-p", "tests.conftest", "--rootdir", tmp_path, tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": short_path}
    # What runs in the background of a shell ignores Ctrl-C, and its children with it.
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=listen
    )
    line = next(line for line in child.stdout if "workers" in line)
    *pids, folder = line.partition("workers ")[2].split()
    child.send_signal(ending)
    child.communicate()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    if ending == signal.SIGINT:  # nothing can tidy up after SIGKILL
        assert not Path(folder).exists()
