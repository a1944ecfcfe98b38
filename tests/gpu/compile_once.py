# SPDX-License-Identifier: Apache-2.0
"""A cache for Triton by which processes that need the same kernel at the same time compile it once.

Triton's own cache keeps what was compiled, but ranks begin a kernel together: none finds it there, and each compiles
it. With TRITON_CACHE_MANAGER=tests.gpu.compile_once:CompileOnce the first process holds a file lock while it compiles,
and the others wait for the lock and find the result.
"""

import fcntl
import os
import time
from pathlib import Path

from triton.runtime.cache import FileCacheManager

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
        return super().get_group(filename) or self._lock() or super().get_group(filename) or None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Store a compiled kernel, and let the others read it."""
        path = super().put_group(filename, group)
        self._unlock()
        return path

    def get_file(self, filename: str) -> str | None:
        """The path of a launcher that was built, or None, which asks the caller to build it and to call `put`."""
        return super().get_file(filename) or self._lock() or super().get_file(filename)

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        """Store a file; a launcher's waiters may read it (a kernel's wait for `put_group`)."""
        path: str = super().put(data, filename, binary)
        if filename.endswith(".so"):
            self._unlock()
        return path

    def _lock(self) -> None:
        if self._held is not None:
            return
        file = os.open(Path(self.cache_dir) / "compiling", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        limit = time.monotonic() + WAIT_LIMIT
        while time.monotonic() < limit:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL)
            else:
                self._held = file
                return
        os.close(file)

    def _unlock(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __del__(self) -> None:
        self._unlock()
