# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun has started join their watcher: their folder, and errors that wait for a verdict."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto import counters
from stretto.launch.watching import joining
from stretto.launch.watching.joining import private_folder, watched

SHARE = """
import sys
from pathlib import Path
from stretto import counters
counters.share(Path(sys.argv[1]), 0)
print("shared", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    monkeypatch.setattr(joining, "memory_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of one of two ranks, whose counters are the test's alone and which has no watcher."""
    table = counters._Table()
    monkeypatch.setattr(counters, "_table", table)
    monkeypatch.setattr(counters, "_values", table.values)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "any"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "_begin", lambda timeout, out: None)
    return monkeypatch


def test_a_jobs_folder_is_this_users_alone(memory: Path) -> None:
    folder = private_folder("job-1")
    assert folder.parent == memory
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder("job-1") == folder
    assert private_folder("job-2") != folder


@pytest.mark.parametrize("kind", ["open to others", "link"])
def test_a_folder_that_somebody_else_may_have_made_is_refused(memory: Path, kind: str) -> None:
    folder = private_folder("job-1")
    folder.rmdir()
    if kind == "link":
        (memory / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(memory / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o755)
    with pytest.raises(PermissionError, match="is not this user's alone: another user may have made it"):
        private_folder("job-1")


def test_folders_of_jobs_that_have_ended_are_removed_and_others_stay(memory: Path) -> None:
    folder, empty = private_folder("job-1"), private_folder("job-2")
    process = subprocess.Popen(
        [sys.executable, "-c", SHARE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "shared\n"
        private_folder("job-3")
        assert folder.exists()
        process.kill()
        process.communicate()
        private_folder("job-3")
        assert not folder.exists()
        assert empty.exists(), "its ranks may not have begun yet"
    finally:
        process.kill()
        process.communicate()


def test_a_rank_whose_wait_has_failed_says_so_and_waits_for_a_verdict(
    torchrun: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under torchrun it waits in no collective any more, and would be named beside the rank that it has waited for."""
    paused: list[bool] = []
    torchrun.setattr(joining.time, "sleep", lambda seconds: paused.append(counters._values[counters._FAILED] > 0))
    with pytest.raises(RuntimeError), watched(5.0, tmp_path):
        raise RuntimeError("gloo: Connection closed by peer")
    assert paused == [True]
    assert counters._values[counters._DONE] == 1


def test_a_rank_that_has_failed_itself_does_not_wait(torchrun: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torchrun.setattr(joining.time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(ZeroDivisionError), watched(5.0, tmp_path):
        raise ZeroDivisionError
    assert counters._values[counters._FAILED] == 0


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "1"}, {"RANK": None}])
def test_one_process_alone_is_not_watched(
    torchrun: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str | None]
) -> None:
    torchrun.setattr(joining, "_begin", lambda timeout, out: pytest.fail("it was watched"))
    for name, value in variables.items():
        if value is None:
            torchrun.delenv(name)
        else:
            torchrun.setenv(name, value)
    with watched(5.0, tmp_path):
        pass
    assert os.listdir(tmp_path) == []
