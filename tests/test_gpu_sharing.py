"""How tests run on one GPU: MPS's daemon, pools of ranks, numbers of ranks, and runs that go on. No GPU is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import resuming, sharing
from tests.gpu.sharing import GpuRanks, MpsDaemon

ROOT = Path(__file__).parents[1]
DAEMON = """#!/bin/sh
# Says what it was called with, by whom, and fails where the file "fails" is.
here=$(dirname "$0")
said=$(cat)
echo "$@ [$said] $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> "$here/calls"
[ -d "$CUDA_MPS_PIPE_DIRECTORY" ] || exit 7
if [ -e "$here/fails" ]; then echo "no such GPU"; exit 1; fi
"""


@pytest.fixture
def daemon_folder(tmp_path, monkeypatch):
    """Where nvidia-cuda-mps-control is a script that notes its calls."""
    program = tmp_path / sharing.MPS_CONTROL
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def calls_of(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "calls").read_text().splitlines()]


def test_the_daemon_has_folders_of_its_own_and_is_ended_by_quit(daemon_folder):
    daemon = MpsDaemon()
    daemon.start()
    own = daemon.environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert Path(own).is_dir()
    assert len(own) < 60, "a socket's whole name has 107 characters at most"
    daemon.stop()
    assert not Path(own).exists()
    assert calls_of(daemon_folder) == [["-d", "[]", own, own], ["[quit]", own, own]]
    daemon.stop()  # there is nothing to stop any more
    assert len(calls_of(daemon_folder)) == 2


def test_a_daemon_that_does_not_start_says_why_and_leaves_nothing(daemon_folder):
    (daemon_folder / "fails").touch()
    daemon = MpsDaemon()
    with pytest.raises(RuntimeError, match="-d ended with 1: no such GPU"):
        daemon.start()
    daemon.stop()
    [[_, _, own, _]] = calls_of(daemon_folder)
    assert not Path(own).exists()


def test_a_daemon_that_does_not_answer_is_given_up_within_its_time_limit(daemon_folder, monkeypatch):
    daemon = MpsDaemon()
    daemon.start()
    own = daemon.environment["CUDA_MPS_PIPE_DIRECTORY"]
    (daemon_folder / sharing.MPS_CONTROL).write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(sharing, "MPS_LIMIT", 0.3)
    with pytest.raises(RuntimeError, match=r"did not end within 0\.3 s"):
        daemon.stop()
    assert not Path(own).exists()


class RecordedPool:
    """A pool that notes what it is asked, and whose processes die in a job that is called "die"."""

    made: list["RecordedPool"] = []

    def __init__(self, size, environment, *, backend):
        self.size, self.environment, self.backend = size, environment, backend
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
    return RecordedPool.made


def test_ranks_that_share_a_gpu_are_clients_of_the_daemon_with_a_part_of_the_gpu_each(daemon_folder, monkeypatch, made):
    monkeypatch.setattr(sharing, "count_gpus", lambda: 1)
    daemon = MpsDaemon()
    daemon.start()
    ranks = GpuRanks(3, daemon, RecordedPool)
    assert ranks.run(3, "work", timeout=10) == ["work"] * 3
    [pool] = made
    assert (pool.size, pool.backend) == (3, "cpu:gloo,cuda:gloo")
    assert pool.environment == {
        "STRETTO_SHARE_GPUS": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "33",
        **daemon.environment,
    }
    ranks.close()
    assert pool.closed
    daemon.stop()


def test_after_processes_were_killed_the_daemon_is_started_anew(daemon_folder, monkeypatch, made):
    monkeypatch.setattr(sharing, "count_gpus", lambda: 1)
    daemon = MpsDaemon()
    daemon.start()
    before = daemon.environment
    ranks = GpuRanks(2, daemon, RecordedPool)
    with pytest.raises(RuntimeError, match="a rank died"):
        ranks.run(2, "die")
    assert daemon.environment != before
    assert ranks.run(2, "work") == ["work"] * 2
    first, second = made
    assert first.closed
    assert second.environment.items() >= daemon.environment.items()
    daemon.stop()
    assert [call[0] for call in calls_of(daemon_folder)] == ["-d", "[quit]", "-d", "[quit]"]


def test_ranks_with_a_gpu_each_use_nccl_and_no_daemon(monkeypatch, made):
    monkeypatch.setattr(sharing, "count_gpus", lambda: 4)
    GpuRanks(4, None, RecordedPool).run(4, "work", timeout=10)
    [pool] = made
    assert (pool.environment, pool.backend, pool.timeout) == ({}, "cpu:gloo,cuda:nccl", 10)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, [(2, False), (3, True), (4, True), (5, False), (8, True)]),
        (2, [(2, False)]),
        (3, [(3, False)]),
        (8, [(4, False)]),
    ],
)
def test_one_gpu_is_shared_by_many_numbers_of_ranks_and_several_are_used_as_they_are(monkeypatch, gpus, expected):
    monkeypatch.setattr(sharing, "count_gpus", lambda: gpus)
    assert sharing.choose_worlds((2, 5), (1, 2, 3, 4), sharing.SHARED) == expected


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
        cwd=folder, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def names_of(output: str, outcome: str = "PASSED") -> set[str]:
    return {line.partition("::")[2] for line in output.splitlines() if line.startswith(outcome)}


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
