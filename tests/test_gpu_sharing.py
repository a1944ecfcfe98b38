# SPDX-License-Identifier: Apache-2.0
"""Tests of how tests run on one GPU: pools of ranks, numbers of ranks, and runs that go on. No GPU is needed."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from stretto.memory.mps import share_for
from tests.gpu import compile_once, resuming, sharing
from tests.gpu.sharing import GpuRanks
from tests.processes import LIMIT

ROOT = Path(__file__).parents[1]


class RecordedPool:
    """A pool that notes what it is asked, and whose processes die in a job that is called "die"."""

    made: list["RecordedPool"] = []

    def __init__(self, size, environment, *, backend):
        self.size, self.backend = size, backend
        self.environment = dict(environment)
        assert self.environment.pop("TRITON_CACHE_MANAGER") == "tests.gpu.compile_once:CompileOnce"
        self.alive, self.closed, self.timeout = False, False, 0.0
        RecordedPool.made.append(self)

    def run(self, ranks, function, *args, timeout):
        self.alive, self.timeout = True, timeout
        if function == "die":
            self.alive = False
            raise RuntimeError("a rank died")
        return [function] * ranks

    def pids(self):
        return [1] * self.alive

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(RecordedPool, "made", [])
    monkeypatch.setattr(sharing, "has_mps", lambda: True)
    return RecordedPool.made


class RecordedDaemon:
    """Daemons in place of MPS's; each has a folder of its own, and notes when it starts and ends."""

    def __init__(self):
        self.events = []

    @contextmanager
    def __call__(self, percentage):
        number = len(self.events)
        self.events.append("start")
        try:
            yield {"CUDA_MPS_PIPE_DIRECTORY": f"/{number}", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)}
        finally:
            self.events.append("end")


@pytest.mark.parametrize(("gpus", "percentage"), [(1, "25"), (2, "48")])
def test_ranks_that_share_a_gpu_are_clients_of_a_daemon_with_a_part_of_the_gpu_each(
    monkeypatch, made, gpus, percentage
):
    monkeypatch.setattr(sharing, "count_gpus", lambda: gpus)
    daemon = RecordedDaemon()
    ranks = GpuRanks(3, RecordedPool, daemon)
    assert ranks.run(3, "work", timeout=10) == ["work"] * 3
    [pool] = made
    assert (pool.size, pool.backend) == (3, "cpu:gloo,cuda:gloo")
    assert pool.environment == {
        "STRETTO_SHARE_GPUS": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage,
        "CUDA_MPS_PIPE_DIRECTORY": "/0",
    }
    ranks.close()
    assert pool.closed
    assert daemon.events == ["start", "end"]


def test_ranks_of_a_gpu_never_get_more_than_all_of_it():
    assert all(share_for(ranks) >= 1 and ranks * share_for(ranks) <= 100 for ranks in range(1, 50))


def test_after_processes_were_killed_the_daemon_is_restarted(monkeypatch, made):
    monkeypatch.setattr(sharing, "count_gpus", lambda: 1)
    daemon = RecordedDaemon()
    ranks = GpuRanks(2, RecordedPool, daemon)
    with pytest.raises(RuntimeError, match="a rank died"):
        ranks.run(2, "die")
    assert ranks.run(2, "work") == ["work"] * 2
    first, second = made
    assert first.closed
    assert ranks.environment == second.environment != first.environment
    ranks.close()
    assert daemon.events == ["start", "end", "start", "end"]


def test_without_mps_ranks_share_by_time_slices(monkeypatch, made):
    monkeypatch.setattr(sharing, "count_gpus", lambda: 1)
    monkeypatch.setattr(sharing, "has_mps", lambda: False)
    ranks = GpuRanks(2, RecordedPool, None)
    [pool] = made
    assert set(pool.environment) == {"STRETTO_SHARE_GPUS", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"}
    ranks.close()


def test_ranks_with_a_gpu_each_use_nccl_and_no_daemon(monkeypatch, made):
    monkeypatch.setattr(sharing, "count_gpus", lambda: 4)
    GpuRanks(4, RecordedPool, None).run(4, "work", timeout=10)
    [pool] = made
    assert (pool.environment, pool.backend, pool.timeout) == ({}, "cpu:gloo,cuda:nccl", 10)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, [(2, False), (3, True), (4, True), (5, False), (8, True)]),
        (2, [(2, False)]),
        (3, [(3, False)]),
        (7, [(4, False)]),
        (8, [(8, False)]),
    ],
)
def test_one_gpu_is_shared_by_many_numbers_of_ranks_and_several_are_used_as_they_are(monkeypatch, gpus, expected):
    monkeypatch.setattr(sharing, "count_gpus", lambda: gpus)
    assert sharing.choose_worlds((2, 5), (1, 2, 3, 4), sharing.SHARED) == expected
    if gpus > 4:  # of tests that take one number, or that are not tried with 8 ranks
        assert sharing.choose_worlds((4,), (4,), (4, 8)) == [(4, False)]
        assert sharing.choose_worlds((2,), (1, 2, 4), (1, 2, 4)) == [(4, False)]


