# SPDX-License-Identifier: Apache-2.0
"""Who is the culprit, from the heartbeats of all ranks: a store and a clock that the test moves."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from stretto.train.health.beat import Beat, Save, list_ranks, process_space
from stretto.train.health.flight_recorder import OpenCollective
from stretto.train.health.heartbeat import Heartbeat
from stretto.train.health.peers import PeerWatch

from stretto.train.health import flight_recorder, progress, stacks
from stretto.train.health.failures import Failure
from stretto.train.health.monitor import START_LIMIT, Monitor
from stretto.train.launch.watch import RankWatch

LIMIT = 20.0  # seconds: a heartbeat a second


class Job:
    """A job of ranks that beat once a second as the test says; the time passes as fast as it can."""

    def __init__(self, ranks: int, timeout: float = LIMIT) -> None:
        self.now, self.store = 100.0, dist.HashStore()
        self.monitor = Monitor(self.store, ranks, timeout, clock=lambda: self.now)
        self.beats = {
            rank: Beat(rank, "another-host", 1000 + rank, 0, "step", 31, 0.0, line="x = y + 1") for rank in range(ranks)
        }
        self.stopped: set[int] = set()
        self.still: set[int] = set()

    def change(self, rank: int, **changes: object) -> None:
        self.beats[rank] = replace(self.beats[rank], **changes)

    def wait_in(self, rank: int, number: int, group: str = "data", ranks: tuple[int, ...] = (), **more: bool) -> None:
        """Let a rank wait in a collective."""
        members = ranks or tuple(self.beats)
        wait = OpenCollective("all_reduce", group, f"name of {group}", number, members, **more)
        self.still.add(rank)
        beat = self.beats[rank]
        entered = dict(beat.entered) | {wait.group_name: number}
        self.change(rank, waits=(*beat.waits, wait), entered=tuple(entered.items()), line="dist.all_reduce(t)")

    def pass_time(self, seconds: float) -> None:
        """Let ranks beat, and the monitor read, once a second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank, beat in self.beats.items():
                if rank not in self.stopped:
                    since = beat.since + 1.0 if rank in self.still else 0.0
                    self.change(rank, number=beat.number + 1, since=since)
                    self.store.set(str(rank), self.beats[rank].as_json())
            self.monitor.read()


def test_ranks_that_work_are_no_stall():
    job = Job(4)
    job.pass_time(100)
    assert job.monitor.find_stall() is None
    assert job.monitor.find_warning() is None


def test_a_silent_rank_is_named_within_the_limit_and_not_before_it_is_near():
    job = Job(4)
    job.pass_time(5)
    job.stopped.add(2)
    for rank in (0, 1, 3):
        job.wait_in(rank, 124)
    job.pass_time(15)
    assert job.monitor.find_stall() is None
    job.pass_time(4)
    stall = job.monitor.find_stall()
    assert (stall.kind, stall.culprits, stall.waiting) == ("silent", (2,), (0, 1, 3))
    assert Failure.of_stall(stall).order[1] == pytest.approx(time.time() - stall.seconds, abs=5)
    assert stall.seconds <= LIMIT
    assert stall.text == (
        "rank 2 (host another-host, pid 1002) is silent in step 31, phase step: its heartbeats have stopped: no "
        "progress for 19 s (train.timeout is 20 s); ranks 0, 1 and 3 wait for it in all_reduce number 124 of group data"
    )


def test_a_stalled_rank_is_named_and_not_those_that_wait_for_it():
    job = Job(4)
    job.pass_time(5)
    job.still.add(1)
    job.change(1, phase="data", where=("loader.py:7 in read",), entered=(("name of data", 123),))
    for rank in (0, 2, 3):
        job.wait_in(rank, 124)
    job.pass_time(19)
    stall = job.monitor.find_stall()
    assert (stall.kind, stall.culprits, stall.waiting) == ("stalled", (1,), (0, 2, 3))
    assert "rank 1 (host another-host, pid 1001) is stuck in step 31, phase data, at loader.py:7 in read" in stall.text


