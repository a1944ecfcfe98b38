# SPDX-License-Identifier: Apache-2.0
"""A full disk: no file of this process may grow beyond some bytes, as if its file system had no room for more."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """Let writing fail (EFBIG, since Python ignores SIGXFSZ) at byte `size` of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
