# SPDX-License-Identifier: Apache-2.0
"""The culprit is found from the states of all ranks and by a clock that the test moves."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.train import runs

from stretto.counters import Wait
from stretto.launch.failures import Failure
from stretto.launch.watch import RankWatch
from stretto.launch.watching.monitor import IMPORT_LIMIT, START_LIMIT, Monitor, Stall, list_ranks
from stretto.launch.watching.ranks import RankState
from stretto.launch.watching.stacks import GONE, STATES
from stretto.train.job import TrainingJob

LIMIT = 20.0  # seconds: a look a second


class Job:
    """A job of ranks in states that the test sets; it stands in for `LocalRanks`, too. Time passes as fast as it can.

    still: ranks that make no progress. threads: ranks whose checkpoint thread makes none.
    """

    def __init__(self, ranks: int, timeout: float = LIMIT) -> None:
        self.now = 100.0
        self.states = {rank: RankState(rank, "a-host", 1000 + rank, "step", 31, 0.0) for rank in range(ranks)}
        self.still: set[int] = set()
        self.threads: set[int] = set()
        self.counters: dict[int, object] = {}  # of ranks whose stacks can be read
        self.monitor = Monitor(self, ranks, timeout, clock=lambda: self.now)  # type: ignore[arg-type]

    def change(self, rank: int, **changes: object) -> None:
        self.states[rank] = replace(self.states[rank], **changes)

    def stop(self, *ranks: int, **changes: object) -> None:
        """Let ranks make no progress from now on."""
        for rank in ranks:
            self.still.add(rank)
            self.change(rank, **changes)

    def wait_in(self, rank: int, number: int, group: str = "data", ranks: tuple[int, ...] = ()) -> None:
        """Let a rank wait in a collective."""
        wait = Wait("all_reduce", ranks or tuple(self.states), group, f"name of {group}", number)
        entered = dict(self.states[rank].entered) | {wait.group_name: number}
        self.stop(rank, wait=wait, waits=True, entered=entered)

    def wait_for(self, rank: int, ranks: tuple[int, ...], what: str = "a message") -> None:
        self.stop(rank, wait=Wait(what, ranks), waits=True)

    def pass_time(self, seconds: float, cores: float = 0.0) -> None:
        """Let the monitor look once a second. cores: used by ranks without progress."""
        for _ in range(int(seconds)):
            self.now += 1.0
            for rank, state in self.states.items():
                is_still, is_saving = rank in self.still, rank in self.threads
                self.change(
                    rank,
                    idle=state.idle + 1.0 if is_still else 0.0,
                    cpu=state.cpu + cores if is_still else 0.0,
                    save_idle=state.save_idle + 1.0 if is_saving else 0.0,
                )
            self.monitor.look()

    def look(self) -> dict[int, RankState]:
        return dict(self.states)

    def forgive(self, seconds: float) -> None:
        for rank, state in self.states.items():
            self.change(rank, idle=state.idle - seconds)

    def stall(self) -> Stall:
        found = self.monitor.find_stall()
        assert found is not None
        return found


def test_ranks_that_work_are_no_stall():
    job = Job(4)
    job.pass_time(100)
    assert job.monitor.find_stall() is None
    assert job.monitor.find_warning() is None


def test_a_rank_whose_host_is_silent_is_named_within_the_limit_and_not_before_it_is_near():
    job = Job(4)
    job.pass_time(5)
    for rank in (0, 1, 3):
        job.wait_in(rank, 124)
    for second in range(1, 20):
        job.monitor.silent = {2: float(second)}
        job.pass_time(1)
        if second == 15:
            assert job.monitor.find_stall() is None
    stall = job.stall()
    assert (stall.kind, stall.culprits, stall.waiting) == ("silent", (2,), (0, 1, 3))
    assert Failure.of_stall(stall).order[1] == pytest.approx(time.time() - stall.seconds, abs=5)
    assert stall.seconds <= LIMIT
    assert stall.text == (
        "rank 2 (host a-host, pid 1002) is silent in step 31, phase step: nothing comes from its host any more: no "
        "progress for 19 s (train.timeout is 20 s); ranks 0, 1 and 3 wait for it in all_reduce number 124 of group data"
    )


def test_a_stalled_rank_is_named_and_not_those_that_wait_for_it():
    job = Job(4)
    job.pass_time(5)
    job.stop(1, phase="data", where=("loader.py:7 in read",), entered={"name of data": 123})
    for rank in (0, 2, 3):
        job.wait_in(rank, 124)
    job.pass_time(15)
    assert job.monitor.find_stall() is None
    job.pass_time(4)
    stall = job.stall()
    assert (stall.kind, stall.culprits, stall.waiting) == ("stalled", (1,), (0, 2, 3))
    assert stall.text == (
        "rank 1 (host a-host, pid 1001) is stuck in step 31, phase data, at loader.py:7 in read: no progress for 19 s "
        "(train.timeout is 20 s); ranks 0, 2 and 3 wait for it in all_reduce number 124 of group data"
    )


def test_a_stopped_process_is_the_culprit_whatever_it_waited_for_and_its_state_is_reported():
    job = Job(3)
    job.pass_time(5)
    for rank in range(3):
        job.wait_in(rank, 7)
    job.change(1, state=STATES["T"])
    job.pass_time(19)
    stall = job.stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0, 2))
    assert ", phase step: its process is stopped by a signal: no progress for 19 s" in stall.text


def test_a_chain_of_waits_leads_to_the_rank_that_does_not_wait():
    job = Job(4)
    job.pass_time(5)
    job.wait_in(0, 9, "x", (0, 1))
    job.wait_in(1, 5, "data", (1, 3))
    job.wait_in(2, 9, "x", (2, 3))
    job.stop(3)
    job.pass_time(19)
    stall = job.stall()
    assert stall.culprits == (3,)
    assert stall.text.endswith("; ranks 0-2 wait for it in all_reduce number 5 of group data and others")


def test_a_rank_that_waits_for_a_message_is_not_taken_for_the_one_that_has_to_send_it():
    """A pipeline of ranks 0 and 1 on ranks 2 and 3, and rank 1 is in a loop."""
    job = Job(4)
    job.pass_time(5)
    job.stop(1)
    job.wait_for(3, (1,), "the activation of stage 1")
    job.wait_in(0, 17, "batch", (0, 1))
    job.wait_in(2, 17, "batch", (2, 3))
    job.pass_time(19)
    stall = job.stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0, 2, 3))


def test_a_rank_that_waits_for_an_unknown_rank_is_not_the_culprit():
    job = Job(2)
    job.pass_time(5)
    job.stop(1)
    job.wait_for(0, ())
    job.pass_time(19)
    stall = job.stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0,))


def test_a_message_that_is_waited_for_is_reported():
    job = Job(2)
    job.pass_time(5)
    job.stop(1)
    job.wait_for(0, (1,), "the activation of stage 1")
    job.pass_time(19)
    assert job.stall().text.endswith("; rank 0 waits for it (the activation of stage 1)")


def test_a_rank_whose_last_progress_was_a_little_later_is_found():
    job = Job(2)
    job.pass_time(5)
    job.wait_in(0, 7)
    job.pass_time(6)
    job.stop(1)
    job.pass_time(13)
    assert job.stall().culprits == (1,)


def test_no_rank_is_named_while_the_awaited_rank_makes_progress():
    job = Job(2)
    job.pass_time(5)
    job.wait_in(0, 7)
    job.pass_time(30)
    assert job.monitor.find_stall() is None


def test_a_wait_that_only_the_stack_shows_is_a_wait():
    job = Job(2)
    job.pass_time(5)
    job.stop(0, waits=True, where=("distributed_c10d.py:9 in barrier",))
    job.stop(1)
    job.pass_time(19)
    stall = job.stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0,))
    assert stall.text.endswith("; rank 0 waits for it, at distributed_c10d.py:9 in barrier")


def test_a_stack_is_read_once_as_long_as_its_rank_makes_no_progress():
    job = Job(2)
    reads: list[int] = []

    class Counters:
        pid, progress, save_progress, wait = 1001, (7,), (), None

    def with_stack(state: RankState) -> RankState:
        reads.append(state.rank)
        return replace(state, where=("loader.py:7 in read",), waits=state.rank == 0)

    job.with_stack = with_stack  # type: ignore[attr-defined]
    job.counters = {0: Counters(), 1: Counters()}
    job.pass_time(5)
    job.stop(0, 1)
    job.pass_time(19)
    for _ in range(3):
        assert (job.stall().culprits, job.stall().waiting) == ((1,), (0,))
        job.pass_time(1)
    assert sorted(reads) == [0, 1]
    Counters.progress = (8,)
    assert ", at loader.py:7 in read: " in job.stall().text
    assert sorted(reads) == [0, 0, 1, 1]


def test_ranks_that_all_compute_may_do_so_as_long_as_they_like():
    job = Job(2)
    job.pass_time(5)
    job.stop(0, 1)
    job.pass_time(30, cores=0.9)
    assert job.monitor.find_stall() is None
    job.stop(0, 1, cpu=1.0)  # and now they do not: a disk that no longer answers
    job.pass_time(1)
    assert job.stall().culprits == (0, 1)


def test_ranks_that_all_compute_at_the_end_are_stuck():
    job = Job(2)
    job.stop(0, 1, phase="exit")
    job.pass_time(19, cores=0.9)
    assert job.stall().culprits == (0, 1)


def test_a_rank_that_is_ahead_of_another_waits_for_it_on_its_gpu():
    """Both are in the same line of Python, such as one that reads the loss, and neither has a wait in its counters."""
    job = Job(2)
    job.stop(0, entered={"name of data": 9})
    job.stop(1, entered={"name of data": 8})
    job.pass_time(19)
    assert job.stall().culprits == (1,)


def test_ranks_in_collectives_of_different_orders_are_named_together():
    job = Job(2)
    job.pass_time(5)
    job.wait_in(0, 3, "x")
    job.wait_in(1, 8, "data")
    job.pass_time(19)
    stall = job.stall()
    assert (stall.kind, stall.culprits) == ("stalled", (0, 1))


@pytest.mark.parametrize("has_missed_it", [False, True])
def test_ranks_in_collectives_that_nobody_counts_are_named_together(has_missed_it):
    """One rank has left out a barrier of the user's, or calls another collective."""
    job = Job(3)
    job.pass_time(5)
    job.stop(0, 2, waits=True, where=("distributed_c10d.py:9 in barrier, called at train.py:3 in step",))
    if has_missed_it:
        job.wait_in(1, 8, "data")
    else:
        job.stop(1, waits=True, where=("distributed_c10d.py:5 in broadcast, called at train.py:7 in step",))
    job.pass_time(19)
    stall = job.stall()
    assert (stall.kind, stall.culprits) == ("stalled", (0, 1, 2))
    assert "barrier, called at train.py:3 in step" in stall.text


