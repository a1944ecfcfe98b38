# SPDX-License-Identifier: Apache-2.0
"""Ranks that were asked to stop are killed after a time, unless they still write a checkpoint; some do not end then."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from stretto.launch import supervisor as supervisor_module
from stretto.launch.supervisor import StopTimeouts, Supervisor, UnkillableError

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


@pytest.mark.long
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


@pytest.fixture
def no_kill(monkeypatch):
    """Let no SIGKILL arrive, as at a process that waits in a driver. Yields the processes that were to be killed."""
    killed = []
    monkeypatch.setattr(supervisor_module.os, "killpg", lambda pid, number: killed.append(pid))
    return killed


@pytest.fixture
def failed():
    """A process that has exited with a status."""
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True)
    process.wait()
    return process


def test_a_rank_that_ends_long_after_it_was_killed_is_not_named_as_the_failure(stubborn, failed, no_kill, tmp_path):
    """The memory of a large process takes the kernel seconds to free."""
    supervisor = Supervisor(StopTimeouts(report=0.1, end=0.1, kill=60.0))
    supervisor.add(0, stubborn, tmp_path / "error-0.json")
    supervisor.add(1, failed, tmp_path / "error-1.json")
    supervisor.check()
    assert [failure.rank for failure in supervisor.failures] == [1]
    stubborn.kill()
    stubborn.wait()
    supervisor.check()
    assert [(failure.rank, failure.reason) for failure in supervisor.failures] == [(1, "it exited with status 3")]
    assert no_kill.count(failed.pid) == 1, "another process may have its number by now"


@pytest.mark.long
@pytest.mark.parametrize("is_stop", [False, True])
def test_a_rank_that_nothing_ends_is_given_up_after_a_time(stubborn, failed, no_kill, tmp_path, is_stop):
    supervisor = Supervisor(StopTimeouts(stop=0.1, report=0.1, end=0.1, kill=0.5))
    supervisor.add(3, stubborn, tmp_path / "error-0.json")
    if is_stop:
        supervisor.request_stop()
    else:
        supervisor.add(1, failed, tmp_path / "error-1.json")
    with pytest.raises(UnkillableError, match=rf"within 0\.5 s after SIGKILL: rank 3 \(pid {stubborn.pid}\): "):
        check_for(supervisor, 20.0)
    assert len(supervisor.failures) == (0 if is_stop else 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_rank_that_ends_by_the_signal_that_all_processes_got_has_not_failed(tmp_path, number, monkeypatch):
    """A scheduler signals launcher and ranks at once, before these handle signals."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, which the supervisor respects
        monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
    supervisor = Supervisor(StopTimeouts(report=0.1, end=0.1))
    supervisor.add(0, rank, tmp_path / "error.json")
    with supervisor.handling_signals():
        rank.send_signal(number)
        signal.raise_signal(number)
        rank.wait()
        supervisor.check()
    assert supervisor.failures == []
    assert supervisor.stop_signal == number
