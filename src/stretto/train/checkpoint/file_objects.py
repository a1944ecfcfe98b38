# SPDX-License-Identifier: Apache-2.0
"""Files that torch.distributed.checkpoint writes, with checksums of their pieces."""

import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystem

from stretto.counters import advance
from stretto.train.checkpoint.integrity import to_text


class _ChecksummedFile:
    """A file that is written from its beginning, and keeps the checksum of the bytes between two calls of `tell`.

    torch's writer calls `tell` before and after each piece.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._start, self._length, self._crc = 0, 0, 0
        self.checksums: dict[tuple[int, int], str] = {}  # by the first byte and the number of bytes

    def tell(self) -> int:
        if self._length:
            self.checksums[self._start, self._length] = to_text(self._crc)
        self._start, self._length, self._crc = self._start + self._length, 0, 0
        return self._start

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._crc = zlib.crc32(view, self._crc)
        self._length += len(view)
        advance()
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class ChecksummedFiles(FileSystem):
    """The file system of a writer; keeps the checksums of the pieces of each file. Each file has one thread.

    error: the first of the system. torch replaces a file's error by its own ("unexpected pos").
    """

    def __init__(self) -> None:
        self.checksums: dict[str, dict[tuple[int, int], str]] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: "str | os.PathLike[str]", mode: str) -> "Generator[Any, None, None]":
        try:
            with open(path, mode) as file:
                if "w" not in mode:
                    yield file
                    return
                stream = _ChecksummedFile(file)
                self.checksums[Path(path).name] = stream.checksums
                yield stream
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            self.error = self.error or cause
            raise
