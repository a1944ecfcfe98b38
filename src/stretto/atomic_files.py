# SPDX-License-Identifier: Apache-2.0
"""Writes files whole or not at all, deletes folders, and checks beforehand that files can be written.

For all layers.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC, EOPNOTSUPP, EPERM
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Create or replace a file with `content`: UTF-8 text, bytes, or what a function writes.

    If anything fails, an old file stays whole and nothing is left beside it. An OSError names `path`. A symbolic link
    stays one, a replaced file keeps its permissions; a device or pipe is written to directly.
    """
    write = content if callable(content) else None
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    with naming_file(path):
        old = target.stat() if target.exists() else None
        is_replaced = old is None or stat.S_ISREG(old.st_mode) or stat.S_ISDIR(old.st_mode)  # of a folder: an error
        partial = target.with_name(f"{target.name[:40]}.{os.urandom(8).hex()}.partial")
        try:
            with partial.open("xb") if is_replaced else target.open("wb") as file:
                if write is not None:
                    write(file)
                else:
                    assert isinstance(data, bytes)
                    file.write(data)
                file.flush()
                if is_replaced:
                    os.fsync(file.fileno())
                    if old is not None:
                        os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            if is_replaced:
                partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def create_atomically(path: Path, content: str) -> None:
    """Create a file of UTF-8 text, whole or not at all. Raises FileExistsError where there is one, which stays."""
    with (
        naming_file(path),
        tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.") as beside,
    ):
        beside.write(content)
        beside.flush()
        os.fchmod(beside.fileno(), 0o644)
        try:
            os.link(beside.name, path)
        except OSError as error:
            if error.errno not in (EPERM, EOPNOTSUPP):  # a file system without links
                raise
            with open(path, "x", encoding="utf-8") as file:
                file.write(content)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Make an OSError of writing name the file that was asked for: that of a full disk names none, or a partial one."""
    try:
        yield
    except OSError as error:
        is_own = error.filename is None or str(error.filename).endswith((".partial", ".writing"))
        if error.errno is None or not (is_own or error.errno in (ENOSPC, EDQUOT, EFBIG)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def require_writable(path: Path, what: str) -> None:
    """Raise ValueError if the file cannot be written. what: the option that names it, for the message."""
    if path.is_dir():
        raise ValueError(f"{what} is {str(path)!r}, which is a folder: name a file, such as {str(path / 'result')!r}")
    if path.exists() and not path.is_file():  # a device or pipe
        return
    if not path.parent.is_dir():
        raise ValueError(f"{what} is {str(path)!r}, but {path.parent} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):  # permissions do not suffice
            pass
    except OSError as error:
        raise ValueError(f"{what} is {str(path)!r}, where nothing can be written: {error.strerror or error}") from error


def require_writable_folder(folder: Path, what: str) -> None:
    """Raise ValueError if the folder cannot be made or written to. Nothing of it is made yet."""
    try:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists() or each.is_symlink())
        if not there.is_dir():
            raise ValueError(f"{what} is {str(folder)!r}, but {there} is not a folder")
        # Permissions do not suffice: a file system may be read-only, full, or refuse new files, as /proc does.
        os.rmdir(tempfile.mkdtemp(prefix=".stretto-", dir=there))
    except OSError as error:
        raise ValueError(
            f"{what} is {str(folder)!r}, where nothing can be written: {error.strerror or error}"
        ) from error


def hide_folder(path: Path) -> Path | None:
    """Rename a folder that is to be deleted. Returns its new path; None if there is no such folder."""
    if not os.path.lexists(path):  # a link to nothing is there, too
        return None
    hidden = path.with_name(f".{path.name}.deleting")
    if os.path.lexists(hidden):
        delete_tree(hidden)
    return path.rename(hidden)


def delete_tree(path: Path) -> None:
    """Delete a folder or file at `path`. If it is a symbolic link, only the link is deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