def test_a_rank_in_a_barrier_that_nobody_counts_is_not_named_for_the_one_that_does_not_come():
    job = Job(3)
    job.pass_time(5)
    job.wait_in(0, 8, "data")
    job.stop(1, waits=True, where=("distributed_c10d.py:9 in barrier",))
    job.stop(2)
    job.pass_time(19)
    assert job.stall().culprits == (2,)


def test_a_process_that_ends_after_its_training_has_time_for_it():
    job = Job(2)
    job.stop(0, 1, phase="exit", is_done=True)
    job.pass_time(START_LIMIT - 5)
    assert job.monitor.find_stall([0, 1]) is None
    job.pass_time(6)
    found = job.monitor.find_stall([0, 1])
    assert found is not None
    assert found.culprits == (0, 1)


def test_ranks_in_one_collective_that_does_not_end_have_lost_their_connection():
    job = Job(3)
    job.pass_time(5)
    for rank in range(3):
        job.wait_in(rank, 3)
    job.pass_time(19)
    stall = job.stall()
    assert (stall.kind, stall.culprits) == ("lost connection", (0, 1, 2))
    assert "ranks 0-2 are all in all_reduce number 3 of group data" in stall.text


def test_a_writer_that_hangs_is_found_by_the_threads_that_wait_for_it():
    job = Job(3)
    job.pass_time(5)
    job.stop(0, 1, 2, phase="save", save=31, waits_for_thread=True, save_waits=True)
    job.change(1, save_waits=False, save_where="writing.py:97 in write_data")
    job.pass_time(19)
    stall = job.stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0, 2))
    assert (
        "is stuck in phase save of step 31, in the thread that writes, at writing.py:97 in write_data: " in stall.text
    )
    assert stall.text.endswith("; ranks 0 and 2 wait for it in the save of step 31")


