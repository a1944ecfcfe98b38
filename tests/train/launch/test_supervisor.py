# SPDX-License-Identifier: Apache-2.0
"""Ranks that were asked to stop are killed after a time, unless they still write a checkpoint."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from stretto.train.launch.supervisor import StopTimeouts, Supervisor

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def stubborn():
    """A process that does not stop when it is asked to."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def check_for(supervisor, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end and supervisor.has_running_ranks():
        supervisor.check()
        time.sleep(0.02)


def test_a_rank_that_still_writes_a_checkpoint_has_longer_to_stop(stubborn, tmp_path: Path):
    watch = mock.MagicMock()
    watch.look.return_value = None
    watch.is_saving.return_value = True
    supervisor = Supervisor(StopTimeouts(stop=0.2, end=5.0), watch)
    supervisor.add(0, stubborn, tmp_path / "error.json")
    supervisor.request_stop()
    check_for(supervisor, 0.8)
    assert stubborn.poll() is None, "it was killed while it wrote"
    assert watch.is_saving.call_args.args == ([0], 0.2)
    watch.is_saving.return_value = False
    check_for(supervisor, 10.0)
    assert stubborn.poll() == -signal.SIGKILL
    assert not supervisor.failures, "ranks killed on request have not failed"
