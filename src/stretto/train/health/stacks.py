# SPDX-License-Identifier: Apache-2.0
"""Stacks of processes that may not respond, and the states of such processes, which Linux reports in /proc.

`register` makes a signal write the stacks of all threads. Its handler is C and needs no interpreter lock, so it works
in an endless loop and in C code. A stopped process runs it when it is continued, for a moment. The stacks go to a file
without a name, which a process of the same user reads through /proc, so nothing is left behind.
"""

import ctypes
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# A real-time signal, since Slurm, Python and profilers use SIGUSR1 and SIGUSR2.
STACK_SIGNAL = int(getattr(signal, "SIGRTMAX", signal.SIGUSR2)) - (3 if hasattr(signal, "SIGRTMAX") else 0)
PY_SPY_LIMIT = 10.0  # seconds
ANSWER = 2.0  # seconds that a process has to write its stacks in
GONE = "its process is gone"
STATES = {
    "T": "its process is stopped by a signal",
    "t": "its process is stopped by a debugger",
    "Z": "its process has ended",
    "D": "its process waits for a disk or a device",
}
UNABLE = (GONE, STATES["T"], STATES["t"], STATES["Z"])  # a process in these states runs no code

_file: IO[bytes] | None = None


def register() -> None:
    """Let STACK_SIGNAL write the stacks of this process's threads to `stack_file`. Does nothing the second time."""
    global _file
    if _file is not None:
        return
    _file = tempfile.TemporaryFile(prefix="stretto-stacks-")  # noqa: SIM115  (open as long as the process)
    faulthandler.register(STACK_SIGNAL, file=_file, all_threads=True, chain=False)


def stack_file() -> int | None:
    """The descriptor of the file to which this process writes stacks, if `register` was called."""
    return None if _file is None else _file.fileno()


def write_own(path: Path) -> None:
    """Write the stacks of all threads of this process, as STACK_SIGNAL does."""
    with open(path, "w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)


def read_stacks(pid: int, descriptor: int | None) -> str | None:
    """Ask another process of this user on this machine for its stacks; None if it does not answer.

    The process must have called `register`; `descriptor` is what `stack_file` returned there. A process that is stopped
    is continued for the necessary time, a few milliseconds: only call this if it is to be ended anyway.
    """
    if descriptor is None or not _catches(pid, STACK_SIGNAL):
        return None
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    was_stopped = (_status(pid) or {}).get("State", "").startswith("T")
    try:
        before = path.stat().st_size
        if was_stopped:
            _signal_main_thread(pid, STACK_SIGNAL)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + ANSWER
        size = before
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
    finally:
        if was_stopped:
            _stop(pid)


def _stop(pid: int) -> None:
    """Stop a process, and wait until it has stopped.

    The kernel delivers the signal to one thread, and the others run until that thread is scheduled. The heartbeat
    thread could overwrite the report with stacks from after the process was continued.
    """
    with suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + ANSWER
    while process_state(pid) not in UNABLE and time.monotonic() < deadline:
        time.sleep(0.002)


def spy(pid: int) -> str | None:
    """The stacks of a process that does not answer, by py-spy; None where it is not installed, or not allowed to."""
    if (program := shutil.which("py-spy")) is None:
        return None
    command = [program, "dump", "--pid", str(pid), "--nonblocking"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_LIMIT, check=True)
        return f"by py-spy {' '.join(command[1:])}\n{done.stdout}"
    return None


def process_state(pid: int) -> str | None:
    """What the kernel says of a process of this machine, one of STATES or GONE; None if it only runs or sleeps."""
    if sys.platform != "linux":
        return None if is_there(pid) else GONE
    found = _status(pid)
    return GONE if found is None else STATES.get(found.get("State", "?")[0])


def is_there(pid: int) -> bool:
    """Whether a process with this number exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _signal_main_thread(pid: int, number: int) -> None:
    """Signal a process so that its main thread handles it before it continues.

    If a process is continued, another thread may run a signal's handler, while the main thread continues.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "tgkill") or libc.tgkill(pid, pid, number) != 0:
        os.kill(pid, number)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for the signal: otherwise the signal would end it."""
    found = _status(pid)
    return found is not None and bool(int(found.get("SigCgt", "0"), 16) >> (number - 1) & 1)


def _status(pid: int) -> dict[str, Any] | None:
    """The fields of /proc/PID/status."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