def test_a_checkpoint_thread_that_hangs_is_found_although_all_ranks_train():
    job = Job(3)
    for rank in range(3):
        job.change(rank, save=28, save_where="writing.py:97 in write_data")
    job.pass_time(40)
    assert job.monitor.find_stall() is None
    for rank in (0, 2):
        job.change(rank, save_waits=True)
    job.threads = {0, 2}
    job.pass_time(40)
    assert job.monitor.find_stall() is None, "two ranks wait for one that writes"
    job.threads = {0, 1, 2}
    job.pass_time(9)
    assert job.monitor.find_warning() is None
    job.pass_time(2)
    assert job.monitor.find_warning().culprits == (1,)
    job.pass_time(8)
    stall = job.stall()
    assert (stall.kind, stall.culprits, stall.waiting) == ("stalled", (1,), (0, 2))
    assert stall.text == (
        "rank 1 (host a-host, pid 1001) is stuck in phase save of step 28, in the thread that writes, at "
        "writing.py:97 in write_data: no progress for 19 s (train.timeout is 20 s); ranks 0 and 2 wait for it in "
        "the save of step 28"
    )


def test_a_writer_that_hangs_is_found_while_its_main_thread_waits_at_a_barrier():
    job = Job(3)
    job.pass_time(5)
    job.stop(0, 2, phase="save", save=31, waits_for_thread=True, save_waits=True)
    job.stop(1, phase="save", save=31, waits=True)
    job.pass_time(19)
    stall = job.stall()
    assert (stall.culprits, stall.waiting) == ((1,), (0, 2))


