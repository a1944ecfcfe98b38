# SPDX-License-Identifier: Apache-2.0
"""Checks the options of a schedule's test run on processes of this machine (`host_benchmark`). Imports no torch."""

from typing import NamedTuple

from stretto.collectives.schedule import Schedule
from stretto.quantities import read_bytes
from stretto.suggestions import did_you_mean

ITEMSIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1}
"""The dtypes, and bytes of an element."""

REDUCTIONS = ("sum", "max", "min", "prod")
MAX_BYTES = 2**31
MAX_PROCESSES = 256


class HostTrial(NamedTuple):
    """Elements of a chunk, and bytes of a rank's larger buffer."""

    chunk: int
    buffer_bytes: int


def plan_trial(schedule: Schedule, size: str, dtype: str, reduction: str, in_place: bool | None = None) -> HostTrial:
    """Size the buffers of a schedule's trial.

    size: bytes of a rank's larger buffer, as `read_bytes` takes them, rounded down to whole chunks; dtype: a key of
    ITEMSIZES; reduction: one of REDUCTIONS; in_place: None for the schedule's own setting.
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
    least = max(1, collective.chunks_per_loop) * ITEMSIZES[dtype]  # one element a chunk
    chunk = read_bytes(size) // least
    if not chunk:
        raise ValueError(f"{size} is less than one element of {dtype} for each chunk; {least} bytes would do")
    buffer_bytes = chunk * least
    if buffer_bytes > MAX_BYTES:
        raise ValueError(f"a buffer of {buffer_bytes} bytes is too large to be tried on processes: at most {MAX_BYTES}")
    return HostTrial(chunk, buffer_bytes)