CONFTEST = """
import pytest
from tests.gpu import resuming

def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1")
    parser.addoption("--passed")

def pytest_configure(config):
    resuming.configure(config)

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    resuming.choose(config, items)
"""
TESTS = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("world", [2, 4], ids="{}-ranks".format)
@pytest.mark.parametrize("case", "abc")
def test_case(world, case):
    if Path("fails").exists():
        assert (world, case) != (4, "b")

def test_skipped():
    pytest.skip("no GPU")
"""


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", folder, folder, *options],
        cwd=folder, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def names_of(output: str, outcome: str = "PASSED") -> set[str]:
    return {line.partition("::")[2] for line in output.splitlines() if line.startswith(outcome)}


@pytest.mark.exhaustive
def test_a_run_that_was_cut_off_goes_on_with_what_has_not_passed(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "fails").touch()
    options = ["--passed", "results/passed.txt"]
    status, output = run_pytest(tmp_path, *options)
    assert status == 1
    assert len(names_of(output)) == 5
    (tmp_path / "fails").unlink()
    status, output = run_pytest(tmp_path, *options)
    assert status == 0
    assert names_of(output) == {"test_case[b-4-ranks]"}
    assert "1 passed, 1 skipped, 5 deselected" in output
    (tmp_path / "test_one.py").write_text(TESTS.replace("def test_skipped", "def helper"))
    status, output = run_pytest(tmp_path, *options)
    assert (status, names_of(output)) == (0, set())
    assert "all of it has passed before: delete results/passed.txt" in output
    # With other code everything is run again.
    lines = (tmp_path / "results" / "passed.txt").read_text().splitlines()
    assert lines[0] == resuming.hash_code(ROOT)
    (tmp_path / "results" / "passed.txt").write_text("\n".join(["another", *lines[1:]]))
    assert len(names_of(run_pytest(tmp_path, *options)[1])) == 6


@pytest.mark.long
@pytest.mark.usefixtures("forks_processes")
def test_shards_are_all_of_it_and_keep_a_files_ranks_together(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(TESTS)
    shards = []
    for part in (1, 2, 3):
        output = run_pytest(tmp_path, "--shard", f"{part}/3")[1]
        shards.append({line.split()[1] for line in output.splitlines() if line.startswith("PASSED")})
    assert sum(map(len, shards)) == len(set.union(*shards)) == 12
    for shard in shards:
        groups = {(name.partition("::")[0], name[-9:]) for name in shard}
        assert len(shard) == 3 * len(groups)
    status, _ = run_pytest(tmp_path, "--shard", "4/3")
    assert status == pytest.ExitCode.USAGE_ERROR


@pytest.mark.exhaustive
def test_processes_of_a_run_of_all_tests_load_the_gpu_folder_only_when_they_collect_it(tmp_path):
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(TESTS)
    status, output = run_pytest(tmp_path, "--numprocesses", "2")
    assert (status, len(names_of(output))) == (0, 6), output


def test_shards_take_about_as_long_by_what_was_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(resuming, "SECONDS", tmp_path / "seconds.json")
    resuming.SECONDS.write_text('{"a.py 2-ranks": 90, "b.py 2-ranks": 50, "b.py 8-ranks": 30, "c.py 4-ranks": 20}')
    groups = {("tests/gpu/a.py", "2-ranks"), *((f"{name}.py", "2-ranks") for name in "bd"), ("b.py", "8-ranks")}
    shards = resuming.assign_shards(groups | {("c.py", "4-ranks")}, 2)
    assert shards == {
        ("tests/gpu/a.py", "2-ranks"): 0,
        ("b.py", "2-ranks"): 1,
        ("b.py", "8-ranks"): 1,
        ("c.py", "4-ranks"): 0,  # a pool of 8 ranks has been started by the other
        ("d.py", "2-ranks"): 1,
    }
    resuming.SECONDS.write_text('{"a.py 4-ranks": 10, "a.py own": 90, "b.py own": 50, "c.py own": 50}')
    groups = {(f"{name}.py", "4-ranks") for name in "abc"}
    shards = resuming.assign_shards(groups, 2, own_gpus=True)
    assert shards == {("a.py", "4-ranks"): 0, ("b.py", "4-ranks"): 1, ("c.py", "4-ranks"): 1}


def test_what_shards_took_is_stored_without_the_starts_of_their_pools(tmp_path):
    (tmp_path / "shard.xml").write_text(
        '<testsuites><testsuite><testcase time="0.1"/>'
        '<testcase classname="tests.gpu.test_a" name="test_it[2-ranks-x]" time="20"/>'
        '<testcase classname="tests.gpu.test_a" name="test_it[2-ranks-y]" time="13"/>'
        '<testcase classname="tests.gpu.test_b" name="test_skipped[4-ranks]" time="0.001"/>'
        '<testcase classname="tests.gpu.test_b" name="test_that[4-ranks]" time="15"/></testsuite></testsuites>'
    )
    start = resuming._START_SECONDS
    found = resuming.measure([tmp_path / "shard.xml"])
    assert found == {"test_a.py 2-ranks": 33 - start, "test_b.py 4-ranks": 15 - start}
    assert resuming.measure([tmp_path / "shard.xml"], own_gpus=True).keys() == {"test_a.py own", "test_b.py own"}


@pytest.fixture
def kernel_cache(monkeypatch, tmp_path):
    """Makes managers of one key of Triton's cache, as processes that begin a kernel together have."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.cache, "manager_class", compile_once.CompileOnce)
    return partial(triton.runtime.cache.get_cache_manager, "a1b2c3")


