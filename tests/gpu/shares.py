# SPDX-License-Identifier: Apache-2.0
"""Finds the MPS percentages with which processes on one GPU have multiprocessors of their own.

    python -m tests.gpu.shares --out shares.json

For each number of processes and each percentage, every process launches a kernel with more blocks than fit on the GPU.
A block takes most of a multiprocessor's shared memory, so that each multiprocessor holds one, and waits until the host
releases it. Once all processes have launched, the resident blocks are counted. If a process has fewer than it sees
multiprocessors, other processes hold some of them. The percentages of `stretto.memory.mps.share_for` show no such
overlap.

The processes call only CUDA's driver, since importing torch would take longer than everything else.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from datetime import date
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from stretto.memory.mps import QUEUES, mps_daemon, share_for

_SOURCE = """
extern "C" __global__ void hold(volatile int *stop, int *held) {
    if (threadIdx.x == 0) {
        atomicAdd_system(held, 1);
        while (*stop == 0) __nanosleep(1000);
    }
}
"""
_SHARED_BYTES = 200 << 10  # of the 227 KB that a block can have on sm_90
_BLOCKS = 256  # more than there are multiprocessors
_SECONDS = 0.15  # in which all blocks that have a place begin
_LIMIT = 30.0
SWEEP = {
    2: (50, 49, 48, 47),
    3: (33, 32, 31, 30),
    4: (25, 23, 22, 21, 20),
    5: (20, 17, 16, 15, 14, 13),
    6: (16, 15, 14, 13),
    7: (14, 13, 12),
    8: (12, 11),
}
"""Percentages to try, by the number of processes."""

_MULTIPROCESSORS, _MAX_SHARED_BYTES = 16, 8  # CU_DEVICE_ATTRIBUTE_... and CU_FUNC_ATTRIBUTE_... of cuda.h


class _Driver:
    """Calls of libcuda that raise RuntimeError with the name of what failed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)

        def call(*args: Any) -> None:
            error = function(*args)
            if error:
                raise RuntimeError(f"{name} failed with CUresult {error}")

        return call


def hold(rank: int, percentage: int, cubin: bytes, barrier: Barrier, found: "SynchronizedArray[int]") -> None:
    """One process. found: receives the multiprocessors that it sees, and those that it holds beside all others."""
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percentage)
    driver = _Driver()
    context, module, kernel, host = (ctypes.c_void_p() for _ in range(4))
    count = ctypes.c_int()
    driver.cuInit(0)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    driver.cuCtxSetCurrent(context)
    driver.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSORS, 0)
    driver.cuModuleLoadData(ctypes.byref(module), cubin)
    driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"hold")
    driver.cuFuncSetAttribute(kernel, _MAX_SHARED_BYTES, _SHARED_BYTES)
    driver.cuMemHostAlloc(ctypes.byref(host), 4096, 0)
    assert host.value is not None
    words = (ctypes.c_int * 2).from_address(host.value)
    words[0] = words[1] = 0
    arguments = [ctypes.c_void_p(host.value), ctypes.c_void_p(host.value + 4)]
    pointers = (ctypes.c_void_p * 2)(*[ctypes.addressof(each) for each in arguments])
    barrier.wait()
    driver.cuLaunchKernel(kernel, _BLOCKS, 1, 1, 128, 1, 1, _SHARED_BYTES, None, pointers, None)
    time.sleep(_SECONDS)
    held = words[1]
    barrier.wait()
    words[0] = 1
    driver.cuCtxSynchronize()
    found[2 * rank], found[2 * rank + 1] = count.value, held
    barrier.wait()


def count_held(processes: int, percentage: int, cubin: bytes) -> list[tuple[int, int]]:
    """(multiprocessors that it sees, that it holds) of each process. Raises RuntimeError if one fails."""
    spawn = multiprocessing.get_context("fork")
    barrier, found = spawn.Barrier(processes, timeout=_LIMIT), spawn.Array("i", 2 * processes)
    ranks = [spawn.Process(target=hold, args=(rank, percentage, cubin, barrier, found)) for rank in range(processes)]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(2 * _LIMIT)
        failed = [rank.exitcode for rank in ranks if rank.exitcode != 0]
        if failed:
            raise RuntimeError(f"{len(failed)} of {processes} processes with {percentage}% failed: {failed}")
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    numbers = found[:]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep, print a line for each percentage, and return 1 if one of `share_for` makes processes overlap."""
    parser = argparse.ArgumentParser(description="Which MPS percentages give processes multiprocessors of their own.")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    given = parser.parse_args(arguments)
    rows, wrong = [], []
    with mps_daemon(100) as variables:
        os.environ.update(variables | {QUEUES: "2"})  # the daemon's are those of one process with all of the GPU
        with multiprocessing.get_context("fork").Pool(1) as pool:  # CUDA, once used, does not outlive a fork
            cubin, device = pool.apply(_compile)
        for processes, percentages in SWEEP.items():
            for percentage in sorted({*percentages, share_for(processes)}, reverse=True):
                held = count_held(processes, percentage, cubin)
                is_apart = all(seen == had for seen, had in held)
                is_ours = percentage == share_for(processes)
                rows.append(
                    {
                        "processes": processes,
                        "percentage": percentage,
                        "multiprocessors": held[0][0],
                        "held": [had for _, had in held],
                        "is_apart": is_apart,
                        "is_ours": is_ours,
                    }
                )
                if is_ours and not is_apart:
                    wrong.append(processes)
                print(f"{processes} processes, {percentage}%: each sees {held[0][0]} multiprocessors and they hold "
                      f"{[had for _, had in held]}{'' if is_apart else ': they overlap'}"
                      f"{' (share_for)' if is_ours else ''}", flush=True)  # fmt: skip
    if given.out is not None:
        about = {"date": date.today().isoformat(), "device": device}
        given.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    if wrong:
        print(f"share_for gives overlapping shares to {', '.join(map(str, wrong))} processes", file=sys.stderr)
    return int(bool(wrong))


def _compile() -> tuple[bytes, str]:
    """The kernel, and the name of the GPU."""
    from stretto.collectives.executor.cuda.nvrtc import compile_source

    driver = _Driver()
    driver.cuInit(0)
    name, major, minor = ctypes.create_string_buffer(100), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGetName(name, len(name), 0)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    return compile_source(_SOURCE, f"sm_{major.value}{minor.value}"), name.value.decode()


if __name__ == "__main__":
    sys.exit(main())