def test_a_chain_of_waits_leads_to_the_rank_that_does_not_wait():
    job = Job(4)
    job.pass_time(5)
    job.wait_in(0, 9, "x", (0, 1))
    job.wait_in(1, 5, "data", (1, 3))
    job.wait_in(2, 9, "x", (2, 3))
    job.still.add(3)
    job.pass_time(19)
    assert job.monitor.find_stall().culprits == (3,)


def test_a_rank_that_waits_for_a_message_is_not_taken_for_the_one_that_has_to_send_it():
    """A pipeline of ranks 0 and 1 on ranks 2 and 3, and rank 1 is in a loop."""
    job = Job(4)
    job.pass_time(5)
    job.still |= {1, 3}
    job.change(3, peers=(1,), message="the activation of stage 1", line="time.sleep(self._pause)")
    job.wait_in(0, 17, "batch", (0, 1))
    job.wait_in(2, 17, "batch", (2, 3))
    job.pass_time(19)
    stall = job.monitor.find_stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0, 2, 3))


def test_a_rank_that_waits_for_an_unknown_rank_is_not_the_culprit():
    job = Job(2)
    job.pass_time(5)
    job.still |= {0, 1}
    job.change(0, peers=(), line="time.sleep(self._pause)")
    job.pass_time(19)
    stall = job.monitor.find_stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0,))


def test_a_message_that_is_waited_for_is_reported():
    job = Job(2)
    job.pass_time(5)
    job.still |= {0, 1}
    job.change(0, peers=(1,), message="the activation of stage 1")
    job.pass_time(19)
    assert job.monitor.find_stall().text.endswith("; rank 0 waits for it (the activation of stage 1)")


def test_a_rank_whose_last_progress_was_a_little_later_is_found():
    job = Job(2)
    job.pass_time(5)
    job.wait_in(0, 7)
    job.pass_time(6)
    job.still.add(1)
    job.pass_time(13)
    assert job.monitor.find_stall().culprits == (1,)


def test_no_rank_is_named_while_the_awaited_rank_makes_progress():
    job = Job(2)
    job.pass_time(5)
    job.wait_in(0, 7)
    job.pass_time(30)
    assert job.monitor.find_stall() is None


def test_without_a_flight_recorder_the_line_of_python_shows_which_rank_waits():
    job = Job(2)
    job.pass_time(5)
    job.still |= {0, 1}
    job.change(0, line="work.wait()")
    job.pass_time(19)
    stall = job.monitor.find_stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0,))


def test_ranks_that_all_compute_may_do_so_as_long_as_they_like():
    job = Job(2)
    job.pass_time(5)
    job.still |= {0, 1}
    for _ in range(30):
        for rank in job.beats:
            job.change(rank, cpu=job.beats[rank].cpu + 0.9)
        job.pass_time(1)
    assert job.monitor.find_stall() is None
    for rank in job.beats:  # and now they do not: a disk that no longer answers
        job.change(rank, cpu=1.0)
    job.pass_time(1)
    assert job.monitor.find_stall().culprits == (0, 1)


def test_ranks_in_collectives_of_different_orders_are_named_together():
    job = Job(2)
    job.pass_time(5)
    job.wait_in(0, 3, "x")
    job.wait_in(1, 8, "data")
    job.pass_time(19)
    stall = job.monitor.find_stall()
    assert (stall.kind, stall.culprits) == ("stalled", (0, 1))


def test_ranks_in_one_collective_that_does_not_end_have_lost_their_connection():
    job = Job(3)
    job.pass_time(5)
    for rank in range(3):
        job.wait_in(rank, 3)
    job.pass_time(19)
    stall = job.monitor.find_stall()
    assert (stall.kind, stall.culprits) == ("lost connection", (0, 1, 2))
    assert "ranks 0-2 are all in all_reduce number 3 of group data" in stall.text


def test_a_writer_that_hangs_is_found_by_the_threads_that_wait_for_it():
    job = Job(3)
    job.pass_time(5)
    for rank in (0, 2):
        job.wait_in(rank, 3, "saves", is_background=True)
    for rank in range(3):
        job.still.add(rank)
        job.change(rank, line="self._thread.join()", phase="save")
    job.change(1, line="file.write(data)")
    job.pass_time(19)
    assert job.monitor.find_stall().culprits == (1,)


