# SPDX-License-Identifier: Apache-2.0
"""Stacks of other processes: by py-spy, whatever they do, and by a signal where it is refused."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from tests.processes import LIMIT

from stretto import counters
from stretto.launch.watching import ranks as ranks_module
from stretto.launch.watching import stacks
from stretto.launch.watching.ranks import LocalRanks, RankState, write_stacks

PROGRAM = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from stretto import counters
from stretto.launch.watching import stacks

def spin():
    while True:
        pass

def spin_without_handler():
    signal.signal(stacks.STACK_SIGNAL, signal.SIG_DFL)
    spin()

def hold_the_interpreter():
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(600)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def go_on():
    sum(number for number in range(2000))

def stop_again_and_again():
    while True:
        stop()
        go_on()

def write():
    with counters.saving(28):
        started.set()
        write_data()

def write_data():
    while True:
        time.sleep(0.001)

def wait_for_a_writer():
    thread = threading.Thread(target=write, name="stretto-save-file_0")
    thread.start()
    thread.join()

def wait_beside_threads():
    for _ in range(6):
        threading.Thread(target=write_data, name="stretto-loader", daemon=True).start()
    stop_again_and_again()

started = threading.Event()
stacks.allow_reading()
if len(sys.argv) > 2:
    counters.share(Path(sys.argv[2]), 0)
print("started", flush=True)
globals()[sys.argv[1]]()
"""

