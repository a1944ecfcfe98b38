"""Files that are computed once and kept, written whole or not at all."""

import fcntl
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where Stretto keeps what it can compute again: $STRETTO_CACHE, or ~/.cache/stretto by XDG's rules."""
    if chosen := os.environ.get("STRETTO_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stretto"


def cached_file(name: str, write: Callable[[BinaryIO], object]) -> Path:
    """The cached file `name`, written by `write` if it is not there. `name` must identify the content.

    Processes that ask for it at once wait for the first; if that dies, the next one writes. Raises ValueError
    when the cache folder cannot be written to.
    """
    path = cache_folder() / name
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock")):
            if not path.exists():
                write_atomically(path, write)
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written: {error.strerror or error}: set STRETTO_CACHE to a folder with room"
        ) from error
    return path


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create or replace a file with what `write` writes; when it raises, nothing has changed."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock that is this file; the kernel lets go of it when the process ends, however it ends."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the process that writes %s", path.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks. Work may then be done twice, but files are still whole.
            logger.info("no lock on %s (%s): every process does the work", path, error)
        yield
