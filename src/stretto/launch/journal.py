# SPDX-License-Identifier: Apache-2.0
"""Keeps `out/restarts.jsonl`, a line for each failure of a run, and reads how far the ranks are."""

import json
import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stretto.atomic_files import write_atomically
from stretto.launch.job import LaunchJob

RESTARTS_FILE = "restarts.jsonl"

logger = logging.getLogger(__name__)


class StepWatch:
    """Sees when the ranks of an attempt have trained a step after step `after`, by the job's file of steps.

    Each attempt replaces the file when it begins, without the lines of steps after the one from which it continues.
    """

    def __init__(self, job: LaunchJob, after: int) -> None:
        self._job, self._after = job, after
        self._before = _state(job.steps_file)

    def has_trained(self) -> bool:
        """Check whether this attempt has written a step."""
        return self.reached() > self._after

    def reached(self) -> int:
        """The last step that this attempt has written; `after` before it begins. Steps of earlier attempts are not."""
        last = self._job.last_step() if _state(self._job.steps_file) != self._before else None
        return self._after if last is None else last


class Journal:
    """Appends failures to restarts.jsonl. Each line is written when a failure is known, and again when steps follow."""

    def __init__(self, out: Path) -> None:
        self._file = out / RESTARTS_FILE
        self._earlier: list[str] | None = None  # lines of earlier runs in this folder
        self._failures: list[dict[str, Any]] = []
        # time.monotonic() of the last failure, until a step follows it: the system's clock may be changed.
        self._failed_at: float | None = None

    @property
    def restarts(self) -> int:
        return sum(failure["restarted"] for failure in self._failures)

    @property
    def awaits_training(self) -> bool:
        return self._failed_at is not None

    def add(self, failed_at: float, values: dict[str, Any], *, restarted: bool) -> None:
        """Write a failure that happened at `failed_at` (seconds since the epoch) and is known since now."""
        now = time.time()
        self._failures.append(
            {"time": datetime.fromtimestamp(failed_at, UTC).isoformat(timespec="milliseconds")}
            | values
            | {"restarted": restarted, "seconds_until_named": round(max(0.0, now - failed_at), 3)}
            | {"seconds_until_training": None}
        )
        self._failed_at = time.monotonic() - max(0.0, now - failed_at) if restarted else None
        self._write()

    def cancel_restart(self) -> None:
        """Note that no restart follows the last failure after all."""
        self._failures[-1]["restarted"], self._failed_at = False, None
        self._write()

    def note_training(self) -> float:
        """Note that a step has followed the last failure. Returns the seconds since the failure."""
        assert self._failed_at is not None
        seconds = time.monotonic() - self._failed_at
        self._failures[-1]["seconds_until_training"] = round(seconds, 3)
        self._failed_at = None
        self._write()
        return seconds

    def _write(self) -> None:
        """Replace the file. A full disk must not end a run that could continue."""
        try:
            if self._earlier is None:
                # Remains of a crash of the machine, maybe not text, are not changed.
                known = self._file.read_text(encoding="utf-8", errors="surrogateescape") if self._file.is_file() else ""
                self._earlier = [line for line in known.split("\n") if line.strip()]
            lines = [*self._earlier, *map(json.dumps, self._failures)]
            text = "".join(f"{line}\n" for line in lines)
            write_atomically(self._file, text.encode(errors="surrogateescape"))
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._file, error.strerror or error)


def _state(file: Path) -> tuple[int, int, int] | None:
    """A stamp that shows whether the file was written since."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