def test_a_checkpoint_thread_that_hangs_is_found_although_all_ranks_train():
    job = Job(3)
    saves = dict.fromkeys(range(3), 0.0)

    def pass_time(seconds: int, writes: set[int]) -> None:
        for _ in range(seconds):
            for rank in saves:
                saves[rank] = 0.0 if rank in writes else saves[rank] + 1.0
                job.change(rank, saves=Save(28, saves[rank], "writing.py:97 in write_data"))
            job.pass_time(1)

    pass_time(40, {0, 1, 2})
    assert job.monitor.find_stall() is None
    for rank in (0, 2):
        job.wait_in(rank, 3, "saves", is_background=True)
    job.still.clear()
    pass_time(40, {1})
    assert job.monitor.find_stall() is None, "two ranks wait for one that writes"
    pass_time(9, set())
    assert job.monitor.find_warning() is None
    pass_time(2, set())
    assert job.monitor.find_warning().culprits == (1,)
    pass_time(8, set())
    stall = job.monitor.find_stall()
    assert (stall.kind, stall.culprits, stall.waiting) == ("stalled", (1,), (0, 2))
    assert stall.text == (
        "rank 1 (host another-host, pid 1001) is stuck in phase save of step 28, in the thread that writes, at "
        "writing.py:97 in write_data: no progress for 19 s (train.timeout is 20 s); ranks 0 and 2 wait for it in "
        "all_reduce number 3 of group saves"
    )


def test_a_writer_that_hangs_is_found_while_its_main_thread_waits_at_a_barrier():
    job = Job(3)
    job.pass_time(5)
    for rank in range(3):
        job.still.add(rank)
        job.change(rank, phase="save", line="if lock.acquire(block, timeout):")
    for rank in (0, 2):
        job.wait_in(rank, 3, "saves", is_background=True)
        job.change(rank, line="if lock.acquire(block, timeout):")
    job.change(1, line="group.monitored_barrier(limit)")
    job.pass_time(19)
    stall = job.monitor.find_stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0, 2))


def test_the_rank_that_others_wait_for_is_named_and_not_one_that_no_rank_waits_for():
    job = Job(4)
    job.pass_time(5)
    for rank in (0, 2):
        job.wait_in(rank, 7, "x", (0, 1, 2))
    job.still |= {1, 3}
    job.change(1, line="process.wait()")
    job.pass_time(19)
    assert job.monitor.find_stall().culprits == (1,)


def test_a_rank_that_starts_has_a_minute_even_if_the_limit_is_shorter():
    job = Job(2)
    job.change(1, phase="build")
    job.pass_time(5)
    job.still.add(1)
    job.pass_time(25)
    assert job.monitor.find_stall() is None
    assert job.monitor.find_warning() is None
    job.pass_time(START_LIMIT - 25)
    assert job.monitor.find_stall().culprits == (1,)


def test_no_rank_causes_a_warning_before_half_of_its_own_limit():
    job = Job(4)
    for rank in (2, 3):
        job.change(rank, phase="load", line="import torch")
    job.wait_in(0, 7)
    job.pass_time(6)
    job.still |= {2, 3}
    job.pass_time(6)  # rank 0 has waited for 12 seconds, and the others have done nothing for 6
    assert job.monitor.find_warning() is None
    job.pass_time(5)
    assert job.monitor.find_warning().culprits == (2, 3)
    starting = Job(2)
    starting.change(1, phase="build")
    starting.wait_in(0, 7)
    starting.still.add(1)
    starting.pass_time(15)
    assert starting.monitor.find_warning() is None, "a rank that starts has a minute"


def test_a_rank_that_never_sends_a_heartbeat_is_named():
    job = Job(2)
    job.stopped.add(1)
    job.pass_time(START_LIMIT + 1)
    stall = job.monitor.find_stall()
    assert stall.culprits == (1,)
    assert "rank 1 has not sent a heartbeat since its process was started" in stall.text


