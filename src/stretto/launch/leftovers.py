# SPDX-License-Identifier: Apache-2.0
"""Removes what killed ranks leave: half-written files in the run's folder, and named shared memory in /dev/shm.

NCCL's and torch's segments have names there. Stretto's own have none (`stretto.memory`): they are freed with the last
process that has them mapped.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stretto.launch.elastic import MARK
from stretto.launch.job import LaunchJob
from stretto.launch.journal import RESTARTS_FILE
from stretto.launch.run_lock import training_lock

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
# Not sem.mp-*: semaphores of other programs cannot be distinguished from orphans, because no process opens them by
# name.
PATTERNS = ("nccl-*", "torch_*", "cuda.shm.*", "nvshmem*")
NAMESPACES = Path("/proc/self/ns")
# Linux's inode numbers of the namespaces of the machine's first process.
FIRST_IPC, FIRST_PID = 0xEFFFFFFF, 0xEFFFFFFC


def remove_partial_files(job: LaunchJob) -> None:
    """Delete the half-written files of a run whose ranks have ended, unless another run trains in its folder."""
    if not job.out.is_dir():
        return
    with suppress(ValueError, OSError), training_lock(job.out):  # ValueError: the lock is another's
        job.remove_leftovers()
        for name in (MARK, RESTARTS_FILE):
            for partial in job.out.glob(f"{name}.*.partial"):
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


def _sees_all_users() -> bool:
    """Check whether all processes that may use /dev/shm are visible here.

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
