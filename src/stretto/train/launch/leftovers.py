# SPDX-License-Identifier: Apache-2.0
"""Removes what killed ranks leave: half-written files in the run's folder, and named shared memory in /dev/shm; and
ranks that were started in vain.

NCCL's and torch's segments have names there. Stretto's own have none (`stretto.memory`): they are freed with the last
process that has them mapped.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stretto.train.checkpoint.folders import remove_leftovers
from stretto.train.launch.elastic import MARK
from stretto.train.launch.journal import RESTARTS_FILE
from stretto.train.launch.run_lock import training_lock
from stretto.train.observe.metrics import METRICS_FILE, SUMMARY_FILE

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
# Not sem.mp-*: semaphores of other programs cannot be distinguished from orphans, because no process opens them by
# name.
PATTERNS = ("nccl-*", "torch_*", "cuda.shm.*", "nvshmem*")
END = 5.0  # seconds for killed processes to end
EXEC = 1.0  # seconds in which a started process has its environment variables; one may have been started without any
NAMESPACES = Path("/proc/self/ns")
# Linux's inode numbers of the namespaces of the machine's first process.
FIRST_IPC, FIRST_PID = 0xEFFFFFFF, 0xEFFFFFFC


def remove_partial_files(out: Path) -> None:
    """Delete the half-written files of a run whose ranks have ended, unless another run trains in its folder."""
    if not out.is_dir():
        return
    with suppress(ValueError, OSError), training_lock(out):  # ValueError: the lock is another's
        remove_leftovers(out)
        for name in (MARK, METRICS_FILE, RESTARTS_FILE, SUMMARY_FILE):
            for partial in out.glob(f"{name}.*.partial"):
                partial.unlink(missing_ok=True)


def list_segments(folder: Path = FOLDER) -> set[str]:
    """The names of this user's segments of the kinds that ranks make."""
    found = set()
    for pattern in PATTERNS:
        for path in folder.glob(pattern):
            with suppress(OSError):  # it has been deleted since
                if path.stat().st_uid == os.getuid():
                    found.add(path.name)
    return found


def remove_orphans(before: set[str], folder: Path = FOLDER) -> set[str]:
    """Delete the segments that were not there before and that no process has open or mapped. Returns their names.

    Another job of this user may have created segments since: its processes have them open, so they are kept. Deletes
    nothing where such processes may be invisible.
    """
    new = list_segments(folder) - before
    if not new:
        return set()
    if not _sees_all_users():
        logger.info("%s may have segments that killed ranks have left: %s", folder, ", ".join(sorted(new)))
        return set()
    orphans = new - set(_names_in_use(folder))
    for name in orphans:
        with suppress(OSError):
            (folder / name).unlink()
            logger.info("removed %s, which a killed rank had left", folder / name)
    return orphans


def kill_ranks(job: str) -> None:
    """Kill the ranks of a job that this process has started, and wait some seconds until they have exited.

    job: its TORCHELASTIC_RUN_ID. For ranks that no supervisor tracks, since a later one could not be started.
    """
    deadline = time.monotonic() + END
    marked = f"TORCHELASTIC_RUN_ID={job}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or it has ended
            if _state_and_parent(process)[1] == os.getpid() and marked in _environment(process):
                pid = int(process.name)
                os.killpg(pid, signal.SIGKILL)
                while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                    time.sleep(0.05)


def _state_and_parent(process: Path) -> tuple[str, int]:
    """A process's state, as "R" or "Z", and its parent's number. process: its folder in /proc."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()  # the name before may contain anything
    return fields[0], int(fields[1])


def _environment(process: Path) -> list[bytes]:
    """The environment variables of a process that may have just been started.

    The caller of exec continues before the kernel has set up the new program; until then /proc shows no variables.
    """
    deadline = time.monotonic() + EXEC
    while True:
        found = (process / "environ").read_bytes()
        if found or time.monotonic() > deadline or _state_and_parent(process)[0] == "Z":
            return found.split(b"\0")
        time.sleep(0.001)


def _sees_all_users() -> bool:
    """Whether all processes that may use /dev/shm are visible here.

    They are not in a container that has the machine's shared memory but its own process ids, as by
    `docker run --ipc=host`: other containers use the same /dev/shm.
    """
    try:
        ipc, pid = ((NAMESPACES / name).stat().st_ino for name in ("ipc", "pid"))
    except OSError:  # a system without namespaces
        return True
    return ipc != FIRST_IPC or pid == FIRST_PID


def _names_in_use(folder: Path) -> Iterator[str]:
    """The names of all files in the folder that a process of this user has mapped or open."""
    prefix = f"{folder.resolve()}/"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or it has ended
            for line in (process / "maps").read_text(errors="replace").splitlines():
                path = line.partition(prefix)[2]
                if path:
                    yield path.removesuffix(" (deleted)")
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith(prefix):
                        yield target.removeprefix(prefix).removesuffix(" (deleted)")