def test_a_process_that_is_stopped_before_its_first_heartbeat_is_named_with_its_state_at_the_limit():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        job = Job(2)
        job.monitor.pids[0] = process.pid
        job.stopped.add(0)
        job.pass_time(19)
        stall = job.monitor.find_stall()
        assert (stall.kind, stall.culprits) == ("silent", (0,))
        assert stall.text.startswith(
            f"rank 0 (pid {process.pid}) has not sent a heartbeat since its process was started: its process is "
            "stopped by a signal: no progress for 19 s"
        )
    finally:
        process.kill()
        process.wait()


def test_ranks_whose_wait_has_failed_are_no_culprits():
    job = Job(4)
    job.still |= set(range(4))
    for rank in range(4):
        job.change(rank, phase="start", line="time.sleep(0.02)")
    job.pass_time(12)
    assert job.monitor.find_stall(limit=10, failed=[0, 1, 2]).culprits == (3,)


def test_ranks_that_have_lost_their_connection_and_are_about_to_report_it_are_not_stuck():
    """Ranks 2 and 3 wait for reports of their pipeline; the others are in a collective that these will not enter."""
    job = Job(4)
    job.pass_time(5)
    for rank in (0, 1):
        job.wait_in(rank, 4, "batch")
    for rank in (2, 3):
        job.still.add(rank)
        job.change(rank, peers=(), has_failed=True, line="lock.acquire(block, timeout)")
    job.pass_time(30)
    assert job.monitor.find_stall() is None


def test_a_warning_is_issued_once_at_half_of_the_limit():
    job = Job(2)
    job.pass_time(5)
    job.stopped.add(1)
    job.wait_in(0, 7)
    job.pass_time(9)
    assert job.monitor.find_warning() is None
    job.pass_time(2)
    assert job.monitor.find_warning().culprits == (1,)
    job.pass_time(1)
    assert job.monitor.find_warning() is None


def test_a_monitor_that_was_stopped_itself_does_not_take_the_others_for_silent():
    job = Job(2)
    job.pass_time(5)
    job.now += 300.0
    job.monitor.read()
    assert job.monitor.find_stall() is None
    job.pass_time(20)
    assert job.monitor.find_stall() is None


def test_ranks_that_are_done_are_not_waited_for():
    job = Job(2)
    job.change(1, is_done=True)
    job.pass_time(3)
    job.stopped.add(1)
    job.pass_time(100)
    assert job.monitor.find_stall() is None


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        ([0, 1, 2, 3, 4, 5, 6, 9], "ranks 0-6 and 9"),
        ([0, 1, 2], "ranks 0-2"),
    ],
)
def test_ranks_are_listed_as_people_do(ranks, text):
    assert list_ranks(ranks) == text


def test_a_failure_is_known_since_the_first_rank_reported_its_lost_connection(tmp_path):
    job = Job(2)
    watch = RankWatch(tmp_path, 2, LIMIT)
    watch.monitor = job.monitor
    job.pass_time(3)
    lost = "RuntimeError: gloo: Connection closed by peer"
    failures = [Failure(rank, lost, None, (2, at), "lost connection", True) for rank, at in ((1, 500.0), (0, 501.0))]
    found = watch.find_culprit([0, 1], failures)
    assert (found.kind, found.order) == ("lost connection", (0, 500.0))


def test_a_collective_of_a_writer_that_has_ended_is_not_one_that_is_waited_in(monkeypatch):
    idents = []

    def write():
        with progress.writing(4, lambda: 0, "7"):
            idents.append(threading.get_ident())

    writer = threading.Thread(target=write)
    writer.start()
    writer.join()
    entry = {"is_p2p": False, "process_group": ("7", "saves"), "retired": False, "state": "scheduled"}
    entry |= {"profiling_name": "gloo:gather", "collective_seq_id": 35, "thread_id": str(idents[0])}
    monkeypatch.setattr(flight_recorder, "dump", lambda: {"gloo": {"entries": [entry]}})
    assert flight_recorder.find_collectives() == ([], {"7": 35})
    entry["thread_id"] = str(threading.get_ident())
    (wait,), _ = flight_recorder.find_collectives()
    assert (wait.group, wait.number, wait.is_background) == ("saves", 35, False)


