# SPDX-License-Identifier: Apache-2.0
"""Counters of a rank in a mapped file: phase, step, waits, collectives and checkpoint writes. Needs no torch.

The threads that do the work store them with plain stores; nothing in the process reads them. A process outside does
(`read`): it sees a rank that is stopped, swapped out, in an endless loop or in C code all the same, and can neither
crash it nor slow it down. Before `share` is called, the counters are in this process's memory alone.

    working threads  --stores-->  rank-N.counters (mapped)  --reads-->  launcher, or one watcher a node
                                  rank-N.names (appended)
"""

import json
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("import", "start", "build", "load", "data", "step", "evaluate", "save", "exit")
WITH_THREADS = ("load", "save", "exit")  # phases in which the main thread may wait for threads that read and write
WINDOW = 50  # steps over which waited time is averaged: one slow read or garbage collection does not count
VERSION = 1
MAX_NAMES = 4096  # names of groups, collectives and messages; later ones are unnamed
MAX_GROUPS = 256
MAX_NAMES_BYTES = 4 << 20

# Indices of 64-bit integers in the file.
(
    _VERSION, _RANK, _PID, _STARTED, _NOTES, _PHASE, _STEP, _ADVANCES, _THREADS, _DONE, _FAILED, _STOPPED,
    _WAIT_NAME, _WAIT_GROUP, _WAIT_NUMBER, _WAITED, _SAVE_STEP, _SAVE_THREAD, _SAVE_COUNT, _WINDOWS,
) = range(20)  # fmt: skip
_WINDOW_SIZE, _KEPT_WINDOWS = 4, 4  # number, nanoseconds a step, nanoseconds waited a step, view
_GROUPS = _WINDOWS + _WINDOW_SIZE * _KEPT_WINDOWS
_GROUP_SIZE = 2  # name, and how many of its collectives this rank has entered
_SIZE = _GROUPS + _GROUP_SIZE * MAX_GROUPS

VIEWS = ("cpu", "host", "nccl")
"""Kinds of waited time: a CPU rank's waits; a GPU rank's host's waits; how long NCCL's kernels run."""


class _Table:
    """The counters of this process, and the names that they refer to."""

    def __init__(self) -> None:
        self.values: Any = memoryview(bytearray(8 * _SIZE)).cast("q")
        self.values[_VERSION], self.values[_STEP], self.values[_SAVE_STEP] = VERSION, -1, -1
        self.names: dict[Any, int] = {"": 0}
        self.groups: dict[str, int] = {}  # torch's name of a group -> its index
        self.labels: dict[str, str] = {}  # torch's name of a group -> its name in messages
        self.folder: Path | None = None
        self.file: int | None = None  # of names
        self.lock = threading.Lock()  # of new names alone
        self.window = (-1, 0, 0, 0)  # number, first step, its time, and time waited by then
        self.steps: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # and the Unix time at which each began


_table = _Table()
_values = _table.values


class _Thread(threading.local):
    """True if this thread trains: the main thread, and those of the autograd engine, while the main one waits."""

    def __init__(self) -> None:
        own = threading.get_ident()
        others = (each for each in threading.enumerate() if not isinstance(each, threading._DummyThread))
        self.trains = own == threading.main_thread().ident or all(each.ident != own for each in others)


_thread = _Thread()


def _code(name: Any) -> int:
    """The number of a name; 0, which is no name, once there are MAX_NAMES."""
    found = _table.names.get(name)
    return _add_name(name) if found is None else found


def _add_name(name: Any) -> int:
    with _table.lock:
        if name not in _table.names and len(_table.names) < MAX_NAMES:
            if _table.file is not None:
                try:
                    os.write(_table.file, json.dumps(name).encode() + b"\n")  # before any counter refers to it
                except OSError:  # a full disk must not end the training
                    return 0
            _table.names[name] = len(_table.names)
        return _table.names.get(name, 0)


# --- stores by the threads that work


def note(phase: str, step: int | None = None) -> None:
    """Enter a phase (of `step`; None: of the step before), which is progress. For the main thread; 0.4 us.

    ValueError for an unknown phase.
    """
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}, but must be one of {', '.join(PHASES)}")
    if step is not None:
        if step != _values[_STEP] and phase in ("data", "step"):
            _begin_step(step)
        _values[_STEP] = step
    _values[_PHASE] = PHASES.index(phase)
    _values[_NOTES] += 1


@contextmanager
def phase(name: str, step: int | None = None) -> Iterator[None]:
    """Enter a phase for the block, and the phase before it again after the block, if it does not raise."""
    before, step_before = PHASES[_values[_PHASE]], _values[_STEP]
    note(name, step)
    yield
    note(before, None if step_before < 0 else step_before)


