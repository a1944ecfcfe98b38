# SPDX-License-Identifier: Apache-2.0
"""Locks a run's folder, so that only one run at a time uses it. The kernel releases a lock when its process ends.

There are two locks, since two processes use the folder. The command (the launcher, or torchrun's rank 0) holds one
while it writes and reads the folder; rank 0 holds the other while it trains, also after its launcher was killed.
"""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

COMMAND_LOCK = ".command.lock"
TRAINING_LOCK = ".training.lock"

logger = logging.getLogger(__name__)


@contextmanager
def command_lock(out: Path) -> Iterator[None]:
    """Hold the command's lock on a run's folder (created if missing) unless another process trains in it.

    Raises ValueError while another process holds one of the locks.
    """
    with _locked(out, COMMAND_LOCK):
        with _locked(out, TRAINING_LOCK):
            pass
        yield


@contextmanager
def training_lock(out: Path) -> Iterator[None]:
    """Hold rank 0's lock on a run's checkpoints and metrics. Raises ValueError while another process holds it."""
    with _locked(out, TRAINING_LOCK):
        yield


@contextmanager
def _locked(out: Path, name: str) -> Iterator[None]:
    new = [folder for folder in (out, *out.parents) if not folder.exists()]
    path = out / name
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = _take(out, path)
        try:
            yield
        finally:
            with suppress(OSError):  # the file system may be read-only by now
                path.unlink(missing_ok=True)  # before the release: the next process to lock it sees that it was deleted
            file.close()
    finally:
        with suppress(OSError):  # usually the run has written files
            for folder in new:
                folder.rmdir()


def _take(out: Path, path: Path) -> FileIO:
    while True:
        file = open(path, "a+b", buffering=0)  # noqa: SIM115  (`_locked` closes it)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(20).decode(errors="replace") or "another"
            file.close()
            raise ValueError(
                f"out is {str(out)!r}, where a run is going on (process {owner}): wait until it has ended, or set "
                "another out"
            ) from None
        except OSError as error:
            # Some network file systems have no locks. Two runs in one folder are then not detected.
            logger.info("no lock on %s: %s", path, error)
            return file
        # The file may have been deleted by its last owner after it was opened here.
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                with suppress(OSError):  # the disk may be full
                    file.truncate(0)
                    file.write(str(os.getpid()).encode())
                return file
        file.close()