def test_ranks_that_write_a_checkpoint_are_saving_while_they_make_progress(tmp_path: Path):
    job = Job(2)
    watch = RankWatch(tmp_path, 2, LIMIT)
    watch.monitor = job.monitor
    job.pass_time(3)
    assert not watch.is_saving([0, 1], 5.0)
    job.change(1, phase="save")
    job.pass_time(3)
    assert watch.is_saving([0, 1], 5.0)
    assert not watch.is_saving([0], 5.0), "rank 1 has ended"
    job.still.add(1)
    job.pass_time(6)
    assert not watch.is_saving([0, 1], 5.0)


def test_a_process_of_another_container_is_neither_inspected_nor_killed_by_its_pid():
    """Containers with the host's network have its name, and each has a process with the same number."""
    job = Job(2)
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            other.send_signal(signal.SIGSTOP)
            os.waitpid(other.pid, os.WUNTRACED)
            job.change(0, host=socket.gethostname(), pid=other.pid, processes=process_space())
            job.change(1, host=socket.gethostname(), pid=other.pid, processes="another machine or container")
            job.pass_time(1)
            assert job.monitor.state_of(0) == "its process is stopped by a signal"
            assert job.monitor.state_of(1) is None
            watch = PeerWatch(job.store, 1, 2, LIMIT, Path())
            assert [beat.rank for beat in watch._beats_here([0, 1])] == [0]
        finally:
            other.kill()


STOPS = """
import os, signal, threading, time
from stretto.train.health import stacks

def spin():
    while True:
        time.sleep(0.0005)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def go_on():
    sum(number for number in range(2000))

stacks.register()
print(stacks.stack_file(), flush=True)
for _ in range(6):
    threading.Thread(target=spin, daemon=True).start()
while True:
    stop()
    go_on()
"""


def test_the_stack_of_a_stopped_process_is_that_of_where_it_was_stopped():
    """It is continued to write its stacks: its main thread must not go on before, whichever thread writes them."""
    with subprocess.Popen([sys.executable, "-c", STOPS], stdout=subprocess.PIPE, text=True) as process:
        try:
            descriptor = int(process.stdout.readline())
            for _ in range(20):
                os.waitpid(process.pid, os.WUNTRACED)
                assert "in stop\n" in (stacks.read_stacks(process.pid, descriptor) or "")
                process.send_signal(signal.SIGCONT)
        finally:
            process.kill()


def test_a_process_that_was_stopped_is_stopped_again_when_its_stacks_have_been_read(monkeypatch):
    """On a busy machine it runs on after the signal, and would write over what was read."""
    kill, timers = os.kill, []

    def kill_late(pid, number):
        if number != signal.SIGSTOP:
            return kill(pid, number)
        timers.append(threading.Timer(0.3, kill, (pid, number)))
        return timers[-1].start()

    # It stops once, by itself.
    code = STOPS.replace("while True:\n    stop()\n", "stop()\nwhile True:\n")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            descriptor = int(process.stdout.readline())
            os.waitpid(process.pid, os.WUNTRACED)
            monkeypatch.setattr(os, "kill", kill_late)
            assert "in stop\n" in (stacks.read_stacks(process.pid, descriptor) or "")
            assert stacks.process_state(process.pid) == "its process is stopped by a signal"
        finally:
            for timer in timers:
                timer.join()
            process.kill()


def test_a_rank_that_asks_for_a_verdict_reports_that_its_wait_has_failed(monkeypatch, tmp_path):
    """Under torchrun it waits in no collective any more, and would be named beside the rank that it has waited for."""
    heartbeat = Heartbeat(5.0, tmp_path)
    heartbeat._store, heartbeat._peers, heartbeat.interval = mock.Mock(), mock.Mock(), 0.0
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    monkeypatch.setattr("stretto.train.health.heartbeat.VERDICT_LIMIT", 0.0)
    assert not heartbeat._beat(False).has_failed
    heartbeat.wait_for_verdict()
    assert heartbeat._beat(False).has_failed
