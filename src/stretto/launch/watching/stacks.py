# SPDX-License-Identifier: Apache-2.0
"""Takes stacks of another process from outside, by py-spy, which reads its memory: the process need not run.

So it works for a process that is stopped, in an endless loop, in C code or without the interpreter's lock, and harms
none (cases that read frames from inside have crashed: cpython #106883). Where the kernel does not allow it (Yama's
ptrace_scope without `allow_reading`, a container without CAP_SYS_PTRACE) or py-spy is missing, a signal makes
faulthandler write stacks, once, in a process that will be ended anyway.
"""

import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import which
from typing import IO, Any

# A real-time signal, since Slurm, Python and profilers use SIGUSR1 and SIGUSR2.
STACK_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGUSR2)) - (3 if hasattr(signal, "SIGRTMAX") else 0)
STACK_FILE = "stacks-of-stretto"  # in memory, and named in /proc/PID/fd, where temporary files have no name
PR_SET_PTRACER, PTRACER_ANY = 0x59616D61, -1
READING = 10.0  # seconds that py-spy has
ANSWER = 2.0  # seconds that a process has to write its stacks in
TRIES = 3  # of a process that runs meanwhile, whose memory may be inconsistent when it is read
GONE = "its process is gone"
STATES = {
    "T": "its process is stopped by a signal",
    "t": "its process is stopped by a debugger",
    "Z": "its process has ended",
    "D": "its process waits for a disk or a device",
}
UNABLE = (GONE, STATES["T"], STATES["t"], STATES["Z"])  # a process in these states runs no code

_file: IO[bytes] | None = None


@dataclass(frozen=True)
class Frame:
    """A Python frame: its function, the file's name and path, and the line."""

    function: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line} in {self.function.rpartition('.')[2]}"


@dataclass(frozen=True)
class Thread:
    """A thread of another process: the kernel's id, Python's name for it, and its frames, innermost first."""

    native_id: int
    name: str
    frames: tuple[Frame, ...]


def allow_reading() -> None:
    """Let other processes of this user read this one's memory, which Yama (Ubuntu, Debian) allows ancestors alone.

    Also registers the signal of `ask`. For a rank's process, once.
    """
    global _file
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(PTRACER_ANY), 0, 0, 0)
    if _file is None:
        _file = os.fdopen(os.memfd_create(STACK_FILE), "wb")
        faulthandler.register(STACK_SIGNAL, file=_file, all_threads=True, chain=False)


def read_threads(pid: int) -> list[Thread]:
    """The threads of another process with their Python frames, without its help; empty where that is impossible."""
    for _ in range(TRIES):
        found = _run_py_spy(pid, "--json", "--nonblocking")
        with suppress(ValueError, KeyError, TypeError):
            return [_thread_of(each) for each in json.loads(found or "")]
    return []


def _thread_of(values: dict[str, Any]) -> Thread:
    frames = (Frame(str(each["name"]), str(each["filename"]), int(each["line"])) for each in values["frames"])
    return Thread(int(values["os_thread_id"] or 0), str(values["thread_name"] or ""), tuple(frames))


def read_text(pid: int) -> str | None:
    """The stacks of another process as text, Python's and where possible native frames; None where that fails."""
    return _run_py_spy(pid, "--native", "--nonblocking") or _run_py_spy(pid, "--nonblocking")


def _run_py_spy(pid: int, *options: str) -> str | None:
    if (program := _find_py_spy()) is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [program, "dump", *options, "--pid", str(pid)], capture_output=True, text=True, timeout=READING, check=True
        )
        return done.stdout
    return None


@cache
def _find_py_spy() -> str | None:
    """The path of py-spy's program: of this Python's environment, of a folder of packages on sys.path, or on PATH."""
    folders = [sysconfig.get_path("scripts"), *(os.path.join(path, "bin") for path in sys.path)]
    return next((found for folder in folders if (found := which("py-spy", path=folder))), None) or which("py-spy")


def ask(pid: int) -> str | None:
    """Make a process write its own stacks by a signal; None if it does not, as one that is stopped.

    Only for one that will be ended anyway: the handler reads frames without the interpreter's lock and may crash.
    """
    if not _catches(pid, STACK_SIGNAL):
        return None
    try:
        if (path := _stack_file(pid)) is None:
            return None
        before = size = path.stat().st_size
        os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + ANSWER
        while time.monotonic() < deadline:
            time.sleep(0.02)
            last, size = size, path.stat().st_size
            if size > before and size == last:  # written, and no longer growing
                break
        with open(path, "rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace") or None
    except OSError:
        return None


def _stack_file(pid: int) -> Path | None:
    """The file in memory to which `allow_reading` lets a process write its stacks."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(link).startswith(f"/memfd:{STACK_FILE} "):
                return link
    return None


def process_state(pid: int) -> str | None:
    """Read the kernel's state of a process of this machine, one of STATES or GONE; None if it only runs or sleeps."""
    if sys.platform != "linux":
        return None if is_there(pid) else GONE
    found = _status(pid)
    return GONE if found is None else STATES.get(found.get("State", "?")[0])


def is_there(pid: int) -> bool:
    """Check whether a process with this number exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU time that a process has used; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _catches(pid: int, number: int) -> bool:
    """Check whether a process has a handler for the signal: otherwise the signal would end it."""
    found = _status(pid)
    return found is not None and bool(int(found.get("SigCgt", "0"), 16) >> (number - 1) & 1)


def _status(pid: int) -> dict[str, str] | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