def advance() -> None:
    """Count progress within a phase that may take long, such as a piece of a checkpoint, in any thread."""
    _values[_ADVANCES if _thread.trains else _THREADS] += 1


def begin_wait(name: str | tuple[Any, ...], group: int = -1, number: int = 0) -> tuple[int, int, int, int] | None:
    """Store that this thread waits, for `end_wait` to undo; None in a thread that does not train.

    name: "all_reduce", or (what, ranks) for messages. group: as `group_index`. number: of the group's collective.
    """
    if not _thread.trains:
        return None
    before = (_values[_WAIT_NAME], _values[_WAIT_GROUP], _values[_WAIT_NUMBER], time.monotonic_ns())
    code = _table.names[name] if name in _table.names else _add_name(name)
    _values[_WAIT_GROUP], _values[_WAIT_NUMBER], _values[_WAIT_NAME] = group, number, code
    return before


def end_wait(before: tuple[int, int, int, int] | None) -> None:
    """End a wait: store the one around it, if any, and add the time of the outermost."""
    if before is None:
        return
    name, group, number, since = before
    if name == 0:
        _values[_WAITED] += time.monotonic_ns() - since
    _values[_WAIT_NAME], _values[_WAIT_GROUP], _values[_WAIT_NUMBER] = name, group, number


@contextmanager
def waiting_for(ranks: Collection[int], what: str, *, has_failed: bool = False) -> Iterator[None]:
    """Store that this thread waits for one of the ranks in the block, so that a stall is not taken for its own.

    ranks: global ones, empty if it is not known which. what: of them, for messages. has_failed: a wait has failed
    before, and this one is for the other ranks' reports of it.
    """
    before = begin_wait((what, *sorted(ranks)))
    _values[_FAILED] += has_failed
    try:
        yield
    finally:
        _values[_FAILED] -= has_failed
        end_wait(before)


def current_name() -> int:
    """The number of the name of the wait that was stored last; 0 without one."""
    return int(_values[_WAIT_NAME])


def current_wait() -> tuple[str, tuple[int, ...]] | None:
    """Name and ranks of the wait that was stored last; None without one. For tests."""
    name = next(name for name, code in _table.names.items() if code == _values[_WAIT_NAME])
    return None if name == "" else (name, ()) if isinstance(name, str) else (name[0], tuple(name[1:]))


def group_index(group_name: str, label: str, ranks: Collection[int]) -> int:
    """The index of a group's counters, made at its first use; -1 for more than MAX_GROUPS.

    group_name: torch's. label: its name in messages, unless `name_groups` gives another. ranks: its global ranks.
    """
    with _table.lock:
        if group_name not in _table.groups:
            if len(_table.groups) == MAX_GROUPS:
                return -1
            _table.groups[group_name] = len(_table.groups)
    index = _table.groups[group_name]
    _values[_GROUPS + _GROUP_SIZE * index] = _code((_table.labels.get(group_name, label), group_name, *ranks))
    return index


def describe_group(index: int) -> str:
    """The name and the ranks of a group, for messages."""
    code = 0 if index < 0 else _values[_GROUPS + _GROUP_SIZE * index]
    if code == 0:
        return "a group"
    label, _, *ranks = next(name for name, number in _table.names.items() if number == code)
    return f"group {label} (ranks {', '.join(map(str, ranks))})"


def enter_collective(index: int) -> int:
    """Count that this rank has entered a group's next collective; its number, from 1 on."""
    if index < 0:
        return 0
    at = _GROUPS + _GROUP_SIZE * index
    number: int = _values[at + 1] + 1
    _values[at + 1] = number
    return number


def name_groups(names: dict[str, str]) -> None:
    """Say what groups are called in messages: torch's names of groups -> a grid's axes, for example."""
    _table.labels.update(names)


@contextmanager
def saving(step: int) -> Iterator[None]:
    """Store that this thread writes the checkpoint of a step in the block. `advance` counts its progress."""
    _values[_SAVE_THREAD], _values[_SAVE_COUNT] = threading.get_native_id(), _values[_SAVE_COUNT] + 1
    _values[_SAVE_STEP] = step
    try:
        yield
    finally:
        _values[_SAVE_STEP] = -1


def mark_begun() -> None:
    """Store that this rank begins a training, perhaps after another one."""
    for at in (_DONE, _FAILED, _STOPPED):
        _values[at] = 0


def mark_done() -> None:
    """Store that this rank has ended training: nothing waits for it any more."""
    _values[_DONE] = 1


def mark_failed() -> None:
    """Store that this rank's wait for another one has failed: others know more of the cause."""
    _values[_FAILED] += 1


