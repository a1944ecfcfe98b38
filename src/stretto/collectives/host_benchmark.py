# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule on processes of this machine, times it and checks its results."""

import time
from dataclasses import dataclass
from functools import reduce
from statistics import median

import torch
from torch import Tensor

from stretto.collectives.executor import REDUCTIONS, run_on_processes
from stretto.collectives.host_trial import plan_trial
from stretto.collectives.schedule import Schedule

_TORCH_DTYPES = {
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

    size, dtype, reduction, in_place: as `plan_trial` takes them. Raises ValueError as it does.
    """
    collective = schedule.collective
    trial = plan_trial(schedule, size, dtype, reduction, in_place)
    chunk = trial.chunk
    inputs = [
        _numbers(collective.input_chunks * chunk, _TORCH_DTYPES[dtype], reduction, rank)
        for rank in range(collective.ranks)
    ]
    seconds, wrong = [], 0
    for _ in range(repeats):
        begin = time.perf_counter()
        outputs = run_on_processes(schedule, inputs, reduction=reduction, slots=slots, in_place=in_place)
        seconds.append(time.perf_counter() - begin)
        wrong = max(wrong, _count_wrong(schedule, inputs, outputs, chunk, reduction))
    return HostBenchmark(collective.ranks, trial.buffer_bytes, median(seconds), wrong)


def _numbers(elements: int, dtype: torch.dtype, reduction: str, rank: int) -> Tensor:
    """Small whole numbers, so that every order of additions gives the same, also in bf16; 1 and 2 for products."""
    generator = torch.Generator().manual_seed(rank)
    if reduction == "prod":
        return torch.randint(1, 3, (elements,), generator=generator, device="cpu").to(dtype)
    low = 0 if dtype is torch.uint8 else -2
    return torch.randint(low, 3, (elements,), generator=generator, device="cpu").to(dtype)


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