def test_the_rank_that_others_wait_for_is_named_and_not_one_that_no_rank_waits_for():
    job = Job(4)
    job.pass_time(5)
    for rank in (0, 2):
        job.wait_in(rank, 7, "x", (0, 1, 2))
    job.stop(1, 3)
    job.pass_time(19)
    assert job.stall().culprits == (1,)


@pytest.mark.parametrize(("phase", "limit"), [("import", IMPORT_LIMIT), ("start", START_LIMIT), ("build", START_LIMIT)])
def test_a_rank_that_starts_has_its_own_limit_even_if_the_runs_is_shorter(phase, limit):
    job = Job(2)
    job.change(1, phase=phase)
    job.pass_time(5)
    job.stop(1)
    job.pass_time(25)
    assert job.monitor.find_stall() is None
    assert job.monitor.find_warning() is None
    job.pass_time(limit - 26)
    assert job.monitor.find_stall() is None
    job.pass_time(1)
    assert job.stall().culprits == (1,)


def test_a_rank_that_is_stopped_while_it_starts_has_no_longer_than_others():
    job = Job(2)
    job.stop(1, phase="import", state=STATES["T"])
    job.pass_time(19)
    assert job.stall().culprits == (1,)


def test_no_rank_causes_a_warning_before_half_of_its_own_limit():
    job = Job(4)
    for rank in (2, 3):
        job.change(rank, phase="load")
    job.wait_in(0, 7)
    job.pass_time(6)
    job.stop(2, 3)
    job.pass_time(6)  # rank 0 has waited for 12 seconds, and the others have done nothing for 6
    assert job.monitor.find_warning() is None
    job.pass_time(5)
    assert job.monitor.find_warning().culprits == (2, 3)
    starting = Job(2)
    starting.stop(1, phase="build")
    starting.wait_in(0, 7)
    starting.pass_time(15)
    assert starting.monitor.find_warning() is None, "a rank that starts has a minute"


def test_a_rank_that_never_shares_its_counters_is_named():
    job = Job(2)
    del job.states[1]
    job.pass_time(IMPORT_LIMIT - 1)
    assert job.monitor.find_stall() is None
    job.pass_time(1)
    stall = job.stall()
    assert stall.culprits == (1,)
    assert stall.text.startswith("rank 1 has not begun since its process was started: no progress for 600 s")


def test_a_process_that_is_stopped_before_it_shares_its_counters_is_named_with_its_state_at_the_limit():
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        job = Job(2)
        job.monitor.pids[0] = process.pid
        del job.states[0]
        job.pass_time(19)
        try:
            assert job.stall().culprits == (0,)
            assert job.stall().text.startswith(
                f"rank 0 (pid {process.pid}) has not begun since its process was started: its process is stopped by a "
                "signal: no progress for 19 s"
            )
        finally:
            process.kill()
    assert job.monitor.state_of(0) == GONE


def test_ranks_whose_wait_has_failed_are_no_culprits():
    job = Job(4)
    job.stop(0, 1, 2, 3, phase="start")
    job.pass_time(12)
    assert job.monitor.find_stall(limit=10, failed=[0, 1, 2]).culprits == (3,)
    for rank in (0, 1, 2):
        job.change(rank, has_failed=True)
    job.pass_time(1)
    assert job.monitor.find_stall(limit=10).culprits == (3,)


def test_ranks_that_have_lost_their_connection_and_are_about_to_report_it_are_not_stuck():
    """Ranks 2 and 3 wait for reports of their pipeline; the others are in a collective that these will not enter."""
    job = Job(4)
    job.pass_time(5)
    for rank in (0, 1):
        job.wait_in(rank, 4, "batch")
    for rank in (2, 3):
        job.wait_for(rank, ())
        job.change(rank, has_failed=True)
    job.pass_time(30)
    assert job.monitor.find_stall() is None


