# SPDX-License-Identifier: Apache-2.0
"""A cache of files that can be computed again."""

import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stretto.atomic_files import write_atomically
from stretto.native_code import cache_folder

logger = logging.getLogger(__name__)


def cached_file(name: str, write: Callable[[BinaryIO], object]) -> Path:
    """Return the cached file `name`; `write` writes it if it does not exist. `name` must identify the content.

    Concurrent processes wait for the first one; if it dies, the next one writes the file. Raises ValueError when the
    cache folder cannot be written to.
    """
    path = cache_folder() / name
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock")) as is_locked:
            if not path.exists():
                for left in path.parent.glob(f"{path.name[:40]}.*.partial") if is_locked else ():
                    left.unlink(missing_ok=True)  # of a process that was killed while it wrote
                write_atomically(path, write)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written: {error.strerror or error}: set STRETTO_CACHE to a folder with room"
        ) from error
    return path


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock on this file, if the file system has locks; the kernel releases it when the process ends."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the process that writes %s", path.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks. Processes may then repeat work, but files are still complete.
            logger.info("no lock on %s (%s): every process does the work", path, error)
            yield False
            return
        yield True
