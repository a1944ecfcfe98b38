# SPDX-License-Identifier: Apache-2.0
"""Counters of a rank, as another process reads them from the mapped file."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stretto import counters
from stretto.counters import Counters, Reader, Wait, read_folder

RANK = """
import json, os, sys, threading
from pathlib import Path
from stretto import counters
names = {"counters": counters, "os": os, "threading": threading}
for line in sys.stdin:
    exec(json.loads(line), names)
    print("done", flush=True)
"""


class Rank:
    """A process that stores its counters as the test says. It shares them in `folder` at once."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.path = folder / f"rank-{rank}.counters"
        self.do(f"from pathlib import Path; counters.share(Path({str(folder)!r}), {rank})")
        self._reader = Reader(self.path)

    def do(self, code: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def read(self) -> Counters:
        return self._reader.read()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.end()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of this process that are the test's alone."""
    table = counters._Table()
    monkeypatch.setattr(counters, "_table", table)
    monkeypatch.setattr(counters, "_values", table.values)


def test_another_process_reads_what_a_rank_stores(rank: Rank) -> None:
    rank.do("counters.note('start')")
    assert (rank.read().phase, rank.read().step) == ("start", None)
    rank.do("counters.note('step', 7)")
    rank.do("counters.name_groups({'3': 'data'}); index = counters.group_index('3', 'unnamed', (0, 2))")
    rank.do("number = counters.enter_collective(index)")
    rank.do("before = counters.begin_wait('all_reduce', index, number)")
    found = rank.read()
    assert (found.rank, found.pid, found.phase, found.step) == (0, rank.process.pid, "step", 7)
    assert found.wait == Wait("all_reduce", (0, 2), "data", "3", 1)
    assert found.entered == {"3": 1}
    assert found.is_running
    assert (found.is_done, found.has_failed, found.stopped, found.save) == (False, False, 0, None)
    rank.do("counters.end_wait(before); counters.mark_done(); counters.mark_failed(); counters.mark_stopped(15)")
    found = rank.read()
    assert (found.wait, found.is_done, found.has_failed, found.stopped) == (None, True, True, 15)


def test_counters_of_before_the_file_was_made_are_in_it(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    try:
        rank.do("counters.note('data', 12)")
        rank.do("counters._detach(); counters._table.groups.clear(); counters.group_index('0', 'world', (0, 1))")
        rank.do(f"counters.share(Path({str(tmp_path)!r}), 5)")
        found = {each.rank: each for each in read_folder(tmp_path, {})}[5]
        assert (found.phase, found.step, found.entered) == ("data", 12, {"0": 0})
    finally:
        rank.end()


@pytest.mark.parametrize(
    "code",
    ["counters.note('step', 3)", "counters.note('step', 4)", "counters.advance()", "counters.enter_collective(index)"],
)
def test_each_kind_of_progress_shows(rank: Rank, code: str) -> None:
    rank.do("index = counters.group_index('3', 'data', (0, 2)); counters.note('step', 3)")
    before = rank.read().progress
    assert rank.read().progress == before
    rank.do(code)
    assert rank.read().progress != before


def test_a_wait_is_no_progress(rank: Rank) -> None:
    rank.do("counters.note('step', 3)")
    before = rank.read().progress
    rank.do("waiting = counters.waiting_for([4, 1], 'the gradient of stage 2'); waiting.__enter__()")
    assert rank.read().wait == Wait("the gradient of stage 2", (1, 4))
    assert rank.read().progress == before
    rank.do("waiting.__exit__(None, None, None)")
    assert rank.read().wait is None


def test_a_wait_after_a_failure_says_so_until_it_ends(rank: Rank) -> None:
    rank.do("waiting = counters.waiting_for((), 'reports', has_failed=True); waiting.__enter__()")
    assert rank.read().has_failed
    rank.do("waiting.__exit__(None, None, None)")
    assert not rank.read().has_failed


def test_the_inner_of_two_waits_is_seen_until_it_ends(rank: Rank) -> None:
    rank.do("outer = counters.begin_wait(('all ranks', 1)); inner = counters.begin_wait('barrier')")
    assert rank.read().wait == Wait("barrier")
    rank.do("counters.end_wait(inner)")
    assert rank.read().wait == Wait("all ranks", (1,))
    rank.do("counters.end_wait(outer)")
    assert rank.read().wait is None


def test_nested_waits_count_once(own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(counters, "time", SimpleNamespace(monotonic_ns=lambda: clock.now, time_ns=lambda: clock.now))
    with counters.waiting_for([1], "a"):
        clock.now += 10
        with counters.waiting_for([2], "b"):
            clock.now += 5
        clock.now += 1
    clock.now += 100
    assert counters._values[counters._WAITED] == 16


def test_a_phase_ends_with_its_block_but_not_with_an_error(own: None) -> None:
    def phase() -> str:
        return counters.PHASES[counters._values[counters._PHASE]]

    counters.note("step", 3)
    with counters.phase("save", 4):
        assert (phase(), counters._values[counters._STEP]) == ("save", 4)
    assert (phase(), counters._values[counters._STEP]) == ("step", 3)
    with pytest.raises(OSError, match="full"), counters.phase("save"):
        raise OSError("full")
    assert phase() == "save"
    with pytest.raises(ValueError, match="phase is 'sleep', but must be one of import, start, "):
        counters.note("sleep")


def in_thread_of_c(function: Callable[[], object]) -> None:
    """Call a function in a thread that Python has not started, like those of the autograd engine."""
    found = []
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    callback = kind(lambda _: found.append(function()))
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, callback, None) == 0
    assert libc.pthread_join(thread, None) == 0
    assert len(found) == 1


def test_waits_of_the_autograd_engine_are_the_ranks_and_those_of_background_threads_are_not(own: None) -> None:
    import threading

    seen: list[object] = []

    def wait() -> None:
        with counters.waiting_for([2], "a message"):
            seen.append(counters.current_wait())

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    in_thread_of_c(wait)
    assert seen == [None, ("a message", (2,))]
    assert counters.current_wait() is None


def test_progress_of_background_threads_is_the_ranks_only_where_it_may_wait_for_them(rank: Rank) -> None:
    advance = "thread = threading.Thread(target=counters.advance); thread.start(); thread.join()"
    rank.do("counters.note('step', 3)")
    before = rank.read()
    rank.do(advance)
    assert rank.read().progress == before.progress
    assert rank.read().save_progress != before.save_progress
    rank.do("counters.note('save', 3)")
    before = rank.read()
    rank.do(advance)
    assert rank.read().progress != before.progress


def test_a_save_in_a_thread_is_seen_with_its_thread(rank: Rank) -> None:
    rank.do(
        "go, end = threading.Event(), threading.Event()\n"
        "def write():\n"
        "    with counters.saving(28):\n"
        "        go.set()\n"
        "        end.wait()\n"
        "thread = threading.Thread(target=write); thread.start(); go.wait()"
    )
    found = rank.read()
    assert found.save == 28
    assert Path(f"/proc/{found.pid}/task/{found.save_thread}").exists()
    assert found.save_thread != found.pid
    rank.do("end.set(); thread.join()")
    assert rank.read().save is None


def test_names_and_groups_beyond_the_limits_are_left_out_and_nothing_else(rank: Rank) -> None:
    rank.do("wait = counters.begin_wait('first'); index = counters.group_index('3', 'data', (0, 2))")
    rank.do("first = [counters.group_index(f'g{n}', f'g{n}', (0,)) for n in range(counters.MAX_GROUPS)]")
    rank.do("assert first[-1] == -1 and counters.enter_collective(first[-1]) == 0")
    rank.do("assert counters.enter_collective(index) == 1")
    rank.do("for n in range(counters.MAX_NAMES + 9): counters.end_wait(counters.begin_wait(f'name {n}'))")
    found = rank.read()
    assert found.wait == Wait("first")
    assert found.entered["3"] == 1
    assert len(found.entered) == counters.MAX_GROUPS
    rank.do("late = counters.begin_wait('one too many', index, 1)")
    assert rank.read().wait is None, "it has no name"
    rank.do("counters.end_wait(late)")
    assert rank.read().wait == Wait("first")


def test_a_forked_process_stores_nothing_in_its_parents_counters(rank: Rank) -> None:
    rank.do("counters.note('data', 3)")
    before = rank.read()
    names = rank.path.with_suffix(".names").read_bytes()
    rank.do(
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    counters.note('exit', 99)\n"
        "    counters.begin_wait('a new name')\n"
        "    os._exit(0 if counters.shared_folder() is None else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0"
    )
    assert rank.read() == before
    assert rank.path.with_suffix(".names").read_bytes() == names


def test_a_process_can_be_forked_while_another_thread_adds_a_name(rank: Rank) -> None:
    rank.do(
        "counters._table.lock.acquire()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    import signal; signal.alarm(20)\n"
        "    counters.begin_wait('a new name')\n"
        "    os._exit(0)\n"
        "counters._table.lock.release()\n"
        "assert os.waitpid(pid, 0)[1] == 0"
    )


def test_the_counters_of_a_killed_rank_are_read_and_its_process_is_not_taken_for_running(rank: Rank) -> None:
    rank.do("counters.note('step', 3)")
    os.kill(rank.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, rank.process.pid, os.WEXITED | os.WNOWAIT)  # it waits to be reaped
    assert not rank.read().is_running
    rank.end()
    assert not rank.read().is_running
    assert (rank.read().phase, rank.read().step) == ("step", 3)


def change(path: Path, index: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    memoryview(content).cast("q")[index] = value
    path.write_bytes(content)


def test_another_process_with_the_number_of_a_rank_is_not_taken_for_it(rank: Rank, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy)
    (found,) = read_folder(copy, {})
    assert found.is_running
    change(copy / "rank-0.counters", counters._STARTED, found.started - 1)
    (found,) = read_folder(copy, {})
    assert not found.is_running


@pytest.mark.parametrize("pid", [0, -1])
def test_numbers_that_are_no_processes_do_not_run(rank: Rank, tmp_path: Path, pid: int) -> None:
    """To signal them would end all processes of a group, or of the user."""
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy)
    change(copy / "rank-0.counters", counters._PID, pid)
    change(copy / "rank-0.counters", counters._STARTED, 0)
    (found,) = read_folder(copy, {})
    assert not found.is_running


GARBAGE: dict[str, tuple[str, bytes]] = {
    "empty": (".counters", b""),
    "cut": (".counters", bytes(100)),
    "another version": (".counters", (99).to_bytes(8, "little") + bytes(8 * counters._SIZE - 8)),
    "noise": (".counters", bytes(range(256)) * (8 * counters._SIZE // 256 + 1)),
    "names that are no text": (".names", b"\xff\xfe\n\xff\n"),
    "names that are no JSON": (".names", b"{\n[[[\n"),
    "names that are another JSON": (".names", b'[1]\n""\n{}\n5\n'),
    "deep names": (".names", b"[" * 100_000 + b"\n"),
    "empty names": (".names", b""),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_files_that_no_rank_has_written_are_passed_over(rank: Rank, tmp_path: Path, name: str) -> None:
    rank.do("counters.note('step', 3); counters.group_index('3', 'data', (0, 2)); counters.begin_wait('a wait')")
    for suffix in (".counters", ".names"):
        shutil.copy(rank.path.with_suffix(suffix), tmp_path / f"rank-1{suffix}")
    suffix, content = GARBAGE[name]
    (tmp_path / f"rank-1{suffix}").write_bytes(content)
    (tmp_path / "rank-2.counters").mkdir()
    readers: dict[str, Reader] = {}
    for _ in range(2):
        found = [each for each in read_folder(tmp_path, readers) if each.step == 3]
        assert found[0].wait == Wait("a wait")


def test_a_file_that_is_cut_while_it_is_watched_is_passed_over(rank: Rank, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy)
    readers: dict[str, Reader] = {}
    assert len(read_folder(copy, readers)) == 1
    os.truncate(copy / "rank-0.counters", 0)
    assert read_folder(copy, readers) == []


def test_a_name_is_read_once_it_is_whole(rank: Rank, tmp_path: Path) -> None:
    rank.do("wait = counters.begin_wait('a wait')")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy)
    names = copy / "rank-0.names"
    content = names.read_bytes()
    names.write_bytes(content[:-4])
    readers: dict[str, Reader] = {}
    (found,) = read_folder(copy, readers)
    assert found.wait == Wait("")
    names.write_bytes(content)
    (found,) = read_folder(copy, readers)
    assert found.wait == Wait("a wait")


def test_a_rank_goes_on_where_its_names_cannot_be_written(rank: Rank) -> None:
    """As on a full disk: no line of a log is worth a training."""
    rank.do("os.close(counters._table.file); counters._table.file = os.open('/dev/full', os.O_WRONLY)")
    rank.do("late = counters.begin_wait('a new name')")
    assert rank.read().wait is None
    rank.do("counters.end_wait(late); counters.note('step', 3)")
    assert rank.read().step == 3
