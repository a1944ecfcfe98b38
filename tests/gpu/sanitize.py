# SPDX-License-Identifier: Apache-2.0
"""Small calls of every protocol, for compute-sanitizer: `make gpu-sanitize`. Exit status 1 for a wrong number.

Every kernel of a protocol is compiled and called a few times, on sizes that fill and that leave parts of a thread
block's work, at aligned and unaligned addresses, as a schedule's own kernel, interpreted and by copy engines.
"""

import itertools
import sys

import torch
import torch.distributed as dist

from stretto.bench.harness import run_ranks
from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.parallel import Grid

ALL_REDUCES = ("one-shot-all-reduce", "two-shot-all-reduce", "ring-all-reduce")
SIZES, OFFSETS = (1, 1000, 30_011), (0, 3)
TIME_LIMIT = 120.0  # kernels run a hundred times slower than they are


def call_all(ranks: int) -> int:
    """Return how many calls gave a wrong number on this rank."""
    Grid(data=ranks, device="cuda")
    communicator = CudaCommunicator(timeout=TIME_LIMIT)
    wrong = 0
    for name, protocol in itertools.product(ALL_REDUCES, ("LL", "LL128", "Simple", "Copy")):
        if protocol == "Copy" and name != "two-shot-all-reduce":
            continue
        schedule = ALGORITHMS[name].compile(ranks=ranks, in_place=True)
        variant = Variant("float32", "sum", protocol, 2)
        kernels = [communicator.load(schedule, variant, in_place=True)]
        if protocol != "Copy":
            kernels.append(InterpretedSchedule(schedule, communicator.workspace, variant, in_place=True))
        for kernel, size, offset in itertools.product(kernels, SIZES, OFFSETS):
            x = torch.full((size * kernel.block_chunks + offset,), float(dist.get_rank() + 1), device="cuda")[offset:]
            kernel(x)
            torch.cuda.synchronize()
            wrong += not bool((x == ranks * (ranks + 1) / 2).all())
    communicator.workspace.check()
    return wrong


if __name__ == "__main__":
    count = min(2, torch.cuda.device_count())
    if count < 2:
        sys.exit("this takes two GPUs")
    found = run_ranks(count, call_all, count)
    print(f"{found} wrong calls")
    sys.exit(bool(found))