def mark_stopped(number: int) -> None:
    """Store the signal for which all ranks have agreed to stop; 0 if none was it."""
    _values[_STOPPED] = number


def stopped_by() -> int:
    """The signal for which this rank has stopped, as `mark_stopped` has stored it; 0 if it has not."""
    return int(_values[_STOPPED])


_replaces_window: Any = None  # measures a window in place of the host's waits: see launch.watching.device_waits
_view = 0


def measure_windows(view: str, replace: Any = None) -> None:
    """Choose how waited time is measured from now on.

    view: one of VIEWS. replace: called at a window's end with its number, its steps with the Unix time in ns at which
    each began, and the host's (seconds a step, seconds waited a step); returns such a pair, None to leave the window
    out, or raises LookupError where only the host knows.
    """
    global _replaces_window, _view
    _replaces_window, _view = replace, VIEWS.index(view)


def _begin_step(step: int) -> None:
    """Begin a step. Ends the window of steps before it where another begins, if that has half of its steps."""
    if _replaces_window is not None:
        _table.steps.append((step, time.time_ns()))
    if step // WINDOW == _table.window[0]:
        return
    now, waited = time.monotonic_ns(), _values[_WAITED]
    number, first, began, waited_before = _table.window
    _table.window = (step // WINDOW, step, now, waited)
    steps = step - first
    if number < 0 or steps < WINDOW // 2:
        return
    seconds, own = (now - began) / steps, (waited - waited_before) / steps
    view = _view
    if _replaces_window is not None:
        try:
            found = _replaces_window(number, tuple(_table.steps), (seconds / 1e9, own / 1e9))
        except LookupError:
            found = (seconds / 1e9, own / 1e9)
            view = VIEWS.index("host")
        if found is None:
            return
        seconds, own = (1e9 * each for each in found)
    at = _WINDOWS + _WINDOW_SIZE * (number % _KEPT_WINDOWS)
    for offset, value in enumerate((number + 1, int(seconds), int(own), view)):
        _values[at + offset] = value


def share(folder: Path, rank: int) -> None:
    """Keep this process's counters in a file of a folder that other processes of the user read, from now on."""
    global _values
    if _table.folder is not None:
        return
    path = folder / f"rank-{rank}.counters"
    hidden = path.with_suffix(".partial")
    descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.posix_fallocate(descriptor, 0, 8 * _SIZE)  # where the disk is full, an OSError and not a SIGBUS at a store
    shared = memoryview(mmap.mmap(descriptor, 8 * _SIZE)).cast("q")
    os.close(descriptor)
    _values[_RANK], _values[_PID], _values[_STARTED] = rank, os.getpid(), start_of(os.getpid())
    about = {
        "host": socket.gethostname(),
        "error_file": os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
        "is_torchrun": "TORCHELASTIC_RUN_ID" in os.environ,
    }
    with _table.lock:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        _table.file = os.open(path.with_suffix(".names"), flags, 0o600)
        os.write(_table.file, b"".join(json.dumps(line).encode() + b"\n" for line in (about, *_table.names)))
        shared[:] = _values
        _values = _table.values = shared
        _table.folder = folder
    hidden.rename(path)


def _detach() -> None:
    """Keep a forked process's stores out of its parent's counters."""
    global _values
    _values = _table.values = memoryview(bytearray(_values)).cast("q")
    _table.folder = _table.file = None
    _table.lock = threading.Lock()  # another thread of the parent may have had it


os.register_at_fork(after_in_child=_detach)


def shared_folder() -> Path | None:
    """The folder to which `share` was given; None before."""
    return _table.folder


# --- reads by a process outside


def start_of(pid: int) -> int:
    """Read when a process started, in the kernel's ticks since boot, by which another with its number is told apart.

    0 if there is no such process, if it has ended and waits to be reaped, or on a system without /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(frozen=True)
class Wait:
    """A wait of a rank's training threads.

    name: of the collective, or what is waited for. ranks: those of which one is awaited, empty if that is unknown.
    group, group_name, number: of a collective, by this rank's count; number is 0 for anything else.
    """

    name: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    group_name: str = ""
    number: int = 0


@dataclass(frozen=True)
class Window:
    """Waited time of a window of steps: its number, seconds of a step and of waits in it, and the view (VIEWS)."""

    number: int
    step: float
    waited: float
    view: str

    @property
    def busy(self) -> float:
        """Seconds of a step in which the rank did not wait."""
        return max(0.0, self.step - self.waited)


@dataclass(frozen=True)
class Counters:
    """The counters of a rank at a moment. progress: changes whenever the main thread makes progress.

    save: the step of the checkpoint that a thread writes (None: no thread does), save_thread: that thread's kernel id,
    save_progress: changes whenever it makes progress. entered: number of collectives by torch's name of the group.
    """

    rank: int
    pid: int
    started: int
    host: str
    phase: str
    step: int | None
    progress: tuple[int, ...]
    wait: Wait | None
    entered: dict[str, int]
    save: int | None
    save_thread: int
    save_progress: tuple[int, ...]
    is_done: bool
    has_failed: bool
    stopped: int
    windows: tuple[Window, ...]
    error_file: str
    is_torchrun: bool

    @property
    def is_running(self) -> bool:
        """True if the rank's process, and no later one with its number, is there."""
        return self.pid > 0 and start_of(self.pid) == self.started


class Reader:
    """Reads a rank's counters from its file, again and again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[Any] = []
        self._read = 0
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  (as long as this object)

    def read(self) -> Counters:
        """Read the counters. ValueError for a file of another version."""
        content = os.pread(self._file.fileno(), 8 * _SIZE, 0)  # not mapped: a file that is cut would end this process
        if len(content) < 8 * _SIZE:
            raise ValueError(f"{self._path} has {len(content)} bytes, and {8 * _SIZE} are read")
        values = memoryview(content).cast("q")
        if values[_VERSION] != VERSION:
            raise ValueError(f"{self._path} has version {values[_VERSION]}, and {VERSION} is read")
        self._read_names()
        threads = values[_THREADS]
        phase = PHASES[values[_PHASE]] if 0 <= values[_PHASE] < len(PHASES) else PHASES[0]
        entered, groups = {}, {}
        for index in range(MAX_GROUPS):
            name, number = values[_GROUPS + _GROUP_SIZE * index :][:_GROUP_SIZE]
            if not name:
                break
            label, group_name, *ranks = self._name(name) or ("", "")
            entered[group_name] = number
            groups[index] = (label, group_name, tuple(ranks))
        windows = []
        for kept in range(_KEPT_WINDOWS):
            number, step, waited, view = values[_WINDOWS + _WINDOW_SIZE * kept :][:_WINDOW_SIZE]
            if number:
                windows.append(Window(number - 1, step / 1e9, waited / 1e9, VIEWS[view]))
        about = self._names[0] if self._names and isinstance(self._names[0], dict) else {}
        saves = values[_SAVE_STEP]
        return Counters(
            rank=values[_RANK],
            pid=values[_PID],
            started=values[_STARTED],
            host=about.get("host", ""),
            phase=phase,
            step=None if values[_STEP] < 0 else values[_STEP],
            progress=(
                values[_NOTES],
                values[_ADVANCES],
                *entered.values(),
                *([threads] if phase in WITH_THREADS else []),
            ),
            wait=self._wait(values, groups),
            entered=entered,
            save=None if saves < 0 else saves,
            save_thread=values[_SAVE_THREAD],
            save_progress=(values[_SAVE_COUNT], threads),
            is_done=bool(values[_DONE]),
            has_failed=values[_FAILED] > 0,
            stopped=values[_STOPPED],
            windows=tuple(sorted(windows, key=lambda window: window.number)),
            error_file=about.get("error_file", ""),
            is_torchrun=about.get("is_torchrun", False),
        )

    def _wait(self, values: memoryview, groups: dict[int, tuple[str, str, tuple[int, ...]]]) -> Wait | None:
        if not values[_WAIT_NAME]:
            return None
        name, group = self._name(values[_WAIT_NAME]), groups.get(values[_WAIT_GROUP])
        if group is not None:
            return Wait(str(name), group[2], group[0], group[1], values[_WAIT_NUMBER])
        return Wait(str(name)) if not isinstance(name, list) else Wait(str(name[0]), tuple(name[1:]))

    def _name(self, code: int) -> Any:
        """A name by its number; "" for one that is not written, or not whole."""
        return self._names[code + 1] if 0 < code + 1 < len(self._names) else ""

    def _read_names(self) -> None:
        """Read whole lines that were appended since the last time."""
        with open(self._path.with_suffix(".names"), "rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read(MAX_NAMES_BYTES).rpartition(b"\n")
        self._read += len(whole) + len(end)
        self._names += [json.loads(line) for line in whole.split(b"\n") if line]


def read_folder(folder: Path, readers: dict[str, Reader]) -> list[Counters]:
    """Read the counters of all ranks that share theirs in a folder. readers: kept by the caller between two calls."""
    found = []
    for path in sorted(folder.glob("rank-*.counters")):
        try:
            if path.name not in readers:
                readers[path.name] = Reader(path)
            found.append(readers[path.name].read())
        except (OSError, ValueError, IndexError, TypeError, RecursionError):  # it is being made, or was cut
            continue
    return found
