# SPDX-License-Identifier: Apache-2.0
"""One run at a time in a folder, whoever started it and however it ended."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.train import runs

from stretto.launch import run_lock
from stretto.launch.run_lock import command_lock, training_lock


def test_a_second_run_is_refused_and_leaves_the_first_ones_files_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    half_written = out / "checkpoints" / ".step-00000001.writing"
    half_written.mkdir(parents=True)
    with training_lock(out):
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"where a run is going on \(process {os.getpid()}\)"):
                runs.train_quietly(runs.configure(out, "train.steps=1"))
    assert half_written.is_dir()
    assert not torch.distributed.is_initialized()
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints"]


def test_a_command_does_not_start_where_another_is_or_where_ranks_of_one_still_are(tmp_path: Path) -> None:
    for lock in (command_lock, training_lock):
        with lock(tmp_path), pytest.raises(ValueError, match="set another out"), command_lock(tmp_path):
            pass
    out = tmp_path / "runs" / "new"
    with command_lock(out), training_lock(out):  # a command and its own rank 0
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_becomes_read_only_is_unlocked_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        with training_lock(tmp_path):
            pass
    with training_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_that_cannot_be_made_leaves_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_lock, "open", refuse, raising=False)
    with pytest.raises(OSError, match="No space left"), command_lock(tmp_path / "runs" / "new"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from stretto.launch.run_lock import command_lock\n"
        "with command_lock(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert killed.returncode == -9
    assert list(tmp_path.iterdir())
    with command_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
