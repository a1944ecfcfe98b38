# SPDX-License-Identifier: Apache-2.0
"""Removes the shared memory that killed ranks leave in /dev/shm: NCCL's and torch's segments have names there.

Stretto's own has none (`stretto.memory`): it is gone with the last process that has it mapped.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
PATTERNS = ("nccl-*", "torch_*", "sem.mp-*", "cuda.shm.*", "nvshmem*")


def list_segments(folder: Path = FOLDER) -> set[str]:
    """The names of this user's segments of the kinds that ranks make."""
    found = set()
    for pattern in PATTERNS:
        for path in folder.glob(pattern):
            with suppress(OSError):  # it has gone meanwhile
                if path.stat().st_uid == os.getuid():
                    found.add(path.name)
    return found


def remove_orphans(before: set[str], folder: Path = FOLDER) -> set[str]:
    """Delete the segments that were not there before and that no process has open or mapped. Returns their names.

    Another job of this user may have made segments meanwhile: its processes have them, so that they stay.
    """
    new = list_segments(folder) - before
    if not new:
        return set()
    orphans = new - set(_names_in_use(folder))
    for name in orphans:
        with suppress(OSError):
            (folder / name).unlink()
            logger.info("removed %s, which a killed rank had left", folder / name)
    return orphans


def _names_in_use(folder: Path) -> Iterator[str]:
    """The names of all files in the folder that a process of this user has mapped or open."""
    prefix = f"{folder.resolve()}/"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of another user, or it has ended
            for line in (process / "maps").read_text(errors="replace").splitlines():
                path = line.partition(prefix)[2]
                if path:
                    yield path.removesuffix(" (deleted)")
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith(prefix):
                        yield target.removeprefix(prefix).removesuffix(" (deleted)")
