# SPDX-License-Identifier: Apache-2.0
"""The state of each rank, seen from outside: its counters, what the kernel says of its process, and its stack."""

import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from stretto.counters import Counters, Reader, Wait, Window, read_folder
from stretto.launch.watching import stacks

IN_TORCH_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
IN_TORCH_OPS = (f"torch{os.sep}_ops.py", f"torch{os.sep}_library{os.sep}")  # through which collectives are called, too
IN_LIBRARIES = (f"{os.sep}torch{os.sep}", f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
C10D = "distributed_c10d.py"
WAITS_FOR_THREADS = (f"{os.sep}threading.py", f"{os.sep}concurrent{os.sep}futures{os.sep}")
WRITES_FILE = "stretto-save-file"  # how the names of threads begin that write a checkpoint's files
MAX_FRAMES = 6


@dataclass(frozen=True)
class RankState:
    """A rank at a moment.

    idle: seconds without progress of its main thread, by the clock of who looks. cpu: seconds of CPU time in them.
    save: the step of the checkpoint that a thread writes, save_idle: seconds without progress of that thread, and
    save_where: where it is. state: what the kernel says of the process, None if it only runs. where: the main thread's
    frames, innermost first, if they were read. waits: whether it waits for other ranks, waits_for_thread: for a thread
    of its own. See `Counters` for the rest.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int | None
    idle: float
    cpu: float = 0.0
    wait: Wait | None = None
    entered: Mapping[str, int] = field(default_factory=dict)
    save: int | None = None
    save_idle: float = 0.0
    save_where: str = ""
    save_waits: bool = False
    state: str | None = None
    where: tuple[str, ...] = ()
    waits: bool = False
    waits_for_thread: bool = False
    has_failed: bool = False
    is_done: bool = False
    windows: tuple[Window, ...] = ()

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "RankState":
        """From another node's plain data. Raises TypeError, KeyError or OverflowError if it is not that."""
        return _typed(cls, values)


_COUNTED = {each.name for each in fields(RankState)} & {each.name for each in fields(Counters)}


def _typed(kind: Any, value: Any) -> Any:
    """Plain data as a field's type. Every type is checked, since what comes from the store may be anything."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**{each.name: _typed(each.type, value[each.name]) for each in fields(kind)})
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _typed(parts[0], value)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(parts[0], each) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _typed(parts[1], each) for name, each in value.items()}
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind in (int, float) and not abs(value) < 1 << 63):  # neither infinite nor NaN
        raise TypeError(f"{value!r:.40} is no {kind}")
    return value


class LocalRanks:
    """Looks at the ranks of this machine that share their counters in a folder. clock: seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._readers: dict[str, Reader] = {}
        self._seen: dict[tuple[int, str], tuple[object, float]] = {}  # what has progressed -> how far, and since when
        self._cpu: dict[int, float] = {}  # at the main thread's last progress
        self.counters: dict[int, Counters] = {}

    def look(self) -> dict[int, RankState]:
        """The states of all ranks that have begun, without stacks. Takes 0.1 ms a rank."""
        found = {}
        for counters in read_folder(self.folder, self._readers):
            rank = counters.rank
            cpu = stacks.cpu_seconds(counters.pid)
            idle = self._seconds_since_change(rank, "main", (counters.pid, counters.progress))
            save_idle = self._seconds_since_change(rank, "save", (counters.save, counters.save_progress))
            if idle == 0.0:
                self._cpu[rank] = cpu
            self.counters[rank] = counters
            found[rank] = RankState(
                **{name: getattr(counters, name) for name in _COUNTED},
                idle=idle,
                cpu=cpu - self._cpu.get(rank, cpu),
                save_idle=save_idle if counters.save is not None else 0.0,
                state=stacks.process_state(counters.pid) if counters.is_running else stacks.GONE,
                waits=counters.wait is not None,
            )
        return found

    def forgive(self, seconds: float) -> None:
        """Move all last progress on by so many seconds, in which this process was stopped itself."""
        self._seen = {what: (progress, since + seconds) for what, (progress, since) in self._seen.items()}

    def _seconds_since_change(self, rank: int, thread: str, progress: object) -> float:
        now, (before, since) = self._clock(), self._seen.get((rank, thread), (None, 0.0))
        if before != progress:
            self._seen[rank, thread] = progress, (since := now)
        return now - since

    def with_stack(self, state: RankState) -> RankState:
        """The state with where its threads are, read from outside; as it is where that is impossible. Takes 20 ms."""
        counters = self.counters.get(state.rank)
        if counters is None or not counters.is_running:
            return state
        threads = stacks.read_threads(state.pid)
        main = next((thread for thread in threads if thread.native_id == state.pid), None)
        if main is None:
            return state
        innermost = next((each for each in main.frames if not _has_any(IN_TORCH_OPS, each.path)), None)
        for_thread = innermost is not None and innermost.path.endswith(WAITS_FOR_THREADS[0])
        for_thread |= innermost is not None and WAITS_FOR_THREADS[1] in innermost.path
        found = replace(
            state,
            where=_describe_frames(main.frames),
            waits=state.waits or (innermost is not None and IN_TORCH_DISTRIBUTED in innermost.path),
            waits_for_thread=for_thread and not state.waits,
        )
        if state.save is None:
            return found
        writer = next((thread for thread in threads if thread.native_id == counters.save_thread), None)
        busy = [t for t in threads if t.name.startswith(WRITES_FILE) and t.frames and t.frames[0].function != "_worker"]
        at = next((thread.frames[0] for thread in (*busy, *([writer] if writer else [])) if thread.frames), None)
        waits = not busy and at is not None and IN_TORCH_DISTRIBUTED in at.path
        return replace(found, save_where="" if at is None else str(at), save_waits=waits)


def _describe_frames(frames: Sequence[stacks.Frame]) -> tuple[str, ...]:
    """The innermost frames; with the first of them, where that is in a library, who has called the library."""
    found = [str(frame) for frame in frames[:MAX_FRAMES]]
    caller = next((frame for frame in frames if not _has_any(IN_LIBRARIES, frame.path)), None)
    if caller is not None and caller is not frames[0]:
        found[0] += f", called at {caller}"
    return tuple(found)


def _has_any(parts: Sequence[str], path: str) -> bool:
    return any(part in path for part in parts)


def is_saving(states: Iterable[RankState], limit: float) -> bool:
    """Check whether a rank writes a checkpoint, and has written some of it in so many seconds."""
    return any(state.phase == "save" and min(state.idle, state.save_idle or limit) < limit for state in states)


def write_stacks(folder: Path, counters: Counters, *, may_signal: bool) -> None:
    """Write a rank's stacks to `folder`/rank-N-stack.txt, from outside.

    may_signal: the process will be ended, so that it may be asked by a signal where its memory cannot be read.
    """
    text = stacks.read_text(counters.pid) or (stacks.ask(counters.pid) if may_signal else None)
    if text is None:
        state = stacks.process_state(counters.pid) or "its process runs"
        text = (
            f"rank {counters.rank}, process {counters.pid}: {state}. Its stacks cannot be read from outside: py-spy is "
            "not installed, or the kernel or the container does not allow it (ptrace).\n"
        )
    (folder / f"rank-{counters.rank}-stack.txt").write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Replace a file in the folder of counters by JSON, if that is there and not full."""
    hidden = path.with_suffix(".partial")
    with suppress(OSError):  # it must not end the run
        hidden.write_text(json.dumps(value))
        hidden.rename(path)
