# SPDX-License-Identifier: Apache-2.0
"""Ranks whose launcher is killed save, end and leave nothing; what listens does so on the loopback interface alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch import orphan_entries
from tests.launch.test_launch import QUICK, is_alive, pids
from tests.processes import LIMIT, shared_server
from tests.train import runs

from stretto.train.checkpoint import newest_checkpoint
from stretto.train.checkpoint.folders import step_of
from stretto.train.config import TrainConfig
from stretto.train.job import launch

MEMORY = Path("/dev/shm")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def configure(out: Path, *overrides: str) -> TrainConfig:
    """A run that ends only when it is stopped."""
    out.mkdir(parents=True)
    config = runs.configure(out, "grid.data=2", "train.steps=1000000", "train.checkpoint_every=1000000", *overrides)
    runs.write_config(config)
    return config


def start(out: Path, entry: str, *torchrun: str) -> subprocess.Popen[bytes]:
    """Start a launcher that is forked from a server. Python starts its ranks: they have it for a parent."""
    program, paths = str(Path(orphan_entries.__file__)), {"PYTHONPATH": os.pathsep.join(sys.path)}
    with open(out / "log.txt", "wb") as log:
        return subprocess.Popen(
            [shared_server().python, *torchrun, program, entry, str(out / "config.toml")],
            env=os.environ | paths | {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": sys.executable},
            stdout=log,
            stderr=log,
        )


def kill(launcher: subprocess.Popen[bytes]) -> None:
    os.kill(shared_server().process_of(launcher.pid), signal.SIGKILL)
    launcher.wait()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def folder_of(pid: int) -> Path:
    """The folder in memory in which a rank's counters are, by the kernel's list of what it has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    counters = next(line.split()[-1] for line in lines if line.endswith(".counters"))
    return next(parent for parent in Path(counters).parents if parent.parent == MEMORY)


def watchers_of(parent: int) -> list[int]:
    """The watchers that a process has started, as /proc shows them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            if b"stretto.launch.watching.watcher" in command:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found += [int(folder.name)] if int(fields[1]) == parent else []
        except OSError:
            continue
    return found


def listening(pid: int) -> set[str]:
    """The addresses and ports on which a process listens, as the kernel writes them."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except OSError:
            continue
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
    ]
    return {line[1] for line in lines[1:] if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


@pytest.mark.long
@pytest.mark.parametrize(
    "torchrun", [(), pytest.param(TORCHRUN, marks=pytest.mark.exhaustive)], ids=["launch", "torchrun"]
)
def test_ranks_whose_launcher_is_killed_save_and_leave_nothing(tmp_path: Path, torchrun: tuple[str, ...]) -> None:
    out = tmp_path / "out"
    configure(out)
    launcher = start(out, "train_and_note_threads", *torchrun)
    processes = pids(out, 2)
    folder = folder_of(processes[0])
    parents = [shared_server().process_of(launcher.pid), *processes]
    watchers = [watcher for parent in parents for watcher in watchers_of(parent)]
    assert len(watchers) == 1
    kill(launcher)
    wait_until(lambda: not any(map(is_alive, [*processes, *watchers])))
    newest = newest_checkpoint(out)
    assert newest is not None
    assert step_of(newest) >= 3
    assert not folder.exists()
    assert not list((out / "checkpoints").glob(".*"))
    log = (out / "log.txt").read_text()
    assert len(log.splitlines()) < 40, log


@pytest.mark.exhaustive
def test_a_rank_that_is_deaf_does_not_outlive_its_launcher_for_long(tmp_path: Path) -> None:
    out = tmp_path / "out"
    configure(out)
    launcher = start(out, "train_deaf")
    processes = pids(out, 2)
    folder = folder_of(processes[0])
    kill(launcher)
    wait_until(lambda: not any(map(is_alive, processes)))
    wait_until(lambda: not folder.exists())


@pytest.mark.usefixtures("forks_processes")
def test_a_job_listens_on_the_loopback_interface_alone_and_a_signal_to_one_rank_stops_all(
    tmp_path: Path, caplog
) -> None:
    out = tmp_path / "out"
    config = configure(out)
    before, found = listening(os.getpid()), []

    def look_and_signal() -> None:
        ranks = pids(out, 2)
        try:
            (watcher,) = [shared_server().process_of(pid) for pid in watchers_of(os.getpid())]
            found.extend([*map(listening, [*ranks, watcher]), listening(os.getpid()) - before])
        finally:
            os.kill(ranks[1], signal.SIGTERM)

    sender = threading.Thread(target=look_and_signal)
    sender.start()
    assert launch(orphan_entries.train_and_note_threads, config, QUICK) == signal.SIGTERM
    sender.join()
    assert len(found) == 4
    assert found[0], "rank 0 serves the job's store"
    addresses = {address.partition(":")[0] for each in found for address in each}
    assert addresses <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}, found
    assert newest_checkpoint(out) is not None
    assert "a rank got SIGTERM, and all ranks have saved and stopped" in caplog.text
    # Nothing in a rank but the thread that trains, and one that writes a checkpoint while it does.
    for rank in range(2):
        names = set((out / f"threads-{rank}").read_text().splitlines())
        assert names - {"MainThread", "stretto-save"} == set()
