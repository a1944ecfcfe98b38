# SPDX-License-Identifier: Apache-2.0
"""The MPS daemon of ranks that share a GPU: it ends with its block, and with the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.processes import LIMIT

from stretto.memory.mps import mps_daemon


def make_mps(folder: Path, text: str) -> None:
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(f"#!{sys.executable}\n{text}")
    control.chmod(0o755)


def test_the_mps_daemon_is_ended_and_its_folder_removed_after_an_error_too(tmp_path, monkeypatch):
    log = tmp_path / "log"
    make_mps(
        tmp_path,
        "import os, sys\n"
        f"with open({str(log)!r}, 'a') as log:\n"
        "    command = '' if sys.argv[1:] else sys.stdin.read().strip()\n"
        "    print(*sys.argv[1:], command, os.environ['CUDA_MPS_PIPE_DIRECTORY'], file=log)\n",
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    given: dict[str, str] = {}

    def interrupt_a_client() -> None:
        with mps_daemon(25) as variables:
            given.update(variables)
            assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt_a_client()
    folder = given["CUDA_MPS_PIPE_DIRECTORY"]
    assert given["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert given["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"  # two by default, and streams of two groups share one
    assert [line.split() for line in log.read_text().splitlines()] == [["-d", folder], ["quit", folder]]
    assert not Path(folder).exists()


@pytest.mark.long
def test_the_mps_daemon_is_ended_where_the_process_that_started_it_is_killed(tmp_path):
    log, folders = tmp_path / "log", tmp_path / "folders"
    folders.mkdir()
    text = f"import sys\nopen({str(log)!r}, 'a').write(''.join(sys.argv[1:]) or sys.stdin.read())\n"
    make_mps(tmp_path, text)
    program = (
        "import os, signal\nfrom stretto.memory.mps import mps_daemon\n"
        "with mps_daemon(25):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PATH": str(tmp_path), "TMPDIR": str(folders)}
    )
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + LIMIT
    while list(folders.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert log.read_text() == "-dquit\n"


def test_a_machine_without_mps_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="nvidia-cuda-mps-control, of NVIDIA's driver, is not on PATH"):
        with mps_daemon(25):
            pass
    make_mps(tmp_path, "import sys; sys.exit(1)")
    with pytest.raises(ValueError, match="the MPS daemon does not start"):
        with mps_daemon(25):
            pass
