# SPDX-License-Identifier: Apache-2.0
"""A rank's part in being watched: it shares its counters in a folder that a watcher reads. It starts no thread.

`launch` gives the folder to its ranks. Ranks that torchrun or another launcher has started agree on one by the job's
variables, and the first of them on each machine starts the watcher.
"""

import ctypes
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stretto import counters
from stretto.cluster.local_ranks import is_rank
from stretto.launch.failures import is_consequence
from stretto.launch.watching import stacks

FOLDER = "STRETTO_COUNTERS"
"""The environment variable by which `launch` names the folder of counters to its ranks."""
TOKEN = "STRETTO_JOB_TOKEN"
"""The environment variable by which users of several nodes may give the job a secret: see docs/security.md."""
MEMORY = Path("/dev/shm")
ROOM = 16 << 20  # free bytes that it must have
PR_SET_PDEATHSIG = 1  # of Linux's prctl
MEMORY_SCORE = 200  # more than the launcher has of the machine's memory, or its control group's, in thousandths
VERDICT_LIMIT = 5.0  # seconds, and four looks: a stall is found, and its stacks are collected

_watcher: "subprocess.Popen[bytes] | None" = None


def end_with_parent(parent: int) -> None:
    """Ask the kernel to send SIGTERM when the parent is killed, so that this rank saves and stops. Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def precede_launcher_out_of_memory() -> None:
    """Have the kernel end this rank, not the launcher that reports it, when memory runs out. Linux.

    The kernel ends the process with the highest score: memory, in thousandths of all, plus this. A child inherits its
    parent's, and may raise it.
    """
    score = Path("/proc/self/oom_score_adj")
    with suppress(OSError):
        score.write_text(str(min(1000, int(score.read_text()) + MEMORY_SCORE)))


def join_watched(folder: Path, rank: int) -> None:
    """Share this rank's counters in a folder, and let its stacks be read."""
    stacks.allow_reading()
    counters.share(folder, rank)


@contextmanager
def watched(timeout: float, out: Path) -> Iterator[None]:
    """Have this rank watched in the block, if it is one of several that something other than `launch` has started.

    timeout: `train.timeout`, in seconds. out: the run's folder, for reports. An exception that only says that another
    rank is late or lost is delayed until the watcher had time to find out which: it then ends this process with a
    better message. Does nothing for ranks of `launch`, which are watched already, and where there is no WORLD_SIZE.
    """
    if FOLDER in os.environ or not is_rank() or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    _begin(timeout, out)
    counters.mark_begun()
    try:
        yield
    except Exception as error:
        if "TORCHELASTIC_RUN_ID" in os.environ and is_consequence(f"{type(error).__name__}: {error}"):
            counters.mark_failed()
            time.sleep(VERDICT_LIMIT + 4 * min(1.0, timeout / 20))
        raise
    finally:
        counters.mark_done()


def _begin(timeout: float, out: Path) -> None:
    """Share this rank's counters in the job's folder on this machine; its first rank starts the watcher.

    In a later training of the same process, the watcher gets the new settings.
    """
    global _watcher
    folder = counters.shared_folder()
    if folder is None:
        folder = private_folder(job_id())
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent(os.getppid())
        join_watched(folder, int(os.environ["RANK"]))
        try:
            os.close(os.open(folder / "watcher", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return  # another rank of this machine has started it
    elif _watcher is None:
        return
    settings = {
        "folder": str(folder),
        "ranks": int(os.environ["WORLD_SIZE"]),
        "timeout": timeout,
        "out": str(out.absolute()),
        "store": [os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))],
        "local_ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
        "key": _key(),
    }
    if _watcher is None:
        _watcher = start_watcher(settings)
    else:
        with suppress(OSError):  # it was killed
            _send(_watcher, settings)


def _key() -> str:
    """The key of the lines that the job's watchers exchange, from what all of its machines know."""
    known = [os.environ.get(name, "") for name in (TOKEN, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
    return hashlib.sha256("\0".join(known).encode()).hexdigest()


def start_watcher(settings: dict[str, object]) -> "subprocess.Popen[bytes]":
    """Start the process that watches (`watcher`), which ends once all ranks have. settings: for its stdin."""
    process = subprocess.Popen(
        # -P: import nothing from the working directory
        [sys.executable, "-P", "-m", "stretto.launch.watching.watcher"],
        stdin=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C and a launcher's kill of its group are not for it
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
    )
    _send(process, settings)
    return process


def _send(watcher: "subprocess.Popen[bytes]", settings: dict[str, object]) -> None:
    assert watcher.stdin is not None
    watcher.stdin.write(json.dumps(settings).encode() + b"\n")
    watcher.stdin.flush()


def job_id() -> str:
    """Identifies this start of the job on this machine: the same for its ranks, another for each restart."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
    known = [os.environ.get(name, "") for name in (*names, "SLURM_STEP_ID", "GROUP_RANK")]
    agent = str(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ""
    return hashlib.sha256("\0".join([*known, agent]).encode()).hexdigest()[:16]


def memory_folder() -> Path:
    """A folder in memory, in which mapped files wait for no disk; that for temporary files if there is no room."""
    with suppress(OSError):
        found = os.statvfs(MEMORY)
        if os.access(MEMORY, os.W_OK) and found.f_bavail * found.f_frsize >= ROOM:
            return MEMORY
    return Path(tempfile.gettempdir())


def private_folder(job: str) -> Path:
    """The folder of a job's counters on this machine, which this user alone may enter.

    Raises OSError where another user has made it.
    """
    base = memory_folder()
    # Containers may share /dev/shm, and see other processes by the same numbers.
    scope = os.stat("/proc/self/ns/pid").st_ino if os.path.exists("/proc/self/ns/pid") else 0
    prefix = f"stretto-{os.getuid()}-{scope:x}"
    _remove_abandoned(base, prefix)
    folder = base / f"{prefix}-{job}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not this user's alone: another user may have made it")
    return folder


def _is_private(folder: Path) -> bool:
    """Check whether a path is a folder, and no link to one, which this user alone may enter."""
    found = os.lstat(folder)
    return found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077


def _remove_abandoned(base: Path, prefix: str) -> None:
    """Remove folders of jobs that have ended without their watcher."""
    for folder in base.glob(f"{prefix}-*"):
        with suppress(OSError, ValueError):
            if not _is_private(folder):  # another user's, where opening a pipe would not return
                continue
            found = counters.read_folder(folder, {})
            if found and not any(each.is_running for each in found):
                shutil.rmtree(folder, ignore_errors=True)
