# SPDX-License-Identifier: Apache-2.0
"""The folder of counters, and the process that watches: what other users and the working directory may not do."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.launch.watching import joining
from stretto.launch.watching.ranks import write_json


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in the place of /dev/shm."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(joining, "MEMORY", folder)
    return folder


def prefix_of(memory: Path) -> str:
    """Return the beginning of the names of this user's folders."""
    folder = joining.private_folder("any")
    folder.rmdir()
    return folder.name.removesuffix("any")


def make_open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def make_link(path: Path) -> None:
    target = path.parent / "elsewhere"
    target.mkdir(mode=0o700)
    path.symlink_to(target)


@pytest.mark.parametrize("make", [make_open_folder, make_link, Path.touch])
def test_what_another_user_may_have_made_in_place_of_the_folder_is_refused(
    memory: Path, make: Callable[[Path], None]
) -> None:
    make(memory / f"{prefix_of(memory)}job")
    with pytest.raises(PermissionError, match="another user may have made it"):
        joining.private_folder("job")


def test_a_pipe_in_another_users_folder_stops_no_rank(memory: Path) -> None:
    foreign = memory / f"{prefix_of(memory)}other"
    make_open_folder(foreign)
    os.mkfifo(foreign / "rank-0.counters")  # opening it would wait for a writer
    assert joining.private_folder("job").is_dir()
    assert foreign.is_dir()


def test_counters_are_on_disk_where_the_memory_has_no_room(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert joining.memory_folder() == memory
    monkeypatch.setattr(joining, "ROOM", 1 << 62)
    assert joining.memory_folder() == Path(tempfile.gettempdir())


def test_a_folder_that_was_removed_does_not_end_who_writes_there(tmp_path: Path) -> None:
    write_json(tmp_path / "removed" / "slow-rank.json", {})


def test_the_watcher_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counters").mkdir()
    watcher = joining.start_watcher({"guards": True, "folder": str(tmp_path / "counters"), "remove": "", "grace": 1.0})
    watcher.communicate(b"done\n")
    assert watcher.returncode == 0


@pytest.mark.long
def test_a_signal_to_all_processes_does_not_end_the_watcher_before_its_ranks(tmp_path: Path) -> None:
    """Slurm and systemd send SIGTERM to all; the watcher removes the folder when the ranks have ended."""
    rank = subprocess.Popen(
        [sys.executable, "-c", SHARES, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == b"shared\n"
    folder = tmp_path / "counters"
    settings = {"folder": str(folder), "ranks": 1, "timeout": 1.0, "out": str(tmp_path), "store": ["", 0]}
    watcher = joining.start_watcher(settings | {"local_ranks": 1, "key": ""})
    while b"SigIgn" not in (status := Path(f"/proc/{watcher.pid}/status").read_bytes()) or not ignores_sigterm(status):
        assert watcher.poll() is None
    watcher.terminate()
    rank.communicate()
    assert watcher.wait() == 0
    assert not folder.exists()


SHARES = """
import sys
from pathlib import Path
from stretto import counters
folder = Path(sys.argv[1], "counters")
folder.mkdir()
counters.share(folder, 0)
print("shared", flush=True)
sys.stdin.read()
"""


def ignores_sigterm(status: bytes) -> bool:
    ignored = next(line for line in status.splitlines() if line.startswith(b"SigIgn"))
    return bool(int(ignored.split()[1], 16) >> 14 & 1)