Start = Callable[..., "subprocess.Popen[str]"]
Found = TypeVar("Found")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that is in one of PROGRAM's functions when it is returned, or soon."""
    processes: list[subprocess.Popen[str]] = []
    (tmp_path / "program.py").write_text(PROGRAM)

    def start_process(function: str, *folder: Path) -> "subprocess.Popen[str]":
        command = [sys.executable, str(tmp_path / "program.py"), function, *map(str, folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        return process

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_find_py_spy", lambda: None)


def eventually(look: Callable[[], Found]) -> Found:
    """Wait until `look` returns something, and return it."""
    deadline = time.monotonic() + LIMIT
    while not (found := look()):
        assert time.monotonic() < deadline
    return found


def main_frames(pid: int, function: str) -> tuple[stacks.Frame, ...]:
    """The main thread's frames, once it is in the function."""

    def look() -> tuple[stacks.Frame, ...]:
        mine = next((thread.frames for thread in stacks.read_threads(pid) if thread.native_id == pid), ())
        return mine if any(frame.function == function for frame in mine) else ()

    return eventually(look)


def wait_until_stopped(process: "subprocess.Popen[str]") -> None:
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


def test_a_rank_whose_handler_is_gone_gets_no_signal(start: Start, no_py_spy: None) -> None:
    process = start("spin_without_handler")
    eventually(lambda: not stacks._catches(process.pid, stacks.STACK_SIGNAL))
    assert stacks.ask(process.pid) is None
    assert process.poll() is None


@pytest.mark.parametrize("function", ["spin", "hold_the_interpreter", "stop_again_and_again"])
def test_stacks_are_read_whatever_the_process_does(start: Start, function: str) -> None:
    process = start(function)
    frames = main_frames(process.pid, function)
    assert str(next(frame for frame in frames if frame.function == function)).startswith("program.py:")
    assert f"{function} (program.py:" in (stacks.read_text(process.pid) or "")
    assert process.poll() is None


def test_a_process_is_as_it_was_after_its_stacks_were_read(start: Start) -> None:
    process = start("stop_again_and_again")
    wait_until_stopped(process)
    assert main_frames(process.pid, "stop")[0].function == "stop"
    assert stacks.process_state(process.pid) == stacks.STATES["T"]
    process.send_signal(signal.SIGCONT)
    wait_until_stopped(process)  # it has gone on, and come here again


def test_threads_have_the_names_that_python_gave_them(start: Start) -> None:
    process = start("wait_beside_threads")
    main_frames(process.pid, "wait_beside_threads")
    found = eventually(lambda: [t for t in stacks.read_threads(process.pid) if t.name == "stretto-loader"])
    assert found[0].native_id != process.pid
    assert "write_data" in {frame.function for frame in found[0].frames}


def test_a_process_that_is_gone_has_no_stacks(start: Start) -> None:
    process = start("spin")
    process.kill()
    assert stacks.read_threads(process.pid) == []
    assert stacks.read_text(process.pid) is None
    assert stacks.ask(process.pid) is None
    process.wait()
    assert stacks.read_threads(process.pid) == []
    assert stacks.ask(process.pid) is None
    assert stacks.process_state(process.pid) == stacks.GONE
    assert stacks.cpu_seconds(process.pid) == 0.0


@pytest.mark.parametrize("output", ["", "{", "[1]", '[{"frames": 1}]', "null", '{"a": 1}'])
def test_output_of_py_spy_that_is_not_understood_is_no_stack(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    monkeypatch.setattr(stacks, "_run_py_spy", lambda *arguments: output)
    assert stacks.read_threads(1) == []


def test_a_signal_takes_stacks_where_py_spy_is_refused(start: Start, no_py_spy: None) -> None:
    process = start("hold_the_interpreter")
    assert stacks.read_threads(process.pid) == []
    assert stacks.read_text(process.pid) is None
    eventually(lambda: " in hold_the_interpreter\n" in (stacks.ask(process.pid) or ""))
    assert process.poll() is None


def test_a_process_without_our_handler_gets_no_signal(no_py_spy: None) -> None:
    """It would end it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        assert stacks.ask(process.pid) is None
        assert process.poll() is None
        process.kill()


@pytest.mark.long
def test_a_stopped_process_stays_as_it_is_where_py_spy_is_refused(start: Start, no_py_spy: None) -> None:
    process = start("spin")
    process.send_signal(signal.SIGSTOP)
    wait_until_stopped(process)
    assert stacks.ask(process.pid) is None
    assert stacks.process_state(process.pid) == stacks.STATES["T"]


def test_a_report_says_where_stacks_cannot_be_read(start: Start, no_py_spy: None, tmp_path: Path) -> None:
    folder = tmp_path / "counters"
    folder.mkdir()
    process = start("spin", folder)
    (found,) = counters.read_folder(folder, {})
    write_stacks(tmp_path, found, may_signal=False)
    report = tmp_path / "rank-0-stack.txt"
    assert report.read_text().startswith(
        f"rank 0, process {process.pid}: its process runs. Its stacks cannot be read from outside: "
    )
    write_stacks(tmp_path, found, may_signal=True)
    assert "program.py" in report.read_text()


def test_a_rank_that_waits_for_the_thread_that_writes_is_seen_so(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "counters"
    folder.mkdir()
    start("wait_for_a_writer", folder)
    local = LocalRanks(folder)

    def look() -> RankState | None:
        state = local.with_stack(local.look()[0])
        return state if state.save_where.endswith(" in write_data") and state.waits_for_thread else None

    state = eventually(look)
    assert state is not None
    assert (state.save, state.save_waits) == (28, False)
    assert state.save_where.startswith("program.py:")


def test_a_wait_in_a_functional_collective_is_seen_with_the_line_that_has_called_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("spin", tmp_path)
    torch = "/python/site-packages/torch"
    frames = (
        stacks.Frame("OpOverloadPacket.__call__", f"{torch}/_ops.py", 1279),
        stacks.Frame("wait_tensor", f"{torch}/distributed/_functional_collectives.py", 142),
        stacks.Frame("Model.forward", "/home/model.py", 7),
    )
    monkeypatch.setattr(stacks, "read_threads", lambda pid: [stacks.Thread(pid, "MainThread", frames)])
    local = LocalRanks(tmp_path)
    state = local.with_stack(local.look()[0])
    assert state.waits
    assert state.where[0] == "_ops.py:1279 in __call__, called at model.py:7 in forward"


def test_progress_and_the_state_of_the_process_are_seen(start: Start, tmp_path: Path) -> None:
    now = [0.0]
    process = start("spin", tmp_path)
    local = LocalRanks(tmp_path, lambda: now[0])
    assert local.look()[0].idle == 0.0
    now[0] = 7.0
    state = local.look()[0]
    assert (state.idle, state.state, state.pid) == (7.0, None, process.pid)
    main_frames(process.pid, "spin")
    assert local.with_stack(state).where[0].endswith(" in spin")
    process.send_signal(signal.SIGSTOP)
    wait_until_stopped(process)
    assert local.look()[0].state == stacks.STATES["T"]
    local.forgive(5.0)
    assert local.look()[0].idle == 2.0
    process.kill()
    process.wait()
    assert local.look()[0].state == stacks.GONE
    assert local.with_stack(local.look()[0]).where == ()


def test_a_threads_wait_in_torch_distributed_is_a_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as a barrier of the user's, which no counter tells."""
    frame = stacks.Frame("barrier", f"/x/{ranks_module.IN_TORCH_DISTRIBUTED}distributed_c10d.py", 9)
    monkeypatch.setattr(stacks, "read_threads", lambda pid: [stacks.Thread(pid, "MainThread", (frame,))])
    local = LocalRanks(tmp_path)
    local.counters[0] = _counters_of(os.getpid())
    state = RankState(0, "host", os.getpid(), "step", 3, 0.0)
    assert local.with_stack(state).waits
    assert local.with_stack(state).where == ("distributed_c10d.py:9 in barrier",)


def _counters_of(pid: int) -> counters.Counters:
    """Counters of a rank that has done nothing yet."""
    values = {"rank": 0, "pid": pid, "started": counters.start_of(pid), "host": "host", "phase": "step", "step": 3}
    values |= {"progress": (), "wait": None, "entered": {}, "save": None, "save_thread": 0, "save_progress": ()}
    values |= {"is_done": False, "has_failed": False, "stopped": 0, "windows": (), "error_file": ""}
    return counters.Counters(**values, is_torchrun=False)  # type: ignore[arg-type]
