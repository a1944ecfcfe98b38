# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule on processes of this machine, times it and checks its results."""

import re
import time
from dataclasses import dataclass
from functools import reduce
from statistics import median

import torch
from torch import Tensor

from stretto.collectives.executor import REDUCTIONS, run_on_processes
from stretto.collectives.schedule import Schedule

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
MAX_BYTES = 2**31
MAX_PROCESSES = 256
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class HostBenchmark:
    """The result of a benchmark on the host.

    bytes: the size of a rank's larger buffer; seconds: the median of the runs, with the start of their processes;
    wrong: the number of output elements, over all ranks, that differ from what the collective promises.
    """

    ranks: int
    bytes: int
    seconds: float
    wrong: int


def run_host_benchmark(
    schedule: Schedule,
    size: str,
    dtype: str,
    reduction: str = "sum",
    *,
    repeats: int = 1,
    slots: int | None = None,
    in_place: bool | None = None,
) -> HostBenchmark:
    """Run a verified schedule on random numbers whose sums are exact, and count wrong results.

    size: bytes of a rank's larger buffer, as 4096, 64K, 1M or 1G, rounded down to whole chunks, at least one element
    each; dtype: a key of DTYPES; reduction: "sum", "max", "min" or "prod"; in_place: None takes what the schedule is
    meant for. Raises ValueError for any other, and for buffers or ranks that this machine has no room for.
    """
    if dtype not in DTYPES:
        raise ValueError(f"the dtypes are {', '.join(DTYPES)}, not {dtype!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"the reductions are {', '.join(REDUCTIONS)}, not {reduction!r}")
    collective = schedule.collective
    if collective.ranks > MAX_PROCESSES:
        raise ValueError(
            f"{collective.ranks} ranks are too many processes to be tried on one machine: at most {MAX_PROCESSES}"
        )
    itemsize = DTYPES[dtype].itemsize
    chunk = max(1, read_size(size) // max(1, collective.chunks_per_loop) // itemsize)
    buffer_bytes = chunk * collective.chunks_per_loop * itemsize
    if buffer_bytes > MAX_BYTES:
        raise ValueError(f"a buffer of {buffer_bytes} bytes is too large to be tried on processes: at most {MAX_BYTES}")
    inputs = [
        _numbers(collective.input_chunks * chunk, DTYPES[dtype], reduction, rank) for rank in range(collective.ranks)
    ]
    seconds, wrong = [], 0
    for _ in range(repeats):
        begin = time.perf_counter()
        outputs = run_on_processes(schedule, inputs, reduction=reduction, slots=slots, in_place=in_place)
        seconds.append(time.perf_counter() - begin)
        wrong = max(wrong, _count_wrong(schedule, inputs, outputs, chunk, reduction))
    return HostBenchmark(collective.ranks, buffer_bytes, median(seconds), wrong)


def read_size(text: str) -> int:
    """Bytes as people write them: 4096, 64K, 1M, 1G, in powers of 1024. ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no size: write 4096, 64K, 1M or 1G")
    return int(match[1]) * _UNITS[match[2].upper()]


def _numbers(elements: int, dtype: torch.dtype, reduction: str, rank: int) -> Tensor:
    """Small whole numbers, so that every order of additions gives the same, also in bf16; 1 and 2 for products."""
    generator = torch.Generator().manual_seed(rank)
    if reduction == "prod":
        return torch.randint(1, 3, (elements,), generator=generator).to(dtype)
    low = 0 if dtype is torch.uint8 else -2
    return torch.randint(low, 3, (elements,), generator=generator).to(dtype)


def _count_wrong(schedule: Schedule, inputs: list[Tensor], outputs: list[Tensor], chunk: int, reduction: str) -> int:
    collective = schedule.collective
    given = [tensor.view(-1, chunk) for tensor in inputs]
    wrong = 0
    for rank, output in enumerate(outputs):
        for index, found in enumerate(output.view(-1, chunk)):
            expected = collective.expected(rank, index)
            if expected is not None:
                wanted = reduce(REDUCTIONS[reduction], (given[giver][at] for giver, at in expected))
                wrong += int((found != wanted).sum())
    return wrong
