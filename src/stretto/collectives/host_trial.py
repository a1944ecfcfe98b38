# SPDX-License-Identifier: Apache-2.0
"""Checks the options of a schedule's test run on processes of this machine (`host_benchmark`). Imports no torch."""

import re
from typing import NamedTuple

from stretto.collectives.schedule import Schedule
from stretto.suggestions import did_you_mean

ITEMSIZES = {
    "fp64": 8,
    "fp32": 4,
    "fp16": 2,
    "bf16": 2,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}
"""The dtypes, and bytes of an element."""

REDUCTIONS = ("sum", "max", "min", "prod")
MAX_BYTES = 2**31
MAX_PROCESSES = 256
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


class HostTrial(NamedTuple):
    """Elements of a chunk, and bytes of a rank's larger buffer."""

    chunk: int
    buffer_bytes: int


def plan_trial(schedule: Schedule, size: str, dtype: str, reduction: str, in_place: bool | None = None) -> HostTrial:
    """Size the buffers of a schedule's trial.

    size: bytes of a rank's larger buffer, as 4096, 64K, 1M or 1G, rounded down to whole chunks, at least one element
    each; dtype: a key of ITEMSIZES; reduction: one of REDUCTIONS; in_place: None for the schedule's own setting.
    Raises ValueError for any other, and for buffers or ranks that a machine has no room for.
    """
    if dtype not in ITEMSIZES:
        raise ValueError(f"the dtypes are {', '.join(ITEMSIZES)}, not {dtype!r}{did_you_mean(dtype, ITEMSIZES)}")
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"the reductions are {', '.join(REDUCTIONS)}, not {reduction!r}{did_you_mean(reduction, REDUCTIONS)}"
        )
    if in_place is not None and not (schedule.in_place if in_place else schedule.out_of_place):
        raise ValueError(f"the schedule {schedule.name} runs {'out of place' if in_place else 'in place'} only")
    collective = schedule.collective
    if collective.ranks > MAX_PROCESSES:
        raise ValueError(
            f"{collective.ranks} ranks are too many processes to be tried on one machine: at most {MAX_PROCESSES}"
        )
    itemsize = ITEMSIZES[dtype]
    chunk = max(1, read_size(size) // max(1, collective.chunks_per_loop) // itemsize)
    buffer_bytes = chunk * collective.chunks_per_loop * itemsize
    if buffer_bytes > MAX_BYTES:
        raise ValueError(f"a buffer of {buffer_bytes} bytes is too large to be tried on processes: at most {MAX_BYTES}")
    return HostTrial(chunk, buffer_bytes)


def read_size(text: str) -> int:
    """Parse a size: 4096, 64K, 1M or 1G, in powers of 1024. ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no size: write 4096, 64K, 1M or 1G")
    return int(match[1]) * _UNITS[match[2].upper()]