def test_a_kernel_that_a_process_compiles_is_waited_for_and_not_compiled_twice(kernel_cache):
    compiling, waiting = kernel_cache(), kernel_cache()
    assert compiling.get_group("kernel.json") is None
    with ThreadPoolExecutor(1) as others:
        found = others.submit(waiting.get_group, "kernel.json")
        path = compiling.put("code", "kernel.cubin")
        assert wait([found], timeout=0.5).not_done, "a file of a kernel is not all of it"
        compiling.put_group("kernel.json", {"kernel.cubin": path})
        assert found.result(LIMIT) == {"kernel.cubin": path}
    assert kernel_cache().get_group("kernel.json") == {"kernel.cubin": path}


def test_a_process_that_has_waited_does_not_keep_others_waiting(kernel_cache, monkeypatch):
    monkeypatch.setattr(compile_once, "WAIT_LIMIT", 10.0)
    compiling, waiting, last = (kernel_cache() for _ in range(3))
    assert compiling.get_group("kernel.json") is None
    with ThreadPoolExecutor(2) as others:
        found = [others.submit(each.get_group, "kernel.json") for each in (waiting, last)]
        assert len(wait(found, timeout=0.2).not_done) == 2
        path = compiling.put("code", "kernel.cubin")
        compiling.put_group("kernel.json", {"kernel.cubin": path})
        # All managers live on, as in a process whose garbage is not collected.
        assert not wait(found, timeout=LIMIT).not_done
    assert [each.result() for each in found] == [{"kernel.cubin": path}] * 2


def test_a_process_that_waits_for_a_failed_compilation_compiles_it(kernel_cache, monkeypatch):
    failing = kernel_cache()
    assert failing.get_group("kernel.json") is None
    monkeypatch.setattr(compile_once, "WAIT_LIMIT", 0.2)
    assert kernel_cache().get_group("kernel.json") is None, "the lock's holder lives on, and does nothing"
    del failing
    monkeypatch.setattr(compile_once, "WAIT_LIMIT", 30.0)
    assert kernel_cache().get_group("kernel.json") is None


def test_a_launcher_is_built_once(kernel_cache):
    building, waiting = kernel_cache(), kernel_cache()
    assert building.get_file("launcher.so") is None
    with ThreadPoolExecutor(1) as others:
        found = others.submit(waiting.get_file, "launcher.so")
        assert wait([found], timeout=0.5).not_done
        path = building.put(b"machine code", "launcher.so")
        assert found.result(LIMIT) == path
