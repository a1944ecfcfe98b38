# SPDX-License-Identifier: Apache-2.0
"""Measures how long a step's NCCL kernels run on this rank's GPU, by torch's flight recorder.

A kernel of NCCL runs until all ranks of its group have sent their parts, so it runs longest on ranks that wait, and
shortest on the rank that the others wait for. With TORCH_NCCL_ENABLE_TIMING=1 torch records an event on the device
before each collective, too, and its watchdog thread writes the time between both events into the recorder when the
collective has finished (`duration_ms`). Nothing waits for the device. Collectives in a CUDA graph are not recorded.

The recorder's buffer is read as JSON, in 30 to 50 ms for 2,000 collectives, in which Python's interpreter lock is held.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

TIMING = "TORCH_NCCL_ENABLE_TIMING"
SETTINGS = {
    "TORCH_FR_BUFFER_SIZE": "2000",  # entries: the collectives of several steps
    # An event more on the device for each collective of NCCL, and a query of it when it has finished.
    TIMING: "1",
}
OLD_NAMES = {TIMING: "NCCL_ENABLE_TIMING"}  # torch knows them, too

READING = 0.05  # seconds in which a reading may keep the main thread from going on
SHARE = 5e-4  # of the training's time, at most, for readings
FIRST_WINDOWS = 4  # all of them are read, so that short runs are measured, too: 0.2 s of a run at most

StepStart = tuple[int, int]
"""A step's number, and the Unix time at which it was seen to have begun, in nanoseconds."""


def is_due(window: int, windows_before: int, seconds: float) -> bool:
    """Decide whether to read the recorder at the end of this window of steps, which took so many seconds.

    All ranks must read in the same windows. Their seconds are almost the same, but not quite: a rank reads in all
    windows that powers of two divide, so that ranks which disagree have half of their windows in common.
    """
    if windows_before < FIRST_WINDOWS:
        return True
    apart = READING / SHARE / max(seconds, 1e-9)
    return window % 2 ** max(0, math.ceil(math.log2(apart))) == 0


def read_seconds(starts: Sequence[StepStart]) -> tuple[float, float] | None:
    """Seconds of a step, and those of them in which NCCL's collectives ran, in the last steps that the recorder has.

    None if there are none, as where collectives are gloo's or are in a CUDA graph, or if they are not timed.
    """
    return seconds_in_collectives(nccl_entries(), starts)


def environment(*, times_nccl: bool) -> dict[str, str]:
    """The environment variables that switch torch's flight recorder on, without those that the user has set.

    times_nccl: also record how long NCCL's kernels run. Not for steps that a CUDA graph holds: it would capture the
    events, which are not read.
    """
    return {
        name: value
        for name, value in SETTINGS.items()
        if not {name, OLD_NAMES.get(name, name)} & os.environ.keys() and (times_nccl or name != TIMING)
    }


def nccl_entries() -> list[dict[str, Any]]:
    """The entries of NCCL's collectives, oldest first; none where torch is built without NCCL, or has no recorder."""
    with suppress(ImportError, RuntimeError, ValueError):
        from torch._C._distributed_c10d import _dump_nccl_trace_json  # type: ignore[attr-defined]

        return list(json.loads(_dump_nccl_trace_json(True, False)).get("entries", ()))
    return []


class NcclWindows:
    """Measures windows of steps by NCCL's kernels, for `counters.measure_windows`."""

    def __init__(self) -> None:
        self._begun = 0  # windows that were due
        self._has_nccl = self._gave_up = False

    def __call__(
        self, number: int, steps: Sequence[StepStart], host: tuple[float, float]
    ) -> tuple[float, float] | None:
        """Seconds of a step, and of waits in it; None to leave the window out.

        host: the same two by the host's waits. Raises LookupError where NCCL's times are not to be had.
        """
        a_step, waited = host
        if self._gave_up:
            raise LookupError("NCCL's collectives are not recorded")
        if not is_due(number, self._begun, len(steps) * a_step):
            return None
        self._begun += 1
        read = read_seconds(steps)
        if read is not None:
            self._has_nccl = True
            share, (a_step, in_nccl) = waited / max(a_step, 1e-9), read
            # Kernels of a rank that launches them first wait in every step, though all hosts be equally slow: a rank
            # whose host never waits is not delayed by others.
            return a_step, min(in_nccl, share * a_step)
        if self._has_nccl:  # the other ranks have it, probably
            return None
        self._gave_up = self._begun == FIRST_WINDOWS
        raise LookupError("no collective of NCCL is recorded yet")


def seconds_in_collectives(
    entries: Iterable[Mapping[str, Any]], starts: Sequence[StepStart]
) -> tuple[float, float] | None:
    """Compute what `read_seconds` returns from entries of the recorder.

    Collectives of groups that run at the same time are added up. Operations that were enqueued as one are
    recorded as such, with a time, and one by one, without.
    """
    oldest, timed = None, []
    for entry in entries:
        created = int(entry["time_created_ns"])
        oldest = created if oldest is None else min(oldest, created)
        if entry.get("duration_ms") is not None:
            timed.append((created, float(entry["duration_ms"])))
    if oldest is None or not timed:
        return None
    # Before the oldest entry, collectives were overwritten; after the newest that has finished, others still run.
    newest = max(created for created, _ in timed)
    whole = [(step, at) for step, at in starts if oldest <= at <= newest]
    if len(whole) < 2 or whole[-1][0] <= whole[0][0]:
        return None
    (first, begin), (last, end) = whole[0], whole[-1]
    in_nccl = sum(duration for created, duration in timed if begin <= created < end) / 1e3
    return (end - begin) / 1e9 / (last - first), in_nccl / (last - first)
