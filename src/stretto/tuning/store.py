# SPDX-License-Identifier: Apache-2.0
"""Times that were measured on this machine, by what was measured, in one JSON file."""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.atomic_files import write_atomically
from stretto.cluster import read_bounded, reading
from stretto.native_code import cache_folder

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20


class TuningStore:
    """Keeps the measured seconds of each choice (a kernel configuration, a GEMM layout), by machine and by key.

    A key names the problem, its sizes and, where it has one time only, the choice.

    `path`: the file (default: tuning.json in $STRETTO_CACHE, or in ~/.cache/stretto). A file that cannot be read or
    written costs a warning and the time to measure again, never the run.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "tuning.json"

    def read(self, machine: str) -> dict[str, tuple[float, ...]]:
        """Read what is known of a machine: each key's seconds, one number for each choice that the key covers.

        Values that are no times are left out.
        """
        known = self._load().get(machine, {})
        if not isinstance(known, dict):
            return {}
        return {key: tuple(times) for key, times in known.items() if _are_times(times)}

    def add(self, machine: str, measured: Mapping[str, Sequence[float]]) -> None:
        """Add to what is known, whole or not at all: others may be reading and writing."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            everything = self._load()
            of_machine = everything.get(machine)
            merged = (of_machine if isinstance(of_machine, dict) else {}) | {k: list(v) for k, v in measured.items()}
            write_atomically(self.path, json.dumps(everything | {machine: merged}))
        except OSError as error:
            logger.warning("measured times are not kept: %s: %s", self.path, error.strerror or error)

    def _load(self) -> dict[str, Any]:
        try:
            return _read_json(self.path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("the times in %s are measured again: %s", self.path, error)
            return {}


def read_times(path: Path) -> dict[str, dict[str, tuple[float, ...]]]:
    """The content of a store's file, by machine and key, for a file that the user has named.

    ValueError, which names the file, where it cannot be read or holds anything but times.
    """
    with reading(path, (".json",)):
        content = _read_json(path)
    for machine, known in content.items():
        if not isinstance(known, dict):
            raise ValueError(f"{path} is no file of measured times: {machine!r} has no table")
        for key, times in known.items():
            if not _are_times(times):
                raise ValueError(f"{path} has no seconds above 0 for {key!r}: {str(times)[:80]}")
    return {machine: {key: tuple(times) for key, times in known.items()} for machine, known in content.items()}


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object. OSError where it cannot be read; ValueError, which names the file, for what has none."""
    text = read_bounded(path, MAX_FILE_BYTES, "a file of measured times")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no file of measured times: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no file of measured times: it holds no table")
    return content


def _are_times(times: Any) -> bool:
    return isinstance(times, list) and all(
        isinstance(t, int | float) and not isinstance(t, bool) and 0 < t < math.inf for t in times
    )
