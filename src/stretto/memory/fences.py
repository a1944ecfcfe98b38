# SPDX-License-Identifier: Apache-2.0
"""Memory fences for counters that one process stores and another loads, without atomic operations."""

import ctypes
import os
import platform
from collections.abc import Callable

_TOTAL_STORE_ORDER = {"x86_64", "AMD64", "i686", "i386", "s390x"}
_MEMBARRIER = {"aarch64": 283, "riscv64": 283, "loongarch64": 283, "ppc64le": 365, "x86_64": 324}  # system call numbers
_GLOBAL_EXPEDITED = 1 << 1


def find_fence() -> Callable[[], None] | None:
    """A full memory fence to call between the data and the counter, on both sides; None where the CPU needs none.

    Counters and data are stored and loaded by separate calls into compiled code (torch, memoryview), which no compiler
    reorders; only the CPU could. x86 and s390x keep stores ordered with stores, and loads with loads and with later
    stores, which is all that publishing, reading and freeing need; a copy that bypasses the cache ends with a fence of
    its own (sfence, in glibc). Other CPUs guarantee none of that, and Python has no fence. There it is the system call
    membarrier, which is a full barrier for its caller too (smp_mb() at its entry and exit, in Linux's
    kernel/sched/membarrier.c). OSError where it is missing.
    """
    if platform.machine() in _TOTAL_STORE_ORDER:
        return None
    return membarrier()


def membarrier() -> Callable[[], None]:
    """The system call membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED) as a fence; OSError where the system has none."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None or platform.system() != "Linux":
        raise OSError(f"no memory fence is known for {platform.system()} on {platform.machine()}")
    call = ctypes.CDLL(None, use_errno=True).syscall

    def fence() -> None:
        if call(number, _GLOBAL_EXPEDITED, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"membarrier: {os.strerror(code)}")

    fence()
    return fence
