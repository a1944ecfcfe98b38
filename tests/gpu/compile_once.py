# SPDX-License-Identifier: Apache-2.0
"""A cache for Triton by which processes that need the same kernel at the same time compile it once.

Triton's own cache keeps what was compiled, but ranks begin a kernel together: none finds it there, and each compiles
it. With TRITON_CACHE_MANAGER=tests.gpu.compile_once:CompileOnce the first process holds a file lock while it compiles,
and the others wait for the lock and find the result.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from triton.runtime.cache import FileCacheManager

T = TypeVar("T")
VARIABLE = "TRITON_CACHE_MANAGER"
NAME = "tests.gpu.compile_once:CompileOnce"
WAIT_LIMIT = 90.0
"""Seconds after which a process compiles for itself: whoever holds the lock may have failed, and keeps it then."""
_POLL = 0.02


class CompileOnce(FileCacheManager):
    """Triton's file cache with a lock for each key, held from a look that finds nothing until the result is stored."""

    _held: int | None = None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The files of a compiled kernel, or None, which asks the caller to compile it and to call `put_group`."""
        return self._find_or_lock(partial(super().get_group, filename))

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Store a compiled kernel, and let the others read it."""
        path = super().put_group(filename, group)
        self._unlock()
        return path

    def get_file(self, filename: str) -> str | None:
        """The path of a launcher that was built, or None, which asks the caller to build it and to call `put`."""
        return self._find_or_lock(partial(super().get_file, filename))

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        """Store a file; a launcher's waiters may read it (a kernel's wait for `put_group`)."""
        path: str = super().put(data, filename, binary)
        if filename.endswith(".so"):
            self._unlock()
        return path

    def _find_or_lock(self, find: Callable[[], T | None]) -> T | None:
        """Return what `find` finds, at once or when another process has stored it; else None, and the lock is held,
        or its holder has kept it for longer than `WAIT_LIMIT`.

        A lock is never held with a result: the caller would keep it for as long as this object lives.
        """
        if (found := find()) or self._held is not None:
            return found
        file = os.open(Path(self.cache_dir) / "compiling", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        limit = time.monotonic() + WAIT_LIMIT
        while not self._try_lock(file) and not (found := find()) and time.monotonic() < limit:
            time.sleep(_POLL)
        if found := found or find():
            os.close(file)
            return found
        self._held = file
        return None

    @staticmethod
    def _try_lock(file: int) -> bool:
        """Lock the file if no other process has; returns whether it is locked now."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _unlock(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __del__(self) -> None:
        self._unlock()