def test_a_warning_is_issued_once_at_half_of_the_limit():
    job = Job(2)
    job.pass_time(5)
    job.stop(1)
    job.wait_in(0, 7)
    job.pass_time(9)
    assert job.monitor.find_warning() is None
    job.pass_time(2)
    assert job.monitor.find_warning().culprits == (1,)
    job.pass_time(1)
    assert job.monitor.find_warning() is None
    job.still.clear()
    job.pass_time(1)
    assert job.monitor.find_warning() is None
    job.still = {0, 1}
    job.pass_time(11)
    assert job.monitor.find_warning().culprits == (1,), "it is late again"


def test_a_monitor_that_was_stopped_itself_does_not_take_the_others_for_stuck():
    job = Job(3)
    del job.states[2]  # not begun
    job.pass_time(5)
    job.now += 3000.0
    for rank in job.states:
        job.change(rank, idle=3000.0)
    job.monitor.look()
    job.monitor.look()
    assert job.monitor.idle(2) < 10
    job.states = {rank: replace(state, idle=0.0) for rank, state in job.states.items()}
    job.pass_time(20)
    assert job.monitor.find_stall() is None


def test_time_in_which_the_monitor_was_stopped_is_not_the_ranks():
    job = Job(2)
    job.stop(0, 1)
    job.pass_time(5)
    job.now += 300.0
    for rank in job.states:
        job.change(rank, idle=305.0)
    job.monitor.look()
    assert job.monitor.idle(0) == 5.0


def test_ranks_that_are_done_are_not_waited_for():
    job = Job(2)
    job.stop(1, is_done=True)
    job.pass_time(100)
    assert job.monitor.find_stall() is None
    assert job.monitor.watched(None) == [0]


def test_ranks_of_other_machines_are_watched_beside_those_of_this_one():
    job = Job(3)
    remote = job.states.pop(2)
    job.stop(0, 1)
    for rank in (0, 1):
        job.wait_in(rank, 7, ranks=(0, 1, 2))
    for second in range(1, 20):
        job.pass_time(1)
        job.monitor.look({2: replace(remote, host="b-host", idle=float(second))})
    stall = job.stall()
    assert (stall.culprits, stall.waiting) == ((2,), (0, 1))
    assert stall.text.startswith("rank 2 (host b-host, pid 1002) is stuck in step 31, phase step: no progress for 19 s")


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
    watch = RankWatch(tmp_path, TrainingJob(runs.configure(tmp_path / "out", "grid.data=2", f"train.timeout={LIMIT}")))
    watch.monitor = job.monitor
    job.pass_time(3)
    lost = "RuntimeError: gloo: Connection closed by peer"
    failures = [Failure(rank, lost, None, (2, at), "lost connection", True) for rank, at in ((1, 500.0), (0, 501.0))]
    found = watch.find_culprit([0, 1], failures)
    assert (found.kind, found.order) == ("lost connection", (0, 500.0))


def test_ranks_that_write_a_checkpoint_are_saving_while_they_make_progress(tmp_path: Path):
    job = Job(2)
    watch = RankWatch(tmp_path, TrainingJob(runs.configure(tmp_path / "out", "grid.data=2", f"train.timeout={LIMIT}")))
    watch.monitor = job.monitor
    job.pass_time(3)
    assert not watch.is_saving([0, 1], 5.0)
    job.change(1, phase="save")
    job.pass_time(3)
    assert watch.is_saving([0, 1], 5.0)
    assert not watch.is_saving([0], 5.0), "rank 1 has ended"
    job.stop(1)
    job.pass_time(6)
    assert not watch.is_saving([0, 1], 5.0)


def test_a_rank_that_is_stopped_while_all_import_is_named_alone():
    """On a loaded machine the others import for long, too, and have their own time for it."""
    job = Job(3)
    job.stop(0, 1, 2, phase="import", step=None)
    job.change(1, state=STATES["T"])
    job.pass_time(LIMIT)
    assert job.stall().culprits == (1,)


def test_a_rank_that_others_wait_for_while_it_imports_has_time():
    job = Job(3)
    job.stop(2, phase="import", step=None)
    for rank in (0, 1):
        job.wait_for(rank, (), "all ranks to start")
        job.change(rank, phase="start", step=None)
    job.pass_time(START_LIMIT + 30)
    assert job.monitor.find_stall() is None
    job.pass_time(IMPORT_LIMIT - START_LIMIT)
    assert job.stall().culprits == (2,)
