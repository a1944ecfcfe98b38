# SPDX-License-Identifier: Apache-2.0
"""Reads cluster files, presets and other untrusted files, whose size is bounded before they are read."""

import tomllib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from stat import S_ISREG
from typing import Any

from stretto.suggestions import did_you_mean_file

LARGEST_FILE = 256 * 1024  # bytes; a preset has about 3 KB
LONGEST_LINE = 4096  # characters; tomllib's time grows with the square of a dotted key's parts
DEEPEST = 32  # tables and lists one in another; no file that Stretto reads needs more than a few


def preset_names() -> tuple[str, ...]:
    """The presets that ship with the package, sorted."""
    entries = files("stretto.cluster").joinpath("presets").iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


def read_preset(name: str) -> str:
    return files("stretto.cluster").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")


def read(path: Path, presets: Sequence[str]) -> str:
    """The text of a cluster file. Raises ValueError for a file that is missing, too large, or not UTF-8."""
    if not path.is_file():  # also refuses pipes and devices, which may never end
        hint = f'; Cluster.preset("{path}") is the preset of that name' if str(path) in presets else ""
        near = hint or did_you_mean_file(path, (".toml",))
        raise ValueError(f"{path}: there is no such file{near}")
    try:
        text = read_bounded(path, LARGEST_FILE, "a cluster file").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > LONGEST_LINE:
            raise ValueError(f"{path}: line {number} has {len(line)} characters; {LONGEST_LINE} is the most")
    return text


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError that names the file and, where the parser reports it, the line."""
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and what int() says of thousands of digits
        raise ValueError(
            f"{where}: is not valid TOML, as a cluster file is (`stretto cluster list`, `stretto probe`): {error}. A "
            "network's graph is --topology of `stretto simulate`"
        ) from None
    except RecursionError:
        raise ValueError(f"{where}: is nested too deeply for a cluster file") from None
    check_depth(values, where)
    return values


def check_depth(values: object, where: str) -> None:
    """Raise ValueError for data nested deeper than DEEPEST, on which recursive code, such as repr, could fail.

    TOML's dotted keys nest tables without recursion of its parser. `where` names the data in the error's message.
    """
    level = [values]
    for _ in range(DEEPEST):
        containers = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(f"{where}: is nested too deeply: at most {DEEPEST} tables or lists may lie in one another")


@contextmanager
def reading(path: Path, suffixes: Collection[str] = ()) -> Iterator[None]:
    """Convert an OSError in the block into a ValueError that names the file, and the most similar one that is there."""
    try:
        yield
    except OSError as error:
        near = did_you_mean_file(path, suffixes) if isinstance(error, FileNotFoundError) else ""
        raise ValueError(f"{error.filename or path}: cannot be read: {error.strerror or error}{near}") from error


def read_bounded(path: Path, max_bytes: int, what: str) -> bytes:
    """Read an untrusted file; `what` describes it for error messages: "a configuration". For all layers above, too.

    ValueError, which names the path, for a file of more than max_bytes, before it is read, for one that is compressed
    by gzip, and for what is no regular file. OSError where it cannot be read.
    """
    status = path.stat()
    if not S_ISREG(status.st_mode):  # reading a pipe might never end, or never begin
        raise ValueError(f"{path}: is not a regular file")
    content = b""
    most = min(max_bytes, max(status.st_size, 2**20))  # `read` allocates all that it is asked for
    if status.st_size <= max_bytes:
        with path.open("rb") as file:
            content = file.read(most + 1)
    if len(content) > most and most < max_bytes:
        raise ValueError(f"{path}: grows while it is read")
    if max(status.st_size, len(content)) > max_bytes:  # it may have grown since
        raise ValueError(f"{path}: is larger than {max_bytes} bytes, the most {what} may have")
    if content.startswith(b"\x1f\x8b"):
        raise ValueError(f"{path}: is compressed: unpack it with gunzip")
    return content
