"""One run at a time in a folder. The kernel lets go of a lock when its process ends, however it ends.

There are two locks, since two processes own a run. The command (the launcher, or torchrun's rank 0) has one while it
writes and reads the folder; rank 0 has the other while it trains, also after its launcher was killed.
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
    """Own the folder of a run, which is made where it is not there, and see that nobody trains in it.

    Raises ValueError while another process does.
    """
    with _locked(out, COMMAND_LOCK):
        with _locked(out, TRAINING_LOCK):
            pass
        yield


@contextmanager
def training_lock(out: Path) -> Iterator[None]:
    """Own the checkpoints and the metrics of a run. For rank 0. Raises ValueError while another process does."""
    with _locked(out, TRAINING_LOCK):
        yield


@contextmanager
def _locked(out: Path, name: str) -> Iterator[None]:
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    path = out / name
    file = _take(out, path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before letting go: whoever takes this file next sees that it is gone
        file.close()
        if is_new:
            with suppress(OSError):  # it is not empty, as it should be
                out.rmdir()


def _take(out: Path, path: Path) -> FileIO:
    """The file, locked."""
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
            # Some network file systems have no locks. Nothing then keeps two runs apart.
            logger.info("no lock on %s: %s", path, error)
            return file
        # The file may have been deleted by its last owner after it was opened here.
        with suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                with suppress(OSError):  # a full disk has no room to say who it is
                    file.truncate(0)
                    file.write(str(os.getpid()).encode())
                return file
        file.close()
