"""Reads files that somebody has given, of bounded size; here, since every layer may import it."""

from pathlib import Path
from stat import S_ISREG


def read_bounded(path: Path, max_bytes: int, what: str) -> bytes:
    """The content of a file that is not trusted; `what` it is, for people: "a configuration".

    ValueError, which names the path, for a file of more than max_bytes, before it is read, and for what is no regular
    file. OSError where it cannot be read.
    """
    status = path.stat()
    if not S_ISREG(status.st_mode):  # a pipe might never end, or never begin
        raise ValueError(f"{path}: is not a regular file")
    content = b""
    if status.st_size <= max_bytes:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    if max(status.st_size, len(content)) > max_bytes:  # it may have grown meanwhile
        raise ValueError(f"{path}: is larger than {max_bytes} bytes, the most {what} may have")
    return content
